package verbs_test

import (
	"bytes"
	"errors"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/lockstep-ccl/lockstep/ccl/internal/verbs"
	"github.com/lockstep-ccl/lockstep/ccl/internal/verbs/verbstest"
)

// fakePair connects two devices of a rail.
func fakePair(t testing.TB, o verbstest.Options) (f *verbstest.Fabric, a, b *side) {
	t.Helper()
	f = verbstest.New(t, o)
	a, b = open(t, "mlx5_0"), open(t, "mlx5_2")
	connect(t, a, b, 14, 6)
	return f, a, b
}

// want takes completions and compares their IDs and statuses.
func (s *side) want(t *testing.T, want ...any) []verbs.Completion {
	t.Helper()
	got := s.completions(t, len(want)/2)
	for i, c := range got {
		if c.ID != uint64(want[2*i].(int)) || c.Status != want[2*i+1].(verbs.Status) || c.QP != s.qp.Num() {
			t.Errorf("%s: completion %d is %+v, want %v", s.name, i, c, want[2*i:2*i+2])
		}
	}
	return got
}

// none wants no completion.
func (s *side) none(t *testing.T) {
	t.Helper()
	var c [4]verbs.Completion
	if n, err := s.cq.Poll(c[:]); n != 0 || err != nil {
		t.Errorf("%s: unexpected completions %+v, %v", s.name, c[:n], err)
	}
}

func (s *side) receives(t *testing.T, id uint64, n int) {
	t.Helper()
	if got, err := s.qp.PostReceives(id, n); got != n || err != nil {
		t.Fatalf("%d of %d receives posted: %v", got, n, err)
	}
}

func TestWrite(t *testing.T) {
	_, a, b := fakePair(t, verbstest.Options{})
	for i := range a.mem {
		a.mem[i] = byte(i*7 + i>>8)
	}
	b.receives(t, 9, 60)
	// More than one call of the provider takes; lengths from 0, inline and not.
	var w []verbs.Write
	for i, at := 0, 0; i < 60; i++ {
		x := a.write(b, uint64(i), at, i*i)
		x.Inline, x.Signalled, x.Imm = i*i <= 220, i == 59, 0x80000000+uint32(i)
		w = append(w, x)
		at += i * i
	}
	if n, err := a.qp.PostWrites(w); n != 60 || err != nil {
		t.Fatalf("%d posted: %v", n, err)
	}
	// What is there is taken, as far as there is room.
	got := make([]verbs.Completion, 64)
	if n, err := b.cq.Poll(got[:40]); n != 40 || err != nil {
		t.Errorf("polled %d of 40: %v", n, err)
	}
	if n, err := b.cq.Poll(got[40:]); n != 20 || err != nil {
		t.Errorf("polled %d of 20: %v", n, err)
	}
	for i, c := range got[:60] {
		want := verbs.Completion{ID: 9, Opcode: verbs.OpReceiveWrite, Bytes: uint32(i * i), Imm: 0x80000000 + uint32(i), HasImm: true, QP: b.qp.Num()}
		if c != want {
			t.Errorf("%+v, want %+v", c, want)
		}
	}
	if c := a.completions(t, 1)[0]; c.ID != 59 || c.Opcode != verbs.OpWrite || c.Status != verbs.Success || c.HasImm {
		t.Errorf("%+v", c)
	}
	a.none(t)
	if !bytes.Equal(a.mem[:68000], b.mem[:68000]) {
		t.Error("the bytes differ")
	}
	// Without an immediate nobody is told.
	b.mem[0] = 0xff
	x := a.write(b, 70, 0, 8)
	x.WithImm = false
	a.post(t, x)
	a.want(t, 70, verbs.Success)
	b.none(t)
	if b.mem[0] != a.mem[0] {
		t.Error("not written")
	}
	if n, err := a.qp.PostWrites(nil); n != 0 || err != nil {
		t.Errorf("nothing to post: %d, %v", n, err)
	}
}

// TestInlineIsCopied: an inline write's bytes may change as soon as it is posted,
// others' may not.
func TestInlineIsCopied(t *testing.T) {
	f, a, b := fakePair(t, verbstest.Options{Retry: 20 * time.Millisecond})
	f.Link("mlx5_0", 1, "mlx5_2", 1).DropNext(2) // both go out again
	a.mem[0], a.mem[8] = 1, 1
	w := make([]verbs.Write, 2)
	for i := range w {
		w[i] = a.write(b, uint64(i), 8*i, 8)
		w[i].Inline, w[i].WithImm = i == 0, false
	}
	a.post(t, w...)
	a.mem[0], a.mem[8] = 2, 2
	a.want(t, 0, verbs.Success, 1, verbs.Success)
	if b.mem[0] != 1 || b.mem[8] != 2 {
		t.Errorf("inline %d, from memory %d", b.mem[0], b.mem[8])
	}
}

// TestQueueLimits: a slot of the send queue is free when the completion that
// covers it was polled.
func TestQueueLimits(t *testing.T) {
	_, a, b := fakePair(t, verbstest.Options{})
	b.receives(t, 0, 5)
	if n, err := b.qp.PostReceives(0, depth); n != depth-5 || !errors.Is(err, verbs.ErrNoMemory) {
		t.Errorf("more receives than room: %d, %v", n, err)
	}
	if n, err := b.qp.PostReceives(0, 40); n != 0 || !errors.Is(err, verbs.ErrNoMemory) || !strings.Contains(err.Error(), "post receive 1 of 40 to queue pair 17 of mlx5_2/1") {
		t.Errorf("more receives than room: %d, %v", n, err)
	}
	var w []verbs.Write
	for i := range depth + 2 {
		x := a.write(b, uint64(i), 0, 8)
		x.Signalled = i%64 == 63
		w = append(w, x)
	}
	a.post(t, w[:5]...)
	n, err := a.qp.PostWrites(w[5:])
	if n != depth-5 || !errors.Is(err, verbs.ErrNoMemory) || !strings.HasSuffix(err.Error(), "(the queue is full)") || !strings.Contains(err.Error(), "post write 124 of 125 to queue pair 17 of mlx5_0/1") {
		t.Errorf("more writes than room: %d, %v", n, err)
	}
	var c [1]verbs.Completion
	if n, err := a.cq.Poll(c[:]); n != 1 || err != nil || c[0].ID != 63 {
		t.Fatalf("%d, %v, %+v", n, err, c)
	}
	if n, err = a.qp.PostWrites(w[:65]); n != 64 || err == nil {
		t.Errorf("after one completion of 64: %d, %v", n, err)
	}
	// Half the receives are polled, so half may be posted.
	b.completions(t, 64)
	if n, err := b.qp.PostReceives(0, 65); n != 64 || err == nil {
		t.Errorf("after 64 receives: %d, %v", n, err)
	}

	for _, x := range []verbs.Write{
		{Len: 257, Inline: true, WithImm: true}, // more than the queue pair has
		{Len: 257, Inline: true},
	} {
		if n, err := a.qp.PostWrites([]verbs.Write{x}); n != 0 || !errors.Is(err, syscall.EINVAL) {
			t.Errorf("%+v: %d, %v", x, n, err)
		}
	}
	for _, cfg := range []verbs.QPConfig{{MaxSend: 0}, {MaxSend: 1 << 20}, {MaxSend: 1, MaxRecv: 1 << 20}, {MaxSend: 1, MaxInline: 4096},
		{MaxSend: -1}, {MaxSend: 1, MaxRecv: -1}, {MaxSend: 1, MaxInline: -1}, {MaxSend: 1<<32 + 1}} {
		cfg.Send, cfg.Recv = a.cq, a.cq
		if _, err := a.pd.NewQP(cfg); !errors.Is(err, syscall.EINVAL) {
			t.Errorf("%+v: %v", cfg, err)
		}
	}
	if got := a.qp.Config(); got.MaxSend != depth || got.MaxRecv != depth || got.MaxInline != 220 || got.Send != a.cq {
		t.Errorf("Config: %+v", got)
	}
	for _, n := range []int{-1, 0, 1 << 30, 1<<32 + 1} {
		if _, err := a.ctx.NewCQ(n, nil); !errors.Is(err, syscall.EINVAL) {
			t.Errorf("NewCQ(%d): %v", n, err)
		}
	}
}

// TestSetError: all that is posted is flushed, on this side only, and nothing
// arrives any more.
func TestSetError(t *testing.T) {
	f, a, b := fakePair(t, verbstest.Options{Retry: time.Hour})
	b.receives(t, 5, 3)
	a.post(t, a.write(b, 1, 0, 8))
	b.want(t, 5, verbs.Success)
	a.want(t, 1, verbs.Success)
	if err := b.qp.SetError(); err != nil {
		t.Fatal(err)
	}
	b.want(t, 5, verbs.Flushed, 5, verbs.Flushed)
	b.receives(t, 6, 1)
	b.want(t, 6, verbs.Flushed)

	b.mem[0] = 0xee
	w := a.write(b, 2, 0, 8)
	w.Signalled = false
	a.post(t, w, a.write(b, 3, 0, 8))
	a.none(t)
	if b.mem[0] != 0xee {
		t.Error("written through a queue pair in ERR")
	}
	if err := a.qp.SetError(); err != nil {
		t.Fatal(err)
	}
	a.want(t, 2, verbs.Flushed, 3, verbs.Flushed) // the unsignalled one too
	w.ID = 4
	a.post(t, w)
	a.want(t, 4, verbs.Flushed)
	if n := f.ExpireRetries(); n != 0 {
		t.Errorf("%d senders wait", n)
	}
}

// TestInfiniBand: by LID alone, and by GID.
func TestInfiniBand(t *testing.T) {
	for name, global := range map[string]bool{"LID": false, "GID": true} {
		t.Run(name, func(t *testing.T) {
			verbstest.New(t, verbstest.Options{Devices: []verbstest.Device{
				{Name: "ib0", Ports: []verbstest.Port{{InfiniBand: true}}}, {Name: "ib1", Ports: []verbstest.Port{{InfiniBand: true}}},
			}})
			a, b := open(t, "ib0"), open(t, "ib1")
			for _, e := range [][2]*side{{a, b}, {b, a}} {
				p := verbs.Path{QP: e[1].qp.Num(), LID: must(e[1].ctx.Port(1))(t).LID, MTU: verbs.MTU4096}
				if global {
					p.GID, p.LID = must(e[1].ctx.GIDs(1))(t)[0].GID, 0
				}
				if err := errors.Join(e[0].qp.Init(1, verbs.RemoteWrite), e[0].qp.ReadyToReceive(p), e[0].qp.ReadyToSend(verbs.SendAttr{Timeout: 14})); err != nil {
					t.Fatal(err)
				}
			}
			b.receives(t, 2, 1)
			a.post(t, a.write(b, 1, 0, 100))
			a.want(t, 1, verbs.Success)
			b.want(t, 2, verbs.Success)
		})
	}
}

// TestChannel: an armed queue announces the next completion once, through a
// descriptor that epolls.
func TestChannel(t *testing.T) {
	_, a, b := fakePair(t, verbstest.Options{})
	ep := must(unix.EpollCreate1(unix.EPOLL_CLOEXEC))(t)
	defer unix.Close(ep)
	if err := unix.EpollCtl(ep, unix.EPOLL_CTL_ADD, b.ch.FD(), &unix.EpollEvent{Events: unix.EPOLLIN}); err != nil {
		t.Fatal(err)
	}
	readable := func() bool {
		var e [1]unix.EpollEvent
		return must(unix.EpollWait(ep, e[:], 0))(t) == 1
	}
	drained := func(want int) {
		t.Helper()
		if n, err := b.ch.Drain(); n != want || err != nil {
			t.Errorf("Drain: %d, %v, want %d", n, err, want)
		}
	}
	b.receives(t, 0, 8)
	a.post(t, a.write(b, 1, 0, 8))
	if readable() {
		t.Error("not armed, and readable")
	}
	drained(0)
	b.completions(t, 1)
	if err := b.cq.Arm(); err != nil {
		t.Fatal(err)
	}
	if readable() {
		t.Error("armed, empty, and readable")
	}
	a.post(t, a.write(b, 1, 0, 8), a.write(b, 2, 0, 8))
	if !readable() {
		t.Error("not readable after a completion")
	}
	drained(1)
	if readable() {
		t.Error("readable after Drain")
	}
	// Two queues of one channel.
	second := must(b.ctx.NewCQ(8, b.ch))(t)
	qp := must(b.pd.NewQP(verbs.QPConfig{Send: second, Recv: second, MaxSend: 1, MaxRecv: 1}))(t)
	if err := errors.Join(qp.Init(1, 0), qp.SetError(), second.Arm(), b.cq.Arm()); err != nil {
		t.Fatal(err)
	}
	if _, err := qp.PostReceives(7, 1); err != nil { // flushed at once
		t.Fatal(err)
	}
	a.post(t, a.write(b, 3, 0, 8))
	drained(2)
	// What a queue leaves behind is no event of another.
	if _, err := qp.PostReceives(7, 1); err == nil {
		t.Error("a slot whose completion was not polled was free")
	}
	var c [2]verbs.Completion
	if n := must(second.Poll(c[:]))(t); n != 1 {
		t.Fatalf("%d completions", n)
	}
	if err := second.Arm(); err != nil {
		t.Fatal(err)
	}
	if _, err := qp.PostReceives(7, 1); err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(qp.Close(), second.Close()); err != nil {
		t.Fatal(err)
	}
	drained(0)
}

// TestFlowLabel: each source port that a label can make has one, and a queue pair is connected
// with the label that its path says.
func TestFlowLabel(t *testing.T) {
	for p := range 1 << 16 {
		port := uint16(p)
		label := verbs.FlowLabel(port)
		if port < verbs.FirstSourcePort {
			if label != 0 {
				t.Fatalf("port %d, which no label makes, has label %#x", port, label)
			}
			continue
		}
		// As in include/rdma/ib_verbs.h.
		if linux := uint16(label&0x3fff^(label&0xfc000)>>14) | 0xc000; label == 0 || label >= 1<<20 || linux != port || verbs.SourcePort(label) != port {
			t.Fatalf("port %d: label %#x, of which Linux makes %d, SourcePort %d", port, label, linux, verbs.SourcePort(label))
		}
	}
	f := verbstest.New(t, verbstest.Options{})
	for _, label := range []uint32{0, 1, verbs.FlowLabel(0xc000), 1<<20 - 1} {
		a, b := open(t, "mlx5_0"), open(t, "mlx5_2")
		if err := errors.Join(a.qp.Init(1, verbs.RemoteWrite), b.qp.Init(1, verbs.RemoteWrite)); err != nil {
			t.Fatal(err)
		}
		if err := a.qp.ReadyToReceive(verbs.Path{QP: b.qp.Num(), GID: b.gid(t).GID, SGIDIndex: a.gid(t).Index, MTU: verbs.MTU4096, FlowLabel: label}); err != nil {
			t.Fatal(err)
		}
		if got, ok := f.FlowLabel("mlx5_0", a.qp.Num()); !ok || got != label {
			t.Errorf("connected with label %#x, the device has %#x, %v", label, got, ok)
		}
	}
}
