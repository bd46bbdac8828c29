package symm

import (
	"context"
	"errors"
	"fmt"
	"net"
	"sync"
	"time"

	"github.com/lockstep-ccl/lockstep/ccl/internal/cuda"
)

// ErrBroken: a peer was lost in the middle of an agreement; the Group is only
// good for Close. Memory that it made before stays valid.
var ErrBroken = errors.New("the group of GPU ranks is broken")

// Config says who joins.
type Config struct {
	Device     *cuda.Device // open until after Close
	Rank, Size int
	// Exchange gives every rank's blob, by rank. It is called once.
	Exchange func(context.Context, []byte) ([][]byte, error)
	Key      []byte // the same secret on all ranks
	Dir      string // for the socket while joining; made if missing, must be ours alone (0700)
}

// Group is a rank's connections to the GPU ranks of its node. Safe for
// concurrent use; all ranks must make their collective calls in the same order.
type Group struct {
	cfg   Config
	conns []*net.UnixConn // by rank, nil for itself

	turn   chan struct{} // held during a collective call and Close
	seq    uint64
	broken error
}

// RankError is a failure that is one rank's doing.
type RankError struct {
	Rank int
	Err  error
}

func (e *RankError) Error() string { return fmt.Sprintf("GPU rank %d: %v", e.Rank, e.Err) }
func (e *RankError) Unwrap() error { return e.Err }

// Join connects all ranks with each other. It is collective and ends with ctx
// at the latest; the error names the ranks that did not come.
func Join(ctx context.Context, cfg Config) (*Group, error) {
	switch {
	case cfg.Device == nil || cfg.Rank < 0 || cfg.Rank >= cfg.Size:
		return nil, fmt.Errorf("symmetric memory: rank %d of %d, or no device", cfg.Rank, cfg.Size)
	case cfg.Size > 1 && (len(cfg.Key) < 16 || cfg.Exchange == nil):
		return nil, errors.New("symmetric memory: it takes an exchange and a key of 16 bytes")
	}
	g := &Group{cfg: cfg, conns: make([]*net.UnixConn, cfg.Size), turn: make(chan struct{}, 1)}
	if cfg.Size == 1 {
		return g, nil
	}
	if err := g.connect(ctx); err != nil {
		g.hangUp()
		return nil, fmt.Errorf("symmetric memory: GPU rank %d of %d: %w", cfg.Rank, cfg.Size, err)
	}
	return g, nil
}

// Close hangs up; a collective call under way on another goroutine ends first.
// Peers that still want something of this rank get an error that names it.
func (g *Group) Close() error {
	g.turn <- struct{}{}
	defer func() { <-g.turn }()
	g.hangUp()
	g.broken = fmt.Errorf("%w: it was closed", ErrBroken)
	return nil
}

func (g *Group) hangUp() {
	for r, c := range g.conns {
		if c != nil {
			c.Close()
			g.conns[r] = nil
		}
	}
}

// begin waits for the turn of a collective call.
func (g *Group) begin(ctx context.Context) (end func(), err error) {
	select {
	case g.turn <- struct{}{}:
	case <-ctx.Done():
		return nil, fmt.Errorf("symmetric memory: wait for another call of this rank: %w", context.Cause(ctx))
	}
	if g.broken != nil {
		<-g.turn
		return nil, g.broken
	}
	g.seq++
	return func() { <-g.turn }, nil
}

// round sends m to every peer, with fd unless it is negative, and takes one
// message from each. The caller owns the descriptors of what comes back. An
// error has broken the group.
func (g *Group) round(ctx context.Context, m message, fd int) ([]message, error) {
	m.seq = g.seq
	var mu sync.Mutex
	var first error
	var wg sync.WaitGroup
	interrupt := func() {
		for _, c := range g.conns {
			if c != nil {
				_ = c.SetDeadline(time.Unix(1, 0))
			}
		}
	}
	interrupted := make(chan struct{})
	stop := context.AfterFunc(ctx, func() { interrupt(); close(interrupted) })
	got := make([]message, len(g.conns))
	for r := range got {
		got[r].fd = -1
	}
	got[g.cfg.Rank] = m
	got[g.cfg.Rank].fd = -1
	for r, c := range g.conns {
		if c == nil {
			continue
		}
		wg.Go(func() {
			err := send(c, m, fd)
			if err == nil || gone(err) { // it may have left a word
				got[r], err = receive(c)
			}
			if err == nil && got[r].kind == kindLeave {
				err = fmt.Errorf("gave up: %s", got[r].text)
			}
			if err == nil && (got[r].kind != m.kind || got[r].seq != m.seq) {
				err = fmt.Errorf("is at step %d of call %d, this rank at step %d of call %d: do all make the same calls in the same order?", got[r].kind, got[r].seq, m.kind, m.seq)
			}
			if err == nil {
				return
			}
			mu.Lock()
			defer mu.Unlock()
			if first == nil {
				if ctx.Err() != nil {
					err = fmt.Errorf("no answer: %w", context.Cause(ctx))
				}
				first = &RankError{Rank: r, Err: err}
				interrupt() // nothing good can come any more
			}
		})
	}
	wg.Wait()
	if !stop() {
		<-interrupted // a context that ended a moment too late must not spoil the next call
		for _, c := range g.conns {
			if c != nil {
				_ = c.SetDeadline(time.Time{})
			}
		}
	}
	if first == nil {
		return got, nil
	}
	closeAll(got)
	g.broken = fmt.Errorf("%w: %w", ErrBroken, first)
	// Who waits for us shall hear whose fault it was, before our silence looks like ours.
	for _, c := range g.conns {
		if c != nil {
			_ = c.SetDeadline(time.Now().Add(100 * time.Millisecond))
			_ = send(c, message{kind: kindLeave, seq: g.seq, text: first.Error()}, -1)
		}
	}
	return nil, g.broken
}
