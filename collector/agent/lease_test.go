package agent

import (
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/lockstep-ccl/lockstep/collector/source"
	"github.com/lockstep-ccl/lockstep/collector/wire"
	"github.com/lockstep-ccl/lockstep/record"
)

const bootID = "8a6b1c1e-0000-4000-8000-000000000001"

// sec is a moment of these tests, CLOCK_MONOTONIC ns.
func sec(s float64) int64 { return int64(s * 1e9) }

// TestExpired: the agent began at 100 s, the lease is 60 s.
func TestExpired(t *testing.T) {
	for name, tt := range map[string]struct {
		former        float64 // 0: no former agent has left one
		born, met     float64
		stream, heard float64
		now           float64
		over          bool
	}{
		"heard a while ago":                          {0, 90, 101, 101, 150, 209, false},
		"heard too long ago":                         {0, 90, 101, 101, 150, 211, true},
		"never heard, met later":                     {0, 120, 130, 101, 0, 189, false},
		"never heard, met long ago":                  {0, 120, 130, 101, 0, 191, true},
		"no former agent, so it counts from here":    {0, 10, 101, 101, 0, 160, false},
		"a former agent was heard":                   {70, 10, 101, 101, 0, 129, false},
		"a former agent was heard too long ago":      {70, 10, 101, 101, 0, 131, true},
		"over, and the stream has just begun":        {30, 10, 101, 101, 0, 103, false},
		"over, and the stream is not heard":          {30, 10, 101, 101, 0, 105, true},
		"over, and this agent is heard":              {30, 10, 101, 101, 102, 105, false},
		"it began after a former agent was heard":    {30, 90, 101, 101, 0, 149, false},
		"and that is too long ago":                   {30, 90, 101, 101, 0, 151, true},
		"it began after this agent":                  {30, 110, 111, 101, 0, 170, false},
		"nobody knows when it began":                 {30, 0, 101, 101, 0, 150, false},
		"its master is known since a moment ago":     {0, 10, 101, 300, 0, 350, false},
		"likewise, and a former agent knew of it":    {30, 10, 101, 300, 0, 302, false},
		"a former agent was heard, this one again":   {70, 10, 101, 101, 140, 199, false},
		"and then no more":                           {70, 10, 101, 101, 140, 201, true},
		"the stream's time does not prolong a lease": {70, 10, 101, 129, 0, 133, true},
	} {
		a := newAgent(t)
		a.began = sec(100)
		if tt.former != 0 {
			a.leases.former = anchors{"job": sec(tt.former)}
		}
		j := &job{name: "job", stream: a.newStream("job")}
		j.stream.began = sec(tt.stream)
		j.stream.heard.Store(sec(tt.heard))
		r := &rank{job: j, metAt: sec(tt.met), terms: terms{lease: time.Minute, began: sec(tt.born)}}
		if since, over := a.expired(j, r, sec(tt.now)); over != tt.over {
			t.Errorf("%s: over %v, counted from %v", name, over, time.Duration(since))
		}
		r.terms.lease = 0
		if _, over := a.expired(j, r, sec(1e6)); over {
			t.Errorf("%s: over without a lease", name)
		}
	}
}

func TestParseAnchors(t *testing.T) {
	now := 2 * anchorAge
	head := fmt.Sprintf(`{"version":1,"boot_id":%q,"node":"n0","jobs":`, bootID)
	many := head + `{"j":` + fmt.Sprint(now)
	for i := range maxAnchors {
		many += fmt.Sprintf(`,"j%d":%d`, i, now)
	}
	for name, tt := range map[string]struct {
		text string
		want anchors // nil: refused
	}{
		"one":              {head + fmt.Sprintf(`{"llm":%d}}`, now-5), anchors{"llm": now - 5}},
		"none":             {head + `{}}`, anchors{}},
		"one is too old":   {head + fmt.Sprintf(`{"llm":%d,"old":1}}`, now), anchors{"llm": now}},
		"another boot's":   {strings.Replace(head, bootID, "another", 1) + `{"llm":1}}`, anchors{}},
		"another node's":   {strings.Replace(head, "n0", "n1", 1) + `{"llm":1}}`, nil},
		"another version":  {strings.Replace(head, ":1,", ":2,", 1) + `{}}`, nil},
		"of the future":    {head + fmt.Sprintf(`{"llm":%d}}`, now+1), nil},
		"before the boot":  {head + `{"llm":-1}}`, nil},
		"no job's name":    {head + fmt.Sprintf(`{"../x":%d}}`, now), nil},
		"too many":         {many + `}}`, nil},
		"cut":              {head + `{"llm":12`, nil},
		"empty":            {"", nil},
		"something behind": {head + `{}}{}`, nil},
	} {
		got, err := parseAnchors([]byte(tt.text), "n0", bootID, now)
		if (err == nil) != (tt.want != nil) || !maps.Equal(got, tt.want) {
			t.Errorf("%s: %v, %v; want %v", name, got, err, tt.want)
		}
	}
}

func FuzzAnchors(f *testing.F) {
	f.Add([]byte(`{"version":1,"boot_id":"` + bootID + `","node":"n0","jobs":{"llm":5}}`))
	f.Add([]byte(`{"version":1,"boot_id":"another","node":"n0","jobs":{"llm":5}}`))
	f.Add([]byte(`{"jobs":null}`))
	f.Fuzz(func(t *testing.T, b []byte) {
		all, err := parseAnchors(b, "n0", bootID, 1e12)
		if err != nil && all != nil || len(all) > maxAnchors {
			t.Fatalf("%d jobs, %v", len(all), err)
		}
		for name, at := range all {
			if wire.CheckJob(name) != nil || at <= 0 || at > 1e12 {
				t.Errorf("%q at %d", name, at)
			}
		}
	})
}

// logged is what was logged, also while it is.
type logged struct {
	mu sync.Mutex
	lines
}

func (l *logged) Write(b []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.lines.Write(b)
}

func (l *logged) text() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.String()
}

// keeperOf is one that has read what is there.
func keeperOf(t *testing.T, dir string) (*keeper, anchors) {
	t.Helper()
	k := startKeeper(t.Context(), dir, "n0", bootID, slog.New(slog.DiscardHandler))
	t.Cleanup(k.stop)
	until(t, "it has read", func() bool { return k.read.Load() != nil })
	return k, *k.read.Load()
}

func until(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for deadline := time.Now().Add(time.Minute); !ok(); time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("never: %s", what)
		}
	}
}

// TestKeeper: the next one has what the last one wrote, and no other file of that name is believed.
func TestKeeper(t *testing.T) {
	base := t.TempDir()
	file := filepath.Join(base, ".agent-n0", anchorFile)
	write := func(k *keeper, all anchors) {
		t.Helper()
		k.keep(all, record.Now())
		until(t, "it is written", func() bool { w := k.written.Load(); return w != nil && maps.Equal(w.anchors, all) })
	}
	k, got := keeperOf(t, base)
	if len(got) != 0 {
		t.Errorf("there was nothing, and it reads %v", got)
	}
	want := anchors{"llm": record.Now()}
	write(k, anchors{"llm": 1})
	write(k, want)
	k.stop()
	if fi, err := os.Stat(file); err != nil || fi.Mode() != 0o600 {
		t.Fatalf("%v, %v", fi, err)
	}
	whole, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	if k, got = keeperOf(t, base); !maps.Equal(got, want) {
		t.Errorf("read %v, want %v", got, want)
	}
	k.stop()

	elsewhere := filepath.Join(t.TempDir(), "anchors")
	for name, spoil := range map[string]func() error{
		"a link":            func() error { return errors.Join(os.WriteFile(elsewhere, whole, 0o600), os.Symlink(elsewhere, file)) },
		"open to others":    func() error { return errors.Join(os.WriteFile(file, whole, 0o600), os.Chmod(file, 0o666)) },
		"cut":               func() error { return os.WriteFile(file, whole[:len(whole)/2], 0o600) },
		"endless":           func() error { return os.WriteFile(file, append(whole, make([]byte, anchorLimit)...), 0o600) },
		"a directory":       func() error { return os.Mkdir(file, 0o700) },
		"another user's":    func() error { return errors.Join(os.WriteFile(file, whole, 0o600), os.Chown(file, 54321, 54321)) },
		"of no known shape": func() error { return os.WriteFile(file, []byte("[]"), 0o600) },
	} {
		if err := os.RemoveAll(file); err != nil {
			t.Fatal(err)
		}
		if err := spoil(); err != nil {
			if errors.Is(err, os.ErrPermission) {
				continue // only root can make another user's files
			}
			t.Fatal(err)
		}
		k, got := keeperOf(t, base)
		if len(got) != 0 {
			t.Errorf("%s: it reads %v", name, got)
		}
		if name != "a directory" {
			write(k, anchors{"llm": 7}) // and goes on
		}
		k.stop()
	}
}

// TestAnchors: what the file is to say, and which leases masters are told of.
func TestAnchors(t *testing.T) {
	a := newAgent(t)
	defer a.leases.stop()
	add := func(name string, lease time.Duration) (*job, *rank) {
		p := &source.Process{}
		p.Job = name
		r := a.rank(p)
		r.terms = terms{lease: lease, grace: time.Second, stop: true}
		return r.job, r
	}
	_, plain := add("plain", 0)
	a.keepAnchors(t.Context(), sec(1))
	if a.leases.keeper != nil {
		t.Fatal("a file is kept, and nobody has a lease")
	}
	j, r := add("llm", time.Minute)
	if r.promise() != 0 {
		t.Error("a lease is promised that is nowhere kept")
	}
	now := record.Now()
	until(t, "it is kept", func() bool { now += keepEvery; a.keepAnchors(t.Context(), now); return j.anchored })
	if got := r.promise(); got != time.Minute+time.Second {
		t.Errorf("promised %v", got)
	}
	if plain.promise() != 0 || plain.job.anchored {
		t.Error("a lease of a job without one")
	}
	if got := a.anchors(now); !maps.Equal(got, anchors{"llm": j.metAt}) {
		t.Errorf("%v", got)
	}
	a.leases.former = anchors{"llm": 3, "gone": now - 1, "old": now - anchorAge}
	if got := a.anchors(now); !maps.Equal(got, anchors{"llm": 3, "gone": now - 1}) {
		t.Errorf("not heard: %v", got)
	}
	j.stream = a.newStream("llm")
	j.stream.heard.Store(9)
	if got := a.anchors(now); got["llm"] != 9 {
		t.Errorf("heard: %v", got)
	}
	for i := range 2 * maxAnchors {
		a.leases.former[fmt.Sprint("j", i)] = now
	}
	if got := a.anchors(now); len(got) != maxAnchors || got["llm"] != 9 {
		t.Errorf("%d anchors, this job's at %d", len(got), got["llm"])
	}
}

// TestUnkeptLease: an agent that cannot write goes on, says so once, and promises nothing.
func TestUnkeptLease(t *testing.T) {
	a := newAgent(t)
	file := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	a.o.Dir = filepath.Join(file, "rt")
	var log logged
	a.log = slog.New(slog.NewTextHandler(&log, nil))
	p := &source.Process{}
	p.Job = "llm"
	r := a.rank(p)
	r.terms = terms{lease: time.Minute, stop: true}
	a.keepAnchors(t.Context(), sec(1))
	defer a.leases.stop()
	until(t, "it is logged", func() bool { return log.text() != "" })
	for deadline := time.Now().Add(2500 * time.Millisecond); time.Now().Before(deadline); time.Sleep(50 * time.Millisecond) {
		a.keepAnchors(t.Context(), record.Now())
	}
	if n := strings.Count(log.text(), "\n"); n != 1 || r.promise() != 0 {
		t.Errorf("%d lines, promised %v:\n%s", n, r.promise(), log.text())
	}
}

// TestKillDue: neither what is found late nor an agent that is late prolongs an attempt.
func TestKillDue(t *testing.T) {
	now := time.Now()
	at := func(s float64) time.Time { return now.Add(time.Duration(s * float64(time.Second))) }
	for name, tt := range map[string]struct {
		h    held
		want time.Time
	}{
		"its own grace":            {held{}, at(60)},
		"its rank's":               {held{due: at(20)}, at(20)},
		"its rank was killed":      {held{due: at(-1)}, at(-1)},
		"its lease leaves enough":  {held{latest: at(65)}, at(60)},
		"its lease leaves less":    {held{latest: at(5)}, at(5)},
		"its lease leaves nothing": {held{latest: at(-9)}, at(-9)},
	} {
		tt.h.terms.grace = time.Minute
		if got := tt.h.killDue(now); !got.Equal(tt.want) {
			t.Errorf("%s: in %v, want %v", name, got.Sub(now), tt.want.Sub(now))
		}
	}
}

// TestBeganAt: of a process that began while this test ran.
func TestBeganAt(t *testing.T) {
	before := record.Now() - int64(20*time.Millisecond) // of ticks
	key := sleeper(t)
	if at := beganAt(key.pid); at < before || at > record.Now() {
		t.Errorf("began at %d, after %d", at, before)
	}
	if at := beganAt(1<<22 + 1); at != 0 {
		t.Errorf("no process began at %d", at)
	}
}
