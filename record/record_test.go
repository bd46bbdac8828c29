package record_test

import (
	"bufio"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
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
	conn.Renamed(1, 2)
	if w.Path() != "" || w.Close() != nil {
		t.Error("a nil writer has a path or cannot be closed")
	}
}

// Two recorders of one process keep apart; a file of a dead process does not
// stand in the way of its pid's next owner.
func TestCreateTwice(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "new", "dir")
	a := create(t, record.Options{Dir: dir})
	b := create(t, record.Options{Dir: dir})
	paths, err := record.List(dir)
	if err != nil || len(paths) != 2 || a.Path() == b.Path() {
		t.Fatalf("%q and %q: %q, %v", a.Path(), b.Path(), paths, err)
	}
	if fi, err := os.Stat(dir); err != nil || fi.Mode().Perm() != 0o700 {
		t.Errorf("directory: %v, %v", fi.Mode(), err)
	}
	if err := os.WriteFile(a.Path(), []byte("an old file"), 0o600); err != nil {
		t.Fatal(err)
	}
	c := create(t, record.Options{Dir: dir})
	if c.Path() != a.Path() {
		t.Errorf("the foreign file was not replaced: %s", c.Path())
	}
}

func TestCreateErrors(t *testing.T) {
	dir := t.TempDir()
	shared := filepath.Join(dir, "shared")
	if err := os.Mkdir(shared, 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(shared, 0o777); err != nil {
		t.Fatal(err)
	}
	for _, tt := range []struct {
		o    record.Options
		want string
	}{
		{record.Options{Dir: shared}, "writable by others"},
		{record.Options{Dir: dir, RingSlots: -1}, "RingSlots is -1"},
		{record.Options{Dir: dir, CommSlots: record.MaxCommSlots + 1}, "CommSlots is 4097"},
		{record.Options{Dir: dir, ConnSlots: 1 << 16}, "ConnSlots is 65536"},
		{record.Options{Dir: filepath.Join(dir, "shared", "file", "x")}, "not a directory"},
	} {
		if strings.Contains(tt.want, "not a dir") {
			if err := os.WriteFile(filepath.Join(shared, "file"), nil, 0o600); err != nil {
				t.Fatal(err)
			}
		}
		if w, err := record.Create(tt.o); err == nil || !strings.Contains(err.Error(), tt.want) {
			t.Errorf("%+v: got %v, %v, want an error with %q", tt.o, w, err, tt.want)
		}
	}
	if left, _ := filepath.Glob(filepath.Join(dir, ".new-*")); len(left) != 0 {
		t.Errorf("left behind: %q", left)
	}
}

func TestOpenErrors(t *testing.T) {
	dir := t.TempDir()
	w := create(t, record.Options{Dir: dir, RingSlots: 2, CommSlots: 1, ConnSlots: 1})
	good, err := os.ReadFile(w.Path())
	if err != nil {
		t.Fatal(err)
	}
	patch := func(at int, b ...byte) func([]byte) []byte {
		return func(f []byte) []byte { copy(f[at:], b); return f }
	}
	for _, tt := range []struct {
		name   string
		change func([]byte) []byte
		want   error
		text   string
	}{
		{"empty", func([]byte) []byte { return nil }, record.ErrMagic, "begin"},
		{"magic", patch(0, 'l'), record.ErrMagic, "begin"},
		{"half header", func(f []byte) []byte { return f[:2000] }, record.ErrTruncated, "2000 of 4096"},
		{"half ring", func(f []byte) []byte { return f[:len(f)-1] }, record.ErrTruncated, fmt.Sprintf("%d of %d", len(good)-1, len(good))},
		{"version", patch(8, 1), record.ErrVersion, "layout 1"},
		{"header size", patch(12, 1), record.ErrCorrupt, "header of"},
		{"file size", patch(16, 1), record.ErrCorrupt, "regions need"},
		{"comms", patch(24, 255, 255, 255, 255), record.ErrCorrupt, "communicator slots"},
		{"conns", patch(28, 255, 255, 255, 255), record.ErrCorrupt, "connection slots"},
		{"stamps", patch(32, 255, 255, 255, 255), record.ErrCorrupt, "stamp slots"},
		{"devices", patch(224, 255, 255, 255, 255), record.ErrCorrupt, "device slots"},
		{"descriptors", patch(228, 255, 255, 255, 255), record.ErrCorrupt, "descriptor slots"},
		{"ring", patch(36, 255, 255, 255, 255), record.ErrCorrupt, "ring slots"},
		{"ring of 3", patch(36, 3), record.ErrCorrupt, "power of two"},
		{"no ring", patch(36, 0), record.ErrCorrupt, "power of two"},
	} {
		path := filepath.Join(dir, "bad.rec")
		if err := os.WriteFile(path, tt.change(append([]byte(nil), good...)), 0o600); err != nil {
			t.Fatal(err)
		}
		r, err := record.Open(path)
		if !errors.Is(err, tt.want) || !strings.Contains(err.Error(), tt.text) || !strings.Contains(err.Error(), path) {
			t.Errorf("%s: got %v, %v, want %v with %q and the path", tt.name, r, err, tt.want, tt.text)
		}
	}

	link, fifo := filepath.Join(dir, "link.rec"), filepath.Join(dir, "fifo.rec")
	if err := os.Symlink(w.Path(), link); err != nil {
		t.Fatal(err)
	}
	if err := syscall.Mkfifo(fifo, 0o600); err != nil {
		t.Fatal(err)
	}
	for _, path := range []string{link, fifo, dir} {
		if _, err := record.Open(path); !errors.Is(err, record.ErrMagic) {
			t.Errorf("%s: got %v, want %v", path, err, record.ErrMagic)
		}
	}
	if _, err := record.Open(filepath.Join(dir, "none.rec")); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("no file: got %v", err)
	}
	paths, err := record.List(dir)
	if err != nil || len(paths) != 2 { // the good one and bad.rec: links and FIFOs are not listed
		t.Errorf("list: %q, %v", paths, err)
	}
	if paths, err := record.List(filepath.Join(dir, "none")); err != nil || paths != nil {
		t.Errorf("list of no directory: %q, %v", paths, err)
	}
}

// A file cut under the mapping must not take its reader down.
func TestTruncatedWhileMapped(t *testing.T) {
	w := create(t, record.Options{RingSlots: 1 << 12})
	w.AddComm(record.CommEntry{Name: "world"})
	w.Append(&record.Record{Kind: record.KindMark})
	// The writer's own mapping is not touched after the cut.
	r := open(t, w.Path())
	if err := os.Truncate(w.Path(), 4096); err != nil {
		t.Fatal(err)
	}
	buf := make([]record.Record, 4)
	if n := r.Next(buf); n != 0 || !errors.Is(r.Err(), record.ErrTruncated) {
		t.Fatalf("read %d records, error %v", n, r.Err())
	}
	if got := r.Comms(nil); len(got) != 0 {
		t.Errorf("comms %+v", got)
	}
	if got := r.Conns(nil); len(got) != 0 {
		t.Errorf("conns %+v", got)
	}
	r.SeekTail(1)
	if h := r.Header(); h.PID != int32(os.Getpid()) {
		t.Errorf("header %+v", h)
	}

	h := open(t, create(t, record.Options{}).Path())
	if err := os.Truncate(h.Path(), 0); err != nil {
		t.Fatal(err)
	}
	h.Header()
	if !errors.Is(h.Err(), record.ErrTruncated) {
		t.Errorf("header of a file cut to nothing: error %v", h.Err())
	}
	h.Close()
	if h.Next(buf) != 0 || h.Close() != nil {
		t.Error("a closed reader reads or cannot be closed")
	}
}

// A process in a container is found by another pid than it has there.
func TestProcessInAContainer(t *testing.T) {
	if dir := os.Getenv("LOCKSTEP_TEST_CONTAINED"); dir != "" {
		fmt.Printf("path=%s\n", create(t, record.Options{Dir: dir, RingSlots: 64}).Path())
		os.Stdin.Read(make([]byte, 1))
		return
	}
	container := []string{"--pid", "--fork", "--kill-child", "--mount-proc"}
	if out, err := exec.Command("unshare", append(container, "true")...).CombinedOutput(); err != nil {
		t.Skipf("no PID namespace of its own can be made here: %v: %s", err, out)
	}
	cmd := exec.Command("unshare", append(container, os.Args[0], "-test.run=^TestProcessInAContainer$")...)
	cmd.Env = append(os.Environ(), "LOCKSTEP_TEST_CONTAINED="+t.TempDir())
	stdin, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	r := started(t, cmd)
	pid, alive := r.Process()
	if inner := int(r.Header().PID); !alive || pid == inner {
		t.Errorf("process %d of the container is %d, alive %v", inner, pid, alive)
	}
	stdin.Close()
	cmd.Wait()
	if pid, alive := r.Process(); alive {
		t.Errorf("process %d lives after its end", pid)
	}
}

// started starts a process that prints path= and where its recorder is, and opens that.
func started(t *testing.T, cmd *exec.Cmd) *record.Reader {
	t.Helper()
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	var path string
	for lines := bufio.NewScanner(stdout); path == "" && lines.Scan(); {
		_, path, _ = strings.Cut(lines.Text(), "path=")
	}
	return open(t, path)
}

// A process killed in the middle of appending leaves a file that can be read.
func TestKilledProcess(t *testing.T) {
	if dir := os.Getenv("LOCKSTEP_TEST_KILLED"); dir != "" {
		w := create(t, record.Options{Dir: dir, RingSlots: 64})
		fmt.Printf("path=%s\n", w.Path())
		for i := uint64(1); ; i++ {
			w.Append(&record.Record{Kind: record.KindMark, Seq: i, Value: ^i})
		}
	}
	cmd := exec.Command(os.Args[0], "-test.run=^TestKilledProcess$")
	cmd.Env = append(os.Environ(), "LOCKSTEP_TEST_KILLED="+t.TempDir())
	r := started(t, cmd)
	for r.Header().Appended < 1000 {
		runtime.Gosched()
	}
	if !r.Alive() {
		t.Error("not alive before the kill")
	}
	cmd.Process.Kill()
	cmd.Wait()
	if h := r.Header(); r.Alive() || h.Closed {
		t.Errorf("alive %v, closed %v after the kill", r.Alive(), h.Closed)
	}
	buf := make([]record.Record, 100)
	n := r.Next(buf)
	for _, got := range buf[:n] {
		if got.Value != ^got.Seq || got.Seq != got.Ticket+1 {
			t.Errorf("torn record %+v", got)
		}
	}
	if n < 63 || r.Read()+r.Lost()+uint64(r.Pending()) != r.Header().Appended {
		t.Errorf("read %d + lost %d + pending %d of %d", n, r.Lost(), r.Pending(), r.Header().Appended)
	}
}

func TestNoAllocations(t *testing.T) {
	w := create(t, record.Options{RingSlots: 64})
	comm, _ := w.AddComm(record.CommEntry{Name: "c"})
	conn, _ := w.AddConn(record.ConnEntry{Name: "c"})
	r := open(t, w.Path())
	rec := record.Record{Kind: record.KindWindow}
	buf := make([]record.Record, 8)
	comms, conns := make([]record.CommStatus, 0, 4), make([]record.ConnStatus, 0, 4)
	if n := testing.AllocsPerRun(100, func() {
		w.Append(&rec)
		comm.Enqueued(1, 1, record.AllReduce, 1)
		conn.Posted(1, 1)
		r.Next(buf)
		comms, conns = r.Comms(comms[:0]), r.Conns(conns[:0])
		r.Header()
	}); n != 0 {
		t.Errorf("%v allocations", n)
	}
}

// FuzzOpen feeds any bytes as a file: an error or records, never a crash, a
// loop or a name that could not be printed. Minimising kilobytes takes go test
// minutes for each find: run it with -fuzzminimizetime 10x.
func FuzzOpen(f *testing.F) {
	w := create(f, record.Options{RingSlots: 4, CommSlots: 2, ConnSlots: 2, StampSlots: 1, HistorySlots: 1, Identity: record.Identity{Job: "job", Node: "node"}})
	seed := func() {
		b, err := os.ReadFile(w.Path())
		if err != nil {
			f.Fatal(err)
		}
		f.Add(b)
	}
	seed()
	comm, _ := w.AddComm(record.CommEntry{ID: 1, Name: "world", Size: 2})
	comm.Started(1, 1)
	conn, _ := w.AddConn(record.ConnEntry{Name: "tcp", Peer: 1})
	conn.Log(&record.Window{Last: 5, State: record.CauseNetwork})
	for kind := record.KindNone; kind <= record.KindWhole; kind++ {
		w.Append(&record.Record{Kind: kind})
		seed()
	}
	w = create(f, record.Options{RingSlots: 1, CommSlots: 1, ConnSlots: 1, StampSlots: 4, HistorySlots: 1})
	w.AddDevice(record.DeviceEntry{Name: "gpu"}, record.DeviceAnchor{GPU: 1, Mono: 2, Err: 3})
	desc, _ := w.AddDesc(record.Desc{Coll: record.AllReduce, Bytes: 8})
	comm, _ = w.AddComm(record.CommEntry{Name: "gpu", Stamps: 2, Copies: 2})
	g := gpu{w.Memory(), comm}
	g.begin(1, desc, 10)
	g.end(1, 2, 0, 20)
	g.begin(5, desc, 30)
	off, id, _ := comm.CopyQueued(1, desc, 5)
	g.begun(off, id)
	seed()
	path := filepath.Join(f.TempDir(), "fuzz.rec")
	f.Fuzz(func(t *testing.T, b []byte) {
		if err := os.WriteFile(path, b, 0o600); err != nil {
			t.Fatal(err)
		}
		r, err := record.Open(path)
		if err != nil {
			return
		}
		defer r.Close()
		h := r.Header()
		h.ToReal(h.Anchor.Mono)
		r.Alive()
		names := []string{h.Job, h.Node}
		for _, c := range r.Comms(nil) {
			names = append(names, c.Name, c.State.String(), c.Coll.String())
		}
		for _, c := range r.Conns(nil) {
			names = append(names, c.Name, c.Transport.String(), c.WindowCause.String())
			c.Outstanding()
			if n := len(r.History(&c, nil)); n > 3*record.HistoryWindows {
				t.Fatalf("%d windows of a connection", n)
			}
		}
		for _, name := range names {
			if strings.ContainsFunc(name, func(r rune) bool { return r < ' ' || r == 0x7f }) {
				t.Fatalf("name %q", name)
			}
		}
		buf := make([]record.Record, 3)
		reads := 0
		for n := r.Next(buf); n > 0; n = r.Next(buf) {
			if reads += n; reads > h.RingSlots {
				t.Fatalf("more than %d records from a ring of %d", reads, h.RingSlots)
			}
		}
		if sum := r.Read() + r.Lost() + uint64(r.Pending()); r.Err() == nil && sum != h.Appended {
			t.Fatalf("read %d + lost %d + pending %d of %d", r.Read(), r.Lost(), r.Pending(), h.Appended)
		}
		for _, d := range r.Devices(nil) {
			names = append(names, d.Name)
		}
		stamps := make([]record.Stamp, 3)
		reads = 0
		for n := r.Stamps(stamps); n > 0; n = r.Stamps(stamps) {
			if reads += n; reads > h.StampSlots*h.CommSlots+h.CommSlots { // hostile rings may share slots
				t.Fatalf("more than %d stamps from a table of %d", reads, h.StampSlots)
			}
			for _, s := range stamps[:n] {
				if s.Wait < 0 || s.End != 0 && s.End < s.Start && s.End-s.Start >= 0 {
					t.Fatalf("stamp %+v", s)
				}
				s.Replay()
			}
		}
		r.StampCount()
		r.SeekTail(2)
	})
}

func BenchmarkAppend(b *testing.B) {
	for kind := record.KindEnqueue; kind <= record.KindWhole; kind++ {
		b.Run(kind.String(), func(b *testing.B) {
			w := create(b, record.Options{})
			r := record.Record{Kind: kind, Seq: 1, Coll: record.AllReduce}
			b.ReportAllocs()
			for b.Loop() {
				r.Mono++
				w.Append(&r)
			}
		})
	}
	b.Run("parallel", func(b *testing.B) {
		w := create(b, record.Options{})
		b.ReportAllocs()
		b.RunParallel(func(pb *testing.PB) {
			r := record.Record{Kind: record.KindStart, Seq: 1}
			for pb.Next() {
				w.Append(&r)
			}
		})
	})
}

func BenchmarkNext(b *testing.B) {
	w := create(b, record.Options{})
	r := open(b, w.Path())
	rec := record.Record{Kind: record.KindStart, Seq: 1}
	buf := make([]record.Record, 256)
	b.ReportAllocs()
	left := 0
	for b.Loop() {
		if left == 0 {
			b.StopTimer()
			for range len(buf) {
				w.Append(&rec)
			}
			b.StartTimer()
			left = r.Next(buf)
		}
		left--
	}
}

func BenchmarkLiveWords(b *testing.B) {
	w := create(b, record.Options{})
	comm, _ := w.AddComm(record.CommEntry{})
	conn, _ := w.AddConn(record.ConnEntry{})
	b.Run("comm", func(b *testing.B) {
		for i := uint64(0); b.Loop(); i++ {
			comm.Enqueued(i, int64(i), record.AllReduce, 1)
			comm.Started(i, int64(i))
			comm.Finished(i, int64(i))
			comm.AddPhases(1, 1, 1, 1)
		}
	})
	b.Run("conn", func(b *testing.B) {
		for i := uint64(0); b.Loop(); i++ {
			conn.Posted(i, int64(i))
			conn.Completed(i, int64(i))
		}
	})
}

func BenchmarkNow(b *testing.B) {
	for b.Loop() {
		record.Now()
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
