package verbs_test

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/lockstep-ccl/lockstep/ccl/internal/verbs"
	"github.com/lockstep-ccl/lockstep/ccl/internal/verbs/verbstest"
)

// never is a retry time that no test lives to see.
const never = time.Hour

func (s *side) noEvent(t *testing.T) {
	t.Helper()
	if e, ok, err := s.ctx.NextEvent(); ok || err != nil {
		t.Errorf("%s: unexpected %v, %v", s.name, e, err)
	}
}

// TestLoss: whatever way is lost, the sender finds out by its retries alone.
func TestLoss(t *testing.T) {
	for name, lose := range map[string]func(f *verbstest.Fabric){
		"writes":           func(f *verbstest.Fabric) { f.Link("mlx5_0", 1, "mlx5_2", 1).Drop(true) },
		"acknowledgements": func(f *verbstest.Fabric) { f.Link("mlx5_2", 1, "mlx5_0", 1).LoseAcks(true) },
		"the way back":     func(f *verbstest.Fabric) { f.Link("mlx5_2", 1, "mlx5_0", 1).Drop(true) },
		"the peer's port":  func(f *verbstest.Fabric) { f.SetPort("mlx5_2", 1, false, false) },
		"the own port":     func(f *verbstest.Fabric) { f.SetPort("mlx5_0", 1, false, false) },
	} {
		t.Run(name, func(t *testing.T) {
			f, a, b := fakePair(t, verbstest.Options{Retry: 5 * time.Millisecond})
			b.receives(t, 7, 3)
			a.post(t, a.write(b, 1, 0, 8))
			a.want(t, 1, verbs.Success)
			b.want(t, 7, verbs.Success)
			lose(f)
			a.mem[100] = 3
			w := a.write(b, 2, 100, 8)
			w.Signalled = false
			a.post(t, w, a.write(b, 3, 200, 8))
			a.want(t, 2, verbs.RetriesExceeded, 3, verbs.Flushed)
			// Without acknowledgements both were done, once; else neither was.
			arrived := name == "acknowledgements" || name == "the way back"
			if arrived {
				b.want(t, 7, verbs.Success, 7, verbs.Success)
			}
			b.none(t)
			if got := b.mem[100] == 3; got != arrived {
				t.Errorf("written: %v", got)
			}
			if s := must(b.qp.State())(t); s != verbs.StateRTS {
				t.Errorf("the receiver is in %v", s)
			}
			a.noEvent(t)
			b.noEvent(t)
		})
	}
}

// TestLossRecovers: retries carry a connection over a loss, in order, once each.
func TestLossRecovers(t *testing.T) {
	f, a, b := fakePair(t, verbstest.Options{Retry: 20 * time.Millisecond})
	ab, ba := f.Link("mlx5_0", 1, "mlx5_2", 1), f.Link("mlx5_2", 1, "mlx5_0", 1)
	b.receives(t, 7, 40)
	for i := range 10 {
		switch i % 3 {
		case 0:
			ab.DropNext(1 + i%2)
		case 1:
			ba.LoseAcks(true)
		case 2:
			ab.TearNext(1)
		}
		var w []verbs.Write
		for k := range 4 {
			x := a.write(b, uint64(4*i+k), 64*k, 64)
			x.Signalled = k == 3
			w = append(w, x)
		}
		a.post(t, w...)
		ba.LoseAcks(false)
		a.want(t, 4*i+3, verbs.Success)
	}
	for i, c := range b.completions(t, 40) {
		if c.Imm != uint32(i) {
			t.Errorf("completion %d is %+v", i, c)
		}
	}
	b.none(t)
}

// TestTorn: half a write lies there, and nobody is told.
func TestTorn(t *testing.T) {
	f, a, b := fakePair(t, verbstest.Options{Retry: never})
	b.receives(t, 7, 1)
	for i := range 100 {
		a.mem[i] = 1
	}
	f.Link("mlx5_0", 1, "mlx5_2", 1).TearNext(1)
	a.post(t, a.write(b, 1, 0, 100))
	if !bytes.Equal(b.mem[:101], append(bytes.Repeat([]byte{1}, 50), make([]byte, 51)...)) {
		t.Errorf("written: %v", b.mem[:101])
	}
	a.none(t)
	b.none(t)
	if n := f.ExpireRetries(); n != 1 {
		t.Errorf("%d senders waited", n)
	}
	a.want(t, 1, verbs.RetriesExceeded)
}

// TestReceiverNotReady: a write without a receive waits, and fails where its
// sender does not.
func TestReceiverNotReady(t *testing.T) {
	_, a, b := fakePair(t, verbstest.Options{}) // rnr_retry 7: for ever
	a.mem[0] = 1
	a.post(t, a.write(b, 1, 0, 8), a.write(b, 2, 8, 8))
	a.none(t)
	if b.mem[0] != 0 {
		t.Error("written without a receive")
	}
	time.Sleep(10 * time.Millisecond) // some refusals more, however many
	a.none(t)
	b.receives(t, 7, 2)
	a.want(t, 1, verbs.Success, 2, verbs.Success)
	b.want(t, 7, verbs.Success, 7, verbs.Success)

	c, d := open(t, "mlx5_0"), open(t, "mlx5_2")
	path := func(s, to *side) verbs.Path {
		return verbs.Path{QP: to.qp.Num(), GID: to.gid(t).GID, SGIDIndex: s.gid(t).Index, MTU: verbs.MTU4096}
	}
	for _, e := range [][2]*side{{c, d}, {d, c}} {
		if err := errors.Join(e[0].qp.Init(1, verbs.RemoteWrite), e[0].qp.ReadyToReceive(path(e[0], e[1])),
			e[0].qp.ReadyToSend(verbs.SendAttr{Timeout: 14, Retries: 7, RNRRetries: 2})); err != nil {
			t.Fatal(err)
		}
	}
	d.receives(t, 7, 1)
	c.post(t, c.write(d, 1, 0, 8), c.write(d, 2, 0, 8), c.write(d, 3, 0, 8))
	c.want(t, 1, verbs.Success, 2, verbs.ReceiverNotReady, 3, verbs.Flushed)
}

// TestDelay: what is posted stays in order, and completes when it has gone
// there and back.
func TestDelay(t *testing.T) {
	f, a, b := fakePair(t, verbstest.Options{Retry: never})
	ab, ba := f.Link("mlx5_0", 1, "mlx5_2", 1), f.Link("mlx5_2", 1, "mlx5_0", 1)
	ab.Delay(2 * time.Millisecond)
	ba.Delay(2 * time.Millisecond)
	b.receives(t, 7, 20)
	began := time.Now()
	for i := range 20 {
		a.post(t, a.write(b, uint64(i), 0, 8))
		if i == 10 {
			ab.Delay(0) // later ones do not overtake
		}
	}
	for i, c := range a.completions(t, 20) {
		if c.ID != uint64(i) || c.Status != verbs.Success {
			t.Errorf("completion %d is %+v", i, c)
		}
	}
	if d := time.Since(began); d < 4*time.Millisecond {
		t.Errorf("there and back in %v", d)
	}
	for i, c := range b.completions(t, 20) {
		if c.Imm != uint32(i) {
			t.Errorf("receive %d is %+v", i, c)
		}
	}
}

// TestLateWrite: the network delivers after the sender has given up, and even
// after its queue pair is gone. It arrives while the receiver's queue pair
// lives; never once that is in ERR or replaced.
func TestLateWrite(t *testing.T) {
	for _, c := range []struct {
		name    string
		between func(t *testing.T, a, b *side)
		arrives bool
	}{
		{"nothing", func(*testing.T, *side, *side) {}, true},
		{"sender in ERR", func(t *testing.T, a, b *side) {
			if err := a.qp.SetError(); err != nil {
				t.Fatal(err)
			}
			a.want(t, 1, verbs.Flushed, 2, verbs.Flushed)
		}, true},
		{"sender gone", func(t *testing.T, a, b *side) {
			if err := a.qp.Close(); err != nil {
				t.Fatal(err)
			}
			a.newQP(t)
			a.none(t)
		}, true},
		{"receiver in ERR", func(t *testing.T, a, b *side) {
			if err := b.qp.SetError(); err != nil {
				t.Fatal(err)
			}
			b.want(t, 7, verbs.Flushed, 7, verbs.Flushed)
		}, false},
		{"receiver replaced, connected again", func(t *testing.T, a, b *side) {
			for _, s := range []*side{a, b} {
				if err := s.qp.Close(); err != nil {
					t.Fatal(err)
				}
				s.newQP(t)
			}
			connect(t, a, b, 14, 6)
			b.receives(t, 8, 2)
		}, false},
		{"the port down", nil, false},
	} {
		t.Run(c.name, func(t *testing.T) {
			f, a, b := fakePair(t, verbstest.Options{Retry: never})
			ab := f.Link("mlx5_0", 1, "mlx5_2", 1)
			b.receives(t, 7, 2)
			ab.Freeze()
			a.mem[0], a.mem[8] = 1, 1
			a.post(t, a.write(b, 1, 0, 8), a.write(b, 2, 8, 8))
			if n := ab.InFlight(); n != 2 {
				t.Errorf("%d in flight", n)
			}
			if c.between == nil {
				f.SetPort("mlx5_2", 1, false, false)
			} else {
				c.between(t, a, b)
			}
			a.mem[0], a.mem[8] = 2, 2
			if b.mem[0] != 0 {
				t.Error("written while frozen")
			}
			if n := ab.Release(); n != 2 {
				t.Errorf("%d released", n)
			}
			if got := b.mem[0] == 1 && b.mem[8] == 1; got != c.arrives {
				t.Errorf("arrived: %v, %v", got, b.mem[:16])
			}
			if c.arrives {
				b.want(t, 7, verbs.Success, 7, verbs.Success)
			}
			b.none(t)
			if c.name == "nothing" {
				a.want(t, 1, verbs.Success, 2, verbs.Success)
			}
			a.none(t)
			if n := ab.InFlight(); n != 0 {
				t.Errorf("%d in flight", n)
			}
		})
	}
}

// TestFrozenAnswers: acknowledgements too can be late; what is discarded is lost.
func TestFrozenAnswers(t *testing.T) {
	f, a, b := fakePair(t, verbstest.Options{Retry: never})
	ab, ba := f.Link("mlx5_0", 1, "mlx5_2", 1), f.Link("mlx5_2", 1, "mlx5_0", 1)
	b.receives(t, 7, 2)
	ba.Freeze()
	a.post(t, a.write(b, 1, 0, 8))
	b.want(t, 7, verbs.Success)
	a.none(t)
	if n := ba.Release(); n != 1 {
		t.Errorf("%d released", n)
	}
	a.want(t, 1, verbs.Success)

	ab.Freeze()
	a.post(t, a.write(b, 2, 0, 8))
	if n := ab.Discard(); n != 1 {
		t.Errorf("%d discarded", n)
	}
	b.none(t)
	ab.Freeze()
	a.post(t, a.write(b, 3, 0, 8))
	f.Heal()
	if n := ab.InFlight(); n != 0 {
		t.Errorf("%d in flight after Heal", n)
	}
	// Ahead of what was lost: dropped.
	a.post(t, a.write(b, 4, 0, 8))
	b.none(t)
	f.ExpireRetries()
	a.want(t, 2, verbs.RetriesExceeded, 3, verbs.Flushed, 4, verbs.Flushed)
}

// TestPortEvents: ports of one device alone tell, in every context, as often
// as the test says.
func TestPortEvents(t *testing.T) {
	f, a, b := fakePair(t, verbstest.Options{})
	also := open(t, "mlx5_0")
	f.SetPort("mlx5_0", 1, false, true)
	f.SetPort("mlx5_0", 1, true, false)
	f.SetPort("mlx5_0", 1, true, true)
	f.Raise("mlx5_0", verbs.Event{Type: verbs.EventPortActive, Port: 1}) // twice
	f.Raise("mlx5_0", verbs.Event{Type: verbs.EventGIDChange, Port: 1})
	f.Raise("mlx5_0", verbs.Event{Type: verbs.EventLastWQE, QP: a.qp.Num()})
	f.Raise("mlx5_0", verbs.Event{Type: verbs.EventQPFatal, QP: 9999}) // nobody's
	common := []verbs.Event{
		{Type: verbs.EventPortError, Port: 1}, {Type: verbs.EventPortActive, Port: 1}, {Type: verbs.EventPortActive, Port: 1}, {Type: verbs.EventGIDChange, Port: 1},
	}
	for s, want := range map[*side][]verbs.Event{a: append(common[:4:4], verbs.Event{Type: verbs.EventLastWQE, QP: a.qp.Num()}), also: common} {
		for _, w := range want {
			if e, ok, err := s.ctx.NextEvent(); e != w || !ok || err != nil {
				t.Errorf("%v, %v, %v, want %v", e, ok, err, w)
			}
		}
		s.noEvent(t)
	}
	b.noEvent(t)
	// An event of a queue pair that is closed before it is read is none.
	f.Raise("mlx5_0", verbs.Event{Type: verbs.EventQPFatal, QP: a.qp.Num()})
	f.Raise("mlx5_0", verbs.Event{Type: verbs.EventSMChange, Port: 1})
	if err := a.qp.Close(); err != nil {
		t.Fatal(err)
	}
	a.newQP(t)
	if e := a.events(t, verbs.EventSMChange); len(e) != 1 {
		t.Errorf("events %v", e)
	}
	a.noEvent(t)
}

// TestEventsAwait: a goroutine can sleep on the events with Go's poller, through
// a duplicate of the descriptor.
func TestEventsAwait(t *testing.T) {
	f, a, _ := fakePair(t, verbstest.Options{})
	fd, err := syscall.Dup(a.ctx.AsyncFD())
	if err != nil {
		t.Fatal(err)
	}
	file := os.NewFile(uintptr(fd), "events")
	raw := must(file.SyscallConn())(t)
	got, done := make(chan verbs.Event), make(chan error)
	go func() {
		done <- raw.Read(func(uintptr) bool {
			for {
				e, ok, err := a.ctx.NextEvent()
				if !ok || err != nil {
					return err != nil
				}
				got <- e
			}
		})
	}()
	f.SetPort("mlx5_0", 1, false, true)
	if e := <-got; e != (verbs.Event{Type: verbs.EventPortError, Port: 1}) {
		t.Errorf("%v", e)
	}
	if err := file.Close(); err != nil { // ends the goroutine
		t.Error(err)
	}
	if err := <-done; err == nil {
		t.Error("NextEvent failed, or closing the file did not end the wait")
	}
}

// TestOverrun: a completion queue that is too small says so, and which it is.
func TestOverrun(t *testing.T) {
	f := verbstest.New(t, verbstest.Options{})
	_ = f
	s := open(t, "mlx5_0")
	cq := must(s.ctx.NewCQ(2, nil))(t)
	qp := must(s.pd.NewQP(verbs.QPConfig{Send: cq, Recv: cq, MaxSend: 1, MaxRecv: 8}))(t)
	if err := errors.Join(qp.Init(1, 0), second(qp.PostReceives(0, 5)), qp.SetError()); err != nil {
		t.Fatal(err)
	}
	if e := s.events(t, verbs.EventCQError); len(e) != 1 || e[0].CQ != cq.ID() || e[0].QP != 0 || e[0].Port != 0 {
		t.Errorf("events %v, want one of %d", e, cq.ID())
	}
	if err := errors.Join(qp.Close(), cq.Close()); err != nil {
		t.Error(err)
	}
}

// TestRemoved: what is posted never completes, what was there stays, all else
// fails but destroying. The device that comes back is another.
func TestRemoved(t *testing.T) {
	f, a, b := fakePair(t, verbstest.Options{Retry: never})
	b.receives(t, 7, 4)
	a.post(t, a.write(b, 1, 0, 8))
	f.Link("mlx5_0", 1, "mlx5_2", 1).Freeze()
	a.post(t, a.write(b, 2, 0, 8))
	f.Remove("mlx5_0")
	if e := a.events(t, verbs.EventDeviceFatal); len(e) != 1 || e[0] != (verbs.Event{Type: verbs.EventDeviceFatal}) {
		t.Errorf("events %v", e)
	}
	var c1 [2]verbs.Completion
	if n, err := a.cq.Poll(c1[:]); n != 1 || err != nil || c1[0].ID != 1 || c1[0].Status != verbs.Success {
		t.Errorf("%d, %v: %+v", n, err, c1)
	}
	if n := f.ExpireRetries(); n != 0 {
		t.Errorf("%d senders wait", n)
	}
	for name, err := range map[string]error{
		"Attr": second(a.ctx.Attr()), "Port": second(a.ctx.Port(1)), "GIDs": second(a.ctx.GIDs(1)), "NewPD": second(a.ctx.NewPD()),
		"NewCQ": second(a.ctx.NewCQ(1, nil)), "SetError": a.qp.SetError(), "State": second(a.qp.State()), "Arm": a.cq.Arm(),
		"PostWrites": second(a.qp.PostWrites(make([]verbs.Write, 1))), "PostReceives": second(a.qp.PostReceives(0, 1)),
	} {
		if !errors.Is(err, verbs.ErrDeviceLost) {
			t.Errorf("%s: %v", name, err)
		}
	}
	// The peer's writes get no answer.
	b.post(t, b.write(a, 3, 0, 8))
	f.ExpireRetries()
	b.want(t, 7, verbs.Success)
	b.want(t, 3, verbs.RetriesExceeded, 7, verbs.Flushed, 7, verbs.Flushed, 7, verbs.Flushed)

	f.Restore("mlx5_0")
	if _, err := a.ctx.Port(1); !errors.Is(err, verbs.ErrDeviceLost) {
		t.Errorf("the old context of a device that came back: %v", err)
	}
	f.Heal()
	c, d := open(t, "mlx5_0"), open(t, "mlx5_2")
	connect(t, c, d, 14, 6)
	d.receives(t, 7, 1)
	c.post(t, c.write(d, 1, 0, 8))
	c.want(t, 1, verbs.Success)
	d.want(t, 7, verbs.Success)
}

// TestFailSends: a device that fails at once, after what went before.
func TestFailSends(t *testing.T) {
	f, a, b := fakePair(t, verbstest.Options{Retry: never})
	b.receives(t, 7, 4)
	ba := f.Link("mlx5_2", 1, "mlx5_0", 1)
	ba.Freeze()
	a.post(t, a.write(b, 1, 0, 8))
	f.FailSends("mlx5_0", 1, verbs.LocalQPError)
	a.post(t, a.write(b, 2, 0, 8))
	a.none(t)
	ba.Release()
	a.want(t, 1, verbs.Success, 2, verbs.LocalQPError)
}

// TestSysfs: the tree says what the ports are in.
func TestSysfs(t *testing.T) {
	f := verbstest.New(t, verbstest.Options{})
	read := func(path string) string {
		b, err := os.ReadFile(filepath.Join(f.Sysfs(), path))
		if err != nil {
			return err.Error()
		}
		return strings.TrimSpace(string(b))
	}
	check := func(want ...string) {
		t.Helper()
		for i := 0; i < len(want); i += 2 {
			if got := read(want[i]); !strings.Contains(got, want[i+1]) {
				t.Errorf("%s: %q, want %q", want[i], got, want[i+1])
			}
		}
	}
	const port = "class/infiniband/mlx5_1/ports/1/"
	check(port+"state", "4: ACTIVE", port+"phys_state", "5: LinkUp", port+"link_layer", "Ethernet", port+"gid_attrs/types/3", "RoCE v2", port+"gid_attrs/types/2", "IB/RoCE v1",
		port+"gid_attrs/ndevs/0", "fake4", port+"gids/3", "0000:0000:0000:0000:0000:ffff:0a01:0005", port+"gids/7", "0000:0000:0000:0000:0000:0000:0000:0000",
		port+"gid_attrs/types/7", "no such file", "class/infiniband/mlx5_1/node_guid", "0202:03ff:fe00:0002", "class/infiniband/mlx5_1/device/numa_node", "0",
		"class/net/fake4/operstate", "up", "bus/pci/devices/0000:21:00.0/vendor", "0x15b3")
	f.SetPort("mlx5_1", 1, false, false)
	f.SetGIDs("mlx5_1", 1, nil)
	check(port+"state", "1: DOWN", port+"phys_state", "3: Disabled", port+"gids/3", "0000:0000:0000:0000:0000:0000:0000:0000", port+"gid_attrs/ndevs/0", "no such file",
		"class/net/fake4/operstate", "down")
	f.Remove("mlx5_1")
	check(port+"state", "no such file")
	f.Restore("mlx5_1")
	check(port+"state", "1: DOWN")
}
