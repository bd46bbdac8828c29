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

// The pid that is reported is the one that an operator finds on the node.
func TestReportsPIDOfTheNode(t *testing.T) {
	p := process()
	p.PID = 7
	r := &rank{p: p, job: &job{}}
	newAgent(t).learn(r)
	for _, want := range []int32{7, 9042} {
		var rep wire.Report
		if r.report(&rep, 100); len(rep.Ranks) != 1 || rep.Ranks[0].Pid != want {
			t.Errorf("reported %v, want pid %d", rep.Ranks, want)
		}
		p.HostPID = 9042
	}
}

// Ranks and connections that change all the time keep no other from being reported.
func TestReportsAreFair(t *testing.T) {
	a := newAgent(t)
	j := &job{name: "job"}
	seen := map[int32]map[uint64]bool{} // by rank: connections, by what was posted on them
	const ranks, conns = 3, wire.MaxEntries + 100
	for i := range int32(ranks) {
		p := process()
		p.Rank = i
		for c := range p.Comms {
			p.Comms[c].ID, p.Comms[c].Rank = uint64(100*i)+uint64(c), i
		}
		for k := range uint32(conns) {
			p.Conns = append(p.Conns, record.ConnStatus{ConnEntry: record.ConnEntry{Channel: uint16(k)}, Index: k})
		}
		r := &rank{p: p, job: j}
		a.learn(r)
		j.ranks = append(j.ranks, r)
		seen[i] = map[uint64]bool{}
	}
	members := map[uint64]bool{}
	reports := 3 * ranks * (conns/wire.MaxEntries + 1)
	for n := range reports {
		for _, r := range j.ranks {
			for k := range r.p.Conns {
				r.p.Conns[k].Posted++
			}
		}
		rep := j.report()
		if got := len(rep.Ranks) + len(rep.Members) + len(rep.Connections); got > wire.MaxEntries {
			t.Fatalf("report %d has %d entries", n, got)
		}
		for _, m := range rep.Members {
			members[m.CommId] = true
		}
		for _, c := range rep.Connections {
			seen[c.Rank][uint64(c.Channel)] = true
		}
	}
	if len(members) != 2*ranks {
		t.Errorf("%d of %d members reported", len(members), 2*ranks)
	}
	for i, s := range seen {
		if len(s) != conns {
			t.Errorf("rank %d: %d of %d connections reported in %d reports", i, len(s), conns, reports)
		}
	}
}

// An arrival says how much was moved, where members have to agree on that.
func TestArrivalTellsPayload(t *testing.T) {
	j := &job{}
	for _, kind := range []record.CollKind{record.AllReduce, record.Broadcast, record.AlltoAllv, record.Gather} {
		j.arrive(&comm{}, &op{coll: kind, bytes: 64})
	}
	for i, want := range []uint64{64, 64, 0, 0} {
		if got := j.arrivals[i]; got.Bytes != want {
			t.Errorf("%v: %d bytes, want %d", record.CollKind(got.Coll), got.Bytes, want)
		}
	}
}
