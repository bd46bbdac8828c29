package process

import (
	"cmp"
	"context"
	"crypto/rand"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"time"

	"github.com/lockstep-ccl/lockstep/internal/statedir"
)

// HostOptions of a Host. Of Options, Ranks is the whole job's; Spares, Nodes, Node and Devices have no
// meaning: hosts beyond Hosts stand by.
type HostOptions struct {
	Options
	Name  string // this host's, no other's
	Hosts int    // that the ranks are spread over, in blocks

	// Dial connects to the coordinator, and has made sure that it is that.
	Dial func(ctx context.Context) (net.Conn, error)
	// Listener, of TCP, has this host coordinate. Accept makes sure who is at the other end: check returns an
	// error unless it may speak for a node.
	Listener net.Listener
	Accept   func(net.Conn) (c net.Conn, check func(node string) error, err error)

	// Lease is for how long a host's ranks go on when its supervisor does not hear the coordinator: 15 s.
	Lease time.Duration
	// Join is how long the job waits for hosts, and a host for the coordinator: 10 min.
	Join time.Duration
}

// Host is the supervisor of one host of a job of several. All are started with the same options; the one
// that has the Listener also coordinates. It is for one Run.
type Host struct {
	launcher
	h     HostOptions
	local int // ranks a host
	self  hostState
	boot  string
	wake  chan struct{} // there may be something to do
	say   chan struct{} // there is something to report

	coordinator atomic.Pointer[coordinator] // nil unless this host coordinates, and runs
	expired     atomic.Uint64               // leases

	member
}

// hostState is what a supervisor's successor must know.
type hostState struct {
	Version int    `json:"version"`
	Holder  string `json:"holder"`
	Last    uint64 `json:"last"` // generation of the last attempt begun
}

const (
	hostFile     = "host.json"
	booksFile    = "coordinator.json"
	maxBooks     = 16 << 20
	defaultLease = 15 * time.Second
	defaultJoin  = 10 * time.Minute
	leastMargin  = 2 * time.Second
	firstReport  = 5 * time.Second // a connection must say who it is within this
)

// NewHost checks the options. Run makes the state directory.
func NewHost(h HostOptions) (*Host, error) {
	o := &h.Options
	switch {
	case o.Job == "" || o.Job == "." || o.Job == ".." || len(o.Job) > maxName || strings.ContainsAny(o.Job, "/\x00"):
		return nil, fmt.Errorf("run: job %q: a job needs a name of 1 to %d bytes, without a slash", o.Job, maxName)
	case len(o.Command) == 0:
		return nil, errNoCommand
	case !hostName.MatchString(h.Name):
		return nil, fmt.Errorf("run: node %.80q: want at most 63 letters, digits, dots, underscores and -, beginning and ending with a letter or digit", h.Name)
	case h.Hosts < 1 || h.Hosts > maxHosts || o.Ranks < 1 || o.Ranks%h.Hosts != 0 || o.Ranks/h.Hosts > maxLocal:
		return nil, fmt.Errorf("run: %d ranks cannot be spread evenly over %d hosts, at most %d a host", o.Ranks, h.Hosts, maxLocal)
	case h.Dial == nil && h.Listener == nil:
		return nil, errors.New("run: no coordinator is named")
	}
	dir, err := filepath.Abs(o.Dir)
	if err != nil {
		return nil, fmt.Errorf("run: state directory: %w", err)
	}
	o.Dir = dir
	o.Logger = cmp.Or(o.Logger, slog.New(slog.DiscardHandler))
	o.Grace, h.Lease, h.Join = cmp.Or(o.Grace, 5*time.Second), cmp.Or(h.Lease, defaultLease), cmp.Or(h.Join, defaultJoin)
	s := &Host{launcher: launcher{o: *o}, h: h, local: o.Ranks / h.Hosts, wake: make(chan struct{}, 1), say: make(chan struct{}, 1)}
	if o.Output != nil {
		s.terminal = &terminal{w: o.Output}
	}
	return s, nil
}

// Run supervises this host's ranks until the job has ended, and coordinates, where that is this host's
// part. It returns nil when every rank of the job has exited with status 0.
func (s *Host) Run(ctx context.Context) (err error) {
	if s.dir, err = statedir.OpenPrivate(s.o.Dir); errors.Is(err, statedir.ErrLocked) {
		return fmt.Errorf("run: %w (is this job running already? else give it another --job or --dir)", err)
	} else if err != nil {
		return fmt.Errorf("run: %w", err)
	}
	defer s.dir.Close()
	if s.terminal != nil {
		defer s.terminal.flush()
	}
	if err := s.takeOver(ctx); err != nil {
		return err
	}
	defer os.Remove(s.secret())
	if s.h.Listener == nil {
		return s.serve(ctx, s.h.Dial)
	}
	c, err := newCoordinator(&s.h, s.dir, s.local)
	if err != nil {
		return err
	}
	s.coordinator.Store(c)
	ended := make(chan error, 1)
	go func() { ended <- c.run(ctx) }()
	var own error
	member := make(chan struct{})
	mctx, cancel := context.WithCancel(ctx)
	defer cancel()
	go func() {
		defer close(member)
		own = s.serve(mctx, c.pipe)
	}()
	select {
	case err = <-ended: // it has waited for the hosts that are heard
		select {
		case <-member:
		case <-time.After(s.o.Grace + killPatience):
			cancel()
			<-member
		}
	case <-member: // this host's part is over; the others' may not be
		if own != nil && ctx.Err() == nil {
			s.o.Logger.Error("this host has no part in the job any more, and coordinates", "job", s.o.Job, "err", own)
		}
		err = errors.Join(<-ended, own)
	}
	if ctx.Err() != nil {
		return errors.Join(ctx.Err(), err)
	}
	return err
}

// takeOver reads what a former supervisor of this directory has left, and ends it.
func (s *Host) takeOver(ctx context.Context) error {
	b, err := s.dir.ReadFile(hostFile, 1<<16)
	if err == nil {
		err = json.Unmarshal(b, &s.self)
	}
	if err != nil || s.self.Version != 1 || !hexID.MatchString(s.self.Holder) {
		if err != nil && !errors.Is(err, os.ErrNotExist) {
			s.o.Logger.Warn("what the former supervisor has written is lost: the coordinator will not take this one's word for its end", "job", s.o.Job, "err", err)
		}
		var id [8]byte
		rand.Read(id[:])
		s.self = hostState{Version: 1, Holder: hex.EncodeToString(id[:])}
		if err := s.keep(); err != nil {
			return err
		}
	}
	s.last = s.self.Last
	boot, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if s.boot = strings.TrimSpace(string(boot)); err != nil || !hexID.MatchString(s.boot) {
		return fmt.Errorf("run: the kernel's boot id: %q, %w", s.boot, err)
	}
	if !s.clear(ctx, s.secret()) {
		if ctx.Err() != nil {
			return ctx.Err()
		}
		return fmt.Errorf("run: processes that a former supervisor of %s had started are still there %v after SIGKILL", s.o.Dir, killPatience)
	}
	return nil
}

func (s *Host) keep() error {
	b, err := json.Marshal(s.self)
	if err == nil {
		err = s.dir.Replace(hostFile, append(b, '\n'))
	}
	if err != nil {
		return fmt.Errorf("run: host's state: %w", err)
	}
	return nil
}

func (s *Host) secret() string { return s.dir.Join("secret") }

// nudge has who waits at c look again.
func nudge(c chan struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}

// closeWhen closes what blocks when ctx ends, until the returned function is called.
func closeWhen(ctx context.Context, c io.Closer) func() bool {
	return context.AfterFunc(ctx, func() { _ = c.Close() })
}
