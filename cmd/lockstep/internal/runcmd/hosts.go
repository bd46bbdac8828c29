package runcmd

import (
	"cmp"
	"context"
	"crypto/x509"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"path/filepath"
	"slices"
	"syscall"
	"time"

	"google.golang.org/grpc/credentials"

	"github.com/lockstep-ccl/lockstep/ccl"
	"github.com/lockstep-ccl/lockstep/cmd/lockstep/internal/flags"
	"github.com/lockstep-ccl/lockstep/collector/wire"
	"github.com/lockstep-ccl/lockstep/internal/ports"
	"github.com/lockstep-ccl/lockstep/launcher"
	"github.com/lockstep-ccl/lockstep/remediation/process"
)

// Hosts are the flags of a job on several machines.
type Hosts struct {
	Hosts       int           `default:"1" help:"Machines to spread the ranks over, in blocks: the same command runs on each of them, and on further ones, which stand by." placeholder:"N"`
	Coordinator string        `help:"Where the hosts of the job meet. Whose address it is coordinates." placeholder:"HOST:PORT"`
	Coordinate  string        `enum:"auto,yes,no" default:"auto" help:"Whether this host coordinates: ${enum} (auto: when the coordinator's address is its own)."`
	Node        string        `help:"This host's name, no other's (default: the launcher's word, or the host's name)." placeholder:"NAME"`
	Lease       time.Duration `default:"15s" help:"Ranks end when their host has not heard the coordinator for so long, and others may take their places then."`
	JoinTimeout time.Duration `default:"10m" help:"How long the job waits for hosts, and a host for the coordinator."`
	TLS         flags.TLS     `embed:"" prefix:"tls."`
	Page        Page          `embed:"" prefix:"web."`
}

// handshakes are over within this.
const handshakes = 5 * time.Second

func (h *Hosts) check() error {
	if h.Hosts < 1 {
		return fmt.Errorf("--hosts %d: want at least 1", h.Hosts)
	}
	if h.Coordinator == "" {
		if h.Hosts > 1 {
			return fmt.Errorf("--hosts %d takes --coordinator HOST:PORT, the same on each host", h.Hosts)
		}
		if h.Page != (Page{}) {
			return errors.New("--web.listen-address goes with --coordinator: a job of one machine has nothing to tell that its node's agent does not")
		}
		return nil
	}
	host, _, err := net.SplitHostPort(h.Coordinator)
	if err != nil || host == "" {
		return fmt.Errorf("--coordinator %s: want HOST:PORT, as the other hosts reach it", h.Coordinator)
	}
	if h.Node != "" {
		if err := wire.CheckNode(h.Node); err != nil {
			return fmt.Errorf("--node: %w", err)
		}
	}
	return errors.Join(flags.Positive("lease", h.Lease), flags.Positive("join-timeout", h.JoinTimeout), h.TLS.Check(), h.Page.check())
}

// runHosts runs this machine's part of a job of several.
func (c *Cmd) runHosts(ctx context.Context, o process.Options, log *slog.Logger) error {
	h := process.HostOptions{Options: o, Hosts: c.Hosts.Hosts, Lease: c.Lease, Join: c.JoinTimeout}
	if h.Name = c.Node; h.Name == "" {
		id, _ := launcher.Detect(nil) // of its name alone
		h.Name = id.Node
	}
	h.Node = func(int) string { return h.Name }
	h.RuntimeDir = func(string) string { return c.RuntimeDir }
	h.BeforeStart = func(attempt int) { prune(c.RuntimeDir, c.Job, attempt, log) }
	if c.Dir == "" { // homes are often shared
		h.Dir = filepath.Join(o.Dir, h.Name)
	}
	mine, here, err := c.whose(ctx)
	if err != nil {
		return err
	}
	h.Rendezvous = rendezvousAt(here)
	if mine {
		if h.Listener, err = net.Listen("tcp", c.Coordinator); errors.Is(err, syscall.EADDRINUSE) {
			return fmt.Errorf("run: coordinate: %w (is another supervisor of this machine the coordinator? then --coordinate no)", err)
		} else if err != nil {
			return fmt.Errorf("run: coordinate: %w", err)
		}
		defer h.Listener.Close()
		if h.Accept, err = c.accept(); err != nil {
			return err
		}
	} else if h.Dial, err = c.dial(); err != nil {
		return err
	}
	s, err := process.NewHost(h)
	if err != nil {
		return err
	}
	end, err := c.Page.serve(ctx, c.Job, s, mine, log)
	if err != nil {
		return err
	}
	defer end()
	return s.Run(ctx)
}

// whose reports whether this host coordinates, and by which address of its own others reach its ranks.
func (c *Cmd) whose(ctx context.Context) (mine bool, here string, err error) {
	host, port, err := net.SplitHostPort(c.Coordinator)
	if err != nil {
		return false, "", err
	}
	var found []netip.Addr
	// A launcher may be quicker than names are.
	for until := time.Now().Add(c.JoinTimeout); ; {
		if found, err = net.DefaultResolver.LookupNetIP(ctx, "ip", host); err == nil {
			break
		}
		var dns *net.DNSError
		if !errors.As(err, &dns) || time.Now().After(until) {
			return false, "", fmt.Errorf("run: the coordinator's address: %w", err)
		}
		select {
		case <-time.After(time.Second):
		case <-ctx.Done():
			return false, "", ctx.Err()
		}
	}
	local, err := net.InterfaceAddrs()
	if err != nil {
		return false, "", fmt.Errorf("run: this host's addresses: %w", err)
	}
	own := slices.ContainsFunc(found, func(a netip.Addr) bool {
		return a.IsLoopback() || slices.ContainsFunc(local, func(l net.Addr) bool {
			n, ok := l.(*net.IPNet)
			return ok && n.IP.Equal(a.Unmap().AsSlice())
		})
	})
	switch {
	case !own && c.TLS.Wire() == nil:
		return false, "", fmt.Errorf("run: the coordinator %s is on another host, and who starts processes there must be known: give certificates by --tls.cert, --tls.key and --tls.ca (lockstep pki makes them)", c.Coordinator)
	case c.Coordinate == "yes" || c.Coordinate == "auto" && own:
		mine = true
	}
	// No packet is sent: the kernel says from which address it would go.
	u, err := net.Dial("udp", net.JoinHostPort(found[0].Unmap().String(), cmp.Or(port, "9")))
	if err != nil {
		return false, "", fmt.Errorf("run: which of this host's addresses leads to the coordinator: %w", err)
	}
	defer u.Close()
	here, _, err = net.SplitHostPort(u.LocalAddr().String())
	return mine, here, err
}

// dial connects to the coordinator, who must be the job's master by its certificate, or, on this
// machine, of this user or root.
func (c *Cmd) dial() (func(context.Context) (net.Conn, error), error) {
	creds, err := c.TLS.Wire().MasterOf(c.Job)
	if err != nil {
		return nil, fmt.Errorf("run: %w", err)
	}
	host, _, err := net.SplitHostPort(c.Coordinator)
	return func(ctx context.Context) (net.Conn, error) {
		ctx, cancel := context.WithTimeout(ctx, handshakes)
		defer cancel()
		var d net.Dialer
		raw, err := d.DialContext(ctx, "tcp", c.Coordinator)
		if err != nil {
			return nil, err
		}
		conn, info, err := creds.ClientHandshake(ctx, host, raw)
		if err != nil {
			raw.Close()
			return nil, fmt.Errorf("coordinator %s: %w", c.Coordinator, err)
		}
		return expiring(conn, info), nil
	}, err
}

// accept lets in supervisors that have a certificate of their node's, for this job, or, on this machine,
// those of this user and root.
func (c *Cmd) accept() (func(net.Conn) (net.Conn, func(string) error, error), error) {
	creds := wire.Loopback()
	if t := c.TLS.Wire(); t != nil {
		var err error
		if creds, err = t.Credentials(); err != nil {
			return nil, fmt.Errorf("run: %w", err)
		}
	}
	return func(raw net.Conn) (net.Conn, func(string) error, error) {
		conn, info, err := creds.ServerHandshake(raw)
		if err != nil {
			return nil, nil, err
		}
		t, ok := info.(credentials.TLSInfo)
		if !ok {
			return conn, func(string) error { return nil }, nil
		}
		id, err := wire.IdentityIn(t.State.PeerCertificates[0])
		if err != nil {
			conn.Close()
			return nil, nil, err
		}
		return expiring(conn, info), func(node string) error { return id.Agent(node, c.Job) }, nil
	}, nil
}

// expiring ends a connection with the certificate that opened it.
func expiring(c net.Conn, info credentials.AuthInfo) net.Conn {
	t, ok := info.(credentials.TLSInfo)
	if !ok {
		return c
	}
	var last time.Time
	for _, chain := range t.State.VerifiedChains {
		first := slices.MinFunc(chain, func(a, b *x509.Certificate) int { return a.NotAfter.Compare(b.NotAfter) }).NotAfter
		if first.After(last) {
			last = first
		}
	}
	end := time.AfterFunc(time.Until(last), func() { c.Close() })
	return &ending{c, end}
}

type ending struct {
	net.Conn
	end *time.Timer
}

func (e *ending) Close() error {
	e.end.Stop()
	return e.Conn.Close()
}

// rendezvousAt gives each attempt's ranks two ports of an address of this host's to meet on.
// One is ccl's, and kept until the next attempt: nobody else is given it before rank 0 listens.
// The other one is torch.distributed's, or whatever listens on MASTER_PORT; that may want it for
// itself alone, so it is only free now. If it is taken, the attempt fails and the next one has another.
func rendezvousAt(here string) func() (env []string, err error) {
	var kept *ports.Held
	return func() ([]string, error) {
		_ = kept.Close() // what was kept for the last attempt
		var err error
		if kept, err = ports.Hold(here, 1); err != nil {
			return nil, fmt.Errorf("a port for the rendezvous: %w", err)
		}
		id, err := ccl.NewUniqueID(kept.Addrs[0])
		if err != nil {
			return nil, err
		}
		own, err := ports.Hold(here, 1)
		if err != nil {
			return nil, fmt.Errorf("a port for the program: %w", err)
		}
		host, port, err := net.SplitHostPort(own.Addrs[0])
		return []string{"LOCKSTEP_COMM_ID=" + id.String(), "MASTER_ADDR=" + host, "MASTER_PORT=" + port}, errors.Join(err, own.Close())
	}
}
