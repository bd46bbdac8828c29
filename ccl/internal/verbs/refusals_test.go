package verbs_test

import (
	"errors"
	"strings"
	"testing"

	"github.com/lockstep-ccl/lockstep/ccl/internal/verbs"
	"github.com/lockstep-ccl/lockstep/ccl/internal/verbs/verbstest"
)

// TestStates: what the device refuses, and how the error reads.
func TestStates(t *testing.T) {
	verbstest.New(t, verbstest.Options{})
	a, b := open(t, "mlx5_0"), open(t, "mlx5_2")
	state := func(want verbs.QPState) {
		t.Helper()
		if s := must(a.qp.State())(t); s != want {
			t.Errorf("state %v, want %v", s, want)
		}
	}
	refused := func(what string, err error, want string) {
		t.Helper()
		if err == nil || !strings.HasPrefix(err.Error(), want) {
			t.Errorf("%s: %v, want %s…", what, err, want)
		}
	}
	state(verbs.StateReset)
	refused("write in RESET", second(a.qp.PostWrites(make([]verbs.Write, 1))), "verbs: post write 1 of 1 to queue pair 17 of mlx5_0: invalid argument")
	refused("receive in RESET", second(a.qp.PostReceives(0, 1)), "verbs: post receive 1 of 1")
	for _, port := range []int{-1, 0, 2, 257} {
		refused("Init", a.qp.Init(port, 0), "verbs: modify queue pair 17 of mlx5_0")
	}
	path := verbs.Path{QP: b.qp.Num(), PSN: 7, GID: b.gid(t).GID, SGIDIndex: a.gid(t).Index, MTU: verbs.MTU4096}
	refused("RTR from RESET", a.qp.ReadyToReceive(path), "verbs: modify queue pair 17 of mlx5_0 to RTR: invalid argument (to queue pair 17, GID ::ffff:10.0.0.9, LID 0, from GID index 3, MTU 4096)")
	if err := a.qp.Init(1, verbs.RemoteWrite); err != nil {
		t.Fatal(err)
	}
	state(verbs.StateInit)
	for _, bad := range []func(*verbs.Path){
		func(p *verbs.Path) { p.MTU = 0 }, func(p *verbs.Path) { p.MTU = 6 }, func(p *verbs.Path) { p.SGIDIndex = 9 }, func(p *verbs.Path) { p.SGIDIndex = 200 }, func(p *verbs.Path) { p.SGIDIndex += 256 }, func(p *verbs.Path) { p.SGIDIndex = -1 },
		func(p *verbs.Path) { p.GID = verbs.GID{} }, func(p *verbs.Path) { p.FlowLabel = 1 << 20 },
	} {
		p := path
		bad(&p)
		refused("RTR", a.qp.ReadyToReceive(p), "verbs: modify queue pair 17 of mlx5_0/1 to RTR: invalid argument (")
	}
	p := path
	p.GID[15] = 77
	refused("nobody's address", a.qp.ReadyToReceive(p), "verbs: modify queue pair 17 of mlx5_0/1 to RTR: connection timed out (")
	p.GID = must(open(t, "mlx5_1").ctx.GIDs(1))(t)[3].GID
	refused("another rail's address", a.qp.ReadyToReceive(p), "verbs: modify queue pair 17 of mlx5_0/1 to RTR: connection timed out (")
	refused("RTS from INIT", a.qp.ReadyToSend(verbs.SendAttr{}), "verbs: modify queue pair 17 of mlx5_0/1 to RTS: invalid argument (timeout 0, retries 0 and 0)")
	if err := a.qp.ReadyToReceive(path); err != nil {
		t.Fatal(err)
	}
	state(verbs.StateRTR)
	refused("write in RTR", second(a.qp.PostWrites(make([]verbs.Write, 1))), "verbs: post write 1 of 1 to queue pair 17 of mlx5_0/1: invalid argument")
	for _, s := range []verbs.SendAttr{{Timeout: 32}, {Retries: 8}, {RNRRetries: 8}} {
		refused("RTS", a.qp.ReadyToSend(s), "verbs: modify queue pair 17 of mlx5_0/1 to RTS: invalid argument (")
	}
	if err := a.qp.ReadyToSend(verbs.SendAttr{PSN: 0x12345678, Timeout: 14, Retries: 7}); err != nil {
		t.Fatal(err)
	}
	state(verbs.StateRTS)
	refused("Init in RTS", a.qp.Init(1, 0), "verbs: modify queue pair 17 of mlx5_0/1 to INIT: invalid argument (access 0x0)")
	if err := a.qp.SetError(); err != nil {
		t.Fatal(err)
	}
	state(verbs.StateError)
	if err := a.qp.SetError(); err != nil {
		t.Errorf("ERR again: %v", err)
	}
}

// TestPeerChecks: keys, ranges and rights, of both sides.
func TestPeerChecks(t *testing.T) {
	for _, c := range []struct {
		name   string
		spoil  func(w *verbs.Write, a, b *side)
		status verbs.Status
	}{
		{"the peer's local key", func(w *verbs.Write, a, b *side) { w.RKey = b.mr.LKey }, verbs.RemoteAccess},
		{"no key", func(w *verbs.Write, a, b *side) { w.RKey = 0 }, verbs.RemoteAccess},
		{"beyond the end", func(w *verbs.Write, a, b *side) { w.RemoteAddr += memory - 4 }, verbs.RemoteAccess},
		{"before the beginning", func(w *verbs.Write, a, b *side) { w.RemoteAddr-- }, verbs.RemoteAccess},
		{"wraps", func(w *verbs.Write, a, b *side) { w.RemoteAddr = 1<<64 - 4 }, verbs.RemoteAccess},
		{"deregistered there", func(w *verbs.Write, a, b *side) { b.mr.Close(); w.RKey |= 0 }, verbs.RemoteAccess},
		{"own remote key", func(w *verbs.Write, a, b *side) { w.LKey = a.mr.RKey }, verbs.LocalProtection},
		{"own memory's end", func(w *verbs.Write, a, b *side) { w.Addr += memory - 4 }, verbs.LocalProtection},
	} {
		t.Run(c.name, func(t *testing.T) {
			_, a, b := fakePair(t, verbstest.Options{})
			spare := *b.mr
			b.receives(t, 5, 2)
			w := a.write(b, 2, 0, 8)
			c.spoil(&w, a, b)
			ok := a.write(b, 1, 0, 8)
			if c.name == "deregistered there" {
				ok.Len = 0
			}
			a.post(t, ok, w, a.write(b, 3, 0, 8))
			a.want(t, 1, verbs.Success, 2, c.status, 3, verbs.Flushed)
			if s := must(a.qp.State())(t); s != verbs.StateError {
				t.Errorf("the sender is in %v", s)
			}
			if c.status != verbs.RemoteAccess {
				b.want(t, 5, verbs.Success)
				return
			}
			b.want(t, 5, verbs.Success, 5, verbs.Flushed)
			e, ok2, err := b.ctx.NextEvent()
			if want := (verbs.Event{Type: verbs.EventQPAccessError, QP: b.qp.Num()}); e != want || !ok2 || err != nil {
				t.Errorf("event %v, %v, %v", e, ok2, err)
			}
			if c.name == "deregistered there" { // for the test's end
				b.mr = must(b.pd.Register(uintptr(spare.Addr), int(spare.Len), verbs.LocalWrite))(t)
			}
		})
	}
	t.Run("no right to write", func(t *testing.T) {
		verbstest.New(t, verbstest.Options{})
		a, b := open(t, "mlx5_0"), open(t, "mlx5_2")
		for _, s := range []*side{a, b} {
			if err := s.qp.Init(1, verbs.RemoteRead); err != nil {
				t.Fatal(err)
			}
		}
		path := verbs.Path{QP: b.qp.Num(), GID: b.gid(t).GID, SGIDIndex: 3, MTU: verbs.MTU1024}
		if err := errors.Join(a.qp.ReadyToReceive(path), a.qp.ReadyToSend(verbs.SendAttr{Timeout: 14})); err != nil {
			t.Fatal(err)
		}
		path.GID, path.QP = a.gid(t).GID, a.qp.Num()
		if err := b.qp.ReadyToReceive(path); err != nil {
			t.Fatal(err)
		}
		a.post(t, a.write(b, 1, 0, 8))
		a.want(t, 1, verbs.RemoteAccess)
	})
}

// TestStrangers: a queue pair hears its peer alone, from the sequence number
// that was agreed on.
func TestStrangers(t *testing.T) {
	f, a, b := fakePair(t, verbstest.Options{Retry: never})
	b.receives(t, 7, 4)
	path := verbs.Path{QP: b.qp.Num(), PSN: 7, GID: b.gid(t).GID, SGIDIndex: a.gid(t).Index, MTU: verbs.MTU4096}
	stranger := must(a.pd.NewQP(verbs.QPConfig{Send: a.cq, Recv: a.cq, MaxSend: 4}))(t)
	if err := errors.Join(stranger.Init(1, verbs.RemoteWrite), stranger.ReadyToReceive(path), stranger.ReadyToSend(verbs.SendAttr{PSN: 7, Timeout: 14})); err != nil {
		t.Fatal(err)
	}
	b.mem[0] = 0xee
	if _, err := stranger.PostWrites([]verbs.Write{a.write(b, 1, 0, 8)}); err != nil {
		t.Fatal(err)
	}
	if n := f.ExpireRetries(); n != 1 {
		t.Errorf("%d wait", n)
	}
	if c := a.completions(t, 1)[0]; c.ID != 1 || c.Status != verbs.RetriesExceeded || c.QP != stranger.Num() {
		t.Errorf("%+v", c)
	}
	b.none(t)
	if err := stranger.Close(); err != nil {
		t.Error(err)
	}
	for _, ahead := range []uint32{1, 1 << 20, 1<<24 - 1} { // the last is one behind: acknowledged, not done
		for _, s := range []*side{a, b} {
			if err := s.qp.Close(); err != nil {
				t.Fatal(err)
			}
			s.newQP(t)
		}
		for _, e := range [][2]*side{{a, b}, {b, a}} {
			path.QP, path.GID, path.SGIDIndex = e[1].qp.Num(), e[1].gid(t).GID, e[0].gid(t).Index
			if err := errors.Join(e[0].qp.Init(1, verbs.RemoteWrite), e[0].qp.ReadyToReceive(path), e[0].qp.ReadyToSend(verbs.SendAttr{PSN: 7 + ahead, Timeout: 14})); err != nil {
				t.Fatal(err)
			}
		}
		b.receives(t, 7, 1)
		a.post(t, a.write(b, 2, 0, 8))
		if ahead == 1<<24-1 {
			a.want(t, 2, verbs.Success)
		} else {
			a.none(t)
			f.ExpireRetries()
			a.want(t, 2, verbs.RetriesExceeded)
		}
		b.none(t)
	}
	if b.mem[0] != 0xee {
		t.Error("written")
	}
}
