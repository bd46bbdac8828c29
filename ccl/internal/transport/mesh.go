package transport

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"sync"
	"syscall"
	"time"

	"github.com/lockstep-ccl/lockstep/ccl/internal/rdma"
	"github.com/lockstep-ccl/lockstep/record"
)

// Errors of a Link; they are final.
var (
	ErrDropped = errors.New("connection dropped")
	ErrCorrupt = rdma.ErrCorrupt
	ErrClosed  = errors.New("mesh closed")
)

// Config is what a rank brings to its communicator's mesh.
type Config struct {
	ID         uint64 // of the communicator
	Name       string // of the communicator: names it to Faults
	Rank, Size int

	// Node is this rank's logical node. Ranks with the same Node that also see
	// the same kernel and the same Dir share memory, all others use TCP.
	Node string
	// Dir is the runtime directory for shared memory, "" for record.Dir's.
	Dir string
	// Exchange gives every member all members' blobs, by rank; NewMesh calls it
	// the same few times on every rank (bootstrap.Control.AllGather).
	Exchange func(ctx context.Context, blob []byte) ([][]byte, error)
	// Err is why the communicator is broken, nil while it is not: Wait does not
	// sleep, Link does not wait, and Close does not let last bytes arrive when it is.
	// Optional; safe for any goroutine.
	Err func() error

	// Key authenticates data connections between nodes (bootstrap.Control.Key).
	Key []byte
	// Host is the interface to listen at for them, "" for 127.0.0.1.
	Host string
	// Sockets a TCP connection has, 0 for 2; where both ends have a plan, of each end, 0 for 4:
	// the lanes that a dead link leaves must divide over the links that are left.
	Sockets int
	// Ring is the shared-memory ring's size per ordered pair in bytes, a power of
	// two from 4 KiB, 0 for 256 KiB. All ranks' must agree.
	Ring int
	// Window is the TCP receive buffer, hence the credit, per connection in
	// bytes, a power of two from 64 KiB, 0 for 2 MiB.
	Window int

	// Outage is how long a peer's host may be silent before a TCP link ends, 0 for 30 s.
	Outage time.Duration
	// Bounds of shorter waits of connections between nodes.
	Bounds Bounds

	// Paths gives connections their source ports, nil for the kernel's choice, and the device's.
	Paths Paths

	// RDMA is what this rank has of it.
	RDMA RDMA

	// Recorder and Comm are where connections are recorded, nil for nowhere.
	Recorder *record.Writer
	Comm     *record.Comm
	// Log is told what works less well than it should, slog.Default() when nil.
	Log *slog.Logger
	// Faults is what is to go wrong, nil for nothing (package ccltest).
	Faults Faults
}

func (cfg *Config) setDefaults() error {
	for _, d := range []struct {
		what     string
		v        *int
		or       int
		min, max int
		pow2     bool
	}{
		{"Sockets", &cfg.Sockets, 0, 0, maxSockets, false},
		{"Ring", &cfg.Ring, 256 << 10, 4 << 10, 64 << 20, true},
		{"Window", &cfg.Window, 2 << 20, 64 << 10, 256 << 20, true},
	} {
		if *d.v == 0 {
			*d.v = d.or
		}
		if v := *d.v; v < d.min || v > d.max || d.pow2 && v&(v-1) != 0 {
			return fmt.Errorf("%s is %d, want %d to %d, a power of two but for Sockets", d.what, v, d.min, d.max)
		}
	}
	if cfg.Rank < 0 || cfg.Rank >= cfg.Size {
		return fmt.Errorf("rank %d of %d", cfg.Rank, cfg.Size)
	}
	if cfg.Host == "" {
		cfg.Host = "127.0.0.1"
	}
	cfg.Outage = cmp.Or(cfg.Outage, 30*time.Second)
	cfg.Bounds.setDefaults()
	cfg.Log = cmp.Or(cfg.Log, slog.Default())
	if cfg.Err == nil {
		cfg.Err = func() error { return nil }
	}
	return nil
}

// Bounds are of what a connection between nodes waits for; 0 for the default.
type Bounds struct {
	// Silent is for how long nothing may be acknowledged, 1 s.
	Silent time.Duration
	// Ports is how long the plan may take to say ports, 50 ms.
	Ports time.Duration
	// Dial is for an attempt to connect from a port of the plan's, after which the kernel chooses one; 1 s.
	Dial time.Duration
	// Half is how long the peer may take to dial its half, 2 s.
	Half time.Duration
	// Plain is how long a connection does without the peer's half when that has not come, 1 minute: what kept it may
	// have been the network's queues.
	Plain time.Duration
	// Attempt is how long the peer's attempt to connect may come no further before this end makes one of its own,
	// 1.5 s: a lost packet has been sent again by then.
	Attempt time.Duration
	// Withdrawn is how long another set of sockets may take to come when the peer has withdrawn the one that a
	// connection moved to, 2 s.
	Withdrawn time.Duration
}

func (b *Bounds) setDefaults() {
	b.Silent = cmp.Or(b.Silent, time.Second)
	b.Ports = cmp.Or(b.Ports, 50*time.Millisecond)
	b.Dial = cmp.Or(b.Dial, time.Second)
	b.Half = cmp.Or(b.Half, 2*time.Second)
	b.Plain = cmp.Or(b.Plain, time.Minute)
	b.Attempt = cmp.Or(b.Attempt, 1500*time.Millisecond)
	b.Withdrawn = cmp.Or(b.Withdrawn, 2*time.Second)
}

// peerInfo is what a rank tells the others of itself.
type peerInfo struct {
	Node     string // logical node
	Boot     string // kernel
	Dev, Ino uint64 // runtime directory, 0 for none
	PID      int
	Nonce    [16]byte // makes names and proofs of this mesh unique
	Ring     int
	Addr     string    // where it listens, "" when it cannot
	RDMA     *rdmaInfo `json:",omitempty"`
	Paths    bool      `json:",omitempty"` // it has a plan
}

// sharesMemory reports whether two ranks can map the same file.
func (a peerInfo) sharesMemory(b peerInfo) bool {
	return a.Node == b.Node && a.Boot == b.Boot && a.Dev == b.Dev && a.Ino == b.Ino && (a.Ino != 0 || a.Nonce == b.Nonce)
}

// Mesh is all links of one communicator's rank, and how to sleep on them. It is the
// communicator's executor's, but for Wake.
type Mesh struct {
	cfg        Config
	ctx        context.Context // ends with Close
	stop       context.CancelFunc
	infos      []peerInfo
	local      []int // position among this node's members by rank, -1 for others
	links      []Link
	open       []pipeline // the links that are not nil
	seg        *segment   // nil without local peers
	net        *network   // nil without remote peers
	rdma       *rdmaSide  // nil where this rank has none
	zeroCopies int        // TCP links that refer to the caller's bytes
	waiter

	mu     sync.RWMutex // Wake against Close
	closed bool
}

// pipeline is what the mesh asks of every Link it has opened.
type pipeline interface {
	Link
	// look notices completions that the monitor waits for.
	look()
	// due reports whether either end has yet to hear of bytes that were consumed.
	due() bool
	// refresh reads what the peer has consumed and publishes live words; it
	// reports whether bytes are outstanding.
	refresh(now int64) bool
	// pump moves bytes that a fault has held back; 0, or when to call it again.
	pump(now int64) int64
	// holds reports whether a fault holds something back.
	holds() bool
}

// NewMesh prepares the links among the members; every member calls it, and it
// needs all of them. Links themselves open on first use.
func NewMesh(ctx context.Context, cfg Config) (*Mesh, error) {
	m, err := newMesh(ctx, cfg)
	if err != nil {
		return nil, fmt.Errorf("rank %d: open transports: %w", cfg.Rank, err)
	}
	return m, nil
}

func newMesh(ctx context.Context, cfg Config) (_ *Mesh, err error) {
	if err := cfg.setDefaults(); err != nil {
		return nil, err
	}
	m := &Mesh{cfg: cfg, links: make([]Link, cfg.Size), local: make([]int, cfg.Size)}
	m.ctx, m.stop = context.WithCancel(context.Background())
	defer func() {
		if err != nil {
			m.Close()
		}
	}()
	mine, err := m.introduce()
	if err != nil {
		return nil, err
	}
	if err := m.exchangeInfo(ctx, mine); err != nil {
		return nil, err
	}
	var group []int // of this node
	for r, c := range m.infos {
		m.local[r] = -1
		if c.sharesMemory(mine) {
			m.local[r] = len(group)
			group = append(group, r)
			if r != cfg.Rank && c.PID == mine.PID {
				m.goroutines = true
			}
		}
	}
	if m.seg, err = m.shareMemory(ctx, group); err != nil {
		return nil, err
	}
	m.waiter.init(m)
	if m.net == nil {
		return m, nil
	}
	if len(group) == cfg.Size {
		m.net.close()
		m.net = nil
		m.closeRDMA()
		return m, nil
	}
	if err := m.chooseRDMA(); err != nil {
		return nil, err
	}
	wakeFD := -1
	if m.seg != nil {
		wakeFD = m.seg.wakeFDs[m.seg.me]
	}
	if err := m.net.start(wakeFD); err != nil {
		return nil, err
	}
	return m, m.watchRDMA()
}

// introduce fills in this rank's peerInfo. It listens before anyone can know that
// it must, since one exchange less is worth more than one socket less.
func (m *Mesh) introduce() (peerInfo, error) {
	var st syscall.Stat_t
	if err := m.place(&st); err != nil { // somebody else's mischief must not cost the job
		m.cfg.Log.Warn("no runtime directory, so this rank talks TCP to ranks of its own node", "rank", m.cfg.Rank, "err", err)
		st = syscall.Stat_t{}
	}
	boot, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return peerInfo{}, err
	}
	c := peerInfo{Node: m.cfg.Node, Boot: string(boot), Dev: st.Dev, Ino: st.Ino, PID: os.Getpid(), Nonce: newNonce(), Ring: m.cfg.Ring}
	if m.cfg.Size > 1 {
		if m.net, err = listen(m, c.Nonce); err != nil {
			return peerInfo{}, err
		}
		c.Addr = m.net.addr()
		c.Paths = m.cfg.Paths != nil
		c.RDMA = m.openRDMA()
	}
	return c, nil
}

// place finds the runtime directory, which must be this user's alone.
func (m *Mesh) place(st *syscall.Stat_t) (err error) {
	if m.cfg.Dir == "" {
		m.cfg.Dir, _, err = record.Dir("")
	} else {
		err = record.UseDir(m.cfg.Dir)
	}
	if err != nil {
		return err
	}
	return os.NewSyscallError("stat "+m.cfg.Dir, syscall.Stat(m.cfg.Dir, st))
}

func (m *Mesh) exchangeInfo(ctx context.Context, mine peerInfo) error {
	b, err := json.Marshal(mine)
	if err != nil {
		return err
	}
	if m.cfg.Size == 1 {
		m.infos = []peerInfo{mine}
		return nil
	}
	blobs, err := m.cfg.Exchange(ctx, b)
	if err != nil {
		return err
	}
	m.infos = make([]peerInfo, m.cfg.Size)
	for r, b := range blobs {
		if err := json.Unmarshal(b, &m.infos[r]); err != nil {
			return fmt.Errorf("rank %d's description of itself: %w", r, err)
		}
		if ring := m.infos[r].Ring; ring != mine.Ring {
			return fmt.Errorf("rank %d has shared-memory rings of %d bytes, this rank of %d", r, ring, mine.Ring)
		}
	}
	return nil
}

// Link returns the link to a peer, connecting it on first use: it blocks no longer than
// Config.Err allows. Both sides may call it at different times.
func (m *Mesh) Link(peer int) (Link, error) {
	if peer < 0 || peer >= m.cfg.Size || peer == m.cfg.Rank {
		return nil, fmt.Errorf("rank %d has no link to rank %d of %d", m.cfg.Rank, peer, m.cfg.Size)
	}
	if l := m.links[peer]; l != nil {
		return l, nil
	}
	var l pipeline
	var err error
	if m.Local(peer) {
		l, err = m.seg.link(m, peer)
	} else {
		l, err = m.net.link(peer)
	}
	if err != nil {
		return nil, fmt.Errorf("rank %d: link to rank %d: %w", m.cfg.Rank, peer, err)
	}
	m.links[peer] = l
	m.open = append(m.open, l)
	return l, nil
}

// Local reports whether a peer shares this rank's node (shared memory).
func (m *Mesh) Local(peer int) bool { return m.local[peer] >= 0 }

// Board returns the shared entry board of this node's members, nil when there is none:
// one word per member of the communicator.
func (m *Mesh) Board() Board {
	if m.seg == nil {
		return nil
	}
	return m.seg.board(m)
}

// Close unmaps and disconnects. No Link or Board may be in use, nor bytes that
// Peek returned.
func (m *Mesh) Close() error {
	m.mu.Lock()
	again := m.closed
	m.closed = true
	m.mu.Unlock() // closing the network waits for goroutines that may call Wake
	if again {
		return nil
	}
	m.endIdle()
	if m.net != nil {
		m.net.linger() // peers, and this rank, may have to connect again for the last bytes
		m.net.close()
	}
	m.stop()
	m.closeRDMA()
	if m.seg != nil {
		m.seg.close()
	}
	return nil
}
