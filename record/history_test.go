package record_test

import (
	"encoding/binary"
	"os"
	"slices"
	"testing"

	"pgregory.net/rapid"

	"github.com/lockstep-ccl/lockstep/record"
)

// logged is a file with one connection, and its reader.
func logged(t testing.TB, slots int) (*record.Conn, func() []record.Window) {
	w := create(t, record.Options{RingSlots: 4, CommSlots: 2, ConnSlots: 4, HistorySlots: slots})
	comm, _ := w.AddComm(record.CommEntry{ID: 1, State: record.CommJoined})
	conn, _ := w.AddConn(record.ConnEntry{Comm: comm.Index(), Peer: 1})
	r := open(t, w.Path())
	return conn, func() []record.Window {
		s := r.Conns(nil)
		return r.History(&s[conn.Index()], nil)
	}
}

func TestHistory(t *testing.T) {
	conn, read := logged(t, 1)
	if h := read(); len(h) != 0 {
		t.Fatal(h)
	}
	at := int64(1e9)
	log := func(n int, state record.Cause) {
		for range n {
			at += 20_000
			conn.Log(&record.Window{
				First: at - 15_000, Last: at, Bytes: 1 << 20, WRs: 8, Backlog: 3, Latency: 1200, Cause: state, State: state,
				Anomaly: state == record.CauseNetwork,
			})
		}
	}
	log(1000, record.CauseNone)
	onset := at
	log(1000, record.CauseNetwork)
	h := read()
	const each = record.HistoryWindows - 1
	if len(h) != 3*each {
		t.Fatalf("%d windows", len(h))
	}
	n := slices.IndexFunc(h, func(w record.Window) bool { return w.State == record.CauseNetwork })
	// Before the onset, from it on, and now.
	if n != each || h[n].Last != onset+20_000 || h[n-1].Last != onset || h[2*n-1].Last != onset+20_000*each || h[3*n-1].Last != at {
		t.Errorf("onset %d at %d: %+v %+v", n, onset, h[n-1], h[n])
	}
	want := record.Window{Number: 1000, First: onset + 5000, Last: onset + 20_000, Bytes: 1 << 20, WRs: 8, Backlog: 3, Latency: 1200, Cause: record.CauseNetwork, State: record.CauseNetwork, Anomaly: true}
	if h[n] != want {
		t.Errorf("got  %+v\nwant %+v", h[n], want)
	}
	// The next anomaly replaces the first one, of which only the end is before it.
	log(2000, record.CauseNone)
	onset = at
	log(3, record.CauseSenderStarved)
	h = read()
	n = slices.IndexFunc(h, func(w record.Window) bool { return w.State == record.CauseSenderStarved })
	if n < each || h[n-1].Last != onset || h[len(h)-1].Last != at || len(h) != n+3 {
		t.Errorf("%d of %d", n, len(h))
	}
}

// Whatever states follow each other: windows are in order, none twice, the last ones are all
// there, and so are those around the last onset.
func TestHistoryProperty(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		conn, read := logged(t, 1)
		n, onset, slow := uint64(0), -1, false
		for range rapid.IntRange(1, 8).Draw(rt, "stretches") {
			state := rapid.SampledFrom([]record.Cause{record.CauseNone, record.CauseNetwork}).Draw(rt, "state")
			for range rapid.IntRange(1, 300).Draw(rt, "windows") {
				if state != record.CauseNone && !slow {
					onset = int(n)
				}
				slow = state != record.CauseNone
				conn.Log(&record.Window{First: int64(n), Last: int64(n) + 1, State: state})
				n++
			}
		}
		h := read()
		has := func(k uint64) bool {
			return slices.ContainsFunc(h, func(w record.Window) bool { return w.Number == k && w.First == int64(k) })
		}
		for i := range h {
			if i > 0 && h[i].Number <= h[i-1].Number || h[i].First != int64(h[i].Number) {
				rt.Fatalf("%+v", h)
			}
		}
		if !has(n - 1) {
			rt.Fatal("the last one is missing")
		}
		if onset >= 0 && (!has(uint64(onset)) || onset > 0 && !has(uint64(onset)-1)) {
			rt.Fatalf("onset %d of %d is missing", onset, n)
		}
	})
}

// There are fewer histories than connections: those without one take nothing, and are
// counted. A slot that is given back serves another connection, which has nothing of the
// former one's.
func TestHistorySlots(t *testing.T) {
	w := create(t, record.Options{RingSlots: 4, CommSlots: 2, ConnSlots: 4, HistorySlots: 1})
	comm, _ := w.AddComm(record.CommEntry{ID: 1, State: record.CommJoined})
	var conns [2]*record.Conn
	for i := range conns {
		conns[i], _ = w.AddConn(record.ConnEntry{Comm: comm.Index()})
		conns[i].Log(&record.Window{Last: 5})
		conns[i].Log(&record.Window{Last: 6})
	}
	r := open(t, w.Path())
	s := r.Conns(nil)
	if a, b := r.History(&s[0], nil), r.History(&s[1], nil); len(a) != 2 || len(b) != 0 || r.Header().HistoryOverflow != 1 {
		t.Errorf("%v, %v, %d", a, b, r.Header().HistoryOverflow)
	}
	if h := r.Header(); h.HistorySlots != 1 {
		t.Error(h.HistorySlots)
	}
	var none *record.Conn
	none.Log(&record.Window{})
}

// A file of before there were histories is read, and a reader of that time reads a file
// of today: it believes the size that the header tells, behind which the table lies.
func TestHistoryCompatible(t *testing.T) {
	w := create(t, record.Options{RingSlots: 4, CommSlots: 2, ConnSlots: 4, HistorySlots: 2})
	b, err := os.ReadFile(w.Path())
	if err != nil {
		t.Fatal(err)
	}
	told := binary.LittleEndian.Uint64(b[16:])
	if want := uint64(len(b)) - 2*(64+3*record.HistoryWindows*32); told != want {
		t.Errorf("the header tells %d bytes, want %d", told, want)
	}
	old := slices.Clone(b[:told])
	const at = 232 // of history_slots and history_windows in struct lockstep_header
	if binary.LittleEndian.Uint32(old[at:]) != 2 || binary.LittleEndian.Uint32(old[at+4:]) != record.HistoryWindows {
		t.Fatalf("% x", old[at:at+8])
	}
	copy(old[at:at+8], make([]byte, 8))
	path := w.Path() + "-old.rec"
	if err := os.WriteFile(path, old, 0o600); err != nil {
		t.Fatal(err)
	}
	if r := open(t, path); r.Header().HistorySlots != 0 {
		t.Error(r.Header().HistorySlots)
	}
	if err := os.WriteFile(path, b[:len(b)-1], 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := record.Open(path); err == nil {
		t.Error("a torn table is taken")
	}
}

// A reader that looks while windows are written sees no torn one.
func TestHistoryConcurrent(t *testing.T) {
	conn, read := logged(t, 1)
	const windows = 200_000
	done := make(chan struct{})
	go func() {
		defer close(done)
		for n := range int64(windows) {
			state := record.CauseNone
			if n/500%3 == 1 {
				state = record.CauseNetwork
			}
			conn.Log(&record.Window{First: n, Last: 2 * n, Bytes: uint64(3 * n), Latency: n, WRs: 7, State: state})
		}
	}()
	for over := false; !over; {
		select {
		case <-done:
			over = true
		default:
		}
		for _, w := range read() {
			n := int64(w.Number)
			if w.Last != 2*n || w.Bytes != uint64(3*n) || w.Latency != n || w.First != n || w.WRs != 7 {
				t.Fatalf("%+v", w)
			}
		}
	}
	if h := read(); h[len(h)-1].Number != windows-1 {
		t.Errorf("the last is %d", h[len(h)-1].Number)
	}
}

func BenchmarkLog(b *testing.B) {
	conn, _ := logged(b, 1)
	var now int64
	b.ReportAllocs()
	for b.Loop() {
		now += 20_000
		conn.Log(&record.Window{First: now - 15_000, Last: now, Bytes: 1 << 20, WRs: 8, Backlog: 3, Latency: 1200})
	}
}
