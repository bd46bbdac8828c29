package master

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"time"

	"github.com/lockstep-ccl/lockstep/collector"
	"github.com/lockstep-ccl/lockstep/diagnosis"
	"github.com/lockstep-ccl/lockstep/internal/statedir"
)

// storeVersion of the incident file; another version is refused, not guessed at.
const storeVersion = 1

// stored is the incident file's content. It is written when an incident opens,
// is confirmed or closes, which is rare.
type stored struct {
	Version   int
	Job       string
	Number    uint64
	Open      []collector.Incident
	Closed    []collector.Incident
	Opened    [diagnosis.NumClasses]uint64
	Confirmed [diagnosis.NumClasses]uint64
}

// errForeign is the error of a file that another job's or version's master wrote.
var errForeign = errors.New("not this master's file")

// maxStored bounds the incident file.
const maxStored = 64 << 20

// load fills t from the file; a file that does not exist is an empty one.
func (t *incidents) load(dir *statedir.Dir, now time.Time) error {
	path := dir.Join(incidentFile)
	text, err := dir.ReadFile(incidentFile, maxStored)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("read incidents: %w", err)
	}
	var s stored
	if err := json.Unmarshal(text, &s); err != nil {
		return fmt.Errorf("read incidents from %s: %w", path, err)
	}
	switch {
	case s.Job != t.job:
		return fmt.Errorf("read incidents from %s: %w: it is of job %q; give each job's master a state directory of its own", path, errForeign, s.Job)
	case s.Version != storeVersion:
		return fmt.Errorf("read incidents from %s: %w: it has version %d, this program writes %d; move it away, and what is open is reported anew", path, errForeign, s.Version, storeVersion)
	}
	t.number, t.opened, t.confirmed = s.Number, s.Opened, s.Confirmed
	// The engine starts empty, and needs time to see again what it saw before.
	for _, i := range s.Open[:min(len(s.Open), maxOpen)] {
		o := &openIncident{Incident: i, lastSeen: now.Add(2 * t.closeAfter)}
		if collector.Restarting(i.Notes) {
			o.stopping = now
		}
		t.open = append(t.open, o)
	}
	t.closed = s.Closed[:min(len(s.Closed), collector.MaxIncidents)]
	return nil
}

// encode returns the file's content.
func (t *incidents) encode() ([]byte, error) {
	s := stored{Version: storeVersion, Job: t.job, Number: t.number, Closed: t.closed, Opened: t.opened, Confirmed: t.confirmed}
	for _, i := range t.open {
		s.Open = append(s.Open, i.Incident)
	}
	return json.Marshal(s)
}

// incidentFile is in the state directory.
const incidentFile = "incidents.json"

const (
	saveAgain  = time.Second     // after a failure
	saveAnyway = 5 * time.Second // unchanged, to know that it can be
	saveWithin = 2 * time.Second // at the end
)

// keep saves the incidents when they have changed, until the master stops. It runs beside the
// passes: a disk that hangs or is full must not keep the master from judging.
func (m *Master) keep() {
	defer close(m.kept)
	for failing, stopping := false, false; ; {
		err := m.save()
		if err != nil && !failing {
			m.log.Error("incidents would be reported twice if this master were killed now", "err", err)
		}
		failing = err != nil
		m.saved.Store(&saved{at: m.now(), err: err})
		if stopping {
			return
		}
		again := saveAnyway
		if failing {
			again = saveAgain
		}
		select {
		case <-m.changed:
		case <-time.After(again):
		case <-m.stopping:
			stopping = true
		}
	}
}

// saveSoon has keep save what has changed; it does not wait for that.
func (m *Master) saveSoon() {
	select {
	case m.changed <- struct{}{}:
	default:
	}
}

// saved is how the last attempt to write the state directory ended.
type saved struct {
	at  int64
	err error
}

// hangsAfter is the time without an answer of the disk from which on it hangs.
const hangsAfter = 4 * saveAnyway

// stateError says why the state directory cannot be written now, "" when it can.
func (m *Master) stateError() string {
	w := m.saved.Load()
	switch {
	case m.path == "" || w == nil:
		return ""
	case w.err != nil:
		return w.err.Error()
	case m.now()-w.at > int64(hangsAfter):
		return fmt.Sprintf("save incidents to %s: the disk has not answered for %v", m.path, time.Duration(m.now()-w.at).Round(time.Second))
	}
	return ""
}

// Ready returns an error while the master does not judge, or cannot keep what it found.
func (m *Master) Ready() error {
	s := m.Snapshot()
	if age := time.Since(s.At); age > staleAfter {
		return fmt.Errorf("the last pass was %v ago", age.Round(time.Second))
	}
	if s.StateError != "" {
		return errors.New(s.StateError)
	}
	return nil
}

// save saves the incidents.
func (m *Master) save() error {
	m.mu.Lock()
	text, err := m.incidents.encode()
	m.mu.Unlock()
	if err == nil {
		err = m.replace(text)
	}
	if err != nil {
		return fmt.Errorf("save incidents: %w", err)
	}
	return nil
}
