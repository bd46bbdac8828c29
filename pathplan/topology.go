package pathplan

import (
	"errors"
	"fmt"
	"math"
	"unicode"
	"unicode/utf8"
)

// Bounds on what anybody may name or ask for. A Topology beyond them is refused.
const (
	MaxName   = 128     // bytes in any name: host, NIC, switch, tenant, job, connection
	MaxLeaves = 4096    // leaf switches
	MaxSpines = 1024    // spine switches
	MaxLinks  = 1 << 20 // directed links between switches
	MaxPorts  = 1 << 18 // ports of hosts' NICs
	MaxLanes  = 64      // lanes of a connection
	MaxWeight = 1 << 16 // of a connection, against others on the same NIC
	MaxRate   = 1 << 50 // bit/s of a link or a port
)

// Errors that callers branch on.
var (
	ErrInvalid = errors.New("invalid")                // malformed, or beyond a bound
	ErrUnknown = errors.New("unknown")                // names what the topology or the plan does not have
	ErrNoPath  = errors.New("no path")                // no healthy path joins the two NICs
	ErrLimit   = errors.New("limit of the plan")      // more than Limits allows
	ErrStale   = errors.New("older than what is had") // a PortMap of an earlier version
)

// Side is one of the two ports of a NIC. Traffic stays on its side from end to end.
type Side uint8

// A NIC with one port has the left side only.
const (
	Left Side = iota
	Right
)

// String is "left" or "right".
func (s Side) String() string {
	switch s {
	case Left:
		return "left"
	case Right:
		return "right"
	}
	return fmt.Sprintf("side(%d)", uint8(s))
}

// NIC names a host's NIC.
type NIC struct {
	Host string `json:"host"`
	Name string `json:"nic"`
}

// String is "host/nic".
func (n NIC) String() string { return n.Host + "/" + n.Name }

// Port names one physical port of a NIC.
type Port struct {
	NIC
	Side Side `json:"side"`
}

// String is "host/nic/side".
func (p Port) String() string { return p.NIC.String() + "/" + p.Side.String() }

// HostPort is a port, the leaf it is plugged into, and its rate.
type HostPort struct {
	Port
	Leaf string `json:"leaf"`
	Rate int64  `json:"rate"`           // bit/s, each direction
	Addr string `json:"addr,omitempty"` // the port's IP address, for probers; may be shared by both sides
}

// Link names a directed link: a leaf's uplink (leaf to spine) or a downlink (spine to
// leaf). Index tells parallel links between the same switches apart. The same type names
// any edge in Infer, a host's access link too.
type Link struct {
	From  string `json:"from"`
	To    string `json:"to"`
	Index uint8  `json:"index,omitempty"`
}

// String is "leaf2–spine5", with "#1" for the second of parallel links.
func (l Link) String() string {
	if l.Index == 0 {
		return l.From + "–" + l.To
	}
	return fmt.Sprintf("%s–%s#%d", l.From, l.To, l.Index)
}

// Reverse is the same cable in the other direction.
func (l Link) Reverse() Link { return Link{From: l.To, To: l.From, Index: l.Index} }

// LinkRate is a directed link and its rate.
type LinkRate struct {
	Link
	Rate int64 `json:"rate"` // bit/s
}

// LinkState says whether a link may be used.
// The zero value is a link that is well.
type LinkState struct {
	Down bool    `json:"down,omitempty"`
	Loss float64 `json:"loss,omitempty"` // share of packets lost, 0 to 1
}

// Topology is a fabric of three stages: hosts' ports on leaves, leaves on spines.
// Links between leaves and spines are listed in both directions; not every leaf has to
// reach every spine (two planes: left leaves on left spines).
type Topology struct {
	Leaves []string   `json:"leaves"`
	Spines []string   `json:"spines"`
	Links  []LinkRate `json:"links"`
	Ports  []HostPort `json:"ports"`
}

// Path leads from leaf to leaf: up to a spine, down to the destination's leaf.
// The zero Path is within one leaf.
type Path struct {
	Up   Link `json:"up"`
	Down Link `json:"down"`
}

// Spine is the spine that the path crosses, empty within one leaf.
func (p Path) Spine() string { return p.Up.To }

// String is "leaf1–spine2–leaf5", or "local" within one leaf.
func (p Path) String() string {
	if p == (Path{}) {
		return "local"
	}
	s := p.Up.String() + "–" + p.Down.To
	if p.Down.Index != 0 {
		s += fmt.Sprintf("#%d", p.Down.Index)
	}
	return s
}

// Check returns an error that wraps ErrInvalid when the topology is malformed or beyond a
// bound: names empty, too long, not printable or given twice, links that do not join a leaf
// and a spine, ports on leaves that are not there.
func (t *Topology) Check() error {
	_, err := compile(t)
	return err
}

// checkName refuses what would not do as a label or in a log line.
func checkName(what, name string) error {
	if name == "" || len(name) > MaxName || !utf8.ValidString(name) {
		return fmt.Errorf("%s %.40q: want 1 to %d bytes of UTF-8: %w", what, name, MaxName, ErrInvalid)
	}
	for _, r := range name {
		if !unicode.IsPrint(r) {
			return fmt.Errorf("%s %.40q: has an unprintable character: %w", what, name, ErrInvalid)
		}
	}
	return nil
}

// check refuses what is no state.
func (s LinkState) check() error {
	if math.IsNaN(s.Loss) || s.Loss < 0 || s.Loss > 1 {
		return fmt.Errorf("loss %v: want 0 to 1: %w", s.Loss, ErrInvalid)
	}
	return nil
}

// ClosShape describes a regular fabric for tests, simulators and generated topologies.
// Hosts are cut into Groups of equal size; each group has its own leaves, LeafPairs pairs
// of a left and a right leaf; NIC i of a host is on pair i*LeafPairs/NICs of the host's
// group. Every leaf has one link each way with every spine or, with Planes, left leaves
// with the first half of the spines and right ones with the rest. Names are host0, nic0,
// leaf0 (even: left), spine0.
type ClosShape struct {
	Hosts, NICs int
	Groups      int // of hosts
	LeafPairs   int // a group
	Spines      int
	Planes      bool
	SinglePort  bool  // NICs have the left port only, leaves are all left
	PortRate    int64 // bit/s
	LinkRate    int64 // bit/s
}

// Clos is the fabric of a shape. Check finds what is wrong with a shape that makes no
// sense.
func Clos(s ClosShape) Topology {
	sides := 2
	if s.SinglePort {
		sides = 1
	}
	var t Topology
	for i := range s.Spines {
		t.Spines = append(t.Spines, fmt.Sprintf("spine%d", i))
	}
	for i := range s.Groups * s.LeafPairs * sides {
		leaf, spines := fmt.Sprintf("leaf%d", i), t.Spines
		t.Leaves = append(t.Leaves, leaf)
		if half := len(spines) / 2; s.Planes {
			spines = spines[i%sides*half:][:half]
		}
		for _, spine := range spines {
			up := Link{From: leaf, To: spine}
			t.Links = append(t.Links, LinkRate{up, s.LinkRate}, LinkRate{up.Reverse(), s.LinkRate})
		}
	}
	for h := range s.Hosts {
		for n := range s.NICs {
			pair := h*s.Groups/s.Hosts*s.LeafPairs + n*s.LeafPairs/s.NICs
			for side := range sides {
				t.Ports = append(t.Ports, HostPort{
					Port: Port{NIC{fmt.Sprintf("host%d", h), fmt.Sprintf("nic%d", n)}, Side(side)},
					Leaf: t.Leaves[pair*sides+side], Rate: s.PortRate,
				})
			}
		}
	}
	return t
}
