package pathplan

import (
	"fmt"
	"math"
	"math/rand/v2"
	"testing"
	"time"
)

// losing is a plan of two tenants whose senders tell each second what they lose.
type losing struct {
	t    *testing.T
	p    *Planner
	now  time.Time
	rand *rand.Rand
	loss func(tenant string, a Assignment) float64
	told func(tenant string) bool
}

func newLosing(t *testing.T, seed uint64) *losing {
	w := &losing{t: t, p: newPlanner(t, paper(), Options{Steered: true}), now: t0, rand: rand.New(rand.NewPCG(seed, 18)), told: func(string) bool { return true }}
	reqs := pairs(16, 8, 4)
	for _, tenant := range []string{"t", "u"} {
		for i := range reqs {
			reqs[i].Conn.Tenant, reqs[i].Conn.Job = tenant, "job0"
		}
		mustAllocate(t, w.p, reqs)
	}
	return w
}

func (w *losing) lanes(tenant string) []Assignment {
	return w.p.Assignments(ConnID{Tenant: tenant, Job: "job0"})
}

// second has each lane send some 500 segments, and the planner look five times.
func (w *losing) second() (moves []Move) {
	for _, tenant := range []string{"t", "u"} {
		var losses []LaneLoss
		for _, a := range w.lanes(tenant) {
			sent := 400 + w.rand.IntN(200)
			losses = append(losses, LaneLoss{a.Conn, a.Lane, sent, w.of(sent, w.loss(tenant, a))})
		}
		if w.told(tenant) {
			w.p.ObserveLosses(w.now, losses)
		}
		if err := w.p.Renew(w.now, tenant, "job0"); err != nil {
			w.t.Fatal(err)
		}
	}
	for range 5 {
		w.now = w.now.Add(200 * time.Millisecond)
		w.p.Observe(w.now, nil, nil)
		moves = append(moves, w.p.Rebalance(w.now, 64)...)
	}
	w.p.invariants(w.t)
	return moves
}

// of is how many of so many segments are lost, where each is by chance.
func (w *losing) of(sent int, share float64) (lost int) {
	for i := w.skip(share); i < float64(sent); i += 1 + w.skip(share) {
		lost++
	}
	return lost
}

func (w *losing) skip(share float64) float64 {
	return math.Floor(math.Log(1-w.rand.Float64()) / math.Log1p(-share))
}

// on is how many of a tenant's lanes take a link.
func (w *losing) on(tenant string, l Link) (n int) {
	for _, a := range w.lanes(tenant) {
		if a.Path.Up == l || a.Path.Down == l {
			n++
		}
	}
	return n
}

// TestLossesAreLeft: a tenant's lanes leave a link that loses 1 % of what they send within ten
// seconds, by that tenant's word alone, and come back to it ever more rarely.
func TestLossesAreLeft(t *testing.T) {
	for seed := range uint64(4) {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			w := newLosing(t, seed)
			links := w.p.Links()
			bad := links[w.rand.IntN(len(links))].Link
			w.loss = func(_ string, a Assignment) float64 {
				if a.Path.Up == bad || a.Path.Down == bad {
					return 0.01
				}
				return 0.0001
			}
			w.told = func(tenant string) bool { return tenant == "t" }
			if w.on("t", bad) == 0 || w.on("u", bad) == 0 {
				t.Fatalf("nobody takes %s", bad)
			}
			for s := range 10 {
				for _, m := range w.second() {
					if m.Reason == Lossy && m.Conn.Tenant != "t" {
						t.Errorf("another tenant's word moved %+v", m)
					}
				}
				if w.on("t", bad) == 0 {
					break
				}
				if s == 9 {
					t.Fatalf("%d lanes still take %s, which loses 1 %%", w.on("t", bad), bad)
				}
			}
			if s := w.p.Suspects(); len(s) == 0 || len(s) > 2 {
				t.Errorf("suspects are %v, and it is %s", s, bad)
			}
			seconds := 0
			for range 150 {
				w.second()
				if w.on("t", bad) > 0 {
					seconds++
				}
			}
			if seconds > 40 {
				t.Errorf("lanes take %s in %d of 150 s more", bad, seconds)
			}
			if w.on("u", bad) == 0 {
				t.Error("the other tenant's lanes have left, too")
			}
		})
	}
}

// TestLossesThatAreNoLinks: nobody moves for what all links lose, for what a host's own link loses,
// for moments in which a queue is full, or for what is lost where a lane has just come.
func TestLossesThatAreNoLinks(t *testing.T) {
	for name, loss := range map[string]func(w *losing) func(string, Assignment) float64{
		"all": func(w *losing) func(string, Assignment) float64 {
			return func(string, Assignment) float64 { return 0.0001 + 0.008*w.rand.Float64() }
		},
		"a host's": func(w *losing) func(string, Assignment) float64 {
			of := w.lanes("t")[0]
			return func(tenant string, a Assignment) float64 {
				if a.Conn == of.Conn && a.Side == of.Side {
					return 0.05
				}
				return 0.0001
			}
		},
		"a full queue": func(w *losing) func(string, Assignment) float64 {
			of := w.lanes("t")[0].Path.Up
			return func(_ string, a Assignment) float64 {
				if at := w.now.Sub(t0); a.Path.Up == of && at >= 20*time.Second && at < 22*time.Second {
					return 0.03
				}
				return 0.0001
			}
		},
		"the first seconds": func(w *losing) func(string, Assignment) float64 {
			return func(_ string, a Assignment) float64 {
				if w.now.Sub(t0) < lossSettled-time.Second {
					return 0.1*float64(w.rand.IntN(2)) + 0.0001
				}
				return 0.0001
			}
		},
	} {
		t.Run(name, func(t *testing.T) {
			for seed := range uint64(3) {
				w := newLosing(t, seed)
				w.loss = loss(w)
				for range 40 {
					for _, m := range w.second() {
						if m.Reason == Lossy {
							t.Fatalf("seed %d, after %v: %+v", seed, w.now.Sub(t0), m)
						}
					}
				}
			}
		})
	}
}

// BenchmarkLosses is what a look at the losses of one tenant takes, which the planner waits for: one lane in
// twenty loses, anywhere, so that there is much to explain.
func BenchmarkLosses(b *testing.B) {
	for _, hosts := range []int{16, 128, 512} {
		b.Run(fmt.Sprintf("%d hosts", hosts), func(b *testing.B) {
			p := newPlanner(b, Clos(ClosShape{Hosts: hosts, NICs: 8, Groups: hosts / 8, LeafPairs: 2, Spines: 8, PortRate: 200 * gbit, LinkRate: 800 * gbit}), Options{Steered: true})
			reqs := pairs(hosts, 8, 8)
			for i := range reqs {
				reqs[i].Conn.Tenant, reqs[i].Conn.Job = "t", "job0"
			}
			if _, err := p.Allocate(t0, reqs); err != nil {
				b.Fatal(err)
			}
			r, now := rand.New(rand.NewPCG(1, 18)), t0
			for range lossBuckets + int(lossSettled/lossFor) {
				var losses []LaneLoss
				for i, a := range p.Assignments(ConnID{Tenant: "t", Job: "job0"}) {
					lost := 0
					if i%100 < 5 {
						lost = 1 + r.IntN(30)
					}
					losses = append(losses, LaneLoss{a.Conn, a.Lane, 500, lost})
				}
				p.ObserveLosses(now, losses)
				now = now.Add(lossFor)
			}
			for b.Loop() {
				p.judgeLosses(now)
			}
			b.ReportMetric(float64(8*len(reqs)), "lanes")
		})
	}
}
