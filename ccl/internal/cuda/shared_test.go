package cuda_test

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"sync"
	"syscall"
	"testing"
	"unsafe"

	"github.com/lockstep-ccl/lockstep/ccl/internal/cuda"
	"github.com/lockstep-ccl/lockstep/ccl/internal/cuda/cudatest"
)

// A child maps the descriptor that it inherits as number 3 and adds one.
func child() {
	drv, err := cuda.Open()
	if err == nil {
		var d *cuda.Device
		if d, err = drv.Device(1); err == nil {
			err = increment(d, 3)
		}
	}
	if err != nil {
		fmt.Println(err)
		os.Exit(1)
	}
}

func increment(d *cuda.Device, fd int) error {
	n, err := d.Granularity()
	if err != nil {
		return err
	}
	h, err := d.Import(fd)
	if err != nil {
		return err
	}
	p, err := d.Reserve(n, 0)
	if err != nil {
		return err
	}
	err = errors.Join(d.Map(p, n, h), h.Release())
	if err != nil {
		return err
	}
	s := d.StreamOf(0)
	var v uint32
	err = errors.Join(s.CopyOut(unsafe.Pointer(&v), p, 4), s.Synchronize())
	v++
	return errors.Join(err, s.CopyIn(p, unsafe.Pointer(&v), 4), s.Synchronize(), d.Unmap(p, n), d.FreeReserved(p, n))
}

func TestSharedBetweenProcesses(t *testing.T) {
	d := cudatest.Device(t, 0)
	n := must[uint64](t)(d.Granularity())
	h := must[cuda.Handle](t)(d.Create(n))
	p := must[cuda.Ptr](t)(d.Reserve(2*n, n))
	if err := d.StreamOf(0).Set8(p, 0, 1); err == nil {
		t.Error("unmapped memory was written")
	}
	ok(t, d.Map(p+cuda.Ptr(n), n, h))
	if info := must[cuda.PointerInfo](t)(d.Pointer(p + cuda.Ptr(n) + 9)); info != (cuda.PointerInfo{Base: p + cuda.Ptr(n), Size: n, Kind: cuda.DeviceMemory}) {
		t.Errorf("%+v", info)
	}
	fd := must[int](t)(h.Export())
	ok(t, h.Release())
	s := d.StreamOf(0)
	ok(t, s.Set32(p+cuda.Ptr(n), 41, 1))
	ok(t, s.Wait(bound(t)))
	f := os.NewFile(uintptr(fd), "exported")
	defer f.Close()
	cmd := exec.CommandContext(bound(t), os.Args[0])
	cmd.Env = append(os.Environ(), "CUDA_TEST_CHILD=1")
	cmd.ExtraFiles = []*os.File{f}
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("child: %v\n%s", err, out)
	}
	var v uint32
	ok(t, s.CopyOut(unsafe.Pointer(&v), p+cuda.Ptr(n), 4))
	if v != 42 {
		t.Errorf("after the child: %d", v)
	}
	ok(t, d.Unmap(p+cuda.Ptr(n), n))
	if err := d.FreeReserved(p, n); err == nil {
		t.Error("half a reservation was freed")
	}
	cudatest.Fail("cuMemSetAccess", 1, 1)
	h2 := must[cuda.Handle](t)(d.Import(fd))
	if err := d.Map(p, n, h2); err == nil {
		t.Error("no error")
	}
	ok(t, d.Map(p, n, h2)) // the failed one left no mapping
	ok(t, d.Unmap(p, n))
	ok(t, h2.Release())
	ok(t, d.FreeReserved(p, 2*n))
	if _, err := d.Import(0); err == nil {
		t.Error("imported standard input")
	}
}

// Goroutines on all devices at once: contexts must not get mixed up.
func TestConcurrentDevices(t *testing.T) {
	var wg sync.WaitGroup
	for i := range 4 {
		d := cudatest.Device(t, i)
		m, add := load(t, d)
		t.Cleanup(func() { m.Unload() })
		for range 4 {
			wg.Go(func() {
				s, err := d.NewStream(0)
				p, err2 := d.Alloc(64)
				if err != nil || err2 != nil {
					t.Error(err, err2)
					return
				}
				err = s.Set32(p, 1, 16)
				for range 100 {
					params := addParams{dst: p, src: p + 32, n: 8}
					err = errors.Join(err, s.Launch(add, 1, 32, 0, unsafe.Pointer(&params), unsafe.Sizeof(params)))
				}
				var v uint32
				err = errors.Join(err, s.CopyOut(unsafe.Pointer(&v), p, 4), s.Synchronize(), s.Close(), d.Free(p))
				if err != nil || v != 101 {
					t.Error(v, err)
				}
			})
		}
	}
	wg.Wait()
}

// TestRegisteredOutlivesFirst: host memory that two GPUs have registered stays so when
// the first of them is closed.
func TestRegisteredOutlivesFirst(t *testing.T) {
	b := cudatest.Device(t, 1)
	a := must[*cuda.Device](t)(b.Driver().Device(0))
	mem := must[[]byte](t)(syscall.Mmap(-1, 0, 8192, syscall.PROT_READ|syscall.PROT_WRITE, syscall.MAP_ANON|syscall.MAP_SHARED))
	defer syscall.Munmap(mem)
	must[cuda.Ptr](t)(a.RegisterHost(mem))
	p := must[cuda.Ptr](t)(b.RegisterHost(mem))
	ok(t, a.UnregisterHost(mem))
	ok(t, a.Close())
	s := must[*cuda.Stream](t)(b.NewStream(0))
	defer s.Close()
	ok(t, s.Write32(p, 7))
	ok(t, s.Wait(bound(t)))
	if mem[0] != 7 {
		t.Error("nothing written")
	}
	ok(t, b.UnregisterHost(mem))
	if err := s.Write32(p, 0); err == nil {
		t.Error("unregistered memory was written")
	}
}
