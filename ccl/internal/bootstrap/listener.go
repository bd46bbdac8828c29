package bootstrap

import (
	"crypto/hmac"
	"crypto/rand"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"slices"
	"sync"
	"syscall"
	"time"

	"github.com/lockstep-ccl/lockstep/internal/accept"
	"golang.org/x/sys/unix"
)

const (
	handshakeTimeout = 5 * time.Second
	// The kernel ends a connection whose other host is silent for userTimeout, and seek opens
	// another. A stopped process is not silent: its kernel still answers.
	keepalive   = time.Second
	userTimeout = 3 * time.Second
)

// Listener accepts and authenticates the connections of other ranks, and hands each to the
// communicator that it names. One Listener serves any number of communicators. It is open
// until its last reference is closed, and each Control holds one. It is safe for concurrent
// use.
type Listener struct {
	ln     net.Listener
	secret []byte
	accept *accept.Acceptor

	mu     sync.Mutex
	refs   int
	routes map[[16]byte]*Control  // hubs, by token
	local  map[memberKey]*Control // the other ranks of this process
	passes accept.Seen            // of members, to recognise a replay
	early  []rejection            // of rendezvous that have no hub here yet
}

// rejection is a connection that named a rendezvous and could not prove the secret.
type rejection struct {
	token [16]byte
	from  net.Addr
}

// maxEarly bounds Listener.early. The oldest rejection makes room for a new one.
const maxEarly = 64

// memberKey names one rank of a communicator.
type memberKey struct {
	token [16]byte
	rank  int
}

// Listen opens a Listener at addr (host:port, port 0 for any free one). Its key is that of the
// attempt in LOCKSTEP_FENCE_TOKEN. The caller gives it to Join, which then owns it, or closes it.
func Listen(addr string, secret []byte) (*Listener, error) {
	if len(secret) < minSecret {
		return nil, errNoSecret
	}
	return listen(addr, attemptKey(secret, ""))
}

// listen is Listen with a key from attemptKey as secret.
func listen(addr string, secret []byte) (*Listener, error) {
	ln, err := accept.Listen(addr)
	if err != nil {
		return nil, fmt.Errorf("listen for ranks: %w", err)
	}
	l := &Listener{
		ln: ln, secret: secret, refs: 1,
		routes: make(map[[16]byte]*Control),
		local:  make(map[memberKey]*Control),
	}
	if l.accept, err = accept.New(ln.(*net.TCPListener), accept.Options{Serve: l.serve, PeekSize: greetingSize, Inspect: l.inspect}); err != nil {
		ln.Close()
		return nil, fmt.Errorf("listen for ranks: %w", err)
	}
	return l, nil
}

// Addr returns the address that the Listener is bound to, host:port.
func (l *Listener) Addr() string { return l.ln.Addr().String() }

// NewID returns the ID of a new communicator whose rank 0 joins with this Listener.
func (l *Listener) NewID() ID { return NewID(l.Addr()) }

// Close drops the caller's reference. The last one closes the Listener.
func (l *Listener) Close() {
	l.mu.Lock()
	l.refs--
	last := l.refs == 0
	l.mu.Unlock()
	if last {
		l.accept.Close()
	}
}

// Refused counts the connections that were accepted, and those that were refused, by reason.
func (l *Listener) Refused() accept.Counts { return l.accept.Counts() }

// hold takes a reference for the caller.
func (l *Listener) hold() *Listener {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.refs++
	return l
}

// setRoute makes c the hub of token's rendezvous, and reports the early rejections to it.
func (l *Listener) setRoute(token [16]byte, c *Control) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.routes[token] != nil {
		return fmt.Errorf("rendezvous %x is already under way in this process", token[:4])
	}
	l.routes[token] = c
	l.early = slices.DeleteFunc(l.early, func(r rejection) bool {
		if r.token == token {
			c.reject(r.from)
		}
		return r.token == token
	})
	return nil
}

// reject reports a rejection to its rendezvous. It keeps the rejection if no rendezvous of that
// token has begun here: a rank with a wrong secret tries only once.
func (l *Listener) reject(r rejection) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if c := l.routes[r.token]; c != nil {
		c.reject(r.from)
		return
	}
	if len(l.early) == maxEarly {
		l.early = slices.Delete(l.early, 0, 1)
	}
	l.early = append(l.early, r)
}

// dropRoute removes c, as hub or as other rank.
func (l *Listener) dropRoute(token [16]byte, c *Control) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.routes[token] == c {
		delete(l.routes, token)
	}
	if k := (memberKey{token, c.rank}); l.local[k] == c {
		delete(l.local, k)
	}
}

// setMember registers c, so that the hub can probe for it when their connection breaks.
func (l *Listener) setMember(c *Control) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.local[memberKey{c.id.Token, c.rank}] = c
}

// member returns the Control that setMember has registered, or nil.
func (l *Listener) member(token [16]byte, rank int) *Control {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.local[memberKey{token, rank}]
}

// route returns the hub of token's rendezvous, or nil.
func (l *Listener) route(token [16]byte) *Control {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.routes[token]
}

// serve authenticates a connection and hands it to its Control. The Acceptor closes a connection
// that serve has not kept.
func (l *Listener) serve(conn *accept.Conn) {
	token, theirs, err := l.serverHandshake(conn)
	if err != nil {
		if errors.Is(err, ErrSecret) {
			l.reject(rejection{token, conn.RemoteAddr()})
		}
		return
	}
	c := l.route(token)
	t, f, err := readFrame(conn, maxHello)
	switch {
	case err != nil:
		conn.Refuse(accept.Silent) // the client authenticated and then sent no valid frame
	case !conn.Keep(): // the Acceptor has closed it
	case t == frameResume:
		c.handleReconnect(conn.Conn, t, f)
	case t == frameProbe:
		w, _ := decodeWanted(f)
		l.member(token, w.rank).handleReconnect(conn.Conn, t, f)
	case t != frameHello:
		conn.Close()
	case c == nil:
		hangUp(conn, seal(frame(frameRetry)))
	default:
		conn.SetDeadline(time.Time{})
		c.handleHello(conn.Conn, f, theirs)
	}
}

// serverHandshake is the server's half of the handshake. It returns the client's token and
// version, also when the client's proof is wrong: that error is an ErrSecret.
func (l *Listener) serverHandshake(conn *accept.Conn) (token [16]byte, theirs uint16, err error) {
	began := time.Now()
	conn.SetDeadline(began.Add(accept.FirstTimeout))
	var greeting [greetingSize]byte
	// One read takes all that has arrived. The rest of a partly read greeting would fail inspect.
	n, err := io.ReadAtLeast(conn, greeting[:], len(magic))
	if err == nil && string(greeting[:len(magic)]) != magic {
		conn.Refuse(accept.Garbage)
		return token, 0, fmt.Errorf("%w: not a lockstep rank", ErrProtocol)
	}
	if err == nil {
		_, err = io.ReadFull(conn, greeting[n:])
	}
	if err != nil {
		if n > 0 || !closedByPeer(err) { // a port scan connects and closes; do not count it
			conn.Refuse(accept.Silent)
		}
		return token, 0, err
	}
	var client [nonceSize]byte
	theirs, token, client = parseGreeting(greeting[:])
	if l.hasPass(token, client) {
		if l.fresh(client) {
			conn.Authenticated()
		} else {
			conn.Refuse(accept.Replayed) // it counts as unauthenticated from now on
		}
	}
	conn.SetDeadline(began.Add(handshakeTimeout))
	var server [nonceSize]byte
	rand.Read(server[:])
	proof := prove(l.secret, "server", version, token, client, server)
	answer := append(make([]byte, 0, answerSize), magic...)
	answer = binary.LittleEndian.AppendUint16(answer, version)
	answer = append(answer, server[:]...)
	answer = append(answer, proof[:]...)
	var got [sha256.Size]byte
	if _, err = conn.Write(answer); err == nil {
		_, err = io.ReadFull(conn, got[:])
	}
	want := prove(l.secret, "client", theirs, token, client, server)
	if err == nil && !hmac.Equal(got[:], want[:]) {
		err = errors.New("the proof is of another secret")
	}
	if err != nil {
		conn.Refuse(accept.Unproved)
		return token, theirs, fmt.Errorf("%w: %w", ErrSecret, err)
	}
	conn.Authenticated()
	return token, theirs, nil
}

// inspect reports whether the first bytes of a connection carry a valid pass. A replayed pass is
// also valid here; serverHandshake detects replays.
func (l *Listener) inspect(b []byte) accept.Inspection {
	if len(b) < len(magic) {
		return accept.Incomplete
	}
	if string(b[:len(magic)]) != magic {
		return accept.Invalid
	}
	if len(b) < greetingSize {
		return accept.Incomplete
	}
	if _, token, client := parseGreeting(b); l.hasPass(token, client) {
		return accept.Plausible
	}
	return accept.Invalid
}

// parseGreeting returns the version, token and nonce in a whole greeting.
func parseGreeting(b []byte) (theirs uint16, token [16]byte, client [nonceSize]byte) {
	g := fields{b: b[len(magic):]}
	return binary.LittleEndian.Uint16(g.take(2)), [16]byte(g.take(16)), [nonceSize]byte(g.take(nonceSize))
}

// hasPass reports whether a client's nonce contains the pass that its salt requires.
func (l *Listener) hasPass(token [16]byte, client [nonceSize]byte) bool {
	return hmac.Equal(client[saltSize:], pass(l.secret, token, client[:saltSize]))
}

// closedByPeer reports whether err says that the other end closed the connection.
func closedByPeer(err error) bool {
	return errors.Is(err, io.EOF) || errors.Is(err, syscall.ECONNRESET)
}

// fresh reports whether a client's nonce was not seen before, and remembers it.
func (l *Listener) fresh(nonce [nonceSize]byte) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.passes.Add(nonce)
}

// clientHandshake is the client's half of the handshake. It fails with ErrSecret if the
// server's proof is wrong, and with ErrProtocol if the server is no rank.
func clientHandshake(conn net.Conn, secret []byte, ours uint16, token [16]byte) error {
	var client [nonceSize]byte
	rand.Read(client[:saltSize])
	copy(client[saltSize:], pass(secret, token, client[:saltSize]))
	greeting := append(make([]byte, 0, greetingSize), magic...)
	greeting = binary.LittleEndian.AppendUint16(greeting, ours)
	greeting = append(greeting, token[:]...)
	greeting = append(greeting, client[:]...)
	if _, err := conn.Write(greeting); err != nil {
		return err
	}
	var answer [answerSize]byte
	if _, err := io.ReadFull(conn, answer[:]); err != nil {
		return err
	}
	a := fields{b: answer[:]}
	if string(a.take(len(magic))) != magic {
		return fmt.Errorf("%w: %s is not a lockstep rank", ErrProtocol, conn.RemoteAddr())
	}
	theirs := binary.LittleEndian.Uint16(a.take(2))
	server := [nonceSize]byte(a.take(nonceSize))
	want := prove(secret, "server", theirs, token, client, server)
	if !hmac.Equal(a.take(32), want[:]) {
		return fmt.Errorf("%w from the one of %s", ErrSecret, conn.RemoteAddr())
	}
	proof := prove(secret, "client", ours, token, client, server)
	_, err := conn.Write(proof[:])
	return err
}

// watchHost makes the kernel end a connection whose other host is silent for userTimeout.
// Keepalive probes cover the time in which nothing is sent.
func watchHost(conn net.Conn) {
	if tcp, ok := conn.(*net.TCPConn); ok {
		tcp.SetKeepAliveConfig(net.KeepAliveConfig{Enable: true, Idle: keepalive, Interval: keepalive, Count: 1})
		setUserTimeout(conn, userTimeout)
	}
}

// hangUp sends a connection's last frame and closes it. It ignores a failed write, since the
// connection ends in any case.
func hangUp(conn net.Conn, last []byte) {
	_, _ = conn.Write(last)
	conn.Close()
}

// setUserTimeout bounds how long sent bytes may stay unacknowledged (tcp(7),
// TCP_USER_TIMEOUT). The kernel also ends a connection whose peer's window stays shut, as a
// stopped process's does. So it must be off (0) while more is in flight than the peer's socket
// buffer is sure to hold.
func setUserTimeout(conn net.Conn, d time.Duration) {
	sc, ok := conn.(syscall.Conn)
	if !ok {
		return
	}
	if raw, err := sc.SyscallConn(); err == nil {
		// An error means that the socket is closed, and then nothing is in flight.
		_ = raw.Control(func(fd uintptr) {
			_ = unix.SetsockoptInt(int(fd), unix.IPPROTO_TCP, unix.TCP_USER_TIMEOUT, int(d.Milliseconds()))
		})
	}
}
