package cuda_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"
	"unsafe"

	"github.com/lockstep-ccl/lockstep/ccl/internal/cuda"
	"github.com/lockstep-ccl/lockstep/ccl/internal/cuda/cudatest"
	"go.uber.org/goleak"
)

func TestMain(m *testing.M) {
	if os.Getenv("CUDA_TEST_CHILD") != "" {
		child()
		return
	}
	o := cudatest.Options{GPUs: 4}
	if v := os.Getenv("CUDA_TEST_FAKE"); v != "" { // a process of TestOpenFails
		fmt.Sscanf(v, "%d,%d", &o.GPUs, &o.Version)
	}
	stop, err := cudatest.Start(o)
	if err != nil && !errors.Is(err, cudatest.ErrUnavailable) {
		panic(err)
	}
	goleak.VerifyTestMain(m, goleak.Cleanup(func(code int) { stop(); os.Exit(code) }))
}

func must[T any](t testing.TB) func(v T, err error) T {
	return func(v T, err error) T {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
		return v
	}
}

func ok(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func bound(t testing.TB) context.Context {
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	t.Cleanup(cancel)
	return ctx
}

// Every process can open a driver only once, so that each case is one.
func TestOpenFails(t *testing.T) {
	if os.Getenv("CUDA_TEST_OPEN") != "" {
		_, err := cuda.Open()
		fmt.Printf("is ErrNoDriver %v: %v\n", errors.Is(err, cuda.ErrNoDriver), err)
		return
	}
	cudatest.Device(t, 0) // skip where there is no fake
	for _, c := range []struct {
		name string
		env  []string
		want []string
	}{
		{"no library", []string{cuda.LibraryEnv + "=/nowhere/libcuda.so.1", "LOCKSTEP_FAKE_CUDA=gpus=1"}, []string{"/nowhere/libcuda.so.1", cuda.LibraryEnv}},
		{"another library", []string{cuda.LibraryEnv + "=libc.so.6", "LOCKSTEP_FAKE_CUDA=gpus=1"}, []string{"lacks cuInit"}},
		{"no GPU", []string{"LOCKSTEP_FAKE_CUDA=gpus=0"}, []string{"cuInit: CUDA_ERROR_NO_DEVICE (100)"}},
		{"old driver", []string{"LOCKSTEP_FAKE_CUDA=version=11080"}, []string{"speaks CUDA 11.8", "535"}},
		{"broken driver", []string{"LOCKSTEP_FAKE_CUDA=gpus=1,fail=cuInit:2:1"}, []string{"cuInit: CUDA_ERROR_OUT_OF_MEMORY (2): out of memory"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			cmd := exec.Command(os.Args[0], "-test.run=^TestOpenFails$")
			cmd.Env = append(append(os.Environ(), "CUDA_TEST_OPEN=1"), c.env...)
			out, err := cmd.CombinedOutput()
			if err != nil {
				t.Fatalf("%v\n%s", err, out)
			}
			for _, w := range append(c.want, "is ErrNoDriver true") {
				if !strings.Contains(string(out), w) {
					t.Errorf("no %q in: %s", w, out)
				}
			}
		})
	}
}

func TestDevice(t *testing.T) {
	d := cudatest.Device(t, 3)
	if d.Name != "Fake GPU 3" || d.PCIBus != "0000:04:00.0" || d.UUID != "GPU-fafafafa-fafa-fafa-fafa-fafafafafa03" {
		t.Errorf("%+v", d)
	}
	if d.Major != 9 || d.SMs != 132 || d.CopyEngines != 3 || !d.HandlePOSIX || !d.StreamMemOps || !d.RDMA || !d.GPUDirect || !d.DMABuf {
		t.Errorf("%+v", d)
	}
	for bus, want := range map[string][2]bool{"0000:01:00.0": {true, true}, "0000:02:00.0": {false, true}, d.PCIBus: {true, true}, "0000:09:00.0": {false, false}} {
		cudatest.Separate(3, 1)
		can, known, err := d.CanAccess(bus)
		if ok(t, err); can != want[0] || known != want[1] {
			t.Errorf("%s: can access %v, known %v; want %v", bus, can, known, want)
		}
	}
	cudatest.Unlink(0, 3)
	cudatest.Unlink(9, 3)
	for bus, want := range map[string]bool{ // the last two are NVML's to know
		"0000:01:00.0": false, "0000:02:00.0": false, "0000:03:00.0": true, "0000:09:00.0": true, "0000:0a:00.0": false,
	} {
		linked, err := d.Linked(bus)
		if ok(t, err); linked != want {
			t.Errorf("%s: linked %v, want %v", bus, linked, want)
		}
	}
	if _, err := d.Linked(d.PCIBus); err == nil || !strings.Contains(err.Error(), "cuDeviceGetP2PAttribute(3, GPU 3) on GPU 3") {
		t.Errorf("a link to itself: %v", err)
	}
	if _, err := d.Driver().Device(4); err == nil || !strings.Contains(err.Error(), "4 GPUs") {
		t.Errorf("GPU 4 of 4: %v", err)
	}
	other := must[*cuda.Device](t)(d.Driver().Device(3))
	ok(t, other.Close())
	ok(t, other.Close())
	if _, err := other.Alloc(1); !errors.Is(err, cuda.ErrClosed) {
		t.Errorf("alloc on a closed device: %v", err)
	}
	p := must[cuda.Ptr](t)(d.Alloc(1)) // the primary context is d's still
	ok(t, d.Free(p))
}

func TestErrors(t *testing.T) {
	d := cudatest.Device(t, 1)
	_, err := d.Create(1 << 50)
	if want := "cuMemCreate(1125899906842624 bytes) on GPU 1: CUDA_ERROR_OUT_OF_MEMORY (2): out of memory"; err == nil || err.Error() != want {
		t.Errorf("got  %v\nwant %s", err, want)
	}
	if !errors.Is(err, cuda.ErrOutOfMemory) || errors.Is(err, cuda.ErrPeerAccess) {
		t.Error("wrong sentinel")
	}
	cudatest.Fail("cuMemAlloc", 12345, 2)
	p := must[cuda.Ptr](t)(d.Alloc(16))
	var e *cuda.Error
	if _, err := d.Alloc(16); !errors.As(err, &e) || e.Code != 12345 || e.Device != 1 || e.Name != "CUDA_ERROR" {
		t.Errorf("injected: %v", err)
	}
	ok(t, d.Free(must[cuda.Ptr](t)(d.Alloc(16))))
	ok(t, d.Free(p))
	_, err = d.Load([]byte(".version 8.0\n.bogus"))
	if err == nil || !strings.Contains(err.Error(), "INVALID_PTX") || !strings.Contains(err.Error(), "unknown directive") {
		t.Errorf("bad PTX: %v", err)
	}
}

// TestAllocExported: the DMA buffer is the memory that the GPU writes, and what lacks for
// one is said.
func TestAllocExported(t *testing.T) {
	d := cudatest.Device(t, 1)
	e := must[*cuda.Exported](t)(d.AllocExported(3<<20 + 1))
	if e.Bytes != 4<<20 {
		t.Errorf("%d bytes, want two large pages", e.Bytes)
	}
	s := must[*cuda.Stream](t)(d.NewStream(0))
	defer s.Close()
	ok(t, s.Set8(e.Ptr+2<<20, 0x5a, 1000))
	ok(t, s.Wait(bound(t)))
	got := make([]byte, 1001)
	if _, err := syscall.Pread(e.FD, got, 2<<20); err != nil || !bytes.Equal(got, append(bytes.Repeat([]byte{0x5a}, 1000), 0)) {
		t.Errorf("the DMA buffer has other bytes: %v", err)
	}
	ok(t, e.Close())

	cudatest.Fail("cuMemGetHandleForAddressRange", 801, 0)
	_, err := d.AllocExported(1)
	if want := "2097152 bytes) on GPU 1: CUDA_ERROR_NOT_SUPPORTED (801): operation not supported"; !errors.Is(err, cuda.ErrNotSupported) || !strings.HasSuffix(err.Error(), want) {
		t.Errorf("got  %v\nwant %s", err, want)
	}
	cudatest.Heal()
	for attribute, want := range map[int]string{110: "GPU 1: ", 116: "GPU_DIRECT_RDMA_SUPPORTED is 0", 124: "open kernel modules"} {
		cudatest.Deny(attribute)
		other := must[*cuda.Device](t)(d.Driver().Device(1))
		if _, err := other.AllocExported(1); !errors.Is(err, cuda.ErrNotSupported) || !strings.Contains(err.Error(), want) {
			t.Errorf("without attribute %d: %v", attribute, err)
		}
		ok(t, other.Close())
	}
}

func TestStreamOrder(t *testing.T) {
	a, b := cudatest.Device(t, 0), cudatest.Device(t, 1)
	const n = 1 << 20
	src, dst := must[cuda.Ptr](t)(a.Alloc(n)), must[cuda.Ptr](t)(a.Alloc(n))
	defer a.Free(src)
	defer a.Free(dst)
	s, s2 := must[*cuda.Stream](t)(a.NewStream(0)), must[*cuda.Stream](t)(a.NewStream(-1))
	defer s.Close()
	defer s2.Close()
	word := must[cuda.Ptr](t)(a.Alloc(8))
	defer a.Free(word)

	ok(t, s.Set32(word, 0xfffffffe, 1))
	ok(t, s.Wait(bound(t)))
	// s2 waits for a counter that wraps around; s goes on after s2's event.
	ok(t, s2.Batch([]cuda.MemOp{cuda.WaitOp(word, 1), cuda.WriteOp(word+4, 7), cuda.WriteOp(word+4, 8)}))
	ok(t, s2.Set8(src, 0x5a, n))
	e := must[*cuda.Event](t)(a.NewEvent(true))
	ok(t, s2.Record(e))
	ok(t, s.WaitEvent(e))
	ok(t, s.Copy(dst, src, n))
	got := make([]byte, n)
	done, err := s2.Query()
	if done || err != nil {
		t.Fatalf("s2 ran past its wait: %v", err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := s.Wait(ctx); !errors.Is(err, context.Canceled) {
		t.Fatalf("a wait that was given up: %v", err)
	}
	ok(t, a.StreamOf(0).Write32(word, 1))
	ok(t, s.CopyOut(unsafe.Pointer(&got[0]), dst, n))
	ok(t, s.Synchronize())
	if !bytes.Equal(got, bytes.Repeat([]byte{0x5a}, n)) {
		t.Error("wrong bytes")
	}
	e2 := must[*cuda.Event](t)(a.NewEvent(true))
	ok(t, s.Record(e2))
	ok(t, e2.Wait(bound(t)))
	if ns := must[float64](t)(e2.Elapsed(e)); ns < 0 {
		t.Errorf("elapsed %v ns", ns)
	}
	ok(t, e.Close())
	ok(t, e2.Close())
	ok(t, e2.Close())
	// Another GPU's plain memory is out of reach, also of its own streams.
	sb := must[*cuda.Stream](t)(b.NewStream(0))
	defer sb.Close()
	if err := sb.Set8(src, 0, 1); err == nil {
		t.Error("GPU 1 wrote into GPU 0's memory")
	}
	many := make([]cuda.MemOp, 1000) // more than the driver takes at a time
	for i := range many {
		many[i] = cuda.WriteOp(word, uint32(i))
	}
	ok(t, s.Batch(many))
	ok(t, s.Wait(bound(t)))
	ok(t, s.CopyOut(unsafe.Pointer(&got[0]), word, 4))
	if v := *(*uint32)(unsafe.Pointer(&got[0])); v != 999 {
		t.Errorf("batch ended with %d", v)
	}
}

type addParams struct {
	dst, src cuda.Ptr
	n        uint32
	_        uint32
}

func load(t testing.TB, d *cuda.Device) (*cuda.Module, cuda.Func) {
	m := must[*cuda.Module](t)(d.Load([]byte(cudatest.PTX)))
	return m, must[cuda.Func](t)(m.Func("fake_add"))
}

func TestLaunchAndGraph(t *testing.T) {
	d := cudatest.Device(t, 0)
	m, add := load(t, d)
	if _, err := m.Func("nobody"); !errors.Is(err, cuda.ErrNotFound) {
		t.Errorf("unknown kernel: %v", err)
	}
	ok(t, d.SetFuncShared(add, 100<<10))
	if info := must[cuda.FuncInfo](t)(d.FuncInfo(add)); info.MaxThreads != 1024 || info.Registers != 32 {
		t.Errorf("%+v", info)
	}
	if n := must[int](t)(d.Occupancy(add, 512, 0)); n != 4 {
		t.Errorf("occupancy %d", n)
	}
	s := must[*cuda.Stream](t)(d.NewStream(0))
	side := must[*cuda.Stream](t)(d.NewStream(0))
	defer s.Close()
	defer side.Close()
	fork, join := must[*cuda.Event](t)(d.NewEvent(false)), must[*cuda.Event](t)(d.NewEvent(false))
	mem := must[[]byte](t)(d.AllocHost(4096))
	words := unsafe.Slice((*uint32)(unsafe.Pointer(&mem[0])), 1024)
	p := must[cuda.Ptr](t)(d.HostPtr(mem))
	words[100] = 5
	params := addParams{dst: p, src: p + 400, n: 1}

	ok(t, s.BeginCapture())
	if c := must[bool](t)(s.Capturing()); !c {
		t.Error("not capturing")
	}
	ok(t, s.Launch(add, 2, 128, 90<<10, unsafe.Pointer(&params), unsafe.Sizeof(params)))
	ok(t, s.Record(fork))
	ok(t, side.WaitEvent(fork))
	ok(t, side.Write32(p+8, 3))
	ok(t, side.Record(join))
	ok(t, s.WaitEvent(join))
	if _, err := s.Query(); !errors.Is(err, cuda.ErrCapture) {
		t.Errorf("query while capturing: %v", err)
	}
	params.n = 0 // the graph has its own copy
	g := must[*cuda.Graph](t)(s.EndCapture())
	if c := must[bool](t)(side.Capturing()); c {
		t.Error("still capturing")
	}
	x := must[*cuda.Exec](t)(g.Instantiate())
	ok(t, g.Close())
	ok(t, s.Wait(bound(t)))
	if words[0] != 0 {
		t.Error("ran while captured")
	}
	for range 3 {
		ok(t, x.Launch(s))
	}
	ok(t, s.Wait(bound(t)))
	if words[0] != 15 || words[2] != 3 {
		t.Errorf("after three launches: %d, %d", words[0], words[2])
	}
	ok(t, x.Close())
	ok(t, x.Close())
	ok(t, d.FreeHost(mem))

	crash := must[cuda.Func](t)(m.Func("fake_crash"))
	ok(t, s.Launch(crash, 1, 1, 0, nil, 0))
	if err := s.Wait(bound(t)); !errors.Is(err, cuda.ErrContextLost) {
		t.Errorf("after an illegal address: %v", err)
	}
	cudatest.Heal()
	ok(t, m.Unload())
}

func TestHostRegistration(t *testing.T) {
	a, b := cudatest.Device(t, 0), cudatest.Device(t, 1)
	mem := must[[]byte](t)(syscall.Mmap(-1, 0, 8192, syscall.PROT_READ|syscall.PROT_WRITE, syscall.MAP_ANON|syscall.MAP_SHARED))
	defer syscall.Munmap(mem)
	pa, pb := must[cuda.Ptr](t)(a.RegisterHost(mem)), must[cuda.Ptr](t)(b.RegisterHost(mem))
	if info := must[cuda.PointerInfo](t)(a.Pointer(pa + 5)); info.Kind != cuda.Host {
		t.Errorf("%+v", info)
	}
	s := must[*cuda.Stream](t)(b.NewStream(0))
	defer s.Close()
	ok(t, a.UnregisterHost(mem))
	ok(t, s.Write32(pb, 0x01020304)) // b's registration stands
	ok(t, s.Wait(bound(t)))
	if mem[0] != 4 {
		t.Error("nothing written")
	}
	ok(t, b.UnregisterHost(mem))
	if err := s.Write32(pb, 0); err == nil {
		t.Error("unregistered memory was written")
	}
	if err := b.UnregisterHost(mem); err == nil {
		t.Error("unregistered twice")
	}
	if info := must[cuda.PointerInfo](t)(a.Pointer(pa)); info.Kind != cuda.Unregistered {
		t.Errorf("%+v", info)
	}
	cudatest.Fail("cuMemHostGetDevicePointer", 1, 1)
	if _, err := a.RegisterHost(mem); err == nil {
		t.Error("no error")
	}
	must[cuda.Ptr](t)(a.RegisterHost(mem)) // nothing was left behind
	ok(t, a.UnregisterHost(mem))
}

func BenchmarkLaunch(b *testing.B) {
	d := cudatest.Device(b, 0)
	m, add := load(b, d)
	defer m.Unload()
	s := must[*cuda.Stream](b)(d.NewStream(0))
	defer s.Close()
	params := addParams{}
	b.ReportAllocs()
	for i := 0; b.Loop(); i++ {
		if err := s.Launch(add, 1, 32, 0, unsafe.Pointer(&params), unsafe.Sizeof(params)); err != nil {
			b.Fatal(err)
		}
		if i%256 == 0 {
			s.Synchronize()
		}
	}
}

// What an operation enqueues, and a call into C that does nothing (Query).
func BenchmarkEnqueue(b *testing.B) {
	d := cudatest.Device(b, 0)
	s := must[*cuda.Stream](b)(d.NewStream(0))
	defer s.Close()
	p := must[cuda.Ptr](b)(d.Alloc(64))
	defer d.Free(p)
	for _, c := range []struct {
		name string
		f    func() error
	}{
		{"Query", func() error { _, err := s.Query(); return err }},
		{"Copy", func() error { return s.Copy(p, p+32, 8) }},
		{"Write32", func() error { return s.Write32(p, 1) }},
		{"Batch", func() error {
			ops := [...]cuda.MemOp{cuda.WriteOp(p, 1), cuda.WriteOp(p+4, 1), cuda.WaitOp(p, 1)}
			return s.Batch(ops[:])
		}},
	} {
		b.Run(c.name, func(b *testing.B) {
			b.ReportAllocs()
			for i := 0; b.Loop(); i++ {
				if err := c.f(); err != nil {
					b.Fatal(err)
				}
				if i%256 == 0 {
					s.Synchronize()
				}
			}
		})
	}
}

// TestCrowded: whoever asked last is told of each stream of a GPU beyond its hardware queues. Streams
// that were closed, and those of other GPUs, do not count.
func TestCrowded(t *testing.T) {
	d, other := cudatest.Device(t, 1), cudatest.Device(t, 0)
	t.Setenv("CUDA_DEVICE_MAX_CONNECTIONS", "2")
	var told [][3]int
	d.Driver().Crowded(func(int, int, int) { t.Error("who asked before was told") })
	d.Driver().Crowded(func(gpu, streams, queues int) { told = append(told, [3]int{gpu, streams, queues}) })
	defer d.Driver().Crowded(func(int, int, int) {})
	stream := func(d *cuda.Device) *cuda.Stream {
		s, err := d.NewStream(0)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = s.Close() })
		return s
	}
	stream(other)
	a := stream(d)
	stream(d)
	if len(told) > 0 {
		t.Errorf("told of %v: two streams have two queues", told)
	}
	b := stream(d)
	if err := errors.Join(a.Close(), a.Close(), b.Close()); err != nil {
		t.Fatal(err)
	}
	stream(d)
	stream(d)
	if want := [][3]int{{1, 3, 2}, {1, 3, 2}}; !slices.Equal(told, want) {
		t.Errorf("told of %v, want %v", told, want)
	}
}
