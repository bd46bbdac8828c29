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

// A broken connection says nothing about the process at its other end: networks fail
// for seconds, middleboxes reset. So the session goes on over another connection. A
// member reconnects to the hub, and both say how many frames they have received. The
// hub waits for that, and probes the member's listener meanwhile. A refusal, or another
// process there, means that the peer is gone; silence is borne for Control.Patience.

// DefaultOutage is how long a host may be silent before it counts as dead.
const DefaultOutage = 30 * time.Second

const (
	// knockTimeout bounds one attempt to connect: the kernel's own retries back off
	// exponentially.
	knockTimeout = 2 * time.Second
	// knockMost caps what one attempt and the pause after it add to a host's silence. Beyond it,
	// this process or its machine was stopped, and could hear nothing.
	knockMost = knockTimeout + 500*time.Millisecond
	// A process is gone after this many refusals in a row, over this long, if its host ended the
	// connection. Listeners that prove nothing (strangers) count likewise.
	refusals    = 2
	refusedFor  = 500 * time.Millisecond
	strangers   = 5
	strangerFor = time.Second
	// A flood can also evict a connection before it gets an answer: more of those are needed.
	shuts   = 12
	shutFor = 3 * time.Second
)

// knocked is the result of an attempt to reach a peer's process.
type knocked uint8

const (
	knockSilent   knocked = iota // its host did not answer
	knockAnswered                // its host answered, the process has not
	knockAlive                   // the process answered, and has the session
	knockRefused                 // nothing listens there
	knockStranger                // what listens there proves nothing
	knockShut                    // what listens there hangs up at once
	knockGone                    // a process of this job listens there, and knows no such session
)

// seek returns when p has a connection again, or is over. cause is why it has none.
func (c *Control) seek(p *peer, cause error) {
	silent := time.Duration(0)
	if errors.Is(cause, syscall.ETIMEDOUT) {
		silent = userTimeout
	}
	addr := c.members[p.rank].Addr
	refused, strange, shut := 0, 0, 0
	var refusedSince, strangeSince, shutSince time.Time
	ended := hostEnded(cause) // otherwise a middlebox may be what refuses
	last := cause
	for try, b := uint64(1), newBackoff(); ; try++ {
		until, ok := c.seeking(p)
		if !ok {
			return
		}
		began := time.Now()
		is, err := c.knock(p, addr, until)
		if err != nil {
			last = err
		}
		count := func(n *int, yes bool) {
			if *n++; !yes {
				*n = 0
			}
		}
		if is == knockRefused && !ended && until.IsZero() {
			is = knockSilent
		}
		if count(&refused, is == knockRefused); refused == 1 {
			refusedSince = began
		}
		if count(&strange, is == knockStranger); strange == 1 {
			strangeSince = began
		}
		if count(&shut, is == knockShut); shut == 1 {
			shutSince = began
		}
		reason := ""
		switch {
		case refused >= refusals && time.Since(refusedSince) >= refusedFor:
			reason = "its process is gone: nothing listens at " + addr
			if errors.Is(cause, io.EOF) {
				reason = "its process ended without leaving"
			}
		case is == knockGone:
			reason = "its process has closed the communicator, or another has taken its place: " + err.Error()
		case is == knockAnswered && !until.IsZero():
			reason = "control connection: its process takes no more words"
		case strange >= strangers && time.Since(strangeSince) >= strangerFor, shut >= shuts && time.Since(shutSince) >= shutFor:
			reason = fmt.Sprintf("something else listens at %s: %v", addr, err)
		case is == knockSilent && silent+min(time.Since(began), knockMost) >= c.bound():
			reason = fmt.Sprintf("nothing has come from its host for %v, in which %d connections to %s failed, the last with: %v; before: %v",
				(silent + min(time.Since(began), knockMost)).Round(time.Second), try, addr, last, cause)
		}
		if is != knockSilent {
			silent = 0
		}
		if reason != "" {
			c.mu.Lock()
			if p.lost() {
				c.hungUp(p, reason)
			}
			c.mu.Unlock()
			return
		}
		p.pause(b.step())
		silent += min(time.Since(began), knockMost)
	}
}

// hostEnded reports whether the other host ended a connection, rather than fell silent.
func hostEnded(err error) bool {
	for _, e := range []error{io.EOF, io.ErrUnexpectedEOF, syscall.ECONNRESET, syscall.EPIPE, net.ErrClosed} {
		if errors.Is(err, e) {
			return true
		}
	}
	return false
}

// lost reports whether the session seeks a connection. c.mu is held.
func (p *peer) lost() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.conn == nil && !p.over
}

// Seeking reports whether a session of this rank seeks a connection.
func (c *Control) Seeking() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, p := range c.peers {
		if p != nil && p.lost() {
			return true
		}
	}
	return false
}

// seeking reports whether p still wants a connection, and until when.
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
		c.hungUp(p, failed.Error())
		return until, false
	case finished && time.Now().After(until):
		c.hungUp(p, "control connection: no more words could be sent")
		return until, false
	}
	return until, true
}

// pause waits for d, or until the session's state changes.
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

func (c *Control) bound() time.Duration {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.patience
}

// knock tries to reach a peer's process: a member resumes its session with the hub, the
// hub probes for a member.
func (c *Control) knock(p *peer, addr string, until time.Time) (knocked, error) {
	d := net.Dialer{Timeout: knockTimeout, Deadline: until, KeepAlive: -1}
	conn, err := accept.Dial(context.Background(), &d, addr)
	if err != nil {
		if errors.Is(err, syscall.ECONNREFUSED) {
			return knockRefused, err
		}
		return knockSilent, err
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
				return knockStranger, err
			case hungUp(err), errors.Is(err, syscall.EPIPE):
				return knockShut, err
			}
		}
		if errors.Is(err, os.ErrDeadlineExceeded) {
			err = fmt.Errorf("its host answers, its process does not: %w", err)
		}
		return knockAnswered, err
	}
	switch t {
	case framePresent:
		if c.rank == 0 {
			return knockAlive, nil
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
			return knockAlive, nil
		}
	case frameAbsent, frameRetry:
		return knockGone, fmt.Errorf("%s does not know it", addr)
	}
	return knockStranger, fmt.Errorf("%w: frame type %d from %s", ErrProtocol, t, addr)
}

// ask authenticates conn, sends resume or probe, and returns the answer.
func (c *Control) ask(conn net.Conn, p *peer) (frameType, fields, error) {
	if err := introduce(conn, c.secret, version, c.id.Token); err != nil {
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

// resumed goes on with p's session over conn; the peer has received got frames. c.mu is held.
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

// wanted has the fields of frameResume and frameProbe: which session, and how far it got.
type wanted struct {
	rank, from             int // in the communicator
	instance, fromInstance uint64
	try                    uint64 // an attempt that a later one has overtaken is void
	got                    uint64 // number of frames received
}

// maxAnswer bounds the answer to it, in bytes.
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

// comeback answers resume or probe on an authenticated connection. c is nil when this
// process has no such member.
func (c *Control) comeback(conn net.Conn, t frameType, f fields) {
	w, ok := decodeWanted(f)
	answer := frameAbsent
	if c != nil && ok {
		watchHost(conn)
		c.mu.Lock()
		p := c.peer(w.from)
		switch {
		case w.rank != c.rank || w.instance != c.instance:
		case c.state == stateJoining:
			answer = framePresent // the roster is yet to come
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
