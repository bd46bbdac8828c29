package ebpf_test

import (
	"syscall"
	"testing"

	"github.com/lockstep-ccl/lockstep/collector/source/ebpf"
	"github.com/lockstep-ccl/lockstep/record"
)

// Two ranks that run are found, and what they call is recorded in their names.
func TestRunningRanksAreWatched(t *testing.T) {
	j := newJob(t, 2)
	ranks := []*rank{j.start(0), j.start(1)}
	for _, r := range ranks {
		r.do("hello")
	}
	j.watch(ebpf.Options{})
	j.attached(2)
	for _, r := range ranks {
		r.do("init world")
		r.do("call AllReduce 100")
	}
	ranks[1].do("call Reduce 1")
	a, b := j.reader(0), j.reader(1)
	h := b.Header()
	if h.Job != "standin" || h.Rank != 1 || h.WorldSize != 2 || h.Node != "here" || int(h.PID) != ranks[1].Process.Pid || h.Source != record.SourceNCCLProbes || !b.Alive() {
		t.Errorf("header: %+v", h)
	}
	ca := j.comm(a, "100 calls", func(c record.CommStatus) bool { return c.Finished == 100 })
	if ca.Enqueued != 100 || ca.Started != 100 || ca.Size != 2 || ca.Rank != 0 || ca.Coll != record.AllReduce || ca.Bytes != 4000 || ca.State != record.CommJoined || ca.StartedAt == 0 || ca.FinishedAt < ca.StartedAt {
		t.Errorf("rank 0: %+v", ca)
	}
	cb := j.comm(b, "101 calls", func(c record.CommStatus) bool { return c.Finished == 101 })
	if cb.ID != ca.ID || cb.Name != ca.Name || cb.Rank != 1 || cb.Coll != record.Reduce {
		t.Errorf("rank 1: %+v, rank 0: %+v", cb, ca)
	}
	recs := make([]record.Record, 200)
	n := 0
	eventually(t, "101 records", func() bool { n += b.Next(recs[n:]); return n == 101 })
	for i, r := range recs[:n] {
		if r.Kind != record.KindEnqueue || r.Seq != uint64(i+1) || r.Mono == 0 {
			t.Fatalf("record %d: %+v", i, r)
		}
	}
	if r := recs[100]; r.Coll != record.Reduce || r.Root != 3 || r.DType != record.Int64 || r.Op != record.Max || r.Bytes != 80 || r.Stream != 0x77 {
		t.Errorf("the last record: %+v", r)
	}
	if p := j.counted(201); p.Calls != 201 || p.Unidentified != 0 || p.RingFull+p.TableFull+p.Unread+p.SampledOut != 0 {
		t.Errorf("%+v", *p)
	}

	ranks[0].do("leave")
	j.comm(a, "left", func(c record.CommStatus) bool { return c.State == record.CommLeft })
	ranks[1].do("abort")
	j.comm(b, "aborted", func(c record.CommStatus) bool { return c.State == record.CommAborted })
	ranks[0].in.Write([]byte("exit 0\n"))
	eventually(t, "closed", func() bool { return a.Header().Closed })
	ranks[1].Process.Signal(syscall.SIGKILL)
	ranks[1].Wait()
	eventually(t, "gone", func() bool { j.update(); return j.v.Probes.Watched == 0 })
	if b.Header().Closed {
		t.Error("a rank that was killed left in good order")
	}
}

// What NCCL's functions call one another, groups, sends and receives.
func TestWhatCountsAsACall(t *testing.T) {
	j := newJob(t, 4)
	r := j.start(3)
	r.do("hello")
	j.watch(ebpf.Options{})
	j.attached(1)
	r.do("init world")
	r.do("call Bcast 5")
	r.do("call Send 7")
	rec := j.reader(3)
	c := j.comm(rec, "5 broadcasts", func(c record.CommStatus) bool { return c.Finished == 5 })
	if c.Coll != record.Broadcast || c.Bytes != 20 {
		t.Errorf("%+v", c)
	}
	r.do("group 6")
	c = j.comm(rec, "6 in a group", func(c record.CommStatus) bool { return c.Finished == 11 })
	r.do("call AllGather 1")
	c = j.comm(rec, "one more", func(c record.CommStatus) bool { return c.Finished == 12 })
	if c.Coll != record.AllGather || c.Bytes != 100*4*4 {
		t.Errorf("%+v", c)
	}
	if p := j.counted(12); p.Calls != 12 || p.PointToPoint != 9 {
		t.Errorf("%+v", *p)
	}
}

// Of a communicator that was there before, nobody knows which it is: it is counted, and of the
// rank no more is said than that it is there. One that is made later is followed.
func TestACommunicatorFromBefore(t *testing.T) {
	j := newJob(t, 2)
	r := j.start(0)
	r.do("init world")
	r.do("call AllReduce 10")
	j.watch(ebpf.Options{})
	j.attached(1)
	r.do("call AllReduce 10")
	rec := j.reader(0)
	eventually(t, "unidentified", func() bool { j.update(); return j.v.Probes.Unidentified == 1 })
	if c := rec.Comms(nil); len(c) != 0 {
		t.Errorf("%+v", c)
	}
	r.do("init second")
	r.do("call AllReduce 3")
	j.comm(rec, "a new one", func(c record.CommStatus) bool { return c.Finished == 3 })
}

// Most calls are sampled out; all are counted.
func TestSampling(t *testing.T) {
	j := newJob(t, 1)
	r := j.start(0)
	r.do("hello")
	j.watch(ebpf.Options{Sample: 64})
	j.attached(1)
	r.do("init world")
	r.do("call AllReduce 6400")
	rec := j.reader(0)
	j.comm(rec, "all calls", func(c record.CommStatus) bool { return c.Finished == 6400 })
	eventually(t, "every 64th", func() bool { return rec.Header().Appended == 100 })
	if p := j.counted(6400); p.SampledOut != 6300 {
		t.Errorf("%+v", *p)
	}
}

// More calls than the ring holds are lost one by one, and counted.
func TestALostCallIsCounted(t *testing.T) {
	if testing.Short() {
		t.Skip("many calls")
	}
	j := newJob(t, 1)
	r := j.start(0)
	r.do("hello")
	j.watch(ebpf.Options{})
	j.attached(1)
	r.do("init world")
	const calls = 30_000
	r.do("call AllReduce %d", calls)
	rec := j.reader(0)
	j.comm(rec, "all calls", func(c record.CommStatus) bool { return c.Finished == calls })
	eventually(t, "recorded, lost or not placed", func() bool {
		j.update()
		return rec.Header().Appended+j.v.Probes.RingFull+j.v.Probes.Unplaced == calls
	})
}

// Of a communicator that was split from another its members agree which it is, and each
// knows its rank, though nobody has told.
func TestSplitCommunicators(t *testing.T) {
	j := newJob(t, 4)
	var ranks []*rank
	for i := range 4 {
		ranks = append(ranks, j.start(i))
		ranks[i].do("hello")
	}
	j.watch(ebpf.Options{})
	j.attached(4)
	for _, r := range ranks {
		r.do("init world")
		r.do("call AllReduce 1")
	}
	for i, r := range ranks {
		r.do("split %d", i%2)
		r.do("call AllReduce %d", 5+i)
	}
	ids := map[uint64][]int{}
	for i := range ranks {
		c := j.comm(j.reader(i), "the split one", func(c record.CommStatus) bool { return c.Parent != 0 && c.Finished == uint64(5+i) })
		if c.Rank != int32(i/2) || c.Size != 2 {
			t.Errorf("rank %d: %+v", i, c)
		}
		ids[c.ID] = append(ids[c.ID], i)
	}
	if len(ids) != 2 {
		t.Errorf("communicators: %v", ids)
	}
	for id, members := range ids {
		if len(members) != 2 || members[0]%2 != members[1]%2 {
			t.Errorf("communicator %x: ranks %v", id, members)
		}
	}
}

// The same where NCCL's structure says nothing: all members are here, so that their colors and keys tell; of what
// was split again, too, and of one that was shrunk.
func TestSiblingsTellOfASplit(t *testing.T) {
	j := newJob(t, 4)
	j.env = []string{"OPAQUE=1"}
	var ranks []*rank
	for i := range 4 {
		ranks = append(ranks, j.start(i))
		ranks[i].do("hello")
	}
	j.watch(ebpf.Options{})
	j.attached(4)
	for _, r := range ranks {
		r.do("init world")
		r.do("call AllReduce 1")
	}
	for i, r := range ranks {
		r.do("split %d", i%2)
		r.do("call AllReduce %d", 5+i)
	}
	world := [4]uint64{}
	for i := range ranks {
		c := j.comm(j.reader(i), "the split one", func(c record.CommStatus) bool { return c.Parent != 0 && c.Finished == uint64(5+i) })
		if c.Rank != int32(i/2) || c.Size != 2 {
			t.Errorf("rank %d: %+v", i, c)
		}
		world[i] = c.Parent
	}
	if world[0] != world[1] || world[1] != world[2] || world[2] != world[3] {
		t.Errorf("parents %x", world)
	}
	for i, r := range ranks { // of the halves, one half leaves, and nobody gets one of its own
		r.do("split %d", []int{0, 0, -1, 0}[i])
		r.do("call AllReduce 1")
	}
	for i, want := range [][2]int32{{0, 1}, {0, 2}, {-1, 0}, {1, 2}} {
		if i == 2 {
			continue
		}
		j.comm(j.reader(i), "what was split again", func(c record.CommStatus) bool { return c.Rank == want[0] && c.Size == want[1] && c.Finished == 1 })
	}
}

func TestShrunkenCommunicators(t *testing.T) {
	j := newJob(t, 3)
	j.env = []string{"OPAQUE=1"}
	var ranks []*rank
	for i := range 3 {
		ranks = append(ranks, j.start(i))
		ranks[i].do("hello")
	}
	j.watch(ebpf.Options{})
	j.attached(3)
	ids := map[uint64]bool{}
	for _, r := range ranks {
		r.do("init world")
	}
	for i, r := range ranks {
		r.do("shrink 1")
		if r.do("call AllReduce 4"); i == 1 {
			continue
		}
		c := j.comm(j.reader(i), "the smaller one", func(c record.CommStatus) bool { return c.Parent != 0 && c.Finished == 4 })
		if c.Rank != int32(i/2) || c.Size != 2 {
			t.Errorf("rank %d: %+v", i, c)
		}
		ids[c.ID] = true
	}
	if len(ids) != 1 {
		t.Errorf("communicators %v", ids)
	}
}

// One process that has all of them: each is told of, alone.
func TestCommunicatorsOfOneProcess(t *testing.T) {
	j := newJob(t, 1)
	r := j.start(0)
	r.do("hello")
	j.watch(ebpf.Options{})
	j.attached(1)
	r.do("all 3")
	r.do("call AllReduce 6")
	rec := j.reader(0)
	eventually(t, "three communicators, one of them used", func() bool {
		_ = j.update()
		all, called := rec.Comms(nil), uint64(0)
		for _, c := range all {
			if called += c.Finished; c.Size != 1 || c.Rank != 0 {
				t.Fatalf("%+v", c)
			}
		}
		return len(all) == 3 && called == 6
	})
}

// A communicator whose memory another one has by the next look was destroyed.
func TestMemoryThatIsUsedAgain(t *testing.T) {
	j := newJob(t, 1)
	r := j.start(0)
	r.do("hello")
	j.watch(ebpf.Options{})
	j.attached(1)
	r.do("init first")
	rec := j.reader(0)
	for i := range 20 {
		r.do("call AllReduce 2")
		r.do("leave")
		r.do("init again%d", i)
	}
	r.do("call AllReduce 7")
	j.comm(rec, "all but the last one left", func(record.CommStatus) bool {
		joined, last := 0, false
		for _, c := range rec.Comms(nil) {
			if c.State == record.CommJoined {
				joined++
				last = c.Finished == 7
			}
		}
		return joined == 1 && last
	})
}
