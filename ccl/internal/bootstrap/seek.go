package bootstrap

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"syscall"
	"time"

	"github.com/lockstep-ccl/lockstep/internal/accept"
)

// A broken connection does not mean that the process at its other end has died: networks
// fail for seconds, and middleboxes reset connections. So the session continues over
// another connection. The member reconnects to the hub, and both say how many frames they
// have received. Meanwhile the hub probes the member's listener. The peer is dead if its
// host refuses connections, if another process listens there, or if its host stays silent
// for longer than Config.Outage (see Control.Patience).

// DefaultOutage is how long a host may be silent before it counts as dead.
const DefaultOutage = 30 * time.Second

const (
	// dialTimeout bounds one attempt to connect. The kernel's own retries back off
	// exponentially, so a new attempt succeeds sooner after an outage.
	dialTimeout = 2 * time.Second
	// maxSilentStep bounds what one attempt and the pause after it add to a host's silence. If
	// they took longer, this process or its machine was stopped and could not hear the host.
	maxSilentStep = dialTimeout + 500*time.Millisecond
	// A process counts as gone if its host ended the connection and then refused `refusals`
	// connections in a row, over at least refusedFor. unprovedMost and unprovedFor bound answers
	// that do not prove the secret.
	refusals     = 2
	refusedFor   = 500 * time.Millisecond
	unprovedMost = 5
	unprovedFor  = time.Second
	// A listener under flood may close connections unanswered, so shuts and shutFor are larger.
	shuts   = 12
	shutFor = 3 * time.Second
)

// reachResult is the result of an attempt to reach a peer's process.
type reachResult uint8

const (
	reachSilent   reachResult = iota // its host did not answer
	reachAnswered                    // its host answered, the process has not
	reachAlive                       // the process answered, and has the session
	reachRefused                     // nothing listens there
	reachUnproved                    // the listener does not prove the secret
	reachClosed                      // the listener closes the connection at once
	reachGone                        // a process of this job listens there, and does not have the session
)

// seek tries to reach p until p has a connection again or its session is over. cause is the
// error that ended the last connection.
func (c *Control) seek(p *peer, cause error) {
	silent := time.Duration(0)
	if errors.Is(cause, syscall.ETIMEDOUT) {
		silent = userTimeout
	}
	addr := c.members[p.rank].Addr
	refused, unproved, shut := 0, 0, 0
	var refusedSince, unprovedSince, shutSince time.Time
	ended := hostEnded(cause) // if not, a middlebox may refuse in the host's place
	last := cause
	for try, b := uint64(1), newBackoff(); ; try++ {
		until, ok := c.seeking(p)
		if !ok {
			return
		}
		began := time.Now()
		is, err := c.reach(p, addr, until)
		if err != nil {
			last = err
		}
		count := func(n *int, yes bool) { // counts results in a row
			if *n++; !yes {
				*n = 0
			}
		}
		if is == reachRefused && !ended && until.IsZero() {
			is = reachSilent
		}
		if count(&refused, is == reachRefused); refused == 1 {
			refusedSince = began
		}
		if count(&unproved, is == reachUnproved); unproved == 1 {
			unprovedSince = began
		}
		if count(&shut, is == reachClosed); shut == 1 {
			shutSince = began
		}
		reason := ""
		switch {
		case refused >= refusals && time.Since(refusedSince) >= refusedFor:
			reason = "its process is gone: nothing listens at " + addr
			if errors.Is(cause, io.EOF) {
				reason = "its process ended without leaving"
			}
		case is == reachGone:
			reason = "its process has closed the communicator, or another has taken its place: " + err.Error()
		case is == reachAnswered && !until.IsZero():
			reason = "control connection: its process takes no more words"
		case unproved >= unprovedMost && time.Since(unprovedSince) >= unprovedFor, shut >= shuts && time.Since(shutSince) >= shutFor:
			reason = fmt.Sprintf("something else listens at %s: %v", addr, err)
		case is == reachSilent && silent+min(time.Since(began), maxSilentStep) >= c.bound():
			reason = fmt.Sprintf("nothing has come from its host for %v, in which %d connections to %s failed, the last with: %v; before: %v",
				(silent + min(time.Since(began), maxSilentStep)).Round(time.Second), try, addr, last, cause)
		}
		if is != reachSilent {
			silent = 0
		}
		if reason != "" {
			c.mu.Lock()
			if p.disconnected() {
				c.dropPeer(p, reason)
			}
			c.mu.Unlock()
			return
		}
		p.pause(b.step())
		silent += min(time.Since(began), maxSilentStep)
	}
}

// hostEnded reports whether err says that the other host ended the connection, rather than
// fell silent.
func hostEnded(err error) bool {
	for _, e := range []error{io.EOF, io.ErrUnexpectedEOF, syscall.ECONNRESET, syscall.EPIPE, net.ErrClosed} {
		if errors.Is(err, e) {
			return true
		}
	}
	return false
}

// disconnected reports whether the session has no connection and is not over. c.mu is held.
func (p *peer) disconnected() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.conn == nil && !p.over
}

// Seeking reports whether a session of this rank has lost its connection and seeks another.
func (c *Control) Seeking() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, p := range c.peers {
		if p != nil && p.disconnected() {
			return true
		}
	}
	return false
}

// seeking reports whether p still seeks a connection. until is when a finished session gives
// up, zero for others. seeking ends a session whose time is up.
func (c *Control) seeking(p *peer) (until time.Time, ok bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	p.mu.Lock()
	until, finished, failed := p.until, p.finished, p.failed
	done := p.conn != nil || p.over
	p.mu.Unlock()
	switch {
	case done:
		return until, false
	case failed != nil:
		c.dropPeer(p, failed.Error())
		return until, false
	case finished && time.Now().After(until):
		c.dropPeer(p, "control connection: no more words could be sent")
		return until, false
	}
	return until, true
}

// pause waits for d. It returns early if the session gets a connection, finishes or ends.
func (p *peer) pause(d time.Duration) {
	p.mu.Lock()
	defer p.mu.Unlock()
	done := false
	t := time.AfterFunc(d, func() {
		p.mu.Lock()
		done = true
		p.mu.Unlock()
		p.some.Broadcast()
	})
	defer t.Stop()
	finished := p.finished
	for !done && p.conn == nil && !p.over && p.finished == finished {
		p.some.Wait()
	}
}

// bound returns how long a host may be silent.
func (c *Control) bound() time.Duration {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.patience
}

// reach tries to reach a peer's process at addr. On a member it resumes the session with the
// hub. On the hub it only asks whether the member still has the session: the member
// reconnects. The error says why the result is not reachAlive.
func (c *Control) reach(p *peer, addr string, until time.Time) (reachResult, error) {
	d := net.Dialer{Timeout: dialTimeout, Deadline: until, KeepAlive: -1}
	conn, err := accept.Dial(context.Background(), &d, addr)
	if err != nil {
		if errors.Is(err, syscall.ECONNREFUSED) {
			return reachRefused, err
		}
		return reachSilent, err
	}
	connected := time.Now()
	taken := false
	defer func() {
		if !taken {
			conn.Close()
		}
	}()
	watchHost(conn)
	deadline := connected.Add(handshakeTimeout)
	if !until.IsZero() {
		deadline = connected.Add(flushTimeout)
	}
	conn.SetDeadline(deadline)
	t, f, err := c.ask(conn, p)
	if err != nil {
		if time.Since(connected) < handshakeTimeout/2 {
			switch {
			case errors.Is(err, ErrSecret), errors.Is(err, ErrProtocol):
				return reachUnproved, err
			case closedByPeer(err), errors.Is(err, syscall.EPIPE):
				return reachClosed, err
			}
		}
		if errors.Is(err, os.ErrDeadlineExceeded) {
			err = fmt.Errorf("its host answers, its process does not: %w", err)
		}
		return reachAnswered, err
	}
	switch t {
	case framePresent:
		if c.rank == 0 {
			return reachAlive, nil
		}
	case frameResumed:
		if c.rank == 0 {
			break
		}
		got := f.u64()
		conn.SetDeadline(time.Time{})
		c.mu.Lock()
		defer c.mu.Unlock()
		if taken = f.ok() && c.resumed(p, conn, got, nil); taken {
			return reachAlive, nil
		}
	case frameAbsent, frameRetry:
		return reachGone, fmt.Errorf("%s does not know it", addr)
	}
	return reachUnproved, fmt.Errorf("%w: frame type %d from %s", ErrProtocol, t, addr)
}

// ask does the handshake on conn, sends resume or probe, and returns the answer.
func (c *Control) ask(conn net.Conn, p *peer) (frameType, fields, error) {
	if err := clientHandshake(conn, c.secret, version, c.id.Token); err != nil {
		return 0, fields{}, err
	}
	p.mu.Lock()
	p.tries++
	w := wanted{rank: p.rank, instance: p.instance, from: c.rank, fromInstance: c.instance, try: p.tries, got: p.got}
	p.mu.Unlock()
	t := frameResume
	if c.rank == 0 {
		t = frameProbe
	}
	if _, err := conn.Write(w.encode(t)); err != nil {
		return 0, fields{}, err
	}
	return readFrame(conn, maxAnswer)
}

// resumed continues p's session over conn. It sends the frames from number got on; the peer has
// the earlier ones. first makes a frame to be sent before those. resumed returns false if the
// session is over or got is out of range. c.mu is held.
func (c *Control) resumed(p *peer, conn net.Conn, got uint64, first func() []byte) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.over || !p.acknowledged(got) {
		return false
	}
	var b []byte
	if first != nil {
		b = first()
	}
	p.attach(conn, b)
	return true
}

// wanted has the fields of frameResume and frameProbe: which session is wanted, and how many
// frames its sender has received.
type wanted struct {
	rank, from             int    // receiver and sender
	instance, fromInstance uint64 // of their Joins
	try                    uint64 // number of the attempt: a later one voids it
	got                    uint64 // number of frames received
}

// maxAnswer bounds the frame that answers resume or probe, in bytes.
const maxAnswer = 64

func (w wanted) encode(t frameType) []byte {
	b := appendU32(appendU32(frame(t), uint32(w.rank)), uint32(w.from))
	for _, v := range []uint64{w.instance, w.fromInstance, w.try, w.got} {
		b = appendU64(b, v)
	}
	return seal(b)
}

func decodeWanted(f fields) (wanted, bool) {
	w := wanted{rank: int(int32(f.u32())), from: int(int32(f.u32())), instance: f.u64(), fromInstance: f.u64(), try: f.u64(), got: f.u64()}
	return w, f.ok()
}

// handleReconnect answers frame f, resume or probe, on an authenticated connection. c is nil if
// this process has no such member.
func (c *Control) handleReconnect(conn net.Conn, t frameType, f fields) {
	w, ok := decodeWanted(f)
	answer := frameAbsent
	if c != nil && ok {
		watchHost(conn)
		c.mu.Lock()
		p := c.peer(w.from)
		switch {
		case w.rank != c.rank || w.instance != c.instance:
		case c.state == stateJoining:
			answer = framePresent // this rank waits for the roster
		case p != nil && p.instance == w.fromInstance:
			if t == frameProbe {
				answer = framePresent
			} else if c.rank == 0 && w.try > p.try {
				p.try = w.try
				conn.SetDeadline(time.Time{})
				if c.resumed(p, conn, w.got, func() []byte { return seal(appendU64(frame(frameResumed), p.got)) }) {
					c.mu.Unlock()
					return
				}
			}
		}
		c.mu.Unlock()
	}
	conn.SetDeadline(time.Now().Add(flushTimeout))
	hangUp(conn, seal(frame(answer)))
}
