package verbs_test

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"unsafe"

	"go.uber.org/goleak"
	"golang.org/x/sys/unix"

	"github.com/lockstep-ccl/lockstep/ccl/internal/verbs"
	"github.com/lockstep-ccl/lockstep/ccl/internal/verbs/verbstest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// child runs a test of this binary in a process of its own: a process loads one
// library once.
func child(t *testing.T, env ...string) {
	t.Helper()
	cmd := exec.Command(os.Args[0], "-test.run=^"+t.Name()+"$", "-test.v")
	cmd.Env = append(os.Environ(), env...)
	if out, err := cmd.CombinedOutput(); err != nil || !strings.Contains(string(out), "--- PASS") {
		t.Errorf("in a process with %v: %v\n%s", env, err, out)
	}
}

// TestLoadFails: the error says what was looked for, where, and what there is.
func TestLoadFails(t *testing.T) {
	if want := os.Getenv("VERBS_TEST_WANT"); want != "" {
		_, err := verbs.Load()
		if !errors.Is(err, verbs.ErrNoLibrary) {
			t.Fatalf("Load: %v", err)
		}
		for _, w := range strings.Split(want, "|") {
			if !strings.Contains(err.Error(), w) {
				t.Errorf("%q does not say %q", err, w)
			}
		}
		return
	}
	verbstest.New(t, verbstest.Options{}) // skips without cgo
	sysfs := t.TempDir()
	child(t, "VERBS_TEST_WANT=cannot load|/nowhere/libibverbs.so|No such file|the path is from "+verbs.LibraryEnv+"|no "+sysfs+"/class/infiniband",
		verbs.LibraryEnv+"=/nowhere/libibverbs.so", verbs.SysfsEnv+"="+sysfs)
	if err := os.MkdirAll(filepath.Join(sysfs, "class/infiniband/mlx5_9"), 0o755); err != nil {
		t.Fatal(err)
	}
	child(t, "VERBS_TEST_WANT=libc.so.6 lacks ibv_get_device_list, ibv_free_device_list|ibv_destroy_qp|class/infiniband has mlx5_9",
		verbs.LibraryEnv+"=libc.so.6", verbs.SysfsEnv+"="+sysfs)
	if err := os.Remove(filepath.Join(sysfs, "class/infiniband/mlx5_9")); err != nil {
		t.Fatal(err)
	}
	child(t, "VERBS_TEST_WANT=class/infiniband is empty", verbs.LibraryEnv+"=libc.so.6", verbs.SysfsEnv+"="+sysfs)
}

// TestOldLibrary: what came to libibverbs later is done without.
func TestOldLibrary(t *testing.T) {
	if os.Getenv("VERBS_TEST_OLD") == "" {
		verbstest.New(t, verbstest.Options{}) // skips
		child(t, "VERBS_TEST_OLD=1")
		return
	}
	verbstest.New(t, verbstest.Options{Old: true, Devices: []verbstest.Device{{Name: "mlx5_0", Ports: []verbstest.Port{{}, {InfiniBand: true}}}}})
	s := open(t, "mlx5_0")
	a := must(s.ctx.Port(1))(t)
	if a.State != verbs.PortActive || a.LinkLayer != verbs.LinkEthernet || a.Rate() != 400 || a.ActiveMTU != verbs.MTU4096 {
		t.Errorf("Port: %+v", a)
	}
	checkGIDs(t, s)
	if g := must(s.ctx.GIDs(2))(t); len(g) != 1 || g[0].Type != verbs.GIDInfiniBand || g[0].Netdev != "" {
		t.Errorf("GIDs of InfiniBand: %+v", g)
	}
	if _, err := s.pd.RegisterDMABuf(0, 0, 4096, 0, verbs.LocalWrite); !errors.Is(err, verbs.ErrNotSupported) {
		t.Errorf("RegisterDMABuf: %v", err)
	}
	m := must(s.pd.Register(uintptr(unsafe.Pointer(&s.mem[0])), 64, verbs.LocalWrite|verbs.RelaxedOrdering))(t)
	if err := m.Close(); err != nil {
		t.Error(err)
	}
}

func checkGIDs(t *testing.T, s *side) {
	t.Helper()
	g := must(s.ctx.GIDs(1))(t)
	types := []verbs.GIDType{verbs.GIDRoCEv1, verbs.GIDRoCEv2, verbs.GIDRoCEv1, verbs.GIDRoCEv2}
	if len(g) != len(types) {
		t.Fatalf("GIDs: %+v", g)
	}
	for i, e := range g {
		addr := "fe80::1"
		if i > 1 {
			addr = "10.0.0.1"
		}
		if e.Index != i || e.Type != types[i] || e.Netdev != "fake0" || e.GID.Addr().String() != addr {
			t.Errorf("GID %d: %+v", i, e)
		}
	}
	if s := g[3].GID.String(); s != "::ffff:10.0.0.1" {
		t.Errorf("GID is %q", s)
	}
}

func TestDevices(t *testing.T) {
	f := verbstest.New(t, verbstest.Options{})
	lib := f.Library()
	names := func() (s []string) {
		for _, d := range must(lib.Devices())(t) {
			if d.GUID>>8 != 0x020203fffe0000 {
				t.Errorf("%s has GUID %#x", d.Name, d.GUID)
			}
			s = append(s, d.Name)
		}
		return s
	}
	if got := names(); !slices.Equal(got, []string{"mlx5_0", "mlx5_1", "mlx5_2", "mlx5_3"}) {
		t.Errorf("Devices: %v", got)
	}
	f.Remove("mlx5_1")
	if got := names(); !slices.Equal(got, []string{"mlx5_0", "mlx5_2", "mlx5_3"}) {
		t.Errorf("Devices without mlx5_1: %v", got)
	}
	if _, err := lib.Open("mlx5_1"); !errors.Is(err, verbs.ErrNoDevice) || !strings.Contains(err.Error(), "has mlx5_0, mlx5_2, mlx5_3") {
		t.Errorf("Open of what was removed: %v", err)
	}
	f.Restore("mlx5_1")
	s := open(t, "mlx5_1")
	a := must(s.ctx.Attr())(t)
	if a.GUID != 0x020203fffe000002 || a.Ports != 1 || a.MaxQP != 1<<17 || a.MaxQPWR != 1<<15 || a.MaxCQ != 1<<24 || a.MaxMR != 1<<24 || a.Firmware != "1.2.3" || a.VendorID != 0x2c9 {
		t.Errorf("Attr: %+v", a)
	}

	f.Fail("ibv_get_device_list", syscall.ENOSYS, 2)
	if n := len(names()); n != 4 {
		t.Errorf("%d devices before the fault", n)
	}
	if n := len(names()); n != 0 {
		t.Errorf("%d devices where the kernel has no RDMA", n)
	}
	f.Fail("ibv_get_device_list", syscall.ENOMEM, 1)
	if _, err := lib.Devices(); !errors.Is(err, syscall.ENOMEM) {
		t.Errorf("Devices: %v", err)
	}
	f.Fail("ibv_open_device", syscall.EACCES, 1)
	if _, err := lib.Open("mlx5_0"); !errors.Is(err, syscall.EACCES) || !strings.Contains(err.Error(), "/dev/infiniband/uverbs*") {
		t.Errorf("Open: %v", err)
	}
}

func TestPorts(t *testing.T) {
	f := verbstest.New(t, verbstest.Options{Devices: []verbstest.Device{
		{Name: "mlx5_0", Ports: []verbstest.Port{{}, {MTU: verbs.MTU1024}}}, {Name: "ib0", Ports: []verbstest.Port{{InfiniBand: true}}},
	}})
	s, ib := open(t, "mlx5_0"), open(t, "ib0")
	want := verbs.PortAttr{State: verbs.PortActive, Physical: verbs.PhysicalLinkUp, LinkLayer: verbs.LinkEthernet, MaxMTU: verbs.MTU4096, ActiveMTU: verbs.MTU4096,
		Width: 4, Speed: 200, GIDs: 16, MaxBytes: 1 << 30}
	if a := must(s.ctx.Port(1))(t); a != want {
		t.Errorf("Port: %+v, want %+v", a, want)
	}
	f.SetPort("mlx5_0", 2, false, false)
	want.State, want.Physical, want.ActiveMTU = verbs.PortDown, verbs.PhysicalDisabled, verbs.MTU1024
	if a := must(s.ctx.Port(2))(t); a != want {
		t.Errorf("Port: %+v, want %+v", a, want)
	}
	if a := must(ib.ctx.Port(1))(t); a.LinkLayer != verbs.LinkInfiniBand || a.LID == 0 {
		t.Errorf("Port: %+v", a)
	}
	for _, n := range []int{-1, 0, 3, 256} {
		if _, err := s.ctx.Port(n); !errors.Is(err, syscall.EINVAL) {
			t.Errorf("port %d: %v", n, err)
		}
		if _, err := s.ctx.GIDs(n); !errors.Is(err, syscall.EINVAL) {
			t.Errorf("GIDs of port %d: %v", n, err)
		}
	}

	checkGIDs(t, s)
	if g := must(ib.ctx.GIDs(1))(t); len(g) != 1 || g[0].Type != verbs.GIDInfiniBand || g[0].GID.String() != "fe80::202:3ff:fe00:2" {
		t.Errorf("GIDs of InfiniBand: %+v", g)
	}
	// A hole, and no interface that anybody knows.
	addr := must(s.ctx.GIDs(1))(t)[3].GID
	f.SetGIDs("mlx5_0", 1, []verbs.GIDEntry{{Index: 5, GID: addr, Type: verbs.GIDRoCEv2}})
	if g := must(s.ctx.GIDs(1))(t); len(g) != 1 || g[0] != (verbs.GIDEntry{Index: 5, GID: addr, Type: verbs.GIDRoCEv2}) {
		t.Errorf("GIDs: %+v", g)
	}
}

func TestMemory(t *testing.T) {
	f := verbstest.New(t, verbstest.Options{})
	s := open(t, "mlx5_0")
	addr := uintptr(unsafe.Pointer(&s.mem[0]))
	m := must(s.pd.Register(addr, 4096, verbs.LocalWrite|verbs.RemoteWrite))(t)
	if m.Addr != uint64(addr) || m.Len != 4096 || m.LKey == 0 || m.RKey == 0 || m.LKey == s.mr.LKey {
		t.Errorf("Register: %+v", m)
	}
	for _, n := range []int{0, -1} {
		if _, err := s.pd.Register(addr, n, verbs.LocalWrite); !errors.Is(err, syscall.EINVAL) {
			t.Errorf("Register %d bytes: %v", n, err)
		}
		if _, err := s.pd.RegisterDMABuf(0, 0, n, 0, verbs.LocalWrite); !errors.Is(err, syscall.EINVAL) {
			t.Errorf("RegisterDMABuf %d bytes: %v", n, err)
		}
	}
	if _, err := s.pd.Register(addr, 64, verbs.RemoteWrite); !errors.Is(err, syscall.EINVAL) {
		t.Errorf("RemoteWrite alone: %v", err)
	}
	f.Fail("ibv_reg_mr", syscall.ENOMEM, 1)
	if _, err := s.pd.Register(addr, 64, verbs.LocalWrite); !errors.Is(err, verbs.ErrNoMemory) || !strings.Contains(err.Error(), "ulimit -l") {
		t.Errorf("beyond the limit: %v", err)
	}
	// Relaxed ordering goes through the newer call.
	f.Fail("ibv_reg_mr_iova2", syscall.EFAULT, 1)
	if _, err := s.pd.Register(addr, 64, verbs.LocalWrite|verbs.RelaxedOrdering); !errors.Is(err, syscall.EFAULT) {
		t.Errorf("relaxed ordering: %v", err)
	}

	fd := must(unix.MemfdCreate("buffer", 0))(t)
	defer unix.Close(fd)
	if err := unix.Ftruncate(fd, 3<<12); err != nil {
		t.Fatal(err)
	}
	d := must(s.pd.RegisterDMABuf(fd, 4096, 4096, 0x7000, verbs.LocalWrite|verbs.RemoteWrite))(t)
	if d.Addr != 0x7000 || d.Len != 4096 {
		t.Errorf("RegisterDMABuf: %+v", d)
	}
	// Written by a peer at the address that the region was given.
	p := open(t, "mlx5_2")
	connect(t, s, p, 14, 6)
	copy(p.mem, "through the buffer")
	w := p.write(s, 1, 0, 18)
	w.RemoteAddr, w.RKey, w.WithImm = 0x7000+100, d.RKey, false
	p.post(t, w)
	if c := p.completions(t, 1)[0]; c.Status != verbs.Success {
		t.Fatalf("%+v", c)
	}
	b := make([]byte, 18)
	if _, err := unix.Pread(fd, b, 4096+100); err != nil || string(b) != "through the buffer" {
		t.Errorf("the buffer has %q, %v", b, err)
	}
	if _, err := s.pd.RegisterDMABuf(-1, 0, 4096, 0, verbs.LocalWrite); !errors.Is(err, syscall.EBADF) {
		t.Errorf("no descriptor: %v", err)
	}
	f.Fail("ibv_reg_dmabuf_mr", syscall.EOPNOTSUPP, 1)
	if _, err := s.pd.RegisterDMABuf(fd, 0, 4096, 0, verbs.LocalWrite); !errors.Is(err, verbs.ErrNotSupported) {
		t.Errorf("an old kernel: %v", err)
	}
	for _, r := range []*verbs.MR{m, d} {
		if err := r.Close(); err != nil {
			t.Error(err)
		}
	}
}

// TestClosing: parents outlive their children, and what is closed says so.
func TestClosing(t *testing.T) {
	f := verbstest.New(t, verbstest.Options{})
	ctx := must(f.Library().Open("mlx5_0"))(t)
	pd := must(ctx.NewPD())(t)
	ch := must(ctx.NewCompletionChannel())(t)
	cq := must(ctx.NewCQ(10, ch))(t)
	if cq.Depth() < 10 || cq.ID() == 0 {
		t.Errorf("depth %d, ID %d", cq.Depth(), cq.ID())
	}
	qp := must(pd.NewQP(verbs.QPConfig{Send: cq, Recv: cq, MaxSend: 3, MaxRecv: 5}))(t)
	page := must(unix.Mmap(-1, 0, 4096, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS))(t)
	defer unix.Munmap(page)
	mr := must(pd.Register(uintptr(unsafe.Pointer(&page[0])), len(page), verbs.LocalWrite))(t)
	type closer interface{ Close() error }
	for _, c := range []closer{ctx, pd, ch, cq} {
		if err := c.Close(); !errors.Is(err, verbs.ErrBusy) {
			t.Errorf("%T with children: %v", c, err)
		}
	}
	if err := ctx.Close(); !strings.Contains(err.Error(), "5 of its objects are open") {
		t.Error(err)
	}
	for _, c := range []closer{qp, mr, cq, ch, pd, ctx} {
		if err := c.Close(); err != nil {
			t.Errorf("%T: %v", c, err)
		}
		if err := c.Close(); !errors.Is(err, verbs.ErrClosed) {
			t.Errorf("%T again: %v", c, err)
		}
	}
	if ctx.AsyncFD() != -1 || ch.FD() != -1 {
		t.Error("a closed object has a descriptor")
	}
	for name, err := range map[string]error{
		"Attr": second(ctx.Attr()), "Port": second(ctx.Port(1)), "GIDs": second(ctx.GIDs(1)), "NewPD": second(ctx.NewPD()),
		"NewCompletionChannel": second(ctx.NewCompletionChannel()), "NewCQ": second(ctx.NewCQ(1, nil)), "NewCQ with channel": second(ctx.NewCQ(1, ch)),
		"NextEvent": func() error { _, _, err := ctx.NextEvent(); return err }(), "Register": second(pd.Register(1, 1, 0)),
		"RegisterDMABuf": second(pd.RegisterDMABuf(0, 0, 1, 0, 0)), "NewQP": second(pd.NewQP(verbs.QPConfig{Send: cq, Recv: cq})), "Drain": second(ch.Drain()),
		"Poll": second(cq.Poll(nil)), "Arm": cq.Arm(), "Init": qp.Init(1, 0), "ReadyToReceive": qp.ReadyToReceive(verbs.Path{}),
		"ReadyToSend": qp.ReadyToSend(verbs.SendAttr{}), "SetError": qp.SetError(), "State": second(qp.State()), "PostWrites": second(qp.PostWrites(nil)),
		"PostReceives": second(qp.PostReceives(0, 1)),
	} {
		if !errors.Is(err, verbs.ErrClosed) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func second[T any](_ T, err error) error { return err }

// TestEveryCallFails: whatever call fails, the error names it and the device,
// and nothing is left behind.
func TestEveryCallFails(t *testing.T) {
	f := verbstest.New(t, verbstest.Options{})
	s := open(t, "mlx5_0")
	if err := s.qp.Init(1, verbs.RemoteWrite); err != nil {
		t.Fatal(err)
	}
	extra := open(t, "mlx5_0")
	var c [4]verbs.Completion
	for _, call := range []struct {
		symbol, want string
		do           func() error
	}{
		{"ibv_query_device", "query mlx5_0", func() error { return second(s.ctx.Attr()) }},
		{"ibv_query_port", "query port mlx5_0/1", func() error { return second(s.ctx.Port(1)) }},
		{"ibv_query_port", "query port mlx5_0/1", func() error { return second(s.ctx.GIDs(1)) }},
		{"ibv_query_device", "query GID table of mlx5_0/1", func() error { return second(s.ctx.GIDs(1)) }},
		{"_ibv_query_gid_table", "query GID table of mlx5_0/1", func() error { return second(s.ctx.GIDs(1)) }},
		{"ibv_alloc_pd", "allocate a protection domain on mlx5_0", func() error { return second(s.ctx.NewPD()) }},
		{"ibv_create_comp_channel", "make a completion channel on mlx5_0", func() error { return second(s.ctx.NewCompletionChannel()) }},
		{"ibv_create_cq", "make a completion queue of 7 entries on mlx5_0", func() error { return second(s.ctx.NewCQ(7, nil)) }},
		{"ibv_create_qp", "make a queue pair on mlx5_0", func() error {
			return second(s.pd.NewQP(verbs.QPConfig{Send: s.cq, Recv: s.cq, MaxSend: 1}))
		}},
		{"ibv_modify_qp", "modify queue pair 17 of mlx5_0/1 to ERR", s.qp.SetError},
		{"ibv_query_qp", "query queue pair 17 of mlx5_0/1", func() error { return second(s.qp.State()) }},
		{"ibv_post_send", "post write 1 of 2 to queue pair 17 of mlx5_0/1", func() error { return second(s.qp.PostWrites(make([]verbs.Write, 2))) }},
		{"ibv_post_recv", "post receive 1 of 3 to queue pair 17 of mlx5_0/1", func() error { return second(s.qp.PostReceives(1, 3)) }},
		{"ibv_req_notify_cq", "arm completion queue", s.cq.Arm},
		{"ibv_poll_cq", "poll completion queue", func() error { return second(s.cq.Poll(c[:])) }},
		{"ibv_destroy_qp", "close queue pair 18 of mlx5_0", extra.qp.Close},
		{"ibv_dereg_mr", "deregister 1048576 bytes", extra.mr.Close},
		{"ibv_destroy_cq", "close completion queue", extra.cq.Close},
		{"ibv_destroy_comp_channel", "close a completion channel of mlx5_0", extra.ch.Close},
		{"ibv_dealloc_pd", "close a protection domain of mlx5_0", extra.pd.Close},
	} {
		f.Fail(call.symbol, syscall.EIO, 1)
		err := call.do()
		var e *verbs.Error
		if !errors.As(err, &e) || e.Device != "mlx5_0" || !errors.Is(err, syscall.EIO) || !errors.Is(err, verbs.ErrDeviceLost) || !strings.HasPrefix(err.Error(), "verbs: "+call.want) {
			t.Errorf("%s fails: %v", call.symbol, err)
		}
		f.Heal()
	}
	// The event and the completion that could not be read: EIO, then nothing.
	f.Raise("mlx5_0", verbs.Event{Type: verbs.EventPortError, Port: 1})
	f.Fail("ibv_get_async_event", syscall.EIO, 1)
	if _, ok, err := s.ctx.NextEvent(); ok || !errors.Is(err, verbs.ErrDeviceLost) {
		t.Errorf("NextEvent: %v, %v", ok, err)
	}
	for errno, want := range map[syscall.Errno]error{
		syscall.ENODEV: verbs.ErrDeviceLost, syscall.ENOSYS: verbs.ErrNotSupported, syscall.ENOMEM: verbs.ErrNoMemory, syscall.EBUSY: verbs.ErrBusy, syscall.EINVAL: nil,
	} {
		for _, sentinel := range []error{verbs.ErrDeviceLost, verbs.ErrNotSupported, verbs.ErrNoMemory, verbs.ErrBusy} {
			if got := errors.Is(&verbs.Error{Errno: errno}, sentinel); got != (sentinel == want) {
				t.Errorf("%v is %v: %v", errno, sentinel, got)
			}
		}
	}
}
