package jobsim_test

import (
	"testing"
	"time"

	"github.com/lockstep-ccl/lockstep/diagnosis"
	"github.com/lockstep-ccl/lockstep/diagnosis/jobsim"
)

// TestJudge plays one scenario through engines that always say the same, from the
// eighth second on: what is right, wrong and against innocents.
func TestJudge(t *testing.T) {
	rank := func(r int32) []diagnosis.Culprit {
		return []diagnosis.Culprit{{Kind: diagnosis.CulpritRank, Rank: r, Peer: -1}}
	}
	hang, slow := diagnosis.NoncommunicationHang, diagnosis.NoncommunicationSlow
	tests := []struct {
		name                      string
		class                     diagnosis.Class
		level                     diagnosis.Level
		culprits                  []diagnosis.Culprit
		missed, top1, innocent    bool
		suspected, confirmed, any bool
	}{
		{name: "right", class: hang, level: diagnosis.Confirmed, culprits: rank(2), top1: true, suspected: true, confirmed: true, any: true},
		{name: "suspected only", class: hang, level: diagnosis.Suspected, culprits: rank(2), missed: true, suspected: true, any: true},
		{name: "of another class", class: slow, level: diagnosis.Confirmed, culprits: rank(2), missed: true, any: true},
		{name: "another rank of its node", class: hang, level: diagnosis.Confirmed, culprits: rank(3), missed: true, any: true},
		{name: "an innocent", class: hang, level: diagnosis.Confirmed, culprits: rank(6), missed: true, innocent: true, any: true},
		{name: "an innocent behind the culprit", class: hang, level: diagnosis.Confirmed, culprits: append(rank(2), rank(6)...), top1: true, innocent: true, suspected: true, confirmed: true, any: true},
		{name: "an innocent node", class: hang, level: diagnosis.Confirmed, culprits: []diagnosis.Culprit{{Kind: diagnosis.CulpritNode, Rank: -1, Peer: -1, Node: jobsim.NodeName(3)}}, missed: true, innocent: true, any: true},
		{name: "a connection excludes nobody", class: hang, level: diagnosis.Confirmed, culprits: []diagnosis.Culprit{{Kind: diagnosis.CulpritConnection, Rank: 5, Peer: 6}}, missed: true, any: true},
		{name: "nothing", missed: true},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			s := &jobsim.Scenario{
				Config: jobsim.Config{Data: 8, Seed: 9, Cluster: jobsim.Cluster{RanksPerNode: 2}, Faults: []jobsim.Fault{{Kind: jobsim.HangStop, Rank: 2, At: 6 * time.Second}}},
				Truths: []jobsim.Truth{{Classes: []diagnosis.Class{hang}, Ranks: []int32{2}, Want: diagnosis.Confirmed, Within: 10 * time.Second}},
				Length: 20 * time.Second,
			}
			o, err := jobsim.Play(s, func(ev *diagnosis.Evidence) []diagnosis.Verdict {
				if ev.Now < jobsim.Start+8e9 || test.culprits == nil {
					return nil
				}
				return []diagnosis.Verdict{{Key: "k", Class: test.class, Level: test.level, Culprits: test.culprits}}
			}, nil, nil)
			if err != nil {
				t.Fatal(err)
			}
			f := &o.Found[0]
			if !o.Felt(0) || f.Onset != 6*time.Second {
				t.Errorf("onset %v, want 6s", f.Onset)
			}
			if o.Missed(0) != test.missed || o.Top1(0) != test.top1 || (f.Suspected >= 0) != test.suspected || (f.Confirmed >= 0) != test.confirmed || (len(o.Said) > 0) != test.any {
				t.Errorf("missed %v, top-1 %v, suspected after %v, confirmed after %v, %d said", o.Missed(0), o.Top1(0), f.Suspected, f.Confirmed, len(o.Said))
			}
			if f.Confirmed >= 0 && (f.Confirmed < 1900*time.Millisecond || f.Confirmed > 2200*time.Millisecond) {
				t.Errorf("confirmed after %v, said two seconds after the onset", f.Confirmed)
			}
			if innocent := len(o.Said) > 0 && o.Said[0].Innocent; innocent != test.innocent {
				t.Errorf("innocent %v, want %v", innocent, test.innocent)
			}
		})
	}
}

// TestAloneOnItsNode: where nodes have one rank, either name of the culprit is right, and no other's.
func TestAloneOnItsNode(t *testing.T) {
	node := func(n int) diagnosis.Culprit {
		return diagnosis.Culprit{Kind: diagnosis.CulpritNode, Rank: -1, Peer: -1, Node: jobsim.NodeName(n)}
	}
	rank := diagnosis.Culprit{Kind: diagnosis.CulpritRank, Rank: 2, Peer: -1}
	for _, x := range []struct {
		name    string
		perNode int
		truth   jobsim.Truth
		said    diagnosis.Culprit
		right   bool
	}{
		{"the rank for its node", 1, jobsim.Truth{Nodes: []int32{2}}, rank, true},
		{"the node for its rank", 1, jobsim.Truth{Ranks: []int32{2}}, node(2), true},
		{"another node", 1, jobsim.Truth{Ranks: []int32{2}}, node(3), false},
		{"a rank of two for their node", 2, jobsim.Truth{Nodes: []int32{1}}, rank, false},
		{"a node of two for a rank", 2, jobsim.Truth{Ranks: []int32{2}}, node(1), false},
	} {
		x.truth.Classes, x.truth.Want, x.truth.Within = []diagnosis.Class{diagnosis.NoncommunicationHang}, diagnosis.Confirmed, 10*time.Second
		s := &jobsim.Scenario{
			Config: jobsim.Config{Data: 4, Seed: 9, Cluster: jobsim.Cluster{RanksPerNode: x.perNode}, Faults: []jobsim.Fault{{Kind: jobsim.HangStop, Rank: 2, At: 6 * time.Second}}},
			Truths: []jobsim.Truth{x.truth},
			Length: 12 * time.Second,
		}
		o, err := jobsim.Play(s, func(ev *diagnosis.Evidence) []diagnosis.Verdict {
			if ev.Now < jobsim.Start+8e9 {
				return nil
			}
			return []diagnosis.Verdict{{Key: "k", Class: diagnosis.NoncommunicationHang, Level: diagnosis.Confirmed, Culprits: []diagnosis.Culprit{x.said}}}
		}, nil, nil)
		if err != nil {
			t.Fatal(err)
		}
		if o.Top1(0) != x.right {
			t.Errorf("%s: right %v, want %v", x.name, o.Top1(0), x.right)
		}
	}
}
