package verbs_test

import (
	"fmt"
	"slices"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/lockstep-ccl/lockstep/ccl/internal/verbs"
)

// soon bounds what must happen; an emulated processor may pause.
const soon = 30 * time.Second

// side is one end of a connection.
type side struct {
	ctx  *verbs.Context
	pd   *verbs.PD
	ch   *verbs.CompletionChannel
	cq   *verbs.CQ
	qp   *verbs.QP
	mr   *verbs.MR
	mem  []byte
	name string
}

const (
	memory = 1 << 20
	depth  = 128
)

// must fails the test with an error of what precedes it.
func must[T any](v T, err error) func(testing.TB) T {
	return func(t testing.TB) T {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
		return v
	}
}

func open(t testing.TB, device string) *side {
	t.Helper()
	lib := must(verbs.Load())(t)
	s := &side{name: device}
	s.ctx = must(lib.Open(device))(t)
	s.pd = must(s.ctx.NewPD())(t)
	s.ch = must(s.ctx.NewCompletionChannel())(t)
	s.cq = must(s.ctx.NewCQ(2*depth, s.ch))(t)
	s.mem = must(unix.Mmap(-1, 0, memory, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS))(t)
	s.mr = must(s.pd.Register(uintptr(unsafe.Pointer(&s.mem[0])), memory, verbs.LocalWrite|verbs.RemoteWrite))(t)
	s.newQP(t)
	t.Cleanup(func() {
		for _, c := range []interface{ Close() error }{s.qp, s.mr, s.cq, s.ch, s.pd, s.ctx} {
			if err := c.Close(); err != nil {
				t.Errorf("%s: %v", s.name, err)
			}
		}
		unix.Munmap(s.mem)
	})
	return s
}

func (s *side) newQP(t testing.TB) {
	t.Helper()
	s.qp = must(s.pd.NewQP(verbs.QPConfig{Send: s.cq, Recv: s.cq, MaxSend: depth, MaxRecv: depth, MaxInline: 220}))(t)
}

// gid is the entry of the port's IPv4 address.
func (s *side) gid(t testing.TB) verbs.GIDEntry {
	t.Helper()
	for _, e := range must(s.ctx.GIDs(1))(t) {
		if e.GID.Addr().Is4() && e.Type == verbs.GIDRoCEv2 {
			return e
		}
	}
	t.Fatalf("%s has no GID of an IPv4 address", s.name)
	return verbs.GIDEntry{}
}

// connect brings a new pair of queue pairs up.
func connect(t testing.TB, a, b *side, timeout, retries uint8) {
	t.Helper()
	for _, s := range []*side{a, b} {
		if err := s.qp.Init(1, verbs.LocalWrite|verbs.RemoteWrite); err != nil {
			t.Fatal(err)
		}
	}
	for _, e := range [][2]*side{{a, b}, {b, a}} {
		p := verbs.Path{QP: e[1].qp.Num(), PSN: 7, GID: e[1].gid(t).GID, SGIDIndex: e[0].gid(t).Index, MTU: verbs.MTU4096}
		if err := e[0].qp.ReadyToReceive(p); err != nil {
			t.Fatal(err)
		}
		if err := e[0].qp.ReadyToSend(verbs.SendAttr{PSN: 7, Timeout: timeout, Retries: retries, RNRRetries: 7}); err != nil {
			t.Fatal(err)
		}
	}
}

// pair opens both ends of a rail and connects them.
func pair(t testing.TB, rail int, timeout, retries uint8) (a, b *side) {
	t.Helper()
	a, b = open(t, fmt.Sprint("rxa", rail)), open(t, fmt.Sprint("rxb", rail))
	connect(t, a, b, timeout, retries)
	return a, b
}

// write is one of n bytes, from and to the same place, with immediate.
func (s *side) write(to *side, id uint64, at, n int) verbs.Write {
	return verbs.Write{ID: id, Addr: s.mr.Addr + uint64(at), LKey: s.mr.LKey, RemoteAddr: to.mr.Addr + uint64(at), RKey: to.mr.RKey,
		Len: uint32(n), Imm: uint32(id), WithImm: true, Signalled: true}
}

func (s *side) post(t testing.TB, w ...verbs.Write) {
	t.Helper()
	if _, err := s.qp.PostWrites(w); err != nil {
		t.Fatal(err)
	}
}

// completions waits for n of them, in poll(2) on the channel between looks.
func (s *side) completions(t testing.TB, n int) []verbs.Completion {
	t.Helper()
	out := make([]verbs.Completion, n)
	got := 0
	for deadline := time.Now().Add(soon); got < n; {
		if err := s.cq.Arm(); err != nil {
			t.Fatal(err)
		}
		k := must(s.cq.Poll(out[got:]))(t)
		if got += k; k > 0 {
			continue
		}
		left := time.Until(deadline)
		if left <= 0 {
			t.Fatalf("%s: %d of %d completions in %v: %v", s.name, got, n, soon, out[:got])
		}
		fds := []unix.PollFd{{Fd: int32(s.ch.FD()), Events: unix.POLLIN}}
		if _, err := unix.Poll(fds, int(left.Milliseconds())+1); err != nil && err != unix.EINTR {
			t.Fatal(err)
		}
		if _, err := s.ch.Drain(); err != nil {
			t.Fatal(err)
		}
	}
	return out
}

// events waits until an event of each type has come, and returns all.
func (s *side) events(t testing.TB, want ...verbs.EventType) (all []verbs.Event) {
	t.Helper()
	for deadline := time.Now().Add(soon); ; {
		e, ok, err := s.ctx.NextEvent()
		if err != nil {
			t.Fatal(err)
		}
		if ok {
			all = append(all, e)
			want = slices.DeleteFunc(want, func(w verbs.EventType) bool { return w == e.Type })
			continue
		}
		left := time.Until(deadline)
		if len(want) == 0 {
			return all
		}
		if left <= 0 {
			t.Fatalf("%s: no %v in %v, but %v", s.name, want, soon, all)
		}
		fds := []unix.PollFd{{Fd: int32(s.ctx.AsyncFD()), Events: unix.POLLIN}}
		if _, err := unix.Poll(fds, int(left.Milliseconds())+1); err != nil && err != unix.EINTR {
			t.Fatal(err)
		}
	}
}

func statuses(list []verbs.Completion) string {
	n := map[verbs.Status]int{}
	for _, c := range list {
		n[c.Status]++
	}
	return fmt.Sprint(n)
}
