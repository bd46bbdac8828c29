package transport

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"slices"
	"time"

	"github.com/lockstep-ccl/lockstep/ccl/internal/nic"
	"github.com/lockstep-ccl/lockstep/ccl/internal/rdma"
	"golang.org/x/sys/unix"
)

// Net is what carries bytes between nodes.
type Net string

const (
	NetAuto Net = "auto" // RDMA where both ranks can, else TCP
	NetRDMA Net = "rdma"
	NetTCP  Net = "tcp"
)

// RDMA is what a rank brings of RDMA to its mesh.
type RDMA struct {
	// Net says whether to use it; "" is NetAuto.
	Net Net
	// Ports are those that this rank may use, best first; Why is why there are none,
	// fs.ErrNotExist where the machine knows no RDMA.
	Ports []nic.Port
	Why   error
	// Options of connections. Window, when 0, is that of TCP.
	rdma.Options
	// Note is told, by one rank, why NetAuto uses TCP; nil is for nobody.
	Note func(why error)
}

// rdmaSide is RDMA as this rank has it.
type rdmaSide struct {
	worker *rdma.Worker
	opt    rdma.Options
	ports  []nic.Port
	paths  [][]rdma.Path // by peer, nil where there are none
}

// rdmaInfo is what a rank tells the others of its RDMA.
type rdmaInfo struct {
	Why    string `json:",omitempty"` // why it has none
	Absent bool   `json:",omitempty"` // its machine knows no RDMA at all
	Need   bool   `json:",omitempty"` // it will not do without
	Lanes  int
	Window int
	Moves  bool `json:",omitempty"` // its queue pairs can move to another port; it knows SWITCHes of connections that do
	Ports  []portInfo
}

// portInfo is what a peer needs to know of a port to pair it with its own.
type portInfo struct {
	Device string
	Num    int
	Layer  nic.Layer
	GID    [16]byte
	Subnet netip.Prefix
}

// maxNICPorts bounds the ports that a rank offers to its peers; a node has no more rails.
const maxNICPorts = 16

func (p *portInfo) port() nic.Port {
	q := nic.Port{Device: p.Device, Num: p.Num, Layer: p.Layer, GID: p.GID, Subnet: p.Subnet}
	if p.Layer != nic.InfiniBand {
		q.Addr = netip.AddrFrom16(p.GID).Unmap()
	}
	return q
}

// openRDMA finds out whether this rank can use RDMA, for its peerInfo.
func (m *Mesh) openRDMA() *rdmaInfo {
	cfg := &m.cfg.RDMA
	need := cfg.Net == NetRDMA
	if cfg.Net == NetTCP {
		return nil
	}
	side, err := m.openPorts()
	if err != nil {
		return &rdmaInfo{Why: err.Error(), Absent: errors.Is(err, fs.ErrNotExist), Need: need}
	}
	m.rdma = side
	c := &rdmaInfo{Need: need, Moves: true, Lanes: side.opt.Lanes, Window: side.opt.Window}
	for _, p := range side.ports {
		c.Ports = append(c.Ports, portInfo{Device: p.Device, Num: p.Num, Layer: p.Layer, GID: p.GID, Subnet: p.Subnet})
	}
	return c
}

// openPorts opens the primary and its backup; others only when a peer needs them.
func (m *Mesh) openPorts() (*rdmaSide, error) {
	cfg := &m.cfg.RDMA
	if len(cfg.Ports) == 0 {
		return nil, cmp.Or(cfg.Why, errors.New("no ports were given"))
	}
	opt := cfg.Options
	opt.Window, opt.Log = cmp.Or(opt.Window, m.cfg.Window), cmp.Or(opt.Log, m.cfg.Log)
	w, err := rdma.NewWorker(opt, m.Wake)
	if err != nil {
		return nil, err
	}
	side := &rdmaSide{worker: w, opt: w.Options(), ports: cfg.Ports[:min(len(cfg.Ports), maxNICPorts)]}
	for i := range side.ports[:min(2, len(side.ports))] {
		if err := w.Open(&side.ports[i]); err != nil {
			w.Close()
			return nil, err
		}
	}
	return side, nil
}

// chooseRDMA pairs this rank's ports with those of each remote peer.
func (m *Mesh) chooseRDMA() error {
	me := m.cfg.Rank
	mine := m.infos[me].RDMA
	if m.rdma != nil {
		m.rdma.paths = make([][]rdma.Path, m.cfg.Size)
	}
	var first error
	for r := range m.infos {
		if r == me || m.Local(r) {
			continue
		}
		theirs := m.infos[r].RDMA
		paths, err := pair(me, r, mine, theirs)
		if err == nil {
			m.rdma.paths[r] = paths
			continue
		}
		if mine != nil && mine.Need || theirs != nil && theirs.Need {
			return fmt.Errorf("RDMA between rank %d and rank %d: %w", me, r, err)
		}
		first = cmp.Or(first, fmt.Errorf("rank %d and rank %d: %w", me, r, err))
	}
	if first != nil && mine != nil && m.cfg.RDMA.Note != nil && m.speaks() {
		m.cfg.RDMA.Note(first)
	}
	if m.rdma != nil && !slices.ContainsFunc(m.rdma.paths, func(p []rdma.Path) bool { return p != nil }) {
		m.closeRDMA()
		m.rdma = nil
	}
	return nil
}

// speaks reports whether it is this rank that says why RDMA is not used: the first
// that has a port, else the first that has a device. Where nobody has any, nobody
// expects RDMA.
func (m *Mesh) speaks() bool {
	i := slices.IndexFunc(m.infos, func(c peerInfo) bool { return len(c.RDMA.ports()) > 0 })
	if i < 0 {
		i = slices.IndexFunc(m.infos, func(c peerInfo) bool { return c.RDMA != nil && !c.RDMA.Absent })
	}
	return i == m.cfg.Rank
}

// ports are those of a peerInfo, which may be nil.
func (c *rdmaInfo) ports() []portInfo {
	if c == nil {
		return nil
	}
	return c.Ports
}

// pair finds the paths between two ranks, the same on both.
func pair(me, peer int, mine, theirs *rdmaInfo) ([]rdma.Path, error) {
	for _, c := range []struct {
		rank int
		*rdmaInfo
	}{{me, mine}, {peer, theirs}} {
		switch {
		case c.rdmaInfo == nil:
			return nil, fmt.Errorf("rank %d is to use TCP", c.rank)
		case len(c.Ports) == 0:
			return nil, fmt.Errorf("rank %d has no RDMA: %s", c.rank, c.Why)
		case len(c.Ports) > maxNICPorts || c.Lanes < 1 || c.Window < 1:
			return nil, fmt.Errorf("%w: rank %d has %d ports, %d lanes, a window of %d bytes", ErrCorrupt, c.rank, len(c.Ports), c.Lanes, c.Window)
		}
		o := rdma.Options{Lanes: c.Lanes, Window: c.Window}
		if err := o.SetDefaults(); err != nil {
			return nil, fmt.Errorf("rank %d: %w", c.rank, err)
		}
	}
	list := func(c *rdmaInfo) (ports []nic.Port) {
		for i := range c.Ports {
			ports = append(ports, c.Ports[i].port())
		}
		return ports
	}
	own, other := list(mine), list(theirs)
	a, b := own, other
	if peer < me {
		a, b = other, own
	}
	var paths []rdma.Path
	for _, r := range nic.Rails(a, b) {
		p := rdma.Path{Own: a[r.A], Peer: b[r.B]}
		if peer < me {
			p.Own, p.Peer = p.Peer, p.Own
		}
		paths = append(paths, p)
	}
	if len(paths) == 0 {
		return nil, fmt.Errorf("no port of rank %d is on a network with one of rank %d", me, peer)
	}
	return paths, nil
}

// railOf is the place of a port among those that this rank may use, from 1, by the names of
// their devices: NICs of one number are on one rail of a cluster, as a rule. 0: it is not one of them.
func (m *Mesh) railOf(p *nic.Port) int {
	rail := 1
	known := false
	for i := range m.rdma.ports {
		switch c := nic.CompareNames(m.rdma.ports[i].Name(), p.Name()); {
		case c < 0:
			rail++
		case c == 0:
			known = true
		}
	}
	if !known {
		return 0
	}
	return rail
}

// overRDMA reports whether the link to a remote rank is over RDMA.
func (m *Mesh) overRDMA(rank int) bool {
	return m.rdma != nil && m.rdma.paths != nil && m.rdma.paths[rank] != nil
}

// zeroCopy is a link that may send bytes from where they lie, and so says what of them
// its peer has consumed.
type zeroCopy interface {
	mark() uint64
	markConsumed(mark uint64) bool
	acknowledge()
}

// Mark is a place in what was sent to a peer, after all that TrySendKept took so far: 0
// when the link has copied everything.
func (m *Mesh) Mark(peer int) uint64 {
	if l, ok := m.links[peer].(zeroCopy); ok {
		return l.mark()
	}
	return 0
}

// Consumed reports whether what is before a mark may be changed, though the operation
// goes on. A peer has to Acknowledge what it consumes in the midst of one.
func (m *Mesh) Consumed(peer int, mark uint64) bool {
	l, ok := m.links[peer].(zeroCopy)
	return !ok || l.markConsumed(mark)
}

// Acknowledge tells a peer what of its bytes this rank has consumed.
func (m *Mesh) Acknowledge(peer int) {
	if l, ok := m.links[peer].(zeroCopy); ok {
		l.acknowledge()
	}
}

// Rails are the ports of this rank's over which links to peers go, and those that are
// their backups; an error where a link goes another way.
func (m *Mesh) Rails(peers []int) (primary, backup []nic.Port, err error) {
	for _, r := range peers {
		switch {
		case m.Local(r):
			return nil, nil, fmt.Errorf("rank %d is reached through shared memory", r)
		case !m.overRDMA(r):
			return nil, nil, fmt.Errorf("rank %d is reached over TCP", r)
		}
		for i, p := range m.rdma.paths[r][:min(len(m.rdma.paths[r]), rdma.MaxPaths)] {
			to := &primary
			if i > 0 {
				to = &backup
			}
			named := func(port nic.Port) bool { return port.Name() == p.Own.Name() }
			if !slices.ContainsFunc(*to, named) {
				// A path has of its ports what ranks tell each other; here is what sysfs says.
				*to = append(*to, m.rdma.ports[slices.IndexFunc(m.rdma.ports, named)])
			}
		}
	}
	return primary, backup, nil
}

// Need has the devices of ports register a DMA buffer, before the first bytes: a link that
// TrySendKept gives some of it uses no path that cannot send them. The error says which
// device cannot.
func (m *Mesh) Need(r *rdma.Region, ports []nic.Port) error { return m.rdma.worker.Need(r, ports) }

// Patience is for how long the network that sockets take may be away without harm to this
// rank's links: 0 where they need it.
func (m *Mesh) Patience() time.Duration {
	for r := range m.cfg.Size {
		if r != m.cfg.Rank && !m.Local(r) && !m.overRDMA(r) {
			return 0
		}
	}
	if m.rdma == nil {
		return 0
	}
	return m.rdma.worker.Options().ControlTimeout
}

// watchRDMA has the network's epoll instance wake this rank for completions.
func (m *Mesh) watchRDMA() error {
	if m.rdma == nil {
		return nil
	}
	return m.net.watch(m.rdma.worker.FD(), unix.EPOLLIN, rdmaEvent, 0)
}

func (m *Mesh) closeRDMA() {
	if m.rdma != nil {
		m.rdma.worker.Close()
	}
}
