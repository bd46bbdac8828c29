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
	// Secret is shared by the job's ranks: at least 16 bytes of high entropy.
	// nil: the file that LOCKSTEP_SECRET_FILE names.
	Secret []byte
	// Attempt is the token of this rank's attempt of the job: ranks of other attempts cannot
	// join, though they know the secret. "": the value of LOCKSTEP_FENCE_TOKEN.
	Attempt string
	// Listener is optional, and owned by Join. Without one rank 0 listens at ID.Addr,
	// the others at Host and any port.
	Listener *Listener
	// Host is the address to listen at, "" for the one from which rank 0 is reached.
	Host string
	// Info is what the others are told of this rank, at most MaxBlob(Size) bytes.
	Info []byte
	// Outage is how long a host may be silent before it counts as dead, 0 for DefaultOutage.
	Outage time.Duration
}

// Member is what a rank told of itself.
type Member struct {
	Addr string // of its Listener
	Info []byte
}

// Join meets the other ranks of cfg.ID and returns when all have joined. It retries
// until ctx ends; the error is then a *MissingError that names the missing ranks. Ranks
// that contradict each other all get the same *ConflictError, a wrong secret ErrSecret.
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
		defer ln.Close() // the Control has a reference of its own
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
	cfg.Secret = ofAttempt(cfg.Secret, cfg.Attempt)
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
	return c, c.attend(ctx, cfg.ID.Addr, ln, cfg.Host, false)
}

// listenRetry waits for an address that a previous attempt of the job may still hold.
func listenRetry(ctx context.Context, addr string, secret []byte) (*Listener, error) {
	for b := newBackoff(); ; {
		ln, err := listen(addr, secret)
		if !errors.Is(err, unix.EADDRINUSE) || !b.sleep(ctx) {
			return ln, err
		}
	}
}

// attend runs the rendezvous on every other rank. running: rank 0 already listens at
// addr, unless it is dead.
func (c *Control) attend(ctx context.Context, addr string, ln *Listener, host string, running bool) error {
	if ln != nil {
		c.family = ln.hold()
	}
	var last error
	pending := &MissingError{Ranks: []int{0}, Size: c.size}
	for b := newBackoff(); ; {
		err := c.attempt(ctx, addr, host, pending)
		switch {
		case err == nil:
			return nil
		case errors.Is(err, ErrSecret) || isVerdict(err):
			return c.fail(err)
		case running && errors.Is(err, syscall.ECONNREFUSED):
			return c.fail(&LostError{Rank: 0, Reason: "its process is gone"})
		case ctx.Err() == nil || last == nil:
			last = err
		}
		if !b.sleep(ctx) {
			if pending.Detail = last.Error(); len(pending.Ranks) > 0 && pending.Ranks[0] != 0 {
				pending.Detail = ""
			}
			return c.fail(fmt.Errorf("%w: %w", pending, context.Cause(ctx)))
		}
	}
}

// fail closes what a failed rendezvous had opened.
func (c *Control) fail(err error) error {
	c.Close()
	return err
}

// isVerdict reports whether rank 0 has given the rendezvous up.
func isVerdict(err error) bool {
	var conflict *ConflictError
	var lost *LostError
	var missing *MissingError
	return errors.As(err, &conflict) || errors.As(err, &lost) || errors.As(err, &missing)
}

// lastWord is how long a rank whose time is up still waits for rank 0's reason.
const lastWord = 500 * time.Millisecond

// attempt connects to rank 0 and waits there for the roster.
func (c *Control) attempt(ctx context.Context, addr, host string, pending *MissingError) error {
	conn, err := accept.Dial(ctx, &net.Dialer{Timeout: handshakeTimeout}, addr)
	if err != nil {
		return err
	}
	// Ranks usually share one deadline. Rank 0 then has a moment to say who is missing, and
	// must not count this rank as missing because it hung up first.
	unhook := context.AfterFunc(ctx, func() { conn.SetDeadline(time.Now().Add(lastWord)) })
	keep := false
	defer func() {
		if !keep {
			unhook()
			conn.Close()
		}
	}()
	if c.family == nil {
		if host == "" {
			host = conn.LocalAddr().(*net.TCPAddr).IP.String()
		}
		if c.family, err = listen(net.JoinHostPort(host, "0"), c.secret); err != nil {
			return err
		}
	}
	c.family.setKin(c)
	conn.SetDeadline(time.Now().Add(handshakeTimeout))
	if err := introduce(conn, c.secret, version, c.id.Token); err != nil {
		return err
	}
	h := hello{rank: c.rank, size: c.size, instance: c.instance, addr: c.family.reachable(conn), info: c.members[c.rank].Info}
	if _, err := conn.Write(h.encode()); err != nil {
		return err
	}
	conn.SetDeadline(time.Time{})
	if ctx.Err() != nil { // the deadline that AfterFunc set may just have been cleared
		return ctx.Err()
	}
	watchHost(conn)
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

// reachable returns the Listener's address as the peer of conn can dial it.
func (l *Listener) reachable(conn net.Conn) string {
	a := l.ln.Addr().(*net.TCPAddr)
	if !a.IP.IsUnspecified() {
		return a.String()
	}
	return net.JoinHostPort(conn.LocalAddr().(*net.TCPAddr).IP.String(), fmt.Sprint(a.Port))
}

// backoff spaces attempts: from 2 ms, doubling to 250 ms, jittered.
type backoff struct{ next time.Duration }

func newBackoff() *backoff { return &backoff{next: 2 * time.Millisecond} }

// step returns how long to wait for the next attempt.
func (b *backoff) step() time.Duration {
	d := b.next/2 + rand.N(b.next)
	b.next = min(2*b.next, 250*time.Millisecond)
	return d
}

// sleep waits for the next attempt; false when ctx ended.
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
