package preflight

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"github.com/lockstep-ccl/lockstep/ccl"
)

// What rank 0 orders.
const (
	orderEnd      = iota // Arg is the exit status
	orderPair            // Arg is the partner, or idle
	orderSelf            // Arg is 1 for ranks that check themselves
	orderTogether        // Arg is the group: all of its ranks exchange at once
)

// order is what rank 0 tells a rank to do next.
type order struct {
	Kind, Arg int32
	Device    int32 // 1: in device memory
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
	Self     *self     `json:"self,omitempty"`
	Pair     *measured `json:"pair,omitempty"`
	Together float64   `json:"all,omitempty"` // bytes per second
	Err      string    `json:"err,omitempty"`
}

// reportSize bounds a report; it is the size of the message.
const reportSize = 1024

func (r *report) encode() ([]byte, error) {
	r.Err = clip(r.Err)
	if r.Pair != nil {
		r.Pair.Err = clip(r.Pair.Err)
	}
	b, err := json.Marshal(r)
	if err != nil {
		return nil, err
	}
	if len(b) > reportSize {
		return nil, fmt.Errorf("report of %d bytes, at most %d", len(b), reportSize)
	}
	return append(b, bytes.Repeat([]byte{' '}, reportSize-len(b))...), nil
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
	cmd    *Cmd
	world  *ccl.Comm
	device ccl.Device
	node   string
	ctl    *ccl.Stream
	memory []byte
}

// slack is what setting up and closing may take beyond a measurement.
const slack = 6 * time.Second

// hello is a rank's first report.
func (m *member) hello(ctx context.Context) *report {
	r := &report{Node: m.node, Device: m.device.String()}
	m.checkSelf(ctx, r)
	return r
}

// checkSelf measures the rank's own device and host. All ranks call it.
func (m *member) checkSelf(ctx context.Context, r *report) {
	r.Self = &self{Compute: hostCompute(m.cmd.Time)}
	if m.device == ccl.CPU {
		r.Self.Memory = hostMemory(m.cmd.Time)
		return
	}
	err := m.with(ctx, m.world.Rank(), "preflight self", true, func(ctx context.Context, c *ccl.Comm) (err error) {
		r.Self.Memory, err = gpuMemory(ctx, c, int(m.cmd.Size), m.cmd.Time)
		return err
	})
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
		color, name := ccl.NoColor, ""
		if o.Arg != idle {
			a, b := min(int(o.Arg), m.world.Rank()), max(int(o.Arg), m.world.Rank())
			color, name = a, fmt.Sprintf("preflight %d-%d", a, b)
		}
		err := m.with(ctx, color, name, o.Device == 1, func(ctx context.Context, c *ccl.Comm) (err error) {
			p := &pair{comm: c, host: c.NewStream(), data: c.NewStream(), trip: m.cmd.Trips, time: m.cmd.Time, m: r.Pair}
			if p.bufs, err = m.buffers(ctx, c, o.Device == 1); err != nil {
				return err
			}
			err = p.measure(ctx)
			if err != nil {
				// Whoever gives up first tells the other; neither waits for its own end.
				c.Abort(err)
				return err
			}
			return p.bufs.free(ctx)
		})
		if err != nil {
			r.Pair.Err = err.Error()
		}
	case orderSelf:
		if o.Arg == 1 || m.device != ccl.CPU { // on GPUs all ranks make the communicators
			m.checkSelf(ctx, r)
		}
	case orderTogether:
		err := m.with(ctx, int(o.Arg), "preflight together", o.Device == 1, func(ctx context.Context, c *ccl.Comm) (err error) {
			r.Together, err = m.together(ctx, c, o.Device == 1)
			return err
		})
		if err != nil {
			r.Err = "together: " + err.Error()
		}
	}
	return r
}

// with runs do on a communicator of the ranks of the same color, within
// --pair-timeout all in all; an error ends that communicator on all its ranks.
func (m *member) with(ctx context.Context, color int, name string, device bool, do func(context.Context, *ccl.Comm) error) error {
	ctx, cancel := context.WithTimeout(ctx, m.cmd.PairTimeout)
	defer cancel()
	c, err := m.world.Split(ctx, color, m.world.Rank(), name, func(cfg *ccl.Config) {
		cfg.Device = ccl.CPU
		if device {
			cfg.Device = m.device
		}
	})
	if err != nil || c == nil {
		return err
	}
	if err := do(ctx, c); err != nil {
		c.Abort(err)
		_ = c.Close() // says why it was aborted, again
		return err
	}
	return c.Close()
}

func (m *member) buffers(ctx context.Context, c *ccl.Comm, device bool) (*buffers, error) {
	if device {
		return deviceBuffers(ctx, c, int(m.cmd.Size))
	}
	if m.memory == nil {
		m.memory = make([]byte, m.cmd.Size)
		for i := range m.memory {
			m.memory[i] = byte(i) // pages that nobody has written are all the same one
		}
	}
	return hostBuffers(m.memory), nil
}

// together is how many bytes per second this rank sends while all ranks of c send
// to all others at once.
func (m *member) together(ctx context.Context, c *ccl.Comm, device bool) (rate float64, err error) {
	n := c.Size()
	if n == 1 {
		return 0, nil
	}
	each := max(int(m.cmd.Size)/n, 1)
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
		words := make([]int32, 3)
		if err := m.world.Recv(m.ctl, ccl.Of(words), 0); err != nil {
			return 0, err
		}
		if err := m.ctl.Wait(ctx); err != nil {
			return 0, err
		}
		o := order{words[0], words[1], words[2]}
		if o.Kind == orderEnd {
			return int(o.Arg), nil
		}
		r = m.obey(ctx, o)
	}
}
