package jobsim_test

import (
	"fmt"
	"testing"

	"github.com/lockstep-ccl/lockstep/diagnosis"
	"github.com/lockstep-ccl/lockstep/diagnosis/jobsim"
)

// TestLateAgain has ranks that are late in some steps only, or by little, in jobs of few and unlike
// operations: sums over windows show it, and cannot tell it from a habit. They are confirmed, and
// nobody whom they hold up is.
func TestLateAgain(t *testing.T) {
	for _, x := range []struct {
		row  string
		seed uint64
	}{
		{"straggler, now and then x 2.2", 70020},
		{"straggler, now and then x 2.2", 70026}, // its peer of the same tensor-parallel pair comes late to the other collectives
		{"straggler, now and then x 2.2", 70032},
		{"straggler, now and then x 2.2", 72029}, // four times in half a minute, twenty times as late as anybody before
		{"straggler, now and then x 2.2", 72038}, // ranks came late to the first collective
		{"straggler, periodic", 70005},
		{"straggler, periodic", 70042},
		{"straggler, periodic", 70044},
		{"straggler, periodic", 70049}, // windows of parts of a step
		{"straggler x 1.1-1.3", 70009},
		{"straggler x 1.1-1.3", 70017},
		{"node x 1.5", 70018},
	} {
		s := mustMake(t, x.row, x.seed)
		fault := s.Config.Faults[0]
		mustConfirm(t, s, diagnosis.NoncommunicationSlow, func(c diagnosis.Culprit) bool {
			if fault.Kind == jobsim.NodeStraggler {
				return c.Kind == diagnosis.CulpritNode && c.Node == jobsim.NodeName(fault.Rank/s.Config.Cluster.RanksPerNode)
			}
			return c.Kind == diagnosis.CulpritRank && c.Rank == int32(fault.Rank)
		})
	}
}

// TestMoves has slow connections of jobs with long steps, of which looks at bytes on their way see
// little and windows are few.
func TestMoves(t *testing.T) {
	for _, x := range []struct {
		row  string
		seed uint64
	}{
		{"slow sender", 72018},
		{"slow sender", 72020},
		{"slow receiver", 72013},
		{"slow receiver", 72011},
	} {
		s := mustMake(t, x.row, x.seed)
		rank := int32(s.Config.Faults[0].Rank)
		// A ring has one connection of a rank that leaves its node.
		mustConfirm(t, s, diagnosis.CommunicationSlow, func(c diagnosis.Culprit) bool { return c.Rank == rank || c.Peer == rank })
	}
}

// TestWhatIsSlowTogether has a rank whose connections are found slow one after the other, and pairs beside
// which a monitor errs now and then: what is told from the first is the rank, or the pair.
func TestWhatIsSlowTogether(t *testing.T) {
	for _, x := range []struct {
		row  string
		seed uint64
		kind diagnosis.CulpritKind
	}{
		{"slow receiver", 70054, diagnosis.CulpritDest},
		{"slow receiver", 70057, diagnosis.CulpritDest},
		{"slow pair", 70022, diagnosis.CulpritConnection},
		{"slow pair", 70056, diagnosis.CulpritConnection},
	} {
		s := mustMake(t, x.row, x.seed)
		f := s.Config.Faults[0]
		mustConfirm(t, s, diagnosis.CommunicationSlow, func(c diagnosis.Culprit) bool {
			return c.Kind == x.kind && c.Rank == int32(f.Rank) && (x.kind != diagnosis.CulpritConnection || c.Peer == int32(f.Peer))
		})
	}
}

// TestLosesALittle has pairs of which one segment in a hundred is lost: few collectives are late, and by much,
// which no monitor finds in most of its windows; that bytes are sent again tells which connection it is.
func TestLosesALittle(t *testing.T) {
	for _, seed := range []uint64{70055, 70533, 70539} {
		s := mustMake(t, "loss on a pair", seed)
		a, b := int32(s.Config.Faults[0].Rank), int32(s.Config.Faults[0].Peer)
		mustConfirm(t, s, diagnosis.CommunicationSlow, func(c diagnosis.Culprit) bool {
			return c.Kind == diagnosis.CulpritConnection && (c.Rank == a && c.Peer == b || c.Rank == b && c.Peer == a)
		})
	}
}

// TestPhases has a node slower than the others in jobs without marks whose steps have a handful of collectives, all at
// their end: stretches of few operations are one phase of a step and then another.
func TestPhases(t *testing.T) {
	for _, seed := range []uint64{5700048, 5700054, 5700067} {
		s := mustMake(t, "node x 1.5", seed)
		mustConfirm(t, s, diagnosis.NoncommunicationSlow, func(c diagnosis.Culprit) bool { return c.Kind == diagnosis.CulpritNode })
	}
}

// TestLateByChance plays half an hour each of healthy jobs in which ranks are late for several
// collectives in a row, now one and now another: by one lateness that overlapping calls show one
// after the other, by what a whole step takes longer, and in one of several communicators of the
// same ranks only.
func TestLateByChance(t *testing.T) {
	for _, x := range []struct {
		row  string
		seed uint64
	}{
		{"healthy, epochs", 80019},
		{"healthy, epochs", 80201},
		{"healthy", 80270},
		{"healthy, uneven lengths", 80112},
		{"healthy, evaluation", 80274},
	} {
		mustAccuseNobody(t, mustMake(t, x.row, x.seed))
	}
}

// mustAccuseNobody wants nothing confirmed.
func mustAccuseNobody(t *testing.T, s *jobsim.Scenario) {
	t.Helper()
	said := ""
	_, err := jobsim.Play(s, diagnosis.New(diagnosis.Config{}).Diagnose, nil, func(j *jobsim.Job, verdicts []diagnosis.Verdict) {
		for _, v := range verdicts {
			if v.Level == diagnosis.Confirmed && said == "" {
				said = fmt.Sprintf("at %s: %v %v: %v", j.Now(), v.Class, v.Culprits, v.Why)
			}
		}
	})
	if err != nil {
		t.Fatal(err)
	}
	if said != "" {
		t.Errorf("%s, seed %d: confirmed %s\n%+v", s.Name, s.Seed, said, s.Config)
	}
}

// mustConfirm wants something confirmed, and all of it of a class and with a right first culprit.
func mustConfirm(t *testing.T, s *jobsim.Scenario, class diagnosis.Class, right func(diagnosis.Culprit) bool) {
	t.Helper()
	told := false
	_, err := jobsim.Play(s, diagnosis.New(diagnosis.Config{}).Diagnose, nil, func(j *jobsim.Job, verdicts []diagnosis.Verdict) {
		for _, v := range verdicts {
			if v.Level != diagnosis.Confirmed {
				continue
			}
			if told = true; v.Class != class || !right(v.Culprits[0]) {
				t.Fatalf("%s %d at %v: %v %+v: %v", s.Name, s.Seed, j.Now(), v.Class, v.Culprits, v.Why)
			}
		}
	})
	if err != nil {
		t.Fatal(err)
	}
	if !told {
		t.Errorf("%s %d: nothing is confirmed", s.Name, s.Seed)
	}
}

func mustMake(t *testing.T, row string, seed uint64) *jobsim.Scenario {
	t.Helper()
	s, err := jobsim.Make(jobsim.Tuning, row, seed, 8)
	if err != nil {
		t.Fatal(err)
	}
	return s
}
