package diagnosis_test

import (
	"strings"
	"testing"
	"time"

	"github.com/lockstep-ccl/lockstep/diagnosis"
	"github.com/lockstep-ccl/lockstep/record"
)

// TestExplanations: a verdict tells the waits down to the culprit, and what would have changed it.
func TestExplanations(t *testing.T) {
	j := newJob(8)
	j.ev.Comms = make([]diagnosis.Comm, 0, 3)
	j.allBut(j.comm("dp", 0, 1, 2, 3), 3, 3)
	j.allBut(j.comm("tp", 3, 4), 3, 1)
	j.pair(j.comm("pp", 4, 5), 0, record.Recv, 1, 3)
	v := one(t, j.verdicts(), "confirmed noncommunication_hang 5 idle")
	if got := strings.Join(v.Chain, "\n"); !strings.HasSuffix(got, " waits in AllReduce #101 on dp for rank 3\nrank 3 waits in AllReduce #101 on tp for rank 4\nrank 4 waits in Recv #101 on pp for rank 5") {
		t.Errorf("chain:\n%s", got)
	}
	if want := "rank 5 entering Recv #101 on pp, or waiting for another"; v.Counter != want {
		t.Errorf("counter %q, want %q", v.Counter, want)
	}
}

// TestCulpritsKeepTheirOrder: who is told first stays first while the same ranks are told.
func TestCulpritsKeepTheirOrder(t *testing.T) {
	j := newJob(8)
	c := j.comm("dp", 0, 1, 2, 3, 4, 5)
	j.allBut(c, 3, 1, 2)
	idleSince(c, 1, 9)
	idleSince(c, 2, 8)
	j.verdicts()
	for k := range 10 {
		c.Members[1+k%2].FinishedAt -= 1e9 // another seems to be the first
		if v := one(t, j.pass(100*time.Millisecond), "confirmed noncommunication_hang 1,2 idle"); v.Culprits[0].Rank != 1 {
			t.Fatalf("%+v", v.Culprits)
		}
	}
}
