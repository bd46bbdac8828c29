package ccl_test

import (
	"cmp"
	"context"
	"fmt"
	"net"
	"os"
	"os/exec"
	"regexp"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/lockstep-ccl/lockstep/ccl"
	"github.com/lockstep-ccl/lockstep/record"
)

// The rails are slowed to this, far below what the emulated processor can send: then
// it is the link that a connection waits for, and another flow takes bandwidth from it.
const (
	railRate     = "tc qdisc replace dev %s root netem rate 40mbit limit 2000"
	railBytes    = 40e6 / 8 // a second
	intruderRate = 0.75     // of railBytes
	// At once the other flow sends as much as takes the rail for some ms.
	intruderFirst = 48 << 10
)

// railFlow is rank 0's traffic over one rail: bursts, each of which is answered.
type railFlow struct {
	rail        int
	bytes, each int // of a message, messages of a burst; 0: 8 KiB, 8
	stop, pause atomic.Bool
	done        atomic.Int64
	read        *record.Reader
}

// slow is how many windows the monitor has counted as of a slow network, and whether
// the network is slow now.
func (f *railFlow) slow() (windows uint64, now bool) {
	for _, c := range f.read.Conns(nil) {
		windows += c.SlowWindows
		now = now || c.WindowCause == record.CauseNetwork
	}
	return windows, now
}

// firstSlow is the first window of a slow network in the history that ends after a time, and
// the entry of its connection. normal is what requests took in the windows before, on the average.
func (f *railFlow) firstSlow(after int64) (conn record.ConnStatus, first record.Window, normal time.Duration) {
	for _, c := range f.read.Conns(nil) {
		var before, n int64
		for _, w := range f.read.History(&c, nil) {
			switch {
			case w.Last <= after && w.WRs > 0 && !w.Overlaps:
				before, n = before+w.Latency, n+1
			case w.Last > after && w.Cause == record.CauseNetwork && (first.Last == 0 || w.Last < first.Last):
				conn, first, normal = c, w, time.Duration(before/max(n, 1))
			}
		}
	}
	return conn, first, normal
}

// TestSteadyRDMADisturbed: when another flow takes most of a rail, or the rail is slow, the
// connection over it has a slow network, each time; that over the other rail never, nor
// one that sends nothing.
func TestSteadyRDMADisturbed(t *testing.T) {
	if os.Getenv("LOCKSTEP_RDMAVM") == "" {
		t.Skip("not in the virtual machine with RDMA devices: make test-rdma")
	}
	t.Cleanup(func() { sh(t, "rails up 0; rails up 1") })
	for _, dev := range []string{"a0", "b0", "a1", "b1"} {
		sh(t, fmt.Sprintf(railRate, dev))
	}
	var wg sync.WaitGroup
	flows := []*railFlow{{rail: 0}, {rail: 1}, {rail: 0}}
	for i, f := range flows {
		rec, err := record.Create(record.Options{Dir: t.TempDir(), Identity: record.Identity{Job: fmt.Sprint("flow", i), WorldSize: 2}})
		if err != nil {
			t.Fatal(err)
		}
		if f.read, err = record.Open(rec.Path()); err != nil {
			t.Fatal(err)
		}
		defer f.read.Close()
		wg.Go(func() {
			ranks(t, 2, func(cfg *ccl.Config) {
				host := "ab"[cfg.Rank]
				cfg.Node, cfg.Net, cfg.RDMA.HCA = "host "+string(host), ccl.NetRDMA, fmt.Sprintf("=rx%c%d", host, f.rail)
				if cfg.Rank == 0 {
					cfg.Recorder = rec
				}
			}, f.run)
		})
	}
	// until waits for cond, and says how long it took.
	until := func(what string, cond func() bool) time.Duration {
		t.Helper()
		began := time.Now()
		for !cond() {
			if time.Since(began) > 20*time.Second {
				t.Errorf("not in 20 s: %s", what)
				break
			}
			time.Sleep(time.Millisecond)
		}
		return time.Since(began)
	}
	busy, other, idle := flows[0], flows[1], flows[2]
	more := func(n int64) {
		a, b := busy.done.Load()+n, other.done.Load()+n
		until("enough traffic", func() bool { return busy.done.Load() >= a && other.done.Load() >= b })
	}
	more(200)
	idle.pause.Store(true)
	more(100)
	otherBefore, _ := other.slow()
	idleBefore, _ := idle.slow()
	for i := range 4 {
		more(100)
		end, onset := func() { sh(t, fmt.Sprintf(railRate, "a0")) }, record.Now()
		if i%2 == 0 {
			end, onset = intrude(t, "192.0.2.1", "192.0.2.2")
		} else {
			sh(t, fmt.Sprintf(railRate, "a0")+" delay 30ms")
		}
		took := until("the connection over the disturbed rail has a slow network", func() bool { _, now := busy.slow(); return now })
		busy.tellFirst(t, onset)
		end()
		over := until("it is over", func() bool { _, now := busy.slow(); return !now })
		t.Logf("slow network after %v; over %v after the disturbance ended", took, over)
	}
	for _, f := range []struct {
		*railFlow
		name   string
		before uint64
	}{{other, "over the other rail", otherBefore}, {idle, "that sends nothing", idleBefore}} {
		if n, now := f.slow(); n != f.before || now {
			t.Errorf("the connection %s: %d windows of a slow network", f.name, n-f.before)
		}
	}
	for _, f := range flows {
		f.stop.Store(true)
	}
	wg.Wait()
}

// tellFirst says how long after the onset the history has a first window of a slow network,
// by the record's times, and which queue pairs the kernel has on that port.
func (f *railFlow) tellFirst(t *testing.T, onset int64) {
	t.Helper()
	c, w, normal := f.firstSlow(onset)
	if w.Last == 0 {
		t.Log("no window of a slow network is in the history yet")
		return
	}
	kind := "window"
	if w.Overlaps {
		kind = "estimate"
	}
	nic := fmt.Sprintf("rxa%d/1", f.rail)
	qps := queuePairsOf(t, nic)
	t.Logf("first %s of a slow network %d µs after the onset: queue pair %d->%d, %d requests of %d µs each, before %d µs; the kernel has %v on %s",
		kind, (w.Last-onset)/1e3, c.ID, c.PeerID, w.WRs, w.Latency/1e3, normal.Microseconds(), qps, nic)
}

var queuePair = regexp.MustCompile(`(?m)^.*\blqpn (\d+)\b.*\brqpn (\d+)\b.*$`)

// queuePairsOf are the connected queue pairs of a port as the kernel tells, "own->peer's".
func queuePairsOf(t *testing.T, port string) (all []string) {
	t.Helper()
	out, err := exec.Command("rdma", "resource", "show", "qp", "link", port).CombinedOutput()
	if err != nil {
		t.Logf("rdma resource show qp link %s: %v: %s", port, err, out)
	}
	for _, m := range queuePair.FindAllStringSubmatch(string(out), -1) {
		all = append(all, m[1]+"->"+m[2])
	}
	return all
}

// intrude sends datagrams from one address to another, at a part of the rail's
// bandwidth, until end is called. It returns after the first ones, which are many at once.
func intrude(t *testing.T, from, to string) (end func(), onset int64) {
	t.Helper()
	sink, err := net.ListenUDP("udp", &net.UDPAddr{IP: net.ParseIP(to)})
	if err != nil {
		t.Fatal(err)
	}
	c, err := net.DialUDP("udp", &net.UDPAddr{IP: net.ParseIP(from)}, sink.LocalAddr().(*net.UDPAddr))
	if err != nil {
		t.Fatal(err)
	}
	quit, done, started := make(chan struct{}), make(chan struct{}), make(chan struct{})
	go func() {
		defer close(done)
		defer sink.Close()
		defer c.Close()
		datagram := make([]byte, 4000)
		onset = record.Now()
		for n := 0; n < intruderFirst; n += len(datagram) {
			c.Write(datagram)
		}
		close(started)
		began, sent := time.Now(), 0.
		for tick := time.NewTicker(2 * time.Millisecond); ; {
			select {
			case <-quit:
				tick.Stop()
				return
			case <-tick.C:
			}
			for due := intruderRate * railBytes * time.Since(began).Seconds(); sent < due; sent += float64(len(datagram)) {
				c.Write(datagram)
			}
		}
	}()
	<-started
	return func() { close(quit); <-done }, onset
}

func (f *railFlow) run(ctx context.Context, c *ccl.Comm) error {
	s := c.NewStream()
	b, answer := make([]byte, cmp.Or(f.bytes, 8<<10)), make([]byte, 1)
	for b[0] == 0 {
		var err error
		peer := 1 - c.Rank()
		exchange := []func() error{
			func() error { return c.Send(s, ccl.Of(b), peer) },
			func() error { return c.Recv(s, ccl.Of(answer), peer) },
		}
		if c.Rank() == 0 {
			for f.pause.Load() && !f.stop.Load() {
				time.Sleep(time.Millisecond)
			}
			if f.stop.Load() {
				b[0] = 1
			}
		} else {
			exchange = []func() error{
				func() error { return c.Recv(s, ccl.Of(b), peer) },
				func() error { return c.Send(s, ccl.Of(answer), peer) },
			}
		}
		for range cmp.Or(f.each, 8) {
			if err == nil {
				err = exchange[0]()
			}
		}
		if err == nil {
			err = exchange[1]()
		}
		if err := do(ctx, s, err); err != nil {
			return err
		}
		f.done.Add(1)
	}
	return nil
}
