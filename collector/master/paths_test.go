package master

import (
	"strings"
	"testing"

	"github.com/lockstep-ccl/lockstep/diagnosis"
)

// TestPathsOfConnections: a verdict on a connection says over which links it goes, by ranks of
// its communicator; other verdicts, and the original, are left as they are.
func TestPathsOfConnections(t *testing.T) {
	full := []string{"1", "2", "3", "4", "5", "6", "7", "8"}
	m := &Master{o: Options{Paths: func(comm uint64, rank, peer int) string {
		if comm == 7 && rank == 1 && peer == 0 {
			return "leaf2–spine5–leaf0 and leaf3–spine1–leaf1"
		}
		return ""
	}}}
	ev := &diagnosis.Evidence{Comms: []diagnosis.Comm{{ID: 7, Members: []diagnosis.Member{{World: 4}, {World: 6}}}}}
	in := []diagnosis.Verdict{
		{Comm: 7, Why: full, Culprits: []diagnosis.Culprit{{Kind: diagnosis.CulpritConnection, Rank: 6, Peer: 4}, {Kind: diagnosis.CulpritConnection, Rank: 4, Peer: 6}}},
		{Comm: 7, Culprits: []diagnosis.Culprit{{Kind: diagnosis.CulpritRank, Rank: 6, Peer: -1}}},
		{Comm: 8, Culprits: []diagnosis.Culprit{{Kind: diagnosis.CulpritConnection, Rank: 6, Peer: 4}}},
		{Comm: 7, Culprits: []diagnosis.Culprit{{Kind: diagnosis.CulpritConnection, Rank: 9, Peer: 4}}},
	}
	out := m.along(ev, in)
	if why := strings.Join(out[0].Why, "|"); why != "1|2|3|4|5|6|7|rank 6 sends to rank 4 over leaf2–spine5–leaf0 and leaf3–spine1–leaf1" {
		t.Errorf("%s", why)
	}
	for i, v := range out {
		if i > 0 && len(v.Why) > 0 || len(in[i].Why) > 0 && in[i].Why[7] != "8" {
			t.Errorf("verdict %d: %v, was %v", i, v.Why, in[i].Why)
		}
	}
}
