package bootstrap

import (
	"bufio"
	"context"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
)

// rankMain is the main function of a rank's process. It prints its events and takes commands on
// stdin.
func rankMain() {
	rank, _ := strconv.Atoi(os.Getenv("BOOTSTRAP_TEST_RANK"))
	size, _ := strconv.Atoi(os.Getenv("BOOTSTRAP_TEST_SIZE"))
	id, err := ParseID(os.Getenv("BOOTSTRAP_TEST_ID"))
	if err != nil {
		fmt.Println("error", err)
		return
	}
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
	defer cancel()
	outage, _ := time.ParseDuration(os.Getenv("BOOTSTRAP_TEST_OUTAGE"))
	c, err := Join(ctx, Config{ID: id, Rank: rank, Size: size, Outage: outage})
	if err != nil {
		fmt.Println("error", err)
		return
	}
	fmt.Println("joined")
	go func() {
		for e := range c.Events() {
			fmt.Println("event", e.Kind, e.Rank)
		}
	}()
	for in := bufio.NewScanner(os.Stdin); in.Scan(); {
		if in.Text() == "outage" {
			for !c.Seeking() {
				time.Sleep(time.Millisecond)
			}
			fmt.Println("outage")
			continue
		}
		var members []int
		for _, f := range strings.Fields(in.Text()) {
			m, _ := strconv.Atoi(f)
			members = append(members, m)
		}
		for i, m := range members {
			if m != rank {
				continue
			}
			g, err := c.Regroup(ctx, members, i, "again")
			if err == nil {
				err = g.Barrier(ctx)
			}
			fmt.Println("regrouped", err)
		}
	}
	c.Leave(ctx)
}

type process struct {
	cmd   *exec.Cmd
	in    *os.File
	lines chan string
}

func (p *process) expect(t *testing.T, want string) {
	t.Helper()
	select {
	case got := <-p.lines:
		if got != want {
			t.Fatalf("%s: got %q, want %q", p.cmd.Env[len(p.cmd.Env)-1], got, want)
		}
	case <-time.After(time.Minute):
		t.Fatalf("%s: nothing, want %q", p.cmd.Env[len(p.cmd.Env)-1], want)
	}
}

func startProcesses(t *testing.T, n int) []*process {
	t.Helper()
	path := filepath.Join(t.TempDir(), "secret")
	if err := os.WriteFile(path, secret, 0o600); err != nil {
		t.Fatal(err)
	}
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	id := NewID(ln.Addr().String())
	ln.Close()
	ps := make([]*process, n)
	for r := range ps {
		ps[r] = startProcess(t, id, path, r, n)
	}
	for _, p := range ps {
		p.expect(t, "joined")
	}
	return ps
}

// startProcess starts the process of rank r of n. secret is the path of the secret's file.
func startProcess(t *testing.T, id ID, secret string, r, n int) *process {
	t.Helper()
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), SecretEnv+"="+secret, "BOOTSTRAP_TEST_ID="+id.String(), fmt.Sprint("BOOTSTRAP_TEST_SIZE=", n), fmt.Sprint("BOOTSTRAP_TEST_RANK=", r))
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	inR, inW, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	cmd.Stdin, cmd.Stderr = inR, os.Stderr
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	inR.Close()
	p := &process{cmd, inW, make(chan string, 100)}
	var wg sync.WaitGroup
	wg.Go(func() {
		for s := bufio.NewScanner(out); s.Scan(); {
			p.lines <- s.Text()
		}
	})
	t.Cleanup(func() { p.cmd.Process.Kill(); p.in.Close(); wg.Wait(); p.cmd.Wait() })
	return p
}

func TestKilledRankIsReportedToAll(t *testing.T) {
	for _, victim := range []int{0, 2} {
		ps := startProcesses(t, 4)
		start := time.Now()
		ps[victim].cmd.Process.Signal(syscall.SIGKILL)
		var rest []string
		for r, p := range ps {
			if r != victim {
				p.expect(t, fmt.Sprint("event ", Lost, " ", victim))
				rest = append(rest, strconv.Itoa(r))
			}
		}
		t.Logf("rank %d killed: all survivors knew after %v", victim, time.Since(start))
		// The survivors can regroup, whoever died.
		for r, p := range ps {
			if r != victim {
				fmt.Fprintln(p.in, strings.Join(rest, " "))
			}
		}
		for r, p := range ps {
			if r != victim {
				p.expect(t, "regrouped <nil>")
			}
		}
	}
}

// TestStoppedInAnOutage: the time in which a rank itself is stopped, or its machine frozen, does
// not count as its peer's silence.
func TestStoppedInAnOutage(t *testing.T) {
	path := filepath.Join(t.TempDir(), "secret")
	if err := os.WriteFile(path, secret, 0o600); err != nil {
		t.Fatal(err)
	}
	t.Setenv("BOOTSTRAP_TEST_OUTAGE", "8s")
	ln, err := Listen("127.0.0.1:0", secret)
	if err != nil {
		t.Fatal(err)
	}
	id := ln.NewID()
	p := startProcess(t, id, path, 1, 2)
	hub, err := Join(testContext(t), Config{ID: id, Rank: 0, Size: 2, Secret: secret, Listener: ln})
	if err != nil {
		t.Fatal(err)
	}
	defer leaveAll([]*Control{hub})
	p.expect(t, "joined")
	mend := cut(t, []*Control{hub})
	fmt.Fprintln(p.in, "outage")
	p.expect(t, "outage")
	p.cmd.Process.Signal(syscall.SIGSTOP)
	time.Sleep(6 * time.Second)
	mend()
	p.cmd.Process.Signal(syscall.SIGCONT)
	time.Sleep(time.Second) // a rank that counted it would report the loss at once
	fmt.Fprintln(p.in, "1 0")
	g, err := hub.Regroup(testContext(t), []int{1, 0}, 1, "again")
	if err != nil {
		t.Fatal(err)
	}
	defer leaveAll([]*Control{g})
	if err := g.Barrier(testContext(t)); err != nil {
		t.Error(err)
	}
	p.expect(t, "regrouped <nil>")
	if e := next(hub, 0); e != nil {
		t.Errorf("rank 0: %+v: %v", e, e.Err)
	}
	p.in.Close() // it leaves
}

func TestStoppedRankIsNotLost(t *testing.T) {
	ps := startProcesses(t, 3)
	for _, victim := range []int{0, 1} {
		ps[victim].cmd.Process.Signal(syscall.SIGSTOP)
	}
	time.Sleep(3500 * time.Millisecond) // longer than userTimeout
	for _, victim := range []int{0, 1} {
		ps[victim].cmd.Process.Signal(syscall.SIGCONT)
	}
	for _, p := range ps {
		fmt.Fprintln(p.in, "0 1 2")
	}
	for _, p := range ps {
		p.expect(t, "regrouped <nil>") // and no event before it
	}
}
