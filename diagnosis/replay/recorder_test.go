package replay_test

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/lockstep-ccl/lockstep/diagnosis"
	"github.com/lockstep-ccl/lockstep/diagnosis/diagnosistest"
	"github.com/lockstep-ccl/lockstep/diagnosis/replay"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func recorder(t testing.TB, o replay.RecorderOptions) *replay.Recorder {
	t.Helper()
	o.Job, o.Log = "job", slog.New(slog.DiscardHandler)
	r, err := replay.NewRecorder(o)
	if err != nil {
		t.Fatal(err)
	}
	return r
}

// files are the recordings in a directory, oldest first.
func files(t *testing.T, dir string) (paths []string, size int64) {
	t.Helper()
	err := filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		info, err := d.Info()
		if want := map[bool]fs.FileMode{true: 0o700, false: 0o600}[d.IsDir()]; info.Mode().Perm() != want {
			t.Errorf("%s has mode %v", path, info.Mode())
		}
		if !d.IsDir() {
			paths, size = append(paths, path), size+info.Size()
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return paths, size
}

func read(t *testing.T, path string) []byte {
	t.Helper()
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// TestRolling: the rolling recording stays within its bounds, begins with a key
// frame wherever it begins, and holds all passes since.
func TestRolling(t *testing.T) {
	for name, o := range map[string]replay.RecorderOptions{
		"bytes": {MaxBytes: replay.MinBytes, Before: time.Second},
		"age":   {MaxAge: replay.MinAge},
	} {
		t.Run(name, func(t *testing.T) {
			o.Dir = t.TempDir()
			dir := filepath.Join(o.Dir, "recording")
			r := recorder(t, o)
			job := diagnosistest.New(diagnosistest.Config{})
			passes := 3000
			if name == "age" {
				passes = 1200
			}
			for range passes {
				job.Advance(100 * time.Millisecond)
				r.Record(job.Evidence(), nil)
				r.Drain()
				if s := r.Stats(); s.Size > replay.MinBytes && name == "bytes" {
					t.Fatalf("%d bytes", s.Size)
				}
			}
			r.Close()
			paths, size := files(t, dir)
			s := r.Stats()
			if s.Passes != uint64(passes) || s.Size != size || len(paths) < 4 || s.Skipped != [3]uint64{} || s.Bytes <= uint64(size) {
				t.Errorf("%d files with %d bytes; %+v", len(paths), size, s)
			}
			var all []byte
			for _, p := range paths {
				all = append(all, read(t, p)...)
			}
			got, damage := readAll(t, all)
			first := got[0].number
			for i := range got {
				if got[i].number != first+uint64(i) {
					t.Fatalf("pass %d follows pass %d", got[i].number, got[i-1].number)
				}
			}
			if last := got[len(got)-1]; last.number != uint64(passes) || damage.Places != 0 || got[0].ev.Now != s.Oldest {
				t.Errorf("passes %d to %d, damage %+v, oldest %d", first, last.number, damage, s.Oldest)
			}
			if reach := time.Duration(job.Evidence().Now - got[0].ev.Now); name == "age" && (reach < replay.MinAge*8/10 || reach > replay.MinAge*12/10) {
				t.Errorf("reaches back %v", reach)
			}
		})
	}
}

// incidents records a job as a master does: with marks of what its verdicts opened and closed.
type incidents struct {
	engine *diagnosis.Engine
	open   map[string]string // id by key
	number int
}

func (i *incidents) pass(r *replay.Recorder, ev *diagnosis.Evidence) {
	told := i.engine.Diagnose(ev)
	var marks []replay.Mark
	for _, v := range told {
		if i.open[v.Key] == "" {
			i.number++
			i.open[v.Key] = fmt.Sprintf("job/1-%d", i.number)
			marks = append(marks, replay.Mark{Kind: replay.MarkOpened, At: ev.Now, Incident: i.open[v.Key], Key: v.Key, Onset: v.Since})
		}
	}
	for key, id := range i.open {
		if !slices.ContainsFunc(told, func(v diagnosis.Verdict) bool { return v.Key == key }) {
			marks = append(marks, replay.Mark{Kind: replay.MarkClosed, At: ev.Now, Incident: id, Key: key})
			delete(i.open, key)
		}
	}
	r.Record(ev, told, marks...)
	r.Drain()
}

// TestIncident: an incident has a recording of its own from the moment that it is open,
// which begins before its onset, ends after its end, outlives the recorder and is
// judged as it was.
func TestIncident(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "incidents", replay.IncidentFile("job/1-1"))
	job := diagnosistest.New(diagnosistest.Config{Faults: []diagnosistest.Fault{
		{Kind: diagnosistest.Stop, At: 200 * time.Second, Until: 230 * time.Second, Rank: 3},
	}})
	advance := func(i *incidents, r *replay.Recorder, to time.Duration) {
		for job.Now() < to {
			job.Advance(100 * time.Millisecond)
			i.pass(r, job.Evidence())
		}
	}
	r := recorder(t, replay.RecorderOptions{Dir: dir, Before: 30 * time.Second, MaxAge: 5 * time.Minute, After: 5 * time.Second})
	i := &incidents{engine: diagnosis.New(diagnosis.Config{}), open: map[string]string{}}
	advance(i, r, 199*time.Second)
	if paths, _ := files(t, filepath.Join(dir, "incidents")); len(paths) != 0 {
		t.Fatalf("recordings of no incident: %v", paths)
	}
	advance(i, r, 210*time.Second)
	open := play(t, read(t, path), replay.PlayOptions{}) // while it is written
	if !open.Same() || len(open.Recorded) != 1 || !open.Recorded[0].Open || open.Recorded[0].Level != diagnosis.Confirmed || len(open.Marks) != 1 {
		t.Errorf("while it is open: %+v", open)
	}
	if begin := time.Duration(open.First - diagnosistest.Start); begin > 170*time.Second || begin < 140*time.Second {
		t.Errorf("it begins at %v", begin)
	}
	r.Close() // killed, as far as the file is concerned

	r = recorder(t, replay.RecorderOptions{Dir: dir, MaxAge: 5 * time.Minute, After: 5 * time.Second, Open: []string{"job/1-1", "job/no-file"}})
	i = &incidents{engine: diagnosis.New(diagnosis.Config{}), open: i.open, number: i.number}
	advance(i, r, 300*time.Second)
	r.Close()
	whole := play(t, read(t, path), replay.PlayOptions{})
	if !whole.Same() || whole.Runs != 2 || len(whole.Marks) != 2 || whole.Marks[1].Kind != replay.MarkClosed || whole.First != open.First {
		t.Errorf("of the whole: %+v", whole)
	}
	if after := time.Duration(whole.Last - whole.Marks[1].At); after < 4*time.Second || after > 6*time.Second {
		t.Errorf("it ends %v after the incident", after)
	}
	if paths, _ := files(t, filepath.Join(dir, "incidents")); len(paths) != 1 {
		t.Errorf("recordings: %v", paths)
	}
}

// TestIncidentsBounded: the oldest recordings make room.
func TestIncidentsBounded(t *testing.T) {
	dir := t.TempDir()
	r := recorder(t, replay.RecorderOptions{Dir: dir, Incidents: 3, After: time.Nanosecond})
	ev := diagnosistest.New(diagnosistest.Config{}).Evidence()
	for n := range 10 {
		id := fmt.Sprintf("job-%d", n)
		for _, kind := range []replay.MarkKind{replay.MarkOpened, replay.MarkClosed} {
			ev.Now += 1e8
			r.Record(ev, nil, replay.Mark{Kind: kind, Incident: id})
			r.Drain()
		}
		ev.Now += 1e8
		r.Record(ev, nil)
		r.Drain()
		path := filepath.Join(dir, "incidents", replay.IncidentFile(id))
		if err := os.Chtimes(path, time.Time{}, time.Unix(int64(n), 0)); err != nil {
			t.Fatal(err)
		}
	}
	r.Close()
	paths, _ := files(t, filepath.Join(dir, "incidents"))
	for i := range paths {
		paths[i] = filepath.Base(paths[i])
	}
	if want := []string{"job-7.evidence", "job-8.evidence", "job-9.evidence"}; !slices.Equal(paths, want) {
		t.Errorf("%v, want %v", paths, want)
	}
}

// TestBusy: a disk that does not answer makes nobody wait; what finds no place is
// counted, and what is written next carries all changes.
func TestBusy(t *testing.T) {
	dir := t.TempDir()
	r := recorder(t, replay.RecorderOptions{Dir: dir})
	job := diagnosistest.New(diagnosistest.Config{})
	var last diagnosis.Evidence
	for n := range 200 {
		job.Advance(100 * time.Millisecond)
		ev := job.Evidence()
		ev.Paused = n == 150 // of a pass that finds no place
		r.Record(ev, nil, replay.Mark{Kind: replay.MarkConfirmed, Incident: "job-1"})
	}
	busy := r.Stats().Skipped[replay.SkipBusy]
	r.Drain()
	job.Advance(100 * time.Millisecond)
	r.Record(job.Evidence(), nil)
	last = clone(*job.Evidence())
	last.Paused = true
	r.Drain()
	r.Close()
	if s := r.Stats(); busy == 0 || s.Passes+busy != 201 || s.Skipped[replay.SkipBusy] != busy {
		t.Errorf("%d of 200 found no place; %+v", busy, s)
	}
	paths, _ := files(t, filepath.Join(dir, "recording"))
	rd, err := replay.NewReader(bytes.NewReader(read(t, paths[0])), replay.Limits{})
	if err != nil {
		t.Fatal(err)
	}
	var end *replay.Pass
	marks := 0
	for {
		p, err := rd.Next()
		if err == io.EOF {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		end, marks = p, marks+len(p.Marks)
	}
	if end.Number != 201 || marks != 200 || !end.Evidence.Paused || end.Evidence.Now != last.Now || len(end.Evidence.Conns) != len(last.Conns) {
		t.Errorf("pass %d at %d, paused %v, %d marks", end.Number, end.Evidence.Now, end.Evidence.Paused, marks)
	}
}

// TestRefused: a disk that refuses is counted, and what it refused is not half there.
func TestRefused(t *testing.T) {
	dir := t.TempDir()
	r := recorder(t, replay.RecorderOptions{Dir: dir})
	if err := os.Remove(filepath.Join(dir, "recording")); err != nil {
		t.Fatal(err)
	}
	ev := diagnosistest.New(diagnosistest.Config{}).Evidence()
	for range 3 {
		r.Record(ev, nil)
		r.Drain()
	}
	r.Close()
	if s := r.Stats(); s.Skipped[replay.SkipFailed] != 3 || s.Passes != 0 || s.Bytes != 0 {
		t.Errorf("%+v", s)
	}
}

// TestRun: Run writes what waits before it returns.
func TestRun(t *testing.T) {
	dir := t.TempDir()
	r := recorder(t, replay.RecorderOptions{Dir: dir})
	ev := diagnosistest.New(diagnosistest.Config{}).Evidence()
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	r.Record(ev, nil)
	r.Run(ctx)
	if s := r.Stats(); s.Passes != 1 {
		t.Errorf("%+v", s)
	}
}

func TestRecorderOptions(t *testing.T) {
	for want, o := range map[string]replay.RecorderOptions{
		"no directory":      {Job: "j"},
		"at least 1048576":  {Job: "j", Dir: "d", MaxBytes: 1},
		"at least 1m0s":     {Job: "j", Dir: "d", MaxAge: time.Second},
		"at least one":      {Job: "j", Dir: "d", Incidents: -1},
		"67108864 bytes of": {Job: "j", Dir: "d", IncidentBytes: 1 << 20},
		"negative":          {Job: "j", Dir: "d", Before: -1},
	} {
		if _, err := replay.NewRecorder(o); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%+v: %v, want %q", o, err, want)
		}
	}
	for id, want := range map[string]string{"llm-1-2": "llm-1-2.evidence", "../a/b c": "_a_b_c.evidence", "..": ".evidence"} {
		if got := replay.IncidentFile(id); got != want {
			t.Errorf("%q: %q, want %q", id, got, want)
		}
	}
}
