package slurm

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/lockstep-ccl/lockstep/internal/statedir"
	"github.com/lockstep-ccl/lockstep/remediation"
)

// entry is one action: what it found before it did anything, and how far it is.
type entry struct {
	Action   string    `json:"action"`
	Job      string    `json:"job"`
	ID       string    `json:"id"` // Slurm's
	Began    time.Time `json:"began"`
	Restarts int       `json:"restarts"`        // of the job, when the action was begun: one more is its doing
	Attempt  int       `json:"attempt"`         // that ends
	Nodes    int       `json:"nodes,omitempty"` // that a step of the loop takes
	Reason   string    `json:"reason,omitempty"`
	Culprit  string    `json:"culprit,omitempty"` // node
	Lost     bool      `json:"lost,omitempty"`    // by its agent's silence
	Leave    []string  `json:"leave,omitempty"`   // nodes that the next attempt is to be without
	InPlace  bool      `json:"in_place"`          // inside the allocation; else by requeue
	Go       bool      `json:"go,omitempty"`      // the loop may start the next attempt
	Again    bool      `json:"again,omitempty"`   // the next attempt came up on a node to leave out, and was ended too
	Revived  int       `json:"revived,omitempty"` // requeues of a job that had failed to start
	Released string    `json:"released,omitempty"`
	Notes    []string  `json:"notes,omitempty"`
	Done     bool      `json:"done"`
	At       time.Time `json:"at,omitzero"`
}

func (e *entry) note(format string, args ...any) {
	n := fmt.Sprintf(format, args...)
	if len(e.Notes) < maxNotes && !slices.Contains(e.Notes, n) {
		e.Notes = append(e.Notes, n)
	}
}

func (e *entry) answer() remediation.Answer {
	return remediation.Answer{At: e.At, Detail: strings.Join(e.Notes, "; ")}
}

const (
	journalFile  = "actions.json"
	maxEntries   = 512
	maxNotes     = 16
	maxJournal   = 4 << 20
	keepEntries  = 48 * time.Hour
	journalMajor = 1
)

// journal keeps actions over restarts of the remediator. Safe for concurrent use.
type journal struct {
	dir *statedir.Dir
	mu  sync.Mutex
	all map[string]entry
}

type journalFormat struct {
	Version int     `json:"version"`
	Actions []entry `json:"actions"`
}

func openJournal(path string) (*journal, error) {
	dir, err := statedir.OpenPrivate(path)
	if err != nil {
		return nil, fmt.Errorf("slurm: journal: %w", err)
	}
	j := &journal{dir: dir, all: map[string]entry{}}
	b, err := dir.ReadFile(journalFile, maxJournal)
	if errors.Is(err, os.ErrNotExist) {
		return j, nil
	}
	if err == nil {
		err = j.decode(b)
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("slurm: journal %s: %w (remove it once no action is in flight)", dir.Join(journalFile), err), dir.Close())
	}
	return j, nil
}

func (j *journal) decode(b []byte) error {
	var f journalFormat
	if err := json.Unmarshal(b, &f); err != nil {
		return err
	}
	if f.Version != journalMajor {
		return fmt.Errorf("is of version %d, this program reads %d", f.Version, journalMajor)
	}
	for _, e := range f.Actions {
		if !actionID.MatchString(e.Action) || !number.MatchString(e.ID) || slices.ContainsFunc(e.Leave, func(n string) bool { return !nodeName.MatchString(n) }) {
			return fmt.Errorf("has an entry that cannot be: %.80q", e.Action)
		}
		j.all[e.Action] = e
	}
	return nil
}

func (j *journal) get(action string) (*entry, bool) {
	j.mu.Lock()
	defer j.mu.Unlock()
	e, ok := j.all[action]
	e.Leave, e.Notes = slices.Clone(e.Leave), slices.Clone(e.Notes)
	return &e, ok
}

// put writes an entry to disk before it returns.
func (j *journal) put(e *entry) error {
	j.mu.Lock()
	defer j.mu.Unlock()
	kept := *e
	kept.Leave, kept.Notes = slices.Clone(e.Leave), slices.Clone(e.Notes)
	j.all[e.Action] = kept
	f := journalFormat{Version: journalMajor}
	for id, e := range j.all {
		if e.Done && time.Since(e.Began) > keepEntries {
			delete(j.all, id)
			continue
		}
		f.Actions = append(f.Actions, e)
	}
	slices.SortFunc(f.Actions, func(a, b entry) int { return a.Began.Compare(b.Began) })
	for len(f.Actions) > maxEntries {
		delete(j.all, f.Actions[0].Action)
		f.Actions = f.Actions[1:]
	}
	b, err := json.Marshal(f)
	if err == nil {
		err = j.dir.Replace(journalFile, b)
	}
	if err != nil {
		return fmt.Errorf("slurm: journal: %w", err)
	}
	return nil
}
