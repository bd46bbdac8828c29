package ccl_test

import (
	"context"
	"encoding/binary"
	"errors"
	"flag"
	"fmt"
	"hash/crc64"
	"io"
	"math"
	"math/rand/v2"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"
	"time"
	"unsafe"

	"github.com/lockstep-ccl/lockstep/ccl"
	"github.com/lockstep-ccl/lockstep/record"
)

var longOutages = flag.Bool("outages", false, "try long outages of the network, too: minutes (make test-outages)")

// Two nodes of four ranks each, in network namespaces of their own with a veth between
// them. Each rank is a process; what they compute is the same as without any outage.
const (
	outageRanks  = 8
	outageNode   = 4
	outageRounds = 24
	outageFrom   = 8 // the round in which the network fails
	addrA, addrB = "10.83.11.1", "10.83.11.2"
)

// twoNodes is the testbed.
type twoNodes struct {
	t     *testing.T
	ns    [2]string // for nsenter
	links [2]string
}

// newTwoNodes makes it; where this user may not, it skips the test.
func newTwoNodes(t *testing.T) *twoNodes {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("network namespaces are root's to make")
	}
	for _, tool := range []string{"ip", "tc", "nsenter"} {
		if _, err := exec.LookPath(tool); err != nil {
			t.Skip(err)
		}
	}
	n := &twoNodes{t: t, links: [2]string{"lsout0", "lsout1"}}
	for i := range n.ns {
		holder := exec.Command("sleep", "1000")
		holder.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNET, Pdeathsig: syscall.SIGKILL}
		if err := holder.Start(); err != nil {
			t.Skipf("no network namespace: %v", err)
		}
		t.Cleanup(func() { holder.Process.Kill(); holder.Wait() })
		n.ns[i] = fmt.Sprintf("--net=/proc/%d/ns/net", holder.Process.Pid)
	}
	pid := strings.Split(n.ns[1], "/")[2]
	if out, err := n.try(0, "ip", "link", "add", n.links[0], "type", "veth", "peer", "name", n.links[1], "netns", pid); err != nil {
		t.Skipf("no veth: %v: %s", err, out)
	}
	for i, addr := range []string{addrA, addrB} {
		n.in(i, "ip", "link", "set", "lo", "up")
		n.in(i, "ip", "addr", "add", addr+"/24", "dev", n.links[i])
		// A packet is what is lost, and not a segment that the device is to cut up.
		n.in(i, "ip", "link", "set", n.links[i], "up", "gso_max_segs", "1", "gso_max_size", "1600")
	}
	return n
}

func (n *twoNodes) try(node int, args ...string) (string, error) {
	out, err := exec.Command("nsenter", append([]string{n.ns[node]}, args...)...).CombinedOutput()
	return string(out), err
}

func (n *twoNodes) in(node int, args ...string) {
	n.t.Helper()
	if out, err := n.try(node, args...); err != nil {
		n.t.Fatalf("node %d: %s: %v: %s", node, strings.Join(args, " "), err, out)
	}
}

// carrier takes the link between the nodes down, or up.
func (n *twoNodes) carrier(up bool) {
	n.t.Helper()
	n.in(0, "ip", "link", "set", n.links[0], map[bool]string{true: "up", false: "down"}[up])
}

// lose has a node's interface throw away this share of the packets that arrive: a
// classic BPF program compares a random number, and says TC_ACT_SHOT or TC_ACT_UNSPEC.
func (n *twoNodes) lose(node int, share float64) {
	n.t.Helper()
	n.try(node, "tc", "qdisc", "del", "dev", n.links[node], "ingress")
	if share == 0 {
		return
	}
	n.in(node, "tc", "qdisc", "add", "dev", n.links[node], "ingress")
	const random = uint32(0xfffff000 + 56) // SKF_AD_OFF + SKF_AD_RANDOM
	prog := fmt.Sprintf("4,32 0 0 %d,37 1 0 %d,6 0 0 2,6 0 0 4294967295", random, uint32(min(share*(1<<32), math.MaxUint32)))
	if out, err := n.try(node, "tc", "filter", "add", "dev", n.links[node], "parent", "ffff:", "protocol", "ip", "bpf", "bytecode", prog, "direct-action"); err != nil {
		n.t.Skipf("this kernel's tc cannot drop packets: %v: %s", err, out)
	}
}

// start has all ranks join, in their nodes.
func (n *twoNodes) start(env ...string) []*rankProcess {
	id, err := ccl.NewUniqueID(fmt.Sprintf("%s:%d", addrA, 20000+rand.N(10000)))
	if err != nil {
		n.t.Fatal(err)
	}
	ps := make([]*rankProcess, outageRanks)
	for r := range ps {
		ps[r] = startRankIn(n.t, []string{"nsenter", n.ns[r/outageNode]}, id, r, outageRanks, outageNode, "outage", env...)
	}
	return ps
}

// outageChild is a rank of these tests: it sums, exchanges and broadcasts, says when
// the outage may begin, and at last what it got, and what its recorder says of the links.
func outageChild() error {
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Minute)
	defer cancel()
	c, cfg, err := initFromEnv(ctx, nil)
	if err != nil {
		return err
	}
	defer cfg.Recorder.Close()
	links, err := record.Open(cfg.Recorder.Path())
	if err != nil {
		return err
	}
	defer links.Close()
	from := outageFrom
	if os.Getenv("OUTAGE_AT_THE_END") != "" {
		from = outageRounds - 1
	}
	sum := crc64.New(crc64.MakeTable(crc64.ECMA))
	s := c.NewStream()
	for round := range outageRounds {
		if round == from {
			fmt.Println("now")
		}
		if err = outageRound(ctx, c, s, round, func(b []byte) { sum.Write(b) }); err != nil {
			break
		}
		if round == from {
			if _, err = io.ReadFull(os.Stdin, make([]byte, 1)); err != nil { // until it has begun
				break
			}
		}
	}
	if err == nil {
		fmt.Printf("sum %x\n", sum.Sum64())
	} else {
		fmt.Println("error", strings.ReplaceAll(err.Error(), "\n", " "))
	}
	var down, up, resumed int
	var resent uint64
	buf := make([]record.Record, 1<<16)
	for _, r := range buf[:links.Next(buf)] {
		if r.Kind == record.KindLink {
			switch record.LinkState(r.Code) {
			case record.LinkDown:
				down++
			case record.LinkUp:
				up++
			}
		}
	}
	for _, k := range links.Conns(nil) {
		resumed += int(k.Switches)
		resent += k.Resent
	}
	fmt.Printf("links down %d up %d resumed %d resent %d\n", down, up, resumed, resent)
	if e := c.Close(); err == nil && e != nil {
		return e
	}
	return nil
}

// outageRound is one round of operations; got takes their results.
func outageRound(ctx context.Context, c *ccl.Comm, s *ccl.Stream, round int, got func([]byte)) error {
	dice := rand.New(rand.NewPCG(uint64(round), uint64(c.Rank())))
	size := []int{7, 2000, 10_000, 60_000}[round%4]
	x, y := make([]float32, size), make([]float32, size*c.Size())
	for i := range x {
		x[i] = float32(dice.NormFloat64())
	}
	bytes := func(v []float32) []byte { return unsafe.Slice((*byte)(unsafe.Pointer(&v[0])), 4*len(v)) }
	if err := do(ctx, s, c.AllReduce(s, ccl.Of(x), ccl.Of(x), ccl.Sum)); err != nil {
		return err
	}
	got(bytes(x))
	if err := do(ctx, s, c.AllGather(s, ccl.Of(x), ccl.Of(y))); err != nil {
		return err
	}
	got(bytes(y[:size]))
	for i := range y {
		y[i] = float32(dice.NormFloat64())
	}
	z := make([]float32, len(y))
	if err := do(ctx, s, c.AlltoAll(s, ccl.Of(y), ccl.Of(z))); err != nil {
		return err
	}
	got(bytes(z))
	got(binary.LittleEndian.AppendUint64(nil, uint64(round)))
	return do(ctx, s, c.Barrier(s))
}

// begun tells ranks that said "now" that it has.
func begun(t *testing.T, ps []*rankProcess) time.Time {
	t.Helper()
	for r, p := range ps {
		if _, err := p.stdin.Write([]byte{1}); err != nil {
			t.Fatalf("rank %d: %v", r, err)
		}
	}
	return time.Now()
}

// next is the next line of a rank's, within a bound.
func (p *rankProcess) next(t *testing.T, rank int, within time.Duration) string {
	t.Helper()
	select {
	case line, ok := <-p.lines:
		if !ok {
			t.Fatalf("rank %d has ended", rank)
		}
		return line
	case <-time.After(within):
		t.Fatalf("rank %d says nothing for %v", rank, within)
	}
	return ""
}

// TestOutages: a network that is away for less than the bound costs time, and not a bit
// of any result.
func TestOutages(t *testing.T) {
	n := newTwoNodes(t)
	both := func(share float64) { n.lose(0, share); n.lose(1, share) }
	type outage struct {
		name       string
		long       bool
		begin, end func()
		lasts      time.Duration // 0: to the end of the job
		noticed    bool          // surely
		atTheEnd   bool          // of the job
	}
	carrier := func(lasts time.Duration, long bool) outage {
		return outage{fmt.Sprintf("link down for %v", lasts), long, func() { n.carrier(false) }, func() { n.carrier(true) }, lasts, lasts >= 3*time.Second, false}
	}
	silent := func(lasts time.Duration, long bool) outage {
		return outage{fmt.Sprintf("all packets lost for %v", lasts), long, func() { both(1) }, func() { both(0) }, lasts, lasts >= 3*time.Second, false}
	}
	oneWay := func(lasts time.Duration, to int, long bool) outage {
		return outage{fmt.Sprintf("one way to node %d lost for %v", to, lasts), long, func() { n.lose(to, 1) }, func() { n.lose(to, 0) }, lasts, lasts >= 3*time.Second, false}
	}
	loss := func(percent float64, long bool) outage {
		return outage{fmt.Sprintf("%v %% of packets lost", percent), long, func() { both(percent / 100) }, func() { both(0) }, 0, false, false}
	}
	atTheEnd := func(o outage) outage {
		o.name, o.atTheEnd, o.noticed = o.name+" at the end", true, false
		return o
	}
	var want []string
	for _, o := range []outage{
		{name: "none", begin: func() {}, end: func() {}},
		silent(time.Second, false), carrier(4*time.Second, false), loss(5, false), oneWay(4*time.Second, 1, false),
		carrier(time.Second, true), silent(3*time.Second, true), carrier(10*time.Second, true), silent(10*time.Second, true),
		oneWay(10*time.Second, 0, true), silent(25*time.Second, true), carrier(25*time.Second, true), loss(1, true), loss(20, true),
		atTheEnd(silent(10*time.Second, true)),
	} {
		if o.long && !*longOutages {
			continue
		}
		t.Run(o.name, func(t *testing.T) {
			n.t = t
			var env []string
			if o.atTheEnd {
				env = append(env, "OUTAGE_AT_THE_END=1")
			}
			ps := n.start(env...)
			for r, p := range ps {
				p.expect(t, r, "now")
			}
			o.begin()
			since := begun(t, ps)
			if o.lasts > 0 {
				time.Sleep(o.lasts)
				o.end()
			}
			var sums []string
			var down, resumed, resent int
			for r, p := range ps {
				sums = append(sums, p.next(t, r, 2*time.Minute))
			}
			took := time.Since(since)
			if o.lasts == 0 {
				o.end()
			}
			for r, p := range ps {
				var d, u, re, sent int
				if line := p.next(t, r, time.Minute); len(line) > 0 {
					if _, err := fmt.Sscanf(line, "links down %d up %d resumed %d resent %d", &d, &u, &re, &sent); err != nil {
						t.Errorf("rank %d says %q", r, line)
					}
				}
				down, resumed, resent = down+d, resumed+re, resent+sent
				if o.noticed && d == 0 && r%outageNode == 0 {
					t.Errorf("rank %d, whose links were away, has not recorded it", r)
				}
			}
			t.Logf("%s: the rest took %.1f s; %d outages of links recorded, %d resumed on other sockets, %d bytes sent again", o.name, took.Seconds(), down, resumed, resent)
			if want == nil {
				want = sums
			}
			for r := range sums {
				if sums[r] != want[r] || !strings.HasPrefix(sums[r], "sum ") {
					t.Errorf("rank %d: %s, undisturbed it has %s", r, sums[r], want[r])
				}
			}
		})
	}
}

// TestOutageEnds: a network that is away for longer than the bound ends the job, and each
// rank that waited across it names a peer and what was tried.
func TestOutageEnds(t *testing.T) {
	n := newTwoNodes(t)
	bound := "4s"
	if *longOutages {
		bound = "30s"
	}
	ps := n.start("LOCKSTEP_OUTAGE_TIMEOUT=" + bound)
	for r, p := range ps {
		p.expect(t, r, "now")
	}
	n.lose(0, 1)
	n.lose(1, 1)
	since := begun(t, ps)
	for r, p := range ps {
		line := p.next(t, r, 90*time.Second)
		t.Logf("rank %d, after %.1f s: %s", r, time.Since(since).Seconds(), line)
		if !strings.HasPrefix(line, "error ") || !strings.Contains(line, ccl.ErrPeerLost.Error()) || !strings.Contains(line, "nothing") {
			t.Errorf("rank %d says %q", r, line)
		}
	}
	n.lose(0, 0)
	n.lose(1, 0)
}

// TestOutageTimeout: the bound is a duration within reason.
func TestOutageTimeout(t *testing.T) {
	for name, v := range map[string]string{"LOCKSTEP_RANK": "0", "LOCKSTEP_WORLD_SIZE": "1", "LOCKSTEP_COMM_ID": freeID(t).String(), "LOCKSTEP_RECORDER": "off"} {
		t.Setenv(name, v)
	}
	for v, want := range map[string]time.Duration{"": 0, "45s": 45 * time.Second, "1h": time.Hour, "999ms": -1, "61m": -1, "-3s": -1, "30": -1} {
		t.Setenv("LOCKSTEP_OUTAGE_TIMEOUT", v)
		switch cfg, err := ccl.ConfigFromEnv(); {
		case want < 0 && (err == nil || !strings.Contains(err.Error(), "LOCKSTEP_OUTAGE_TIMEOUT")):
			t.Errorf("%q: %v, %v", v, cfg.OutageTimeout, err)
		case want >= 0 && (err != nil || cfg.OutageTimeout != want):
			t.Errorf("%q: %v, %v", v, cfg.OutageTimeout, err)
		}
	}
	_, err := ccl.Init(t.Context(), ccl.Config{ID: freeID(t), Size: 1, Secret: secret, OutageTimeout: time.Millisecond})
	if !errors.Is(err, ccl.ErrInvalid) {
		t.Errorf("a bound of 1 ms: %v", err)
	}
}
