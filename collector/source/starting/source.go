package starting

import (
	"bytes"
	"cmp"
	"encoding/hex"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/lockstep-ccl/lockstep/collector/source"
	"github.com/lockstep-ccl/lockstep/diagnosis"
	"github.com/lockstep-ccl/lockstep/record"
)

const (
	// stuckAfter is how long a look at all processes may take before that is an error.
	stuckAfter = 10 * time.Second
	// closeWithin is how long Close waits for one.
	closeWithin = 5 * time.Second
	// pollSpan is the time over which the shares of CPU are taken by which one polls.
	pollSpan = int64(5e9)
	// pollShare is the least share of a core that such a process gets, on a crowded machine too.
	pollShare = 0.1
	// pollWakes is how often a second a process at least wakes from its sleeps that asks again and
	// again: torch's store does at each tenth of a second and more often, a program that waits for its own is slower.
	pollWakes = 4
	// userHz is how many clock ticks a second has in /proc.
	userHz = 100
)

// Options of a Source. Zero fields take the defaults.
type Options struct {
	Dir     string            // of the flight recorders: ranks with another one are another agent's; record.DefaultDir()
	Node    string            // this node
	OwnNode bool              // ranks whose environment names another node are another agent's
	Users   map[string]uint32 // of jobs, where it is known
	Max     int               // ranks at a time; 256
	Keep    time.Duration     // how long one that has ended stays in the view; 10 min
	Period  time.Duration     // between two looks at all processes; 2 s
	Settle  time.Duration     // how old a process must be, for what ends sooner is nobody's business; 2 s
	Proc    string            // "/proc"
}

// Source finds ranks without a recorder. It is for one goroutine.
type Source struct {
	o       Options
	boot    [16]byte
	scanner *scanner
	results chan result // of the scan under way
	looking bool        // one is
	began   int64       // when the last one did
	err     error       // of the last one that ended
	entries map[key]*entry
	order   []*entry
}

type result struct {
	found []sighting
	err   error
}

// key is a place in a job.
type key struct {
	job  string
	rank int32
}

// entry is a rank that is expected to make a recorder.
type entry struct {
	source.Process
	uid     uint32
	covered bool // it has made one
	seen    bool // by the last scan
	dead    int64
	then    use // some seconds ago
	waits   wait
}

// use is what a process has used until a moment, in clock ticks, and how often its first
// thread has slept until then.
type use struct {
	at        int64
	user, sys uint64
	sleeps    uint64
}

// New returns a source. It looks at nothing before its first Update.
func New(o Options) *Source {
	o.Dir = filepath.Clean(cmp.Or(o.Dir, record.DefaultDir()))
	o.Proc = cmp.Or(o.Proc, "/proc")
	if o.Max <= 0 {
		o.Max = 256
	}
	if o.Keep <= 0 {
		o.Keep = 10 * time.Minute
	}
	if o.Settle <= 0 {
		o.Settle = 2 * time.Second
	}
	if o.Period <= 0 {
		o.Period = 2 * time.Second
	}
	s := &Source{
		o: o, results: make(chan result, 1), entries: map[key]*entry{},
		scanner: &scanner{proc: o.Proc, dir: o.Dir, known: map[int]candidate{}},
	}
	if o.OwnNode {
		s.scanner.node = o.Node
	}
	text, _ := os.ReadFile(filepath.Join(o.Proc, "sys/kernel/random/boot_id")) // agents do not start without it
	_, _ = hex.Decode(s.boot[:], bytes.ReplaceAll(bytes.TrimSpace(text[:min(len(text), 36)]), []byte("-"), nil))
	return s
}

// Close waits, a moment at most, for the look that is under way.
func (s *Source) Close() error {
	if !s.looking {
		return nil
	}
	select {
	case <-s.results:
		s.looking = false
		return nil
	case <-time.After(closeWithin):
		return fmt.Errorf("a look at the processes of this node does not end")
	}
}

// Update implements source.Source.
func (s *Source) Update(v *source.View) error {
	if s.looking {
		select {
		case r := <-s.results:
			s.looking = false
			if s.err = r.err; r.err == nil {
				s.take(r.found, v)
			}
		default:
			if v.Now-s.began > stuckAfter.Nanoseconds() {
				s.err = fmt.Errorf("a look at the processes of this node takes more than %v: ranks that start are not seen", stuckAfter)
			}
		}
	}
	if !s.looking && (s.began == 0 || v.Now-s.began >= s.o.Period.Nanoseconds()) {
		s.looking, s.began = true, v.Now
		go func() {
			found, err := s.scanner.scan()
			s.results <- result{found, err} // has room
		}()
	}
	s.show(v)
	return s.err
}

// take brings the entries up to date with a scan.
func (s *Source) take(found []sighting, v *source.View) {
	owners := s.owners(v)
	slices.SortFunc(found, func(a, b sighting) int { return cmp.Or(cmp.Compare(a.start, b.start), cmp.Compare(a.pid, b.pid)) })
	for _, e := range s.entries {
		e.seen = slices.ContainsFunc(found, func(x sighting) bool { return e.of(&x) })
	}
	for i := range found {
		x := &found[i]
		k := key{x.id.Job, x.id.Rank}
		e := s.entries[k]
		switch {
		case e != nil && e.of(x):
			e.look(x, v.Now)
			continue
		case e != nil && e.seen && x.id.Attempt <= e.Attempt: // another process of the same rank
			continue
		case e == nil && len(s.entries) >= s.o.Max:
			continue
		}
		if owner, ok := owners[k.job]; ok && owner != x.uid {
			continue // the job is another user's
		}
		age := sinceBoot() - int64(x.start)*int64(time.Second)/userHz
		if age < s.o.Settle.Nanoseconds() {
			continue
		}
		owners[k.job] = x.uid
		s.drop(k)
		s.add(k, x, v.Now, age)
	}
	for k, e := range s.entries {
		if owner, ok := owners[k.job]; e.covered && !e.seen || ok && owner != e.uid {
			s.drop(k)
		}
	}
}

// owners are whose jobs are: as this agent was told, else whose the processes with recorders
// are, else whose those that this source has found first.
func (s *Source) owners(v *source.View) map[string]uint32 {
	owners := map[string]uint32{}
	for _, e := range s.order {
		if !e.Dead() {
			owners[e.Job] = e.uid
		}
	}
	for _, p := range v.Processes {
		var st syscall.Stat_t
		if p.Path != "" && p.HostPID > 0 && !p.Dead() && syscall.Stat(fmt.Sprintf("%s/%d", s.o.Proc, p.HostPID), &st) == nil {
			owners[p.Job] = st.Uid
		}
	}
	for job, uid := range s.o.Users {
		owners[job] = uid
	}
	return owners
}

func (s *Source) add(k key, x *sighting, now, age int64) {
	created := time.Now().Add(-time.Duration(age))
	e := &entry{uid: x.uid, seen: true}
	e.Header = record.Header{
		Identity: *x.id, Version: record.LayoutVersion, BootID: s.boot, PID: int32(x.pid), StartTime: x.start, Created: created,
		Closed: true, // there is nothing that it could have left open
		Anchor: record.Anchor{Mono: now - age, Real: created.UnixNano()},
	}
	if e.Node == "" {
		e.Node = s.o.Node
	}
	e.Starting = true
	e.look(x, now)
	s.entries[k] = e
	s.order = append(s.order, e)
}

func (s *Source) drop(k key) {
	if e := s.entries[k]; e != nil {
		delete(s.entries, k)
		s.order = slices.DeleteFunc(s.order, func(o *entry) bool { return o == e })
	}
}

// of reports whether an entry is of this process.
func (e *entry) of(x *sighting) bool {
	return int(e.PID) == x.pid && e.StartTime == x.start && e.Identity.Job == x.id.Job && e.Rank == x.id.Rank && e.Attempt == x.id.Attempt
}

// look takes in what a process does. One that uses CPU all the time, and most of it in the
// kernel, asks that for something again and again. So does one that sleeps for a moment again
// and again: torch's rank 0, which looks whether all have come to its store.
func (e *entry) look(x *sighting, now int64) {
	if e.then.at == 0 {
		e.then = use{now, x.user, x.sys, x.sleeps}
	}
	e.waits = x.waits
	d := use{now - e.then.at, x.user - e.then.user, x.sys - e.then.sys, x.sleeps - e.then.sleeps}
	if d.at < pollSpan {
		if e.WaitsIn == diagnosis.WaitInPolling {
			e.waits = diagnosis.WaitInPolling
		}
	} else {
		span := float64(d.at) / 1e9
		busy := float64(d.user+d.sys)/userHz >= pollShare*span
		switch {
		case busy && 2*d.sys >= d.user+d.sys:
			e.waits = diagnosis.WaitInPolling
		case !busy && float64(d.sleeps) >= pollWakes*span && (x.waits == diagnosis.WaitInSleep || x.waits == diagnosis.WaitInUnknown):
			e.waits = diagnosis.WaitInPolling
		}
		e.then = use{now, x.user, x.sys, x.sleeps}
	}
	e.WaitsIn = e.waits
}

// show puts the ranks without a recorder in the view.
func (s *Source) show(v *source.View) {
	if len(s.order) == 0 {
		return
	}
	of := make(map[key][]*source.Process, len(s.order))
	for _, p := range v.Processes {
		k := key{p.Job, p.Rank}
		if p.Starting = false; s.entries[k] != nil {
			of[k] = append(of[k], p)
		}
	}
	for _, e := range slices.Clone(s.order) {
		k := key{e.Job, e.Rank}
		if !e.Dead() {
			e.dead = 0
		} else if e.dead == 0 {
			e.dead = v.Now
		}
		if e.dead > 0 && v.Now-e.dead > s.o.Keep.Nanoseconds() {
			s.drop(k)
			continue
		}
		marked := false
		for _, p := range of[k] {
			switch {
			case p.HostPID != e.PID && p.PID != e.PID && (p.Attempt < e.Attempt || p.Attempt == e.Attempt && p.StartTime < e.StartTime):
				p.Superseded = true // its rank has begun anew
			case p.MarksOnly():
				marked = true // by its program, which has made no communicator
				p.Starting, p.WaitsIn = !e.covered, e.WaitsIn
			default:
				e.covered = true
			}
		}
		if !e.covered && !marked {
			v.Processes = append(v.Processes, &e.Process)
		}
	}
}

// sinceBoot is the time since boot, by which the kernel says when processes started.
func sinceBoot() int64 {
	var t unix.Timespec
	if unix.ClockGettime(unix.CLOCK_BOOTTIME, &t) != nil {
		return record.Now()
	}
	return t.Nano()
}
