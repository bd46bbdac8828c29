package pool

import (
	"encoding/json"
	"errors"
	"fmt"
	"sync"
	"time"
)

// Store keeps a pool's state where it outlives the process. Save replaces it as a
// whole and has reached the disk, or whoever keeps it, when it returns. Load
// returns nil when nothing was saved yet.
type Store interface {
	Load() ([]byte, error)
	Save([]byte) error
}

// Pool is one job's. Safe for concurrent use by one process: two that share a Store must be
// kept apart by it (bbolt's lock, a leader's lease and the resource version).
type Pool struct {
	c     Config
	store Store
	now   func() time.Time

	mu sync.Mutex
	s  *State
}

// Open reads what the store holds. A state that cannot be one is an ErrState: who is out
// is not known then, and a person has to look.
func Open(c Config, store Store) (*Pool, error) { return OpenAt(c, store, time.Now) }

// OpenAt is Open by another clock.
func OpenAt(c Config, store Store, now func() time.Time) (*Pool, error) {
	if err := c.Check(); err != nil {
		return nil, err
	}
	b, err := store.Load()
	if err != nil {
		return nil, fmt.Errorf("pool: read state: %w", err)
	}
	p := &Pool{c: c, store: store, now: now, s: newState()}
	if b != nil {
		if p.s, err = decode(b); err != nil {
			return nil, err
		}
	}
	return p, nil
}

// errUnchanged has change save nothing.
var errUnchanged = errors.New("unchanged")

// change has f change a copy, saves it, and makes it the state.
func (p *Pool) change(f func(s *State, now time.Time) error) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	next := p.s.Clone()
	switch err := f(next, p.now()); {
	case errors.Is(err, errUnchanged):
		return nil
	case err != nil:
		return err
	}
	b, err := json.Marshal(next)
	if err == nil {
		err = p.store.Save(b)
	}
	if err != nil {
		return fmt.Errorf("pool: save state, nothing was changed: %w", err)
	}
	p.s = next
	return nil
}

func changed(did bool, err error) error {
	if err == nil && !did {
		return errUnchanged
	}
	return err
}

// State is a copy of all that is known.
func (p *Pool) State() *State {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.s.Clone()
}

// Units lists the units by name.
func (p *Pool) Units() map[string]Unit {
	p.mu.Lock()
	defer p.mu.Unlock()
	m := make(map[string]Unit, len(p.s.Units))
	for name, u := range p.s.Units {
		m[name] = *u
	}
	return m
}

// Sync takes in the inventory: units that are new stand by, or work where some are missing;
// those not listed any more are struck off, unless they are out.
func (p *Pool) Sync(listed []string) error {
	return p.change(func(s *State, now time.Time) error { return changed(s.sync(&p.c, now, listed)) })
}

// Assign says on which units the job runs in truth: the scheduler has placed it. A unit
// that is out among them is an ErrPlace, and nothing is changed.
func (p *Pool) Assign(used []string) error {
	return p.change(func(s *State, now time.Time) error { return s.assign(&p.c, now, used) })
}

// Take decides what is done about a suspect, and puts that in the books before it answers.
// The same action gets the same answer, save that one that waits, or was refused, is
// looked at again. A Refused answer is no error: nothing is to be done, and Detail says why.
func (p *Pool) Take(suspect, action, why string) (a Answer, err error) {
	err = p.change(func(s *State, now time.Time) error {
		was := s.Actions[action]
		if a, err = s.take(&p.c, now, suspect, action, why); err == nil && was != nil && *was == a {
			return errUnchanged
		}
		return err
	})
	return a, err
}

// Cancel takes an action back that was not carried out and never will be: the suspect is
// where it was, its spare stands by. It is an ErrPlace when either has gone on since.
func (p *Pool) Cancel(action string) error {
	return p.change(func(s *State, now time.Time) error {
		if a := s.Actions[action]; a != nil && !a.Cancelled.IsZero() {
			return errUnchanged
		}
		return s.cancel(&p.c, now, action)
	})
}

// Return says that a suspect was repaired: it is on probation, and a preflight check of it
// is due. Said again, it changes nothing.
func (p *Pool) Return(unit, why string) error { return p.check(unit, Probation, why) }

// Passed says that a unit on probation has passed its check: it stands by, or works where
// one is missing.
func (p *Pool) Passed(unit, how string) error {
	return p.change(func(s *State, now time.Time) error {
		if u := s.Units[unit]; u != nil && u.Place == Active {
			return errUnchanged // it passed, and had to work at once
		}
		return changed(s.check(&p.c, now, unit, Spare, how))
	})
}

// Failed says that it has not: it is a suspect again.
func (p *Pool) Failed(unit, why string) error { return p.check(unit, Suspect, why) }

// Forget strikes a unit off that is out and will not come back. If the inventory lists it
// again, it is a new one.
func (p *Pool) Forget(unit string) error {
	return p.change(func(s *State, _ time.Time) error {
		switch u := s.Units[unit]; {
		case u == nil:
			return errUnchanged
		case !u.Out():
			return fmt.Errorf("pool: unit %s is %s, and only one that is out can be forgotten: %w", unit, u.Place, ErrPlace)
		}
		delete(s.Units, unit)
		return nil
	})
}

func (p *Pool) check(unit string, to Place, why string) error {
	return p.change(func(s *State, now time.Time) error { return changed(s.check(&p.c, now, unit, to, why)) })
}

// Probation lists the units that a preflight check is due of: those that were returned, and
// the suspects that have rested for long enough, which are on probation from now on.
func (p *Pool) Probation() (units []string, err error) {
	err = p.change(func(s *State, now time.Time) error {
		did := false
		for _, name := range s.due(now) {
			if _, err := s.check(&p.c, now, name, Probation, "has rested since "+s.Units[name].Since.Format(time.RFC3339)); err != nil {
				return err
			}
			did = true
		}
		units = s.In(Probation)
		return changed(did, nil)
	})
	return units, err
}
