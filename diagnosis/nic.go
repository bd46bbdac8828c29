package diagnosis

import (
	"fmt"
	"slices"
	"strings"

	"github.com/lockstep-ccl/lockstep/record"
)

// Bounds on what is kept of NICs: ports of a node, counters of a port, values of a counter.
const (
	MaxNodeNICs    = 16
	MaxNICCounters = 40
	maxNICSamples  = 24
)

// NICKind is what a counter of a NIC tells of.
type NICKind uint8

const (
	NICLoss       NICKind = iota + 1 // what was sent again, or came out of order
	NICCongestion                    // marks, notifications (CNP), waits for credit
	NICError
)

// NIC is one RDMA port of a node.
type NIC struct {
	Node   int32
	Device string
	Port   uint32
	SeenAt int64  // when it was first told of
	Flaps  uint64 // times that it went down while its agent ran
	FlapAt int64  // the last time
	DownAt int64  // since when it is down, 0 when it is not
	// Counters are those that have moved. One that is missing stands where it has always stood.
	Counters []NICCounter
}

// NICCounter is a driver's counter over the last while.
type NICCounter struct {
	Name    string
	Kind    NICKind
	Samples []NICSample // oldest first; from one to the next it has grown, and from the last one on stood
}

// NICSample is a value, as of a time.
type NICSample struct {
	At    int64
	Value uint64
}

// Add notes a value. One that is lower than the last, of a driver that was loaded anew, begins anew.
func (c *NICCounter) Add(at int64, value uint64) {
	if n := len(c.Samples); n > 0 {
		last := c.Samples[n-1]
		switch {
		case at <= last.At || value == last.Value:
			return
		case value < last.Value:
			c.Samples = c.Samples[:0]
		case n == maxNICSamples:
			c.Samples = append(c.Samples[:0], c.Samples[1:]...)
		}
	}
	c.Samples = append(c.Samples, NICSample{at, value})
}

// grown returns by how much a second the counter grew before a time and since, and by how
// much in all since.
func (c *NICCounter) grown(since, now int64) (before, after float64, by uint64) {
	if len(c.Samples) == 0 || now <= since {
		return 0, 0, 0
	}
	first, last, then := c.Samples[0], c.Samples[len(c.Samples)-1], c.at(since)
	if since > first.At {
		before = (then - float64(first.Value)) / (float64(since-first.At) / 1e9)
	}
	grew := float64(last.Value) - then
	return before, grew / max(float64(now-max(since, first.At))/1e9, 1), uint64(grew)
}

// at is the counter's value at a time: what it grew by from one sample to the next, it did within
// lookEvery of the latter. From before the first sample nothing is known.
func (c *NICCounter) at(t int64) float64 {
	prev := c.Samples[0]
	for _, next := range c.Samples[1:] {
		if next.At > t {
			if from := max(prev.At, next.At-lookEvery); t > from {
				return float64(prev.Value) + float64(next.Value-prev.Value)*float64(t-from)/float64(next.At-from)
			}
			break
		}
		prev = next
	}
	return float64(prev.Value)
}

// lookEvery is how far apart agents look at their NICs, at most.
const lookEvery = int64(10e9)

// port is one end of a connection.
type port struct {
	node   int32
	device string
	number int
}

// pathsAndNICs says beside the evidence of what happens on connections what became of
// their paths, and whether the NICs at their ends saw loss, congestion or neither.
func (v *view) pathsAndNICs(f *finding) {
	if f.Class != CommunicationSlow && f.Class != CommunicationHang {
		return
	}
	var lines []string
	var ports []port
	for i := range v.ev.Conns {
		c := &v.ev.Conns[i]
		if !c.Transport.QueuePair() || c.Comm < 0 || int(c.Comm) >= len(v.ev.Comms) {
			continue
		}
		src, dst := v.end(c, c.Src), v.end(c, c.Dst)
		if src < 0 || dst < 0 || !f.concerns(v, src, dst) {
			continue
		}
		if s := v.switched(c, src, dst); s != "" && len(lines) < maxPathLines {
			lines = append(lines, s)
		}
		own, peer, _ := strings.Cut(c.Name, "->")
		for _, end := range [...]struct {
			rank int32
			name string
		}{{src, own + "->"}, {dst, peer + "->"}} {
			device, number := record.NICOf(end.name)
			if p := (port{nodeOf(v.ev, end.rank), device, number}); device != "" && p.node >= 0 && !slices.Contains(ports, p) && len(ports) < 2*MaxNodeNICs {
				ports = append(ports, p)
			}
		}
	}
	lines = append(lines, v.nicLines(f.Since, ports)...)
	if len(lines) == 0 {
		return
	}
	if most := maxWhy - len(lines); len(f.Why) > most { // the last of the others says less
		f.Why = f.Why[:most]
	}
	for _, s := range lines {
		f.why("%s", s)
	}
}

const (
	maxPathLines = 2
	maxNICLines  = 2
)

// concerns reports whether a finding is about what goes from one rank to another.
func (f *finding) concerns(v *view, src, dst int32) bool {
	return slices.ContainsFunc(f.Culprits, func(k Culprit) bool {
		switch k.Kind {
		case CulpritConnection:
			return k.Rank == src && k.Peer == dst || f.hang && k.Rank == dst && k.Peer == src
		case CulpritSource:
			return k.Rank == src
		case CulpritDest:
			return k.Rank == dst
		case CulpritRank:
			return k.Rank == src || k.Rank == dst
		case CulpritNode:
			return v.nodeName(src) == k.Node || v.nodeName(dst) == k.Node
		}
		return false
	})
}

// switched says what became of a path, "" when it is as it was from the start.
func (v *view) switched(c *Conn, src, dst int32) string {
	what := ""
	switch {
	case c.Link == record.LinkDown:
		what = "broke at " + clock(c.LinkAt)
	case c.Link == record.LinkSwitched:
		what = "carries what another path no longer does since " + clock(c.LinkAt)
	case c.Switches > 0:
		what = "carries its bytes again since " + clock(c.LinkAt)
	default:
		return ""
	}
	s := fmt.Sprintf("path %d → %d (%s) %s", src, dst, c, what)
	if c.Switches > 0 {
		s += fmt.Sprintf("; it took over %s and sent %d bytes again", plural(int(c.Switches), "time", "times"), c.Resent)
	}
	return s
}

// nicLines says of ports what their counters did before and since; of those that
// moved one by one, of all others together.
func (v *view) nicLines(since int64, ports []port) (lines []string) {
	var quiet []string
	for _, p := range ports {
		i := slices.IndexFunc(v.ev.NICs, func(n NIC) bool { return n.Node == p.node && n.Device == p.device && int(n.Port) == p.number })
		if i < 0 {
			continue
		}
		name := fmt.Sprintf("%s/%d of %s", p.device, p.number, v.ev.Nodes[p.node].Name)
		if said := v.ev.NICs[i].saw(since, v.now); said == "" {
			quiet = append(quiet, name)
		} else if len(lines) < maxNICLines {
			lines = append(lines, "NIC "+name+" saw "+said)
		}
	}
	if len(quiet) > 0 && len(lines) < maxNICLines {
		lines = append(lines, "no loss, congestion or errors were seen by NIC "+list(quiet, false))
	}
	return lines
}

// saw is what a port saw since a time, more than before; "" for nothing.
func (n *NIC) saw(since, now int64) string {
	var parts []string
	if n.DownAt != 0 {
		parts = append(parts, "its link down since "+clock(n.DownAt))
	} else if n.FlapAt >= since-flapBefore && n.Flaps > 0 {
		parts = append(parts, fmt.Sprintf("its link go down at %s (%s in all)", clock(n.FlapAt), plural(int(n.Flaps), "time", "times")))
	}
	for kind, word := range [...]string{NICLoss: "loss", NICCongestion: "congestion", NICError: "errors"} {
		if word == "" {
			continue
		}
		var moved []string
		for i := range n.Counters {
			c := &n.Counters[i]
			if before, after, by := c.grown(since-slack, now); c.Kind == NICKind(kind) && by > 0 && after > moreThan*before {
				moved = append(moved, fmt.Sprintf("%s by %d: %s a second, before %s", c.Name, by, rateWords(after), rateWords(before)))
			}
		}
		if len(moved) > 0 {
			parts = append(parts, word+" ("+list(moved, false)+")")
		}
	}
	return strings.Join(parts, "; ")
}

const (
	flapBefore = int64(10e9)
	// slack is for how long before what is noticed of a fault its counters may have moved, and
	// for how long after they are read.
	slack    = int64(5e9)
	moreThan = 1.5 // times as much as before
)

func rateWords(r float64) string {
	if r >= 10 || r == 0 {
		return fmt.Sprintf("%.0f", r)
	}
	return fmt.Sprintf("%.1f", r)
}
