package gpu

import (
	"context"
	"errors"
	"os"
	"testing"

	"github.com/lockstep-ccl/lockstep/ccl/internal/cuda/cudatest"
)

func TestMain(m *testing.M) {
	stop, err := cudatest.Start(cudatest.Options{})
	if err != nil && !errors.Is(err, cudatest.ErrUnavailable) {
		panic(err)
	}
	code := m.Run()
	stop()
	os.Exit(code)
}

// TestAbortAfterClose: who aborts may not know that somebody else has closed meanwhile.
func TestAbortAfterClose(t *testing.T) {
	cudatest.Device(t, 0) // or skip
	c, err := New(context.Background(), Config{
		Size: 1, Dir: t.TempDir(), Stage: 2 << 20,
		Exchange: func(_ context.Context, b []byte) ([][]byte, error) { return [][]byte{b}, nil },
	})
	if err != nil {
		t.Fatal(err)
	}
	c.Abort()
	if !c.Aborted() {
		t.Error("Abort left no word")
	}
	if err := c.Close(context.Background()); err != nil {
		t.Error(err)
	}
	c.Abort()
}
