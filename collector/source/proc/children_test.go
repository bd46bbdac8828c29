package proc_test

import (
	"fmt"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/prometheus/procfs"

	"github.com/lockstep-ccl/lockstep/collector/source"
	"github.com/lockstep-ccl/lockstep/diagnosis"
)

// TestChildren: a process that waits for its children is not idle while they work.
func TestChildren(t *testing.T) {
	tr := newTree(t)
	tr.process(42, "S", 100, 500, 0)
	tr.thread(42, 42, "S")
	tr.thread(42, 44, "S")
	tr.write("42/task/42/children", "50 51 ")
	tr.write("42/task/44/children", "52")
	tr.process(50, "S", 0, 600, 0)
	tr.process(52, "S", 0, 600, 0) // 51 has just ended
	p := process(42, 500, boot)
	v, s := source.View{Processes: []*source.Process{p}}, open(t, tr.root)
	is := func(what string, cpu float32, io bool) {
		t.Helper()
		if p.CPU < cpu-0.01 || p.CPU > cpu+0.01 || p.IO != io || p.State != diagnosis.ProcRunning {
			t.Errorf("%s: %.2f cores, I/O %v, state %v", what, p.CPU, p.IO, p.State)
		}
	}
	if err := passes(s, &v, 20); err != nil {
		t.Fatal(err)
	}
	is("nobody works", 0, false)
	tr.process(50, "R", 30, 600, 0)
	tr.process(52, "R", 20, 600, 4096)
	if err := passes(s, &v, 5); err != nil {
		t.Fatal(err)
	}
	is("both work for half a second", 1, true)
	if err := passes(s, &v, 5); err != nil {
		t.Fatal(err)
	}
	is("they have ended their work", 0, false)
	for range 10 { // stopped when they were to be looked at: what they had used before is not used now
		tr.process(42, "T", 100, 500, 0)
		if err := passes(s, &v, 1); err != nil {
			t.Fatal(err)
		}
		tr.process(42, "S", 100, 500, 0)
		if err := passes(s, &v, 1); err != nil {
			t.Fatal(err)
		}
		is("it goes on", 0, false)
	}
	tr.process(50, "R", 90, 600, 0)
	tr.process(42, "R", 150, 500, 0)
	if err := passes(s, &v, 10); err != nil {
		t.Fatal(err)
	}
	if err := passes(s, &v, 1); err != nil {
		t.Fatal(err)
	}
	is("it works itself", 0, false)
}

// living is a process of this machine.
func living(t *testing.T, pid int) *source.Process {
	t.Helper()
	pfs, err := procfs.NewDefaultFS()
	if err != nil {
		t.Fatal(err)
	}
	pp, err := pfs.Proc(pid)
	if err != nil {
		t.Fatal(err)
	}
	st, err := pp.Stat()
	if err != nil {
		t.Fatal(err)
	}
	id, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		t.Fatal(err)
	}
	return process(pid, st.Starttime, strings.ReplaceAll(strings.TrimSpace(string(id)), "-", ""))
}

// TestRealChildren: a shell waits for what it has started.
func TestRealChildren(t *testing.T) {
	cmd := exec.Command("sh", "-c", "while :; do :; done & wait")
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if err := cmd.Start(); err != nil {
		t.Skip(err)
	}
	defer func() {
		_ = syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL)
		_ = cmd.Wait()
	}()
	if _, err := os.Stat(fmt.Sprintf("/proc/%d/task/%[1]d/children", cmd.Process.Pid)); err != nil {
		t.Skip(err)
	}
	p := living(t, cmd.Process.Pid)
	s, v := open(t, "/proc"), source.View{Processes: []*source.Process{p}}
	began, at := time.Now(), v.Now
	for p.CPU < 0.1 { // of a core, on a machine that may be busy
		if time.Since(began) > 20*time.Second {
			t.Fatalf("%v cores", p.CPU)
		}
		time.Sleep(10 * time.Millisecond)
		v.Now = at + int64(time.Since(began)) + 1
		if err := s.Update(&v); err != nil {
			t.Fatal(err)
		}
	}
}

// TestRealProcess stops, continues and kills a process of its own.
func TestRealProcess(t *testing.T) {
	cmd := exec.Command("sleep", "60")
	if err := cmd.Start(); err != nil {
		t.Skip(err)
	}
	reaped := make(chan error, 1)
	defer func() {
		_ = cmd.Process.Kill()
		<-reaped
	}()
	p := living(t, cmd.Process.Pid)
	s, v := open(t, "/proc"), source.View{Processes: []*source.Process{p}}
	becomes := func(want diagnosis.ProcState) {
		t.Helper()
		for deadline := time.Now().Add(20 * time.Second); p.State != want; time.Sleep(time.Millisecond) {
			if time.Now().After(deadline) {
				t.Fatalf("state %v, want %v", p.State, want)
			}
			if err := passes(s, &v, 1); err != nil {
				t.Fatal(err)
			}
		}
	}
	signal := func(sig syscall.Signal) {
		if err := cmd.Process.Signal(sig); err != nil {
			t.Fatal(err)
		}
	}
	becomes(diagnosis.ProcRunning)
	signal(syscall.SIGSTOP)
	becomes(diagnosis.ProcStopped)
	signal(syscall.SIGCONT)
	becomes(diagnosis.ProcRunning)
	signal(syscall.SIGKILL)
	becomes(diagnosis.ProcGone) // a zombie first
	reaped <- cmd.Wait()
}
