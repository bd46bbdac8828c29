package bootstrap

import (
	"context"
	"errors"
	"fmt"
	"net"
	"syscall"
	"time"
)

// conflictGrace is how long rank 0 keeps a failed rendezvous open. Ranks that come meanwhile
// learn why it failed.
const conflictGrace = 2 * time.Second

// host runs the rendezvous on rank 0. It returns when all ranks have joined, or when it has
// told the ranks that came why the rendezvous failed. probe has the members' listener
// addresses if they run already, and is nil if they may still be starting.
func (c *Control) host(ctx context.Context, ln *Listener, probe []string) error {
	c.members[0].Addr = c.id.Addr
	c.listener = ln.hold()
	if c.size == 1 {
		c.state = stateJoined
		return nil
	}
	if err := ln.setRoute(c.id.Token, c); err != nil {
		return c.fail(err)
	}
	if len(probe) > 0 {
		stop := c.probe(ctx, probe)
		defer stop()
	}
	// Ranks that wait are told who is missing, so that their own timeout errors can say so.
	tick := time.NewTicker(200 * time.Millisecond)
	defer tick.Stop()
	for {
		select {
		case <-c.ready:
			return nil
		case <-c.joinFailed:
			return c.giveUp(ctx)
		case <-ctx.Done():
			missing := c.missing()
			if len(missing.Ranks) == 0 {
				continue // the last rank has just joined
			}
			c.failJoin(missing)
			return fmt.Errorf("%w: %w", c.giveUp(ctx), context.Cause(ctx))
		case <-tick.C:
			c.tellMissing()
		}
	}
}

// probe fails the rendezvous when the process of a missing member is gone. Its kernel then
// refuses connections at its address.
func (c *Control) probe(ctx context.Context, addrs []string) (stop func()) {
	ctx, cancel := context.WithCancel(ctx)
	done := make(chan struct{})
	go func() {
		defer close(done)
		tick := time.NewTicker(250 * time.Millisecond)
		defer tick.Stop()
		for {
			select {
			case <-ctx.Done():
				return
			case <-tick.C:
			}
			for _, r := range c.missing().Ranks {
				d := net.Dialer{Timeout: time.Second}
				conn, err := d.DialContext(ctx, "tcp", addrs[r])
				if err == nil {
					conn.Close()
				} else if errors.Is(err, syscall.ECONNREFUSED) {
					c.failJoin(&LostError{Rank: r, Reason: "its process is gone"})
					return
				}
			}
		}
	}()
	return func() { cancel(); <-done }
}

// reject counts a connection that named this rendezvous and did not prove the secret. The waiting
// ranks learn the count each time that it has doubled, so that a flood makes rank 0 send little.
func (c *Control) reject(from net.Addr) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.rejected++
	c.detail = fmt.Sprintf("last from %s", from)
	if c.rejected&(c.rejected-1) == 0 {
		c.untold = true
	}
}

// tellMissing tells the waiting ranks who is missing, if they do not know it yet. It sends nothing
// after the roster, since the frame would then violate the protocol.
func (c *Control) tellMissing() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.state == stateJoining && c.untold {
		c.untold = false
		c.broadcastLocked(encodeMissing(framePending, c.missingLocked()))
	}
}

// missing returns the ranks that have not joined, as the error to report.
func (c *Control) missing() *MissingError {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.missingLocked()
}

func (c *Control) missingLocked() *MissingError {
	e := &MissingError{Size: c.size, Rejected: c.rejected, Detail: c.detail}
	for r := 1; r < c.size; r++ {
		if c.peers[r] == nil {
			e.Ranks = append(e.Ranks, r)
		}
	}
	return e
}

// handleHello admits the rank that sent hello f over an authenticated connection, or refuses
// it. theirs is its protocol version.
func (c *Control) handleHello(conn net.Conn, f fields, theirs uint16) {
	watchHost(conn)
	h, conflict := c.check(conn, f, theirs)
	c.mu.Lock()
	defer c.mu.Unlock()
	switch c.state {
	case stateClosed:
		conn.Close()
		return
	case stateJoined:
		// A rank whose connection broke before the roster arrived joins again. Its session
		// sends all frames from the first.
		if old := c.peer(h.rank); conflict == nil && old != nil && old.instance == h.instance && c.resumed(old, conn, 0, nil) {
			return
		}
		if conflict == nil {
			conflict = &ConflictError{Rank: h.rank, Err: ErrDuplicateRank, Detail: "the communicator is complete"}
		}
		c.dismiss(conn, h.rank, conflict)
		return
	}
	if old := c.peer(h.rank); conflict == nil && old != nil {
		if old.instance == h.instance { // the same Join, over another connection
			c.peers[h.rank] = nil
			old.finish()
		} else {
			conflict = &ConflictError{Rank: h.rank, Err: ErrDuplicateRank, Detail: "a second process claims it, from " + conn.RemoteAddr().String()}
		}
	}
	if conflict != nil {
		c.failJoinLocked(conflict)
	}
	if c.joinErr != nil {
		c.dismiss(conn, h.rank, c.joinErr)
		return
	}
	c.members[h.rank] = Member{Addr: h.addr, Info: h.info}
	c.admit(conn, h.rank, h.instance, 0)
	c.untold = true
	for _, p := range c.peers[1:] {
		if p == nil {
			return
		}
	}
	c.state = stateJoined
	c.broadcastLocked(encodeRoster(c.members, c.instance))
	close(c.ready)
}

// check compares a rank's hello with rank 0's configuration.
func (c *Control) check(conn net.Conn, f fields, theirs uint16) (hello, error) {
	if theirs != version {
		h := hello{rank: int(int32(f.u32()))} // hello begins with the rank in every version
		return h, &ConflictError{Rank: h.rank, Err: ErrVersion, Detail: fmt.Sprintf("it speaks version %d, rank 0 speaks %d", theirs, version)}
	}
	h, ok := decodeHello(f)
	switch {
	case !ok:
		return h, &ConflictError{Rank: h.rank, Err: ErrVersion, Detail: "its hello is malformed"}
	case h.size != c.size:
		return h, &ConflictError{Rank: h.rank, Err: ErrSize, Detail: fmt.Sprintf("it says %d, rank 0 says %d", h.size, c.size)}
	case len(h.info) > MaxBlob(c.size) || len(h.addr) > maxAddr:
		return h, &ConflictError{Rank: h.rank, Err: ErrVersion, Detail: "its hello is longer than a roster of all takes"}
	case h.rank == 0:
		return h, &ConflictError{Rank: 0, Err: ErrDuplicateRank, Detail: "a second process claims it, from " + conn.RemoteAddr().String()}
	case h.rank < 0 || h.rank >= c.size:
		return h, &ConflictError{Rank: h.rank, Err: ErrRank, Detail: fmt.Sprintf("size is %d", c.size)}
	}
	return h, nil
}

// failJoin is failJoinLocked for a caller without c.mu.
func (c *Control) failJoin(err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.failJoinLocked(err)
}

// failJoinLocked makes the rendezvous fail with err, and tells the waiting ranks. It does nothing
// if the rendezvous is complete or has failed already.
func (c *Control) failJoinLocked(err error) {
	if c.state != stateJoining || c.joinErr != nil {
		return
	}
	c.joinErr = err
	c.broadcastLocked(encodeFailure(err))
	for r, p := range c.peers {
		if p != nil {
			c.informed[r] = true
		}
	}
	if lost := (*LostError)(nil); errors.As(err, &lost) {
		c.informed[lost.Rank] = true // it is gone, so giveUp need not wait for it
	}
	close(c.joinFailed)
}

// dismiss refuses the connection of a rank and tells it why. It does not wait for the write.
func (c *Control) dismiss(conn net.Conn, rank int, why error) {
	c.informed[rank] = true
	c.wg.Go(func() {
		conn.SetDeadline(time.Now().Add(flushTimeout))
		hangUp(conn, encodeFailure(why))
	})
}

// giveUp ends a failed rendezvous when every rank knows why, conflictGrace is over, or ctx
// ends. It returns why.
func (c *Control) giveUp(ctx context.Context) error {
	deadline := time.Now().Add(conflictGrace)
	for {
		c.mu.Lock()
		err, informed := c.joinErr, len(c.informed)
		c.mu.Unlock()
		if informed >= c.size-1 || ctx.Err() != nil || time.Now().After(deadline) {
			return c.fail(err)
		}
		time.Sleep(5 * time.Millisecond)
	}
}
