package runcmd

import (
	"log/slog"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"testing"
	"time"

	"github.com/lockstep-ccl/lockstep/record"
)

// The test binary is also a rank: it makes its recorders and dies without closing them.
func TestMain(m *testing.M) {
	if len(os.Args) > 1 && os.Args[1] == "rank" {
		rank, err := strconv.Atoi(os.Args[4])
		if err != nil {
			os.Exit(2)
		}
		for range 2 { // two, as a process with two libraries has
			if _, err := record.Create(record.Options{Dir: os.Args[2], RingSlots: 8, Identity: record.Identity{Job: os.Args[3], Rank: int32(rank), WorldSize: 2}}); err != nil {
				os.Exit(1)
			}
		}
		os.Exit(0)
	}
	os.Exit(m.Run())
}

func TestPrune(t *testing.T) {
	dir := t.TempDir()
	var made [4][]string // by attempt
	seen := map[string]bool{}
	for attempt := range made {
		for _, who := range [][2]string{{"llm", "0"}, {"llm", "1"}, {"other", "0"}} {
			cmd := exec.Command(os.Args[0], "rank", dir, who[0], who[1])
			cmd.Env = append(os.Environ(), "GORACE=atexit_sleep_ms=0")
			if out, err := cmd.CombinedOutput(); err != nil {
				t.Fatalf("%v: %s", err, out)
			}
		}
		paths, err := record.List(dir)
		if err != nil {
			t.Fatal(err)
		}
		for _, p := range paths {
			if !seen[p] {
				seen[p] = true
				made[attempt] = append(made[attempt], p)
			}
		}
		if len(made[attempt]) != 6 {
			t.Fatalf("attempt %d left %d recorders, want 2 for each of 3 ranks", attempt, len(made[attempt]))
		}
	}
	// What is alive, is no recorder, or belongs to someone who may still write to it stays.
	alive, err := record.Create(record.Options{Dir: dir, RingSlots: 8, Identity: record.Identity{Job: "llm", Rank: 1, WorldSize: 2}})
	if err != nil {
		t.Fatal(err)
	}
	defer alive.Close()
	foreign, fresh, old := filepath.Join(dir, "llm.0.1.rec"), filepath.Join(dir, ".new-1"), filepath.Join(dir, ".new-2")
	mail, socket := filepath.Join(dir, ".gpu-mail-1"), filepath.Join(dir, "symm-0123456789abcdef")
	job := filepath.Join(dir, "symm-llm.0.1.rec") // a job may be called so
	for _, p := range []string{foreign, fresh, old, mail, job} {
		if err := os.WriteFile(p, []byte("not a recorder"), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	l, err := net.ListenUnix("unixpacket", &net.UnixAddr{Name: socket, Net: "unixpacket"})
	if err != nil {
		t.Fatal(err)
	}
	l.SetUnlinkOnClose(false)
	l.Close()
	for _, p := range []string{old, mail, socket, job} {
		if err := os.Chtimes(p, time.Time{}, time.Now().Add(-2*time.Hour)); err != nil {
			t.Fatal(err)
		}
	}

	prune(dir, "llm", 4, slog.New(slog.DiscardHandler))

	exists := func(path string) bool { _, err := os.Lstat(path); return err == nil }
	for attempt, paths := range made {
		for _, p := range paths {
			other := filepath.Base(p)[0] == 'o'
			if want := attempt >= len(made)-keepDead || other; exists(p) != want {
				t.Errorf("attempt %d: %s: there %v, want %v", attempt, filepath.Base(p), !want, want)
			}
		}
	}
	for p, want := range map[string]bool{alive.Path(): true, foreign: true, fresh: true, old: false, mail: false, socket: false, job: true} {
		if exists(p) != want {
			t.Errorf("%s: there %v, want %v", filepath.Base(p), !want, want)
		}
	}
	prune(filepath.Join(dir, "none"), "llm", 4, slog.New(slog.DiscardHandler)) // a directory that is not there yet
}

func TestPruneEnds(t *testing.T) {
	dir := t.TempDir()
	for attempt := range uint32(5) {
		for _, job := range []string{"llm", "other"} {
			if err := record.WriteEnd(dir, record.End{Job: job, Rank: 1, Attempt: attempt, At: 1}); err != nil {
				t.Fatal(err)
			}
		}
	}
	prune(dir, "llm", 5, slog.New(slog.DiscardHandler))
	paths, err := record.ListEnds(dir)
	if err != nil {
		t.Fatal(err)
	}
	var kept []string
	for _, p := range paths {
		if e, err := record.ReadEnd(p); err != nil || e.Job == "llm" {
			kept = append(kept, filepath.Base(p))
		}
	}
	if len(paths) != 7 || !slices.Equal(kept, []string{"llm.1.3.end", "llm.1.4.end"}) {
		t.Errorf("%d files are kept, %v of this job", len(paths), kept)
	}
}

// TestTellsHowRanksEnded: a rank's end lies beside its recorder.
func TestTellsHowRanksEnded(t *testing.T) {
	dir := t.TempDir()
	began := record.Now()
	c := Cmd{Job: "llm", Ranks: 1, Nodes: 1, Dir: filepath.Join(dir, "state"), RuntimeDir: dir, Grace: time.Second, Quiet: true,
		Command: []string{"--", os.Args[0], "rank", dir, "llm", "0"}}
	if err := c.Run(t.Context(), slog.New(slog.DiscardHandler), nil); err != nil {
		t.Fatal(err)
	}
	paths, err := record.List(dir)
	if err != nil || len(paths) == 0 {
		t.Fatalf("recorders %v, %v", paths, err)
	}
	r, err := record.Open(paths[0])
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	e, err := record.EndOf(paths[0], r.Header())
	if err != nil || e.Code != 0 || e.Signal != 0 || e.Asked || e.PID != r.Header().PID || e.At < began || e.At > record.Now() {
		t.Errorf("%+v, %v", e, err)
	}
}
