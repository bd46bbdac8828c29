package fabric_test

import (
	"bufio"
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"math"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/lockstep-ccl/lockstep/ccl"
	"github.com/lockstep-ccl/lockstep/deploy/fabric"
)

// number is a test's parameter, by its name in the environment.
func number(name string, or int) int {
	if n, err := strconv.Atoi(os.Getenv("FABRIC_TEST_" + name)); err == nil {
		return n
	}
	return or
}

// bed is a fabric with processes in it.
type bed struct {
	t     *testing.T
	up    *fabric.Up
	dir   string
	ports int
}

// allowCubic has namespaces take CUBIC, where the machine has it and keeps it from them: BBR, some
// machines' default, paces a socket that had little to do by what it did.
func allowCubic(t *testing.T) {
	const file = "/proc/sys/net/ipv4/tcp_allowed_congestion_control"
	was, err := os.ReadFile(file)
	if err != nil || slices.Contains(strings.Fields(string(was)), "cubic") {
		return
	}
	if err := os.WriteFile(file, append(bytes.TrimSpace(was), " cubic"...), 0); err != nil {
		t.Log("without CUBIC:", err)
		return
	}
	t.Cleanup(func() { _ = os.WriteFile(file, was, 0) })
}

// setUp makes the fabric; where this user may not, it skips the test.
func setUp(t *testing.T, s fabric.Shape) *bed {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("network namespaces are root's to make")
	}
	for _, tool := range []string{"ip", "tc", "nsenter"} {
		if _, err := exec.LookPath(tool); err != nil {
			t.Skip(err)
		}
	}
	allowCubic(t)
	s.Name = fmt.Sprintf("lsf%d", os.Getpid())
	up, err := fabric.New(s)
	if err != nil {
		t.Skipf("no fabric of namespaces here: %v", err)
	}
	t.Cleanup(func() {
		if err := up.Down(); err != nil {
			t.Error(err)
		}
	})
	return &bed{t: t, up: up, dir: t.TempDir(), ports: 29000}
}

// onOneThread calls on a thread that never ends: who is to die with its parent (Pdeathsig)
// dies with the thread that started it, and fabric.Enter ends threads.
var onOneThread = sync.OnceValue(func() func(f func() error) error {
	calls, done := make(chan func() error), make(chan error)
	go func() {
		runtime.LockOSThread()
		for f := range calls {
			done <- f()
		}
	}()
	return func(f func() error) error { calls <- f; return <-done }
})

// process starts a role in a namespace.
func (b *bed) process(ns string, r role) (*exec.Cmd, io.Reader) {
	b.t.Helper()
	self, err := os.Executable()
	if err != nil {
		b.t.Fatal(err)
	}
	enc, _ := json.Marshal(r)
	cmd := fabric.Command(ns, self)
	dir := filepath.Join(b.dir, ns+r.Kind+strconv.Itoa(r.Rank))
	if err := os.MkdirAll(dir, 0o700); err != nil {
		b.t.Fatal(err)
	}
	cmd.Env = append(os.Environ(), roleEnv+"="+string(enc), "GOMAXPROCS=2", "LOCKSTEP_RUNTIME_DIR="+dir)
	cmd.Stderr = os.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	out, err := cmd.StdoutPipe()
	if err != nil {
		b.t.Fatal(err)
	}
	if err := onOneThread()(cmd.Start); err != nil {
		b.t.Fatal(err)
	}
	return cmd, out
}

// planner starts a planner and every host's prober.
func (b *bed) planner() (addr string, kill func()) {
	b.t.Helper()
	file := filepath.Join(b.dir, "fabric.json")
	enc, _ := json.Marshal(b.up.Fabric())
	if err := os.WriteFile(file, enc, 0o600); err != nil {
		b.t.Fatal(err)
	}
	addr = net.JoinHostPort(b.up.PlannerAddr().String(), "9411")
	p, _ := b.process(b.up.Management(), role{Kind: "planner", Planner: addr, Fabric: file, Light: true})
	return addr, func() {
		_ = p.Process.Kill()
		_ = p.Wait()
	}
}

func (b *bed) probers(addr string) {
	for h := range b.up.Hosts {
		p, _ := b.process(b.up.Host(h), role{Kind: "prober", Planner: addr, Node: fabric.NodeName(h)})
		b.t.Cleanup(func() {
			_ = p.Process.Kill()
			_ = p.Wait()
		})
	}
}

// job is one that runs.
type job struct {
	b     *bed
	hosts []int
	bytes int
	procs []*exec.Cmd
	ends  chan []float64

	said   sync.WaitGroup // who reads what ranks say
	mu     sync.Mutex
	stalls []stall
	began  time.Time // when it was started
}

// start runs a ring of one rank a host for some seconds.
func (b *bed) start(name, planner string, hosts []int, bytes int, seconds float64) *job {
	b.t.Helper()
	b.ports++
	id, err := ccl.NewUniqueID(net.JoinHostPort(b.up.Addr(hosts[0]).String(), strconv.Itoa(b.ports)))
	if err != nil {
		b.t.Fatal(err)
	}
	j := &job{b: b, hosts: hosts, bytes: bytes, ends: make(chan []float64, 1)}
	for r, h := range hosts {
		p, out := b.process(b.up.Host(h), role{
			Kind: "rank", Planner: planner, Node: fabric.NodeName(h), Job: name, Rank: r, Size: len(hosts), ID: id.String(),
			Addr: b.up.Addr(h).String(), Bytes: bytes, Depth: number("DEPTH", 4), Seconds: seconds, Lanes: number("LANES", 0),
			Stalls: number("STALLS", 0) > 0,
		})
		j.procs = append(j.procs, p)
		j.said.Go(func() {
			var ends []float64
			for s := bufio.NewScanner(out); s.Scan(); {
				if f, err := strconv.ParseFloat(s.Text(), 64); err == nil {
					ends = append(ends, f)
				} else if st, ok := parseStall(s.Text()); ok {
					j.mu.Lock()
					j.stalls = append(j.stalls, st)
					j.mu.Unlock()
				}
			}
			if r == 0 {
				j.ends <- ends
			}
		})
	}
	return j
}

// wait returns when each AllReduce ended.
func (j *job) wait() []float64 {
	j.b.t.Helper()
	ends := <-j.ends
	j.said.Wait()
	for r, p := range j.procs {
		if err := p.Wait(); err != nil {
			j.b.t.Errorf("rank %d: %v", r, err)
		}
	}
	return ends
}

// bus is the bandwidth of what ended from a time on, until another, in Mbit/s as a ring's
// links see it.
func (j *job) bus(ends []float64, from, to float64) float64 {
	i := slices.IndexFunc(ends, func(t float64) bool { return t >= from })
	k := len(ends)
	for k > 0 && ends[k-1] > to {
		k--
	}
	if i < 0 || k-i < 2 {
		return 0
	}
	n := float64(len(j.hosts))
	return float64(j.bytes) * 8 * 2 * (n - 1) / n * float64(k-1-i) / (ends[k-1] - ends[i]) / 1e6
}

// ideal is what a host's two ports carry of payload, in Mbit/s: frames without the headers of Ethernet, IP and
// TCP, the latter with timestamps.
func (b *bed) ideal() float64 { return 2 * float64(b.up.Rate) * 8948 / 9014 }

// ring orders hosts so that each talks to the next over spines.
func (b *bed) ring() (hosts []int) {
	half := b.up.Hosts / 2
	for h := range half {
		hosts = append(hosts, h, half+h)
	}
	return hosts
}

func summary(x []float64) string {
	if len(x) == 0 {
		return "none"
	}
	sum, least, most := 0.0, math.Inf(1), 0.0
	for _, v := range x {
		sum, least, most = sum+v, min(least, v), max(most, v)
	}
	return fmt.Sprintf("mean %.1f, worst %.1f, best %.1f of %d", sum/float64(len(x)), least, most, len(x))
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// long skips what takes minutes and a quiet machine.
func long(t *testing.T) {
	t.Helper()
	if os.Getenv("LOCKSTEP_TEST_FABRIC") == "" {
		t.Skip("make test-fabric measures on a fabric of namespaces: minutes, and a quiet machine")
	}
}

// shape is a fabric of two pods, 1:1. Its rate is what two cores can carry.
func shape(hosts, rate int) fabric.Shape {
	hosts = number("HOSTS", hosts)
	return fabric.Shape{Pods: 2, Spines: number("SPINES", hosts/2), Hosts: hosts, Rate: number("RATE", rate)}
}

// TestOneJob: a ring over all hosts, without and with the planner.
func TestOneJob(t *testing.T) {
	long(t)
	runs, seconds, bytes := number("RUNS", 20), float64(number("SECONDS", 20)), number("BYTES", 16<<20)
	b := setUp(t, shape(8, 40))
	measure := func(planner string) (all []float64) {
		for range runs {
			j := b.start("one", planner, b.ring(), bytes, seconds)
			ends := j.wait()
			if len(ends) == 0 {
				t.Fatal("nothing ended")
			}
			settled := ends[0]
			if planner != "" {
				settled += 4 // paths are asked for once data flows
			}
			all = append(all, j.bus(ends, settled, math.Inf(1)))
			t.Logf("planner %q: %.1f Mbit/s, turns ended after %s s", planner, all[len(all)-1], after(ends))
		}
		return all
	}
	t.Logf("ideal %.1f Mbit/s", b.ideal())
	b.withoutAndWith(func(planner string) {
		all := measure(planner)
		t.Logf("planner %q: %s; of the ideal %.3f, worst %.3f", planner, summary(all), mean(all)/b.ideal(), slices.Min(all)/b.ideal())
	})
}

// after is when turns ended, in seconds since the first.
func after(ends []float64) string {
	var b strings.Builder
	for _, e := range ends[1:] {
		fmt.Fprintf(&b, " %.1f", e-ends[0])
	}
	return strings.TrimSpace(b.String())
}

func mean(x []float64) (sum float64) {
	for _, v := range x {
		sum += v / float64(len(x))
	}
	return sum
}

// TestEightJobs: eight rings of two hosts each at once.
func TestEightJobs(t *testing.T) {
	long(t)
	runs, seconds, bytes := number("RUNS", 5), float64(number("SECONDS", 20)), number("BYTES", 8<<20)
	b := setUp(t, shape(16, 20))
	measure := func(planner string) (all []float64) {
		for range runs {
			var jobs []*job
			for k := range b.up.Hosts / 2 {
				jobs = append(jobs, b.start(fmt.Sprintf("job%d", k), planner, []int{k, b.up.Hosts/2 + k}, bytes, seconds))
			}
			var got []float64
			var ends [][]float64
			from, to := 0.0, math.Inf(1)
			for _, j := range jobs {
				e := j.wait()
				if len(e) < 3 {
					t.Fatalf("%d operations in %v s", len(e), seconds)
				}
				ends = append(ends, e)
				from, to = max(from, e[0]+2), min(to, e[len(e)-1])
			}
			for i, j := range jobs {
				got = append(got, j.bus(ends[i], from, to))
				t.Logf("planner %q: job %d: %.1f, turns ended after %s s", planner, i, got[i], after(ends[i]))
			}
			t.Logf("planner %q: %s, total %.1f", planner, summary(got), mean(got)*float64(len(got)))
			all = append(all, got...)
		}
		return all
	}
	t.Logf("ideal %.1f Mbit/s a job", b.ideal())
	all := map[bool][]float64{} // by whether there is a planner
	b.withoutAndWith(func(planner string) { all[planner != ""] = measure(planner) })
	without, with := all[false], all[true]
	t.Logf("without: %s; with: %s; slowest %.3f of the fastest", summary(without), summary(with), slices.Min(with)/slices.Max(with))
	if len(without) > 0 {
		t.Logf("total %.2f times", mean(with)/mean(without))
	}
}

// withoutAndWith measures without a planner, and with one that has looked at the fabric.
func (b *bed) withoutAndWith(measure func(planner string)) {
	if os.Getenv("FABRIC_TEST_ONLY") != "with" {
		measure("")
	}
	addr, kill := b.probed()
	defer kill()
	measure(addr)
}

// probed starts a planner and probers, and lets them look at the fabric.
func (b *bed) probed() (addr string, kill func()) {
	b.t.Helper()
	addr, kill = b.planner()
	b.probers(addr)
	time.Sleep(3 * time.Second) // rounds, which come every second
	return addr, kill
}
