package ccl_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"
	"unsafe"

	"github.com/lockstep-ccl/lockstep/ccl"
	"github.com/lockstep-ccl/lockstep/ccl/internal/verbs"
	"github.com/lockstep-ccl/lockstep/ccl/internal/verbs/verbstest"
	"github.com/lockstep-ccl/lockstep/record"
)

// overRDMA spreads ranks over nodes, per on each, with fake NICs between them:
// nodes of even number have mlx5_0 and mlx5_1, the others mlx5_2 and mlx5_3, the
// first of each on rail 0.
func overRDMA(per int) func(*ccl.Config) {
	return overRDMAOn(func(rank int) int { return rank / per })
}

// overRDMAOn is overRDMA with ranks on any nodes.
func overRDMAOn(node func(rank int) int) func(*ccl.Config) {
	return func(cfg *ccl.Config) {
		n := node(cfg.Rank)
		cfg.Node = fmt.Sprint("node", n)
		cfg.Net = ccl.NetRDMA
		cfg.RDMA = ccl.RDMAConfig{HCA: "=mlx5_0,mlx5_1", QueuePairs: 2, FailbackAfter: 50 * time.Millisecond, GiveUpAfter: 3 * time.Second}
		if n%2 == 1 {
			cfg.RDMA.HCA = "=mlx5_2,mlx5_3"
		}
	}
}

// oneRail is a fabric whose ports all reach each other.
func oneRail() verbstest.Options {
	var o verbstest.Options
	for i := range 4 {
		o.Devices = append(o.Devices, verbstest.Device{Name: fmt.Sprint("mlx5_", i)})
	}
	return o
}

// TestRDMACollectives runs every collective over RDMA between nodes of one rank
// and of two.
func TestRDMACollectives(t *testing.T) {
	counts := []int{0, 1, 13, 255, 4099}
	for _, n := range []int{2, 3, 4} {
		for _, per := range []int{1, 2} {
			if per == n {
				continue
			}
			t.Run(fmt.Sprintf("%d ranks, %d a node", n, per), func(t *testing.T) {
				verbstest.New(t, oneRail())
				ranks(t, n, overRDMA(per), runCalls(calls(n, counts, true)))
			})
		}
	}
}

// TestRDMALarge moves messages that are many times what connections buffer.
func TestRDMALarge(t *testing.T) {
	verbstest.New(t, oneRail())
	ranks(t, 3, overRDMA(1), runCalls([]call{
		{record.AllReduce, ccl.Float32, ccl.Sum, 3_000_001, 0, true, 0},
		{record.ReduceScatter, ccl.BFloat16, ccl.Sum, 1_000_001, 0, false, 0},
		{record.AllGather, ccl.Int64, ccl.Sum, 300_001, 0, true, 0},
		{record.Broadcast, ccl.Uint8, ccl.Sum, 9_000_001, 2, false, 0},
		{record.AlltoAll, ccl.Int32, ccl.Sum, 500_001, 0, true, 0},
	}))
}

// rdmaFault is one thing that breaks between rank 0 and rank 1.
type rdmaFault struct {
	name string
	do   func(f *verbstest.Fabric)
	undo func(f *verbstest.Fabric)
}

var rdmaFaults = []rdmaFault{
	{"port of rank 0", func(f *verbstest.Fabric) { f.SetPort("mlx5_0", 1, false, true) }, func(f *verbstest.Fabric) { f.SetPort("mlx5_0", 1, true, true) }},
	{"port of rank 1", func(f *verbstest.Fabric) { f.SetPort("mlx5_2", 1, false, true) }, func(f *verbstest.Fabric) { f.SetPort("mlx5_2", 1, true, true) }},
	{"port of rank 1, unnoticed", func(f *verbstest.Fabric) { f.SetPort("mlx5_2", 1, false, false) }, func(f *verbstest.Fabric) { f.SetPort("mlx5_2", 1, true, false) }},
	{"to rank 1", func(f *verbstest.Fabric) { f.Link("mlx5_0", 1, "mlx5_2", 1).Drop(true) }, (*verbstest.Fabric).Heal},
	{"to rank 0", func(f *verbstest.Fabric) { f.Link("mlx5_2", 1, "mlx5_0", 1).Drop(true) }, (*verbstest.Fabric).Heal},
	{"acknowledgements", func(f *verbstest.Fabric) { f.Link("mlx5_2", 1, "mlx5_0", 1).LoseAcks(true) }, (*verbstest.Fabric).Heal},
	{"torn, then the port", func(f *verbstest.Fabric) {
		f.Link("mlx5_0", 1, "mlx5_2", 1).TearNext(2)
		f.Link("mlx5_2", 1, "mlx5_0", 1).TearNext(2)
		f.SetPort("mlx5_0", 1, false, true)
	}, func(f *verbstest.Fabric) { f.SetPort("mlx5_0", 1, true, true) }},
	{"late packets", func(f *verbstest.Fabric) {
		f.Link("mlx5_0", 1, "mlx5_2", 1).Freeze()
		f.Link("mlx5_2", 1, "mlx5_0", 1).Freeze()
	}, func(f *verbstest.Fabric) {
		f.Link("mlx5_0", 1, "mlx5_2", 1).Release()
		f.Link("mlx5_2", 1, "mlx5_0", 1).Release()
	}},
	{"both ends", func(f *verbstest.Fabric) {
		f.SetPort("mlx5_0", 1, false, true)
		f.SetPort("mlx5_2", 1, false, true)
	}, func(f *verbstest.Fabric) {
		f.SetPort("mlx5_2", 1, true, true)
		f.SetPort("mlx5_0", 1, true, true)
	}},
	{"backup, then primary", func(f *verbstest.Fabric) {
		f.SetPort("mlx5_1", 1, false, true)
		time.Sleep(time.Millisecond)
		f.SetPort("mlx5_1", 1, true, true)
		f.SetPort("mlx5_0", 1, false, true)
	}, func(f *verbstest.Fabric) { f.SetPort("mlx5_0", 1, true, true) }},
	{"the backup during the switch", func(f *verbstest.Fabric) {
		f.SetPort("mlx5_0", 1, false, true)
		f.SetPort("mlx5_3", 1, false, true)
		time.Sleep(20 * time.Millisecond)
		f.SetPort("mlx5_3", 1, true, true)
	}, func(f *verbstest.Fabric) { f.SetPort("mlx5_0", 1, true, true) }},
	{"device of rank 0", func(f *verbstest.Fabric) { f.Remove("mlx5_0") }, func(f *verbstest.Fabric) { f.Restore("mlx5_0") }},
	{"device of rank 1", func(f *verbstest.Fabric) { f.Remove("mlx5_2") }, func(f *verbstest.Fabric) { f.Restore("mlx5_2") }},
	{"writes fail", func(f *verbstest.Fabric) { f.FailSends("mlx5_2", 1, verbs.LocalQPError) }, (*verbstest.Fabric).Heal},
}

// TestRDMAFailover: whatever breaks on one path in the midst of operations, and
// when it comes back, results have the same bits as before.
func TestRDMAFailover(t *testing.T) {
	const count = 400_000
	for _, ft := range rdmaFaults {
		t.Run(ft.name, func(t *testing.T) {
			f := verbstest.New(t, verbstest.Options{})
			breaking := ft.during(f, 2, 8)
			ranks(t, 2, overRDMA(1), func(ctx context.Context, c *ccl.Comm) error {
				s := c.NewStream()
				rng := rand.New(rand.NewPCG(uint64(c.Rank()), 3))
				in := make([]float32, count)
				for i := range in {
					in[i] = rng.Float32()*2000 - 1000
				}
				var all, part []float32
				for round := range 14 {
					a, p := make([]float32, count), make([]float32, count/2)
					if err := do(ctx, s, c.AllReduce(s, ccl.Of(in), ccl.Of(a), ccl.Sum)); err != nil {
						return fmt.Errorf("AllReduce %d: %w", round, err)
					}
					if err := do(ctx, s, c.ReduceScatter(s, ccl.Of(in), ccl.Of(p), ccl.Sum)); err != nil {
						return fmt.Errorf("ReduceScatter %d: %w", round, err)
					}
					if err := do(ctx, s, c.Barrier(s)); err != nil {
						return err
					}
					if round == 0 {
						all, part = a, p
					}
					if !slices.Equal(a, all) || !slices.Equal(p, part) {
						return fmt.Errorf("round %d differs", round)
					}
					breaking.passed(c)
				}
				return nil
			})
			breaking.end()
		})
	}
}

// breaking is a fabric that breaks while ranks run rounds of operations.
type breaking struct {
	rounds atomic.Int32 // of rank 0
	stop   chan struct{}
	done   sync.WaitGroup
}

// during breaks f within an operation after so many rounds, and mends it after more.
func (ft *rdmaFault) during(f *verbstest.Fabric, breaks, mends int32) *breaking {
	x := &breaking{stop: make(chan struct{})}
	x.done.Go(func() {
		r := rand.New(rand.NewPCG(1, 2))
		for _, step := range []struct {
			round int32
			do    func(*verbstest.Fabric)
		}{{breaks, ft.do}, {mends, ft.undo}} {
			for x.rounds.Load() < step.round {
				select {
				case <-x.stop:
					return
				case <-time.After(100 * time.Microsecond):
				}
			}
			time.Sleep(time.Duration(r.IntN(2000)) * time.Microsecond)
			step.do(f)
		}
	})
	return x
}

// passed is called by all ranks after a round.
func (x *breaking) passed(c *ccl.Comm) {
	if c.Rank() == 0 {
		x.rounds.Add(1)
	}
}

func (x *breaking) end() {
	close(x.stop)
	x.done.Wait()
}

// TestRDMANoPathLeft: both ranks' operations fail, and say between which ports.
func TestRDMANoPathLeft(t *testing.T) {
	f := verbstest.New(t, verbstest.Options{})
	ranks(t, 2, overRDMA(1), func(ctx context.Context, c *ccl.Comm) error {
		s, x := c.NewStream(), ccl.Of(make([]float32, 100_000))
		if err := do(ctx, s, c.AllReduce(s, x, x, ccl.Sum)); err != nil {
			return err
		}
		begun := time.Now()
		if c.Rank() == 0 {
			f.SetPort("mlx5_0", 1, false, true)
			f.SetPort("mlx5_3", 1, false, true)
		}
		var err error
		for err == nil {
			err = do(ctx, s, c.AllReduce(s, x, x, ccl.Sum))
		}
		if err := wantError(c, err, ccl.ErrPeerLost, begun); err != nil {
			return err
		}
		for _, port := range []string{"mlx5_0/1", "mlx5_1/1", "mlx5_2/1", "mlx5_3/1"} {
			if !strings.Contains(err.Error(), port) {
				return fmt.Errorf("the error does not name %s: %w", port, err)
			}
		}
		return errExpected
	})
}

// TestNetChoice: what carries bytes between nodes, and how it is said when it
// cannot be what was asked for.
func TestNetChoice(t *testing.T) {
	f := verbstest.New(t, verbstest.Options{})
	for _, net := range []ccl.Net{"", ccl.NetAuto, ccl.NetTCP, ccl.NetRDMA} {
		ranks(t, 2, func(cfg *ccl.Config) { overRDMA(1)(cfg); cfg.Net = net }, func(ctx context.Context, c *ccl.Comm) error {
			return sum(ctx, c)
		})
	}
	// Without a usable port on one rank auto is TCP, and rdma an error on both.
	f.SetPort("mlx5_2", 1, false, true)
	f.SetPort("mlx5_3", 1, false, true)
	ranks(t, 2, func(cfg *ccl.Config) { overRDMA(1)(cfg); cfg.Net = ccl.NetAuto }, func(ctx context.Context, c *ccl.Comm) error {
		return sum(ctx, c)
	})
	id := freeID(t)
	var errs [2]error
	var wg sync.WaitGroup
	for r := range errs {
		wg.Go(func() {
			cfg := ccl.Config{ID: id, Rank: r, Size: 2, Secret: secret}
			overRDMA(1)(&cfg)
			_, errs[r] = ccl.Init(context.Background(), cfg)
		})
	}
	wg.Wait()
	for r, err := range errs {
		if err == nil || !strings.Contains(err.Error(), "mlx5_2:1") {
			t.Errorf("rank %d: %v", r, err)
		}
	}
	for _, bad := range []ccl.Config{{Net: "ib"}, {RDMA: ccl.RDMAConfig{HCA: "mlx5_0:x"}}, {RDMA: ccl.RDMAConfig{GID: "?"}}, {RDMA: ccl.RDMAConfig{Retries: 7}}} {
		bad.ID, bad.Size, bad.Secret = id, 1, secret
		if _, err := ccl.Init(context.Background(), bad); !errors.Is(err, ccl.ErrInvalid) {
			t.Errorf("%+v %+v: %v", bad.Net, bad.RDMA, err)
		}
	}
}

// TestRDMAIdentity: both ends of each path record who the other one is: what one calls its
// queue pair the other calls the peer's, with NIC, port, rail and address of each.
func TestRDMAIdentity(t *testing.T) {
	verbstest.New(t, verbstest.Options{})
	var recs [2]*record.Writer
	for i := range recs {
		var err error
		if recs[i], err = record.Create(record.Options{Dir: t.TempDir(), Identity: record.Identity{Job: "test", WorldSize: 2}}); err != nil {
			t.Fatal(err)
		}
		defer recs[i].Close()
	}
	ranks(t, 2, func(cfg *ccl.Config) {
		overRDMA(1)(cfg)
		cfg.Recorder = recs[cfg.Rank]
	}, func(ctx context.Context, c *ccl.Comm) error {
		s, x := c.NewStream(), ccl.Of(make([]float32, 300_000))
		return do(ctx, s, c.AllReduce(s, x, x, ccl.Sum))
	})
	var conns [2]map[uint16]record.ConnStatus
	for i := range recs {
		r, err := record.Open(recs[i].Path())
		if err != nil {
			t.Fatal(err)
		}
		defer r.Close()
		conns[i] = map[uint16]record.ConnStatus{}
		for _, c := range r.Conns(nil) {
			conns[i][c.Channel] = c
		}
	}
	if len(conns[0]) != 4 { // two lanes of two paths
		t.Fatalf("%+v", conns[0])
	}
	for channel, a := range conns[0] {
		b := conns[1][channel]
		if a.ID == 0 || a.ID != uint64(b.PeerID) || b.ID != uint64(a.PeerID) {
			t.Errorf("channel %d: queue pairs %d→%d and %d→%d", channel, a.ID, a.PeerID, b.ID, b.PeerID)
		}
		device, port := a.NIC()
		if want := fmt.Sprint("mlx5_", channel%2); device != want || port != 1 || a.Rail != int(channel%2)+1 {
			t.Errorf("channel %d: NIC %s/%d, rail %d, want %s/1, rail %d", channel, device, port, a.Rail, want, channel%2+1)
		}
		if record.AddressText(a.Address) == "" || a.Address == b.Address {
			t.Errorf("channel %d: addresses %q and %q", channel, record.AddressText(a.Address), record.AddressText(b.Address))
		}
	}
}

// TestRDMARecords: each path of each lane is a connection of the flight recorder,
// which tells what became of it, and that all were down before an operation failed.
func TestRDMARecords(t *testing.T) {
	f := verbstest.New(t, verbstest.Options{})
	rec, err := record.Create(record.Options{Dir: t.TempDir(), Identity: record.Identity{Job: "test", WorldSize: 2}})
	if err != nil {
		t.Fatal(err)
	}
	defer rec.Close()
	r, err := record.Open(rec.Path())
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	states := func() string {
		var s []string
		for _, c := range r.Conns(nil) {
			s = append(s, fmt.Sprintf("%d %s", c.Channel, c.Link))
		}
		slices.Sort(s)
		return strings.Join(s, ", ")
	}
	var kinds []string
	buf := make([]record.Record, 10_000)
	// links are the states of which there are new records.
	links := func() (told []string) {
		of := map[uint32]uint16{}
		for _, c := range r.Conns(nil) {
			of[c.Index] = c.Channel
		}
		for _, k := range buf[:r.Next(buf)] {
			if k.Kind == record.KindLink {
				told = append(told, fmt.Sprintf("%d %v", of[k.Conn], record.LinkState(k.Code)))
			}
		}
		return told
	}
	ranks(t, 2, func(cfg *ccl.Config) {
		if overRDMA(1)(cfg); cfg.Rank == 0 {
			cfg.Recorder = rec
		}
	}, func(ctx context.Context, c *ccl.Comm) error {
		s, x := c.NewStream(), ccl.Of(make([]float32, 300_000))
		// until repeats an operation until the recorder tells these states.
		until := func(want string) error {
			for {
				done := []int64{0}
				if err := do(ctx, s, c.AllReduce(s, x, x, ccl.Sum)); err != nil {
					return err
				}
				if c.Rank() == 0 && states() == want {
					done[0] = 1
				}
				if err := do(ctx, s, c.AllReduce(s, ccl.Of(done), ccl.Of(done), ccl.Max)); err != nil {
					return fmt.Errorf("%w, waiting for %s, have %s", err, want, states())
				}
				if done[0] == 1 {
					return nil
				}
			}
		}
		if err := until("0 up, 1 up, 2 up, 3 up"); err != nil {
			return err
		}
		if c.Rank() == 0 {
			for _, k := range r.Conns(nil) {
				if k.Transport != record.TransportRDMA || k.Peer != 1 || k.Name != []string{"mlx5_0/1->mlx5_2/1", "mlx5_1/1->mlx5_3/1"}[k.Channel%2] || k.ID == 0 {
					return fmt.Errorf("connection %+v", k.ConnEntry)
				}
				if k.Channel%2 == 1 && k.Posted != 0 {
					return fmt.Errorf("%d bytes over a backup", k.Posted)
				}
			}
			f.SetPort("mlx5_2", 1, false, true)
		}
		if err := until("0 down, 1 switched, 2 down, 3 switched"); err != nil {
			return err
		}
		if c.Rank() == 0 {
			for _, k := range r.Conns(nil) {
				if primary := k.Channel%2 == 0; primary && k.Outstanding() != 0 || (k.Switches == 0) != primary || k.Channel == 0 && k.Received == 0 {
					return fmt.Errorf("after a switch: %+v", k)
				}
			}
			f.SetPort("mlx5_2", 1, true, true)
		}
		if err := until("0 up, 1 up, 2 up, 3 up"); err != nil {
			return err
		}
		if c.Rank() == 0 {
			kinds = append(kinds, links()...)
			if slices.Contains(kinds, "1 down") || slices.Contains(kinds, "3 down") {
				return fmt.Errorf("a sound backup that was left for the primary is told as broken: %v", kinds)
			}
			f.SetPort("mlx5_0", 1, false, true)
			f.SetPort("mlx5_1", 1, false, true)
		}
		begun := time.Now()
		err := until("never")
		if c.Rank() == 0 {
			if got := states(); got != "0 down, 1 down, 2 down, 3 down" {
				return fmt.Errorf("when the operation failed: %s", got)
			}
		}
		if err := wantError(c, err, ccl.ErrPeerLost, begun); err != nil {
			return err
		}
		return errExpected
	})
	kinds = append(kinds, links()...)
	for _, want := range []string{"0 up", "1 up", "0 down", "1 switched", "0 switched", "1 down"} {
		if !slices.Contains(kinds, want) {
			t.Errorf("no record of link %s: %v", want, kinds)
		}
	}
}

// TestRDMAMemAlloc: collectives on a CPU rank's MemAlloc memory, which is sent from
// where it lies, have the same results, also when a path breaks and when the memory
// changes as soon as an operation has ended.
func TestRDMAMemAlloc(t *testing.T) {
	f := verbstest.New(t, verbstest.Options{})
	ranks(t, 2, overRDMA(1), func(ctx context.Context, c *ccl.Comm) error {
		const n = 1 << 20
		s := c.NewStream()
		mem, err := c.MemAlloc(2 * 4 * n)
		if err != nil {
			return err
		}
		both := mem.Buffer(ccl.Float32, 2*n)
		send, recv := both.Slice(0, n), both.Slice(n, 2*n)
		in, out := unsafe.Slice((*float32)(unsafe.Pointer(&send.Raw()[0])), n), unsafe.Slice((*float32)(unsafe.Pointer(&recv.Raw()[0])), n)
		for round := range 10 {
			for i := range in {
				in[i] = float32((i + 3*c.Rank() + round) % 1000)
			}
			if round == 4 && c.Rank() == 0 {
				f.Link("mlx5_2", 1, "mlx5_0", 1).LoseAcks(true)
			}
			if err := do(ctx, s, c.AllReduce(s, send, recv, ccl.Sum)); err != nil {
				return err
			}
			for i, v := range out {
				if want := float32((i+round)%1000 + (i+3+round)%1000); v != want {
					return fmt.Errorf("round %d: element %d is %v, want %v", round, i, v, want)
				}
			}
			if err := do(ctx, s, c.Broadcast(s, send, recv, round%2)); err != nil {
				return err
			}
			for i, v := range out {
				if want := float32((i + 3*(round%2) + round) % 1000); v != want {
					return fmt.Errorf("round %d: broadcast element %d is %v, want %v", round, i, v, want)
				}
			}
		}
		if err := do(ctx, s, c.Barrier(s)); err != nil {
			return err
		}
		if _, err := c.WindowRegister(ctx, mem); !errors.Is(err, ccl.ErrInvalid) {
			return fmt.Errorf("a window of a CPU rank's memory: %w", err)
		}
		return mem.Free()
	})
}
