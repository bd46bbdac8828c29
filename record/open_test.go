package record_test

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/lockstep-ccl/lockstep/record"
)

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
