package master

import (
	"github.com/lockstep-ccl/lockstep/collector"
	"github.com/lockstep-ccl/lockstep/collector/internal/roots"
	"github.com/lockstep-ccl/lockstep/collector/wire"
	"github.com/lockstep-ccl/lockstep/diagnosis"
	"github.com/lockstep-ccl/lockstep/record"
)

// An incident names a trace that exists. Agents are asked for the collective that shows it
// best, and the incident gets its trace once one of them has exported a span of it. Where
// nobody holds that collective, agents are asked once more, for one that one of them does hold.

const (
	maxAsked = 256 // requests whose answers are awaited
	maxAsks  = 64  // collectives that wait for a request of their other ranks
	// asksPerPass bounds the requests for the other ranks' spans of a collective that stood
	// out on one: at ten passes a second, 20 traces a second.
	asksPerPass = 2
	// ahead is how far a wall clock may be ahead of this one's, ns, for spans by it to be covered by a root.
	ahead = int64(3600e9)
)

// traces are the requests made of agents.
type traces struct {
	requests uint64
	asked    []askedFor // latest last
}

// askedFor is one request on behalf of an incident.
type askedFor struct {
	id       uint64
	incident string
	key      roots.Key
	again    bool // it is the second one, for what an agent holds
}

// trace asks all agents for the spans that they still hold of the collective that shows an incident.
func (m *Master) trace(i *collector.Incident, now int64) {
	k := roots.Key{Comm: i.Verdict.Comm, Coll: i.Verdict.Coll, Seq: i.Verdict.Seq}
	if k.Comm == 0 || k.Seq == 0 {
		k = m.state.shows(&i.Verdict)
	}
	if k.Comm != 0 {
		m.ask(askedFor{incident: i.ID, key: k})
	}
}

// shows finds the collective that the first culprit, or who waits for it, is in.
func (s *state) shows(v *diagnosis.Verdict) (k roots.Key) {
	if len(v.Culprits) == 0 {
		return k
	}
	for c := range s.ev.Comms {
		comm := &s.ev.Comms[c]
		for m := range comm.Members {
			if comm.Members[m].World != v.Culprits[0].Rank || v.Culprits[0].Rank < 0 {
				continue
			}
			for n := range comm.Members {
				if o := &comm.Members[n]; o.Open() && (k.Comm == 0 || n == m) {
					k = roots.Key{Comm: comm.ID, Coll: o.Coll, Seq: o.Finished + 1}
				}
			}
		}
	}
	return k
}

// ask sends a request to every agent.
func (m *Master) ask(a askedFor) {
	t := &m.traces
	t.requests++
	a.id = t.requests
	if a.incident != "" {
		if len(t.asked) == maxAsked {
			t.asked = append(t.asked[:0], t.asked[1:]...)
		}
		t.asked = append(t.asked, a)
	}
	for i := range m.state.nodes {
		if s := m.state.nodes[i].stream; s != nil {
			s.send(&wire.MasterMessage{Body: &wire.MasterMessage_TraceRequest{TraceRequest: &wire.TraceRequest{
				Id: a.id, Job: m.o.Job, CommId: a.key.Comm, Coll: uint32(a.key.Coll), Seq: a.key.Seq,
			}}})
		}
	}
}

// traced takes in an agent's answer.
func (m *Master) traced(n int32, s *stream, r *wire.TraceResult) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.state.nodes[n].stream != s {
		return
	}
	m.log.Debug("retroactive trace", "request", r.Id, "spans", r.Spans, "node", m.state.ev.Nodes[n].Name)
	t := &m.traces
	for i := range t.asked {
		a := &t.asked[i]
		switch {
		case a.id != r.Id:
		case r.Spans > 0:
			if m.incidents.named(a.incident, collector.TraceID(m.o.Job, a.key.Comm, a.key.Coll, a.key.Seq)) {
				m.saveSoon()
			}
		case r.HeldSeq != 0 && !a.again && !m.incidents.hasTrace(a.incident):
			next := askedFor{incident: a.incident, key: roots.Key{Comm: a.key.Comm, Coll: record.CollKind(r.HeldColl), Seq: r.HeldSeq}, again: true}
			a.again = true
			m.ask(next)
			return // t.asked has moved
		}
	}
}

// mergeTraced notes how far an agent's spans of a collective reach.
func (s *state) mergeTraced(n int32, w *wire.TraceResult, now int64) {
	if w == nil || w.Spans == 0 || w.FirstNs <= 0 || w.LastNs < w.FirstNs || w.LastNs > now+ahead || w.ErrorNs < 0 {
		return
	}
	c, ok := s.member(n, w.CommId, w.Rank)
	if !ok {
		s.refused++
		return
	}
	k := roots.Key{Comm: w.CommId, Coll: record.CollKind(w.Coll), Seq: w.Seq}
	ask := s.roots.Add(k, roots.Part{
		Rank: w.Rank, Size: len(s.ev.Comms[c].Members), From: n,
		First: w.FirstNs, Last: w.LastNs, Err: w.ErrorNs, NodeClock: w.NodeClock, Anomalous: w.Anomalous,
	}, now)
	if ask && len(s.asks) < maxAsks {
		s.asks = append(s.asks, k)
	}
}

// sendRoots has agents send the spans that cover those of all ranks, and asks for the other
// ranks' spans of what stood out on one.
func (m *Master) sendRoots(now int64) {
	s := m.state
	for n := 0; n < asksPerPass && len(s.asks) > 0; n++ {
		m.ask(askedFor{key: s.asks[0]})
		s.asks = append(s.asks[:0], s.asks[1:]...)
	}
	for _, r := range s.roots.Due(now) {
		to := s.nodes[r.To].stream
		if to == nil {
			continue
		}
		to.send(&wire.MasterMessage{Body: &wire.MasterMessage_TraceRoot{TraceRoot: &wire.TraceRoot{
			CommId: r.Comm, Coll: uint32(r.Coll), Seq: r.Seq, FirstNs: r.First, LastNs: r.Last, ErrorNs: r.Err, Ranks: uint32(r.Ranks), NodeClock: r.NodeClock,
		}}})
	}
}

// named gives an open or closed incident its trace, unless it has one, and reports whether it did.
func (t *incidents) named(id string, trace [16]byte) bool {
	for _, i := range t.open {
		if i.ID == id && i.TraceID == ([16]byte{}) {
			i.TraceID = trace
			return true
		}
	}
	for i := range t.closed {
		if c := &t.closed[i]; c.ID == id && c.TraceID == ([16]byte{}) {
			c.TraceID = trace
			return true
		}
	}
	return false
}

func (t *incidents) hasTrace(id string) bool {
	for _, i := range t.open {
		if i.ID == id {
			return i.TraceID != [16]byte{}
		}
	}
	return true
}
