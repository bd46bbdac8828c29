package rdma

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/lockstep-ccl/lockstep/ccl/internal/verbs"
	"github.com/lockstep-ccl/lockstep/ccl/internal/verbs/verbstest"
)

// unhurried is a fabric on which an end of a busy machine's may be late, and nothing breaks of it.
var unhurried = verbstest.Options{Retry: 10 * time.Second}

// connectMoving makes a connection over so many paths whose queue pairs move.
func connectMoving(t *testing.T, f *verbstest.Fabric, opt Options, paths int, a, b []uint16) (*end, *end) {
	t.Helper()
	opt.Stuck = time.Minute
	both := []Path{{portOf(t, f, "mlx5_0", 1), portOf(t, f, "mlx5_2", 1)}, {portOf(t, f, "mlx5_1", 1), portOf(t, f, "mlx5_3", 1)}}
	return connectWith(t, opt, Config{Paths: both[:paths], Moves: true, Ports: a}, Config{Moves: true, Ports: b})
}

// labels are the source ports that the device makes of the flow labels of the queue pairs that
// carry the lanes, 0 where it chooses; nil while a lane has none.
func (e *end) labels(f *verbstest.Fabric) (ports []uint16) {
	e.w.mu.Lock()
	defer e.w.mu.Unlock()
	for i := range e.m.lanes {
		l := &e.m.lanes[i]
		if l.phase != running {
			return nil
		}
		q := e.qps[i][l.active]
		label, ok := f.FlowLabel(q.nic.dev.name, q.qp.Num())
		if !ok {
			return nil
		}
		ports = append(ports, verbs.SourcePort(label))
	}
	return ports
}

// alone reports whether all lanes run over the primary path, and each path has one queue pair.
func alone(ends ...*end) bool {
	for _, e := range ends {
		e.w.mu.Lock()
		ok := true
		for i := range e.m.lanes {
			l := &e.m.lanes[i]
			ok = ok && l.phase == running && e.m.pathOf(l.active) == 0
			for p := range e.pairs {
				one, other := l.paths[2*p].state, l.paths[2*p+1].state
				ok = ok && (one == pathLive && other == pathDown || one == pathDown && other == pathLive)
			}
		}
		e.w.mu.Unlock()
		if !ok {
			return false
		}
	}
	return true
}

// TestPorts: queue pairs of the primary path are connected with the labels of the ports that
// their end was given; where none was, and on the backup, the device chooses.
func TestPorts(t *testing.T) {
	f := verbstest.New(t, unhurried)
	a, b := connectMoving(t, f, quick, 2, []uint16{50001, verbs.FirstSourcePort}, []uint16{0, 60000})
	until(t, "a primary and a backup", a, b, func() bool { return alone(a, b) })
	if got := a.labels(f); !slices.Equal(got, []uint16{50001, verbs.FirstSourcePort}) {
		t.Errorf("one end sends from %v", got)
	}
	if got := b.labels(f); !slices.Equal(got, []uint16{0, 60000}) {
		t.Errorf("the other end sends from %v", got)
	}
	if err := both(t, a, b, 1<<20, 100, nil); err != nil {
		t.Fatal(err)
	}
	f.SetPort("mlx5_0", 1, false, true)
	until(t, "the backup", a, b, func() bool {
		return slices.Equal(a.labels(f), []uint16{0, 0}) && slices.Equal(b.labels(f), []uint16{0, 0})
	})
}

// TestNoPorts: without a plan no queue pair has a label, nor a lane more of them than ever.
func TestNoPorts(t *testing.T) {
	f := verbstest.New(t, verbstest.Options{})
	a, b := connect(t, f, quick)
	until(t, "a primary and a backup", a, b, func() bool { return on(0, a, b) })
	a.SetPorts(0, []uint16{50001, 50002}) // of one that does not move
	if err := both(t, a, b, 1<<20, 100, nil); err != nil {
		t.Fatal(err)
	}
	for _, e := range []*end{a, b} {
		if got := e.labels(f); !slices.Equal(got, []uint16{0, 0}) {
			t.Errorf("queue pairs send from %v", got)
		}
		if e.switches.Load() != 0 || e.places() != MaxPaths || e.told[0][PathNew].Load() != 2 {
			t.Errorf("%d switches, %d places, %d queue pairs", e.switches.Load(), e.places(), e.told[0][PathNew].Load())
		}
	}
}

// TestMove: a lane goes over to a queue pair with another label when its port changes, by choice:
// it counts as no fault, nor does a lane whose port stays; and the path has one queue pair again.
func TestMove(t *testing.T) {
	for paths := 1; paths <= MaxPaths; paths++ {
		t.Run(fmt.Sprint(paths), func(t *testing.T) {
			f := verbstest.New(t, unhurried)
			a, b := connectMoving(t, f, quick, paths, nil, nil)
			until(t, "paths", a, b, func() bool { return alone(a, b) })
			ports := [2][]uint16{{0, 0}, {0, 0}}
			moved := int64(0)
			for round, want := range [][2][]uint16{
				{{50001, 50002}, {0, 0}},
				{{50001, 50003}, {0, 0}},
				{{50001, 50003}, {60001, 60002}},
				{{50004, 50005}, {60003, 60004}},
				{{50001, 50002}, {60003, 60004}},
			} {
				moves := [2]bool{} // by lane: which ends' ports do not matter
				for i, e := range []*end{a, b} {
					for lane, p := range want[i] {
						moves[lane] = moves[lane] || p != 0 && p != ports[i][lane]
					}
					e.SetPorts(0, want[i])
				}
				ports = want
				if err := both(t, a, b, 1<<20, 100, nil); err != nil {
					t.Fatal(err)
				}
				until(t, "other ports", a, b, func() bool {
					return slices.Equal(a.labels(f), want[0]) && slices.Equal(b.labels(f), want[1]) && alone(a, b)
				})
				if err := both(t, a, b, 1<<20, 100, nil); err != nil {
					t.Fatal(err)
				}
				least := int64(0)
				for _, m := range moves {
					if m {
						least++
					}
				}
				n := a.switches.Load() - moved
				// Where both ends' change at once, one may have answered before it heard of its own.
				if moved += n; n < least || n > 2*least || n != least && slices.Equal(want[1], []uint16{0, 0}) {
					t.Errorf("round %d: %d switches, of %d lanes that move", round, n, least)
				}
			}
			for i, e := range []*end{a, b} {
				if told := &e.told[0]; told[PathDown].Load() != 0 || told[PathLeft].Load() != moved || told[PathNew].Load() != moved+2 || e.switches.Load() != moved {
					t.Errorf("end %d: %d down, %d left, %d new, %d switches, of %d moves", i, told[PathDown].Load(), told[PathLeft].Load(), told[PathNew].Load(), e.switches.Load(), moved)
				}
			}
		})
	}
}

// TestMovesUnderLoad: lanes that are moved at random, by both ends, while ports fail and come back,
// lose and repeat no byte.
func TestMovesUnderLoad(t *testing.T) {
	for name, flaps := range map[string]bool{"sound": false, "flapping": true} {
		t.Run(name, func(t *testing.T) {
			fabric := unhurried
			if flaps {
				fabric.Retry = 10 * time.Millisecond
			}
			f := verbstest.New(t, fabric)
			opt := quick
			opt.FailbackAfter, opt.GiveUpAfter = time.Millisecond, patience
			a, b := connectMoving(t, f, opt, 2, nil, nil)
			until(t, "a primary and a backup", a, b, func() bool { return alone(a, b) })
			stop := make(chan struct{})
			var wg sync.WaitGroup
			for k, e := range []*end{a, b} {
				wg.Go(func() {
					r := rand.New(rand.NewPCG(9, uint64(k)))
					for {
						select {
						case <-stop:
							return
						case <-time.After(time.Duration(1+r.IntN(100)) * time.Millisecond):
						}
						e.SetPorts(0, []uint16{uint16(50000 + r.IntN(1000)), uint16(50000 + r.IntN(1000))})
						if i := 2 * r.IntN(2); flaps && r.IntN(3) == 0 {
							f.SetPort(fmt.Sprint("mlx5_", i), 1, false, r.IntN(2) == 0)
							time.Sleep(time.Duration(r.IntN(20)) * time.Millisecond)
							f.SetPort(fmt.Sprint("mlx5_", i), 1, true, r.IntN(2) == 0)
						}
					}
				})
			}
			want := int64(8)
			if testing.Short() {
				want = 3
			}
			end := time.Now().Add(patience)
			for a.switches.Load() < want {
				if err := both(t, a, b, 2<<20, 500, nil); err != nil {
					t.Error(err)
					break
				}
				if time.Now().After(end) {
					t.Error("it hardly moves\n" + a.dump())
					break
				}
			}
			close(stop)
			wg.Wait()
			if n := a.told[0][PathDown].Load() + b.told[0][PathDown].Load(); n > 0 && !flaps {
				t.Errorf("%d paths broke, and they were only left", n)
			}
			t.Logf("%d switches, %d messages sent again", a.switches.Load(), a.resent.Load()+b.resent.Load())
		})
	}
}

// TestDeadPort: a lane is not moved to a port whose way is dead, and one whose way dies goes on
// without it; neither is tried again before the plan says another.
func TestDeadPort(t *testing.T) {
	f := verbstest.New(t, verbstest.Options{Retry: 200 * time.Millisecond})
	opt := quick
	opt.Lanes = 1
	a, b := connectMoving(t, f, opt, 2, []uint16{50001}, []uint16{60001})
	until(t, "a primary and a backup", a, b, func() bool { return alone(a, b) })
	f.DropFrom(50002, true)
	a.SetPorts(0, []uint16{50002})
	until(t, "the end of the move", a, b, func() bool { return slices.Equal(a.Ports(0, nil), []uint16{0}) && alone(a, b) })
	if err := both(t, a, b, 1<<20, 100, nil); err != nil {
		t.Fatal(err)
	}
	if got := a.labels(f); !slices.Equal(got, []uint16{50001}) || a.switches.Load()+a.told[0][PathDown].Load() != 0 {
		t.Errorf("sends from %v after a move that failed, %d switches, %d down", got, a.switches.Load(), a.told[0][PathDown].Load())
	}
	f.DropFrom(50001, true)
	if err := both(t, a, b, 1<<20, 100, nil); err != nil {
		t.Fatal(err)
	}
	until(t, "another queue pair", a, b, func() bool { return alone(a, b) })
	if got := a.labels(f); !slices.Equal(got, []uint16{0}) {
		t.Errorf("sends from %v when the port's way is dead", got)
	}
	until(t, "the next port", a, b, func() bool {
		if a.Ports(0, nil)[0] == 0 { // at first, or an end was late
			a.SetPorts(0, []uint16{50003})
		}
		return slices.Equal(a.labels(f), []uint16{50003}) && alone(a, b)
	})
	if err := both(t, a, b, 1<<20, 100, nil); err != nil {
		t.Fatal(err)
	}
}
