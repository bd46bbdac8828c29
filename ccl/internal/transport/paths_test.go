package transport

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/lockstep-ccl/lockstep/record"
)

// planner is a plan that gives each lane a port of its own and knows which were asked for.
type planner struct {
	t     testing.TB
	never bool          // it does not answer in time
	slow  time.Duration // it takes so long
	calls int           // that were slow, of which only the first is where once is set
	once  bool
	taken net.Listener

	mu    sync.Mutex
	given [][]uint16
	moves []func()
	open  int
	seen  int
}

func (p *planner) Open(_ PathConn, move func()) Path {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.moves = append(p.moves, move)
	p.open++
	return p
}

func (p *planner) Ports(ctx context.Context, lanes int) (ports []uint16) {
	if p.never {
		<-ctx.Done()
		return nil
	}
	p.mu.Lock()
	p.calls++
	slow := p.slow > 0 && !(p.once && p.calls > 1)
	p.mu.Unlock()
	if slow {
		time.Sleep(p.slow)
	}
	for range lanes {
		ports = append(ports, freePort(p.t))
	}
	if p.taken != nil {
		ports[0] = uint16(p.taken.Addr().(*net.TCPAddr).Port)
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.given = append(p.given, ports)
	return ports
}

func (p *planner) Seen([]LaneState) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.seen++
}

// most is how many of these ports one answer of the plan has, each on its lane. An attempt to connect
// that another one has overtaken asks, too, and may do so later.
func (p *planner) most(ports []uint16) (most int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, given := range p.given {
		n := 0
		for i, port := range ports {
			if i < len(given) && port == given[i] {
				n++
			}
		}
		most = max(most, n)
	}
	return most
}

func (p *planner) Close() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.open--
}

func (p *planner) move() {
	p.mu.Lock()
	moves := slices.Clone(p.moves)
	p.mu.Unlock()
	for _, f := range moves {
		f()
	}
}

// freed has the ports that freePort has given: the kernel may choose one of them again.
var freed sync.Map

// freePort is one that nobody had a moment ago, another one each time.
func freePort(t testing.TB) uint16 {
	for {
		ln, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Error(err)
			return 0
		}
		port := uint16(ln.Addr().(*net.TCPAddr).Port)
		ln.Close()
		if _, given := freed.LoadOrStore(port, true); !given {
			return port
		}
	}
}

// lanes returns the source ports of what this rank sends to a peer.
func lanes(m *Mesh, peer int) (ports []uint16, sockets int) {
	l := m.net.links[peer].(*tcpLink)
	for _, s := range l.mine() {
		ports = append(ports, localPort(s.fd))
	}
	return ports, len(l.socks)
}

// unhurried are bounds that a busy machine does not reach.
var unhurried = Bounds{Silent: time.Minute, Ports: time.Minute, Dial: time.Minute, Half: time.Minute, Attempt: time.Minute, Withdrawn: time.Minute}

// TestPaths: what a rank sends leaves from its own plan's ports where there are ports, and
// the connection stands where there are none.
func TestPaths(t *testing.T) {
	taken, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer taken.Close()
	for name, c := range map[string]struct {
		plan    func(rank int) *planner
		sockets int
		planned int // how many lanes have their port
	}{
		"both":   {func(int) *planner { return &planner{t: t} }, 6, 3},
		"silent": {func(int) *planner { return &planner{t: t, never: true} }, 6, 0},
		"taken":  {func(int) *planner { return &planner{t: t, taken: taken} }, 6, 2},
		"one": {func(rank int) *planner {
			if rank == 0 {
				return nil
			}
			return &planner{t: t}
		}, 3, 0},
	} {
		t.Run(name, func(t *testing.T) {
			plans := [2]*planner{c.plan(0), c.plan(1)}
			goroutines(t, apart, 2, func(cfg *Config) {
				if cfg.Bounds = unhurried; name == "silent" {
					cfg.Bounds.Ports = time.Millisecond
				}
				if cfg.Sockets = 3; plans[cfg.Rank] != nil {
					cfg.Paths = plans[cfg.Rank]
				}
			}, func(m *Mesh, rank, size int) error {
				if err := exchange(m, rank, size, 1, 30, 300_000); err != nil {
					return err
				}
				ports, sockets := lanes(m, 1-rank)
				if sockets != c.sockets {
					return fmt.Errorf("%d sockets, want %d", sockets, c.sockets)
				}
				planned := 0
				if p := plans[rank]; p != nil && c.planned > 0 {
					planned = p.most(ports)
				}
				if planned != c.planned {
					return fmt.Errorf("%d lanes leave from the plan's ports, want %d: %v", planned, c.planned, ports)
				}
				return nil
			})
			for rank, p := range plans {
				if p != nil && p.open != 0 {
					t.Errorf("rank %d: %d paths stay open", rank, p.open)
				}
			}
		})
	}
}

// TestMoves: connections that are moved at random under load lose and repeat no byte, and
// do not count as down, also where both ends begin at the same moment.
func TestMoves(t *testing.T) {
	const rounds = 12
	var writers [2]*record.Writer
	var comms [2]*record.Comm
	plans := [2]*planner{{t: t}, {t: t}}
	var done atomic.Int32
	for r := range writers {
		writers[r], comms[r] = recorded(t, r)
	}
	goroutines(t, apart, 2, func(c *Config) {
		c.Recorder, c.Comm, c.Paths, c.Bounds = writers[c.Rank], comms[c.Rank], plans[c.Rank], unhurried
	}, func(m *Mesh, rank, size int) error {
		r := rand.New(rand.NewPCG(3, uint64(rank)))
		for round := range rounds {
			if round > 0 && (round == 1 || r.IntN(2) == 0) {
				plans[rank].move()
			}
			if err := exchange(m, rank, size, uint64(round), 30, 300_000); err != nil {
				return fmt.Errorf("round %d: %w", round, err)
			}
		}
		// Who is through still answers a peer that moves.
		l := m.net.links[1-rank].(*tcpLink)
		for u, through := wait(m), false; done.Load() < 2; {
			l.mu.Lock()
			moving := l.seeking
			l.mu.Unlock()
			if !through && !moving && !l.fresh.Load() && !l.catching() {
				through = true
				done.Add(1)
			}
			if err := u.again(); err != nil {
				return err
			}
			l.refresh(record.Now())
		}
		if l.resumes == 0 {
			return errors.New("it has never moved")
		}
		switch downs, switches := told(t, writers[rank]); { // before the other one leaves
		case downs > 0:
			return fmt.Errorf("%d links are recorded as down, and they were only moved", downs)
		case switches == 0:
			return errors.New("no switch is recorded")
		}
		return nil
	})
}

// recorded is a rank's recorder.
func recorded(t *testing.T, rank int) (*record.Writer, *record.Comm) {
	t.Helper()
	w, err := record.Create(record.Options{Dir: t.TempDir(), Identity: record.Identity{Job: "j", Rank: int32(rank)}})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { w.Close() })
	c, _ := w.AddComm(record.CommEntry{ID: 1, Name: "test", Rank: int32(rank), Size: 2})
	return w, c
}

// told is how often a recording says that its connection was down, and switched.
func told(t *testing.T, w *record.Writer) (downs int, switches uint64) {
	t.Helper()
	r, err := record.Open(w.Path())
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	buf := make([]record.Record, 10_000)
	for _, rec := range buf[:r.Next(buf)] {
		if rec.Kind == record.KindLink && record.LinkState(rec.Code) == record.LinkDown {
			downs++
		}
	}
	return downs, r.Conns(nil)[0].Switches
}

// TestMoveWithdrawn: where one end has moved and the other has begun anew, there is another
// set and no outage; where no other set comes, there is one.
func TestMoveWithdrawn(t *testing.T) {
	for name, comes := range map[string]bool{"another": true, "none": false} {
		t.Run(name, func(t *testing.T) {
			w, comm := recorded(t, 0)
			plans := [2]*planner{{t: t}, {t: t}}
			before, withdrawn := make(chan struct{}), make(chan struct{})
			downs := 0
			goroutines(t, apart, 2, func(c *Config) {
				if c.Paths, c.Bounds = plans[c.Rank], unhurried; c.Rank == 0 {
					c.Recorder, c.Comm = w, comm
				}
			}, func(m *Mesh, rank, size int) error {
				if err := exchange(m, rank, size, 1, 10, 50_000); err != nil {
					return err
				}
				if rank == 1 { // it takes nothing over, but answers
					close(before)
					<-withdrawn
					if comes {
						return exchange(m, rank, size, 2, 10, 50_000)
					}
					return nil
				}
				<-before
				err := withdraw(m, plans[0], comes)
				if close(withdrawn); err == nil && comes {
					err = exchange(m, rank, size, 2, 10, 50_000)
				}
				downs, _ = told(t, w) // before the other one leaves
				return err
			})
			if downs > 0 == comes {
				t.Errorf("%d links down", downs)
			}
		})
	}
}

// withdraw has a link move, and ends the sockets that it moved to as a peer does that
// has begun another attempt, which comes or does not.
func withdraw(m *Mesh, p *planner, comes bool) error {
	l := m.net.links[1].(*tcpLink)
	u := wait(m)
	for l.unsure = false; !l.unsure; l.refresh(record.Now()) {
		p.move() // again, until both ends have settled
		if err := u.again(); err != nil {
			return err
		}
	}
	if !comes {
		l.mu.Lock()
		l.seeking = true // nobody looks for another one
		l.mu.Unlock()
		m.cfg.Bounds.Withdrawn = 0
	}
	number := l.number
	l.failed(l.socks[0], fmt.Errorf("receive: closed by the peer: %w", io.EOF))
	for l.number == number && l.lost == nil {
		if err := u.again(); err != nil {
			return err
		}
		l.refresh(record.Now())
	}
	return nil
}

// TestHalfNeverComes: where one end cannot be dialled back, the connection stands without
// that half.
func TestHalfNeverComes(t *testing.T) {
	plans := [2]*planner{{t: t}, {t: t}}
	goroutines(t, apart, 2, func(c *Config) {
		c.Paths, c.Bounds = plans[c.Rank], unhurried
		c.Bounds.Half = 50 * time.Millisecond
	}, func(m *Mesh, rank, size int) error {
		if rank == 1 { // it cannot be answered: who dials back finds nobody
			m.net.ln.Close()
		} else {
			m.net.begun(1)
		}
		if err := exchange(m, rank, size, 1, 10, 50_000); err != nil {
			return err
		}
		if _, sockets := lanes(m, 1-rank); sockets != maxSockets/2 {
			return fmt.Errorf("%d sockets, want %d", sockets, maxSockets/2)
		}
		return nil
	})
}

// TestHalfComesLate: a connection whose peer did not dial its half in time has it again later.
func TestHalfComesLate(t *testing.T) {
	plans := [2]*planner{{t: t}, {t: t, slow: 300 * time.Millisecond, once: true}}
	goroutines(t, apart, 2, func(c *Config) {
		c.Paths, c.Bounds = plans[c.Rank], unhurried
		c.Bounds.Half, c.Bounds.Plain = 50*time.Millisecond, time.Nanosecond
	}, func(m *Mesh, rank, size int) error {
		if rank == 1 {
			m.net.begun(0)
		}
		if err := exchange(m, rank, size, 1, 10, 50_000); err != nil {
			return err
		}
		if _, sockets := lanes(m, 1-rank); sockets != maxSockets {
			return fmt.Errorf("%d sockets, want %d", sockets, maxSockets)
		}
		return nil
	})
}

// begun waits until there is an attempt to connect to a peer, or of its own.
func (n *network) begun(peer int) {
	t := n.peer(peer).connecting()
	for begun := false; !begun; time.Sleep(time.Millisecond) {
		t.mu.Lock()
		begun = t.attempt != [16]byte{}
		t.mu.Unlock()
	}
}

// TestMovesMeet: where both ends begin to move and it takes them long, as it does over full queues, one's attempt
// stands and the other's does not overtake it.
func TestMovesMeet(t *testing.T) {
	const rounds = 3
	plans := [2]*planner{{t: t, slow: 300 * time.Millisecond}, {t: t, slow: 300 * time.Millisecond}}
	goroutines(t, apart, 2, func(c *Config) { c.Paths, c.Bounds = plans[c.Rank], unhurried }, func(m *Mesh, rank, size int) error {
		l := m.net.peer(1 - rank).(*tcpLink)
		for round := range rounds {
			if err := exchange(m, rank, size, uint64(1+round), 10, 50_000); err != nil {
				return err
			}
			l.mu.Lock()
			before := l.whole
			l.mu.Unlock()
			u := wait(m)
			for l.number == before || l.awaits { // a move waits until both ends have taken over what was before
				plans[rank].move()
				l.refresh(record.Now())
				if err := u.again(); err != nil {
					return err
				}
			}
		}
		if err := exchange(m, rank, size, 1+rounds, 10, 50_000); err != nil {
			return err
		}
		l.mu.Lock()
		defer l.mu.Unlock()
		if attempts := max(l.connector.number, l.whole); attempts > 1+2*rounds {
			return fmt.Errorf("%d attempts, want one or two each of %d times", attempts-1, rounds)
		}
		return nil
	})
}

// TestMoveFails: a connection whose peer cannot be dialled any more stays as it is.
func TestMoveFails(t *testing.T) {
	plans := [2]*planner{{t: t}, {t: t}}
	var before sync.WaitGroup
	before.Add(2)
	goroutines(t, apart, 2, func(c *Config) { c.Paths, c.Bounds = plans[c.Rank], unhurried }, func(m *Mesh, rank, size int) error {
		if err := exchange(m, rank, size, 1, 10, 50_000); err != nil {
			return err
		}
		m.net.ln.Close()
		before.Done()
		before.Wait()
		plans[rank].move()
		if err := exchange(m, rank, size, 2, 10, 50_000); err != nil {
			return err
		}
		if l := m.net.links[1-rank].(*tcpLink); l.resumes != 0 || l.lost != nil || l.broken.Load() != nil {
			return fmt.Errorf("moved %d times, lost %v", l.resumes, l.lost)
		}
		return nil
	})
}

// TestGreetedAgain: an attempt that was not taken leaves its source port to the next one.
func TestGreetedAgain(t *testing.T) {
	goroutines(t, apart, 2, nil, func(m *Mesh, rank, size int) error {
		if rank == 1 {
			return exchange(m, rank, size, 5, 50, 100_000)
		}
		addr := m.infos[1].Addr
		ln, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			return err
		}
		defer ln.Close()
		from := make(chan int, 2)
		go func() { // answers with what is no reply, and awaits that this end closes
			for {
				conn, err := ln.Accept()
				if err != nil {
					return
				}
				from <- conn.RemoteAddr().(*net.TCPAddr).Port
				_, _ = io.ReadFull(conn, make([]byte, dataHello))
				_, _ = conn.Write(make([]byte, dataReply))
				_, _ = io.Copy(io.Discard, conn)
				conn.Close()
			}
		}()
		m.infos[1].Addr = ln.Addr().String()
		port := freePort(t)
		for try := range 2 {
			if _, status, _, err := m.net.greet(m.net.m.ctx, dataGreeting{src: 0, dst: 1, total: 2, attempt: newNonce(), number: 1}, port); err == nil && status == replyOK {
				t.Error("a greeting was taken")
			}
			if got := <-from; got != int(port) {
				t.Errorf("attempt %d is from port %d, want %d", try+1, got, port)
			}
		}
		m.infos[1].Addr = addr
		return exchange(m, rank, size, 5, 50, 100_000)
	})
}
