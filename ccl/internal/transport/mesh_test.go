package transport

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/lockstep-ccl/lockstep/ccl/internal/bootstrap"
	"github.com/lockstep-ccl/lockstep/ccl/internal/nic"
	"github.com/lockstep-ccl/lockstep/ccl/internal/rdma"
	"github.com/lockstep-ccl/lockstep/ccl/internal/verbs/verbstest"
	"github.com/lockstep-ccl/lockstep/record"
	"go.uber.org/goleak"
)

var secret = []byte("0123456789abcdef0123456789abcdef")

func TestMain(m *testing.M) {
	if role := os.Getenv("TRANSPORT_TEST_ROLE"); role != "" {
		rankMain(role)
		return
	}
	// A recorder that nobody holds any more is unmapped by a cleanup of the runtime, maybe just now.
	goleak.VerifyTestMain(m, goleak.IgnoreAnyFunction("runtime.runCleanups"))
}

// roles are what a rank that is a process of its own can do.
var roles = map[string]func(m *Mesh, rank, size int) error{}

// place is how the ranks of a test are spread over nodes.
type place string

const (
	oneNode   place = "shm"   // all share memory
	apart     place = "tcp"   // each on a node of its own
	pairwise  place = "mixed" // two ranks a node
	overRDMA  place = "rdma"  // each on a node of its own, with fake NICs; in one process
	mixedRDMA place = "mixed rdma"
	placeName       = "TRANSPORT_TEST_PLACE"
)

func (p place) node(rank int) string {
	switch p {
	case apart, overRDMA:
		return fmt.Sprint("node", rank)
	case pairwise, mixedRDMA:
		return fmt.Sprint("node", rank/2)
	}
	return "node"
}

func config(p place, dir string, c *bootstrap.Control) Config {
	return Config{
		ID: c.ID().Uint64(), Name: "test", Rank: c.Rank(), Size: c.Size(), Node: p.node(c.Rank()), Dir: dir,
		Exchange: c.AllGather, Key: c.Key("data"),
	}
}

func rankMain(role string) {
	atoi := func(name string) int { n, _ := strconv.Atoi(os.Getenv(name)); return n }
	rank, size := atoi("TRANSPORT_TEST_RANK"), atoi("TRANSPORT_TEST_SIZE")
	err := func() error {
		id, err := bootstrap.ParseID(os.Getenv("TRANSPORT_TEST_ID"))
		if err != nil {
			return err
		}
		ctx, cancel := context.WithTimeout(context.Background(), 4*time.Minute)
		defer cancel()
		c, err := bootstrap.Join(ctx, bootstrap.Config{ID: id, Rank: rank, Size: size, Secret: secret})
		if err != nil {
			return err
		}
		defer c.Leave(ctx)
		m, err := NewMesh(ctx, config(place(os.Getenv(placeName)), os.Getenv("TRANSPORT_TEST_DIR"), c))
		if err != nil {
			return err
		}
		defer m.Close()
		return roles[role](m, rank, size)
	}()
	if err != nil {
		fmt.Fprintf(os.Stderr, "rank %d: %v\n", rank, err)
		os.Exit(1)
	}
}

// processes starts ranks 1 to n-1 as processes in a role, and returns rank 0's mesh.
func processes(tb testing.TB, p place, n int, role string) (*Mesh, []*exec.Cmd) {
	tb.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 4*time.Minute)
	tb.Cleanup(cancel)
	ln, err := bootstrap.Listen("127.0.0.1:0", secret)
	if err != nil {
		tb.Fatal(err)
	}
	id := ln.NewID()
	dir := tempDir(tb)
	cmds := make([]*exec.Cmd, n)
	for r := 1; r < n; r++ {
		cmd := exec.Command(os.Args[0])
		cmd.Env = append(os.Environ(), "TRANSPORT_TEST_ROLE="+role, "TRANSPORT_TEST_ID="+id.String(), "TRANSPORT_TEST_DIR="+dir,
			fmt.Sprint("TRANSPORT_TEST_RANK=", r), fmt.Sprint("TRANSPORT_TEST_SIZE=", n), placeName+"="+string(p))
		cmd.Stdout, cmd.Stderr = os.Stdout, os.Stderr
		cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
		if err := cmd.Start(); err != nil {
			tb.Fatal(err)
		}
		tb.Cleanup(func() { cmd.Process.Kill(); cmd.Wait() })
		cmds[r] = cmd
	}
	c, err := bootstrap.Join(ctx, bootstrap.Config{ID: id, Rank: 0, Size: n, Secret: secret, Listener: ln})
	if err != nil {
		tb.Fatal(err)
	}
	m, err := NewMesh(ctx, config(p, dir, c))
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() { m.Close(); c.Close() })
	return m, cmds
}

// tempDir is in memory, as the runtime directory is.
func tempDir(tb testing.TB) string {
	dir, err := os.MkdirTemp("/dev/shm", "transport-test-")
	if err != nil {
		return tb.TempDir()
	}
	tb.Cleanup(func() {
		left, _ := os.ReadDir(dir)
		for _, e := range left {
			tb.Errorf("left behind: %s", e.Name())
		}
		os.RemoveAll(dir)
	})
	return dir
}

// nics gives each rank the ports of a fabric, its own first, on both rails.
func nics(tb testing.TB, f *verbstest.Fabric) func(rank int) RDMA {
	tree, err := nic.Read(os.DirFS(f.Sysfs()))
	if err != nil {
		tb.Fatal(err)
	}
	subnets := map[string][]netip.Prefix{}
	for _, d := range tree.Devices {
		for _, p := range d.Ports {
			for _, g := range p.GIDs {
				if g.Addr.Is4() {
					subnets[g.NetDev] = append(subnets[g.NetDev], netip.PrefixFrom(g.Addr, 16))
				}
			}
		}
	}
	tree.SetSubnets(func(netdev string) []netip.Prefix { return subnets[netdev] })
	return func(rank int) RDMA {
		ports, err := tree.Select(nic.Near{NUMA: -1, LocalRank: rank}, nic.Override{})
		return RDMA{Net: NetRDMA, Ports: ports, Why: err, Options: rdma.Options{
			Lanes: 2, FailbackAfter: 50 * time.Millisecond, GiveUpAfter: 5 * time.Second, Stuck: 10 * time.Second,
		}}
	}
}

// goroutines runs f as n ranks of this process; change edits each Config first.
func goroutines(tb testing.TB, p place, n int, change func(*Config), f func(m *Mesh, rank, size int) error) {
	tb.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 4*time.Minute)
	defer cancel()
	ln, err := bootstrap.Listen("127.0.0.1:0", secret)
	if err != nil {
		tb.Fatal(err)
	}
	id := ln.NewID()
	dir := tempDir(tb)
	var ports func(rank int) RDMA
	if p == overRDMA || p == mixedRDMA {
		ports = nics(tb, verbstest.New(tb, verbstest.Options{}))
	}
	errs := make([]error, n)
	var wg sync.WaitGroup
	for r := range n {
		wg.Go(func() {
			errs[r] = func() error {
				bc := bootstrap.Config{ID: id, Rank: r, Size: n, Secret: secret}
				if r == 0 {
					bc.Listener = ln
				}
				c, err := bootstrap.Join(ctx, bc)
				if err != nil {
					return err
				}
				defer c.Leave(ctx)
				cfg := config(p, dir, c)
				if ports != nil {
					cfg.RDMA = ports(r)
				}
				if change != nil {
					change(&cfg)
				}
				m, err := NewMesh(ctx, cfg)
				if err != nil {
					return err
				}
				defer m.Close()
				if err := f(m, r, n); err != nil {
					return fmt.Errorf("rank %d: %w", r, err)
				}
				return attended(m, func() error { return c.Barrier(ctx) })
			}()
		})
	}
	wg.Wait()
	if err := errors.Join(errs...); err != nil {
		tb.Fatal(err)
	}
}

// ---- what an executor does, at its simplest ----

// attended waits for f, and looks after the links meanwhile: who has all that it wants may
// still owe a peer sockets, or bytes again.
func attended(m *Mesh, f func() error) error {
	done := make(chan error, 1)
	go func() { done <- f() }()
	for {
		select {
		case err := <-done:
			return err
		case <-time.After(time.Millisecond):
			m.Look()
		}
	}
}

// patience bounds what must end; it is no measurement.
const patience = time.Minute

var errPatience = errors.New("no progress")

type until struct {
	m  *Mesh
	at time.Time
	n  int
}

func wait(m *Mesh) until { return until{m: m} }

// again waits for progress; an error when there is none for too long.
func (u *until) again() error {
	u.m.Wait(time.Second)
	if u.n++; u.n%1024 == 0 {
		if u.at.IsZero() {
			u.at = time.Now()
		} else if time.Since(u.at) > patience {
			return errPatience
		}
	}
	return nil
}

func sendAll(m *Mesh, l Link, b []byte) error {
	for u := wait(m); len(b) > 0; {
		n, err := l.TrySend(b)
		if err != nil {
			return err
		}
		if b = b[n:]; n == 0 {
			if err := u.again(); err != nil {
				return err
			}
		}
	}
	return nil
}

func recvAll(m *Mesh, l Link, b []byte) error {
	for u := wait(m); len(b) > 0; {
		n, err := l.TryRecv(b)
		if err != nil {
			return err
		}
		if b = b[n:]; n == 0 {
			if err := u.again(); err != nil {
				return err
			}
		}
	}
	return nil
}

func writeLine(m *Mesh, l Link, b []byte, tag uint32) error {
	for u := wait(m); ; {
		if ok, err := l.TryWriteLine(b, tag); ok || err != nil {
			return err
		}
		if err := u.again(); err != nil {
			return err
		}
	}
}

func readLine(m *Mesh, l Link, b []byte) (int, uint32, error) {
	for u := wait(m); ; {
		if n, tag, ok, err := l.TryReadLine(b); ok || err != nil {
			return n, tag, err
		}
		if err := u.again(); err != nil {
			return 0, 0, err
		}
	}
}

// TestNoRuntimeDirectory: where somebody else has taken the runtime directory, or there is
// none, ranks of one node talk TCP.
func TestNoRuntimeDirectory(t *testing.T) {
	base := t.TempDir()
	link, file := filepath.Join(base, "link"), filepath.Join(base, "file")
	if err := errors.Join(os.Symlink(base, link), os.WriteFile(file, nil, 0o600)); err != nil {
		t.Fatal(err)
	}
	for _, dir := range []string{link, file, filepath.Join(file, "below")} {
		goroutines(t, oneNode, 2, func(c *Config) { c.Dir = dir }, func(m *Mesh, rank, size int) error {
			if m.Local(1 - rank) {
				t.Errorf("%s: memory is shared", dir)
			}
			return exchange(m, rank, size, 1, 10, 4096)
		})
	}
}

// TestSeeks: what record says of how long connections look for a path, and diagnosis waits for, is
// what they do unless a job says otherwise.
func TestSeeks(t *testing.T) {
	var o rdma.Options
	if err := o.SetDefaults(); err != nil {
		t.Fatal(err)
	}
	if o.GiveUpAfter != record.TransportRDMA.Seeks() || bootstrap.DefaultOutage != record.TransportTCP.Seeks() {
		t.Errorf("RDMA %v, TCP %v; want %v, %v", o.GiveUpAfter, bootstrap.DefaultOutage, record.TransportRDMA.Seeks(), record.TransportTCP.Seeks())
	}
}
