package gpu

import (
	"context"
	"errors"
	"os"
	"testing"

	"github.com/lockstep-ccl/lockstep/ccl/internal/cuda/cudatest"
	"github.com/lockstep-ccl/lockstep/record"
)

func TestMain(m *testing.M) {
	stop, err := cudatest.Start(cudatest.Options{GPUs: 4})
	if err != nil && !errors.Is(err, cudatest.ErrUnavailable) {
		panic(err)
	}
	code := m.Run()
	stop()
	os.Exit(code)
}

// TestAfterClose: who aborts, calls or copies may not know that somebody else has closed
// meanwhile.
func TestAfterClose(t *testing.T) {
	dev := cudatest.Device(t, 0) // or skip
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
	if err := c.CopyOut(make([]byte, 4), c.heap.Own()); err != nil { // makes its stream
		t.Error(err)
	}
	if err := c.Close(context.Background()); err != nil {
		t.Error(err)
	}
	c.Abort()
	own, err := dev.NewStream(0)
	if err != nil {
		t.Fatal(err)
	}
	defer own.Close()
	at, err := dev.Alloc(4096)
	if err != nil {
		t.Fatal(err)
	}
	defer dev.Free(at)
	s, b := Stream{Stream: own}, make([]byte, 16)
	_, begin := c.Begin(s)
	for what, err := range map[string]error{
		"Run":      c.Run(s, &Op{Coll: record.Broadcast, DType: record.Uint8, Count: 16, Send: at, Recv: at}),
		"Exchange": c.Exchange(s, record.Group, nil, 0),
		"Begin":    begin,
		"CopyIn":   c.CopyIn(at, b),
		"CopyOut":  c.CopyOut(b, at),
	} {
		if !errors.Is(err, ErrClosed) {
			t.Errorf("%s after Close: %v", what, err)
		}
	}
}
