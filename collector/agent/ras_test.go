package agent

import (
	"testing"

	"github.com/lockstep-ccl/lockstep/collector"
	"github.com/lockstep-ccl/lockstep/collector/source"
	"github.com/lockstep-ccl/lockstep/record"
)

// What RAS says goes to the master once, as far as it is about the job, what is wrong first.
func TestReportRAS(t *testing.T) {
	j := &job{}
	p := &source.Process{}
	for id := range uint64(100) {
		p.Comms = append(p.Comms, record.CommStatus{CommEntry: record.CommEntry{ID: id}})
	}
	j.ranks = []*rank{{p: p}}
	a := &collector.RAS{At: 5}
	for id := range uint64(200) {
		c := collector.RASComm{ID: id}
		if id >= 90 {
			c.Missing = []collector.RASRank{{Rank: 1}}
		}
		a.Comms = append(a.Comms, c)
	}
	out := j.reportRAS(a)
	if len(out) != maxRAS || out[0].CommId != 90 || len(out[9].Missing) != 1 || len(out[10].Missing) != 0 || out[0].MonoAtNs != 5 {
		t.Errorf("%d communicators: %v", len(out), out)
	}
	if again := j.reportRAS(a); again != nil {
		t.Errorf("again: %v", again)
	}
	j.forget()
	if len(j.reportRAS(a)) != maxRAS {
		t.Error("another master does not hear it")
	}
	if j.reportRAS(nil) != nil {
		t.Error("of nothing")
	}
}
