package bootstrap

import (
	"context"
	"errors"
	"fmt"
	"net"
	"syscall"
	"time"
)

// conflictGrace is how long a failed rendezvous waits for ranks that do not know yet.
const conflictGrace = 2 * time.Second

// host runs the rendezvous on rank 0. It returns when all ranks have joined, or when
// those that came know why not. probe has the addresses where members that run must
// listen already (nil: they may still be starting).
func (c *Control) host(ctx context.Context, ln *Listener, probe []string) error {
	c.members[0].Addr = c.id.Addr
	c.family = ln.hold()
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
	// Waiting ranks learn who is missing, so that their own timeouts can say it.
	tick := time.NewTicker(200 * time.Millisecond)
	defer tick.Stop()
	told := 0
	for {
		select {
		case <-c.ready:
			return nil
		case <-c.doomed:
			return c.giveUp(ctx)
		case <-ctx.Done():
			missing := c.missing()
			if len(missing.Ranks) == 0 {
				continue // it has just become complete
			}
			c.doom(missing)
			return fmt.Errorf("%w: %w", c.giveUp(ctx), context.Cause(ctx))
		case <-tick.C:
			told = c.tellMissing(told)
		}
	}
}

// probe dooms the rendezvous when the process of a missing member is gone: its kernel
// refuses connections where it listened.
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
					c.doom(&LostError{Rank: r, Reason: "its process is gone"})
					return
				}
			}
		}
	}()
	return func() { cancel(); <-done }
}

// reject counts a connection that named this rendezvous and could not prove the secret.
func (c *Control) reject(from net.Addr) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.rejected++
	c.detail = fmt.Sprintf("last from %s", from)
}

// tellMissing tells waiting ranks who is missing if the number of those differs from last,
// and returns the number last sent. It sends nothing once the rendezvous is complete: to a
// joined member the frame violates the protocol.
func (c *Control) tellMissing(last int) int {
	c.mu.Lock()
	defer c.mu.Unlock()
	missing := c.missingLocked()
	if n := len(missing.Ranks); c.state == stateJoining && n != last {
		c.broadcastLocked(encodeMissing(framePending, missing))
		return n
	}
	return last
}

// missing returns the ranks that have not joined yet.
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

// arrive takes an authenticated connection that names this rendezvous.
func (c *Control) arrive(conn net.Conn, f fields, theirs uint16) {
	watchHost(conn)
	h, conflict := c.check(conn, f, theirs)
	c.mu.Lock()
	defer c.mu.Unlock()
	switch c.state {
	case stateClosed:
		conn.Close()
		return
	case stateJoined:
		// A rank that lost its connection before the roster came begins anew.
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
		if old.instance == h.instance { // the same rank, reconnecting
			c.peers[h.rank] = nil
			old.finish()
		} else {
			conflict = &ConflictError{Rank: h.rank, Err: ErrDuplicateRank, Detail: "a second process claims it, from " + conn.RemoteAddr().String()}
		}
	}
	if conflict != nil {
		c.doomLocked(conflict)
	}
	if c.verdict != nil {
		c.dismiss(conn, h.rank, c.verdict)
		return
	}
	c.members[h.rank] = Member{Addr: h.addr, Info: h.info}
	c.admit(conn, h.rank, h.instance, 0)
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
		h := hello{rank: int(int32(f.u32()))} // the first field of every version's hello
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

func (c *Control) doom(verdict error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.doomLocked(verdict)
}

// doomLocked gives up a rendezvous that is not complete, and tells the waiting ranks.
func (c *Control) doomLocked(verdict error) {
	if c.state != stateJoining || c.verdict != nil {
		return
	}
	c.verdict = verdict
	c.broadcastLocked(encodeFailure(verdict))
	for r, p := range c.peers {
		if p != nil {
			c.told[r] = true
		}
	}
	if lost := (*LostError)(nil); errors.As(verdict, &lost) {
		c.told[lost.Rank] = true // it cannot hear the verdict
	}
	close(c.doomed)
}

// dismiss refuses a connection, and says why.
func (c *Control) dismiss(conn net.Conn, rank int, why error) {
	c.told[rank] = true
	c.wg.Go(func() {
		conn.SetDeadline(time.Now().Add(flushTimeout))
		hangUp(conn, encodeFailure(why))
	})
}

// giveUp ends a doomed rendezvous once all ranks know, conflictGrace is over or ctx ends.
func (c *Control) giveUp(ctx context.Context) error {
	deadline := time.Now().Add(conflictGrace)
	for {
		c.mu.Lock()
		verdict, told := c.verdict, len(c.told)
		c.mu.Unlock()
		if told >= c.size-1 || ctx.Err() != nil || time.Now().After(deadline) {
			return c.fail(verdict)
		}
		time.Sleep(5 * time.Millisecond)
	}
}
