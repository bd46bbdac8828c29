package pressure_test

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/lockstep-ccl/lockstep/collector/source"
	"github.com/lockstep-ccl/lockstep/collector/source/pressure"
	"github.com/lockstep-ccl/lockstep/diagnosis"
)

func TestMain(m *testing.M) {
	child()
	goleak.VerifyTestMain(m)
}

// tree is a fixture of /proc and of cgroups.
type tree struct {
	t    *testing.T
	root string
	s    *pressure.Source
	v    source.View
	n    int // looks
}

func newTree(t *testing.T, files map[string]string) *tree {
	tr := &tree{t: t, root: t.TempDir()}
	tr.write("proc/self/schedstat", "1 2 3\n")
	for name, text := range files {
		tr.write(name, text)
	}
	tr.s = pressure.New(filepath.Join(tr.root, "proc"), filepath.Join(tr.root, "cgroup"))
	t.Cleanup(func() { tr.s.Close() })
	tr.v.Now = 1e9
	return tr
}

func (tr *tree) write(name, text string) {
	tr.t.Helper()
	path := filepath.Join(tr.root, name)
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		tr.t.Fatal(err)
	}
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		tr.t.Fatal(err)
	}
}

func (tr *tree) thread(pid, tid int, state string, run, delay, slices int64) {
	dir := fmt.Sprintf("proc/%d/task/%d/", pid, tid)
	tr.write(dir+"schedstat", fmt.Sprintf("%d %d %d\n", run, delay, slices))
	tr.write(dir+"stat", fmt.Sprintf("%d (python3 (x) )) %s 1 1 1\n", tid, state))
}

func (tr *tree) process(pid int) *source.Process {
	p := &source.Process{HostPID: int32(pid), State: diagnosis.ProcRunning}
	tr.v.Processes = append(tr.v.Processes, p)
	return p
}

// look lets half a second pass, and has the source look: the node's pressure tells of which
// look the result is.
func (tr *tree) look() error {
	tr.t.Helper()
	tr.n++
	want := float32(tr.n) / 100
	tr.write("proc/pressure/cpu", fmt.Sprintf("some avg10=%d.00 avg60=0.00 avg300=0.00 total=1\nfull avg10=99.00 avg60=0.00 avg300=0.00 total=0\n", tr.n))
	tr.write("proc/pressure/memory", "some avg10=12.50 avg60=0.00 avg300=0.00 total=1\n")
	tr.v.Now += int64(500 * time.Millisecond)
	err := tr.s.Update(&tr.v)
	for deadline := time.Now().Add(time.Minute); tr.v.CPUPressure != want; time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			tr.t.Fatalf("look %d does not end: pressure %g, %v", tr.n, tr.v.CPUPressure, err)
		}
		err = tr.s.Update(&tr.v)
	}
	return err
}

func near(got, want float32) bool { return got > want-0.01 && got < want+0.01 }

// v2 is a pod's cgroups as Kubernetes makes them: a quota on the container, and one on the pod.
func v2() map[string]string {
	return map[string]string{
		"cgroup/cgroup.controllers": "cpu memory\n",
		"cgroup/pods/cpu.max":       "max 100000\n",
		"cgroup/pods/a/cpu.max":     "400000 100000\n",
		"cgroup/pods/a/cpu.stat":    "usage_usec 1\nnr_periods 0\nnr_throttled 0\nthrottled_usec 0\n",
		"cgroup/pods/a/c/cpu.max":   "8000 100000\n",
		"cgroup/pods/a/c/cpu.stat":  "usage_usec 1\nnr_periods 0\nnr_throttled 0\nthrottled_usec 0\n",
		"proc/42/cgroup":            "0::/pods/a/c\n",
	}
}

const ms = int64(time.Millisecond)

func TestStarved(t *testing.T) {
	tr := newTree(t, v2())
	p := tr.process(42)
	steps := []struct {
		main, busy, queued, want int64 // ms: run delay of the three threads in this step; percent
	}{{0, 0, 0, 0}, {0, 100, 0, 20}, {0, 100, 0, 20}, {500, 300, 0, 40}, {0, 500, 0, 80}, {0, 0, 0, 50}, {0, 0, 0, 0}}
	var main, busy, ran int64
	for i, s := range steps {
		// The first thread waits for a CPU at times and hardly runs, a second one runs all the
		// time that it does not wait, and is the busiest. Others sleep.
		main, busy, ran = main+s.main*ms/10, busy+s.busy*ms, ran+(500-s.busy)*ms
		tr.thread(42, 42, "S", 0, main, int64(i))
		tr.thread(42, 43, "R", ran, busy, int64(i))
		for tid := 44; tid < 60; tid++ {
			tr.thread(42, tid, "S", 1, 0, 1)
		}
		if err := tr.look(); err != nil {
			t.Fatal(err)
		}
		if want := float32(s.want) / 100; !near(p.Starved, want) {
			t.Errorf("look %d: starved %g, want %g", i, p.Starved, want)
		}
	}
	if !near(tr.v.MemoryPressure, 0.125) {
		t.Errorf("the node's memory pressure is %g", tr.v.MemoryPressure)
	}
	p.State = diagnosis.ProcGone
	if _ = tr.look(); p.Starved != 0 {
		t.Errorf("a dead one is starved: %g", p.Starved)
	}
}

// A thread that has been queued all the while has nothing added up yet: that is starved, too.
func TestStarvedWithoutRunning(t *testing.T) {
	tr := newTree(t, v2())
	p := tr.process(42)
	tr.thread(42, 42, "R", 100*ms, 100*ms, 5)
	for range 4 {
		_ = tr.look()
	}
	if !near(p.Starved, 1) {
		t.Errorf("queued for two seconds: starved %g", p.Starved)
	}
	tr.thread(42, 42, "R", 110*ms, 2000*ms, 6) // it ran at last, and the kernel adds up
	_ = tr.look()
	if p.Starved < 0.9 || p.Starved > 1 {
		t.Errorf("after it ran: starved %g", p.Starved)
	}
	for range 3 {
		tr.thread(42, 42, "S", 110*ms, 2000*ms, 6)
		_ = tr.look()
	}
	if p.Starved != 0 {
		t.Errorf("asleep: starved %g", p.Starved)
	}
}

func TestThrottled(t *testing.T) {
	for _, c := range []struct {
		name  string
		files map[string]string
		stat  func(periods, throttled, us int64) (file, text string)
	}{
		{"v2", v2(), func(p, th, us int64) (string, string) {
			return "cgroup/pods/a/c/cpu.stat", fmt.Sprintf("usage_usec 1\nnr_periods %d\nnr_throttled %d\nthrottled_usec %d\n", p, th, us)
		}},
		{"v2, on the pod", v2(), func(p, th, us int64) (string, string) {
			return "cgroup/pods/a/cpu.stat", fmt.Sprintf("usage_usec 1\nnr_periods %d\nnr_throttled %d\nthrottled_usec %d\n", p, th, us)
		}},
		{"v1", map[string]string{
			"cgroup/cpu,cpuacct/cgroup.procs": "", "cgroup/cpu,cpuacct/cpu.cfs_quota_us": "-1\n", "cgroup/cpu,cpuacct/job/cpu.cfs_quota_us": "8000\n",
			"proc/42/cgroup": "4:memory:/\n3:cpu,cpuacct:/job\n0::/\n",
		}, func(p, th, us int64) (string, string) {
			return "cgroup/cpu,cpuacct/job/cpu.stat", fmt.Sprintf("nr_periods %d\nnr_throttled %d\nthrottled_time %d\n", p, th, us*1000)
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			tr := newTree(t, c.files)
			p := tr.process(42)
			tr.thread(42, 42, "S", 1, 1, 1)
			var periods, throttled, us int64
			for i, s := range []struct {
				periods, throttled, us int64
				want                   float32
			}{
				{0, 0, 0, 0}, {5, 5, 460e3, 0.92}, {5, 5, 460e3, 0.92},
				{5, 5, 0, 0.46}, {5, 0, 0, 0}, // it has CPU time again
				{5, 1, 4e6, 0.1}, {5, 1, 4e6, 0.2}, // many threads, throttled in one period of five
				{0, 0, 0, 0.2}, {0, 0, 0, 0}, // asleep
			} {
				periods, throttled, us = periods+s.periods, throttled+s.throttled, us+s.us
				file, text := c.stat(periods, throttled, us)
				tr.write(file, text)
				_ = tr.look()
				if !near(p.Throttled, s.want) {
					t.Errorf("look %d: throttled %g, want %g", i, p.Throttled, s.want)
				}
			}
		})
	}
}

func TestMemoryPressure(t *testing.T) {
	files := v2()
	files["cgroup/pods/a/c/memory.pressure"] = "some avg10=40.00 avg60=1.00 avg300=0.00 total=5\nfull avg10=10.00 avg60=0.00 avg300=0.00 total=5\n"
	tr := newTree(t, files)
	p, out := tr.process(42), tr.process(43)
	tr.write("proc/43/cgroup", "0::/../pods/a/c\n") // outside of this program's cgroup namespace
	_ = tr.look()
	if err := tr.s.Update(&tr.v); !errors.Is(err, source.ErrPartly) || !strings.Contains(err.Error(), "/host/sys/fs/cgroup") {
		t.Errorf("of a cgroup that is not shown: %v", err)
	}
	if !near(p.MemoryPressure, 0.4) || out.MemoryPressure != 0 {
		t.Errorf("memory pressure %g; of a cgroup that is not shown here %g", p.MemoryPressure, out.MemoryPressure)
	}
}

// An agent in a container sees its own cgroup in /sys/fs/cgroup, and other containers' by the
// host's mount: with a cgroup namespace of its own (/../..) and without, v2 and v1.
func TestContainer(t *testing.T) {
	for _, c := range []struct {
		name, own, self, rank string
		files                 map[string]string
	}{
		{"v2, own namespace", "pods/agent/c", "0::/\n", "0::/../../a/c\n", map[string]string{"cgroup.controllers": "cpu\n", "pods/agent/c/cgroup.controllers": "cpu\n", "pods/a/c/cpu.max": "1000 100000\n"}},
		{"v2, the host's", "", "0::/pods/agent/c\n", "0::/pods/a/c\n", map[string]string{"cgroup.controllers": "cpu\n", "pods/a/c/cpu.max": "1000 100000\n"}},
		{"v1, the host's", "pods/agent/c", "3:cpu,cpuacct:/pods/agent/c\n", "3:cpu,cpuacct:/pods/a/c\n", map[string]string{"cpu/cgroup.procs": "", "cpu/pods/agent/c/cgroup.procs": "", "cpu/pods/a/c/cpu.cfs_quota_us": "1000\n"}},
		{"v1, own namespace", "pods/agent/c", "3:cpu,cpuacct:/\n", "3:cpu,cpuacct:/../../a/c\n", map[string]string{"cpu/cgroup.procs": "", "cpu/pods/agent/c/cgroup.procs": "", "cpu/pods/a/c/cpu.cfs_quota_us": "1000\n"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			files := map[string]string{"proc/self/cgroup": c.self}
			for name, text := range c.files {
				files["proc/1/root/sys/fs/cgroup/"+name] = text
			}
			tr := newTree(t, files)
			host, v1 := filepath.Join(tr.root, "proc/1/root/sys/fs/cgroup"), strings.HasPrefix(c.name, "v1")
			own, group := filepath.Join(tr.root, "cgroup"), host
			if err := os.RemoveAll(own); err != nil {
				t.Fatal(err)
			}
			if v1 {
				if err := os.Mkdir(own, 0o700); err != nil {
					t.Fatal(err)
				}
				own, group = filepath.Join(own, "cpu"), filepath.Join(host, "cpu")
			}
			if err := os.Symlink(filepath.Join(group, c.own), own); err != nil { // what a mount of its own is
				t.Fatal(err)
			}
			tr.s.Close()
			tr.s = pressure.New(filepath.Join(tr.root, "proc"), filepath.Join(tr.root, "cgroup"))
			p := tr.process(42)
			tr.write("proc/42/cgroup", c.rank)
			tr.thread(42, 42, "S", 1, 1, 1)
			for i := range 2 {
				tr.write(strings.TrimPrefix(filepath.Join(group, "pods/a/c/cpu.stat"), tr.root+"/"), fmt.Sprintf("nr_periods %d\nnr_throttled %d\nthrottled_usec %d\nthrottled_time %d\n", 5*i, 5*i, 460000*i, 460000000*i))
				_ = tr.look()
			}
			if !near(p.Throttled, 0.92) {
				t.Errorf("throttled %g, want 0.92: %v", p.Throttled, tr.s.Update(&tr.v))
			}
		})
	}
}

// What the kernel does not have is no failure: it is 0, and said.
func TestNothingToSee(t *testing.T) {
	tr := newTree(t, nil)
	p := tr.process(42)
	for i, c := range []struct {
		remove string
		want   error
		says   string
	}{
		{"", source.ErrPartly, "no cgroups"},
		{"proc/pressure", source.ErrPartly, "CONFIG_PSI"},
		{"proc/self", source.ErrNoData, "schedstat"},
	} {
		if c.remove != "" {
			if err := os.RemoveAll(filepath.Join(tr.root, c.remove)); err != nil {
				t.Fatal(err)
			}
			tr.s.Close()
			tr.s = pressure.New(filepath.Join(tr.root, "proc"), filepath.Join(tr.root, "cgroup"))
		}
		var err error
		ok := func() bool { return errors.Is(err, c.want) && strings.Contains(err.Error(), c.says) }
		for deadline := time.Now().Add(time.Minute); ; time.Sleep(time.Millisecond) {
			tr.v.Now += int64(500 * time.Millisecond)
			if i == 0 {
				err = tr.look()
			} else {
				err = tr.s.Update(&tr.v)
			}
			if ok() {
				break
			}
			if time.Now().After(deadline) {
				t.Fatalf("%d: %v", i, err)
			}
		}
		if p.Starved != 0 || p.Throttled != 0 || p.MemoryPressure != 0 {
			t.Errorf("%+v", p)
		}
	}
}

// FuzzFiles: whatever the files say, shares are shares.
func FuzzFiles(f *testing.F) {
	f.Add("1 2 3\n", "nr_periods 5\nnr_throttled 5\nthrottled_usec 5\n", "some avg10=1.00 avg60=0\n", "0::/a\n")
	f.Add("9223372036854775807 9223372036854775807 1", "nr_periods 18446744073709551615\nnr_throttled -1", "some avg10=NaN ", "1:cpu:a\n0::/a/b\n0::/../..\n::\n")
	f.Fuzz(func(t *testing.T, sched, stat, psi, cgroup string) {
		tr := newTree(t, map[string]string{
			"cgroup/cgroup.controllers": "cpu\n", "cgroup/a/cpu.max": "1 2\n", "cgroup/a/cpu.stat": "", "cgroup/a/memory.pressure": psi, "proc/42/cgroup": cgroup,
		})
		p := tr.process(42)
		tr.thread(42, 42, "R", 1, 1, 1)
		for i := range 3 {
			if i == 1 {
				tr.write("proc/42/task/42/schedstat", sched)
				tr.write("cgroup/a/cpu.stat", stat)
			}
			_ = tr.look()
			for _, x := range []float32{p.Starved, p.Throttled, p.MemoryPressure} {
				if !(x >= 0 && x <= 1) {
					t.Fatalf("%g: %+v", x, p)
				}
			}
		}
	})
}
