package main

import (
	"testing"
	"time"

	"github.com/lockstep-ccl/lockstep/bench/zoo"
)

// said is an incident of a run, in seconds after the fault; a negative one is before it.
type said struct {
	class            string
	culprits         []string
	first, confirmed float64 // 0: not confirmed
}

func TestScore(t *testing.T) {
	kill := truth{names: []string{"rank 2"}}
	for _, tc := range []struct {
		name   string
		fault  string
		truth  truth
		said   []said
		slower float64 // steps after the fault
		want   string  // miss
		needed bool
	}{
		{"right", "kill9", kill, []said{{otherHang, []string{"rank 2"}, 0.5, 1}}, 1, "", true},
		{"silent", "kill9", kill, nil, 1, "nothing confirmed", true},
		{"suspected only", "kill9", kill, []said{{otherHang, []string{"rank 2"}, 0.5, 0}}, 1, "nothing confirmed", true},
		{"another rank", "kill9", kill, []said{{otherHang, []string{"rank 1"}, 0.5, 1}}, 1, "wrong culprit", true},
		{"another first", "kill9", kill, []said{{otherHang, []string{"rank 1"}, 0.5, 1}, {otherHang, []string{"rank 2"}, 0.4, 2}}, 1, "wrong culprit", true},
		{"right, then another", "kill9", kill, []said{{otherHang, []string{"rank 2"}, 0.5, 1}, {otherHang, []string{"rank 0"}, 1, 2}}, 1, "an innocent was confirmed, too", true},
		{"right, with others behind", "kill9", kill, []said{{otherHang, []string{"rank 2", "rank 3"}, 0.5, 1}}, 1, "innocents behind the right culprit", true},
		{"a node and its ranks", "node_slow1.5", truth{names: []string{"node node1"}, parts: []string{"rank 2", "rank 3"}}, []said{{otherSlow, []string{"node node1", "rank 2"}, 0.5, 1}}, 2, "", true},
		{"a node's rank alone", "node_slow1.5", truth{names: []string{"node node1"}, parts: []string{"rank 2", "rank 3"}}, []said{{otherSlow, []string{"rank 2"}, 0.5, 1}}, 2, "wrong culprit", true},
		{"class", "kill9", kill, []said{{commHang, []string{"rank 2"}, 0.5, 1}}, 1, "wrong class", true},
		{"healthy", "none", truth{}, nil, 1, "", false},
		{"false alarm", "none", truth{}, []said{{otherSlow, []string{"rank 0"}, 1, 2}}, 1, "confirmed, and nothing is wrong", false},
		{"healthy, suspected", "none", truth{}, []said{{otherSlow, []string{"rank 0"}, 1, 0}}, 1, "", false},
		{"cheap, silent", "slow2", kill, nil, 1.05, "", false},
		{"costly, silent", "slow2", kill, nil, 1.5, "nothing confirmed", true},
		{"costly", "slow2", kill, []said{{otherSlow, []string{"rank 2"}, 1, 2}}, 1.5, "", true},
		{"cheap, wrong", "slow2", kill, []said{{otherSlow, []string{"rank 0"}, 1, 2}}, 1.05, "wrong culprit", false},
		{"outage, silent", "pair_outage3s", truth{names: []string{"rank 0 → rank 2"}}, nil, 1, "", false},
		{"outage, ended the job", "pair_outage3s", truth{names: []string{"rank 0 → rank 2"}}, nil, 100, "the job did not go on", false},
		{"one of two", "two", truth{names: []string{"rank 2"}, also: []string{"rank 0 → rank 2"}, class: []string{commSlow}}, []said{{otherSlow, []string{"rank 2"}, 1, 2}}, 2, "one of two confirmed", true},
		{"both", "two", truth{names: []string{"rank 2"}, also: []string{"rank 0 → rank 2"}, class: []string{commSlow}}, []said{{commSlow, []string{"rank 0 → rank 2"}, 1, 2}, {otherSlow, []string{"rank 2"}, 1, 3}}, 2, "", true},
	} {
		t.Run(tc.name, func(t *testing.T) {
			job, err := zoo.Named("dp")
			if err != nil {
				t.Fatal(err)
			}
			rows, err := selected(tc.fault)
			if err != nil {
				t.Fatal(err)
			}
			r := &run{c: &cluster{job: job}, f: &rows[0], t0: time.Now(), seen: map[string]*sighting{}, losses: steps(job.Ranks, tc.slower)}
			r.t0 = time.Unix(0, 30*int64(100*time.Millisecond)+1)
			for i, s := range tc.said {
				in := incident{Class: s.class}
				for _, c := range s.culprits {
					in.Culprits = append(in.Culprits, struct {
						Name   string `json:"name"`
						Reason string `json:"reason,omitempty"`
					}{Name: c})
				}
				at := r.t0.Add(time.Duration(s.first * 1e9))
				r.seen[string(rune('a'+i))] = r.sighted(in, at)
				if s.confirmed > 0 {
					in.Confirmed = &at
					r.seen[string(rune('a'+i))].update(in, r.t0.Add(time.Duration(s.confirmed*1e9)))
				}
			}
			var res result
			r.score(&res, &tc.truth)
			if res.Miss != tc.want || res.Hit != (tc.want == "") || res.Needed != tc.needed {
				t.Errorf("miss %q, hit %t, needed %t; want %q and %t (cost %.2f)", res.Miss, res.Hit, res.Needed, tc.want, tc.needed, res.Cost)
			}
		})
	}
}

// steps are the losses of a job that makes 30 steps before its fault, and goes on for 3 s.
func steps(ranks int, slower float64) [][]zoo.Loss {
	var l []zoo.Loss
	at, step := time.Duration(0), 100*time.Millisecond
	for at < 6*time.Second {
		if len(l) == 30 {
			step = time.Duration(float64(step) * slower)
		}
		at += step
		l = append(l, zoo.Loss{Step: len(l) + 1, Bits: uint64(len(l)), At: int64(at)})
	}
	all := make([][]zoo.Loss, ranks)
	for k := range all {
		all[k] = l
	}
	return all
}

func TestUnequalLosses(t *testing.T) {
	job := &zoo.Job{Name: "unequal", Ranks: 2, Nodes: 2}
	rows, err := selected("none")
	if err != nil {
		t.Fatal(err)
	}
	r := &run{c: &cluster{job: job}, f: &rows[0], t0: time.Unix(3, 1), seen: map[string]*sighting{}, losses: steps(2, 1)}
	r.losses[1] = append([]zoo.Loss(nil), r.losses[1]...)
	r.losses[1][40].Bits++
	var res result
	r.score(&res, &truth{})
	if want := "rank 1's loss of step 41 is not that of others"; res.Miss != want {
		t.Errorf("miss %q, want %q", res.Miss, want)
	}
}

func TestPlan(t *testing.T) {
	z := &zooRunner{}
	a, err := z.plan("all", "all", 3*len(drawn()), 5)
	if err != nil {
		t.Fatal(err)
	}
	b, err := z.plan("all", "all", 3*len(drawn()), 5)
	if err != nil {
		t.Fatal(err)
	}
	count := map[string]int{}
	for i := range a {
		if a[i].fault.name != b[i].fault.name || a[i].job != b[i].job {
			t.Fatalf("run %d of one seed is two things", i)
		}
		if f := a[i].fault; f.fits != nil && !f.fits(a[i].job) {
			t.Errorf("%s does not fit %s", f.name, a[i].job.Name)
		}
		count[a[i].fault.name]++
	}
	for _, f := range drawn() {
		if count[f.name] != 3 {
			t.Errorf("%s: %d of 3 runs", f.name, count[f.name])
		}
	}
	if _, err := z.plan("all", "no such fault", 1, 1); err == nil {
		t.Error("a fault that is none was planned")
	}
}
