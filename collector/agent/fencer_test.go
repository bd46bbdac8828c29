package agent

import (
	"errors"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"testing"
	"time"
)

// sleeper is a process that is there until the test ends.
func sleeper(t *testing.T) pidStart {
	t.Helper()
	cmd := exec.Command("sleep", "600")
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = cmd.Process.Kill(); _ = cmd.Wait() })
	start, parent, err := startOf(cmd.Process.Pid)
	if err != nil || start == 0 || parent != os.Getpid() {
		t.Fatalf("%d, %d, %v", start, parent, err)
	}
	return pidStart{cmd.Process.Pid, start}
}

// TestHoldsNoOther: a pid alone is nobody: the process must have begun when the recorder says,
// and be its owner's, and some are never stopped.
func TestHoldsNoOther(t *testing.T) {
	key := sleeper(t)
	mine := filepath.Join(t.TempDir(), "recorder")
	if err := os.WriteFile(mine, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	h, err := hold(key, mine, false)
	if err != nil || h.fd < 0 || h.fate != lives || gone(h.fd) {
		t.Fatalf("%+v, %v", h, err)
	}
	// Its number has been given to another process since.
	if h, err := hold(pidStart{key.pid, key.start - 1}, mine, false); err != nil || h.fd >= 0 || h.fate != ended {
		t.Errorf("%+v, %v", h, err)
	}
	for _, pid := range []int{-1, 0, 1, os.Getpid(), os.Getppid()} {
		if _, err := hold(pidStart{pid, 1}, mine, false); err == nil {
			t.Errorf("process %d is held", pid)
		}
	}
	if _, err := hold(key, filepath.Join(t.TempDir(), "none"), false); !errors.Is(err, errForeign) {
		t.Errorf("a recorder that is not there: %v", err)
	}
	if os.Geteuid() != 0 {
		t.Skip("only root can make another user's files")
	}
	theirs := filepath.Join(t.TempDir(), "recorder")
	if err := errors.Join(os.WriteFile(theirs, nil, 0o600), os.Chown(theirs, 54321, 54321)); err != nil {
		t.Fatal(err)
	}
	// A recorder of one user that names another's process.
	if _, err := hold(key, theirs, false); !errors.Is(err, errForeign) {
		t.Errorf("another user's recorder: %v", err)
	}
	if _, err := hold(key, theirs, true); !errors.Is(err, errForeign) {
		t.Errorf("another user's file that claims to be a probe's: %v", err)
	}
}

// TestRelativesAreTheirUsers: who is in a fenced attempt by parent or token, but another user's,
// is left alone, also where a probe of root's has found the rank.
func TestRelativesAreTheirUsers(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("only root can start another user's process")
	}
	const token = "fence1-1-1-0123456789abcdef0123456789abcdef"
	start := func(uid uint32) pidStart {
		cmd := exec.Command("sleep", "600")
		cmd.Env = []string{fenceTokenEnv + "=" + token, "LOCKSTEP_NODE=n"}
		cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: uid, Gid: uid}}
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = cmd.Process.Kill(); _ = cmd.Wait() })
		at, _, err := startOf(cmd.Process.Pid)
		if err != nil {
			t.Fatal(err)
		}
		return pidStart{cmd.Process.Pid, at}
	}
	rank, own, other := start(54321), start(54321), start(54322)
	probe := filepath.Join(t.TempDir(), "recorder")
	if err := os.WriteFile(probe, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	w := newFencer("llm", slog.New(slog.DiscardHandler))
	list := []suspect{{pid: rank.pid, start: rank.start, path: probe, probe: true, terms: termsOf(int32(rank.pid))}}
	list[0].terms.stop = true
	var why []string
	w.take(&list[0], &why)
	w.relatives(list)
	defer func() {
		for _, h := range w.held {
			_ = syscall.Close(h.fd)
		}
	}()
	if w.held[rank] == nil || w.held[own] == nil || w.held[other] != nil {
		t.Errorf("the rank's: %v, its user's: %v, another user's: %v; %v", w.held[rank] != nil, w.held[own] != nil, w.held[other] != nil, why)
	}
}

// TestRelativesOfALaterOrder: what a rank has left behind is found, too, when the fencer has been
// there for long, and the rank ends at once.
func TestRelativesOfALaterOrder(t *testing.T) {
	const token = "fence1-1-1-fedcba9876543210fedcba9876543210"
	start := func() (at pidStart, gone chan struct{}) {
		cmd := exec.Command("sleep", "600")
		cmd.Env = []string{fenceTokenEnv + "=" + token, "LOCKSTEP_NODE=n", fenceEnv + "=stop", fenceGraceEnv + "=1m"}
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		gone = make(chan struct{})
		go func() { _ = cmd.Wait(); close(gone) }()
		t.Cleanup(func() { _ = cmd.Process.Kill(); <-gone })
		began, _, err := startOf(cmd.Process.Pid)
		if err != nil {
			t.Fatal(err)
		}
		return pidStart{cmd.Process.Pid, began}, gone
	}
	w := newFencer("llm", slog.New(slog.DiscardHandler))
	w.start(t.Context())
	defer w.stop()
	time.Sleep(4 * fencerEvery) // passes of which no order is
	rank, ended := start()
	_, left := start()
	w.set([]suspect{{pid: rank.pid, start: rank.start, terms: termsOf(int32(rank.pid)), ordered: true}}, orders{id: 1})
	<-ended
	w.set(nil, orders{id: 1})
	select {
	case <-left:
	case <-time.After(time.Minute):
		t.Error("a process of the attempt was left alone")
	}
}

func TestTerms(t *testing.T) {
	for name, tt := range map[string]struct {
		env   map[string]string
		stop  bool
		lease time.Duration
		grace time.Duration
	}{
		"nothing":        {nil, false, 0, defaultGrace},
		"yes is not it":  {map[string]string{fenceEnv: "1"}, false, 0, defaultGrace},
		"stop":           {map[string]string{fenceEnv: "stop"}, true, 0, defaultGrace},
		"lease alone":    {map[string]string{fenceLeaseEnv: "30s"}, false, 0, defaultGrace},
		"lease":          {map[string]string{fenceEnv: "stop", fenceLeaseEnv: "30s", fenceGraceEnv: "0s"}, true, 30 * time.Second, 0},
		"too short":      {map[string]string{fenceEnv: "stop", fenceLeaseEnv: "1s"}, false, 0, defaultGrace},
		"no duration":    {map[string]string{fenceEnv: "stop", fenceGraceEnv: "soon"}, false, 0, defaultGrace},
		"negative grace": {map[string]string{fenceEnv: "stop", fenceGraceEnv: "-1s"}, false, 0, defaultGrace},
	} {
		got := parseTerms(func(name string) string { return tt.env[name] })
		if got.stop != tt.stop || got.lease != tt.lease || got.grace != tt.grace || !got.known {
			t.Errorf("%s: %+v", name, got)
		}
	}
	if termsOf(0).known || termsOf(1<<22+1).known {
		t.Error("terms of a process that is none")
	}
	for _, short := range []string{"", "x", "fence1-1-1"} {
		if parseTerms(func(string) string { return short }).token != "" {
			t.Errorf("%q is a token", short)
		}
	}
}

// A lease is counted from when the report was sent that the master is known to have.
func TestInFlight(t *testing.T) {
	var f inFlight
	f.reset()
	for i := range uint64(1000) {
		f.sent(i+1, int64(i+1)*10)
	}
	for sequence, want := range map[uint64]int64{1000: 10000, 745: 7450, 744: 0, 1: 0, 1001: 0, 0: f.hello} {
		if got := f.acked(sequence); got != want {
			t.Errorf("report %d was sent at %d, want %d", sequence, got, want)
		}
	}
	f.reset()
	if f.acked(1000) != 0 {
		t.Error("an answer to another session's report counts")
	}
}
