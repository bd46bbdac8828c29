package transport

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/lockstep-ccl/lockstep/ccl/internal/verbs"
	"github.com/lockstep-ccl/lockstep/ccl/internal/verbs/verbstest"
	"github.com/lockstep-ccl/lockstep/record"
)

// steering is a plan that gives queue pairs the ports that the test wants.
type steering struct {
	never bool // it does not answer

	mu    sync.Mutex
	ports []uint16
	moves []func()
	conns []PathConn
	open  int
	seen  []LaneState
}

func (s *steering) Open(c PathConn, move func()) Path {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.conns, s.moves = append(s.conns, c), append(s.moves, move)
	s.open++
	return s
}

func (s *steering) Ports(ctx context.Context, _ int) []uint16 {
	if s.never {
		<-ctx.Done()
		return nil
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.ports
}

func (s *steering) Seen(lanes []LaneState) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.seen = append(s.seen[:0], lanes...)
}

func (s *steering) Close() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.open--
}

// want has the plan give other ports.
func (s *steering) want(ports ...uint16) {
	s.mu.Lock()
	s.ports = ports
	moves := slices.Clone(s.moves)
	s.mu.Unlock()
	for _, f := range moves {
		f()
	}
}

// watched notes which queue pair carries each lane of a link.
type watched struct {
	f      *verbstest.Fabric
	read   *record.Reader
	device string
}

// labels are the ports that the device makes of the labels of the primary path's queue pairs.
func (w *watched) labels() (ports []uint16) {
	for _, c := range w.read.Conns(nil) {
		if c.Channel%2 == 0 {
			label, _ := w.f.FlowLabel(w.device, uint32(c.ID))
			ports = append(ports, verbs.SourcePort(label))
		}
	}
	return ports
}

// steered runs two ranks over RDMA, with recorders, whose plans are given; nil for none.
func steered(t *testing.T, plans [2]*steering, f func(m *Mesh, rank int, w *watched) error) [2]*record.Writer {
	t.Helper()
	fabric := verbstest.New(t, verbstest.Options{Retry: time.Minute})
	ports := nics(t, fabric)
	var writers [2]*record.Writer
	var comms [2]*record.Comm
	var reads [2]*record.Reader
	for r := range writers {
		writers[r], comms[r] = recorded(t, r)
		read, err := record.Open(writers[r].Path())
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { read.Close() })
		reads[r] = read
	}
	goroutines(t, apart, 2, func(c *Config) {
		if c.Bounds = unhurried; plans[0] != nil && plans[0].never {
			c.Bounds.Ports = time.Millisecond
		}
		c.RDMA = ports(c.Rank)
		c.RDMA.Options.Stuck, c.RDMA.Options.GiveUpAfter = 2*time.Minute, 2*time.Minute
		c.Recorder, c.Comm = writers[c.Rank], comms[c.Rank]
		if p := plans[c.Rank]; p != nil {
			c.Paths = p
		}
	}, func(m *Mesh, rank, _ int) error {
		if !m.overRDMA(1 - rank) {
			return errors.New("not over RDMA")
		}
		return f(m, rank, &watched{f: fabric, read: reads[rank], device: m.rdma.paths[1-rank][0].Own.Device})
	})
	for rank, p := range plans {
		if p != nil && p.open != 0 {
			t.Errorf("rank %d: %d paths stay open", rank, p.open)
		}
	}
	return writers
}

// TestQueuePairPaths: the queue pairs that carry what a rank sends have the labels of its own
// plan's ports, whether the peer has a plan or not; and none where there is none, or no answer.
func TestQueuePairPaths(t *testing.T) {
	for name, c := range map[string]struct {
		plans [2]*steering
		want  [2][]uint16
	}{
		"both":   {[2]*steering{{ports: []uint16{50001, 50002}}, {ports: []uint16{50003, 49152}}}, [2][]uint16{{50001, 50002}, {50003, 49152}}},
		"one":    {[2]*steering{{ports: []uint16{50001, 50002}}, nil}, [2][]uint16{{50001, 50002}, {0, 0}}},
		"half":   {[2]*steering{{ports: []uint16{0, 50002}}, {ports: []uint16{50003}}}, [2][]uint16{{0, 50002}, {50003, 0}}},
		"silent": {[2]*steering{{never: true}, {}}, [2][]uint16{{0, 0}, {0, 0}}},
		"none":   {[2]*steering{}, [2][]uint16{{0, 0}, {0, 0}}},
	} {
		t.Run(name, func(t *testing.T) {
			writers := steered(t, c.plans, func(m *Mesh, rank int, w *watched) error {
				if err := exchange(m, rank, 2, 1, 30, 300_000); err != nil {
					return err
				}
				if got := w.labels(); !slices.Equal(got, c.want[rank]) {
					return fmt.Errorf("rank %d sends from %v, want %v", rank, got, c.want[rank])
				}
				p := c.plans[rank]
				if p == nil {
					return nil
				}
				p.mu.Lock()
				defer p.mu.Unlock()
				primary := m.rdma.paths[1-rank][0]
				if len(p.conns) != 1 || !p.conns[0].RoCE || p.conns[0].Local != primary.Own.Addr || p.conns[0].Remote.Addr() != primary.Peer.Addr || p.conns[0].Remote.Port() != 4791 || p.conns[0].Peer != 1-rank {
					return fmt.Errorf("rank %d asked for %+v", rank, p.conns)
				}
				return nil
			})
			for rank, w := range writers {
				if downs, switches := told(t, w); downs > 0 || switches > 0 {
					t.Errorf("rank %d: %d down, %d switches", rank, downs, switches)
				}
			}
		})
	}
}

// TestQueuePairsMove: when the plan changes, lanes go over to queue pairs with other labels while
// bytes flow: none is lost, or there twice, nothing counts as down, and the plan hears how they fare.
func TestQueuePairsMove(t *testing.T) {
	plans := [2]*steering{{}, {}}
	writers := steered(t, plans, func(m *Mesh, rank int, w *watched) error {
		p := plans[rank]
		for change := range uint16(4) {
			want := []uint16{50000 + 10*change + uint16(rank), 51000 + 10*change + uint16(rank)}
			p.want(want...)
			for u := wait(m); change > 0 && !slices.Equal(w.labels(), want); {
				if err := u.again(); err != nil {
					return fmt.Errorf("sends from %v, want %v: %w", w.labels(), want, err)
				}
			}
			if err := exchange(m, rank, 2, uint64(change), 30, 300_000); err != nil {
				return fmt.Errorf("change %d: %w", change, err)
			}
		}
		for u := wait(m); ; {
			p.mu.Lock()
			ok := len(p.seen) == 2 && p.seen[0].Port == 50030+uint16(rank) && p.seen[0].Acked > 0 && p.seen[1].Acked > 0
			p.mu.Unlock()
			if ok {
				break
			}
			if err := u.again(); err != nil {
				return fmt.Errorf("the plan hears %+v: %w", p.seen, err)
			}
			m.net.links[1-rank].(*rdmaLink).refresh(record.Now())
		}
		return nil
	})
	for rank, w := range writers {
		if downs, switches := told(t, w); downs > 0 || switches == 0 {
			t.Errorf("rank %d records %d links down, and they were only moved; %d switches", rank, downs, switches)
		}
	}
}
