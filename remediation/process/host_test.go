package process

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/lockstep-ccl/lockstep/fence"
	"github.com/lockstep-ccl/lockstep/internal/ports"
)

const testHosts = 3

// host is a supervisor process of a job on several hosts: its name is its directory's, and n0 coordinates.
func host(dir, addr string) int {
	name := filepath.Base(dir)
	h := HostOptions{Options: options(dir, "census"), Name: name, Hosts: testHosts, Lease: 30 * time.Second, Join: 5 * time.Minute}
	h.Ranks, h.MaxRestarts = testHosts, 1000
	h.Logger = slog.New(slog.NewTextHandler(os.Stderr, nil)).With("host", name)
	h.Rendezvous = func() ([]string, error) { return []string{"MASTER_ADDR=127.0.0.1", "MASTER_PORT=1"}, nil }
	h.Dial = func(ctx context.Context) (net.Conn, error) {
		var d net.Dialer
		return d.DialContext(ctx, "tcp", addr)
	}
	if name == "n0" {
		l, err := net.Listen("tcp", addr)
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			return 1
		}
		h.Listener = l
		h.Accept = func(c net.Conn) (net.Conn, func(string) error, error) {
			return c, func(string) error { return nil }, nil
		}
	}
	s, err := NewHost(h)
	if err == nil {
		err = s.Run(context.Background())
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, name, err)
		return 1
	}
	return 0
}

// census is a rank that says so when it meets one of another attempt. It ends when the job may.
func census() int {
	base := filepath.Dir(filepath.Dir(os.Getenv("LOCKSTEP_SECRET_FILE")))
	token := os.Getenv(fence.Env)
	own, err := os.OpenFile(filepath.Join(base, "census", token+"."+os.Getenv("RANK")), os.O_CREATE|os.O_RDWR, 0o600)
	if err == nil {
		err = syscall.Flock(int(own.Fd()), syscall.LOCK_EX)
	}
	if err != nil {
		fmt.Println(err)
		return 1
	}
	say := func(file, line string) {
		if f, err := os.OpenFile(filepath.Join(base, file), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600); err == nil {
			fmt.Fprintln(f, line)
			f.Close()
		}
	}
	others, _ := filepath.Glob(filepath.Join(base, "census", "*"))
	for _, path := range others {
		if strings.HasPrefix(filepath.Base(path), token+".") {
			continue
		}
		f, err := os.Open(path)
		if err != nil {
			continue
		}
		// Shared, for others of this attempt look at the same time.
		if err := syscall.Flock(int(f.Fd()), syscall.LOCK_SH|syscall.LOCK_NB); err != nil {
			say("overlap", filepath.Base(path)+" beside "+token)
		}
		f.Close()
	}
	say("began", os.Getenv("LOCKSTEP_RESTART_COUNT")+" "+os.Getenv("RANK"))
	for {
		if _, err := os.Stat(filepath.Join(base, "finish")); err == nil {
			return 0
		}
		time.Sleep(5 * time.Millisecond)
	}
}

// town is several supervisors on one machine.
type town struct {
	t    *testing.T
	dir  string
	addr string
	cmds map[string]*exec.Cmd
	log  *os.File
}

func newTown(t *testing.T, hosts int) *town {
	dir, err := os.MkdirTemp("", "lk") // short: socket paths have a limit of 108 bytes
	if err != nil {
		t.Fatal(err)
	}
	log, err := os.Create(filepath.Join(dir, "log"))
	if err != nil {
		t.Fatal(err)
	}
	at, err := ports.Hold("127.0.0.1", 1) // nobody takes it while nobody listens there
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = at.Close() })
	w := &town{t: t, dir: dir, addr: at.Addrs[0], cmds: map[string]*exec.Cmd{}, log: log}
	t.Cleanup(func() {
		for n := range w.cmds {
			w.kill(n)
		}
		if t.Failed() {
			b, _ := os.ReadFile(log.Name())
			t.Logf("%s", b[max(0, len(b)-20_000):])
		}
		log.Close()
		os.RemoveAll(dir)
	})
	if err := os.Mkdir(filepath.Join(dir, "census"), 0o700); err != nil {
		t.Fatal(err)
	}
	for i := range hosts {
		w.start(fmt.Sprint("n", i))
	}
	return w
}

func (w *town) start(name string) {
	w.t.Helper()
	cmd := exec.Command(os.Args[0], "host", filepath.Join(w.dir, name), w.addr)
	cmd.Stdout, cmd.Stderr = w.log, w.log
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if err := cmd.Start(); err != nil {
		w.t.Fatal(err)
	}
	w.cmds[name] = cmd
}

func (w *town) kill(name string) {
	if cmd := w.cmds[name]; cmd != nil {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
		delete(w.cmds, name)
	}
}

func (w *town) control() *Client { return NewClient(filepath.Join(w.dir, "n0", "control.sock")) }

// running waits until all ranks of an attempt at or after one run, and returns its state.
func (w *town) running(from int) *Status {
	w.t.Helper()
	var s *Status
	var err error
	for until := time.Now().Add(3 * time.Minute); time.Now().Before(until); time.Sleep(5 * time.Millisecond) {
		ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
		s, err = w.control().Status(ctx)
		cancel()
		if err != nil || s.State != "running" || s.Attempt < from || len(s.Ranks) != testHosts {
			continue
		}
		began, _ := os.ReadFile(filepath.Join(w.dir, "began"))
		all := true
		for _, r := range s.Ranks {
			all = all && r.State == "running" && bytes.Contains(began, fmt.Appendf(nil, "%d %d\n", s.Attempt, r.Rank))
		}
		if all {
			return s
		}
	}
	w.t.Fatalf("no attempt from %d on runs: %+v, %v", from, s, err)
	return nil
}

// finish lets the job end, and looks at how it did.
func (w *town) finish() {
	w.t.Helper()
	for s := w.running(0); len(s.Heard) < len(w.cmds); s = w.running(0) { // who is not there does not hear of the end
		time.Sleep(10 * time.Millisecond)
	}
	if err := os.WriteFile(filepath.Join(w.dir, "finish"), nil, 0o600); err != nil {
		w.t.Fatal(err)
	}
	for name, cmd := range w.cmds {
		if err := cmd.Wait(); err != nil {
			w.t.Errorf("host %s: %v", name, err)
		}
		delete(w.cmds, name)
	}
	if b, err := os.ReadFile(filepath.Join(w.dir, "overlap")); !errors.Is(err, os.ErrNotExist) {
		w.t.Errorf("ranks of two attempts at a time: %s %v", b, err)
	}
}

// TestHostsKilled kills supervisors, the coordinating one too, with SIGKILL at random times. No two attempts
// have ranks at a time, none is numbered twice, and the job goes on.
func TestHostsKilled(t *testing.T) {
	kills := 8
	if testing.Short() {
		kills = 4
	}
	if n, err := strconv.Atoi(os.Getenv("LOCKSTEP_TEST_KILLS")); err == nil {
		kills = n
	}
	w := newTown(t, testHosts+1)
	w.running(0)
	for range kills {
		if rand.IntN(3) > 0 {
			w.running(0)
		}
		time.Sleep(time.Duration(rand.IntN(200)) * time.Millisecond)
		var dead []string
		for range 1 + rand.IntN(2) {
			dead = append(dead, fmt.Sprint("n", rand.IntN(testHosts+1)))
		}
		for _, n := range dead {
			w.kill(n)
		}
		time.Sleep(time.Duration(rand.IntN(100)) * time.Millisecond)
		for _, n := range dead {
			if w.cmds[n] == nil {
				w.start(n)
			}
		}
	}
	s := w.running(0)
	t.Logf("attempt %d after %d kills", s.Attempt, kills)
	w.finish()
	began, err := os.ReadFile(filepath.Join(w.dir, "began"))
	if err != nil {
		t.Fatal(err)
	}
	seen := map[string]bool{}
	for line := range strings.Lines(string(began)) {
		if seen[line] {
			t.Errorf("attempt and rank %q began twice", strings.TrimSpace(line))
		}
		seen[line] = true
	}
}

// TestHostsAreAsked: the remediator's actions, by the control socket: once each, and an exclusion
// takes the host out, while another stands by.
func TestHostsAreAsked(t *testing.T) {
	w := newTown(t, testHosts+1)
	s := w.running(0)
	if s.Units != testHosts+len(s.Standby) {
		t.Errorf("status %+v", s)
	}
	for len(s.Standby) == 0 {
		s = w.running(0)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 3*time.Minute)
	defer cancel()
	bad, first := s.Ranks[1].Node, s.Attempt
	spare := s.Standby[0]
	r, err := w.control().Restart(ctx, RestartRequest{Action: "a", Attempt: &first, Exclude: []int{1}})
	if err != nil || r.Attempt != first+1 || !strings.Contains(r.Detail, "node "+bad+" of rank 1 is left out") {
		t.Fatalf("%+v, %v", r, err)
	}
	s = w.running(r.Attempt)
	if s.Ranks[1].Node != spare || s.Ranks[1].Unit != spare || len(s.Out) != 1 || s.Out[0] != bad {
		t.Errorf("status %+v, want rank 1 on %s", s, spare)
	}
	// The coordinator forgets nothing of it when it is killed.
	w.kill("n0")
	w.start("n0")
	w.running(0)
	again, err := w.control().Restart(ctx, RestartRequest{Action: "a", Attempt: &first})
	if err != nil || again.Attempt != r.Attempt || !again.At.Equal(r.At) || !again.Repeated {
		t.Errorf("asked again: %+v, %v; first %+v", again, err, r)
	}
	// Nobody is left to take another one's place.
	r, err = w.control().Restart(ctx, RestartRequest{Action: "b", Exclude: []int{2}})
	if err != nil || !strings.Contains(r.Detail, "no other host stands by") {
		t.Errorf("%+v, %v", r, err)
	}
	w.running(r.Attempt)
	w.finish()
}

func FuzzMessages(f *testing.F) {
	var b bytes.Buffer
	_ = writeMessage(&b, Report{Protocol: protocol, Job: "j", Node: "n", Holder: "a", Boot: "b", Local: 1, Meet: map[string]string{"MASTER_PORT": "1"}})
	f.Add(b.Bytes())
	b.Reset()
	_ = writeMessage(&b, Order{Protocol: protocol, Run: "a", Kind: orderRun, Lease: 1, Generation: 1, Token: "t", Secret: "ab", Groups: 1})
	f.Add(b.Bytes())
	f.Fuzz(func(t *testing.T, b []byte) {
		var r Report
		if readMessage(bytes.NewReader(b), &r) == nil && r.check() == nil {
			g := newGroup(groupOptions{Hosts: 1, Local: r.Local, Lease: time.Second}, newBooks("j", -1, 0, 0), time.Unix(0, 0))
			if g.report(time.Unix(1, 0), 1, r) == nil {
				g.tick(time.Unix(1, 0))
				o := g.order(time.Unix(1, 0), r.Node)
				if err := o.check(); err != nil {
					t.Fatal(err)
				}
			}
		}
		var o Order
		if readMessage(bytes.NewReader(b), &o) == nil {
			var d follower
			_ = d.receive(o)
			d.next(time.Unix(0, 0))
		}
		_, _ = decodeBooks(b)
	})
}
