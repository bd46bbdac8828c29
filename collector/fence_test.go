package collector_test

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"

	"github.com/lockstep-ccl/lockstep/collector/agent"
	"github.com/lockstep-ccl/lockstep/collector/master"
	"github.com/lockstep-ccl/lockstep/collector/wire"
	"github.com/lockstep-ccl/lockstep/collector/wire/wiretest"
	"github.com/lockstep-ccl/lockstep/fence"
	"github.com/lockstep-ccl/lockstep/record"
)

// beFenceRank is a rank that does nothing but be there, by what its environment says: deaf
// to SIGTERM, or with a child that has left its session.
func beFenceRank() {
	number := func(name string) int { n, _ := strconv.Atoi(os.Getenv(name)); return n }
	w, err := record.Create(record.Options{Dir: os.Getenv("LOCKSTEP_TEST_DIR"), Identity: record.Identity{
		Job: "job", Node: "node", Rank: int32(number("LOCKSTEP_TEST_RANK")), WorldSize: int32(number("LOCKSTEP_TEST_SIZE")), Attempt: uint32(number("LOCKSTEP_RESTART_COUNT")),
	}})
	if err != nil {
		fmt.Println(err)
		os.Exit(1)
	}
	if _, ok := w.AddComm(record.CommEntry{ID: commID + uint64(number("LOCKSTEP_RESTART_COUNT")), Name: "dp", Rank: int32(number("LOCKSTEP_TEST_RANK")), Size: int32(number("LOCKSTEP_TEST_SIZE")), State: record.CommJoined}); !ok {
		os.Exit(1)
	}
	child := 0
	switch os.Getenv("LOCKSTEP_TEST_KIND") {
	case "deaf":
		signal.Ignore(syscall.SIGTERM)
	case "parent":
		// An orphan in a session of its own: only the token says whose it is.
		out, err := exec.Command("setsid", "sh", "-c", "sleep 600 >/dev/null 2>&1 & echo $!").Output()
		if err != nil {
			fmt.Println(err)
		}
		child, _ = strconv.Atoi(strings.TrimSpace(string(out)))
	}
	fmt.Println("here", child)
	select {}
}

type fenceRank struct {
	*exec.Cmd
	child int
	gone  chan struct{}
}

func (r *fenceRank) lives() bool {
	select {
	case <-r.gone:
		return false
	default:
		return true
	}
}

func spawnRank(t *testing.T, dir string, rank, size, attempt int, kind string, env ...string) *fenceRank {
	t.Helper()
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(append(os.Environ(), env...), "LOCKSTEP_TEST_AS=fence-rank", "LOCKSTEP_TEST_DIR="+dir, fmt.Sprint("LOCKSTEP_TEST_RANK=", rank),
		fmt.Sprint("LOCKSTEP_TEST_SIZE=", size), fmt.Sprint("LOCKSTEP_RESTART_COUNT=", attempt), "LOCKSTEP_TEST_KIND="+kind, "LOCKSTEP_NODE="+filepath.Base(filepath.Dir(dir)), "GORACE=atexit_sleep_ms=0")
	out, err := cmd.StdoutPipe()
	if err == nil {
		err = cmd.Start()
	}
	if err != nil {
		t.Fatal(err)
	}
	r := &fenceRank{Cmd: cmd, gone: make(chan struct{})}
	line, err := bufio.NewReader(out).ReadString('\n')
	if _, e := fmt.Sscanf(line, "here %d", &r.child); e != nil {
		t.Fatalf("%v: %q", err, line)
	}
	go func() { _ = cmd.Wait(); close(r.gone) }()
	var child *os.Process // held from now on: when it has ended its number may be a stranger's
	if r.child > 1 {
		if child, err = os.FindProcess(r.child); err != nil {
			t.Fatal(err)
		}
	}
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		<-r.gone
		if child != nil {
			_ = child.Kill()
		}
	})
	return r
}

// link is a wire that can be cut.
type link struct {
	net.Listener
	to    string
	mu    sync.Mutex
	cut   bool
	conns map[net.Conn]bool
	over  sync.WaitGroup
}

func newLink(t *testing.T, to string) *link {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	l := &link{Listener: ln, to: to, conns: map[net.Conn]bool{}}
	l.over.Go(func() {
		for {
			c, err := ln.Accept()
			if err != nil {
				return
			}
			d, err := net.Dial("tcp", to)
			if err != nil || !l.keep(c, d) {
				c.Close()
				continue
			}
			for _, p := range [][2]net.Conn{{c, d}, {d, c}} {
				l.over.Go(func() { _, _ = io.Copy(p[0], p[1]); p[0].Close(); p[1].Close() })
			}
		}
	})
	t.Cleanup(func() { ln.Close(); l.set(true); l.over.Wait() })
	return l
}

func (l *link) keep(conns ...net.Conn) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, c := range conns {
		if l.cut {
			c.Close()
		}
		l.conns[c] = true
	}
	return !l.cut
}

func (l *link) set(cut bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.cut = cut; cut {
		for c := range l.conns {
			c.Close()
		}
		clear(l.conns)
	}
}

// town is a master and the agents of some nodes, each behind a wire.
type town struct {
	m      *master.Master
	dirs   []string
	links  []*link
	agents []*agent.Agent
}

func newFenceTown(t *testing.T, nodes int, o master.Options) *town {
	t.Helper()
	m, _ := startMaster(t, o)
	w := &town{m: m}
	for i := range nodes {
		l := newLink(t, m.Addr().String())
		dir := filepath.Join(t.TempDir(), "rt")
		if err := os.Mkdir(dir, 0o700); err != nil {
			t.Fatal(err)
		}
		a, err := agent.New(agent.Options{Node: fmt.Sprint("n", i), Dir: dir, Master: at(l.Addr().String()), Log: quiet(t)})
		if err != nil {
			t.Fatal(err)
		}
		run(t, a.Run)
		w.dirs, w.links, w.agents = append(w.dirs, dir), append(w.links, l), append(w.agents, a)
	}
	return w
}

func (w *town) ranks(t *testing.T, n int, attempt int) {
	t.Helper()
	eventually(t, fmt.Sprintf("%d ranks of attempt %d are known", n, attempt), func() bool {
		s := w.m.Snapshot()
		return s.WorldSize == n && s.Unseen == 0 && int(s.Attempt) == attempt
	})
}

// patience is a context of a call that says one deadline, and hangs up a minute after it: an
// answer that a busy machine delays is one.
type patience struct {
	context.Context
	says time.Time
}

func (p patience) Deadline() (time.Time, bool) { return p.says, true }

func patient(ctx context.Context, d time.Duration) (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithTimeout(ctx, d+time.Minute)
	return patience{ctx, time.Now().Add(d)}, cancel
}

func (w *town) fence(t *testing.T, attempt int, node string, d time.Duration) *wire.FenceReply {
	t.Helper()
	conn, err := grpc.NewClient(w.m.Addr().String(), grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	ctx, cancel := patient(t.Context(), d)
	defer cancel()
	r, err := wire.NewFencesClient(conn).Fence(ctx, &wire.FenceRequest{Job: "job", Attempt: uint32(attempt), Node: node})
	if err != nil {
		t.Fatal(err)
	}
	return r
}

// allowed is the environment of a rank that may be stopped. The grace is longer than a rank needs
// to end when told to on a busy machine.
func allowed(tok fence.Token, more ...string) []string {
	return append([]string{"LOCKSTEP_FENCE=stop", "LOCKSTEP_FENCE_GRACE=1m", fence.Env + "=" + tok.String()}, more...)
}

func alive(pid int) bool {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	return err == nil && !strings.Contains(string(b), ") Z ")
}

// TestFence: what is left of an attempt is stopped on all its nodes, whatever it does against that.
func TestFence(t *testing.T) {
	w := newFenceTown(t, 2, master.Options{StateDir: t.TempDir()})
	tok := fence.New(3, 0)
	var ranks []*fenceRank
	for r, kind := range []string{"plain", "deaf", "parent", "plain"} {
		env := allowed(tok)
		if kind == "deaf" {
			env = append(env, "LOCKSTEP_FENCE_GRACE=300ms")
		}
		ranks = append(ranks, spawnRank(t, w.dirs[r/2], r, 4, 3, kind, env...))
	}
	if err := ranks[3].Process.Signal(syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	stranger := spawnRank(t, t.TempDir(), 0, 1, 3, "plain", allowed(fence.New(3, 0))...) // another job's, of this user
	w.ranks(t, 4, 3)
	if r := w.fence(t, 3, "", time.Minute); !r.Proven || !strings.Contains(r.How, "2 nodes") {
		t.Fatalf("%+v", r)
	}
	for i, r := range ranks {
		select {
		case <-r.gone:
		case <-time.After(10 * time.Second):
			t.Errorf("rank %d lives", i)
		}
	}
	if ranks[2].child < 2 || alive(ranks[2].child) {
		t.Errorf("rank 2's child %d lives", ranks[2].child)
	}
	if !stranger.lives() {
		t.Error("a process of no rank of this job was stopped")
	}
	var stopped, killed uint64
	eventually(t, "it is counted", func() bool {
		stopped, killed = 0, 0
		for _, a := range w.agents {
			for _, f := range a.Snapshot().Fences {
				stopped, killed = stopped+f.Stopped, killed+f.Killed
			}
		}
		return stopped+killed == 5
	})
	if killed != 1 {
		t.Errorf("%d ended when told to, %d were killed", stopped, killed)
	}
	// Asked again, the answer is the same.
	if r := w.fence(t, 3, "", time.Minute); !r.Proven {
		t.Errorf("%+v", r)
	}
	eventually(t, "the master counts it", func() bool {
		s := w.m.Snapshot()
		return s.Fences.Proven == 2 && s.FencedAttempt == 3
	})
}

// TestFenceTouchesNothingUnasked: a job whose environment does not say so is only watched.
func TestFenceTouchesNothingUnasked(t *testing.T) {
	w := newFenceTown(t, 1, master.Options{})
	one := spawnRank(t, w.dirs[0], 0, 2, 0, "plain", "LOCKSTEP_FENCE=yes")
	other := spawnRank(t, w.dirs[0], 1, 2, 0, "plain")
	w.ranks(t, 2, 0)
	r := w.fence(t, 0, "", 4*time.Second)
	if r.Proven || !strings.Contains(r.How, "node n0: 2 processes live") || !strings.Contains(r.How, "LOCKSTEP_FENCE=stop") {
		t.Errorf("%+v", r)
	}
	if !one.lives() || !other.lives() {
		t.Fatal("a process was stopped")
	}
	// That they are gone is proof all the same.
	for _, p := range []*fenceRank{one, other} {
		_ = p.Process.Kill()
	}
	if r := w.fence(t, 0, "", time.Minute); !r.Proven {
		t.Errorf("%+v", r)
	}
}

// TestACutOffNodeComesBack: there is no proof while it is not heard; it hears the order when it
// is back, and the attempt that runs by then is left alone, also on that node.
func TestACutOffNodeComesBack(t *testing.T) {
	w := newFenceTown(t, 2, master.Options{Patience: time.Second})
	tok := fence.New(0, 0)
	var old []*fenceRank
	for r := range 2 {
		old = append(old, spawnRank(t, w.dirs[r], r, 2, 0, "plain", allowed(tok)...))
	}
	w.ranks(t, 2, 0)
	w.links[1].set(true)
	if r := w.fence(t, 0, "", 4*time.Second); r.Proven || !strings.Contains(r.How, "node n1") {
		t.Errorf("%+v", r)
	}
	<-old[0].gone
	if !old[1].lives() {
		t.Fatal("who stopped it?")
	}
	next := fence.New(1, tok.Generation)
	var now []*fenceRank
	for r := range 2 { // both on the node that is heard
		now = append(now, spawnRank(t, w.dirs[0], r, 2, 1, "plain", allowed(next)...))
	}
	w.ranks(t, 2, 1)
	w.links[1].set(false)
	select {
	case <-old[1].gone:
	case <-time.After(time.Minute):
		t.Fatal("the old rank goes on beside the new attempt")
	}
	if r := w.fence(t, 0, "", time.Minute); !r.Proven {
		t.Errorf("%+v", r)
	}
	if r := w.fence(t, 0, "n1", time.Minute); !r.Proven {
		t.Errorf("on the node alone: %+v", r)
	}
	for r, p := range now {
		if !p.lives() {
			t.Errorf("rank %d of the new attempt was stopped", r)
		}
	}
}

// TestLease: a node that does not hear the master stops its ranks by itself, and no sooner.
func TestLease(t *testing.T) {
	w := newFenceTown(t, 1, master.Options{Patience: time.Second})
	tok := fence.New(0, 0)
	leased := spawnRank(t, w.dirs[0], 0, 2, 0, "plain", allowed(tok, "LOCKSTEP_FENCE_LEASE=5s")...)
	other := spawnRank(t, w.dirs[0], 1, 2, 0, "plain", "LOCKSTEP_FENCE_LEASE=5s") // has not allowed it
	w.ranks(t, 2, 0)
	w.links[0].set(true)
	cut := time.Now()
	select {
	case <-leased.gone:
	case <-time.After(time.Minute):
		t.Fatal("it runs on")
	}
	// Counted from the last report that the master is known to have, which may be a while before.
	if d := time.Since(cut); d < 2*time.Second {
		t.Errorf("stopped after %v", d)
	}
	if !other.lives() {
		t.Error("a rank was stopped whose environment does not allow it")
	}
	eventually(t, "it is counted", func() bool {
		f := w.agents[0].Snapshot().Fences
		return len(f) == 1 && f[0].Leases == 1 && f[0].Stopped == 1
	})
}

// TestFenceIsTheRemediators: nobody else may order it, and not of another job or a coming attempt.
func TestFenceIsTheRemediators(t *testing.T) {
	ca := wiretest.NewAuthority(t)
	masterTLS := ca.Master("job")
	m, _ := startMaster(t, master.Options{TLS: &masterTLS})
	call := func(tls wire.TLS, q *wire.FenceRequest, d time.Duration) error {
		creds, err := tls.MasterOf("job")
		if err != nil {
			return err
		}
		conn, err := grpc.NewClient(m.Addr().String(), grpc.WithTransportCredentials(creds))
		if err != nil {
			return err
		}
		defer conn.Close()
		ctx := t.Context()
		if d > 0 {
			var cancel context.CancelFunc
			ctx, cancel = patient(ctx, d)
			defer cancel()
		}
		_, err = wire.NewFencesClient(conn).Fence(ctx, q)
		return err
	}
	ok := &wire.FenceRequest{Job: "job"}
	for name, tls := range map[string]wire.TLS{"agent": ca.Agent("n0"), "agent of the job": ca.Agent("n0", "job"), "master": ca.Master("job"), "another job's master": ca.Master("other")} {
		if err := call(tls, ok, time.Minute); status.Code(err) != codes.PermissionDenied {
			t.Errorf("%s: %v", name, err)
		}
	}
	remediator := ca.Remediator()
	var calls sync.WaitGroup
	for name, tt := range map[string]struct {
		q    *wire.FenceRequest
		d    time.Duration
		want codes.Code
	}{
		"another job":      {&wire.FenceRequest{Job: "other"}, time.Minute, codes.FailedPrecondition},
		"no deadline":      {ok, 0, codes.InvalidArgument},
		"an endless node":  {&wire.FenceRequest{Job: "job", Node: strings.Repeat("n", 64)}, time.Minute, codes.InvalidArgument},
		"an endless job":   {&wire.FenceRequest{Job: strings.Repeat("j", 2000)}, time.Minute, codes.Internal},
		"nobody is known":  {ok, 4 * time.Second, codes.OK},
		"the remediator's": {&wire.FenceRequest{Job: "job", Node: "n0"}, 4 * time.Second, codes.OK},
	} {
		calls.Go(func() {
			if err := call(remediator, tt.q, tt.d); status.Code(err) != tt.want {
				t.Errorf("%s: %v", name, err)
			}
		})
	}
	calls.Wait()
	eventually(t, "it is counted", func() bool { return m.Snapshot().Denied >= 4 })
}

// TestNotesAreTheRemediators: only a remediator tells a master what was done about an
// incident, and of none that the master does not have.
func TestNotesAreTheRemediators(t *testing.T) {
	ca := wiretest.NewAuthority(t)
	masterTLS := ca.Master("job")
	m, _ := startMaster(t, master.Options{TLS: &masterTLS})
	for _, tt := range []struct {
		tls  wire.TLS
		q    *wire.NoteRequest
		want codes.Code
	}{
		{ca.Agent("n0"), &wire.NoteRequest{Job: "job"}, codes.PermissionDenied},
		{ca.Agent("n0", "job"), &wire.NoteRequest{Job: "job"}, codes.PermissionDenied},
		{ca.Master("other"), &wire.NoteRequest{Job: "job"}, codes.PermissionDenied},
		{ca.Remediator(), &wire.NoteRequest{Job: "other"}, codes.FailedPrecondition},
		{ca.Remediator(), &wire.NoteRequest{Job: "job", Incident: "invented"}, codes.NotFound},
	} {
		creds, err := tt.tls.MasterOf("job")
		if err != nil {
			t.Fatal(err)
		}
		conn, err := grpc.NewClient(m.Addr().String(), grpc.WithTransportCredentials(creds))
		if err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		_, err = wire.NewNotesClient(conn).Note(ctx, tt.q)
		cancel()
		conn.Close()
		if status.Code(err) != tt.want {
			t.Errorf("%v: %v, want %v", tt.q, err, tt.want)
		}
	}
}
