package preflight

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"time"

	"github.com/lockstep-ccl/lockstep/ccl"
	"github.com/lockstep-ccl/lockstep/internal/ports"
)

// What rank 0 orders.
const (
	orderEnd      = iota // Arg is the exit status
	orderPair            // Arg is the partner, or idle
	orderSelf            // Arg is 1 for ranks that check themselves
	orderTogether        // all exchange at once
	orderNode            // join the communicator of the node's GPUs: ID, Rank and Size
)

// order is what rank 0 tells a rank to do next.
type order struct {
	Kind   int    `json:"kind"`
	Arg    int    `json:"arg,omitempty"`
	Device bool   `json:"dev,omitempty"`   // in device memory
	Times  int    `json:"times,omitempty"` // as long as Options.Time
	ID     string `json:"id,omitempty"`
	Rank   int    `json:"rank,omitempty"`
	Size   int    `json:"size,omitempty"`
}

// self is what a rank measured of itself.
type self struct {
	Memory  float64 `json:"mem,omitempty"`   // bytes per second
	Compute float64 `json:"flops,omitempty"` // operations per second
}

// report is what a rank answers.
type report struct {
	Node     string    `json:"node,omitempty"` // of the first one only
	Device   string    `json:"dev,omitempty"`
	ID       string    `json:"id,omitempty"` // of a communicator that this rank could be rank 0 of
	Self     *self     `json:"self,omitempty"`
	Pair     *measured `json:"pair,omitempty"`
	Together float64   `json:"all,omitempty"` // bytes per second
	Err      string    `json:"err,omitempty"`
}

// Sizes of messages; an order or a report is not longer.
const (
	reportSize = 2048 // two errors, each of whose letters may be escaped
	orderSize  = 512
)

func (r *report) encode() ([]byte, error) {
	r.Err = clip(r.Err)
	if r.Pair != nil {
		r.Pair.Err = clip(r.Pair.Err)
	}
	return encode(r, reportSize)
}

// encode makes a message of size bytes.
func encode(v any, size int) ([]byte, error) {
	b, err := json.Marshal(v)
	if err != nil {
		return nil, err
	}
	if len(b) > size {
		return nil, fmt.Errorf("%T of %d bytes, at most %d", v, len(b), size)
	}
	return append(b, bytes.Repeat([]byte{' '}, size-len(b))...), nil
}

// clip keeps an error's text short enough for a report, even escaped.
func clip(s string) string {
	const most = 100
	if r := []rune(s); len(r) > most {
		return string(r[:most]) + "…"
	}
	return s
}

// decodeReport reads what encode made; false for a message that has not come.
func decodeReport(b []byte) (r report, ok bool) {
	return r, json.Unmarshal(b, &r) == nil
}

// member is one rank.
type member struct {
	opts   *Options
	cfg    ccl.Config // of the world's communicator
	world  *ccl.Comm
	local  *ccl.Comm // of the node's GPUs, nil on CPUs
	ctl    *ccl.Stream
	memory []byte
	meet   io.Closer // the port of a communicator that this rank could be rank 0 of, until it is made
}

// hello is a rank's first report.
func (m *member) hello(ctx context.Context) *report {
	r := &report{Node: m.cfg.Node, Device: m.opts.Device.String()}
	if m.opts.Device == ccl.CPU {
		m.checkSelf(ctx, r)
		return r
	}
	id, err := m.newID()
	if err != nil {
		r.Err = err.Error()
	}
	r.ID = id.String()
	return r
}

// newID is that of a communicator whose rank 0 this one may be, for ranks of this node.
// Its port is kept until the communicator is made.
func (m *member) newID() (ccl.UniqueID, error) {
	held, err := ports.Hold("127.0.0.1", 1)
	if err != nil {
		return ccl.UniqueID{}, fmt.Errorf("a port for a rendezvous: %w", err)
	}
	id, err := ccl.NewUniqueID(held.Addrs[0])
	if err != nil {
		return ccl.UniqueID{}, errors.Join(err, held.Close())
	}
	m.meet = held
	return id, nil
}

// errSilent says that ranks did not answer, so that no round can go on.
var errSilent = errors.New("ranks do not answer")

// close ends the rank's part; failed says that others may not be there to do so as well.
func (m *member) close(failed bool) {
	for _, c := range []*ccl.Comm{m.local, m.world} {
		if c != nil {
			if failed {
				c.Abort(errSilent)
			}
			_ = c.Close() // what it can say has been said, and changes no verdict
		}
	}
}

// checkSelf measures the rank's own device and host.
func (m *member) checkSelf(ctx context.Context, r *report) {
	r.Self = &self{Compute: hostCompute(m.opts.Time)}
	if m.opts.Device == ccl.CPU {
		r.Self.Memory = hostMemory(m.opts.Time)
		return
	}
	ctx, cancel := context.WithTimeout(ctx, m.opts.PairTimeout)
	defer cancel()
	c, err := m.split(ctx, m.local, m.world.Rank(), "preflight self")
	if err == nil {
		err = use(c, func() (err error) {
			r.Self.Memory, err = gpuMemory(ctx, c, m.opts.Size, m.opts.Time)
			return err
		})
	}
	if err != nil {
		r.Err = "self check: " + err.Error()
	}
}

// obey carries an order out. Whatever goes wrong in a measurement is in the report.
func (m *member) obey(ctx context.Context, o order) *report {
	r := &report{}
	switch o.Kind {
	case orderPair:
		r.Pair = &measured{}
		if err := m.pair(ctx, o, r.Pair); err != nil {
			r.Pair.Err = err.Error()
		}
	case orderSelf:
		if o.Arg == 1 || m.opts.Device != ccl.CPU { // GPUs' communicators are made by all
			m.checkSelf(ctx, r)
		}
	case orderTogether:
		if err := m.together(ctx, o, r); err != nil {
			r.Err = "together: " + err.Error()
		}
	case orderNode:
		if err := m.joinNode(ctx, o); err != nil {
			r.Err = "communicator of the node's GPUs: " + err.Error()
		}
	}
	return r
}

// joinNode makes the communicator from which those of pairs of GPUs come: one
// that spans nodes has no GPUs.
func (m *member) joinNode(ctx context.Context, o order) error {
	id, err := ccl.ParseUniqueID(o.ID)
	if err != nil {
		return err
	}
	if m.meet != nil {
		defer m.meet.Close()
	}
	m.local, err = ccl.Init(ctx, ccl.Config{
		ID: id, Rank: o.Rank, Size: o.Size, Node: m.cfg.Node, Name: "preflight node", Device: m.opts.Device, Timeout: m.opts.JoinTimeout, Faults: m.cfg.Faults,
	})
	return err
}

// pair measures with the partner that o names, within Options.PairTimeout all in all.
// All ranks make the communicators of a round together, those of a node's GPUs too.
func (m *member) pair(ctx context.Context, o order, found *measured) error {
	ctx, cancel := context.WithTimeout(ctx, m.opts.PairTimeout)
	defer cancel()
	color, name := ccl.NoColor, ""
	if o.Arg != idle {
		a, b := min(o.Arg, m.world.Rank()), max(o.Arg, m.world.Rank())
		color, name = a, fmt.Sprintf("preflight %d-%d", a, b)
	}
	host, gpus := color, ccl.NoColor
	if o.Device {
		host, gpus = ccl.NoColor, color
	}
	c, err := m.split(ctx, m.world, host, name)
	if m.opts.Device != ccl.CPU {
		local, localErr := m.split(ctx, m.local, gpus, name)
		if o.Device {
			c, err = local, localErr
		}
	}
	if err != nil || c == nil {
		return err
	}
	return use(c, func() (err error) {
		p := &pair{comm: c, host: c.NewStream(), data: c.NewStream(), trip: m.opts.Trips, time: m.opts.Time * time.Duration(o.Times), m: found}
		if p.bufs, err = m.buffers(ctx, c, o.Device); err != nil {
			return err
		}
		if err = p.measure(ctx); err != nil {
			return err
		}
		return p.bufs.free(ctx)
	})
}

func (m *member) split(ctx context.Context, parent *ccl.Comm, color int, name string) (*ccl.Comm, error) {
	if parent == nil {
		return nil, errors.New("there is no communicator of the node's GPUs")
	}
	return parent.Split(ctx, color, m.world.Rank(), name)
}

// use ends c after do. Whoever gives up first tells the others: nobody waits for
// its own end.
func use(c *ccl.Comm, do func() error) error {
	if err := do(); err != nil {
		c.Abort(err)
		_ = c.Close() // says why it was aborted, again
		return err
	}
	return c.Close()
}

func (m *member) buffers(ctx context.Context, c *ccl.Comm, device bool) (*buffers, error) {
	if device {
		return deviceBuffers(ctx, c, m.opts.Size)
	}
	if m.memory == nil {
		m.memory = make([]byte, m.opts.Size)
		for i := range m.memory {
			m.memory[i] = byte(i) // pages that nobody has written are all the same one
		}
	}
	return hostBuffers(m.memory), nil
}

// together reports how many bytes per second this rank sends while all ranks send
// to all others at once; GPUs do with those of their node.
func (m *member) together(ctx context.Context, o order, r *report) error {
	ctx, cancel := context.WithTimeout(ctx, m.opts.PairTimeout)
	defer cancel()
	parent := m.world
	if o.Device {
		parent = m.local
	}
	c, err := m.split(ctx, parent, 0, "preflight together")
	if err != nil {
		return err
	}
	return use(c, func() (err error) {
		r.Together, err = exchange(ctx, c, m.opts.Size, o.Device)
		return err
	})
}

func exchange(ctx context.Context, c *ccl.Comm, size int, device bool) (rate float64, err error) {
	n := c.Size()
	if n == 1 {
		return 0, nil
	}
	each := max(size/n, 1)
	send, recv := ccl.Buffer{}, ccl.Buffer{}
	if device {
		mem, err := c.MemAlloc(2 * n * each)
		if err != nil {
			return 0, err
		}
		defer func() { err = errors.Join(err, mem.Free()) }()
		all := mem.Buffer(ccl.Uint8, 2*n*each)
		send, recv = all.Slice(0, n*each), all.Slice(n*each, 2*n*each)
	} else {
		send, recv = ccl.Bytes(ccl.Uint8, make([]byte, n*each)), ccl.Bytes(ccl.Uint8, make([]byte, n*each))
	}
	s := c.NewStream()
	return best(0, // so that all ranks make as many exchanges
		float64((n-1)*each), func() error {
			if err := c.AlltoAll(s, send, recv); err != nil {
				return err
			}
			return s.Wait(ctx)
		}, 1)
}

// follow is the part of ranks other than 0: obey until the end. It returns the
// exit status that rank 0 has found for all.
func (m *member) follow(ctx context.Context) (status int, err error) {
	r := m.hello(ctx)
	for {
		b, err := r.encode()
		if err != nil {
			return 0, err
		}
		if err := m.world.Send(m.ctl, ccl.Bytes(ccl.Uint8, b), 0); err != nil {
			return 0, err
		}
		b = make([]byte, orderSize)
		if err := m.world.Recv(m.ctl, ccl.Bytes(ccl.Uint8, b), 0); err != nil {
			return 0, err
		}
		if err := m.ctl.Wait(ctx); err != nil {
			return 0, err
		}
		var o order
		if err := json.Unmarshal(b, &o); err != nil {
			return 0, fmt.Errorf("order of rank 0: %w", err)
		}
		if o.Kind == orderEnd {
			return o.Arg, nil
		}
		r = m.obey(ctx, o)
	}
}
