package gpu

import (
	"testing"
	"time"

	"github.com/lockstep-ccl/lockstep/record"
)

// TestModulesAreApart: who loads the kernels of a type waits until the device is idle, and so for a rank
// of this process on the same device that is about to launch those of another type. Two ranks that share a
// GPU hung so, one of them while it loaded, the other while it waited for the lock on what was there.
func TestModulesAreApart(t *testing.T) {
	d := new(device)
	there := func() (funcs, error) { return funcs{}, nil }
	loading, launched := make(chan struct{}), make(chan struct{})
	go func() { // the rank that is behind: it comes while this type is loaded, and goes on when it is
		defer close(launched)
		<-loading
		for _, m := range []*module{&d.reduce[record.Int32], &d.reducePeers[record.Int32], &d.move, &d.movePeers} {
			if _, err := m.of(there); err != nil {
				t.Error(err)
			}
		}
	}()
	if _, err := d.reduce[record.Int32].of(func() (funcs, error) {
		close(loading)
		time.Sleep(10 * time.Millisecond) // it likely waits by then
		return funcs{}, nil
	}); err != nil {
		t.Fatal(err)
	}
	for _, m := range []*module{&d.reduce[record.BFloat16], &d.reducePeers[record.BFloat16]} {
		if _, err := m.of(func() (funcs, error) {
			select {
			case <-launched:
			case <-time.After(10 * time.Second):
				t.Error("a rank waits for kernels that are there")
			}
			return funcs{}, nil
		}); err != nil {
			t.Fatal(err)
		}
	}
}
