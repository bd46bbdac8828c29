package cuda

import (
	"errors"
	"os"
	"strings"
	"testing"
)

// TestOptional: a driver without a function that few need is a driver.
func TestOptional(t *testing.T) {
	path := os.Getenv(LibraryEnv)
	if path == "" {
		t.Skip("no fake libcuda")
	}
	lookup, err := open(path)
	if err != nil {
		t.Fatal(err)
	}
	without := func(missing string) (*Driver, error) {
		return start(path, func(symbol string) uintptr {
			if symbol == missing {
				return 0
			}
			return lookup(symbol)
		})
	}
	drv, err := without("cuMemGetHandleForAddressRange")
	if err != nil {
		t.Fatal(err)
	}
	d, err := drv.Device(0)
	if err != nil {
		t.Fatal(err)
	}
	defer d.Close()
	if _, err := d.AllocExported(1); !errors.Is(err, ErrNotSupported) || !strings.Contains(err.Error(), "cuMemGetHandleForAddressRange") {
		t.Errorf("a DMA buffer without the call: %v", err)
	}
	if _, err := without("cuMemCreate"); !errors.Is(err, ErrNoDriver) {
		t.Errorf("a driver without cuMemCreate: %v", err)
	}
}
