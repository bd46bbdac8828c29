package verbs_test

import (
	"encoding/binary"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/lockstep-ccl/lockstep/ccl/internal/verbs"
	"github.com/lockstep-ccl/lockstep/ccl/internal/verbs/verbstest"
)

// stream is what one side of TestRandomFaults has done.
type stream struct {
	*side
	to          *stream
	posted      int // writes
	transmitted int // writes completed with success
	completed   int // or without
	receives    int // posted
	received    int
	failed      bool
}

const (
	slotBytes = 16
	slots     = 1024 // more than are ever outstanding
)

// write posts a write that carries its number.
func (s *stream) write(t *testing.T) {
	t.Helper()
	at := slots*slotBytes + s.posted%slots*slotBytes // below it lies what arrives
	binary.LittleEndian.PutUint64(s.mem[at:], uint64(s.posted)+1)
	w := s.side.write(s.to.side, uint64(s.posted), at, slotBytes)
	w.RemoteAddr -= slots * slotBytes
	w.Inline = s.posted%3 == 0
	s.post(t, w)
	s.posted++
}

// poll takes what has completed, and checks it.
func (s *stream) poll(t *testing.T) {
	t.Helper()
	var c [64]verbs.Completion
	n, err := s.cq.Poll(c[:])
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range c[:n] {
		switch {
		case c.ID == 1<<40: // a receive
			if c.Status != verbs.Success {
				s.receives--
				continue
			}
			if c.Imm != uint32(s.received) || c.Bytes != slotBytes {
				t.Fatalf("%s: receive %d is %+v", s.name, s.received, c)
			}
			if got := binary.LittleEndian.Uint64(s.mem[s.received%slots*slotBytes:]); got != uint64(s.received)+1 {
				t.Fatalf("%s: receive %d has the bytes of write %d", s.name, s.received, got-1)
			}
			s.received++
		case c.ID != uint64(s.completed):
			t.Fatalf("%s: write %d completed instead of %d", s.name, c.ID, s.completed)
		case c.Status == verbs.Success && !s.failed:
			s.completed++
			s.transmitted++
		default:
			if s.failed != (c.Status == verbs.Flushed) {
				t.Fatalf("%s: %+v, after a failure: %v", s.name, c, s.failed)
			}
			s.completed++
			s.failed = true
		}
	}
}

// TestRandomFaults: whatever links do, writes arrive in order, once each and
// whole, and completions tell the truth: what the sender calls transmitted the
// receiver has counted, and it has counted no more than was posted.
func TestRandomFaults(t *testing.T) {
	const seeds = 20
	f := verbstest.New(t, verbstest.Options{Retry: 10 * time.Millisecond})
	ends := [2]*side{open(t, "mlx5_0"), open(t, "mlx5_2")}
	links := [2]verbstest.Link{f.Link("mlx5_0", 1, "mlx5_2", 1), f.Link("mlx5_2", 1, "mlx5_0", 1)}
	survived, recovered := 0, 0
	for seed := range uint64(seeds) {
		for _, e := range ends {
			if err := e.qp.Close(); err != nil {
				t.Fatal(err)
			}
			e.newQP(t)
			clear(e.mem)
		}
		connect(t, ends[0], ends[1], 14, 6)
		rng := rand.New(rand.NewPCG(seed, 1))
		s := [2]*stream{{side: ends[0]}, {side: ends[1]}}
		s[0].to, s[1].to = s[1], s[0]
		faults := 0
		for range 200 {
			i := rng.IntN(2)
			x, l := s[i], links[i]
			switch rng.IntN(14) {
			case 0:
				l.DropNext(rng.IntN(3))
				faults++
			case 1:
				l.TearNext(rng.IntN(3))
				faults++
			case 2:
				l.LoseAcks(rng.IntN(3) == 0)
				faults++
			case 3:
				l.Freeze()
			case 4, 5:
				l.Release()
			case 6:
				l.Delay(time.Duration(rng.IntN(3)) * 50 * time.Microsecond)
			case 7:
				if rng.IntN(25) == 0 {
					f.ExpireRetries()
				}
			default:
				for k := rng.IntN(4); k > 0 && !x.failed && x.posted-x.completed < depth-1; k-- {
					x.write(t)
				}
				if n := min(rng.IntN(6), depth-1-(x.receives-x.received)); n > 0 && !x.failed {
					x.side.receives(t, 1<<40, n)
					x.receives += n
				}
			}
			for _, x := range s {
				x.poll(t)
			}
		}
		// All faults end, and all completes, one way or the other.
		for _, l := range links {
			l.Release()
		}
		f.Heal()
		deadline := time.Now().Add(soon)
		for _, x := range s {
			for x.completed < x.posted {
				for _, y := range s {
					if n := y.to.posted - y.receives; n > 0 && !y.failed {
						n = min(n, depth-1-(y.receives-y.received))
						y.side.receives(t, 1<<40, n)
						y.receives += n
					}
					y.poll(t)
				}
				if time.Now().After(deadline) {
					t.Fatalf("seed %d: %s: %d of %d writes completed", seed, x.name, x.completed, x.posted)
				}
				time.Sleep(50 * time.Microsecond)
			}
		}
		for _, x := range s {
			if err := x.qp.SetError(); err != nil {
				t.Fatal(err)
			}
		}
		for _, x := range s {
			for range 2 * depth / 64 {
				x.poll(t)
			}
		}
		for _, x := range s {
			if x.transmitted > x.to.received || x.to.received > x.posted {
				t.Errorf("seed %d: %s: %d transmitted, %d received, %d posted", seed, x.name, x.transmitted, x.to.received, x.posted)
			}
			switch {
			case !x.failed && x.to.received != x.posted:
				t.Errorf("seed %d: %s: nothing failed, and %d of %d arrived", seed, x.name, x.to.received, x.posted)
			case !x.failed && faults > 0:
				recovered++
			}
			if !x.failed {
				survived++
			}
		}
	}
	t.Logf("of %d directions %d survived, %d of them with faults", 2*seeds, survived, recovered)
	if recovered == 0 || survived == 2*seeds {
		t.Error("the faults are too weak, or too strong, to say anything")
	}
}
