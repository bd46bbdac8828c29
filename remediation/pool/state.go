package pool

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"
	"time"
)

// Place is where a unit stands. A unit is in one place at a time.
type Place string

const (
	Active    Place = "active"    // the job runs on it, or is to
	Spare     Place = "spare"     // stands by, and is as good as any other
	Suspect   Place = "suspect"   // out, until somebody says that it was repaired
	Probation Place = "probation" // out, until a preflight check says that it is good
)

// Unit is what is known of one.
type Unit struct {
	Name  string `json:"name"`
	Place Place  `json:"place"`
	// Since is when it came to its place.
	Since time.Time `json:"since"`
	// Action is the id of the action that put it there, "" when none did; Why is for people.
	Action string `json:"action,omitempty"`
	Why    string `json:"why,omitempty"`
	// Until is when a suspect may be checked without anybody saying that it was repaired; zero: never.
	Until time.Time `json:"until,omitzero"`
	// Strikes is how often it was taken out, or failed its check, since it last worked for Config.Forgive.
	Strikes int `json:"strikes,omitempty"`
}

// Out reports whether nobody may use the unit.
func (u *Unit) Out() bool { return u.Place == Suspect || u.Place == Probation }

// Kind is what a decision comes to.
type Kind string

const (
	Swap    Kind = "swap"     // the suspect is out, Spare is in its place
	Removed Kind = "removed"  // the suspect is out, and needs no replacement: it was a spare
	Already Kind = "already"  // it was out before; Spare has its place, if one had to take it
	InPlace Kind = "in_place" // no spare is left: restart on what there is, the suspect included
	Wait    Kind = "wait"     // no spare is left: the suspect is out, ask again when there is one
	Refused Kind = "refused"  // too much would be out: nothing was changed
)

// Answer is what a Take came to. It is kept by its action's id.
type Answer struct {
	Kind    Kind      `json:"kind"`
	Suspect string    `json:"suspect"`
	Spare   string    `json:"spare,omitempty"`
	At      time.Time `json:"at"`
	Detail  string    `json:"detail"`
	// Cancelled is when the action was taken back; zero when it stands.
	Cancelled time.Time `json:"cancelled,omitzero"`
}

// Final reports whether asking again changes nothing. A wait ends when a spare comes, a
// refusal when less is out.
func (a *Answer) Final() bool { return a.Kind != Wait && a.Kind != Refused }

// Empty is what is done when no spare is left.
type Empty string

const (
	EmptyInPlace Empty = "in_place" // restart on what there is
	EmptyWait    Empty = "wait"     // take the suspect out all the same, and wait for a spare
)

// Config of a pool. Zero fields take the defaults.
type Config struct {
	// Need is how many units the job runs on.
	Need int `yaml:"need" json:"need"`
	// MaxOut and MaxOutShare (0–1] bound how many units may be out at a time: a number, and a
	// share of all, which never rounds below one. The smaller one counts. Defaults: no number, 0.1.
	MaxOut      int     `yaml:"max_out" json:"max_out,omitempty"`
	MaxOutShare float64 `yaml:"max_out_share" json:"max_out_share,omitempty"`
	// Empty is what is done when no spare is left: in_place.
	Empty Empty `yaml:"when_empty" json:"when_empty,omitempty"`
	// Rest is after what time a suspect may be checked though nobody says that it was
	// repaired; doubled with each strike. 0: never.
	Rest time.Duration `yaml:"rest" json:"rest,omitempty"`
	// MaxStrikes is how many a unit may have and still be checked by itself: 3.
	MaxStrikes int `yaml:"max_strikes" json:"max_strikes,omitempty"`
	// Forgive is how long a unit must have worked for its strikes to be forgotten: 7 days.
	Forgive time.Duration `yaml:"forgive" json:"forgive,omitempty"`
}

// Check completes c and returns an error that names the first field that cannot be used.
func (c *Config) Check() error {
	if c.MaxOutShare == 0 {
		c.MaxOutShare = 0.1
	}
	if c.Empty == "" {
		c.Empty = EmptyInPlace
	}
	if c.MaxStrikes == 0 {
		c.MaxStrikes = 3
	}
	if c.Forgive == 0 {
		c.Forgive = 7 * 24 * time.Hour
	}
	switch {
	case c.Need < 1 || c.Need > MaxUnits:
		return fmt.Errorf("pool: need: %d units, want 1 to %d", c.Need, MaxUnits)
	case c.MaxOut < 0:
		return fmt.Errorf("pool: max_out: %d, want at least 0 (0: no bound by number)", c.MaxOut)
	case !(c.MaxOutShare > 0 && c.MaxOutShare <= 1):
		return fmt.Errorf("pool: max_out_share: %v, want above 0 and at most 1", c.MaxOutShare)
	case c.Empty != EmptyInPlace && c.Empty != EmptyWait:
		return fmt.Errorf("pool: when_empty: %q is not one of in_place, wait", c.Empty)
	case c.Rest < 0 || c.Forgive < 0 || c.MaxStrikes < 0:
		return errors.New("pool: rest, forgive and max_strikes must not be negative")
	}
	return nil
}

// bound is how many of so many units may be out.
func (c *Config) bound(total int) int {
	n := int(math.Floor(c.MaxOutShare * float64(total)))
	if n < 1 && total > 1 {
		n = 1
	}
	if c.MaxOut > 0 {
		n = min(n, c.MaxOut)
	}
	return n
}

// MaxUnits bounds a pool's units; keepActions its answers, of which the oldest final ones go.
const (
	MaxUnits    = 1 << 16
	keepActions = 4096
	maxName     = 253 // a Kubernetes node's
	maxText     = 512
)

// State is all that a pool knows. It is a value: Clone it before it is changed.
type State struct {
	Version int                `json:"version"`
	Units   map[string]*Unit   `json:"units"`
	Actions map[string]*Answer `json:"actions"`
}

const stateVersion = 1

func newState() *State {
	return &State{Version: stateVersion, Units: map[string]*Unit{}, Actions: map[string]*Answer{}}
}

// Clone returns a copy that shares nothing.
func (s *State) Clone() *State {
	c := &State{Version: s.Version, Units: make(map[string]*Unit, len(s.Units)), Actions: make(map[string]*Answer, len(s.Actions))}
	for k, u := range s.Units {
		v := *u
		c.Units[k] = &v
	}
	for k, a := range s.Actions {
		v := *a
		c.Actions[k] = &v
	}
	return c
}

// In lists the names of the units in a place, sorted.
func (s *State) In(p Place) (names []string) {
	for name, u := range s.Units {
		if u.Place == p {
			names = append(names, name)
		}
	}
	slices.Sort(names)
	return names
}

// Count is how many units are in a place.
func (s *State) Count(p Place) (n int) {
	for _, u := range s.Units {
		if u.Place == p {
			n++
		}
	}
	return n
}

// Out is how many units nobody may use.
func (s *State) Out() int { return s.Count(Suspect) + s.Count(Probation) }

// ErrState says that a saved state cannot be one.
var ErrState = errors.New("pool: damaged state")

// Check returns an error unless the state can be a pool's.
func (s *State) Check() error {
	bad := func(format string, args ...any) error {
		return fmt.Errorf("%w: %s", ErrState, fmt.Sprintf(format, args...))
	}
	if s.Version != stateVersion {
		return bad("version %d, this program writes %d", s.Version, stateVersion)
	}
	if len(s.Units) > MaxUnits {
		return bad("%d units", len(s.Units))
	}
	for name, u := range s.Units {
		if u == nil || u.Name != name || checkName(name) != nil || u.Strikes < 0 {
			return bad("unit %.80q", name)
		}
		if !slices.Contains([]Place{Active, Spare, Suspect, Probation}, u.Place) {
			return bad("unit %s is in place %.20q", name, u.Place)
		}
	}
	for id, a := range s.Actions {
		if id == "" || a == nil || !slices.Contains([]Kind{Swap, Removed, Already, InPlace, Wait, Refused}, a.Kind) {
			return bad("action %.80q", id)
		}
	}
	return nil
}

// decode reads a saved state.
func decode(b []byte) (*State, error) {
	s := newState()
	s.Version = 0
	d := json.NewDecoder(bytes.NewReader(b))
	if err := d.Decode(s); err != nil {
		return nil, fmt.Errorf("%w: %w", ErrState, err)
	}
	if d.More() {
		return nil, fmt.Errorf("%w: something follows it", ErrState)
	}
	if s.Units == nil || s.Actions == nil {
		return nil, fmt.Errorf("%w: no units, or no actions", ErrState)
	}
	return s, s.Check()
}

func checkName(name string) error {
	if name == "" || len(name) > maxName || strings.ContainsAny(name, "\x00\n") {
		return fmt.Errorf("pool: unit %.80q: want a name of 1 to %d bytes on one line", name, maxName)
	}
	return nil
}

// bounded cuts text for people to what is kept.
func bounded(s string) string {
	if len(s) > maxText {
		s = strings.ToValidUTF8(s[:maxText], "")
	}
	return s
}
