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
	// The kernel gives up a connection whose host is silent for userTimeout; seek replaces
	// it. The kernel of a stopped process still answers.
	keepalive   = time.Second
	userTimeout = 3 * time.Second
)

// Listener accepts the connections of other ranks: it authenticates them and hands
// them to the rendezvous that they name. One Listener serves any
// number of communicators; each Control holds it open until it closes. Safe for
// concurrent use.
type Listener struct {
	ln     net.Listener
	secret []byte
	door   *accept.Door

	mu     sync.Mutex
	refs   int
	routes map[[16]byte]*Control // hubs
	kin    map[kin]*Control      // members
	passes accept.Seen
	early  []rejection // for rendezvous that have no hub here yet; at most maxEarly
}

// rejection is a connection that named a rendezvous and could not prove the secret.
type rejection struct {
	token [16]byte
	from  net.Addr
}

// maxEarly bounds the rejections that are kept until their rendezvous begins. The newest stay.
const maxEarly = 64

// kin names a member of a communicator.
type kin struct {
	token [16]byte
	rank  int
}

// Listen opens a Listener at addr (host:port, port 0 for any). Give it to Join,
// which then owns it, or Close it.
func Listen(addr string, secret []byte) (*Listener, error) {
	if len(secret) < minSecret {
		return nil, errNoSecret
	}
	return listen(addr, ofAttempt(secret, ""))
}

// listen is Listen with a secret that ofAttempt has derived.
func listen(addr string, secret []byte) (*Listener, error) {
	ln, err := accept.Listen(addr)
	if err != nil {
		return nil, fmt.Errorf("listen for ranks: %w", err)
	}
	l := &Listener{
		ln: ln, secret: secret, refs: 1,
		routes: make(map[[16]byte]*Control),
		kin:    make(map[kin]*Control),
	}
	if l.door, err = accept.New(ln.(*net.TCPListener), accept.Options{Serve: l.serve, Hello: greetingSize, Look: l.look}); err != nil {
		ln.Close()
		return nil, fmt.Errorf("listen for ranks: %w", err)
	}
	return l, nil
}

// Addr is the address that the Listener is bound to.
func (l *Listener) Addr() string { return l.ln.Addr().String() }

// NewID makes the ID of a communicator whose rank 0 joins with this Listener.
func (l *Listener) NewID() ID { return NewID(l.Addr()) }

// Close drops the caller's reference. The last one closes the Listener.
func (l *Listener) Close() {
	l.mu.Lock()
	l.refs--
	last := l.refs == 0
	l.mu.Unlock()
	if last {
		l.door.Close()
	}
}

// Refused returns how many connections were accepted, and how many refused and why.
func (l *Listener) Refused() accept.Counts { return l.door.Counts() }

func (l *Listener) hold() *Listener {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.refs++
	return l
}

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

// reject counts a rejection for its rendezvous. A rank with a wrong secret tries once, and
// may do so before rank 0 has begun.
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

func (l *Listener) dropRoute(token [16]byte, c *Control) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.routes[token] == c {
		delete(l.routes, token)
	}
	if k := (kin{token, c.rank}); l.kin[k] == c {
		delete(l.kin, k)
	}
}

// setKin registers c, for rank 0 to probe when it has lost its connection.
func (l *Listener) setKin(c *Control) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.kin[kin{c.id.Token, c.rank}] = c
}

// member returns the Control of a rank in this process, or nil.
func (l *Listener) member(token [16]byte, rank int) *Control {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.kin[kin{token, rank}]
}

func (l *Listener) route(token [16]byte) *Control {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.routes[token]
}

// serve takes one connection through its handshake and hands it over, or has it closed.
func (l *Listener) serve(conn *accept.Conn) {
	token, theirs, err := l.greet(conn)
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
		conn.Refuse(accept.Silent) // a member that has stalled
	case !conn.Keep(): // closed
	case t == frameResume:
		c.comeback(conn.Conn, t, f)
	case t == frameProbe:
		w, _ := decodeWanted(f)
		l.member(token, w.rank).comeback(conn.Conn, t, f)
	case t != frameHello:
		conn.Close()
	case c == nil:
		hangUp(conn, seal(frame(frameRetry)))
	default:
		conn.SetDeadline(time.Time{})
		c.arrive(conn.Conn, f, theirs)
	}
}

// greet is the server's half of the handshake. It returns the token and version
// that the client named; the token also when the client failed to prove itself.
func (l *Listener) greet(conn *accept.Conn) (token [16]byte, theirs uint16, err error) {
	began := time.Now()
	conn.SetDeadline(began.Add(accept.FirstTimeout))
	var greeting [greetingSize]byte
	// One read takes all that has arrived: look cannot recognise the rest of a greeting.
	n, err := io.ReadAtLeast(conn, greeting[:], len(magic))
	if err == nil && string(greeting[:len(magic)]) != magic {
		conn.Refuse(accept.Garbage)
		return token, 0, fmt.Errorf("%w: not a lockstep rank", ErrProtocol)
	}
	if err == nil {
		_, err = io.ReadFull(conn, greeting[n:])
	}
	if err != nil {
		if n > 0 || !hungUp(err) { // a port check, which says nothing, is not counted
			conn.Refuse(accept.Silent)
		}
		return token, 0, err
	}
	var client [nonceSize]byte
	theirs, token, client = parseGreeting(greeting[:])
	if l.hasPass(token, client) {
		if l.fresh(client) {
			conn.Known()
		} else {
			conn.Refuse(accept.Replayed) // no better than a stranger
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
	conn.Known()
	return token, theirs, nil
}

// look judges a greeting by its pass, which may be a replay.
func (l *Listener) look(b []byte) accept.Verdict {
	if len(b) < len(magic) {
		return accept.More
	}
	if string(b[:len(magic)]) != magic {
		return accept.Stranger
	}
	if len(b) < greetingSize {
		return accept.More
	}
	if _, token, client := parseGreeting(b); l.hasPass(token, client) {
		return accept.Member
	}
	return accept.Stranger
}

func parseGreeting(b []byte) (theirs uint16, token [16]byte, client [nonceSize]byte) {
	g := fields{b: b[len(magic):]}
	return binary.LittleEndian.Uint16(g.take(2)), [16]byte(g.take(16)), [nonceSize]byte(g.take(nonceSize))
}

func (l *Listener) hasPass(token [16]byte, client [nonceSize]byte) bool {
	return hmac.Equal(client[saltSize:], pass(l.secret, token, client[:saltSize]))
}

// hungUp reports whether the other end has closed a connection.
func hungUp(err error) bool {
	return errors.Is(err, io.EOF) || errors.Is(err, syscall.ECONNRESET)
}

// fresh reports whether a client's nonce is new, and remembers it.
func (l *Listener) fresh(nonce [nonceSize]byte) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.passes.Add(nonce)
}

// introduce is the client's half of the handshake.
func introduce(conn net.Conn, secret []byte, ours uint16, token [16]byte) error {
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

// watchHost makes the kernel give up a connection whose other host is silent.
func watchHost(conn net.Conn) {
	if tcp, ok := conn.(*net.TCPConn); ok {
		tcp.SetKeepAliveConfig(net.KeepAliveConfig{Enable: true, Idle: keepalive, Interval: keepalive, Count: 1})
		setUserTimeout(conn, userTimeout)
	}
}

// hangUp sends a connection's last frame and closes it. It ignores a failed write: the
// peer is gone then.
func hangUp(conn net.Conn, last []byte) {
	_, _ = conn.Write(last)
	conn.Close()
}

// setUserTimeout bounds how long sent bytes may stay unacknowledged (tcp(7),
// TCP_USER_TIMEOUT). It also ends a connection whose peer's window stays shut,
// so it must be off (0) while more is in flight than a stopped peer can take.
func setUserTimeout(conn net.Conn, d time.Duration) {
	sc, ok := conn.(syscall.Conn)
	if !ok {
		return
	}
	if raw, err := sc.SyscallConn(); err == nil {
		// A socket that is closed by now has no bytes to bound.
		_ = raw.Control(func(fd uintptr) {
			_ = unix.SetsockoptInt(int(fd), unix.IPPROTO_TCP, unix.TCP_USER_TIMEOUT, int(d.Milliseconds()))
		})
	}
}
