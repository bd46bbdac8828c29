package ccl_test

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"regexp"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/lockstep-ccl/lockstep/ccl"
	"github.com/lockstep-ccl/lockstep/collector"
	"github.com/lockstep-ccl/lockstep/collector/agent"
	"github.com/lockstep-ccl/lockstep/collector/source/rdma"
	"github.com/lockstep-ccl/lockstep/diagnosis"
	"github.com/lockstep-ccl/lockstep/record"
)

// TestSteadyRDMALossy: of three pairs of ranks the one whose rail loses packets is named. The history has windows of
// a slow network on its queue pair from the onset on. The evidence names the queue pair, as the kernel numbers it, the
// port, and which counters of the NICs moved.
func TestSteadyRDMALossy(t *testing.T) {
	const (
		pairs   = 3
		patient = time.Minute
	)
	onRails(t, 2, 1)
	t.Cleanup(func() { sh(t, "rails up 0; rails up 1") })
	for _, dev := range []string{"a0", "b0", "a1", "b1"} {
		sh(t, fmt.Sprintf(railRate, dev))
	}
	dirs := []string{t.TempDir(), t.TempDir()} // of each host's agent
	p := startPipeline(t, "lossy", dirs, func() agent.NamedSource {
		s := rdma.New(rdma.Options{Sys: os.DirFS("/sys"), Period: time.Second, Log: slog.New(slog.DiscardHandler)})
		t.Cleanup(func() { _ = s.Close() })
		return agent.NamedSource{Name: "rdma", Source: s}
	})
	var stop atomic.Bool
	var done [pairs]atomic.Int64
	var wg sync.WaitGroup
	var flows [pairs]railFlow
	for i := range pairs {
		rail := min(i, 1)
		flows[i].rail = rail
		var recs [2]*record.Writer
		for r := range recs {
			var err error
			who := record.Identity{Job: "lossy", Rank: int32(2*i + r), WorldSize: 2 * pairs}
			if recs[r], err = record.Create(record.Options{Dir: dirs[r], Identity: who}); err != nil {
				t.Fatal(err)
			}
		}
		var err error
		if flows[i].read, err = record.Open(recs[0].Path()); err != nil {
			t.Fatal(err)
		}
		defer flows[i].read.Close()
		wg.Go(func() {
			ranks(t, 2, func(cfg *ccl.Config) {
				host := "ab"[cfg.Rank]
				cfg.Name, cfg.Recorder = fmt.Sprint("pair", i), recs[cfg.Rank]
				cfg.Node, cfg.Net, cfg.RDMA.HCA = "host "+string(host), ccl.NetRDMA, fmt.Sprintf("=rx%c%d", host, rail)
			}, func(ctx context.Context, c *ccl.Comm) error { return summed(ctx, c, &stop, &done[i]) })
		})
	}
	defer wg.Wait()
	defer stop.Store(true)
	p.awaitFor(t, patient, "some traffic, as a history", func() bool {
		return done[0].Load() >= 200 && done[1].Load() >= 200 && done[2].Load() >= 200
	})
	qps := queuePairsOf(t, "rxa0/1")
	var before [pairs]uint64
	for i := range flows {
		before[i], _ = flows[i].slow()
	}
	onset := record.Now()
	sh(t, fmt.Sprintf(railRate, "a0")+" loss 5%")
	p.awaitFor(t, patient, "a window of a slow network in the history of the rail's connection", func() bool {
		_, w, _ := flows[0].firstSlow(onset)
		return w.Last != 0
	})
	if c, _, _ := flows[0].firstSlow(onset); !slices.Contains(qps, fmt.Sprintf("%d->%d", c.ID, c.PeerID)) {
		t.Errorf("the history has queue pair %d->%d, the kernel has %v", c.ID, c.PeerID, qps)
	}
	flows[0].tellFirst(t, onset)
	var why string
	moved := regexp.MustCompile(`NIC rx[ab]0/1 of host [ab] saw loss \([a-z_]+ by \d+: `)
	p.awaitFor(t, patient, "a verdict on the rail whose evidence has the counters", func() bool {
		i := slices.IndexFunc(p.incidents(), func(in collector.Incident) bool { return in.Verdict.Class == diagnosis.CommunicationSlow })
		if i >= 0 {
			why = strings.Join(p.incidents()[i].Verdict.Why, "\n")
		}
		return moved.MatchString(why)
	})
	t.Logf("%s\n%s", p.verdicts(), why)
	named := regexp.MustCompile(`rdma rx[ab]0/1->rx[ab]0/1 qp (\d+->\d+) rail 1 gid [0-9a-f.:]+`).FindStringSubmatch(why)
	if named == nil {
		t.Fatal("the evidence names no queue pair of the rail")
	}
	own, peer, _ := strings.Cut(named[1], "->")
	if !slices.Contains(qps, named[1]) && !slices.Contains(qps, peer+"->"+own) {
		t.Errorf("queue pair %s is none of the kernel's on the rail: %v", named[1], qps)
	}
	for i := range flows {
		n, _ := flows[i].slow()
		t.Logf("pair %d over rail %d: %d windows of a slow network before the rail lost packets, %d since",
			i, flows[i].rail, before[i], n-before[i])
	}
	if other := regexp.MustCompile(`connection .*rx[ab]1/1`).FindString(why); other != "" {
		t.Errorf("an innocent rail is named: %s", other)
	}
}

// lossyCount is how many numbers ranks add up: some dozen packets, of which a lossy rail drops one as a rule.
const lossyCount = 16 << 10

// summed calls AllReduce until stop, which any rank passes on in the first element.
func summed(ctx context.Context, c *ccl.Comm, stop *atomic.Bool, done *atomic.Int64) error {
	s := c.NewStream()
	in, out := make([]float32, lossyCount), make([]float32, lossyCount)
	for out[0] == 0 {
		if stop.Load() {
			in[0] = 1
		}
		if err := do(ctx, s, c.AllReduce(s, ccl.Of(in), ccl.Of(out), ccl.Sum)); err != nil {
			return err
		}
		if c.Rank() == 0 {
			done.Add(1)
		}
		time.Sleep(2 * time.Millisecond)
	}
	return nil
}
