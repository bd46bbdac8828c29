package verbs_test

import (
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/lockstep-ccl/lockstep/ccl/internal/verbs"
)

// TestRealDevices looks at whatever devices this machine has, and writes from
// one port to itself.
func TestRealDevices(t *testing.T) {
	lib, err := verbs.Load()
	if err != nil {
		t.Skip(err)
	}
	list, err := lib.Devices()
	if err != nil {
		t.Fatal(err)
	}
	if len(list) == 0 {
		t.Skip("no RDMA devices")
	}
	for _, d := range list {
		ctx, err := lib.Open(d.Name)
		if err != nil {
			t.Error(err)
			continue
		}
		attr := must(ctx.Attr())(t)
		t.Logf("%s: GUID %#x, firmware %q, %d ports, at most %d queue pairs of %d requests, %d regions", d.Name, d.GUID, attr.Firmware, attr.Ports, attr.MaxQP, attr.MaxQPWR, attr.MaxMR)
		for n := 1; n <= attr.Ports; n++ {
			p := must(ctx.Port(n))(t)
			t.Logf("%s/%d: %v, %v, %v, MTU %v, %v Gbit/s", d.Name, n, p.State, p.Physical, p.LinkLayer, p.ActiveMTU, p.Rate())
			for _, g := range must(ctx.GIDs(n))(t) {
				t.Logf("%s/%d: GID %d %v %v %s", d.Name, n, g.Index, g.GID, g.Type, g.Netdev)
			}
			if p.State == verbs.PortActive {
				loopback(t, ctx, n, p)
			}
		}
		if err := ctx.Close(); err != nil {
			t.Error(err)
		}
	}
}

// loopback connects a queue pair to itself.
func loopback(t *testing.T, ctx *verbs.Context, port int, p verbs.PortAttr) {
	s := &side{name: ctx.Name(), ctx: ctx, pd: must(ctx.NewPD())(t), ch: must(ctx.NewCompletionChannel())(t)}
	s.cq = must(ctx.NewCQ(2*depth, s.ch))(t)
	s.mem = must(unix.Mmap(-1, 0, memory, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS))(t)
	defer unix.Munmap(s.mem)
	s.mr = must(s.pd.Register(uintptr(unsafe.Pointer(&s.mem[0])), memory, verbs.LocalWrite|verbs.RemoteWrite|verbs.RelaxedOrdering))(t)
	s.newQP(t)
	defer func() {
		for _, c := range []interface{ Close() error }{s.qp, s.mr, s.cq, s.ch, s.pd} {
			if err := c.Close(); err != nil {
				t.Error(err)
			}
		}
	}()
	path := verbs.Path{QP: s.qp.Num(), MTU: p.ActiveMTU, LID: p.LID}
	if p.LinkLayer == verbs.LinkEthernet {
		for _, g := range must(ctx.GIDs(port))(t) {
			if g.Type == verbs.GIDRoCEv2 {
				path.GID, path.SGIDIndex = g.GID, g.Index
			}
		}
	}
	for _, err := range []error{s.qp.Init(port, verbs.RemoteWrite), s.qp.ReadyToReceive(path), s.qp.ReadyToSend(verbs.SendAttr{Timeout: 14, Retries: 6, RNRRetries: 6})} {
		if err != nil {
			t.Fatal(err)
		}
	}
	if n, err := s.qp.PostReceives(2, 1); n != 1 || err != nil {
		t.Fatal(err)
	}
	copy(s.mem, "to myself")
	w := s.write(s, 1, 0, 9)
	w.RemoteAddr += 100
	s.post(t, w)
	for _, c := range s.completions(t, 2) {
		if c.Status != verbs.Success {
			t.Errorf("%+v", c)
		}
	}
	if got := string(s.mem[100:109]); got != "to myself" {
		t.Errorf("written: %q", got)
	}
}
