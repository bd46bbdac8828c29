package diagnose

import (
	"cmp"
	"fmt"
	"slices"

	"github.com/lockstep-ccl/lockstep/diagnosis"
	"github.com/lockstep-ccl/lockstep/exporters/names"
	"github.com/lockstep-ccl/lockstep/record"
)

// Excerpt is the part of the evidence that a verdict is about, as it was at that moment.
// Ages are seconds; -1 stands for never.
type Excerpt struct {
	Ranks       []Rank       `json:"ranks,omitempty"` // the culprits', and of a culprit that is a node its first ones
	Operation   *Operation   `json:"operation,omitempty"`
	Connections []Connection `json:"connections,omitempty"` // of the culprits, those that wait first
}

// Bounds of an excerpt.
const (
	maxRanks = 8
	maxConns = 10
	maxCalls = 8
)

// Rank is one rank's evidence.
type Rank struct {
	Rank           int32    `json:"rank"`
	Node           string   `json:"node"`
	Heard          float64  `json:"heard"`          // age of the node's last report
	Lost           bool     `json:"lost,omitempty"` // its agent is silent
	PID            int32    `json:"pid"`
	Process        string   `json:"process"`
	For            float64  `json:"for"` // that it is so
	CPU            float32  `json:"cpu"`
	IO             bool     `json:"io,omitempty"`
	Starved        float32  `json:"starved,omitempty"`
	Throttled      float32  `json:"throttled,omitempty"`
	MemoryPressure float32  `json:"memory_pressure,omitempty"`
	Step           uint64   `json:"step,omitempty"`
	Mark           string   `json:"mark,omitempty"`
	Exit           string   `json:"exit,omitempty"`
	Xid            uint32   `json:"xid,omitempty"`
	Inside         []string `json:"inside,omitempty"` // operations
	Last           string   `json:"last,omitempty"`   // operation finished
	Calls          []string `json:"calls,omitempty"`  // the last, oldest first
}

// Operation is who is in the collective that shows it best. Ranks are the world's.
type Operation struct {
	Communicator string  `json:"communicator"`
	ID           string  `json:"id"`
	Size         int     `json:"size"`
	Collective   string  `json:"collective"`
	Seq          uint64  `json:"seq"`
	Members      []Group `json:"members"`
}

// Group is the members of whom the same is true.
type Group struct {
	Are   string  `json:"are"` // finished, inside, not entered, gone from it, not seen
	Ranks []int32 `json:"ranks"`
	Age   float64 `json:"age"` // since the first of them entered; since the last of them was in its operation before
}

// Connection is one connection's evidence.
type Connection struct {
	Communicator   string  `json:"communicator"`
	Src            int32   `json:"src"` // world ranks
	Dst            int32   `json:"dst"` // world ranks
	Transport      string  `json:"transport"`
	Name           string  `json:"name"`
	Outstanding    uint64  `json:"outstanding"`
	LastPost       float64 `json:"last_post"`
	LastCompletion float64 `json:"last_completion"`
	TxBlocked      float64 `json:"tx_blocked"`
	RxWaiting      float64 `json:"rx_waiting"`
	BytesPerSec    float64 `json:"bytes_per_sec"`
	LatencyMs      float64 `json:"latency_ms"`
	RTTMs          float64 `json:"rtt_ms,omitempty"` // between the two hosts
	Windows        uint64  `json:"windows"`
	SlowWindows    uint64  `json:"slow_windows"`
	Cause          string  `json:"cause"`
	Link           string  `json:"link,omitempty"`
	Switches       uint64  `json:"switches,omitempty"`
	Outages        uint64  `json:"outages,omitempty"`
	Resent         uint64  `json:"resent,omitempty"`
}

func age(at, now int64) float64 {
	if at == 0 {
		return -1
	}
	return float64((now-at)/1e6) / 1e3
}

// excerpt picks what a verdict rests on.
func excerpt(v *diagnosis.Verdict, ev *diagnosis.Evidence) *Excerpt {
	x := &Excerpt{}
	var blamed []int32
	blame := func(rank int32) {
		if rank >= 0 && int(rank) < len(ev.Ranks) && !slices.Contains(blamed, rank) && len(blamed) < maxRanks {
			blamed = append(blamed, rank)
		}
	}
	for _, c := range v.Culprits {
		if c.Kind == diagnosis.CulpritNode {
			for i := range ev.Ranks {
				if n := ev.Ranks[i].Node; n >= 0 && int(n) < len(ev.Nodes) && ev.Nodes[n].Name == c.Node {
					blame(int32(i))
				}
			}
			continue
		}
		blame(c.Rank)
		blame(c.Peer)
	}
	for _, rank := range blamed {
		x.Ranks = append(x.Ranks, rankOf(ev, rank))
	}
	if k := slices.IndexFunc(ev.Comms, func(c diagnosis.Comm) bool { return c.ID == v.Comm }); k >= 0 && v.Seq > 0 {
		x.Operation = operation(ev, &ev.Comms[k], v)
	}
	x.Connections = connections(ev, v)
	return x
}

var procNames = map[diagnosis.ProcState]string{
	diagnosis.ProcRunning: names.StateRunning, diagnosis.ProcStopped: names.StateStopped, diagnosis.ProcDisk: names.StateDiskSleep,
	diagnosis.ProcGone: names.StateGone, diagnosis.ProcExited: names.StateExited,
}

func rankOf(ev *diagnosis.Evidence, rank int32) Rank {
	r := &ev.Ranks[rank]
	out := Rank{
		Rank: rank, PID: r.PID, Process: cmp.Or(procNames[r.Proc], names.StateUnknown), For: age(r.ProcAt, ev.Now),
		CPU: r.CPU, IO: r.IO, Starved: r.Starved, Throttled: r.Throttled, MemoryPressure: r.MemoryPressure, Step: r.Step, Xid: r.Xid, Heard: -1,
	}
	if r.Node >= 0 && int(r.Node) < len(ev.Nodes) {
		n := &ev.Nodes[r.Node]
		out.Node, out.Heard, out.Lost = n.Name, age(n.LastSeen, ev.Now), n.Lost
	}
	if r.Mark != record.MarkNone {
		out.Mark = fmt.Sprintf("%s for %s", r.Mark, seconds(age(r.MarkAt, ev.Now)))
	}
	if e := &r.Exit; e.By != diagnosis.ExitUnknown {
		out.Exit = fmt.Sprintf("status %d", e.Code)
		if e.Signal != 0 {
			out.Exit = fmt.Sprintf("signal %d", e.Signal)
		}
		if e.Asked {
			out.Exit += ", asked for"
		}
		out.Exit += " " + seconds(age(e.At, ev.Now)) + " ago"
	}
	last := int64(0)
	for i := range ev.Comms {
		for k := range ev.Comms[i].Members {
			m := &ev.Comms[i].Members[k]
			if m.World != rank {
				continue
			}
			if m.Open() {
				out.Inside = append(out.Inside, fmt.Sprintf("%s #%d on %s for %s", m.Coll, m.Started, ev.Comms[i].Name, seconds(age(m.StartedAt, ev.Now))))
			}
			if m.FinishedAt > last {
				last = m.FinishedAt
				out.Last = fmt.Sprintf("#%d on %s %s ago", m.Finished, ev.Comms[i].Name, seconds(age(m.FinishedAt, ev.Now)))
			}
		}
	}
	for _, c := range r.Calls[max(0, len(r.Calls)-maxCalls):] {
		name := fmt.Sprintf("%x", c.Comm)
		if k := slices.IndexFunc(ev.Comms, func(x diagnosis.Comm) bool { return x.ID == c.Comm }); k >= 0 {
			name = ev.Comms[k].Name
		}
		peer := ""
		if c.Peer >= 0 {
			peer = fmt.Sprintf(" peer %d", c.Peer)
		}
		out.Calls = append(out.Calls, fmt.Sprintf("%s #%d on %s%s, %d bytes, %s ago", c.Coll, c.Seq, name, peer, c.Bytes, seconds(age(c.At, ev.Now))))
	}
	return out
}

func operation(ev *diagnosis.Evidence, c *diagnosis.Comm, v *diagnosis.Verdict) *Operation {
	out := &Operation{Communicator: c.Name, ID: fmt.Sprintf("%016x", c.ID), Size: len(c.Members), Collective: v.Coll.String(), Seq: v.Seq}
	order := []string{"finished", "inside", "not entered", "gone from it", "not seen"}
	groups := make([]Group, len(order))
	for i := range c.Members {
		m := &c.Members[i]
		which, at := 0, m.FinishedAt
		switch {
		case m.World < 0:
			which, at = 4, 0
		case m.Finished >= v.Seq:
		case m.State == record.CommLeft || m.State == record.CommAborted:
			which, at = 3, m.StateAt
		case m.Started >= v.Seq:
			which, at = 1, m.StartedAt
		default:
			which = 2
		}
		g := &groups[which]
		rank := m.World
		if rank < 0 {
			rank = int32(i) // in the communicator: nobody has said which of the world's it is
		}
		if a := age(at, ev.Now); len(g.Ranks) == 0 || which == 1 && a > g.Age || which != 1 && a < g.Age {
			g.Age = a
		}
		g.Ranks = append(g.Ranks, rank)
	}
	for i := range groups {
		if len(groups[i].Ranks) > 0 {
			groups[i].Are = order[i]
			slices.Sort(groups[i].Ranks)
			out.Members = append(out.Members, groups[i])
		}
	}
	return out
}

// connections picks those that the culprits are, or are at an end of.
func connections(ev *diagnosis.Evidence, v *diagnosis.Verdict) []Connection {
	var out []Connection
	for i := range ev.Conns {
		k := &ev.Conns[i]
		c := &ev.Comms[k.Comm]
		src, dst := c.Members[k.Src].World, c.Members[k.Dst].World
		if !slices.ContainsFunc(v.Culprits, func(b diagnosis.Culprit) bool {
			switch b.Kind {
			case diagnosis.CulpritConnection:
				return src == b.Rank && dst == b.Peer
			case diagnosis.CulpritSource:
				return src == b.Rank
			case diagnosis.CulpritDest:
				return dst == b.Rank
			case diagnosis.CulpritRank:
				return src == b.Rank || dst == b.Rank
			}
			return false
		}) {
			continue
		}
		if c.ID != v.Comm && k.TxBlockedSince == 0 && k.RxWaitingSince == 0 && k.Outstanding == 0 && k.Outages == 0 && (k.Link == record.LinkNone || k.Link == record.LinkUp) {
			continue // nothing to see
		}
		x := Connection{
			Communicator: c.Name, Src: src, Dst: dst, Transport: k.Transport.String(), Name: k.Name, Outstanding: k.Outstanding,
			LastPost: age(k.LastPost, ev.Now), LastCompletion: age(k.LastCompletion, ev.Now),
			TxBlocked: age(k.TxBlockedSince, ev.Now), RxWaiting: age(k.RxWaitingSince, ev.Now),
			BytesPerSec: k.BytesPerSec, LatencyMs: k.LatencyNs / 1e6, Windows: k.Windows, SlowWindows: k.SlowWindows, Cause: k.Cause.String(),
			Switches: k.Switches, Outages: k.Outages, Resent: k.Resent,
			RTTMs: k.RTTNs / 1e6,
		}
		if k.Link != record.LinkNone {
			x.Link = fmt.Sprintf("%s for %s", k.Link, seconds(age(k.LinkAt, ev.Now)))
		}
		out = append(out, x)
	}
	slices.SortStableFunc(out, func(a, b Connection) int {
		return cmp.Or(cmp.Compare(max(b.RxWaiting, b.TxBlocked), max(a.RxWaiting, a.TxBlocked)), cmp.Compare(b.Outstanding, a.Outstanding), cmp.Compare(b.LatencyMs, a.LatencyMs))
	})
	return out[:min(len(out), maxConns)]
}

// seconds is an age for people.
func seconds(s float64) string {
	switch {
	case s < 0:
		return "ever"
	case s < 1:
		return fmt.Sprintf("%.0f ms", s*1e3)
	case s < 120:
		return fmt.Sprintf("%.1f s", s)
	}
	return fmt.Sprintf("%.0f min", s/60)
}
