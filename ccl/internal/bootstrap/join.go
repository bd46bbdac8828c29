package bootstrap

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"syscall"
	"time"

	"github.com/lockstep-ccl/lockstep/internal/accept"
	"golang.org/x/sys/unix"
)

// Config is what one rank brings to a rendezvous.
type Config struct {
	ID         ID
	Rank, Size int
	// Secret is shared by the job's ranks: at least 16 bytes of high entropy. If it is nil,
	// Join reads the file that LOCKSTEP_SECRET_FILE names.
	Secret []byte
	// Attempt is the token of this rank's attempt of the job, "" for the value of
	// LOCKSTEP_FENCE_TOKEN. Ranks of other attempts cannot join, though they know the secret.
	Attempt string
	// Listener is optional. Join takes ownership of it. Without one, rank 0 listens at
	// ID.Addr and the others at Host and any free port.
	Listener *Listener
	// Host is the host that a rank without Listener listens at, "" for the local address of
	// its connection to rank 0.
	Host string
	// Info describes this rank to the others (Member.Info). It has at most MaxBlob(Size) bytes.
	Info []byte
	// Outage is how long a host may be silent before it counts as dead, 0 for DefaultOutage.
	Outage time.Duration
}

// Member describes one rank.
type Member struct {
	Addr string // of its Listener, host:port
	Info []byte // of its Config
}

// Join meets the other ranks of cfg.ID and returns when all have joined. It retries until
// ctx ends, and then returns a *MissingError that names the missing ranks. If ranks
// contradict each other, all get the same *ConflictError. A rank whose secret differs from
// rank 0's gets ErrSecret.
func Join(ctx context.Context, cfg Config) (*Control, error) {
	c, err := join(ctx, cfg)
	if err != nil {
		return nil, fmt.Errorf("rank %d: rendezvous at %s: %w", cfg.Rank, cfg.ID.Addr, err)
	}
	return c, nil
}

func join(ctx context.Context, cfg Config) (*Control, error) {
	if cfg.Secret == nil {
		var err error
		if cfg.Secret, err = LoadSecret(); err != nil {
			return nil, err
		}
	}
	ln := cfg.Listener
	if ln != nil {
		defer ln.Close() // the Control holds its own reference
	}
	switch {
	case len(cfg.Secret) < minSecret:
		return nil, errNoSecret
	case cfg.Size < 1 || cfg.Size > maxSize:
		return nil, fmt.Errorf("size %d, want 1 to %d", cfg.Size, maxSize)
	case cfg.Rank < 0:
		return nil, &ConflictError{Rank: cfg.Rank, Err: ErrRank, Detail: fmt.Sprintf("size is %d", cfg.Size)}
	case len(cfg.Info) > MaxBlob(cfg.Size):
		return nil, fmt.Errorf("info of %d bytes, limit %d for %d ranks", len(cfg.Info), MaxBlob(cfg.Size), cfg.Size)
	}
	cfg.Secret = attemptKey(cfg.Secret, cfg.Attempt)
	c := newControl(cfg)
	if cfg.Rank == 0 {
		if ln == nil {
			var err error
			if ln, err = listenRetry(ctx, cfg.ID.Addr, cfg.Secret); err != nil {
				return nil, err
			}
			defer ln.Close()
		}
		return c, c.host(ctx, ln, nil)
	}
	return c, c.joinHub(ctx, cfg.ID.Addr, ln, cfg.Host, false)
}

// listenRetry listens at addr. It retries while the address is in use: a process of the job's
// previous attempt may still be about to end.
func listenRetry(ctx context.Context, addr string, secret []byte) (*Listener, error) {
	for b := newBackoff(); ; {
		ln, err := listen(addr, secret)
		if !errors.Is(err, unix.EADDRINUSE) || !b.sleep(ctx) {
			return ln, err
		}
	}
}

// joinHub runs the rendezvous on every rank but 0. running says that rank 0 has listened at
// addr before, so a refused connection means that its process is gone.
func (c *Control) joinHub(ctx context.Context, addr string, ln *Listener, host string, running bool) error {
	if ln != nil {
		c.listener = ln.hold()
	}
	var last error
	pending := &MissingError{Ranks: []int{0}, Size: c.size}
	for b := newBackoff(); ; {
		err := c.tryJoin(ctx, addr, host, pending)
		switch {
		case err == nil:
			return nil
		case errors.Is(err, ErrSecret) || isFinal(err):
			return c.fail(err)
		case running && errors.Is(err, syscall.ECONNREFUSED):
			return c.fail(&LostError{Rank: 0, Reason: "its process is gone"})
		case ctx.Err() == nil || last == nil:
			last = err
		}
		if !b.sleep(ctx) {
			if pending.Detail = last.Error(); len(pending.Ranks) > 0 && pending.Ranks[0] != 0 {
				pending.Detail = "" // last is about reaching rank 0, which is not missing
			}
			return c.fail(fmt.Errorf("%w: %w", pending, context.Cause(ctx)))
		}
	}
}

// fail closes c after a failed rendezvous, and returns err.
func (c *Control) fail(err error) error {
	c.Close()
	return err
}

// isFinal reports whether err says that rank 0 has given up the rendezvous.
func isFinal(err error) bool {
	var conflict *ConflictError
	var lost *LostError
	var missing *MissingError
	return errors.As(err, &conflict) || errors.As(err, &lost) || errors.As(err, &missing)
}

// reasonTimeout is how long a rank whose context has ended still waits for rank 0's reason.
const reasonTimeout = 500 * time.Millisecond

// tryJoin connects to rank 0, introduces this rank and waits for the roster. It keeps pending up
// to date with the ranks that rank 0 misses.
func (c *Control) tryJoin(ctx context.Context, addr, host string, pending *MissingError) error {
	conn, err := accept.Dial(ctx, &net.Dialer{Timeout: handshakeTimeout}, addr)
	if err != nil {
		return err
	}
	// Ranks usually share one deadline. This rank stays connected a little longer: if it hung up
	// first, rank 0 would report it as missing, and could not tell it which ranks are.
	unhook := context.AfterFunc(ctx, func() { conn.SetDeadline(time.Now().Add(reasonTimeout)) })
	keep := false
	defer func() {
		if !keep {
			unhook()
			conn.Close()
		}
	}()
	if c.listener == nil {
		if host == "" {
			host = conn.LocalAddr().(*net.TCPAddr).IP.String()
		}
		if c.listener, err = listen(net.JoinHostPort(host, "0"), c.secret); err != nil {
			return err
		}
	}
	c.listener.setMember(c)
	conn.SetDeadline(time.Now().Add(handshakeTimeout))
	if err := clientHandshake(conn, c.secret, version, c.id.Token); err != nil {
		return err
	}
	h := hello{rank: c.rank, size: c.size, instance: c.instance, addr: c.listener.reachable(conn), info: c.members[c.rank].Info}
	if _, err := conn.Write(h.encode()); err != nil {
		return err
	}
	conn.SetDeadline(time.Time{})
	if ctx.Err() != nil { // SetDeadline may just have cleared the deadline that AfterFunc set
		return ctx.Err()
	}
	watchHost(conn)
	// got is the number of frames received; numbering starts with rank 0's first frame.
	for got := uint64(1); ; got++ {
		t, f, err := readFrame(conn, maxFrame)
		if err != nil {
			return fmt.Errorf("waiting for the others: %w", err)
		}
		switch t {
		case framePending:
			if m := (*MissingError)(nil); errors.As(decodeFailure(t, f, c.size), &m) {
				*pending = *m
			}
		case frameRetry:
			return errNotYet
		case frameRoster:
			members, hub, ok := decodeRoster(f, c.size)
			if !ok {
				return fmt.Errorf("%w: malformed roster", ErrProtocol)
			}
			if !unhook() {
				return ctx.Err()
			}
			keep = true
			members[0].Addr = addr
			c.members = members
			c.mu.Lock()
			c.state = stateJoined
			c.admit(conn, 0, hub, got)
			c.mu.Unlock()
			return nil
		default:
			if err := decodeFailure(t, f, c.size); err != nil {
				return err
			}
			return fmt.Errorf("%w: frame type %d before the roster", ErrProtocol, t)
		}
	}
}

var errNotYet = errors.New("rank 0 has not begun this rendezvous")

// reachable returns an address at which conn's peer can dial the Listener. A Listener at an
// unspecified address (0.0.0.0) is reachable where conn is.
func (l *Listener) reachable(conn net.Conn) string {
	a := l.ln.Addr().(*net.TCPAddr)
	if !a.IP.IsUnspecified() {
		return a.String()
	}
	return net.JoinHostPort(conn.LocalAddr().(*net.TCPAddr).IP.String(), fmt.Sprint(a.Port))
}

// backoff spaces retries: 2 ms at first, doubling to 250 ms. Jitter of half the step keeps
// ranks that started together from retrying together.
type backoff struct{ next time.Duration }

func newBackoff() *backoff { return &backoff{next: 2 * time.Millisecond} }

// step returns how long to wait before the next retry.
func (b *backoff) step() time.Duration {
	d := b.next/2 + rand.N(b.next)
	b.next = min(2*b.next, 250*time.Millisecond)
	return d
}

// sleep waits until the next retry is due. It returns false if ctx ends first.
func (b *backoff) sleep(ctx context.Context) bool {
	t := time.NewTimer(b.step())
	defer t.Stop()
	select {
	case <-ctx.Done():
		return false
	case <-t.C:
		return true
	}
}
