package record_test

import (
	"bytes"
	"encoding/binary"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/lockstep-ccl/lockstep/record"
)

func control(tb testing.TB, content []byte) (path string) {
	tb.Helper()
	path = filepath.Join(tb.TempDir(), "job.0.1.rec")
	if err := os.WriteFile(path, nil, 0o600); err != nil {
		tb.Fatal(err)
	}
	if err := os.WriteFile(record.ControlPath(path), content, 0o600); err != nil {
		tb.Fatal(err)
	}
	return path
}

func goodControl() []byte {
	b := make([]byte, record.ControlSize)
	copy(b, record.ControlMagic)
	binary.LittleEndian.PutUint32(b[8:], record.ControlVersion)
	binary.LittleEndian.PutUint32(b[12:], record.ControlSize)
	return b
}

func TestSetEvents(t *testing.T) {
	path := control(t, goodControl())
	for _, set := range []record.EventSet{record.EventsAll, record.EventsOps, record.EventsOps, record.EventsDefault} {
		if err := record.SetEvents(path, set); err != nil {
			t.Fatal(err)
		}
		got, err := os.ReadFile(record.ControlPath(path))
		if err != nil {
			t.Fatal(err)
		}
		want := goodControl()
		want[16] = byte(set)
		if !bytes.Equal(got, want) {
			t.Errorf("%v: % x", set, got)
		}
	}
	old := goodControl()
	old[8]++
	for _, c := range []struct {
		path string
		set  record.EventSet
		err  string
	}{
		{control(t, old), record.EventsAll, "not a control file of version"},
		{control(t, goodControl()[:10]), record.EventsAll, "is not a control file of 64 bytes"},
		{control(t, make([]byte, 64)), record.EventsAll, "not a control file of version"},
		{path, 9, "no such set of events"},
		{filepath.Join(t.TempDir(), "none.rec"), record.EventsAll, "no such file"},
	} {
		if err := record.SetEvents(c.path, c.set); err == nil || !strings.Contains(err.Error(), c.err) {
			t.Errorf("%v, want %q", err, c.err)
		}
	}
	target := filepath.Join(t.TempDir(), "target")
	if err := os.WriteFile(target, goodControl(), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Remove(record.ControlPath(path)); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(target, record.ControlPath(path)); err != nil {
		t.Fatal(err)
	}
	if err := record.SetEvents(path, record.EventsAll); err == nil {
		t.Error("a link is followed")
	}
}

// Whatever is in the file, only the word of the events ever changes.
func FuzzControl(f *testing.F) {
	f.Add(goodControl(), uint8(3))
	f.Add([]byte("LOCKCTRL"), uint8(1))
	f.Fuzz(func(t *testing.T, content []byte, set uint8) {
		path := control(t, content)
		err := record.SetEvents(path, record.EventSet(set))
		got, rerr := os.ReadFile(record.ControlPath(path))
		if rerr != nil || len(got) != len(content) {
			t.Fatalf("%v, %d bytes", rerr, len(got))
		}
		for i := range got {
			if got[i] != content[i] && (err != nil || i < 16 || i >= 24) {
				t.Fatalf("byte %d changed: % x", i, got)
			}
		}
	})
}
