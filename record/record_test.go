package record_test

import (
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/lockstep-ccl/lockstep/record"
	"pgregory.net/rapid"
)

func create(tb testing.TB, o record.Options) *record.Writer {
	tb.Helper()
	if o.Dir == "" {
		o.Dir = tb.TempDir()
	}
	w, err := record.Create(o)
	if err != nil {
		tb.Fatal(err)
	}
	return w
}

func open(tb testing.TB, path string) *record.Reader {
	tb.Helper()
	r, err := record.Open(path)
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() { r.Close() })
	return r
}

// genRecord draws a record with only the fields that its kind keeps.
func genRecord(t *rapid.T) record.Record {
	i64, u64, u32 := rapid.Int64(), rapid.Uint64(), rapid.Uint32()
	r := record.Record{
		Kind:   record.Kind(rapid.IntRange(0, 9).Draw(t, "kind")),
		Mono:   i64.Draw(t, "mono"),
		Flags:  rapid.Uint8().Draw(t, "flags"),
		Comm:   rapid.Uint16().Draw(t, "comm"),
		Thread: u32.Draw(t, "thread"),
		Seq:    u64.Draw(t, "seq"),
	}
	b := func(what string) uint8 { return rapid.Uint8().Draw(t, what) }
	peer := rapid.Int32Min(-1)
	switch r.Kind {
	case record.KindEnqueue:
		r.Coll, r.DType, r.Op = record.CollKind(b("coll")), record.DType(b("dtype")), record.RedOp(b("op"))
		r.Root, r.Bytes, r.Stream = peer.Draw(t, "root"), u64.Draw(t, "bytes"), u32.Draw(t, "stream")
	case record.KindStart, record.KindEnd:
		r.Coll, r.Algo, r.Proto, r.Clock = record.CollKind(b("coll")), record.Algo(b("algo")), record.Proto(b("proto")), record.Clock(b("clock"))
		r.Code, r.Chan, r.Stamp, r.Slot = b("code"), rapid.Uint16().Draw(t, "chan"), i64.Draw(t, "stamp"), u32.Draw(t, "slot")
	case record.KindWhole:
		half := func(what string) uint8 { return rapid.Uint8Max(15).Draw(t, what) }
		r.Coll, r.DType, r.Op = record.CollKind(b("coll")), record.DType(half("dtype")), record.RedOp(half("op"))
		r.Algo, r.Proto, r.Code = record.Algo(rapid.Uint8Max(31).Draw(t, "algo")), record.Proto(rapid.Uint8Max(7).Draw(t, "proto")), b("code")
		r.Root, r.Peer, r.Bytes, r.Stream = peer.Draw(t, "root"), peer.Draw(t, "peer"), u64.Draw(t, "bytes"), u32.Draw(t, "stream")
		r.Dur = rapid.Int64Range(0, 2_000_000_000).Draw(t, "dur")
		r.Wait = rapid.Int64Range(0, r.Dur).Draw(t, "wait")
	case record.KindPhase:
		r.Code, r.Index, r.Clock, r.Peer = b("code"), b("index"), record.Clock(b("clock")), peer.Draw(t, "peer")
		r.Stamp, r.Dur = i64.Draw(t, "stamp"), i64.Draw(t, "dur")
		r.Wait, r.Stall = rapid.Int64Range(0, 2_000_000_000).Draw(t, "wait"), rapid.Int64Range(0, 2_000_000_000).Draw(t, "stall")
	case record.KindWindow, record.KindLink:
		r.Code, r.Peer, r.Conn = b("code"), peer.Draw(t, "peer"), uint32(rapid.Uint16().Draw(t, "conn"))
		r.Bytes, r.WRs, r.Back = u64.Draw(t, "bytes"), uint32(rapid.Uint16().Draw(t, "wrs")), uint32(rapid.Uint16().Draw(t, "back"))
		r.Last = rapid.Int64Range(0, 1<<62).Draw(t, "last")
		r.First = r.Last - rapid.Int64Range(0, 2_000_000_000).Draw(t, "span")
	case record.KindMark:
		r.Code, r.Value = b("code"), u64.Draw(t, "value")
	case record.KindComm:
		r.Code, r.Value, r.Result, r.Peer = b("code"), u64.Draw(t, "value"), record.Result(b("result")), peer.Draw(t, "peer")
	}
	return r
}

// Whatever is appended, read or skipped in whatever order: records come back
// as they went in and in order, and every one is accounted for at every step.
func TestRingAccounting(t *testing.T) {
	dir := t.TempDir()
	rapid.Check(t, func(t *rapid.T) {
		w, err := record.Create(record.Options{Dir: dir, RingSlots: rapid.IntRange(1, 32).Draw(t, "ring"), CommSlots: 1, ConnSlots: 1})
		if err != nil {
			t.Fatal(err)
		}
		defer os.Remove(w.Path())
		r, err := record.Open(w.Path())
		if err != nil {
			t.Fatal(err)
		}
		defer r.Close()
		ring := r.Header().RingSlots

		var appended []record.Record
		next := 0 // first ticket that may come
		t.Repeat(map[string]func(*rapid.T){
			"append": func(t *rapid.T) {
				for range rapid.IntRange(1, 50).Draw(t, "n") {
					rec := genRecord(t)
					w.Append(&rec)
					rec.Ticket = uint64(len(appended))
					appended = append(appended, rec)
				}
			},
			"read": func(t *rapid.T) {
				dst := make([]record.Record, rapid.IntRange(0, 40).Draw(t, "room"))
				n := r.Next(dst)
				if first := len(appended) - ring; first > next {
					next = first
				}
				if want := min(len(dst), len(appended)-next); n != want {
					t.Fatalf("read %d records, want %d", n, want)
				}
				for i, got := range dst[:n] {
					if got != appended[next+i] {
						t.Fatalf("got  %+v\nwant %+v", got, appended[next+i])
					}
				}
				next += n
				if sum := r.Read() + r.Lost() + r.Skipped() + uint64(r.Pending()); sum != r.Header().Appended || sum != uint64(len(appended)) {
					t.Fatalf("read %d + lost %d + skipped %d + pending %d = %d of %d", r.Read(), r.Lost(), r.Skipped(), r.Pending(), sum, len(appended))
				}
			},
			"seek": func(t *rapid.T) {
				n := rapid.IntRange(-1, 64).Draw(t, "tail")
				r.SeekTail(n)
				next = max(next, len(appended)-min(max(n, 0), ring))
			},
		})
	})
}

func TestWindowSpans(t *testing.T) {
	w := create(t, record.Options{RingSlots: 8})
	r := open(t, w.Path())
	var buf [1]record.Record
	for _, tt := range []struct{ span, want time.Duration }{
		{-5, 0}, {0, 0}, {10 * time.Microsecond, 10 * time.Microsecond},
		{2147483647, 2147483647},
		{10*time.Second + 999, 10 * time.Second},
		{24 * time.Hour, (1<<31 - 1) * time.Microsecond},
	} {
		w.Append(&record.Record{Kind: record.KindWindow, First: 1 << 60, Last: 1<<60 + int64(tt.span), WRs: 1 << 20, Back: 1 << 30, Conn: 1 << 20})
		if r.Next(buf[:]) != 1 {
			t.Fatal("nothing to read")
		}
		if got := time.Duration(buf[0].Last - buf[0].First); got != tt.want {
			t.Errorf("span %v came back as %v, want %v", tt.span, got, tt.want)
		}
		if buf[0].WRs != 1<<16-1 || buf[0].Back != 1<<16-1 || buf[0].Conn != record.NoConn {
			t.Errorf("counts did not saturate: %+v", buf[0])
		}
	}
}

// Producers and a reader run against each other on a ring so small that laps
// and drops are common.
func TestConcurrentProducers(t *testing.T) {
	const producers, records = 4, 20_000
	for _, slots := range []int{2, 64, 1 << 14} {
		t.Run(fmt.Sprint(slots), func(t *testing.T) {
			w := create(t, record.Options{RingSlots: slots})
			r := open(t, w.Path())
			var wg sync.WaitGroup
			var running atomic.Int32
			running.Store(producers)
			for p := range producers {
				wg.Go(func() {
					defer running.Add(-1)
					for i := uint64(1); i <= records; i++ {
						sum := i*2654435761 + uint64(p)
						w.Append(&record.Record{Kind: record.KindPhase, Thread: uint32(p), Seq: i, Mono: int64(sum), Stamp: int64(sum ^ 1), Dur: int64(sum ^ 2)})
						if rand.IntN(64) == 0 {
							runtime.Gosched()
						}
					}
				})
			}
			seen := make(map[uint64]bool)
			buf := make([]record.Record, 100)
			read := func() int {
				n := r.Next(buf)
				for _, got := range buf[:n] {
					sum := got.Seq*2654435761 + uint64(got.Thread)
					if got.Mono != int64(sum) || got.Stamp != int64(sum^1) || got.Dur != int64(sum^2) || got.Kind != record.KindPhase {
						t.Fatalf("torn record %+v", got)
					}
					if seen[got.Ticket] {
						t.Fatalf("ticket %d came twice", got.Ticket)
					}
					seen[got.Ticket] = true
				}
				return n
			}
			for running.Load() > 0 {
				read()
			}
			wg.Wait()
			for read() > 0 {
			}
			h := r.Header()
			if h.Appended != producers*records {
				t.Errorf("appended %d, want %d", h.Appended, producers*records)
			}
			if sum := r.Read() + r.Lost() + uint64(r.Pending()); sum != h.Appended || r.Read() != uint64(len(seen)) {
				t.Errorf("read %d (%d seen) + lost %d + pending %d = %d of %d", r.Read(), len(seen), r.Lost(), r.Pending(), sum, h.Appended)
			}
			if unseen := r.Lost() + uint64(r.Pending()); unseen < h.DroppedByWriter {
				t.Errorf("lost and pending %d, but the writer dropped %d", unseen, h.DroppedByWriter)
			}
			t.Logf("ring %d: read %d, lost %d, dropped %d, pending %d", slots, r.Read(), r.Lost(), h.DroppedByWriter, r.Pending())
		})
	}
}

func TestTables(t *testing.T) {
	w := create(t, record.Options{CommSlots: 2, ConnSlots: 1})
	r := open(t, w.Path())
	if n := len(r.Comms(nil)) + len(r.Conns(nil)); n != 0 {
		t.Fatalf("%d entries in empty tables", n)
	}
	a, _ := w.AddComm(record.CommEntry{ID: 1, Name: "world", Rank: 2, Size: 8})
	b, _ := w.AddComm(record.CommEntry{ID: 2, Name: strings.Repeat("x", 70), Parent: 1, State: record.CommJoining})
	if c, ok := w.AddComm(record.CommEntry{}); ok || c.Index() != record.NoComm {
		t.Error("a third communicator found a slot")
	}
	conn, _ := w.AddConn(record.ConnEntry{Comm: b.Index(), Peer: 3, Transport: record.TransportTCP, Name: "tcp a\x00b"})
	if c, ok := w.AddConn(record.ConnEntry{}); ok || c.Index() != record.NoConn {
		t.Error("a second connection found a slot")
	}
	comms := r.Comms(nil)
	if len(comms) != 2 || comms[0].Name != "world" || comms[0].Open() || comms[1].Name != strings.Repeat("x", 63) || comms[1].Index != 1 {
		t.Fatalf("comms %+v", comms)
	}
	if comms[0].StateAt == 0 || comms[0].StateAt > record.Now() {
		t.Errorf("state since %d", comms[0].StateAt)
	}
	a.Aborted(record.ResultPeerLost, 5)
	a.Aborted(record.ResultInternal, 1) // the first reason stands
	a.SetState(record.CommAborted)
	a.Enqueued(2, 0, record.Broadcast, 64) // it starts at once
	a.Started(2, 25)
	a.Finished(1, 15)
	a.AddPhases(30, -1, 2, 64)
	conn.Posted(10, 1)
	conn.Completed(4, 2)
	was := comms[0].StateAt
	got := r.Comms(comms[:0])[0]
	if got.StateAt < was || got.StateAt > record.Now() {
		t.Errorf("aborted at %d, joined at %d", got.StateAt, was)
	}
	got.StateAt = 0
	want := record.CommStatus{
		Fault: record.ResultPeerLost, FaultPeer: 5,
		CommEntry: record.CommEntry{ID: 1, Name: "world", Rank: 2, Size: 8, State: record.CommAborted},
		Enqueued:  2, EnqueuedAt: 25, Coll: record.Broadcast, Bytes: 64, Started: 2, StartedAt: 25, Finished: 1, FinishedAt: 15,
		Ops: 1, TotalBytes: 64, OwnNs: 30, TransferNs: 2, MaxOwnNs: 30,
	}
	if got != want || !got.Open() {
		t.Errorf("got  %+v\nwant %+v", got, want)
	}
	b.SetState(record.CommAborted) // and nobody says why
	if got := r.Comms(nil)[1]; got.State != record.CommAborted || got.Fault != record.ResultOK {
		t.Errorf("aborted for no reason: %+v", got)
	}
	conns := r.Conns(nil)
	if len(conns) != 1 || conns[0].Outstanding() != 6 || conns[0].Name != "tcp a" || conns[0].Comm != 1 {
		t.Errorf("conns %+v", conns)
	}
	if h := r.Header(); h.CommOverflow != 1 || h.ConnOverflow != 1 {
		t.Errorf("overflow %d, %d, want 1, 1", h.CommOverflow, h.ConnOverflow)
	}
}

func TestHeader(t *testing.T) {
	id := record.Identity{Job: "a job/../x", Node: "n1", Rank: -1, WorldSize: 8, LocalRank: 1, Attempt: 3}
	w := create(t, record.Options{Identity: id, RingSlots: 100, StampSlots: 3})
	if want := fmt.Sprintf("a_job____x.-1.%d.rec", os.Getpid()); filepath.Base(w.Path()) != want {
		t.Errorf("file is %s, want %s", filepath.Base(w.Path()), want)
	}
	fi, err := os.Stat(w.Path())
	if err != nil || fi.Mode().Perm() != 0o600 {
		t.Errorf("mode %v, %v", fi.Mode(), err)
	}
	r := open(t, w.Path())
	h := r.Header()
	if h.Identity != id || h.PID != int32(os.Getpid()) || h.RingSlots != 128 || h.StampSlots != 3 || h.Closed {
		t.Errorf("header %+v", h)
	}
	if time.Since(h.Created).Abs() > time.Minute {
		t.Errorf("created %v", h.Created)
	}
	if !r.Alive() {
		t.Error("this process is not alive")
	}
	before := h.Anchor
	w.Anchor()
	h = r.Header()
	if h.Anchor.Mono <= before.Mono || time.Since(h.ToReal(record.Now())).Abs() > time.Minute {
		t.Errorf("anchor %+v after %+v", h.Anchor, before)
	}
	w.Close()
	if !r.Header().Closed {
		t.Error("not closed")
	}
	w.Append(&record.Record{Kind: record.KindMark}) // late: harmless
}

func TestNilWriterIsOff(t *testing.T) {
	var w *record.Writer
	w.Append(&record.Record{})
	w.Anchor()
	comm, ok := w.AddComm(record.CommEntry{})
	if ok || comm.Index() != record.NoComm {
		t.Error("a comm of no writer")
	}
	comm.SetState(record.CommLeft)
	comm.Enqueued(1, 1, record.Barrier, 0)
	comm.Started(1, 1)
	comm.Finished(1, 1)
	comm.AddPhases(1, 1, 1, 1)
	conn, ok := w.AddConn(record.ConnEntry{})
	if ok || conn.Index() != record.NoConn {
		t.Error("a conn of no writer")
	}
	conn.Posted(1, 1)
	conn.Completed(1, 1)
	conn.TxBlocked(1)
	conn.Received(1, 1)
	conn.RxWaiting(1)
	conn.Window(1, record.CauseNone, 1)
	conn.Slow(1)
	conn.Windows(1)
	conn.Latency(1)
	conn.Link(record.LinkDown, 1)
	conn.Switched(1, 1)
	conn.RTT(1)
	conn.Renamed(1, 2)
	if w.Path() != "" || w.Close() != nil {
		t.Error("a nil writer has a path or cannot be closed")
	}
}

func TestRefused(t *testing.T) {
	w, err := record.Create(record.Options{Dir: t.TempDir(), Identity: record.Identity{Job: "refused", WorldSize: 1}})
	if err != nil {
		t.Fatal(err)
	}
	defer w.Close()
	r, err := record.Open(w.Path())
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	want := [record.NumRefusals]uint64{1, 2, 3, 4, 5}
	if w.Refused(want); r.Header().Refused != want {
		t.Errorf("%v, not %v", r.Header().Refused, want)
	}
	(*record.Writer)(nil).Refused(want)
}
