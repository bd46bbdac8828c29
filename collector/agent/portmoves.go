package agent

import (
	"github.com/lockstep-ccl/lockstep/collector"
	"github.com/lockstep-ccl/lockstep/diagnosis"
)

// portLook is what the node's RDMA ports had counted when they were last looked at.
type portLook struct {
	at     int64 // host time of the look, 0 before the first
	counts map[nicWord]uint64
}

// portsMoved tells communicators of what happened between two looks to the ports that they have
// connections on: counters of loss, congestion and errors that have moved, of each kind the one
// that gained most, and that the port went down.
func (a *Agent) portsMoved() {
	n := a.view.NICs
	if n == nil || n.ProbedAt == a.ports.at {
		return
	}
	before, now := a.ports, portLook{n.ProbedAt, map[nicWord]uint64{}}
	for i := range n.Ports[:min(len(n.Ports), diagnosis.MaxNodeNICs)] {
		p := &n.Ports[i]
		tell := func(counter string, gained uint64, at int64) {
			if gained == 0 || before.at == 0 {
				return
			}
			for _, r := range a.ranks {
				r.portMoved(p.Device, p.Port, collector.LinkEvent{Peer: -1, At: at, Counter: counter, Gained: gained, Since: before.at})
			}
		}
		tell(collector.CounterFlaps, now.count(before, nicWord{p.Device, p.Port, ""}, p.Flaps), p.FlapAt) // before the look
		for _, kind := range [][]collector.NICCounter{p.Retransmissions, p.Congestion, p.Errors} {
			most, name := uint64(0), ""
			for _, c := range kind[:min(len(kind), diagnosis.MaxNICCounters)] {
				if gained := now.count(before, nicWord{p.Device, p.Port, c.Name}, uint64(max(c.Value, 0))); gained > most {
					most, name = gained, c.Name
				}
			}
			tell(name, most, n.ProbedAt)
		}
	}
	a.ports = now
}

// count notes a counter's value, and returns what it has gained: nothing if it was not there
// before, or has begun anew.
func (l *portLook) count(before portLook, k nicWord, v uint64) uint64 {
	l.counts[k] = v
	if was, ok := before.counts[k]; ok && v > was {
		return v - was
	}
	return 0
}

// portMoved notes an event of a port for each communicator that has a connection there.
func (r *rank) portMoved(device string, port int, e collector.LinkEvent) {
	told := map[*comm]bool{}
	for i := range r.p.Conns {
		s := &r.p.Conns[i]
		if int(s.Index) >= len(r.conns) || int(s.Index) >= r.p.ConnSlots {
			continue
		}
		c, who := r.comm(s.Comm), r.conns[s.Index].who
		if c == nil || told[c] || who == nil || who.NIC != device || who.Port != port {
			continue
		}
		told[c] = true
		e.Conn = who
		c.ports.add(e)
	}
}

// changes is a ring of what happened to connections, in the order of time.
type changes struct {
	ring [maxLinks]collector.LinkEvent
	n    int // ever
	told int // of them, by a collective that has ended
}

func (h *changes) add(e collector.LinkEvent) {
	h.ring[h.n%maxLinks] = e
	h.n++
}

// around appends those of some time that are kept.
func (h *changes) around(out []collector.LinkEvent, from, to int64) []collector.LinkEvent {
	for i := max(0, h.n-maxLinks); i < h.n; i++ {
		if l := h.ring[i%maxLinks]; l.At >= from && l.At <= to {
			out = append(out, l)
		}
	}
	return out
}

// touching adds to out what happened while o ran, or since the collective before it, and counts
// what finds no room. It reports whether a path changed, or a port went down.
func (h *changes) touching(o *op, out *collector.Collective) (changed bool) {
	kept := max(0, h.n-maxLinks)
	if out.LeftOut += max(0, kept-h.told); o.ended != 0 {
		h.told = max(h.told, kept)
	}
	for i := kept; i < h.n; i++ {
		// What happened between two collectives is the next one's.
		l := &h.ring[i%maxLinks]
		if o.ended != 0 && (l.At > o.ended || l.At < o.started && i < h.told) {
			continue
		}
		changed = changed || l.Counter == "" || l.Counter == collector.CounterFlaps
		if o.ended != 0 {
			h.told = max(h.told, i+1)
		}
		if out.NLinks == collector.MaxLinks {
			out.LeftOut++
			continue
		}
		out.Links[out.NLinks] = *l
		out.NLinks++
	}
	return changed
}
