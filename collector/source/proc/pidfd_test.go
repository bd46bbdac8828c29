package proc_test

import (
	"io"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/prometheus/procfs"

	"github.com/lockstep-ccl/lockstep/collector/source"
	"github.com/lockstep-ccl/lockstep/collector/source/proc"
	"github.com/lockstep-ccl/lockstep/diagnosis"
	"github.com/lockstep-ccl/lockstep/record"
)

const childEnv = "LOCKSTEP_TEST_PROC_CHILD"

// child is this test's program again: it does what the variable says when its stdin closes.
func child() {
	what := os.Getenv(childEnv)
	if what == "" {
		return
	}
	_, _ = io.Copy(io.Discard, os.Stdin)
	switch what {
	case "exit 0":
		os.Exit(0)
	case "exit 3":
		os.Exit(3)
	case "panic":
		panic("as the test wants")
	}
	select {}
}

type mortal struct {
	t     *testing.T
	cmd   *exec.Cmd
	stdin io.Closer
	p     *source.Process
}

func start(t *testing.T, what string) *mortal {
	t.Helper()
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), childEnv+"="+what)
	stdin, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = cmd.Process.Kill(); _ = cmd.Wait() })
	st, err := procfs.NewProc(cmd.Process.Pid)
	if err != nil {
		t.Fatal(err)
	}
	stat, err := st.Stat()
	if err != nil {
		t.Fatal(err)
	}
	id, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		t.Fatal(err)
	}
	return &mortal{t, cmd, stdin, process(cmd.Process.Pid, stat.Starttime, strings.ReplaceAll(strings.TrimSpace(string(id)), "-", ""))}
}

// until passes until ok says so.
func until(t *testing.T, s *proc.Source, v *source.View, what string, ok func() bool) {
	t.Helper()
	for deadline := time.Now().Add(time.Minute); !ok(); time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("not %s within a minute", what)
		}
		v.Now = record.Now()
		if err := s.Update(v); err != nil {
			t.Fatal(err)
		}
	}
}

// TestEndsOfRealProcesses: the kernel tells when a process ended, and how, whether its
// parent has reaped it or not.
func TestEndsOfRealProcesses(t *testing.T) {
	for _, c := range []struct {
		what         string
		kill         syscall.Signal
		code, signal int32
	}{
		{what: "exit 0"},
		{what: "exit 3", code: 3},
		{what: "panic", code: 2},
		{what: "live", kill: syscall.SIGKILL, signal: 9},
		{what: "live", kill: syscall.SIGTERM, signal: 15},
	} {
		for _, reaped := range []bool{true, false} {
			name := c.what
			if c.kill != 0 {
				name = c.kill.String()
			}
			if !reaped {
				name += ", not reaped"
			}
			t.Run(name, func(t *testing.T) {
				s := open(t, "/proc")
				m := start(t, c.what)
				v := source.View{Processes: []*source.Process{m.p}}
				until(t, s, &v, "running", func() bool { return m.p.State == diagnosis.ProcRunning })
				alive := record.Now()
				if c.kill != 0 {
					_ = m.cmd.Process.Signal(c.kill)
				} else {
					m.stdin.Close()
				}
				if reaped {
					_ = m.cmd.Wait()
				}
				until(t, s, &v, "told how it ended", func() bool { return m.p.Exit.By == diagnosis.ExitKernel })
				e := m.p.Exit
				if m.p.State != diagnosis.ProcGone || e.Code != c.code || e.Signal != c.signal || e.Asked || e.At < alive || e.At > record.Now() {
					t.Errorf("state %v at %d, %+v; it lived at %d", m.p.State, m.p.StateAt, e, alive)
				}
				// When its first thread has ended half a second before the others, which on a busy machine it
				// may have, it is gone by then. One that was reaped had ended with all threads.
				if m.p.StateAt != e.At && (reaped || m.p.StateAt > e.At) {
					t.Errorf("gone at %d, ended at %d", m.p.StateAt, e.At)
				}
			})
		}
	}
}

// TestOrderOfDeaths: of processes that die between two passes, the one that died first did so first.
func TestOrderOfDeaths(t *testing.T) {
	s := open(t, "/proc")
	var v source.View
	var all []*mortal
	for range 4 {
		m := start(t, "live")
		all = append(all, m)
		v.Processes = append(v.Processes, m.p)
	}
	until(t, s, &v, "running", func() bool {
		for _, m := range all {
			if m.p.State != diagnosis.ProcRunning {
				return false
			}
		}
		return true
	})
	order := []int{2, 0, 3, 1}
	for _, i := range order {
		_ = all[i].cmd.Process.Kill()
		_ = all[i].cmd.Wait()
		time.Sleep(2 * time.Millisecond) // for the order to be one of milliseconds; nothing waits for it
	}
	until(t, s, &v, "gone", func() bool {
		for _, m := range all {
			if m.p.State != diagnosis.ProcGone {
				return false
			}
		}
		return true
	})
	for k := 1; k < len(order); k++ {
		if a, b := all[order[k-1]].p, all[order[k]].p; a.StateAt >= b.StateAt {
			t.Errorf("process %d died before %d: at %d and %d", order[k-1], order[k], a.StateAt, b.StateAt)
		}
	}
}

// A supervisor's word stands against the kernel's.
func TestSupervisorKnowsBetter(t *testing.T) {
	s := open(t, "/proc")
	m := start(t, "exit 3")
	v := source.View{Processes: []*source.Process{m.p}}
	until(t, s, &v, "running", func() bool { return m.p.State == diagnosis.ProcRunning })
	want := diagnosis.Exit{By: diagnosis.ExitSupervisor, Code: 3, Asked: true, At: 1}
	m.p.Exit = want
	m.stdin.Close()
	_ = m.cmd.Wait()
	until(t, s, &v, "gone", func() bool { return m.p.State == diagnosis.ProcGone })
	if m.p.Exit != want {
		t.Errorf("exit %+v", m.p.Exit)
	}
}
