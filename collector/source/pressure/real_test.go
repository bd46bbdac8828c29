package pressure_test

import (
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/lockstep-ccl/lockstep/collector/source"
	"github.com/lockstep-ccl/lockstep/collector/source/pressure"
	"github.com/lockstep-ccl/lockstep/diagnosis"
	"github.com/lockstep-ccl/lockstep/record"
)

const childEnv = "LOCKSTEP_TEST_PRESSURE_CHILD"

// child is this test's program again: it computes, on one CPU when told so, until its stdin closes.
func child() {
	what := os.Getenv(childEnv)
	if what == "" {
		return
	}
	go func() {
		_, _ = io.Copy(io.Discard, os.Stdin)
		os.Exit(0)
	}()
	if what == "sleep" {
		select {}
	}
	for i := uint64(0); ; i++ {
		sink = i
	}
}

var sink uint64

// startPinned starts a command on the first CPU that there is. The command inherits the affinity of the
// thread that starts it: threads that it makes before it could be pinned would run anywhere.
func startPinned(cmd *exec.Cmd) error {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	var all, one unix.CPUSet
	if err := unix.SchedGetaffinity(0, &all); err != nil {
		return err
	}
	for cpu := range len(all) * 64 {
		if all.IsSet(cpu) {
			one.Set(cpu)
			break
		}
	}
	if err := unix.SchedSetaffinity(0, &one); err != nil {
		return err
	}
	return errors.Join(cmd.Start(), unix.SchedSetaffinity(0, &all))
}

// spawn starts a child on one CPU, in a cgroup when one is given, and returns it as a source sees it.
func spawn(t *testing.T, what, cgroup string) *source.Process {
	t.Helper()
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), childEnv+"="+what, "GOMAXPROCS=1")
	stdin, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := startPinned(cmd); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { stdin.Close(); _ = cmd.Process.Kill(); _ = cmd.Wait() })
	pid := cmd.Process.Pid
	if cgroup != "" {
		if err := os.WriteFile(filepath.Join(cgroup, "cgroup.procs"), []byte(strconv.Itoa(pid)), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	return &source.Process{HostPID: int32(pid), State: diagnosis.ProcRunning}
}

// TestRealStarvation: of processes that share one CPU each is starved; one that sleeps is not.
func TestRealStarvation(t *testing.T) {
	if _, err := os.Stat("/proc/self/schedstat"); err != nil {
		t.Skip("this kernel has no schedstat")
	}
	s := pressure.New("/proc", "/sys/fs/cgroup")
	defer s.Close()
	var v source.View
	for range 3 {
		v.Processes = append(v.Processes, spawn(t, "compute", ""))
	}
	idle := spawn(t, "sleep", "")
	v.Processes = append(v.Processes, idle)
	eventually(t, s, &v, "three processes on one CPU are starved", func() bool {
		return v.Processes[0].Starved > 0.4 && v.Processes[1].Starved > 0.4 && v.Processes[2].Starved > 0.4 && idle.Starved < 0.4
	})
}

// TestRealThrottling: a process in a cgroup with a quota of 2 % of a CPU is throttled. A larger quota might be
// more than its share of a busy machine: it would be starved, and never throttled.
func TestRealThrottling(t *testing.T) {
	dir, set := quota(t)
	p, free := spawn(t, "compute", dir), spawn(t, "compute", "")
	if err := set(2000); err != nil {
		t.Skipf("cannot set a quota: %v", err)
	}
	s := pressure.New("/proc", "/sys/fs/cgroup")
	defer s.Close()
	v := source.View{Processes: []*source.Process{p, free}}
	eventually(t, s, &v, "a process with 2 % of a CPU is throttled", func() bool { return p.Throttled > 0.7 && free.Throttled == 0 })
	if err := set(-1); err != nil {
		t.Fatal(err)
	}
	eventually(t, s, &v, "it is no more", func() bool { return p.Throttled == 0 })
}

// quota makes a cgroup, of v2 or v1, and returns what sets its quota in µs a 100 ms.
func quota(t *testing.T) (dir string, set func(us int) error) {
	t.Helper()
	file := "cpu.max"
	dir = fmt.Sprintf("/sys/fs/cgroup/lockstep-test-%d", os.Getpid())
	if _, err := os.Stat("/sys/fs/cgroup/cgroup.controllers"); err != nil {
		dir, file = fmt.Sprintf("/sys/fs/cgroup/cpu/lockstep-test-%d", os.Getpid()), "cpu.cfs_quota_us"
	}
	if err := os.Mkdir(dir, 0o700); err != nil {
		t.Skipf("cannot make a cgroup: %v", err)
	}
	t.Cleanup(func() { // after the processes in it have ended
		for range 1000 {
			if os.Remove(dir) == nil {
				return
			}
			time.Sleep(10 * time.Millisecond)
		}
		t.Errorf("%s is left behind", dir)
	})
	return dir, func(us int) error {
		text := strconv.Itoa(us)
		if file == "cpu.max" {
			if us < 0 {
				text = "max"
			}
			text += " 100000"
		}
		return os.WriteFile(filepath.Join(dir, file), []byte(text), 0o600)
	}
}

func eventually(t *testing.T, s *pressure.Source, v *source.View, what string, ok func() bool) {
	t.Helper()
	for deadline := time.Now().Add(time.Minute); ; time.Sleep(50 * time.Millisecond) {
		v.Now = record.Now()
		_ = s.Update(v) // what the kernel does not have, it does not need
		if ok() {
			return
		}
		if time.Now().After(deadline) {
			for i, p := range v.Processes {
				t.Logf("process %d: starved %g, throttled %g", i, p.Starved, p.Throttled)
			}
			t.Fatalf("never happened: %s", what)
		}
	}
}

// BenchmarkLook is one look, of which there are two a second, at 8 processes.
func BenchmarkLook(b *testing.B) {
	s := pressure.New("/proc", "/sys/fs/cgroup")
	var v source.View
	for range 8 {
		v.Processes = append(v.Processes, &source.Process{HostPID: int32(os.Getpid()), State: diagnosis.ProcRunning})
	}
	b.ReportAllocs()
	for b.Loop() {
		v.Now += int64(500 * time.Millisecond)
		_ = s.Update(&v)
		s.Close() // waits for it
	}
}
