package agent

import (
	"testing"

	"github.com/lockstep-ccl/lockstep/collector/wire"
	"github.com/lockstep-ccl/lockstep/record"
)

// The master keeps nothing of an idle connection, so its name is told again by
// the first report that has more to say, and not after that.
func TestReportsNamesOnce(t *testing.T) {
	p := process()
	r := &rank{p: p, job: &job{}}
	newAgent(t).learn(r)
	names := func(change func(c *record.ConnStatus)) string {
		t.Helper()
		change(&p.Conns[0])
		var rep wire.Report
		r.report(&rep, 100)
		if len(rep.Connections) != 1 {
			t.Fatalf("%d connections reported", len(rep.Connections))
		}
		return rep.Connections[0].Name
	}
	p.Conns = []record.ConnStatus{{ConnEntry: record.ConnEntry{Peer: 2, Transport: record.TransportRDMA, Name: "a->b"}}}
	for i, step := range []struct {
		change func(c *record.ConnStatus)
		name   string
	}{
		{func(*record.ConnStatus) {}, "a->b"},
		{func(c *record.ConnStatus) { c.Received = 1 }, "a->b"},
		{func(c *record.ConnStatus) { c.Link = record.LinkUp }, "a->b"},
		{func(c *record.ConnStatus) { c.Link = record.LinkDown }, ""},
	} {
		if got := names(step.change); got != step.name {
			t.Errorf("report %d names it %q, want %q", i, got, step.name)
		}
	}
}
