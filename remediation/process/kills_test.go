package process

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"
)

// dead waits until a process is gone.
func dead(t *testing.T, pid int) {
	t.Helper()
	for range 3000 {
		if stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid)); err != nil || strings.Contains(string(stat), ") Z ") {
			return
		}
		time.Sleep(10 * time.Millisecond)
	}
	t.Fatalf("process %d lives", pid)
}

func TestRanksGetSIGTERM(t *testing.T) {
	j := begin(t, "polite", func(o *Options) { o.Grace = 30 * time.Second })
	for r := range 4 {
		j.logged(r, "listening")
	}
	j.cancel()
	if err := j.end(); !errors.Is(err, context.Canceled) {
		t.Fatalf("error %v", err)
	}
	for r := range 4 {
		j.logged(r, "bye")
	}
}

func TestRanksThatIgnoreSIGTERM(t *testing.T) {
	j := begin(t, "deaf", nil)
	j.wait("started")
	pids := j.Status().Ranks
	j.cancel()
	j.end()
	for _, r := range pids {
		dead(t, r.PID)
	}
}

func TestWhatARankLeavesBehindIsKilled(t *testing.T) {
	var out strings.Builder
	j := begin(t, "forks", func(o *Options) { o.Output = &out })
	if err := j.end(); err != nil {
		t.Fatal(err)
	}
	for r := range 4 {
		pid, err := strconv.Atoi(j.logged(r, "child "))
		if err != nil {
			t.Fatal(err)
		}
		dead(t, pid)
	}
}

// TestSupervisorKilled kills a supervisor with SIGKILL: its ranks go with it,
// and the next one takes over the directory, and removes what had escaped.
func TestSupervisorKilled(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "job")
	cmd := exec.Command(os.Args[0], "supervise", dir)
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	defer cmd.Process.Kill()
	c := NewClient(filepath.Join(dir, "control.sock"))
	var s *Status
	var err error
	for range 3000 {
		if s, err = c.Status(context.Background()); err == nil && len(s.Ranks) == 2 {
			break
		}
		time.Sleep(10 * time.Millisecond)
	}
	if err != nil || len(s.Ranks) != 2 {
		t.Fatalf("status %+v, %v", s, err)
	}
	if second, err := New(options(dir, "ok")); err != nil {
		t.Fatal(err)
	} else if err := second.Run(context.Background()); err == nil || !strings.Contains(err.Error(), "is this job running already") {
		t.Fatalf("a second supervisor of the same directory: %v", err)
	}
	var escaped []int
	for r := range 2 {
		pid, err := strconv.Atoi(logged(t, dir, r, "child "))
		if err != nil {
			t.Fatal(err)
		}
		escaped = append(escaped, pid)
	}
	cmd.Process.Kill()
	cmd.Wait()
	for _, r := range s.Ranks {
		dead(t, r.PID)
	}
	for _, pid := range escaped {
		if err := syscall.Kill(pid, 0); err != nil {
			t.Errorf("process %d was to escape: %v", pid, err)
		}
	}
	next, err := New(options(dir, "ok"))
	if err != nil {
		t.Fatal(err)
	}
	if err := next.Run(context.Background()); err != nil {
		t.Fatal(err)
	}
	for _, pid := range escaped {
		dead(t, pid)
	}
}

// TestWithoutItsFirstThread: a process whose first thread has ended shows no environment of its own, and is found.
func TestWithoutItsFirstThread(t *testing.T) {
	secret := filepath.Join(t.TempDir(), "secret")
	cmd := exec.Command(os.Args[0], "rank", "headless")
	cmd.Env = append(os.Environ(), secretVar+"="+secret, "GOMAXPROCS=4")
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	defer cmd.Process.Kill()
	for range 3000 {
		if state, threads, _ := stat(cmd.Process.Pid); state == "Z" && threads > 1 {
			break
		}
		time.Sleep(10 * time.Millisecond)
	}
	w := &launcher{o: Options{Logger: slog.New(slog.DiscardHandler)}}
	if !w.clear(t.Context(), secret) {
		t.Error("it is still there")
	}
	if found, _ := w.sweep(secret); found != 0 || ends(cmd.Process.Pid) {
		t.Errorf("%d are there; it is ending: %v", found, ends(cmd.Process.Pid))
	}
	var exit *exec.ExitError
	if err := cmd.Wait(); !errors.As(err, &exit) || exit.Sys().(syscall.WaitStatus).Signal() != syscall.SIGKILL {
		t.Errorf("it ended by %v", err)
	}
}

func supervise(dir string) int {
	s, err := New(options(dir, "escapes"))
	if err == nil {
		err = s.Run(context.Background())
	}
	fmt.Fprintln(os.Stderr, err)
	return 1
}
