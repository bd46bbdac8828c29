package verbs_test

import (
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/lockstep-ccl/lockstep/ccl/internal/verbs"
	"github.com/lockstep-ccl/lockstep/ccl/internal/verbs/verbstest"
)

// TestNoAllocations: posting, polling and arming.
func TestNoAllocations(t *testing.T) {
	_, a, b := fakePair(t, verbstest.Options{})
	w := []verbs.Write{a.write(b, 1, 0, 8), a.write(b, 2, 64, 4096)}
	w[0].Inline = true
	c := make([]verbs.Completion, 16)
	ok := true
	if n := testing.AllocsPerRun(100, func() {
		n1, err1 := b.qp.PostReceives(0, 2)
		n2, err2 := a.qp.PostWrites(w)
		n3, err3 := a.cq.Poll(c)
		n4, err4 := b.cq.Poll(c)
		n5, err5 := a.cq.Poll(c)
		err6 := a.cq.Arm()
		ok = ok && n1 == 2 && n2 == 2 && n3 == 2 && n4 == 2 && n5 == 0 && err1 == nil && err2 == nil && err3 == nil && err4 == nil && err5 == nil && err6 == nil
	}); n != 0 || !ok {
		t.Errorf("%v allocations, ok %v", n, ok)
	}
}

// BenchmarkPoll polls an empty queue; the fake answers without its lock.
func BenchmarkPoll(b *testing.B) {
	_, s, _ := fakePair(b, verbstest.Options{})
	c := make([]verbs.Completion, 16)
	for b.Loop() {
		if n, err := s.cq.Poll(c); n != 0 || err != nil {
			b.Fatal(n, err)
		}
	}
}

// BenchmarkPost posts inline writes of 8 bytes and polls their completion: one,
// and 32 in a chain of which the last is signalled. The fake carries them out.
func BenchmarkPost(b *testing.B) {
	for name, n := range map[string]int{"1": 1, "32": 32} {
		b.Run(name, func(b *testing.B) {
			_, s, to := fakePair(b, verbstest.Options{})
			w := make([]verbs.Write, n)
			for i := range w {
				w[i] = s.write(to, 0, 8*i, 8)
				w[i].Inline, w[i].WithImm, w[i].Signalled = true, false, i == n-1
			}
			c := make([]verbs.Completion, 16)
			for b.Loop() {
				if _, err := s.qp.PostWrites(w); err != nil {
					b.Fatal(err)
				}
				if k, err := s.cq.Poll(c); k != 1 || err != nil {
					b.Fatal(k, err)
				}
			}
			b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/float64(n), "ns/write")
		})
	}
}

// BenchmarkStream writes chunks of 256 KiB with immediate, as the transport does.
func BenchmarkStream(b *testing.B) {
	_, s, to := fakePair(b, verbstest.Options{})
	w := []verbs.Write{s.write(to, 0, 0, 256<<10)}
	c := make([]verbs.Completion, 16)
	b.SetBytes(256 << 10)
	for b.Loop() {
		if _, err := to.qp.PostReceives(0, 1); err != nil {
			b.Fatal(err)
		}
		if _, err := s.qp.PostWrites(w); err != nil {
			b.Fatal(err)
		}
		if n, err := s.cq.Poll(c); n != 1 || err != nil {
			b.Fatal(n, err)
		}
		if n, err := to.cq.Poll(c); n != 1 || err != nil {
			b.Fatal(n, err)
		}
	}
}

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
