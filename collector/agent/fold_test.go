package agent

import (
	"math/rand/v2"
	"os"
	"slices"
	"testing"

	"go.uber.org/goleak"
	"pgregory.net/rapid"

	"github.com/lockstep-ccl/lockstep/collector"
	"github.com/lockstep-ccl/lockstep/collector/source"
	"github.com/lockstep-ccl/lockstep/record"
)

func TestMain(m *testing.M) {
	if as := os.Getenv(benchEnv); as != "" {
		benchMain(as)
	}
	// A recorder that nobody holds any more is unmapped by a cleanup of the runtime, maybe just now.
	goleak.VerifyTestMain(m, goleak.IgnoreAnyFunction("runtime.runCleanups"))
}

type collect struct{ got []collector.Collective }

func (c *collect) Collective(x *collector.Collective) { c.got = append(c.got, *x) }

type discard struct{ n int }

func (d *discard) Collective(*collector.Collective) { d.n++ }

func newAgent(t testing.TB, sinks ...collector.Sink) *Agent {
	t.Helper()
	a, err := New(Options{Node: "n", Dir: t.TempDir(), Sinks: sinks})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { a.procs.Close() })
	return a
}

// process has communicators 0 and 1, and 4 connection slots.
func process() *source.Process {
	p := &source.Process{Comms: []record.CommStatus{
		{CommEntry: record.CommEntry{ID: 10, Name: "dp", Rank: 1, Size: 4}, Index: 0},
		{CommEntry: record.CommEntry{ID: 11, Name: "tp", Rank: 0, Size: 2}, Index: 1},
	}}
	p.Job, p.Rank, p.WorldSize, p.ConnSlots = "job", 3, 8, 4
	return p
}

// one is an AllReduce's records; it starts at t and takes 100 ns, 30 of them waiting.
func one(comm uint16, seq uint64, t int64) []record.Record {
	return []record.Record{
		{Kind: record.KindEnqueue, Mono: t - 5, Comm: comm, Seq: seq, Coll: record.AllReduce, DType: record.BFloat16, Op: record.Avg, Root: -1, Bytes: 64, Stream: 9, Flags: record.FlagInPlace},
		{Kind: record.KindStart, Mono: t + 1, Comm: comm, Seq: seq, Coll: record.AllReduce, Algo: record.AlgoTree, Proto: record.ProtoLL, Chan: 2, Stamp: t},
		{Kind: record.KindPhase, Mono: t + 30, Comm: comm, Seq: seq, Code: uint8(record.PhaseWait), Peer: 2, Dur: 30, Stamp: t + 30},
		{Kind: record.KindPhase, Mono: t + 100, Comm: comm, Seq: seq, Code: uint8(record.PhaseTransfer), Dur: 70, Stamp: t + 100},
		{Kind: record.KindEnd, Mono: t + 101, Comm: comm, Seq: seq, Coll: record.AllReduce, Stamp: t + 100},
	}
}

func TestFold(t *testing.T) {
	s := &collect{}
	a := newAgent(t, s)
	p := process()
	a.realOffset = 7
	a.fold(p, one(0, 1, 1000))
	want := collector.Collective{
		Job: "job", Comm: "dp", CommID: 10, Rank: 1, Size: 4, World: 3, Kind: record.AllReduce, DType: record.BFloat16, Op: record.Avg,
		Algo: record.AlgoTree, Proto: record.ProtoLL, InPlace: true, Root: -1, Stream: 9, Channels: 2, Seq: 1, Bytes: 64,
		Enqueued: 995, Started: 1000, Ended: 1100, Wait: 30, Transfer: 70, RealOffset: 7,
		Node: "n", WaitedFor: 2,
	}
	if len(s.got) != 1 || s.got[0] != want {
		t.Errorf("folded %+v\nwant %+v", s.got, want)
	}

	// One record tells as much, but for a time in the queue, and how many channels.
	want.Channels = 1
	for i, recs := range [][]record.Record{
		{whole(0, 2, 1000)},
		{one(0, 3, 1000)[0], whole(0, 3, 1000)},                     // it had to queue
		{one(0, 4, 1000)[0], one(0, 4, 1000)[1], whole(0, 4, 1000)}, // and lasted
	} {
		want.Seq, want.Enqueued = uint64(2+i), 995
		if i == 0 {
			want.Enqueued = 1000
		}
		a.fold(p, append(recs, recs[len(recs)-1])) // once
		if len(s.got) != 2+i || s.got[1+i] != want {
			t.Errorf("folded %+v\nwant %+v", s.got[len(s.got)-1], want)
		}
	}
	r, c := a.ranks[p], a.ranks[p].comms[0]
	if c.peerSeq != 4 || c.evicted != 0 || r.job.records != 5+2+3+4 {
		t.Errorf("peer of %d, %d evicted, %d records", c.peerSeq, c.evicted, r.job.records)
	}
}

// What each peer sent stands before a collective's own record, and is of no other.
func TestFoldPeers(t *testing.T) {
	s := &collect{}
	var got []*collector.Peers
	a := newAgent(t, s, sinkFunc(func(c *collector.Collective) {
		if c.Peers == nil {
			got = append(got, nil)
			return
		}
		p := *c.Peers
		got = append(got, &p)
	}))
	p := process()
	leg := func(seq uint64, code record.PhaseCode, peer int32) record.Record {
		return record.Record{Kind: record.KindPhase, Seq: seq, Code: uint8(code), Peer: peer, Stamp: 1090, Dur: 40, Wait: 20, Stall: 50}
	}
	recs := []record.Record{leg(1, record.PhaseReduce, 0), leg(1, record.PhaseReceive, 2), whole(0, 1, 1000), whole(0, 2, 1100), leg(3, record.PhaseReceive, 3)}
	for range 2 * collector.MaxPeers {
		recs = append(recs, leg(4, record.PhaseReceive, 1))
	}
	a.fold(p, append(recs, whole(0, 4, 1200)))
	if len(got) != 3 || got[1] != nil || got[2].N != collector.MaxPeers {
		t.Fatalf("%d collectives, %v", len(got), got)
	}
	want := []collector.Leg{{Peer: 0, Reduce: true, First: 1050, Last: 1090, Wait: 20, Stall: 40}, {Peer: 2, First: 1050, Last: 1090, Wait: 20, Stall: 40}}
	if !slices.Equal(got[0].All(), want) {
		t.Errorf("peers %+v\nwant %+v", got[0].All(), want)
	}
	if c := s.got[0]; c.Wait != 30 || c.Transfer != 70 || c.WaitedFor != 2 {
		t.Errorf("its phases are %+v", c)
	}
}

// whole is the same collective in one record.
func whole(comm uint16, seq uint64, t int64) record.Record {
	return record.Record{
		Kind: record.KindWhole, Mono: t + 100, Comm: comm, Seq: seq, Coll: record.AllReduce, DType: record.BFloat16, Op: record.Avg, Root: -1, Bytes: 64, Stream: 9, Flags: record.FlagInPlace,
		Algo: record.AlgoTree, Proto: record.ProtoLL, Peer: 2, Dur: 100, Wait: 30,
	}
}

// TestFoldAnyOrder folds whole collectives of two communicators, whose records come in any order
// as long as an end is the last of its own (a producer may be late, but ends do not overtake).
func TestFoldAnyOrder(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		n := rapid.IntRange(1, 200).Draw(t, "collectives")
		ahead := rapid.IntRange(1, 100).Draw(t, "ahead")
		rng := rand.New(rand.NewPCG(rapid.Uint64().Draw(t, "seed"), 0))
		type keyed struct {
			at  float64
			rec record.Record
		}
		var all []keyed
		for i := range n {
			recs := one(uint16(i%2), uint64(i/2+1), int64(1000*(i+1)))
			if i%3 == 0 {
				recs = []record.Record{recs[0], whole(recs[0].Comm, recs[0].Seq, int64(1000*(i+1)))}
			}
			at := make([]float64, len(recs))
			for k := range at {
				at[k] = float64(i) + rng.Float64()*float64(ahead)/2
			}
			last := slices.Max(at)
			for k, r := range recs {
				if r.Kind == record.KindEnd || r.Kind == record.KindWhole {
					at[k] = last + 1e-9
				}
				all = append(all, keyed{at[k], r})
			}
		}
		slices.SortStableFunc(all, func(a, b keyed) int {
			if a.at < b.at {
				return -1
			}
			return 1
		})
		s := &collect{}
		a, err := New(Options{Node: "n", Dir: "/nonexistent", Sinks: []collector.Sink{s}})
		if err != nil {
			t.Fatal(err)
		}
		p := process()
		for len(all) > 0 {
			k := min(len(all), rapid.IntRange(1, 64).Draw(t, "batch"))
			var batch []record.Record
			for _, x := range all[:k] {
				batch = append(batch, x.rec)
			}
			all = all[k:]
			a.fold(p, batch)
		}
		if len(s.got) != n {
			t.Fatalf("%d collectives folded of %d", len(s.got), n)
		}
		for _, c := range s.got {
			if c.Ended-c.Started != 100 || c.Wait != 30 || c.Transfer != 70 || c.Bytes != 64 || c.Enqueued != c.Started-5 {
				t.Fatalf("folded %+v", c)
			}
		}
	})
}

func TestFoldWithLosses(t *testing.T) {
	s := &collect{}
	a := newAgent(t, s)
	p := process()
	a.fold(p, one(0, 1, 1000)[2:]) // enqueue and start are lost
	if len(s.got) != 1 || s.got[0].Started != 0 || s.got[0].Ended != 1100 || s.got[0].Anomalous {
		t.Errorf("folded %+v", s.got)
	}
	a.fold(p, one(0, 1, 1000)[:2]) // and come late
	if len(s.got) != 1 {
		t.Errorf("handed over twice: %+v", s.got)
	}
	// Ends are lost, the live words tell so: the ring does not grow.
	for seq := uint64(2); seq < 10_000; seq++ {
		p.Comms[0].Finished = seq - 1
		a.learn(a.ranks[p])
		a.fold(p, one(0, seq, 1000)[:2])
	}
	if len(a.ranks[p].comms[0].ops) != firstOps {
		t.Errorf("room for %d collectives", len(a.ranks[p].comms[0].ops))
	}
	// Nothing ends at all: it grows to its bound.
	for seq := uint64(1); seq < 10_000; seq++ {
		a.fold(p, one(1, seq, 1000)[:2])
	}
	if n := len(a.ranks[p].comms[1].ops); n != maxOps {
		t.Errorf("room for %d collectives", n)
	}
	if n := a.jobs["job"].snapshot(0).UnknownResults; n == 0 {
		t.Error("nothing counted")
	}
	a.retire(a.ranks[p])
	if a.ops != 0 || len(a.jobs["job"].ranks) != 0 {
		t.Errorf("after its process: room for %d, %d ranks", a.ops, len(a.jobs["job"].ranks))
	}
}

func TestRoomIsBounded(t *testing.T) {
	a := newAgent(t)
	for range 64 {
		p := process()
		for comm := range uint16(2) {
			for seq := uint64(1); seq < 5000; seq++ {
				a.fold(p, one(comm, seq, 1000)[:1])
			}
		}
	}
	if a.ops > allOps {
		t.Errorf("room for %d collectives, limit %d", a.ops, allOps)
	}
}

func TestHostileRecords(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		a, err := New(Options{Node: "n", Dir: "/nonexistent", Sinks: []collector.Sink{&discard{}}})
		if err != nil {
			t.Fatal(err)
		}
		p := process()
		recs := rapid.SliceOf(rapid.Custom(func(t *rapid.T) record.Record {
			return record.Record{
				Kind: record.Kind(rapid.Byte().Draw(t, "kind") % 12), Flags: rapid.Byte().Draw(t, "flags"), Comm: rapid.Uint16Range(0, 3).Draw(t, "comm"),
				Mono: rapid.Int64().Draw(t, "mono"), Seq: rapid.Uint64().Draw(t, "seq"), Coll: record.CollKind(rapid.Byte().Draw(t, "coll")),
				Code: rapid.Byte().Draw(t, "code"), Conn: rapid.Uint32().Draw(t, "conn"), Peer: rapid.Int32().Draw(t, "peer"),
				Bytes: rapid.Uint64().Draw(t, "bytes"), Stamp: rapid.Int64().Draw(t, "stamp"), Dur: rapid.Int64().Draw(t, "dur"),
				First: rapid.Int64().Draw(t, "first"), Last: rapid.Int64().Draw(t, "last"), Value: rapid.Uint64().Draw(t, "value"),
				Clock: record.Clock(rapid.Byte().Draw(t, "clock")),
			}
		})).Draw(t, "records")
		a.fold(p, recs)
		a.jobs["job"].snapshot(0)
		a.jobs["job"].report()
	})
}

func TestWindowsAndMarks(t *testing.T) {
	s := &collect{}
	a := newAgent(t, s)
	p := process()
	window := func(conn uint32, flags uint8, cause record.Cause, first, last int64) record.Record {
		return record.Record{Kind: record.KindWindow, Comm: 0, Conn: conn, Peer: 2, Flags: flags, Code: uint8(cause), First: first, Last: last, Bytes: 5, WRs: 8, Back: 3}
	}
	recs := one(0, 1, 1000)
	recs = slices.Insert(recs, 4,
		window(0, 0, record.CauseNone, 1010, 1020), // normal
		window(1, record.FlagAnomaly, record.CauseNetwork, 1010, 1020),
		window(1, record.FlagAnomaly, record.CauseNetwork, 10, 20),      // long before
		window(99, record.FlagAnomaly, record.CauseNetwork, 1010, 1020), // no such connection
	)
	a.fold(p, recs)
	c := s.got[0]
	if !c.Anomalous || c.NWindows != 1 || c.Windows[0] != (collector.Window{Peer: 2, Conn: a.ranks[p].conns[1].who, Bytes: 5, WRs: 8, Backlog: 3, First: 1010, Last: 1020, Cause: record.CauseNetwork}) {
		t.Errorf("%d windows: %+v", c.NWindows, c.Windows)
	}
	a.fold(p, one(0, 2, 5000))
	if c := s.got[1]; c.Anomalous || c.NWindows != 0 {
		t.Errorf("the next one: %d windows", c.NWindows)
	}
	mark := func(code record.MarkCode, flags uint8, at int64, v uint64) {
		a.fold(p, []record.Record{{Kind: record.KindMark, Code: uint8(code), Flags: flags, Mono: at, Value: v}})
	}
	r := a.ranks[p]
	mark(record.MarkStep, 0, 1, 41)
	mark(record.MarkEvaluation, record.FlagBegin, 2, 0)
	mark(record.MarkCheckpoint, record.FlagBegin, 3, 0)
	if m, at := r.openMark(); m != record.MarkCheckpoint || at != 3 || r.step != 41 {
		t.Errorf("mark %v at %d, step %d", m, at, r.step)
	}
	mark(record.MarkCheckpoint, 0, 4, 0)
	if m, at := r.openMark(); m != record.MarkEvaluation || at != 2 {
		t.Errorf("mark %v at %d", m, at)
	}
	mark(record.MarkEvaluation, 0, 5, 0)
	if m, _ := r.openMark(); m != record.MarkNone {
		t.Errorf("mark %v", m)
	}
}

func BenchmarkFold(b *testing.B) {
	for _, bb := range []struct {
		name string
		make func(comm uint16, seq uint64, t int64) []record.Record
	}{
		{"parts", one},
		{"whole", func(comm uint16, seq uint64, t int64) []record.Record {
			return []record.Record{whole(comm, seq, t)}
		}},
	} {
		b.Run(bb.name, func(b *testing.B) {
			a := newAgent(b, &discard{})
			p := process()
			const n = 200
			var batch []record.Record
			for i := range n {
				batch = append(batch, bb.make(uint16(i%2), uint64(i+1), int64(1000*i+5))...)
			}
			b.ReportAllocs()
			for b.Loop() {
				a.fold(p, batch)
				for i := range batch {
					batch[i].Seq += n
				}
			}
			b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/n, "ns/collective")
		})
	}
}

// TestWindowCounters: what is exported as a counter never steps back.
func TestWindowCounters(t *testing.T) {
	a := newAgent(t)
	p := process()
	p.Conns = []record.ConnStatus{{ConnEntry: record.ConnEntry{Transport: record.TransportTCP}, Index: 2, Windows: 10}}
	slow := record.Record{Kind: record.KindWindow, Conn: 2, Code: uint8(record.CauseNetwork), Flags: record.FlagAnomaly}
	read := func(network, none uint64) {
		t.Helper()
		if w := a.jobs["job"].snapshot(0).Transports[0].Windows; w[record.CauseNetwork] != network || w[record.CauseNone] != none {
			t.Errorf("windows %v, want %d slow by network and %d normal", w, network, none)
		}
	}
	a.fold(p, []record.Record{slow})
	read(1, 9)
	a.fold(p, []record.Record{slow}) // before the live word
	read(2, 9)
	p.Conns[0].Windows = 15
	a.learn(a.ranks[p])
	read(2, 13)
	a.retire(a.ranks[p])
	read(2, 13)
}

// A change of a path is told with the collective that it hit, or with the next one, once.
func TestFoldLinks(t *testing.T) {
	s := &collect{}
	a := newAgent(t, s)
	p := process()
	p.Conns = []record.ConnStatus{{ConnEntry: record.ConnEntry{Comm: 0, Peer: 2, Transport: record.TransportRDMA, Channel: 1, ID: 77, Name: "a->b"}, Index: 1}}
	link := func(state record.LinkState, at int64) record.Record {
		return record.Record{Kind: record.KindLink, Comm: 0, Conn: 1, Peer: 2, Code: uint8(state), Mono: at}
	}
	a.fold(p, append([]record.Record{link(record.LinkUp, 500)}, one(0, 1, 1000)...)) // it comes up for the first time
	a.fold(p, slices.Insert(one(0, 2, 2000), 2, link(record.LinkDown, 2050)))
	a.fold(p, append([]record.Record{link(record.LinkSwitched, 2500)}, one(0, 3, 3000)...))
	a.fold(p, one(0, 4, 4000))
	for i, want := range []int{0, 1, 1, 0} {
		if c := s.got[i]; c.NLinks != want || c.Anomalous != (want > 0) {
			t.Errorf("collective %d tells of %d changes, want %d", i+1, c.NLinks, want)
		}
	}
	// More than a collective has room for are counted, once, also those that are forgotten by then.
	storm := one(0, 5, 5000)
	for i := range int64(maxLinks + 10) {
		storm = slices.Insert(storm, 2, link(record.LinkDown, 5090-i))
	}
	a.fold(p, storm)
	a.fold(p, one(0, 6, 6000))
	if c := s.got[4]; c.NLinks != collector.MaxLinks || c.LeftOut != maxLinks+10-collector.MaxLinks {
		t.Errorf("of %d changes a collective tells of %d, and that %d are left out", maxLinks+10, c.NLinks, c.LeftOut)
	}
	if c := s.got[5]; c.NLinks != 0 || c.LeftOut != 0 {
		t.Errorf("the next collective tells of %d changes, and that %d are left out", c.NLinks, c.LeftOut)
	}
	l := s.got[2].Links[0]
	if l.State != record.LinkSwitched || l.At != 2500 || l.Peer != 2 || l.Conn == nil || l.Conn.QP != 77 || l.Conn.Name != "a->b" {
		t.Errorf("%+v of %+v", l, l.Conn)
	}
	// A path that is up again has another queue pair, which the last pass has not seen.
	p.Conns[0].ID = 78
	a.fold(p, append([]record.Record{link(record.LinkUp, 6500)}, one(0, 7, 7000)...))
	if c := s.got[6]; c.NLinks != 1 || c.Links[0].Conn == nil || c.Links[0].Conn.QP != 78 {
		t.Errorf("a path that is up again is told as %+v of %+v, want queue pair 78", c.Links[0], c.Links[0].Conn)
	}
}

type sinkFunc func(*collector.Collective)

func (f sinkFunc) Collective(c *collector.Collective) { f(c) }

// A slot that goes to another communicator takes nothing from the former: late
// records are not mixed up, and totals do not step back.
func TestSlotsUsedAgain(t *testing.T) {
	s := &collect{}
	a := newAgent(t, s)
	p := process()
	p.Comms[0].Finished = 7
	p.Conns = []record.ConnStatus{{ConnEntry: record.ConnEntry{Transport: record.TransportTCP}, Windows: 5}}
	a.fold(p, one(0, 1, 1000))
	totals := func() (finished uint64, windows uint64) {
		snap := a.jobs["job"].snapshot(0)
		for _, c := range snap.Comms {
			if c.Name == "dp" {
				finished = c.Finished
			}
		}
		for _, tr := range snap.Transports {
			windows += tr.Windows[record.CauseNone]
		}
		return finished, windows
	}
	check := func(when string, finished, windows uint64) {
		t.Helper()
		if f, w := totals(); f != finished || w != windows {
			t.Errorf("%s: %d finished and %d windows, want %d and %d", when, f, w, finished, windows)
		}
	}
	check("at first", 7, 5)

	p.Comms[0] = record.CommStatus{CommEntry: record.CommEntry{ID: 20, Name: "dp", Size: 2}, Gen: 1, Since: 100, Finished: 1}
	p.Conns[0] = record.ConnStatus{ConnEntry: record.ConnEntry{Transport: record.TransportSHM}, Gen: 1, Windows: 2}
	a.learn(a.ranks[p])
	check("used again", 8, 7)
	late, young := one(0, 2, 2000), one(0, 1, 3000)
	for i := range young {
		late[i].Ticket, young[i].Ticket = 99, 100
	}
	a.fold(p, append(late, young...))
	if len(s.got) != 2 || s.got[1].CommID != 20 || s.got[1].Started != 3000 || a.jobs["job"].unknown != uint64(len(late)) {
		t.Errorf("%d unknown, folded %+v", a.jobs["job"].unknown, s.got)
	}

	p.Comms, p.Conns = p.Comms[:0], p.Conns[:0] // in nobody's hands for the moment
	a.learn(a.ranks[p])
	check("free", 8, 7)
	if a.ops != 0 {
		t.Errorf("room for %d operations is still taken", a.ops)
	}
}
