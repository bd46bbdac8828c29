package ccl_test

import (
	"encoding/binary"
	"fmt"
	"net"
	"os"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"github.com/lockstep-ccl/lockstep/ccl"
	"github.com/lockstep-ccl/lockstep/record"
)

// TestSteadyRDMAOnset: when a rail whose requests take some hundred microseconds becomes slow, the history
// has it on the rail's queue pair before a request that was delayed has completed.
func TestSteadyRDMAOnset(t *testing.T) {
	if os.Getenv("LOCKSTEP_RDMAVM") == "" {
		t.Skip("not in the virtual machine with RDMA devices: make test-rdma")
	}
	t.Cleanup(func() { sh(t, "rails up 0") })
	sh(t, "tc qdisc replace dev a0 root netem delay 20us limit 2000")
	rec, err := record.Create(record.Options{Dir: t.TempDir(), Identity: record.Identity{Job: "onset", WorldSize: 2}})
	if err != nil {
		t.Fatal(err)
	}
	f := &railFlow{bytes: 1 << 10, each: 2}
	if f.read, err = record.Open(rec.Path()); err != nil {
		t.Fatal(err)
	}
	defer f.read.Close()
	var wg sync.WaitGroup
	wg.Go(func() {
		ranks(t, 2, func(cfg *ccl.Config) {
			host := "ab"[cfg.Rank]
			cfg.Node, cfg.Net, cfg.RDMA.HCA = "host "+string(host), ccl.NetRDMA, fmt.Sprintf("=rx%c0", host)
			if cfg.Rank == 0 {
				cfg.Recorder = rec
			}
		}, f.run)
	})
	defer wg.Wait()
	defer f.stop.Store(true)
	delayed := netemDelay(t, "a0")
	until := func(what string, cond func() bool) {
		t.Helper()
		for began := time.Now(); !cond(); time.Sleep(time.Millisecond) {
			if time.Since(began) > 20*time.Second {
				t.Fatalf("not in 20 s: %s", what)
			}
		}
	}
	more := func(n int64) { n += f.done.Load(); until("enough traffic", func() bool { return f.done.Load() >= n }) }
	more(500)
	qps := queuePairsOf(t, "rxa0/1")
	var after []time.Duration
	for range 12 {
		more(200)
		until("the network is as usual", func() bool { _, now := f.slow(); return !now })
		onset := delayed(20 * time.Millisecond)
		until("the history has a slow network", func() bool { _, w, _ := f.firstSlow(onset); return w.Last != 0 })
		c, w, normal := f.firstSlow(onset)
		delayed(20 * time.Microsecond)
		took := time.Duration(w.Last - onset)
		t.Logf("in the history %v after the onset: queue pair %d->%d, a request %v, before %v", took, c.ID, c.PeerID, time.Duration(w.Latency), normal)
		if !slices.Contains(qps, fmt.Sprintf("%d->%d", c.ID, c.PeerID)) {
			t.Errorf("the history has queue pair %d->%d, the kernel has %v", c.ID, c.PeerID, qps)
		}
		if took >= 20*time.Millisecond {
			t.Errorf("the history had it after %v, when requests that were delayed by 20 ms had completed", took)
		}
		after = append(after, took)
	}
	slices.Sort(after)
	t.Logf("in the history after %v (median), %v (worst of %d)", after[len(after)/2], after[len(after)-1], len(after))
}

// netemDelay returns what sets the delay of an interface's netem, at once, and returns when, by the record's
// clock: just before. A tc that is started for it takes milliseconds.
func netemDelay(t *testing.T, dev string) func(time.Duration) (at int64) {
	t.Helper()
	i, err := net.InterfaceByName(dev)
	if err != nil {
		t.Fatal(err)
	}
	c, err := netlink.Dial(unix.NETLINK_ROUTE, nil)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() })
	return func(d time.Duration) int64 {
		t.Helper()
		// TCA_KIND and TCA_OPTIONS: struct tc_netem_qopt (ticks of 64 ns) and TCA_NETEM_LATENCY64.
		const tcaKind, tcaOptions, latency64, root = 1, 2, 10, 0xffffffff
		le := binary.NativeEndian
		b := make([]byte, 20) // struct tcmsg
		le.PutUint32(b[4:], uint32(i.Index))
		le.PutUint32(b[12:], root)
		options := make([]byte, 24)
		le.PutUint32(options, uint32(d.Nanoseconds()/64))
		le.PutUint32(options[4:], 2000) // packets
		nested, err := netlink.MarshalAttributes([]netlink.Attribute{{Type: latency64, Data: le.AppendUint64(nil, uint64(d))}})
		if err != nil {
			t.Fatal(err)
		}
		attrs, err := netlink.MarshalAttributes([]netlink.Attribute{
			{Type: tcaKind, Data: []byte("netem\x00")}, {Type: tcaOptions, Data: append(options, nested...)},
		})
		if err != nil {
			t.Fatal(err)
		}
		m := netlink.Message{
			Header: netlink.Header{Type: unix.RTM_NEWQDISC, Flags: netlink.Request | netlink.Acknowledge | netlink.Create | netlink.Replace},
			Data:   append(b, attrs...),
		}
		at := record.Now()
		if _, err := c.Execute(m); err != nil {
			t.Fatalf("set netem's delay of %s to %v: %v", dev, d, err)
		}
		return at
	}
}
