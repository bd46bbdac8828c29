package record_test

import (
	"errors"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/lockstep-ccl/lockstep/record"
)

func TestEnd(t *testing.T) {
	id := record.Identity{Job: "a job/../x", Rank: 3, WorldSize: 8, Attempt: 2}
	w := create(t, record.Options{Identity: id})
	r := open(t, w.Path())
	h := r.Header()
	if _, err := record.EndOf(w.Path(), h); !errors.Is(err, os.ErrNotExist) {
		t.Fatalf("before anybody has told: %v", err)
	}
	dir := filepath.Dir(w.Path())
	want := record.End{Job: id.Job, Rank: 3, Attempt: 2, PID: 77, Started: time.Unix(0, h.Created.UnixNano()-1), Signal: 9, Asked: true, At: record.Now()}
	if err := record.WriteEnd(dir, want); err != nil {
		t.Fatal(err)
	}
	if got, err := record.EndOf(w.Path(), h); err != nil || got != want {
		t.Errorf("got %+v, %v, want %+v", got, err, want)
	}
	paths, err := record.ListEnds(dir)
	if err != nil || len(paths) != 1 {
		t.Fatalf("files %v, %v", paths, err)
	}
	if fi, err := os.Stat(paths[0]); err != nil || fi.Mode().Perm() != 0o600 {
		t.Errorf("mode %v, %v", fi.Mode(), err)
	}
	if got, err := record.ReadEnd(paths[0]); err != nil || got != want {
		t.Errorf("read %+v, %v", got, err)
	}
	if list, err := record.List(dir); err != nil || len(list) != 1 {
		t.Errorf("recorders %v, %v", list, err)
	}

	text, err := os.ReadFile(paths[0])
	if err != nil {
		t.Fatal(err)
	}
	later := want
	later.Started = h.Created.Add(time.Hour)
	for name, tt := range map[string]struct {
		change func() error
		err    error
	}{
		"of a later process": {func() error { return record.WriteEnd(dir, later) }, os.ErrNotExist},
		"of another boot": {func() error {
			return os.WriteFile(paths[0], []byte(regexp.MustCompile(`"boot_id":"[0-9a-f]*"`).ReplaceAllString(string(text), `"boot_id":"00112233445566778899aabbccddeeff"`)), 0o600)
		}, os.ErrNotExist},
		"of another version": {func() error {
			return os.WriteFile(paths[0], []byte(strings.Replace(string(text), `"version":1`, `"version":2`, 1)), 0o600)
		}, record.ErrVersion},
		"no JSON": {func() error { return os.WriteFile(paths[0], []byte("{"), 0o600) }, record.ErrCorrupt},
		"out of range": {func() error {
			return os.WriteFile(paths[0], []byte(strings.Replace(string(text), `"signal":9`, `"signal":99`, 1)), 0o600)
		}, record.ErrCorrupt},
		"too long": {func() error { return os.WriteFile(paths[0], append(make([]byte, 5000), text...), 0o600) }, record.ErrCorrupt},
		"a link": {func() error {
			return errors.Join(os.Remove(paths[0]), os.Symlink(w.Path(), paths[0]))
		}, nil},
	} {
		t.Run(name, func(t *testing.T) {
			defer func() {
				if err := errors.Join(os.Remove(paths[0]), record.WriteEnd(dir, want)); err != nil {
					t.Fatal(err)
				}
			}()
			if err := tt.change(); err != nil {
				t.Fatal(err)
			}
			if e, err := record.EndOf(w.Path(), h); err == nil || tt.err != nil && !errors.Is(err, tt.err) {
				t.Errorf("%+v, %v, want %v", e, err, tt.err)
			}
		})
	}
}

// FuzzReadEnd: whatever a file says, what is read of it is in range.
func FuzzReadEnd(f *testing.F) {
	dir := f.TempDir()
	if err := record.WriteEnd(dir, record.End{Job: "j", Rank: 1, Code: 3, Started: time.Unix(1, 0), At: 5}); err != nil {
		f.Fatal(err)
	}
	paths, err := record.ListEnds(dir)
	if err != nil {
		f.Fatal(err)
	}
	good, err := os.ReadFile(paths[0])
	if err != nil {
		f.Fatal(err)
	}
	f.Add(good)
	f.Add([]byte(`{"version":1,"boot_id":"","code":-1}`))
	f.Add([]byte(`{"version":1e9}`))
	f.Fuzz(func(t *testing.T, text []byte) {
		if err := os.WriteFile(paths[0], text, 0o600); err != nil {
			t.Fatal(err)
		}
		e, err := record.ReadEnd(paths[0])
		if err == nil && (e.Rank < 0 || e.Code < 0 || e.Code > 255 || e.Signal < 0 || e.Signal > 64 || e.At <= 0 || len(e.Job) > 63) {
			t.Errorf("%+v", e)
		}
		if err != nil && !errors.Is(err, record.ErrCorrupt) && !errors.Is(err, record.ErrVersion) {
			t.Errorf("%v is neither corruption nor a version", err)
		}
	})
}
