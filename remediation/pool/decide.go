package pool

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"
)

// What callers branch on.
var (
	// ErrUnknown says that the pool has no such unit, or knows of no such action.
	ErrUnknown = errors.New("the pool has none such")
	// ErrPlace says that a unit is not where it would have to be.
	ErrPlace = errors.New("the unit is elsewhere")
)

// Each of these changes the state and says what came of it, or returns an error
// and changes nothing. They are pure but for their state.

// sync brings the books in line with what the inventory lists. Names that are new stand
// by, or work where the job needs them; what is not listed any more is struck off, save what
// is out: it stays known, so that a node that is registered anew does not come back clean.
func (s *State) sync(c *Config, now time.Time, listed []string) (changed bool, err error) {
	have := make(map[string]bool, len(listed))
	for _, name := range listed {
		if err := checkName(name); err != nil {
			return false, err
		}
		have[name] = true
	}
	known := 0
	for name := range s.Units {
		if !have[name] {
			known++
		}
	}
	if len(have)+known > MaxUnits {
		return false, fmt.Errorf("pool: %d units, at most %d", len(have)+known, MaxUnits)
	}
	for name, u := range s.Units {
		if !have[name] && !u.Out() {
			delete(s.Units, name)
			changed = true
		}
	}
	for _, name := range listed {
		if s.Units[name] == nil {
			s.Units[name] = &Unit{Name: name, Place: Spare, Since: now}
			changed = true
		}
	}
	return s.fill(c, now) || changed, nil
}

// fill has spares work where units are missing. It serves waits only after those who ask.
func (s *State) fill(c *Config, now time.Time) (changed bool) {
	for n := s.Count(Active) + s.waiting(); n < c.Need; n++ {
		name := s.first(Spare)
		if name == "" {
			return changed
		}
		s.move(name, Active, now, "", "")
		changed = true
	}
	return changed
}

// waiting is how many actions wait for a spare: each will take one when it asks again.
func (s *State) waiting() (n int) {
	for _, a := range s.Actions {
		if a.Kind == Wait {
			n++
		}
	}
	return n
}

// assign says which units the job runs on in truth: those work, the others that are not
// out stand by. The scheduler placed it, and its word is later than the books.
func (s *State) assign(c *Config, now time.Time, used []string) error {
	in := make(map[string]bool, len(used))
	for _, name := range used {
		u := s.Units[name]
		if u == nil {
			return fmt.Errorf("pool: unit %.80q: %w", name, ErrUnknown)
		}
		if u.Out() {
			return fmt.Errorf("pool: the job runs on unit %s, which is out (%s since %s: %s): %w", name, u.Place, u.Since.Format(time.RFC3339), u.Why, ErrPlace)
		}
		in[name] = true
	}
	if len(in) > c.Need {
		return fmt.Errorf("pool: the job runs on %d units, and needs %d: %w", len(in), c.Need, ErrPlace)
	}
	for name, u := range s.Units {
		switch {
		case in[name] && u.Place == Spare:
			s.move(name, Active, now, "", "")
		case !in[name] && u.Place == Active:
			s.move(name, Spare, now, "", "")
		}
	}
	return nil
}

// first is the unit of a place that came there first: the spare that has stood by for longest.
func (s *State) first(p Place) string {
	var best *Unit
	for _, u := range s.Units {
		if u.Place == p && (best == nil || u.Since.Before(best.Since) || u.Since.Equal(best.Since) && u.Name < best.Name) {
			best = u
		}
	}
	if best == nil {
		return ""
	}
	return best.Name
}

func (s *State) move(name string, to Place, now time.Time, action, why string) {
	u := s.Units[name]
	u.Place, u.Since, u.Action, u.Why, u.Until = to, now, action, bounded(why), time.Time{}
}

// take decides on a suspect.
func (s *State) take(c *Config, now time.Time, suspect, action, why string) (Answer, error) {
	if action == "" || len(action) > maxName {
		return Answer{}, fmt.Errorf("pool: an action id of 1 to %d bytes is needed, by which a repeat is known", maxName)
	}
	was := s.Actions[action]
	if was != nil && was.Suspect != suspect {
		return Answer{}, fmt.Errorf("pool: action %s is about unit %s, not %.80q", action, was.Suspect, suspect)
	}
	if was != nil && (was.Final() || !was.Cancelled.IsZero()) {
		return *was, nil
	}
	u := s.Units[suspect]
	if u == nil {
		return Answer{}, fmt.Errorf("pool: unit %.80q: %w", suspect, ErrUnknown)
	}
	a := Answer{Suspect: suspect, At: now}
	waits := was != nil && was.Kind == Wait
	spare := s.first(Spare)
	bound := c.bound(len(s.Units))
	switch {
	case waits && spare == "":
		return *was, nil
	case waits:
		s.move(spare, Active, now, action, "takes the place of "+suspect)
		a.Kind, a.Spare, a.Detail = Swap, spare, fmt.Sprintf("%s takes the place of %s after a wait since %s", spare, suspect, was.At.Format(time.RFC3339))
	case u.Out():
		a.Kind, a.Detail = Already, fmt.Sprintf("%s is out since %s, by action %s: %s", suspect, u.Since.Format(time.RFC3339), u.Action, u.Why)
		if by := s.Actions[u.Action]; by != nil && by.Kind == Swap {
			a.Spare = by.Spare
		}
	case s.Out() >= bound:
		a.Kind, a.Detail = Refused, fmt.Sprintf("%d of %d units are out already (%s), at most %d may be", s.Out(), len(s.Units), s.list(Suspect, Probation), bound)
	case u.Place == Spare:
		s.out(c, now, suspect, action, why)
		a.Kind, a.Detail = Removed, fmt.Sprintf("%s stood by and is out; %d spares are left", suspect, s.Count(Spare))
	case spare != "":
		s.out(c, now, suspect, action, why)
		s.move(spare, Active, now, action, "takes the place of "+suspect)
		a.Kind, a.Spare, a.Detail = Swap, spare, fmt.Sprintf("%s is out, %s takes its place; %d spares are left", suspect, spare, s.Count(Spare))
	case c.Empty == EmptyWait:
		s.out(c, now, suspect, action, why)
		a.Kind, a.Detail = Wait, fmt.Sprintf("%s is out and no spare is left (out: %s): waiting for one", suspect, s.list(Suspect, Probation))
	default:
		a.Kind, a.Detail = InPlace, fmt.Sprintf("no spare is left (out: %s): restarting in place, %s included", s.list(Suspect, Probation), suspect)
	}
	a.Detail = bounded(a.Detail)
	s.keep(action, a)
	return a, nil
}

// out takes a unit out.
func (s *State) out(c *Config, now time.Time, name, action, why string) {
	u := s.Units[name]
	if now.Sub(u.Since) >= c.Forgive {
		u.Strikes = 0
	}
	s.move(name, Suspect, now, action, why)
	s.strike(c, now, u)
}

// strike counts against a unit, and says when it may be checked by itself.
func (s *State) strike(c *Config, now time.Time, u *Unit) {
	u.Strikes++
	if c.Rest > 0 && u.Strikes <= c.MaxStrikes {
		u.Until = now.Add(c.Rest << min(u.Strikes-1, 16))
	}
}

// list names the units of some places, the first few of them.
func (s *State) list(places ...Place) string {
	const most = 8
	var names []string
	for _, p := range places {
		names = append(names, s.In(p)...)
	}
	slices.Sort(names)
	if n := len(names); n > most {
		return strings.Join(names[:most], ", ") + fmt.Sprintf(" and %d more", n-most)
	} else if n == 0 {
		return "none"
	}
	return strings.Join(names, ", ")
}

// keep remembers an answer, and forgets the oldest final ones when there are too many.
func (s *State) keep(action string, a Answer) {
	s.Actions[action] = &a
	if len(s.Actions) <= keepActions {
		return
	}
	var ids []string
	for id, o := range s.Actions {
		if id != action && o.Final() {
			ids = append(ids, id)
		}
	}
	slices.SortFunc(ids, func(x, y string) int { return s.Actions[x].At.Compare(s.Actions[y].At) })
	for _, id := range ids[:min(len(ids), len(s.Actions)-keepActions*3/4)] {
		delete(s.Actions, id)
	}
}

// cancel takes an action back that was never carried out: the suspect works again, its
// spare stands by. It is refused when either has gone on.
func (s *State) cancel(c *Config, now time.Time, action string) error {
	a := s.Actions[action]
	switch {
	case a == nil:
		return fmt.Errorf("pool: action %.80q: %w", action, ErrUnknown)
	case !a.Cancelled.IsZero():
		return nil
	}
	u, spare := s.Units[a.Suspect], s.Units[a.Spare]
	switch a.Kind {
	case Swap, Removed, Wait:
		if u == nil || u.Place != Suspect || u.Action != action {
			return fmt.Errorf("pool: action %s cannot be taken back: %s has gone on since: %w", action, a.Suspect, ErrPlace)
		}
	}
	if a.Kind == Swap && (spare == nil || spare.Place != Active || spare.Action != action) {
		return fmt.Errorf("pool: action %s cannot be taken back: %s has gone on since: %w", action, a.Spare, ErrPlace)
	}
	switch a.Kind {
	case Swap:
		s.move(a.Spare, Spare, now, "", "")
		s.back(now, u, Active)
	case Removed:
		s.back(now, u, Spare)
	case Wait: // others may have come in meanwhile
		a.Kind = Refused
		if s.Count(Active)+s.waiting() < c.Need {
			s.back(now, u, Active)
		} else {
			s.back(now, u, Spare)
		}
	}
	a.Cancelled = now
	return nil
}

func (s *State) back(now time.Time, u *Unit, to Place) {
	u.Strikes = max(0, u.Strikes-1)
	s.move(u.Name, to, now, "", "")
}

// check moves a unit from probation or to it.
func (s *State) check(c *Config, now time.Time, name string, to Place, why string) (changed bool, err error) {
	u := s.Units[name]
	if u == nil {
		return false, fmt.Errorf("pool: unit %.80q: %w", name, ErrUnknown)
	}
	from := Probation
	if to == Probation {
		from = Suspect
	}
	switch {
	case u.Place == to: // a repeat
		return false, nil
	case u.Place != from:
		return false, fmt.Errorf("pool: unit %s is %s, and only one that is %s becomes %s: %w", name, u.Place, from, to, ErrPlace)
	}
	s.move(name, to, now, u.Action, why)
	switch to {
	case Suspect:
		s.strike(c, now, u)
	case Spare:
		u.Action = ""
		s.fill(c, now)
	}
	return true, nil
}

// due lists the suspects that may be checked though nobody says that they were repaired.
func (s *State) due(now time.Time) (names []string) {
	for name, u := range s.Units {
		if u.Place == Suspect && !u.Until.IsZero() && !now.Before(u.Until) {
			names = append(names, name)
		}
	}
	slices.Sort(names)
	return names
}
