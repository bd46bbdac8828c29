package pathplan

import (
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"testing"
)

// mesh probes every path of a fabric between one host of each leaf and all others, there
// and back by any path, and loses packets where links do.
func mesh(r *rand.Rand, leaves, spines, sent int, answered bool, loss map[Link]float64) (out []Probe) {
	name := func(kind string, i int) string { return fmt.Sprintf("%s%d", kind, i) }
	via := func(a, b, s int) []Link {
		return []Link{{From: name("leaf", a), To: name("spine", s)}, {From: name("spine", s), To: name("leaf", b)}}
	}
	for a := range leaves {
		for b := range leaves {
			for s := range spines {
				if a == b {
					continue
				}
				over := via(a, b, s)
				if answered {
					over = append(over, via(b, a, r.IntN(spines))...)
				}
				survive := 1.0
				for _, l := range over {
					survive *= 1 - loss[l]
				}
				out = append(out, Probe{Over: over, Sent: sent, Lost: binomial(r, sent, 1-survive)})
			}
		}
	}
	r.Shuffle(len(out), func(i, j int) { out[i], out[j] = out[j], out[i] })
	return out
}

// binomial is how many of n packets are lost, by skipping from one loss to the next.
func binomial(r *rand.Rand, n int, p float64) (lost int) {
	if p >= 1 {
		return n
	}
	if p <= 0 {
		return 0
	}
	for i := 0; ; lost++ {
		if i += 1 + int(math.Log(1-r.Float64())/math.Log1p(-p)); i > n {
			return lost
		}
	}
}

func anyLink(r *rand.Rand, leaves, spines int) Link {
	l := Link{From: fmt.Sprintf("leaf%d", r.IntN(leaves)), To: fmt.Sprintf("spine%d", r.IntN(spines))}
	if r.IntN(2) == 0 {
		l = l.Reverse()
	}
	return l
}

// TestInferFindsAll: 1, 2, 3 dead or lossy links in 100 random places each are found, and
// no other is blamed, also while every link loses one packet in 10,000.
func TestInferFindsAll(t *testing.T) {
	for _, kind := range []struct {
		name string
		loss func(r *rand.Rand) float64
		sent int
	}{
		{"dead", func(*rand.Rand) float64 { return 1 }, 20},
		{"lossy", func(r *rand.Rand) float64 { return 0.01 + 0.3*r.Float64()*r.Float64() }, 1000},
		{"either", func(r *rand.Rand) float64 { return []float64{1, 0.02, 0.1, 1, 0.5}[r.IntN(5)] }, 1000},
	} {
		for _, answered := range []bool{false, true} {
			for bad := 1; bad <= 3; bad++ {
				t.Run(fmt.Sprintf("%s-answered=%v-%d", kind.name, answered, bad), func(t *testing.T) {
					for seed := range uint64(rounds(100)) {
						r := rand.New(rand.NewPCG(seed, uint64(bad)))
						leaves, spines := 4+r.IntN(3), 4+r.IntN(5)
						loss := map[Link]float64{}
						for len(loss) < bad {
							loss[anyLink(r, leaves, spines)] = kind.loss(r)
						}
						checkFound(t, seed, loss, Infer(mesh(r, leaves, spines, kind.sent, answered, loss), InferOptions{}))
					}
				})
			}
		}
	}
}

// checkFound: each bad link is a suspect, alone; nobody else is.
func checkFound(t *testing.T, seed uint64, loss map[Link]float64, got []Suspect) {
	t.Helper()
	var found []Link
	for _, s := range got {
		if !s.Proven {
			t.Errorf("seed %d: %v are suspect, and none is proven bad (bad: %v)", seed, s.Links, loss)
			continue
		}
		found = append(found, s.Links[0])
		if loss[s.Links[0]] == 0 {
			t.Errorf("seed %d: %s is blamed with %.3f, bad are %v", seed, s.Links[0], s.Loss, loss)
		}
	}
	for l := range loss {
		if !slices.Contains(found, l) {
			t.Errorf("seed %d: %s, which loses %.3f, was not found: %+v", seed, l, loss[l], got)
		}
	}
}

// TestInferHealthy: a fabric that is well, with noise, has no suspect.
func TestInferHealthy(t *testing.T) {
	for seed := range uint64(rounds(50)) {
		r := rand.New(rand.NewPCG(seed, 9))
		noise := map[Link]float64{}
		for a := range 6 {
			for s := range 6 {
				l := Link{From: fmt.Sprintf("leaf%d", a), To: fmt.Sprintf("spine%d", s)}
				noise[l], noise[l.Reverse()] = 0.0001, 0.0001
			}
		}
		if got := Infer(mesh(r, 6, 6, 1000, true, noise), InferOptions{}); len(got) > 0 {
			t.Errorf("seed %d: %+v", seed, got)
		}
	}
}

// TestInferAlike: with one path to a leaf, its two links cannot be told apart, and a host's
// access link explains what would take all links of its leaf.
func TestInferAlike(t *testing.T) {
	up, down := Link{From: "leaf0", To: "spine0"}, Link{From: "spine0", To: "leaf1"}
	got := Infer([]Probe{{Over: []Link{up, down}, Sent: 10, Lost: 10}}, InferOptions{})
	if len(got) != 1 || !slices.Equal(got[0].Links, []Link{up, down}) || got[0].Loss < 0.99 {
		t.Errorf("got %+v", got)
	}
	var probes []Probe
	for a := range 4 {
		for b := range 4 {
			for s := range 4 {
				p := Probe{Sent: 10, Over: []Link{
					{From: fmt.Sprintf("host%d", a), To: fmt.Sprintf("leaf%d", a)},
					{From: fmt.Sprintf("leaf%d", a), To: fmt.Sprintf("spine%d", s)},
					{From: fmt.Sprintf("spine%d", s), To: fmt.Sprintf("leaf%d", b)},
					{From: fmt.Sprintf("leaf%d", b), To: fmt.Sprintf("host%d", b)},
				}}
				if a == 2 && b != a {
					p.Lost = 10
				}
				if a != b {
					probes = append(probes, p)
				}
			}
		}
	}
	got = Infer(probes, InferOptions{})
	if len(got) != 1 || len(got[0].Links) != 1 || got[0].Links[0].From != "host2" {
		t.Errorf("got %+v", got)
	}
}

// BenchmarkInfer: a full mesh of 64 leaves over 32 spines, three bad links.
func BenchmarkInfer(b *testing.B) {
	r := rand.New(rand.NewPCG(1, 1))
	probes := mesh(r, 64, 32, 100, true, map[Link]float64{anyLink(r, 64, 32): 1, anyLink(r, 64, 32): 0.05, anyLink(r, 64, 32): 0.3})
	for b.Loop() {
		if len(Infer(probes, InferOptions{})) != 3 {
			b.Fatal("not the three")
		}
	}
}
