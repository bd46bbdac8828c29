package pathplan

import (
	"time"
)

// ConnID names a connection. A job belongs to a tenant; two tenants may use the same
// job's name and never meet.
type ConnID struct {
	Tenant string `json:"tenant"`
	Job    string `json:"job"`
	Conn   string `json:"conn"` // unique in its job, one direction: rank 3 to rank 5, channel 0
}

// Request asks for the paths of one connection, in one direction.
type Request struct {
	Conn ConnID `json:"id"`
	Src  NIC    `json:"src"`
	Dst  NIC    `json:"dst"`
	// Lanes is how many queue pairs or sockets the connection has. Where both sides join
	// the NICs, even lanes are left, odd ones right; one lane is put on the side that has
	// less.
	Lanes int `json:"lanes"`
	// Weight is the connection's part of its NIC, against others of its tenant there; 0 is
	// 1. The planner takes it that a NIC's connections together fill its ports, never more,
	// so that a large weight takes nothing from another NIC.
	Weight int `json:"weight,omitempty"`
	// Current are the source ports that lanes have already, by lane (0: none): a planner
	// that lost its state adopts the paths that connections are on.
	Current []uint16 `json:"current,omitempty"`
}

// ShareUnit is the whole of a connection's bytes in Assignment.Share.
const ShareUnit = 1 << 16

// Assignment is the path of one lane.
type Assignment struct {
	Conn ConnID `json:"id"`
	Lane int    `json:"lane"`
	Side Side   `json:"side"`
	Path Path   `json:"path"`
	// SourcePort hashes to Path: TCP binds it, a RoCE queue pair sets it. 0: no port of
	// the path is known (no map was learnt yet), or none is free: the lane hashes as it
	// would without a plan.
	SourcePort uint16 `json:"source_port"`
	// Share is the part of the connection's bytes that the lane should carry, of
	// ShareUnit. A connection's shares add up to ShareUnit.
	Share int `json:"share"`
	// Stale: the source port is from a map older than Options.PortsTTL.
	Stale bool `json:"stale,omitempty"`
}

// Reason is why a lane is moved.
type Reason uint8

// Reasons of moves, most urgent first.
const (
	Dead      Reason = iota + 1 // its path has a dead link
	Lossy                       // its path loses packets
	Congested                   // its windows say network
	Uneven                      // a link of its path carries more than others could
	Returned                    // a link came back, or load went away
)

// String is the reason as labels show it.
func (r Reason) String() string {
	switch r {
	case Dead:
		return "dead"
	case Lossy:
		return "lossy"
	case Congested:
		return "congested"
	case Uneven:
		return "uneven"
	case Returned:
		return "returned"
	}
	return "unknown"
}

// Move is a lane's new assignment. From equals the assignment's Path where only the share
// of bytes changes.
type Move struct {
	Assignment
	From     Path   `json:"from"`
	FromPort uint16 `json:"from_port"`
	Reason   Reason `json:"reason"`
}

// PortKey says for which packets a PortMap holds.
type PortKey struct {
	Src     Port   `json:"src"`
	DstLeaf string `json:"dst_leaf"`
	// Dst is the one destination that the map was learnt for, where switches hash
	// addresses so that others on the leaf differ. Zero: any port on DstLeaf.
	Dst Port `json:"dst,omitzero"`
}

// PortMap is what a prober has learnt: the source ports that take each path.
// SetPorts keeps the slices: the caller must not change them afterwards.
type PortMap struct {
	Key     PortKey     `json:"key"`
	Version uint64      `json:"version"` // grows when the map is learnt anew
	Learnt  time.Time   `json:"learnt"`
	Paths   []PathPorts `json:"paths"`
}

// PathPorts are source ports that hash to one path.
type PathPorts struct {
	Path  Path     `json:"path"`
	Ports []uint16 `json:"ports"`
}

// Options of a planner. Zero values are the defaults.
type Options struct {
	Lease    time.Duration // a job's, renewed by Renew and Allocate; 60 s
	PortsTTL time.Duration // after which a PortMap is stale; 10 min
	Hold     time.Duration // a lane that was moved for evenness stays as long; 10 s
	Persist  time.Duration // what was measured must last as long before lanes move; 1 s
	MinGain  float64       // a move for evenness takes as much off the fullest link's load; 0.02
	LossMax  float64       // a link that loses more is left, when there is another; 0.0005
	// Steered: the transport chooses paths directly, so that no PortMap is needed (a
	// simulator; source routing). Assignments then have no source port.
	Steered bool
	// EqualShares: transports cannot split bytes unevenly over a side's lanes.
	EqualShares bool
	Limits      Limits
}

// Limits bound what clients can make a planner keep. Zero values are the defaults.
type Limits struct {
	Lanes          int // of all tenants; 1 << 20
	LanesPerTenant int // 1 << 18
	LanesPerJob    int // 1 << 17
	Jobs           int // 1 << 14
	Ports          int // source ports in all maps together, and paths; 1 << 24
}

// LinkLoad is what a link was measured to carry.
type LinkLoad struct {
	Link Link
	Rate int64 // bit/s
}

// LaneSignal is what a lane's windows say: Congested when the network was the cause of the
// last ones. Nowhere: its sender finds no source port that takes the lane's path.
type LaneSignal struct {
	Conn      ConnID
	Lane      int
	Congested bool
	Nowhere   bool
	// Part is what the lane carries of its fair part of what its connection carries, 0 where that is not known.
	Part float64
}

// LaneLoss is how many segments a lane's sender has sent since it last said so, and how many of them were lost.
type LaneLoss struct {
	Conn       ConnID
	Lane       int
	Sent, Lost int
}

// LinkView is a link as the planner sees it.
type LinkView struct {
	Link     Link
	Rate     int64 // bit/s
	State    LinkState
	Planned  int64 // bit/s of lanes that are planned onto it
	Measured int64 // bit/s, the last Observe; -1 if never
	Lanes    int
}
