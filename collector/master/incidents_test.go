package master

import (
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/lockstep-ccl/lockstep/collector"
	"github.com/lockstep-ccl/lockstep/diagnosis"
	"github.com/lockstep-ccl/lockstep/internal/statedir"
	"github.com/lockstep-ccl/lockstep/record"
)

var t0 = time.Unix(1_700_000_000, 0)

func verdict(key string, level diagnosis.Level, rank int32) diagnosis.Verdict {
	return diagnosis.Verdict{
		Key: key, Class: diagnosis.NoncommunicationHang, Level: level, Comm: 7, CommName: "dp", Coll: record.AllReduce, Seq: 5,
		Since: t0.UnixNano(), Culprits: []diagnosis.Culprit{{Kind: diagnosis.CulpritRank, Rank: rank, Peer: -1, Reason: "process_gone"}},
	}
}

// script runs passes a second apart and writes down what happened.
type script struct {
	t   *testing.T
	in  incidents
	now time.Time
}

func newScript(t *testing.T) *script {
	return &script{t, incidents{job: "job", closeAfter: 3 * time.Second}, t0}
}

func (s *script) pass(attempt uint32, hold bool, want string, v ...diagnosis.Verdict) []event {
	s.t.Helper()
	s.now = s.now.Add(time.Second)
	events := s.in.update(s.now, v, attempt, hold)
	got := ""
	for _, e := range events {
		got += [...]string{"open ", "confirm ", "close "}[e.change]
	}
	if got != want {
		s.t.Errorf("pass at %v: %q, want %q", s.now.Sub(t0), got, want)
	}
	return events
}

func TestIncidentLife(t *testing.T) {
	s := newScript(t)
	suspected, confirmed := verdict("k", diagnosis.Suspected, 3), verdict("k", diagnosis.Confirmed, 3)
	e := s.pass(0, false, "open ", suspected)
	if id := e[0].ID; id != "job-1700000001000-1" {
		t.Errorf("id %s", id)
	}
	if e[0].TraceID != ([16]byte{}) || s.in.hasTrace(e[0].ID) {
		t.Errorf("trace id %x before an agent has exported anything", e[0].TraceID)
	}
	shows := collector.TraceID("job", 7, record.AllReduce, 5)
	if !s.in.named(e[0].ID, shows) || s.in.named(e[0].ID, collector.TraceID("job", 7, record.AllReduce, 6)) || s.in.named("another", shows) {
		t.Error("an incident is given its trace once")
	}
	s.pass(0, false, "", suspected)
	confirmed.Since += 5
	confirmed.Seq = 6
	e = s.pass(0, false, "confirm ", confirmed)
	if i := e[0].Incident; !i.Confirmed.Equal(s.now) || i.Verdict.Since != t0.UnixNano() || i.TraceID != shows {
		t.Errorf("confirmed incident: %+v", i)
	}
	s.pass(0, false, "", suspected) // a doubt: stays confirmed
	if l := s.in.list()[0].Verdict.Level; l != diagnosis.Confirmed {
		t.Errorf("level %v after a doubt", l)
	}
	s.pass(0, false, "")
	s.pass(0, false, "", suspected) // flickers: no new incident
	s.pass(0, false, "")
	s.pass(0, true, "") // the evidence is incomplete
	s.pass(0, true, "")
	s.pass(0, true, "")
	s.pass(0, true, "")
	s.pass(0, false, "")
	s.pass(0, false, "")
	s.pass(0, false, "close ")
	if s.in.opened[diagnosis.NoncommunicationHang] != 1 || s.in.confirmed[diagnosis.NoncommunicationHang] != 1 {
		t.Errorf("opened %v, confirmed %v", s.in.opened, s.in.confirmed)
	}
	e = s.pass(0, false, "open confirm ", confirmed)
	if e[0].ID == s.in.closed[0].ID {
		t.Error("the id of a closed incident is used again")
	}
	s.pass(1, false, "close ")
	if l := s.in.list(); len(l) != 2 || l[0].Closed.Before(l[1].Closed) {
		t.Errorf("list: %+v", l)
	}
}

// TestEveryClassIsCounted: no class shares a counter, and the file has room for all.
func TestEveryClassIsCounted(t *testing.T) {
	s := newScript(t)
	for i, class := range diagnosis.Classes() {
		v := verdict(class.String(), diagnosis.Suspected, int32(i))
		v.Class = class
		s.in.update(t0, []diagnosis.Verdict{v}, 0, false)
		if n := s.in.opened[class]; n != 1 {
			t.Errorf("%d incidents of %v, want 1: %v", n, class, s.in.opened)
		}
	}
}

func TestRestartOfTheJobClosesAndMayReopen(t *testing.T) {
	s := newScript(t)
	s.pass(0, false, "open ", verdict("k", diagnosis.Suspected, 3))
	s.pass(1, true, "close open ", verdict("k", diagnosis.Suspected, 3))
}

func TestTwoFaultsAreTwoIncidents(t *testing.T) {
	s := newScript(t)
	s.pass(0, false, "open open ", verdict("a", diagnosis.Suspected, 1), verdict("b", diagnosis.Suspected, 2))
	s.pass(0, false, "confirm ", verdict("b", diagnosis.Confirmed, 2), verdict("a", diagnosis.Suspected, 1))
	if l := s.in.list(); l[0].Verdict.Key != "b" {
		t.Errorf("the confirmed one is not first: %+v", l)
	}
	// Two verdicts with the same culprit but different keys stay two.
	s.pass(0, false, "open ", verdict("a", diagnosis.Suspected, 1), verdict("b", diagnosis.Suspected, 2), verdict("c", diagnosis.Suspected, 1))
}

// The fault of a node does not go on as that of another one.
func TestTwoNodesAreTwoIncidents(t *testing.T) {
	s := newScript(t)
	node := func(name string) diagnosis.Verdict {
		v := verdict("node/"+name, diagnosis.Confirmed, -1)
		v.Culprits[0].Kind, v.Culprits[0].Node = diagnosis.CulpritNode, name
		return v
	}
	s.pass(0, false, "open confirm ", node("a"))
	s.pass(0, false, "open confirm ", node("b"))
}

func TestOpenIncidentsAreBounded(t *testing.T) {
	s := newScript(t)
	var v []diagnosis.Verdict
	for i := range 3 * maxOpen {
		v = append(v, verdict(string(rune('a'+i)), diagnosis.Suspected, int32(i)))
	}
	s.in.update(t0, v, 0, false)
	s.in.update(t0, v, 1, false)
	s.in.update(t0, v, 2, false)
	if len(s.in.open) != maxOpen || len(s.in.closed) != collector.MaxIncidents || len(s.in.list()) != collector.MaxIncidents {
		t.Errorf("%d open, %d closed, %d listed", len(s.in.open), len(s.in.closed), len(s.in.list()))
	}
}

func TestIncidentsSurviveTheMaster(t *testing.T) {
	path := filepath.Join(t.TempDir(), "incidents.json")
	s := newScript(t)
	s.pass(0, false, "open ", verdict("k", diagnosis.Suspected, 3))
	s.pass(1, false, "close open confirm ", verdict("k", diagnosis.Confirmed, 4))
	text, err := s.in.encode()
	if err != nil {
		t.Fatal(err)
	}
	dir := stateDir(t, filepath.Dir(path))
	if err := dir.Replace(incidentFile, text); err != nil {
		t.Fatal(err)
	}
	if fi, err := os.Stat(path); err != nil || fi.Mode() != 0o600 {
		t.Errorf("%v, %v", fi, err)
	}
	again := newScript(t)
	again.now = s.now
	if err := again.in.load(dir, again.now); err != nil {
		t.Fatal(err)
	}
	if d := cmp.Diff(s.in.list(), again.in.list()); d != "" {
		t.Errorf("after load (-saved +loaded):\n%s", d)
	}
	id := s.in.open[0].ID
	// The same fault under the same key, then seen under another one.
	again.pass(1, false, "", verdict("k", diagnosis.Suspected, 4))
	again.pass(1, false, "", verdict("k2", diagnosis.Suspected, 4))
	if len(again.in.open) != 1 || again.in.open[0].ID != id {
		t.Errorf("open after the restart: %+v", again.in.list())
	}
	e := again.pass(1, false, "open ", verdict("k2", diagnosis.Suspected, 4), verdict("x", diagnosis.Suspected, 9))
	if e[0].ID == id || e[0].ID == s.in.closed[0].ID {
		t.Errorf("id %s is taken", e[0].ID)
	}
}

type always []diagnosis.Verdict

func (a always) Diagnose(*diagnosis.Evidence) []diagnosis.Verdict { return a }

// stateDir opens a directory as a master does.
func stateDir(t testing.TB, path string) *statedir.Dir {
	t.Helper()
	d, err := statedir.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { d.Close() })
	return d
}

// keeper runs a master that finds a fault in its first pass, and saves with replace.
func keeper(t *testing.T, replace func(text []byte) error) *Master {
	t.Helper()
	return start(t, Options{StateDir: t.TempDir(), Interval: time.Millisecond}, func(m *Master) {
		m.engine, m.replace = always{verdict("k", diagnosis.Confirmed, 3)}, replace
	})
}

// A disk that does not answer keeps no incident from being published.
func TestSavingHangs(t *testing.T) {
	release := make(chan struct{})
	m := keeper(t, func([]byte) error { <-release; return nil })
	defer close(release)
	for deadline := time.Now().Add(30 * time.Second); ; time.Sleep(time.Millisecond) {
		if s := m.Snapshot(); len(s.Incidents) == 1 && s.Diagnoses > 10 {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("the master waits for its disk: %+v", m.Snapshot())
		}
	}
}

// What could not be saved is saved as soon as it can.
func TestSavingIsTriedAgain(t *testing.T) {
	saved := make(chan []byte, 1)
	tries := 0
	keeper(t, func(text []byte) error {
		if tries++; tries < 3 {
			return errors.New("no space left on device")
		}
		if strings.Contains(string(text), "job-") {
			select {
			case saved <- text:
			default:
			}
		}
		return nil
	})
	select {
	case text := <-saved:
		if !strings.Contains(string(text), "job-") {
			t.Errorf("saved %s", text)
		}
	case <-time.After(30 * time.Second):
		t.Error("never saved")
	}
}

func TestBadIncidentFiles(t *testing.T) {
	for name, text := range map[string]string{
		"empty": "", "cut": `{"Version":1,"Job":"jo`, "no JSON": "\x00\xff", "another version": `{"Version":2,"Job":"job"}`, "another job": `{"Version":1,"Job":"else"}`,
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			path := filepath.Join(dir, "incidents.json")
			if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
				t.Fatal(err)
			}
			in := incidents{job: "job"}
			d := stateDir(t, dir)
			err := in.load(d, t0)
			d.Close()
			if err == nil || len(in.open)+len(in.closed) != 0 {
				t.Fatalf("loaded: %v, %+v", err, in)
			}
			m, err := New(Options{Job: "job", Listen: "127.0.0.1:0", StateDir: dir, Log: slog.New(slog.DiscardHandler)})
			if foreign := text != "" && text[0] == '{' && text[len(text)-1] == '}'; foreign {
				advice := "a state directory of its own"
				if name == "another version" {
					advice = "move it away"
				}
				if !errors.Is(err, errForeign) || !strings.Contains(err.Error(), advice) {
					t.Fatalf("a foreign file: %v", err)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			_ = m.listener.Close()
			if _, err := os.Stat(path + ".damaged"); err != nil {
				t.Error(err)
			}
		})
	}
}

func FuzzLoad(f *testing.F) {
	f.Add([]byte(`{"Version":1,"Job":"job","Open":[{"ID":"x","Verdict":{"Class":200}}],"Closed":[{}]}`))
	f.Fuzz(func(t *testing.T, text []byte) {
		path := filepath.Join(t.TempDir(), "incidents.json")
		if err := os.WriteFile(path, text, 0o600); err != nil {
			t.Fatal(err)
		}
		in := incidents{job: "job"}
		d := stateDir(t, filepath.Dir(path))
		if in.load(d, t0) == nil {
			in.update(t0, []diagnosis.Verdict{verdict("k", diagnosis.Confirmed, 1)}, 1, false)
			in.list()
		}
	})
}

// Incidents that others could have written are not believed.
func TestAStateDirectoryOfOthers(t *testing.T) {
	for name, open := range map[string]func(dir string) error{
		"directory": func(dir string) error { return os.Chmod(dir, 0o770) },
		"file": func(dir string) error {
			file := filepath.Join(dir, "incidents.json")
			return errors.Join(os.WriteFile(file, []byte("{}"), 0o600), os.Chmod(file, 0o602))
		},
	} {
		dir := filepath.Join(t.TempDir(), "state")
		if err := errors.Join(os.Mkdir(dir, 0o700), open(dir)); err != nil {
			t.Fatal(err)
		}
		if _, err := New(Options{Job: "job", Listen: "127.0.0.1:0", StateDir: dir, Log: slog.New(slog.DiscardHandler)}); err == nil || !strings.Contains(err.Error(), "written by others") {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// Ready is that passes end and the state can be written now.
func TestReadyIsThatStateCanBeWritten(t *testing.T) {
	var full atomic.Bool
	full.Store(true)
	m := keeper(t, func([]byte) error {
		if full.Load() {
			return errors.New("no space left on device")
		}
		return nil
	})
	until := func(what string, ok func() bool) {
		t.Helper()
		for deadline := time.Now().Add(30 * time.Second); !ok(); time.Sleep(5 * time.Millisecond) {
			if time.Now().After(deadline) {
				t.Fatalf("never %s: %v, %q", what, m.Ready(), m.Snapshot().StateError)
			}
		}
	}
	until("unready", func() bool { err := m.Ready(); return err != nil && strings.Contains(err.Error(), "no space left") })
	if s := m.Snapshot(); len(s.Incidents) != 1 {
		t.Errorf("it does not judge: %+v", s)
	}
	full.Store(false)
	until("ready", func() bool { return m.Ready() == nil && m.Snapshot().StateError == "" })
}

// What a restart ends did not break step: an incident keeps its name, and ranks that exit open no other.
func TestARestartRenamesNothing(t *testing.T) {
	slow, exits := verdict("k", diagnosis.Confirmed, 3), verdict("k", diagnosis.Confirmed, 3)
	slow.Class = diagnosis.NoncommunicationSlow
	decision := collector.Note{At: t0, Kind: collector.NoteDecision, Text: "restart_excluding, by policy slow-rank"}
	for _, c := range []struct {
		name  string
		notes []collector.Note
		want  diagnosis.Class
		opens string
	}{
		{"none is decided on", nil, diagnosis.NoncommunicationHang, "open confirm "},
		{"under way", []collector.Note{decision}, diagnosis.NoncommunicationSlow, ""},
		{"done", []collector.Note{decision, {At: t0.Add(1), Kind: collector.NoteAction, Text: "restart done: attempt 1 started"}}, diagnosis.NoncommunicationSlow, ""},
		{"failed", []collector.Note{decision, {At: t0.Add(1), Kind: collector.NoteAction, Text: "restart failed: nobody answers"}}, diagnosis.NoncommunicationHang, "open confirm "},
		{"dry run", []collector.Note{{At: t0.Add(1), Kind: collector.NoteAction, Text: "restart dry_run"}}, diagnosis.NoncommunicationHang, "open confirm "},
	} {
		t.Run(c.name, func(t *testing.T) {
			s := newScript(t)
			id := s.pass(0, false, "open confirm ", slow)[0].ID
			s.in.note(id, c.notes, s.now)
			other := verdict("other", diagnosis.Confirmed, 5)
			other.Since = s.now.UnixNano() + 1
			s.pass(0, false, c.opens, exits, other)
			if got := s.in.open[0].Verdict.Class; got != c.want {
				t.Errorf("it is called %v, want %v", got, c.want)
			}
			// The next master knows it from the file.
			text, err := s.in.encode()
			if err != nil {
				t.Fatal(err)
			}
			dir := stateDir(t, t.TempDir())
			if err := dir.Replace(incidentFile, text); err != nil {
				t.Fatal(err)
			}
			next := newScript(t)
			next.now = s.now
			if err := next.in.load(dir, next.now); err != nil {
				t.Fatal(err)
			}
			next.pass(0, true, "", exits)
			if got := next.in.open[0].Verdict.Class; got != c.want {
				t.Errorf("the next master calls it %v, want %v", got, c.want)
			}
			// A restart that never comes is none.
			s.now = s.now.Add(restartTakes)
			s.pass(0, true, map[bool]string{true: "open confirm "}[c.opens == ""], exits, other)
			if got := s.in.open[0].Verdict.Class; got != diagnosis.NoncommunicationHang {
				t.Errorf("long after it is called %v", got)
			}
		})
	}
}
