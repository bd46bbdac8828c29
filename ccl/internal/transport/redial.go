package transport

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"syscall"
	"time"

	"github.com/lockstep-ccl/lockstep/record"
	"golang.org/x/sys/unix"
)

const (
	// dialTimeout bounds one attempt to connect: the kernel's own retries come at longer
	// and longer intervals.
	dialTimeout = 2 * time.Second
	// firstYield is Bounds.Attempt in an outage, in which the peer's attempt may go by what is broken. It doubles
	// with each attempt of this end's own.
	firstYield = 50 * time.Millisecond
	// handshakeSilence is how long a connection in its handshake may be unacknowledged.
	handshakeSilence = 3 * time.Second
	// The process is gone after so many refusals in a row over so long a time, if the peer's host
	// has ended the connection. The same holds for peers that cannot prove the key.
	refusals     = 2
	refusedFor   = 500 * time.Millisecond
	unprovedMost = 5
	unprovedFor  = time.Second
	// A listener under flood may close a connection without an answer, so more of those are
	// needed.
	shuts   = 12
	shutFor = 3 * time.Second
)

var (
	errGone     = errors.New("nothing listens there any more")
	errStranger = errors.New("what listens there does not know this communicator")
	errOver     = errors.New("the peer has given the link up")
)

// attemptMost is the most that one attempt and the pause after it count of a host's silence.
// What takes longer is this process, stopped or frozen with its machine, which hears nothing then.
const attemptMost = dialTimeout + 500*time.Millisecond

// hears notes that the peer's host has answered. t.mu is held.
func (t *connector) hears() { t.silent, t.since = 0, record.Now() }

// quiet is for how long nothing has come from the peer's host while this end tried to reach
// it. t.mu is held.
func (t *connector) quiet() time.Duration {
	if t.waiting > 0 {
		t.hears()
	}
	return t.silent + min(time.Duration(record.Now()-t.since), attemptMost)
}

// try begins another attempt to connect. t.mu is held.
func (t *connector) try() {
	t.silent, t.since = t.quiet(), record.Now()
	t.tries++
}

// unheard is why a link ends whose peer's host has been silent for as long as it may be.
func (n *network) unheard(rank, tries int, quiet time.Duration, last error) error {
	return fmt.Errorf("nothing came from its host for %v, in which %d connections to %s failed, the last with: %w",
		quiet.Round(time.Second), tries, n.m.infos[rank].Addr, last)
}

// seek has a goroutine connect to a peer again, after the set of this number has failed.
func (n *network) seek(l remote, rank int, number uint32) {
	t := l.connecting()
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.whole > number {
		return // there is a newer one
	}
	moving := t.moving && t.path != nil && !t.seeking
	if t.lost, t.moving = number, moving; t.seeking {
		return
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.closed {
		return
	}
	if t.seeking, t.tries = true, 0; t.searching {
		return // it goes on
	}
	t.searching = true
	n.wg.Go(func() { n.redial(l, rank) })
}

// forget ends the search for another path.
func (n *network) forget(l remote) {
	t := l.connecting()
	t.mu.Lock()
	defer t.mu.Unlock()
	t.moving = false
	if t.seeking = false; t.dial != nil {
		t.dial()
	}
}

// dialled tells of the search: its attempts, for how long nothing has come from the peer's
// host, and the last error.
func (t *connector) dialled() (tries int, quiet time.Duration, last error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.tries, t.quiet(), t.last
}

// redial connects until there is a set of sockets, or no use in that.
func (n *network) redial(l remote, rank int) {
	t := l.connecting()
	addr := n.m.infos[rank].Addr
	var refused, unproved, shut streak
	for wait := 2 * time.Millisecond; ; wait = min(2*wait, 250*time.Millisecond) {
		t.mu.Lock()
		if !t.seeking || t.whole > t.lost || n.m.ctx.Err() != nil || n.m.cfg.Err() != nil {
			t.seeking, t.searching = false, false
			t.mu.Unlock()
			return
		}
		if t.yields(record.Now(), n.m.cfg.Bounds.Attempt) {
			t.mu.Unlock()
			n.pause(10 * time.Millisecond)
			continue
		}
		t.discard()
		t.number = max(t.number, t.whole) + 1
		t.attempt, t.dialing = newNonce(), true
		attempt, number := t.attempt, t.number
		t.try()
		ctx, cancel := context.WithCancel(n.m.ctx)
		t.dial = cancel
		t.mu.Unlock()

		began := time.Now()
		status, newer, err := n.connect(ctx, l, rank, attempt, number)
		cancel()
		if err != nil || status != replyOK {
			t.withdraw(attempt)
		}
		t.mu.Lock()
		switch {
		case status == replyStale:
			t.number = max(t.number, newer)
		case status == replyBusy && t.whole <= t.lost:
			t.theirs = record.Now() // it is on its way
		}
		if err != nil {
			t.last = err
		}
		t.dial = nil
		ended := t.ended
		t.mu.Unlock()
		switch {
		case status == replyOver:
			n.giveUp(t, errOver)
			return
		case errors.Is(err, syscall.ECONNREFUSED):
			// Through a silent network a middlebox may refuse, too.
			if !ended {
				refused = streak{}
				break
			}
			if refused.more(began); refused.reached(refusals, refusedFor) {
				n.giveUp(t, fmt.Errorf("%s: %w", addr, errGone))
				return
			}
		case err != nil && proofless(err) && time.Since(began) < dataTimeout/2:
			shut.more(began)
			if unproved.more(began); !errors.Is(err, ErrCorrupt) {
				unproved = streak{}
			}
			if unproved.reached(unprovedMost, unprovedFor) || shut.reached(shuts, shutFor) {
				n.giveUp(t, fmt.Errorf("%s: %w: %w", addr, errStranger, err))
				return
			}
			refused = streak{}
		default:
			refused, unproved, shut = streak{}, streak{}, streak{}
		}
		n.pause(wait/2 + rand.N(wait))
	}
}

// yields reports whether the peer's own attempt gets on. Over a network with full queues, two ends that overtake
// each other's attempts never finish one. t.mu is held.
func (t *connector) yields(now int64, most time.Duration) bool {
	if !t.moving { // else nothing is lost meanwhile
		most = min(most, firstYield<<min(t.tries, 8))
	}
	return t.theirs != 0 && !t.dialing && now-t.theirs < int64(most)
}

// streak is how often one thing has come in a row, and since when.
type streak struct {
	n     int
	since time.Time
}

func (s *streak) more(at time.Time) {
	if s.n++; s.n == 1 {
		s.since = at
	}
}

func (s *streak) reached(n int, d time.Duration) bool { return s.n >= n && time.Since(s.since) >= d }

// proofless reports whether a connection was made, and ended without a proof.
func proofless(err error) bool {
	return errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) || errors.Is(err, syscall.ECONNRESET) || errors.Is(err, syscall.EPIPE) || errors.Is(err, ErrCorrupt)
}

func (n *network) giveUp(t *connector, err error) {
	t.mu.Lock()
	if t.seeking && t.whole <= t.lost && !t.moving { // else there is a path
		t.fail(err)
	}
	t.seeking, t.searching, t.moving = false, false, false
	t.mu.Unlock()
	n.m.Wake()
}

func (n *network) pause(d time.Duration) {
	select {
	case <-n.m.ctx.Done():
	case <-time.After(d):
	}
}

// connect dials all sockets of an attempt, until one is not taken.
func (n *network) connect(ctx context.Context, l remote, rank int, attempt [16]byte, number uint32) (status byte, theirs uint32, err error) {
	total := n.sockets(rank)
	mine := total
	t := l.connecting()
	t.mu.Lock()
	halves, move := n.planned(rank), t.moving || t.between
	if halves && t.plain != 0 && record.Now()-t.plain < int64(n.m.cfg.Bounds.Plain) {
		halves, total = false, total/2
		mine = total
	}
	t.mu.Unlock()
	if halves {
		mine = total / 2
	}
	ports := n.ports(ctx, l, rank, mine)
	open := func(ctx context.Context, i int) answer {
		g := dataGreeting{src: n.m.cfg.Rank, dst: rank, index: i, total: total, attempt: attempt, number: number, halves: halves, move: move}
		fd, status, theirs, err := n.greet(ctx, g, ports[i])
		if err == nil && status == replyOK {
			n.add(l, g, fd)
		}
		return answer{status, theirs, err}
	}
	// The first tells whether the attempt stands; the rest need not wait for each other.
	a := open(ctx, 0)
	if a.taken() && mine > 1 {
		a = each(ctx, mine-1, func(ctx context.Context, i int) answer { return open(ctx, i+1) })
	}
	if a.taken() && halves {
		n.awaitHalf(ctx, t, number)
	}
	return a.status, a.theirs, a.err
}

// answer is a peer's, to a greeting.
type answer struct {
	status byte
	theirs uint32 // the number of its latest attempt
	err    error
}

func (a answer) taken() bool { return a.err == nil && a.status == replyOK }

// each greets n times at once. When a greeting is not taken it cancels the others, and returns that answer; else
// one of those that are taken.
func each(ctx context.Context, n int, greet func(ctx context.Context, i int) answer) (a answer) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	answers := make(chan answer, n)
	for i := range n {
		go func() { answers <- greet(ctx, i) }()
	}
	for i := range n {
		if got := <-answers; i == 0 || a.taken() && !got.taken() {
			if a = got; !a.taken() {
				cancel()
			}
		}
	}
	return a
}

// greet opens one socket.
func (n *network) greet(ctx context.Context, g dataGreeting, port uint16) (fd int, status byte, theirs uint32, err error) {
	dialling, cancel := context.WithTimeout(ctx, dialTimeout)
	defer cancel()
	conn, err := n.dialFrom(dialling, g.dst, port)
	if err != nil {
		return 0, 0, 0, err
	}
	defer context.AfterFunc(ctx, func() { conn.Close() })()
	if !n.hold(conn) {
		return 0, 0, 0, ErrClosed
	}
	defer n.release(conn)
	defer func() {
		if err != nil || status != replyOK {
			// The next attempt may be from the same port, which TIME_WAIT would keep from it.
			_ = conn.(*net.TCPConn).SetLinger(0)
		}
	}()
	t := n.peer(g.dst).connecting()
	t.wait(1)
	defer t.wait(-1)
	inHandshake(conn, handshakeSilence)
	g.once = newNonce()
	hello := n.encode(g)
	if _, err := conn.Write(hello); err != nil {
		return 0, 0, 0, err
	}
	// A peer that is stopped answers when it goes on; closing ends the wait.
	var b [dataReply]byte
	if _, err := io.ReadFull(conn, b[:]); err != nil {
		return 0, 0, 0, err
	}
	status, theirs, err = n.decodeReply(g.dst, hello, b[:])
	if err != nil || status != replyOK {
		return 0, status, theirs, err
	}
	inHandshake(conn, 0)
	fd, err = detach(conn)
	return fd, status, theirs, err
}

// wait counts connections that the peer's host has answered, and its process has not.
func (t *connector) wait(by int) {
	t.mu.Lock()
	t.waiting += by
	t.hears()
	t.mu.Unlock()
}

// inHandshake has the kernel give a connection up whose peer's host is silent for so long.
func inHandshake(conn net.Conn, silence time.Duration) {
	raw, err := conn.(*net.TCPConn).SyscallConn()
	if err != nil {
		return
	}
	_ = raw.Control(func(fd uintptr) {
		keepPath(int(fd))
		_ = unix.SetsockoptInt(int(fd), unix.IPPROTO_TCP, unix.TCP_USER_TIMEOUT, int(silence.Milliseconds()))
	})
}
