package agent

import (
	"context"
	"encoding/binary"
	"testing"
	"time"

	"github.com/lockstep-ccl/lockstep/collector"
	"github.com/lockstep-ccl/lockstep/record"
)

func TestFoldStamps(t *testing.T) {
	s := &collect{}
	a := newAgent(t, s)
	p := process()
	p.Comms[1].Stamps = 16
	desc := record.Desc{
		Coll: record.AllReduce, DType: record.Float8E5M2, Op: record.Sum, Algo: record.AlgoDirect, Proto: record.ProtoLL,
		Flags: record.DescCaptured | record.DescInPlace, SMs: 16, Root: -1, Bytes: 64, Stream: 9,
	}
	a.foldStamps(p, []record.Stamp{{Desc: desc, Comm: 1, Seq: 5, Start: 1000, Peer: -1, Err: 3}})
	if len(s.got) != 0 {
		t.Errorf("folded while it runs: %+v", s.got)
	}
	ended := record.Stamp{Desc: desc, Comm: 1, Seq: 5, Start: 1000, End: 1100, Wait: 30, Peer: 1, Err: 3}
	a.foldStamps(p, []record.Stamp{ended, ended, {Comm: 9, Seq: 1}})
	want := collector.Collective{
		Job: "job", Comm: "tp", CommID: 11, Rank: 0, Size: 2, World: 3, Kind: record.AllReduce, DType: record.Float8E5M2, Op: record.Sum,
		Algo: record.AlgoDirect, Proto: record.ProtoLL, InPlace: true, Root: -1, Stream: 9, Channels: 16, Seq: 5, Bytes: 64,
		Clock: record.ClockGPU, Replay: true, Started: 1000, Ended: 1100, Wait: 30, Transfer: 70, ClockErr: 3, WaitedFor: 1, Node: "n",
	}
	if len(s.got) != 1 || s.got[0] != want {
		t.Errorf("folded %+v\nwant %+v", s.got, want)
	}
	if j := a.jobs["job"]; j.unknown != 2 || j.records != 4 {
		t.Errorf("%d unknown of %d", j.unknown, j.records)
	}
	// Its operations on the host are numbered by themselves.
	a.fold(p, one(1, 5, 2000))
	if len(s.got) != 2 || s.got[1].Clock != record.ClockHost || s.got[1].Started != 2000 || s.got[1].CommID == s.got[0].CommID || s.got[1].Comm != "tp" {
		t.Errorf("folded %+v", s.got)
	}
	if s.got[0].Rootless || !s.got[1].Rootless { // no master knows its id
		t.Errorf("rootless: %v on the GPU, %v on the host", s.got[0].Rootless, s.got[1].Rootless)
	}
	a.retire(a.ranks[p])
	if a.ops != 0 {
		t.Errorf("room for %d operations is still taken", a.ops)
	}
}

// TestRunHostTells: an agent whose rank's GPU tells less than its process (HostTells) has
// each operation once: from the record, or, while there is none, open or ended in the
// communicator's words.
func TestRunHostTells(t *testing.T) {
	dir := t.TempDir()
	w, err := record.Create(record.Options{Dir: dir, StampSlots: 64, Identity: record.Identity{Job: "job", WorldSize: 1}})
	if err != nil {
		t.Fatal(err)
	}
	now := record.Now()
	w.AddDevice(record.DeviceEntry{Name: "gpu"}, record.DeviceAnchor{GPU: now, Mono: now, Err: 7})
	c, _ := w.AddComm(record.CommEntry{Name: "dp", Size: 2, State: record.CommJoining, Stamps: 16})
	c.HostTells()
	c.SetState(record.CommJoined)
	launch := func(seq uint64) (stamp func(half int, a, b uint64)) {
		c.Enqueued(seq, now, record.AllReduce, 100)
		off, id, _ := c.StampSlot(seq, 0)
		return func(half int, a, b uint64) {
			if half == 0 {
				a = id
			}
			binary.LittleEndian.PutUint64(w.Memory()[off+16*half+8:], b)
			binary.LittleEndian.PutUint64(w.Memory()[off+16*half:], a)
		}
	}
	first, second := launch(1), launch(2)

	var got []collector.Collective
	a, err := New(Options{Node: "n", Dir: dir, Sinks: []collector.Sink{sinkFunc(func(c *collector.Collective) { got = append(got, *c) })}})
	if err != nil {
		t.Fatal(err)
	}
	defer a.procs.Close()
	defer a.recorders.Close()
	check := func(when string, open int, finished uint64, collectives int) {
		t.Helper()
		a.update(t.Context(), record.Now())
		a.drain()
		a.publish()
		s := a.Snapshot()
		if len(s.Jobs) != 1 || len(s.Jobs[0].Comms) != 1 {
			t.Fatalf("%s: %+v", when, s.Jobs)
		}
		if k := s.Jobs[0].Comms[0]; k.OpenMembers != open || k.Finished != finished || len(got) != collectives || s.Jobs[0].UnknownResults != 0 {
			t.Errorf("%s: %d members open, %d operations finished, %d folded, %d unknown, want %d, %d, %d", when, k.OpenMembers, k.Finished, len(got), s.Jobs[0].UnknownResults, open, finished, collectives)
		}
	}
	check("called", 0, 0, 0)
	first(0, 0, uint64(now)+100)
	check("begun on the GPU", 1, 0, 0)
	first(1, 10<<8|0xff, uint64(now)+200)
	check("ended on the GPU", 0, 1, 0)
	second(0, 0, uint64(now)+300)
	check("the next one begun on the GPU", 1, 1, 0)
	c.Started(1, now+100)
	w.Append(&record.Record{Mono: now + 200, Kind: record.KindWhole, Flags: record.FlagStamped, Comm: c.Index(), Seq: 1, Coll: record.AllReduce, Bytes: 100, Root: -1, Dur: 100, Wait: 30})
	c.Finished(1, now+200)
	check("told", 1, 1, 1)
	if k := got[0]; k.Started != now+100 || k.Ended != now+200 || k.Wait != 30 || k.Transfer != 70 || k.Clock != record.ClockGPU || k.ClockErr < 7 || k.Seq != 1 {
		t.Errorf("folded %+v", k)
	}
}

// TestRunStamps lets an agent find a recorder whose process does nothing: the
// GPU alone tells what happens.
func TestRunStamps(t *testing.T) {
	dir := t.TempDir()
	w, err := record.Create(record.Options{Dir: dir, StampSlots: 64, Identity: record.Identity{Job: "job", WorldSize: 1}})
	if err != nil {
		t.Fatal(err)
	}
	now := record.Now()
	w.AddDevice(record.DeviceEntry{Name: "gpu"}, record.DeviceAnchor{GPU: now, Mono: now, Err: 7})
	desc, _ := w.AddDesc(record.Desc{Coll: record.AllGather, Bytes: 100, SMs: 4})
	c, _ := w.AddComm(record.CommEntry{Name: "tp", Size: 2, State: record.CommJoined, Stamps: 16})
	off, _ := c.StampRange()
	stamp := func(seq uint64, words ...uint64) {
		slot := w.Memory()[off+int(seq)*record.StampEntrySize:]
		for i, word := range append([]uint64{seq<<16 | uint64(desc)}, words...) {
			binary.LittleEndian.PutUint64(slot[8*i:], word)
		}
	}
	stamp(1, uint64(now), 10<<8|0xff, uint64(now)+50)
	stamp(2, uint64(now)+100)

	got := make(chan collector.Collective, 16)
	a, err := New(Options{Node: "n", Dir: dir, Sinks: []collector.Sink{sinkFunc(func(c *collector.Collective) { got <- *c })}})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	done := make(chan error)
	go func() { done <- a.Run(ctx) }()
	select {
	case c := <-got:
		if c.Clock != record.ClockGPU || c.Started != now || c.Ended != now+50 || c.Wait != 10 || c.Channels != 4 || c.Kind != record.AllGather {
			t.Errorf("folded %+v", c)
		}
	case <-ctx.Done():
		t.Error("nothing was folded")
	}
	open := func() bool {
		s := a.Snapshot()
		return len(s.Jobs) == 1 && len(s.Jobs[0].Comms) == 1 && s.Jobs[0].Comms[0].OpenMembers == 1 &&
			s.Jobs[0].Comms[0].Finished == 1 && s.Jobs[0].GPUs == 1 && s.Jobs[0].GPUClockErrorNs >= 7
	}
	for !open() && ctx.Err() == nil {
		time.Sleep(time.Millisecond)
	}
	if !open() {
		t.Errorf("snapshot %+v", a.Snapshot().Jobs)
	}
	cancel()
	if err := <-done; err != nil {
		t.Error(err)
	}
}

func BenchmarkFoldStamps(b *testing.B) {
	a := newAgent(b, &discard{})
	p := process()
	batch := make([]record.Stamp, 200)
	for i := range batch {
		batch[i] = record.Stamp{Desc: record.Desc{Coll: record.AllReduce, Bytes: 64, Root: -1}, Comm: uint16(i % 2), Seq: uint64(i + 1), Start: int64(1000*i + 5), End: int64(1000*i + 505)}
	}
	b.ReportAllocs()
	for b.Loop() {
		a.foldStamps(p, batch)
		for i := range batch {
			batch[i].Seq += uint64(len(batch))
		}
	}
	b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/float64(len(batch)), "ns/collective")
}
