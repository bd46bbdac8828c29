package symm

import (
	"bytes"
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"slices"
	"sync"
	"time"
	"unsafe"

	"github.com/lockstep-ccl/lockstep/ccl/internal/cuda"
	"golang.org/x/sys/unix"
)

// Barrier is why two ranks of a node cannot share memory; A is below B.
type Barrier struct {
	A, B   int
	Reason string // what the rank that found out was told
}

// probe is what a rank tells all others before they look for its memory.
type probe struct {
	Socket string `json:"socket,omitempty"`
	Bus    string `json:"bus,omitempty"`
	Error  string `json:"error,omitempty"`
}

// seen is a rank that another one does not reach.
type seen struct {
	Rank   int    `json:"rank"`
	Reason string `json:"reason"`
}

const (
	tokenLen  = 32
	maxReason = 300
	// probeTime bounds what one rank tries with its peers: what takes so long is not
	// reached.
	probeTime = 20 * time.Second
)

// Reach finds out which ranks cannot share memory, each trying what Alloc will do
// with every other one of near, the ranks of its node: it maps a little memory of
// theirs and reads it. All ranks of cfg call it, whatever their nodes, and get the
// same answer in the order of ranks. An error is one of this rank's own, or of the
// exchange, which is called twice; that a peer is out of reach is none.
func Reach(ctx context.Context, cfg Config, near []int) ([]Barrier, error) {
	r := reach{g: &Group{cfg: cfg}, token: make([]byte, tokenLen)}
	rand.Read(r.token)
	own := probe{Bus: cfg.Device.PCIBus}
	var failed error
	if len(near) > 1 {
		defer r.close()
		if failed = r.open(); failed != nil {
			own.Error = failed.Error()
		} else {
			own.Socket = r.listener.Addr().String()
		}
	}
	var probes []probe
	if err := cfg.tell(ctx, own, &probes); err != nil {
		return nil, errors.Join(failed, err)
	}
	if failed != nil {
		return nil, fmt.Errorf("share memory with the GPUs of this node: %w", failed)
	}
	for _, p := range near {
		if e := probes[p].Error; e != "" {
			return nil, fmt.Errorf("share memory with the GPUs of this node: %w", &RankError{p, errors.New(e)})
		}
	}
	var blind []seen
	if len(near) > 1 {
		serving, stop := context.WithCancel(ctx)
		var server sync.WaitGroup
		server.Go(func() { r.serve(serving) })
		defer server.Wait()
		defer stop()
		blind = r.look(ctx, near, probes)
	}
	// Nobody ends its memory before all have looked at it.
	var all [][]seen
	if err := cfg.tell(ctx, blind, &all); err != nil {
		return nil, err
	}
	var list []Barrier
	for a := range all {
		for _, s := range all[a] {
			b := Barrier{min(a, s.Rank), max(a, s.Rank), s.Reason}
			if s.Rank < 0 || s.Rank >= cfg.Size || s.Rank == a {
				return nil, &RankError{a, fmt.Errorf("it says that it cannot reach rank %d", s.Rank)}
			}
			if !slices.ContainsFunc(list, func(o Barrier) bool { return o.A == b.A && o.B == b.B }) {
				list = append(list, b)
			}
		}
	}
	slices.SortFunc(list, func(a, b Barrier) int { return (a.A-b.A)*cfg.Size + a.B - b.B })
	return list, nil
}

// tell exchanges a value of every rank, as JSON.
func (cfg *Config) tell(ctx context.Context, own, all any) error {
	blob, err := json.Marshal(own)
	if err != nil {
		return err
	}
	blobs, err := cfg.Exchange(ctx, blob)
	if err != nil {
		return fmt.Errorf("exchange of who reaches whom: %w", err)
	}
	if len(blobs) != cfg.Size {
		return fmt.Errorf("exchange of who reaches whom: %d answers from %d ranks", len(blobs), cfg.Size)
	}
	if err := json.Unmarshal(append(append([]byte{'['}, bytes.Join(blobs, []byte{','})...), ']'), all); err != nil {
		return fmt.Errorf("exchange of who reaches whom: %w", err)
	}
	return nil
}

// reach is one rank's part of Reach.
type reach struct {
	g        *Group
	listener *net.UnixListener
	memory   *Allocation
	fd       int
	stream   *cuda.Stream
	token    []byte // what the memory begins with
}

func (r *reach) open() (err error) {
	d := r.g.cfg.Device
	r.fd = -1
	if !d.HandlePOSIX {
		return fmt.Errorf("GPU %d (%s) cannot export memory as a file descriptor", d.Ordinal, d.Name)
	}
	if r.stream, err = d.NewStream(0); err != nil {
		return err
	}
	if r.memory, err = Allocate(d, tokenLen); err != nil {
		return err
	}
	if err = r.stream.CopyIn(r.memory.Ptr, unsafe.Pointer(unsafe.SliceData(r.token)), tokenLen); err != nil {
		return err
	}
	if err = r.stream.Synchronize(); err != nil {
		return err
	}
	if r.fd, err = r.memory.Handle.Export(); err != nil {
		return err
	}
	r.listener, err = listen(r.g.cfg.Dir)
	return err
}

func (r *reach) close() {
	if r.listener != nil {
		r.listener.Close() // removes the socket
	}
	if r.fd >= 0 {
		unix.Close(r.fd)
	}
	if r.memory != nil {
		_ = r.memory.Close() // it has been of use, or its error has been told
	}
	if r.stream != nil {
		_ = r.stream.Close()
	}
}

// serve gives this rank's memory, and what is in it, to members that ask.
func (r *reach) serve(ctx context.Context) {
	var wg sync.WaitGroup
	defer wg.Wait()
	stop := context.AfterFunc(ctx, func() { _ = r.listener.SetDeadline(time.Unix(1, 0)) })
	defer stop()
	for {
		c, err := r.listener.AcceptUnix()
		if err != nil {
			return
		}
		wg.Go(func() {
			defer c.Close()
			if _, err := r.g.admit(ctx, c, 0); err != nil {
				return // the peer is told by the connection's end
			}
			_ = send(c, message{kind: kindOffer, bytes: r.memory.Size, text: string(r.token)}, r.fd)
		})
	}
}

// look tries all peers at once.
func (r *reach) look(ctx context.Context, near []int, probes []probe) (blind []seen) {
	ctx, cancel := context.WithTimeout(ctx, probeTime)
	defer cancel()
	errs := make([]error, len(near))
	var wg sync.WaitGroup
	for i, p := range near {
		if p != r.g.cfg.Rank {
			wg.Go(func() { errs[i] = r.try(ctx, p, probes[p]) })
		}
	}
	wg.Wait()
	for i, err := range errs {
		if err != nil {
			text := err.Error()
			blind = append(blind, seen{near[i], text[:min(len(text), maxReason)]})
		}
	}
	return blind
}

// try maps a peer's memory and reads it.
func (r *reach) try(ctx context.Context, rank int, p probe) error {
	d := r.g.cfg.Device
	if can, known, err := d.CanAccess(p.Bus); err != nil {
		return err
	} else if known && !can {
		return fmt.Errorf("the driver says that GPU %s cannot reach GPU %s", d.PCIBus, p.Bus)
	}
	c, err := r.g.dial(ctx, rank, p.Socket)
	if err != nil {
		return err
	}
	defer c.Close()
	defer bind(ctx, c)()
	offer, err := receive(c)
	if err != nil {
		return err
	}
	defer closeAll([]message{offer})
	if offer.fd < 0 || offer.bytes == 0 || len(offer.text) != tokenLen {
		return errors.New("it sent no memory")
	}
	h, err := d.Import(offer.fd)
	if err != nil {
		return err
	}
	at, err := d.Reserve(offer.bytes, 0)
	if err != nil {
		return errors.Join(err, h.Release())
	}
	err = d.Map(at, offer.bytes, h)
	if err = errors.Join(err, h.Release()); err != nil {
		return errors.Join(err, d.FreeReserved(at, offer.bytes))
	}
	got := make([]byte, tokenLen)
	err = errors.Join(r.stream.CopyOut(unsafe.Pointer(unsafe.SliceData(got)), at, tokenLen), r.stream.Synchronize())
	if err == nil && string(got) != offer.text {
		err = errors.New("what is read from its memory is not what it wrote there: look for an IOMMU or PCIe access control between the two")
	}
	return errors.Join(err, d.Unmap(at, offer.bytes), d.FreeReserved(at, offer.bytes))
}
