package recorder_test

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/lockstep-ccl/lockstep/collector/source"
	"github.com/lockstep-ccl/lockstep/collector/source/recorder"
	"github.com/lockstep-ccl/lockstep/diagnosis"
	"github.com/lockstep-ccl/lockstep/internal/stranger"
	"github.com/lockstep-ccl/lockstep/record"
)

func TestMain(m *testing.M) {
	if stranger.Role() != "" {
		stranger.Play(play)
	}
	// A recorder that nobody holds any more is unmapped by a cleanup of the runtime, maybe just now.
	goleak.VerifyTestMain(m, goleak.IgnoreAnyFunction("runtime.runCleanups"))
}

func create(t *testing.T, dir string, rank int32, attempt uint32) *record.Writer {
	t.Helper()
	w, err := record.Create(record.Options{Dir: dir, RingSlots: 4096, Identity: record.Identity{Job: "job", Node: "here", Rank: rank, WorldSize: 8, Attempt: attempt}})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { w.Close() })
	return w
}

func mark(w *record.Writer, n int) {
	for i := range n {
		w.Append(&record.Record{Kind: record.KindMark, Mono: record.Now(), Code: uint8(record.MarkStep), Value: uint64(i)})
	}
}

// node is a source with the time that a test gives it.
type node struct {
	t    *testing.T
	s    *recorder.Source
	v    source.View
	read map[*source.Process]int
}

func newNode(t *testing.T, o recorder.Options) *node {
	n := &node{t: t, s: recorder.New(o), read: map[*source.Process]int{}}
	n.v.Now = 1
	t.Cleanup(func() {
		if err := n.s.Close(); err != nil {
			t.Error(err)
		}
	})
	return n
}

// pass goes a second on, updates and drains.
func (n *node) pass() error {
	n.v.Now += int64(time.Second)
	err := n.s.Update(&n.v)
	n.s.Drain(1<<20, func(p *source.Process, r []record.Record) { n.read[p] += len(r) })
	return err
}

func (n *node) ok(processes int) {
	n.t.Helper()
	if err := n.pass(); err != nil {
		n.t.Error(err)
	}
	if len(n.v.Processes) != processes {
		n.t.Fatalf("%d processes in view, want %d", len(n.v.Processes), processes)
	}
}

func TestReadsAllRecorders(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "not there yet")
	n := newNode(t, recorder.Options{Dir: dir})
	n.ok(0)
	a, b := create(t, dir, 0, 0), create(t, dir, 1, 0)
	mark(a, 3000)
	mark(b, 5)
	n.ok(2)
	mark(b, 5)
	n.ok(2)
	if x, y := n.read[n.v.Processes[0]], n.read[n.v.Processes[1]]; x != 3000 || y != 10 {
		t.Errorf("read %d and %d records", x, y)
	}
	p := n.v.Processes[1]
	if p.Job != "job" || p.Rank != 1 || p.PID != int32(os.Getpid()) || p.Lost != 0 || p.State != diagnosis.ProcUnknown {
		t.Errorf("process: %+v", p)
	}
}

func TestDrainIsFairAndBounded(t *testing.T) {
	dir := t.TempDir()
	n := newNode(t, recorder.Options{Dir: dir})
	mark(create(t, dir, 0, 0), 4096)
	mark(create(t, dir, 1, 0), 4096)
	if err := n.s.Update(&n.v); err != nil {
		t.Fatal(err)
	}
	read := map[*source.Process]int{}
	each := func(p *source.Process, r []record.Record) { read[p] += len(r) }
	for range 2 {
		if got, fill := n.s.Drain(2000, each); got < 2000 || got > 4000 || fill < 0.5 {
			t.Errorf("drained %d, fill %g", got, fill)
		}
	}
	if len(read) != 2 {
		t.Error("a busy recorder kept the other one waiting")
	}
}

func TestLosses(t *testing.T) {
	dir := t.TempDir()
	before := create(t, dir, 0, 0)
	mark(before, 10_000) // overwritten before anyone was there
	n := newNode(t, recorder.Options{Dir: dir})
	after := create(t, dir, 1, 0)
	n.ok(2)
	mark(after, 5000)
	n.ok(2)
	n.ok(2)
	p, q := n.v.Processes[0], n.v.Processes[1]
	if n.read[p] != 4096 || p.Lost != 0 {
		t.Errorf("an old recorder: %d read, %d lost", n.read[p], p.Lost)
	}
	if n.read[q] != 4096 || q.Lost != 5000-4096 {
		t.Errorf("a new one: %d read, %d lost", n.read[q], q.Lost)
	}
}

func TestBadFilesAreLeftAlone(t *testing.T) {
	dir := t.TempDir()
	create(t, dir, 0, 0)
	bad := filepath.Join(dir, "bad.rec")
	if err := os.WriteFile(bad, []byte("LOCKSTEP garbage"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink("/dev/zero", filepath.Join(dir, "link.rec")); err != nil {
		t.Fatal(err)
	}
	n := newNode(t, recorder.Options{Dir: dir})
	for range 3 {
		if err := n.pass(); err == nil || len(n.v.Processes) != 1 {
			t.Fatalf("error %v, %d processes", err, len(n.v.Processes))
		}
	}
	if err := os.Remove(bad); err != nil {
		t.Fatal(err)
	}
	n.ok(1)
}

// The agent logs what changes: the same trouble is told in the same words.
func TestTheSameTroubleInTheSameWords(t *testing.T) {
	dir := t.TempDir()
	for i := range 8 {
		if err := os.WriteFile(filepath.Join(dir, fmt.Sprint(i, ".rec")), []byte("garbage"), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	n := newNode(t, recorder.Options{Dir: dir})
	said := map[string]bool{}
	for range 20 {
		said[fmt.Sprint(n.pass())] = true
	}
	if len(said) != 1 {
		t.Errorf("one trouble, told in %d ways: %v", len(said), said)
	}
}

// What cannot be read now may be readable later, though nothing shows on the file:
// the agent had no file descriptor left, or a permission was missing.
func TestUnreadableFilesAreTriedAgain(t *testing.T) {
	dir := t.TempDir()
	path := create(t, dir, 0, 0).Path()
	fi, err := os.Stat(path)
	if err != nil {
		t.Fatal(err)
	}
	first := func(text string) {
		f, err := os.OpenFile(path, os.O_WRONLY, 0)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := f.WriteString(text); err != nil {
			t.Fatal(err)
		}
		f.Close()
		if err := os.Chtimes(path, fi.ModTime(), fi.ModTime()); err != nil {
			t.Fatal(err)
		}
	}
	first("?")
	n := newNode(t, recorder.Options{Dir: dir})
	if err := n.pass(); err == nil || len(n.v.Processes) != 0 {
		t.Fatalf("error %v, %d processes", err, len(n.v.Processes))
	}
	first(record.Magic[:1])
	n.v.Now += int64(time.Minute)
	n.ok(1)
}

func TestTruncatedUnderTheReader(t *testing.T) {
	dir := t.TempDir()
	w := create(t, dir, 0, 0)
	mark(w, 10)
	n := newNode(t, recorder.Options{Dir: dir})
	n.v.Now += int64(time.Second)
	if err := n.s.Update(&n.v); err != nil {
		t.Fatal(err)
	}
	if err := os.Truncate(w.Path(), 4096); err != nil {
		t.Fatal(err)
	}
	_ = n.pass() // finds out when it reads the ring
	if err := n.pass(); !errors.Is(err, record.ErrTruncated) {
		t.Errorf("a truncated file: %v", err)
	}
}

func TestTheDeadAreReadThenDropped(t *testing.T) {
	dir := t.TempDir()
	w := create(t, dir, 0, 0)
	n := newNode(t, recorder.Options{Dir: dir, Keep: time.Minute})
	n.ok(1)
	p := n.v.Processes[0]
	mark(w, 100)
	w.Close()
	p.State = diagnosis.ProcExited // as the proc source would say
	for range 5 {
		n.ok(1)
	}
	if n.read[p] != 100 || !p.Closed || p.Appended != 100 {
		t.Errorf("%d records read, closed %v", n.read[p], p.Closed)
	}
	n.v.Now += int64(time.Minute)
	n.ok(0)
	n.ok(0) // and is not opened again
}

func TestAYoungerProcessTakesTheRank(t *testing.T) {
	dir := t.TempDir()
	w := create(t, dir, 0, 0)
	n := newNode(t, recorder.Options{Dir: dir})
	n.ok(1)
	old := n.v.Processes[0]
	w.Close()
	old.State = diagnosis.ProcExited
	// This process cannot have two recorders of a rank in one directory.
	again := create(t, t.TempDir(), 0, 1)
	if err := os.Rename(again.Path(), filepath.Join(dir, "again.rec")); err != nil {
		t.Fatal(err)
	}
	if err := n.s.Update(&n.v); err != nil || old.Superseded {
		t.Fatal(err, "looked at the directory too soon")
	}
	n.v.Now += int64(time.Second)
	if err := n.s.Update(&n.v); err != nil {
		t.Fatal(err)
	}
	if !old.Superseded || n.v.Processes[1].Superseded || n.v.Processes[1].Attempt != 1 {
		t.Fatal("the older process stands")
	}
	n.ok(1) // read to its end: nothing more to tell
}

func TestLimitAndNodeFilter(t *testing.T) {
	dir := t.TempDir()
	for i := range 4 {
		create(t, dir, int32(i), 0)
	}
	n := newNode(t, recorder.Options{Dir: dir, Max: 3})
	if err := n.pass(); err == nil || len(n.v.Processes) != 3 || n.s.Overflow() != 1 {
		t.Errorf("%d processes, overflow %d, error %v", len(n.v.Processes), n.s.Overflow(), err)
	}
	other := newNode(t, recorder.Options{Dir: dir, Node: "elsewhere"})
	other.ok(0)
	here := newNode(t, recorder.Options{Dir: dir, Node: "here"})
	here.ok(4)
}

func BenchmarkUpdate(b *testing.B) {
	dir := b.TempDir()
	for i := range 8 {
		w, err := record.Create(record.Options{Dir: dir, Identity: record.Identity{Job: "job", Rank: int32(i), WorldSize: 8}})
		if err != nil {
			b.Fatal(err)
		}
		defer w.Close()
		for c := range 4 {
			k, _ := w.AddComm(record.CommEntry{ID: uint64(c), Name: fmt.Sprint(c), Rank: int32(i), Size: 8})
			for p := range 7 {
				w.AddConn(record.ConnEntry{Comm: k.Index(), Peer: int32(p), Name: "tcp 127.0.0.1:4000->127.0.0.1:5000"})
			}
		}
	}
	s := recorder.New(recorder.Options{Dir: dir})
	defer s.Close()
	var v source.View
	b.ReportAllocs()
	for b.Loop() {
		v.Now += int64(100 * time.Millisecond)
		if err := s.Update(&v); err != nil {
			b.Fatal(err)
		}
	}
}

// The words and operations of a communicator that a GPU stamps, and what is
// overwritten of them, come like any other's.
func TestStamps(t *testing.T) {
	dir := t.TempDir()
	n := newNode(t, recorder.Options{Dir: dir})
	w, err := record.Create(record.Options{Dir: dir, StampSlots: 64, Identity: record.Identity{Job: "job", WorldSize: 1}})
	if err != nil {
		t.Fatal(err)
	}
	w.AddDevice(record.DeviceEntry{Name: "gpu"}, record.DeviceAnchor{GPU: 5, Mono: 5, Err: 7})
	desc, _ := w.AddDesc(record.Desc{Coll: record.AllGather, Bytes: 100})
	c, _ := w.AddComm(record.CommEntry{Name: "tp", Stamps: 16})
	off, count := c.StampRange()
	n.ok(1)
	for seq := range uint64(21) {
		slot := w.Memory()[off+int(seq+1)%count*record.StampEntrySize:]
		for i, word := range []uint64{(seq+1)<<16 | uint64(desc), seq*100 + 100, 10<<8 | 0xff, seq*100 + 150} {
			binary.LittleEndian.PutUint64(slot[8*i:], word)
		}
	}
	var got []record.Stamp
	if k := n.s.DrainStamps(1<<20, func(_ *source.Process, s []record.Stamp) { got = append(got, s...) }); k != 16 || len(got) != k || got[15].Seq != 21 || got[15].Bytes != 100 {
		t.Fatalf("%d stamps: %+v", k, got)
	}
	n.ok(1)
	p := n.v.Processes[0]
	if p.Lost != 5 || len(p.Devices) != 1 || p.Devices[0].Err < 7 || p.Comms[0].Finished != 21 || p.Comms[0].Ops != 16 || p.Comms[0].Coll != record.AllGather {
		t.Errorf("lost %d, devices %+v, %+v", p.Lost, p.Devices, p.Comms[0])
	}
}

// Marks of a process count as its recorder's, whichever file came first.
func TestMarksOfAProcess(t *testing.T) {
	marks := func(dir string) *record.Writer {
		w, err := record.Create(record.Options{Dir: dir, MarksOnly: true, Identity: record.Identity{Job: "by-hand", Rank: 0, WorldSize: 1}})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { w.Close() })
		return w
	}
	for _, first := range []string{"marks", "recorder", "both"} {
		t.Run(first, func(t *testing.T) {
			dir := t.TempDir()
			n := newNode(t, recorder.Options{Dir: dir})
			var m *record.Writer
			if first == "marks" {
				m = marks(dir)
				mark(m, 3)
				n.ok(1)
				if p := n.v.Processes[0]; p.Job != "by-hand" || !p.MarksOnly() || p.Superseded || n.read[p] != 3 {
					t.Errorf("alone: %+v, %d read", p, n.read[p])
				}
			}
			w := create(t, dir, 5, 1)
			if first == "recorder" {
				n.ok(1)
			}
			if m == nil {
				m = marks(dir)
				mark(m, 3)
			}
			n.ok(1)
			p := n.v.Processes[0]
			if p.Rank != 5 || p.Job != "job" || p.Superseded || n.read[p] != 3 {
				t.Errorf("together: %+v, %d read; want rank 5 with all three marks", p, n.read[p])
			}
			mark(w, 2)
			mark(m, 4)
			n.ok(1)
			if n.read[p] != 9 {
				t.Errorf("%d records of the process, want 9", n.read[p])
			}
			// The process ends: both files are let go of.
			p.State = diagnosis.ProcExited
			w.Close()
			m.Close()
			for range 3 {
				n.ok(1)
			}
			n.v.Now += int64(time.Hour)
			n.ok(0)
			n.ok(0)
		})
	}
}

// Communicators are called what the program calls its process groups, and by their id where
// nobody has named them.
func TestGroups(t *testing.T) {
	dir := t.TempDir()
	n := newNode(t, recorder.Options{Dir: dir})
	w := create(t, dir, 1, 0)
	for i, c := range []record.CommEntry{{Name: "0", Rank: 1, Size: 8}, {Name: "3", Rank: 0, Size: 2}, {Rank: 1, Size: 4}, {Rank: 0, Size: 4}, {Name: "9", Rank: 1, Size: 8}} {
		c.ID, c.State = uint64(i+1), record.CommJoined
		w.AddComm(c)
	}
	m, err := record.Create(record.Options{Dir: dir, MarksOnly: true})
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	paths, _ := record.List(dir)
	var groups string
	for _, p := range paths {
		if r, err := record.Open(p); err == nil {
			if r.Header().MarksOnly() {
				groups = p + ".groups"
			}
			r.Close()
		}
	}
	names := func() (out []string) {
		n.ok(1)
		for _, c := range n.v.Processes[0].Comms {
			out = append(out, c.Name)
		}
		return out
	}
	if got := fmt.Sprintf("%q", names()); got != `["0" "3" "comm-00003" "comm-00004" "9"]` {
		t.Error(got)
	}
	text := `[{"name":"0","title":"world","rank":1,"size":8},{"name":"3","title":"tp\u001b[31m","rank":0,"size":2},{"name":"5","title":"dp","rank":1,"size":4},
		{"name":"6","title":"a","rank":0,"size":4},{"name":"7","title":"b","rank":0,"size":4}]`
	if err := os.WriteFile(groups, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	names()
	if got := fmt.Sprintf("%q", names()); got != `["world" "tp�[31m" "dp" "comm-00004" "9"]` {
		t.Error(got)
	}
	if err := os.WriteFile(groups, []byte(`{"name": 5`), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := n.pass(); err == nil {
		t.Error("nonsense is no error")
	}
}
