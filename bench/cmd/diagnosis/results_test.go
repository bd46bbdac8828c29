package main

import (
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/lockstep-ccl/lockstep/diagnosis/jobsim"
)

// tables are those of some scenarios; kept may be nil.
func tables(t *testing.T, n int, kept *store) string {
	t.Helper()
	var plans []plan
	for i, name := range jobsim.Rows()[:n] {
		plans = append(plans, plan{set: jobsim.Tuning, row: name, seed: uint64(i), ranks: 8})
	}
	results := play(plans, 2, kept)
	for i := range results {
		if r := &results[i]; r.err == nil {
			r.PassNs = 0 // time is another one each time
		}
	}
	var b strings.Builder
	if err := table(&b, jobsim.Tuning, results); err != nil {
		t.Fatal(err)
	}
	return b.String()
}

// A run that ended in the middle of a write is taken up again, and says the same as one that did not.
func TestResultsAreTakenUpAgain(t *testing.T) {
	want := tables(t, 30, nil)
	path := filepath.Join(t.TempDir(), "results")
	open := func() *store {
		s, err := openStore(path)
		if err != nil {
			t.Fatal(err)
		}
		return s
	}
	s := open()
	tables(t, 20, s)
	if err := s.close(); err != nil {
		t.Fatal(err)
	}
	info, err := os.Stat(path)
	if err == nil {
		err = os.Truncate(path, info.Size()-7)
	}
	if err != nil {
		t.Fatal(err)
	}
	for _, have := range []int{19, 30} {
		s = open()
		if len(s.have) != have {
			t.Errorf("the file has %d results, want %d", len(s.have), have)
		}
		if got := tables(t, 30, s); got != want {
			t.Errorf("with %d results from the file:\n%s\nwithout:\n%s", have, got, want)
		}
		if err := s.close(); err != nil {
			t.Fatal(err)
		}
	}
}

func FuzzResults(f *testing.F) {
	path := filepath.Join(f.TempDir(), "seed")
	s, err := openStore(path)
	if err != nil {
		f.Fatal(err)
	}
	r := playOne(plan{set: jobsim.Tuning, row: jobsim.Rows()[0], seed: 1, ranks: 8})
	s.add(&r)
	if err := s.close(); err != nil {
		f.Fatal(err)
	}
	b, err := os.ReadFile(path)
	if err != nil {
		f.Fatal(err)
	}
	head, err := build()
	if err != nil {
		f.Fatal(err)
	}
	f.Add(b[len(head):])
	f.Add([]byte{255, 255, 255, 255})
	f.Fuzz(func(t *testing.T, b []byte) {
		path := filepath.Join(t.TempDir(), "results")
		if err := os.WriteFile(path, slices.Concat([]byte(head), b), 0o600); err != nil {
			t.Fatal(err)
		}
		s, err := openStore(path)
		if err != nil {
			return // it says what is wrong with it
		}
		if at, err := s.file.Seek(0, io.SeekCurrent); err != nil || at > int64(len(head)+len(b)) {
			t.Errorf("writes at %d: %v", at, err)
		}
		if err := s.close(); err != nil {
			t.Error(err)
		}
	})
}
