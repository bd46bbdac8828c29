package gpu

import (
	"fmt"
	"strings"

	"github.com/lockstep-ccl/lockstep/ccl/internal/cuda"
	"github.com/lockstep-ccl/lockstep/ccl/internal/cuda/kernels"
	"github.com/lockstep-ccl/lockstep/record"
)

// Peers says of which operations kernels stamp what each peer was to them.
type Peers string

const (
	// PeersDefault is PeersSlow where the kernels for it come compiled and the driver is new enough
	// to take them so, else PeersOff: it would compile them for seconds, in the middle of a job.
	PeersDefault Peers = ""
	PeersOff     Peers = "off"
	PeersSlow    Peers = "slow" // operations of 16 MiB and more, of whose time stamps are 1 % at most
	PeersOn      Peers = "on"   // all
)

// slowBytes is what PeersSlow takes for slow.
const slowBytes = 16 << 20

// ParsePeers reads what LOCKSTEP_GPU_PEERS has.
func ParsePeers(s string) (Peers, error) {
	switch p := Peers(s); p {
	case PeersDefault, PeersOff, PeersSlow, PeersOn:
		return p, nil
	}
	return "", fmt.Errorf("%q says of no operations that they are stamped by peer, want off, slow or on", s)
}

// from is from how many bytes on operations are stamped by peer.
func (p Peers) from() uint64 {
	switch p {
	case PeersOn:
		return 0
	case PeersSlow:
		return slowBytes
	}
	return never
}

// peers stamps by peer. It belongs to the communicator's launches, which have its lock.
type peers struct {
	mode Peers
	rows uint32 // Args.Peers; 0: the recorder has none
	// loads is from how many bytes on any rank of the communicator stamps operations by peer. All load
	// the kernels for it, so that no rank loads them where another one on its GPU already waits for it.
	loads uint64
}

// choose finds out of which operations this rank stamps its peers.
func (p *peers) choose(c *Comm) {
	p.mode, p.loads = PeersOff, never
	if c.cfg.Recording == nil || c.cfg.HostTells || c.size < 2 {
		return
	}
	off, ok := c.cfg.Live.PeerRange()
	if !ok {
		return
	}
	if p.mode = c.cfg.Peers; p.mode == PeersDefault {
		if p.mode = PeersOff; c.dev.binary.Load() && kernels.Compiled(kernels.ByPeer("move"), c.dev.Major, c.dev.Minor) {
			p.mode = PeersSlow
		}
	}
	if p.loads = p.mode.from(); p.mode != PeersOff {
		slots, _ := c.cfg.Live.StampRange()
		p.rows = uint32((off - slots) / 16)
	}
}

// init tells the recorder of the peers.
func (p *peers) init(c *Comm) {
	if p.mode == PeersOff {
		return
	}
	for r := range c.size {
		if r != c.rank {
			c.stamps.rec.writer.AddConn(record.ConnEntry{
				Comm: c.cfg.Live.Index(), Peer: int32(r), Transport: record.TransportNVLink, Name: c.names[r] + "->" + c.names[c.rank], // what is stamped is what comes
			}) // a full table is counted there
		}
	}
}

// moversByPeer and reducersByPeer are the kernels that stamp by peer, nil where there are none. They
// are loaded when the first one is wanted, which is safe as it is for reducers.
func (d *device) moversByPeer() (funcs, error) {
	return d.movePeers.of(func() (funcs, error) { return d.loadByPeer("move") })
}

func (d *device) reducersByPeer(dt record.DType) (funcs, error) {
	return d.reducePeers[dt].of(func() (funcs, error) { return d.loadByPeer(reduceModule(dt)) })
}

func (d *device) loadByPeer(module string) (funcs, error) {
	name := kernels.ByPeer(module)
	if kernels.Module(name, d.Major, d.Minor) == nil {
		return nil, nil
	}
	return d.load(name)
}

// stampedByPeer is the kernel of the given name that stamps by peer, if the launch is to, else f.
func (c *Comm) stampedByPeer(f kernel, name string, op *Op, a *kernels.Args) (kernel, error) {
	a.Peers = 0
	if a.Flags&kernels.First == 0 || op.Bytes < c.byPeer.loads {
		return f, nil
	}
	var fs funcs
	var err error
	if op.Coll.Reduces() {
		fs, err = c.dev.reducersByPeer(op.DType)
	} else {
		fs, err = c.dev.moversByPeer()
	}
	if err != nil {
		return f, err
	}
	if by, ok := fs[name]; ok && op.Bytes >= c.byPeer.mode.from() {
		a.Peers = c.byPeer.rows
		return by, nil
	}
	return f, nil
}

// gpuName names a GPU for as long as it lives: the first digits of its UUID.
func gpuName(d *cuda.Device) string {
	name, rest, _ := strings.Cut(d.UUID, "-")
	digits, _, _ := strings.Cut(rest, "-")
	return name + "-" + digits
}
