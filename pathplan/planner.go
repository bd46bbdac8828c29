package pathplan

import "time"

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
	Ports          int // source ports in all maps together; 1 << 24
}

// LinkLoad is what a link was measured to carry.
type LinkLoad struct {
	Link Link
	Rate int64 // bit/s
}

// LaneSignal is what a lane's windows say: Congested when the network was the cause of the
// last ones.
type LaneSignal struct {
	Conn      ConnID
	Lane      int
	Congested bool
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

// Planner holds the plan of a whole fabric. Not safe for concurrent use.
type Planner struct{}

// New returns a planner of a fabric whose links are all well.
func New(t Topology, o Options) (*Planner, error) { panic("not yet") }

// Allocate plans connections and renews their jobs' leases. Requests of one call are
// balanced together: ask for a job's connections at once where possible. A connection that
// is planned already, with the same ends and lanes, keeps what it has; with others it is
// planned anew. The result has a connection's lanes together, in the order of requests.
// A request that cannot be planned has no assignments, and its error is part of the
// returned error (errors.Join; ErrInvalid, ErrUnknown, ErrNoPath, ErrLimit); the others
// stand. Lanes that other calls planned do not move: Rebalance does that.
func (p *Planner) Allocate(now time.Time, reqs []Request) ([]Assignment, error) { panic("not yet") }

// Renew keeps a job's connections for another lease. ErrUnknown: it has none (it expired,
// or the planner lost its state): allocate again, with Current.
func (p *Planner) Renew(now time.Time, tenant, job string) error { panic("not yet") }

// Release forgets a connection; an empty Conn, all of its job's.
func (p *Planner) Release(id ConnID) error { panic("not yet") }

// Expire releases the jobs whose leases have run out and returns how many lanes that freed.
func (p *Planner) Expire(now time.Time) (lanes int) { panic("not yet") }

// SetLink says how a link is. Lanes on it move with the next Rebalance.
func (p *Planner) SetLink(now time.Time, l Link, s LinkState) error { panic("not yet") }

// SetPorts replaces a map of source ports. Lanes whose source port now takes another path
// are counted there from now on. ErrStale: the planner has a later version.
func (p *Planner) SetPorts(now time.Time, m PortMap) error { panic("not yet") }

// Observe takes in measurements. What a link carries beyond its planned lanes is somebody
// else's, and the plan makes room for it.
func (p *Planner) Observe(now time.Time, links []LinkLoad, lanes []LaneSignal) { panic("not yet") }

// Rebalance returns at most max moves, most urgent first, and takes them as done: lanes
// leave dead links, then lossy and congested ones, then the fullest. Between calls with no
// news there is an end: each move for evenness makes the fullest link emptier by MinGain at
// least, and a lane that has moved stays for Hold. Tenants take turns.
func (p *Planner) Rebalance(now time.Time, max int) []Move { panic("not yet") }

// Assignments returns what a job has, of one connection or (empty Conn) all.
func (p *Planner) Assignments(id ConnID) []Assignment { panic("not yet") }

// Links returns all links, in the topology's order.
func (p *Planner) Links() []LinkView { panic("not yet") }

// Snapshot returns the plan (links' states, maps of source ports, leases, lanes), in a
// versioned encoding.
func (p *Planner) Snapshot() []byte { panic("not yet") }

// Restore replaces the plan by a snapshot's. Connections whose ports the topology no longer
// has are dropped, and counted. An error leaves the planner as it was.
func (p *Planner) Restore(now time.Time, snapshot []byte) (dropped int, err error) { panic("not yet") }
