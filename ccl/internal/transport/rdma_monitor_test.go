package transport

import (
	"errors"
	"fmt"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"github.com/lockstep-ccl/lockstep/ccl/internal/rdma"
	"github.com/lockstep-ccl/lockstep/ccl/internal/verbs/verbstest"
	"github.com/lockstep-ccl/lockstep/record"
	"github.com/lockstep-ccl/lockstep/windowmon"
)

// A burst is one window of the monitor's.
const (
	flowPiece = 8 << 10
	flowBurst = 8 * flowPiece
)

// star is rank 0 with a recorder and a fake link of its own to each other rank.
type star struct {
	m     *Mesh
	flows []*flow // by rank; nil for rank 0
	read  *record.Reader
	piece int // bytes of a message; a burst has eight
}

// flow is the traffic with one rank: bursts, each of which it answers.
type flow struct {
	link  *rdmaLink
	paths verbstest.Link // of the bursts

	b       []byte // what is sent before the next answer is waited for, bursts
	sent    int    // of it
	heard   int    // answered of it
	pause   bool   // no more bursts
	over    bool   // the last burst was answered
	answers int

	completed uint64 // as of the last look
	state     windowmon.Cause
	network   int // looks at which the monitor called the network slow
}

// takes says how a rank takes what it is sent.
type takes struct {
	pause atomic.Int64 // ns before each piece
}

// stars runs f as rank 0 of so many; everything over a link takes delay.
func stars(tb testing.TB, size int, delay time.Duration, f func(s *star, peers []takes) error) {
	starsOf(tb, flowPiece, size, delay, f)
}

// starsOf is stars with messages of so many bytes.
func starsOf(tb testing.TB, piece, size int, delay time.Duration, f func(s *star, peers []takes) error) {
	o := verbstest.Options{Retry: time.Minute}
	for r := range size {
		o.Devices = append(o.Devices, verbstest.Device{Name: fmt.Sprint("mlx5_", r)})
	}
	fabric := verbstest.New(tb, o)
	between := func(a, b int) verbstest.Link { return fabric.Link(o.Devices[a].Name, 1, o.Devices[b].Name, 1) }
	for r := 1; r < size; r++ {
		between(0, r).Delay(delay)
		between(r, 0).Delay(delay)
	}
	rec, err := record.Create(record.Options{Dir: tb.TempDir(), Identity: record.Identity{Job: "j"}})
	if err != nil {
		tb.Fatal(err)
	}
	defer rec.Close()
	reader, err := record.Open(rec.Path())
	if err != nil {
		tb.Fatal(err)
	}
	defer reader.Close()
	comm, _ := rec.AddComm(record.CommEntry{ID: 1, Name: "test", Size: int32(size)})
	ports := nics(tb, fabric)
	peers := make([]takes, size)
	goroutines(tb, apart, size, func(c *Config) {
		c.RDMA = ports(c.Rank)
		c.RDMA.Ports = c.RDMA.Ports[:1]
		c.RDMA.Options = rdma.Options{Lanes: 1, Window: 2 * flowBurst, Stuck: time.Minute} // a fabric that is not scheduled completes late
		if c.Rank == 0 {
			c.Recorder, c.Comm = rec, comm
		}
	}, func(m *Mesh, rank, _ int) error {
		if rank > 0 {
			return peers[rank].answer(m, piece)
		}
		s := &star{m: m, read: reader, flows: make([]*flow, size), piece: piece}
		for r := 1; r < size; r++ {
			l, err := m.Link(r)
			if err != nil {
				return err
			}
			s.flows[r] = &flow{link: l.(*rdmaLink), paths: between(0, r), b: make([]byte, 8*piece)}
		}
		return errors.Join(f(s, peers), s.end())
	})
}

// answer takes bursts and answers each, the last one included.
func (p *takes) answer(m *Mesh, piece int) error {
	l, err := m.Link(0)
	if err != nil {
		return err
	}
	b := make([]byte, piece)
	for last := byte(0); last == 0; {
		for range 8 {
			for began := time.Now(); time.Since(began) < time.Duration(p.pause.Load()); {
				time.Sleep(time.Millisecond)
			}
			if err := recvAll(m, l, b); err != nil {
				return err
			}
			last |= b[0]
		}
		if err := writeLine(m, l, nil, 1); err != nil {
			return err
		}
		l.Flush(record.Now())
	}
	return nil
}

// step lets each flow send and hear what it can, then waits a little.
func (s *star) step() error {
	var line [LinePayload]byte
	for _, f := range s.flows[1:] {
		for !f.over && !(f.pause && f.sent == 0) && f.sent < len(f.b) {
			n, err := f.link.TrySend(f.b[f.sent : f.sent+s.piece-f.sent%s.piece])
			if err != nil {
				return err
			}
			if f.sent += n; n == 0 {
				break
			}
		}
		if _, _, ok, err := f.link.TryReadLine(line[:]); err != nil {
			return err
		} else if ok {
			f.answers++
			if f.heard += 8 * s.piece; f.heard == len(f.b) {
				f.sent, f.heard, f.over = 0, 0, f.b[0] == 1
			}
		}
		f.look()
	}
	s.m.Wait(time.Millisecond)
	return nil
}

// look notes what the monitor says.
func (f *flow) look() {
	if !f.link.connected() {
		return
	}
	f.link.conn.Lock()
	defer f.link.conn.Unlock()
	t := &f.link.at(0, 0).meter
	f.completed, f.state = t.monCompleted, t.mon.State()
	if f.state == windowmon.Network {
		f.network++
	}
}

// until steps until cond.
func (s *star) until(what string, cond func() bool) error {
	for deadline := time.Now().Add(patience); !cond(); {
		if time.Now().After(deadline) {
			return fmt.Errorf("never: %s", what)
		}
		if err := s.step(); err != nil {
			return err
		}
	}
	return nil
}

// learn has every flow answered n times more.
func (s *star) learn(n int) error {
	var want []int
	for _, f := range s.flows[1:] {
		want = append(want, f.answers+n)
	}
	return s.until("enough traffic", func() bool {
		for i, f := range s.flows[1:] {
			if f.answers < want[i] {
				return false
			}
		}
		return true
	})
}

// end has the peers take a last burst.
func (s *star) end() error {
	quiet := func() bool {
		return !slices.ContainsFunc(s.flows[1:], func(f *flow) bool { return f.sent > 0 })
	}
	for _, f := range s.flows[1:] {
		f.pause = true
	}
	if err := s.until("the bursts are answered", quiet); err != nil {
		return err
	}
	for _, f := range s.flows[1:] {
		f.pause, f.b = false, f.b[:8*s.piece]
		f.b[0] = 1
	}
	return s.until("the last bursts are answered", func() bool {
		return !slices.ContainsFunc(s.flows[1:], func(f *flow) bool { return !f.over })
	})
}

// told are the records of windows, by peer.
func (s *star) told() map[int32][]record.Record {
	all := map[int32][]record.Record{}
	var b [256]record.Record
	for n := s.read.Next(b[:]); n > 0; n = s.read.Next(b[:]) {
		for _, r := range b[:n] {
			if r.Kind == record.KindWindow {
				all[r.Peer] = append(all[r.Peer], r)
			}
		}
	}
	return all
}

// disturbance is what the recorder told of a link that became slow, in ns.
type disturbance struct {
	first  int64 // from the injection to the first completion that it delayed, as seen by a rank that polls
	window int64 // from there to the record of a window whose cause is the network
	state  int64 // and to when the connection's state was that
	event  int64 // from the injection to the first window of a slow network in the history
}

// disturb makes what goes to a rank slow by delay until its connection is said to be.
func (s *star) disturb(rank int, delay time.Duration) (d disturbance, err error) {
	f := s.flows[rank]
	f.pause = true
	if err := s.until("the link is quiet", func() bool { return f.sent == 0 }); err != nil {
		return d, err
	}
	before := f.completed
	f.paths.Delay(delay)
	f.pause = false
	injected := record.Now()
	if err := s.until("a delayed completion", func() bool { return f.completed > before }); err != nil {
		return d, err
	}
	first := record.Now()
	if err := s.until("the network is said to be slow", func() bool { return f.state == windowmon.Network }); err != nil {
		return d, err
	}
	d.first, d.state = first-injected, record.Now()-first
	if err := s.until("the history has a window of a slow network", func() bool {
		d.event = s.firstSlow(rank, injected) - injected
		return d.event > 0
	}); err != nil {
		return d, err
	}
	return d, s.until("a window of a slow network is told", func() bool {
		told := s.told()[int32(rank)]
		i := slices.IndexFunc(told, func(r record.Record) bool { return r.Mono > injected && r.Code == uint8(record.CauseNetwork) })
		if i >= 0 {
			d.window = told[i].Mono - first
		}
		return i >= 0
	})
}

// firstSlow is when the first window of a slow network ended that the history of a rank's
// connection has after a time, 0 when it has none.
func (s *star) firstSlow(rank int, after int64) (first int64) {
	for _, c := range s.read.Conns(nil) {
		for _, w := range s.read.History(&c, nil) {
			if int(c.Peer) == rank && w.Last > after && w.Cause == record.CauseNetwork && (first == 0 || w.Last < first) {
				first = w.Last
			}
		}
	}
	return first
}

// TestRDMADisturbedLink: of several connections the one over the link that became
// slow has a slow network, and no other one: not those that go on, nor one that sends nothing.
// So it is with messages of any size.
func TestRDMADisturbedLink(t *testing.T) {
	for _, piece := range []int{100, flowPiece} {
		t.Run(fmt.Sprint(piece), func(t *testing.T) { disturbedLink(t, piece) })
	}
}

func disturbedLink(t *testing.T, piece int) {
	starsOf(t, piece, 4, 8*time.Millisecond, func(s *star, _ []takes) error {
		if err := s.learn(60); err != nil {
			return err
		}
		s.flows[3].pause = true
		d, err := s.disturb(1, 160*time.Millisecond)
		if err != nil {
			return err
		}
		t.Logf("first delayed completion %v after the injection, in the history after %v; a window of it told %v later, the state %v later", time.Duration(d.first), time.Duration(d.event), time.Duration(d.window), time.Duration(d.state))
		for _, c := range s.read.Conns(nil) {
			t.Logf("rank %d: %d windows, %d slow, %v, latency %v", c.Peer, c.Windows, c.SlowWindows, c.WindowCause, time.Duration(c.LatencyNs))
			if c.Peer != 1 && c.SlowWindows > 0 || c.Peer == 1 && c.SlowWindows == 0 {
				t.Errorf("rank %d: %d windows of a slow network", c.Peer, c.SlowWindows)
			}
		}
		for _, r := range []int{2, 3} {
			if n := s.flows[r].network; n > 0 {
				t.Errorf("rank %d: the network was called slow at %d looks", r, n)
			}
		}
		return nil
	})
}

// TestRDMAOthersAreLate: a rank that sends nothing for a while, one that takes bytes
// slowly, and one that has stopped are not a slow network.
func TestRDMAOthersAreLate(t *testing.T) {
	const delay = 8 * time.Millisecond
	stars(t, 4, delay, func(s *star, peers []takes) error {
		if err := s.learn(60); err != nil {
			return err
		}
		blames := func(rank int, c windowmon.Cause) func() bool {
			f := s.flows[rank]
			return func() bool { return f.state == c }
		}
		const idle, slow, stopped = 1, 2, 3
		f := s.flows[slow]
		f.b = make([]byte, 16*flowBurst) // more than the window
		peers[slow].pause.Store(int64(5 * delay))
		peers[stopped].pause.Store(int64(time.Hour))
		s.flows[stopped].b = f.b
		for range 20 {
			s.flows[idle].pause = true
			began := time.Now()
			if err := s.until("idle for some time", func() bool { return time.Since(began) > 5*delay }); err != nil {
				return err
			}
			s.flows[idle].pause = false
			n := s.flows[idle].answers
			if err := s.until("a burst now and then", func() bool { return s.flows[idle].answers > n }); err != nil {
				return err
			}
		}
		if err := s.until("the slow receiver is blamed", blames(slow, windowmon.ReceiverNotReady)); err != nil {
			return err
		}
		if err := s.until("the stopped receiver is blamed", blames(stopped, windowmon.ReceiverNotReady)); err != nil {
			return err
		}
		peers[slow].pause.Store(0)
		peers[stopped].pause.Store(0)
		for r, f := range s.flows[1:] {
			if f.network > 0 {
				t.Errorf("rank %d: the network was called slow at %d looks", r+1, f.network)
			}
		}
		for _, c := range s.read.Conns(nil) {
			t.Logf("rank %d: %d windows, %d slow, %v", c.Peer, c.Windows, c.SlowWindows, c.WindowCause)
			if c.SlowWindows > 0 {
				t.Errorf("rank %d: %d windows of a slow network", c.Peer, c.SlowWindows)
			}
		}
		return nil
	})
}

// BenchmarkRDMADisturbance is how soon the recorder tells of a link that becomes slow,
// by its records' times: after the injection, and after the first completion that was delayed.
func BenchmarkRDMADisturbance(b *testing.B) {
	for _, c := range []struct{ base, slow time.Duration }{
		{50 * time.Microsecond, 500 * time.Microsecond}, {200 * time.Microsecond, 2 * time.Millisecond}, {time.Millisecond, 20 * time.Millisecond},
	} {
		b.Run(fmt.Sprintf("%v to %v", c.base, c.slow), func(b *testing.B) {
			var first, window, state, event []int64
			stars(b, 4, c.base, func(s *star, _ []takes) error {
				f := s.flows[1]
				for b.Loop() {
					if err := s.learn(400); err != nil {
						return err
					}
					d, err := s.disturb(1, c.slow)
					if err != nil {
						return err
					}
					first, window, state, event = append(first, d.first), append(window, d.window), append(state, d.state), append(event, d.event)
					f.paths.Delay(c.base)
					if err := s.until("all is as before", func() bool { return f.state != windowmon.Network }); err != nil {
						return err
					}
				}
				others := 0
				for _, f := range s.flows[2:] {
					others += f.network
				}
				b.ReportMetric(float64(others), "looks-at-which-others-were-slow")
				return nil
			})
			for _, m := range []struct {
				of   []int64
				name string
			}{{first, "first-delayed-µs"}, {event, "event-µs"}, {window, "window-after-it-µs"}, {state, "state-after-it-µs"}} {
				slices.Sort(m.of)
				b.ReportMetric(float64(m.of[len(m.of)/2])/1e3, m.name)
				b.ReportMetric(float64(m.of[len(m.of)-1])/1e3, "worst-"+m.name)
			}
		})
	}
}
