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
// that gained most, and that the port went down. Their collectives carry it as path changes.
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
		for _, kind := range [][]collector.NICCounter{p.Retransmissions, p.Congestion, p.Errors} {
			most, name := uint64(0), ""
			for _, c := range kind[:min(len(kind), diagnosis.MaxNICCounters)] {
				if gained := now.count(before, nicWord{p.Device, p.Port, c.Name}, uint64(max(c.Value, 0))); gained > most {
					most, name = gained, c.Name
				}
			}
			tell(name, most, n.ProbedAt)
		}
		tell(collector.CounterFlaps, now.count(before, nicWord{p.Device, p.Port, ""}, p.Flaps), p.FlapAt)
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
		c.link(e)
	}
}

// changes appends what is kept of changes of some time.
func (c *comm) changes(out []collector.LinkEvent, from, to int64) []collector.LinkEvent {
	for i := max(0, c.nlinks-maxLinks); i < c.nlinks; i++ {
		if l := c.links[i%maxLinks]; l.At >= from && l.At <= to {
			out = append(out, l)
		}
	}
	return out
}

// link notes a change for the collective that it hit.
func (c *comm) link(e collector.LinkEvent) {
	c.links[c.nlinks%maxLinks] = e
	c.nlinks++
}
