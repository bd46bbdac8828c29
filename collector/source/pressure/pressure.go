// Package pressure is the source that tells whether a rank is short of CPU or memory, so that a
// slow network is not taken for what is a starved process, and the other way round.
//
//   - Starved: of /proc/PID/task/TID/schedstat (Documentation/scheduler/sched-stats.rst), the
//     time in which the busiest thread was runnable and did not run.
//   - Throttled: of cpu.stat of the process's cgroup and of those above it that have a quota
//     (cgroup v2; v1 likewise), the time in which that held it back.
//   - Memory pressure: memory.pressure of its cgroup; the node's pressures: /proc/pressure
//     (Documentation/accounting/psi.rst), the share of ten seconds in which some task waited.
//
// It looks twice a second, at few threads of a process: all of them, up to a bound, are only
// counted every other second, to know which are busy. Where the kernel has none of this, there
// is nothing to see, and where it has a part, the source says what is missing.
//
// A look happens in a goroutine of its own: one that hangs costs the agent its news only.
package pressure

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/lockstep-ccl/lockstep/collector/source"
)

const (
	// every is the time between two looks, ns.
	every = int64(500 * time.Millisecond)
	// window is the number of intervals between looks that a share is of.
	window = 2
	// surveyEvery is the time between two surveys of a process: which of its threads are
	// busy, and what its cgroups are, ns.
	surveyEvery = int64(2 * time.Second)
	// stuckAfter is when a look counts as hanging.
	stuckAfter = time.Second
)

// Source looks at processes and their cgroups. It is for one goroutine.
type Source struct {
	proc    string
	cgroups hierarchy
	sched   bool // the kernel has schedstat
	watched map[*source.Process]*watch

	looking chan *look // nil: no look is under way. It has one element
	began   time.Time
	at      int64 // of the last look's begin, ns

	noPSI   error
	outside bool // there are processes whose cgroups are not shown here
}

// watch is what is kept of a process. It is the look's while one is under way.
type watch struct {
	threads  threads
	groups   groups
	surveyed int64
}

// shares is what is said of a process.
type shares struct {
	starved, throttled, memory float32
}

// look is one look and what it has seen.
type look struct {
	now         int64
	targets     []*source.Process
	pids        []int
	watches     []*watch
	seen        []shares
	cpu, memory float32 // the node's
	noPSI       error
	outside     bool
}

// New returns a source on the given proc file system, normally "/proc", and the directory of
// cgroup file systems, normally "/sys/fs/cgroup". In a container, which sees its own cgroup
// there, it looks for the host's.
func New(proc, cgroup string) *Source {
	s := &Source{proc: proc, cgroups: findHierarchy(proc, cgroup, hostCgroups(proc)...), watched: map[*source.Process]*watch{}}
	_, err := os.ReadFile(filepath.Join(proc, "self", "schedstat"))
	s.sched = err == nil
	return s
}

// Close waits for a look that is under way, though not for one that hangs.
func (s *Source) Close() error {
	if s.looking != nil {
		select {
		case <-s.looking:
		case <-time.After(stuckAfter):
		}
	}
	s.looking = nil
	return nil
}

// Update implements source.Source. The error is a source.ErrNoData or source.ErrPartly where the
// kernel does not tell.
func (s *Source) Update(v *source.View) error {
	if s.looking != nil {
		select {
		case l := <-s.looking:
			s.looking = nil
			s.apply(v, l)
		default:
			if time.Since(s.began) > stuckAfter {
				s.apply(v, &look{}) // what is known is old
				return fmt.Errorf("a look at processes and cgroups has been hanging for %v", time.Since(s.began).Round(time.Second))
			}
		}
	}
	if s.looking == nil && (s.at == 0 || v.Now-s.at >= every) {
		s.start(v)
	}
	return s.missing()
}

// start begins a look at the processes that live and are shown here.
func (s *Source) start(v *source.View) {
	l := &look{now: v.Now}
	here := make(map[*source.Process]bool, len(v.Processes))
	for _, p := range v.Processes {
		if p.Dead() || p.HostPID == 0 {
			continue
		}
		here[p] = true
		w := s.watched[p]
		if w == nil {
			w = &watch{}
			s.watched[p] = w
		}
		l.targets, l.pids, l.watches = append(l.targets, p), append(l.pids, int(p.HostPID)), append(l.watches, w)
	}
	for p := range s.watched {
		if !here[p] {
			delete(s.watched, p)
		}
	}
	s.at, s.began, s.looking = v.Now, time.Now(), make(chan *look, 1)
	go s.look(l, s.looking)
}

// look sees what there is to see. Of the source it reads what does not change.
func (s *Source) look(l *look, done chan<- *look) {
	l.cpu, l.noPSI = some(filepath.Join(s.proc, "pressure", "cpu"))
	if l.noPSI == nil {
		l.memory, l.noPSI = some(filepath.Join(s.proc, "pressure", "memory"))
	}
	c := newCache()
	l.seen = make([]shares, len(l.pids))
	for i, pid := range l.pids {
		w := l.watches[i]
		dir := filepath.Join(s.proc, fmt.Sprint(pid))
		if w.surveyed == 0 || l.now-w.surveyed >= surveyEvery {
			w.surveyed = l.now
			if s.sched {
				w.threads.survey(dir)
			}
			w.groups.survey(s.cgroups, dir)
		}
		l.outside = l.outside || w.groups.outside
		l.seen[i] = shares{w.threads.starved(dir, l.now), w.groups.throttled(c, l.now), w.groups.memory(c)}
	}
	done <- l
}

// apply takes in what was seen; of processes that were not looked at there is nothing to say.
func (s *Source) apply(v *source.View, l *look) {
	v.CPUPressure, v.MemoryPressure, s.noPSI, s.outside = l.cpu, l.memory, l.noPSI, l.outside
	seen := make(map[*source.Process]shares, len(l.targets))
	for i, p := range l.targets {
		seen[p] = l.seen[i]
	}
	for _, p := range v.Processes {
		x := seen[p]
		if p.Dead() {
			x = shares{}
		}
		p.Starved, p.Throttled, p.MemoryPressure = x.starved, x.throttled, x.memory
	}
}

// missing says what this node does not show.
func (s *Source) missing() error {
	var what []string
	if !s.sched {
		what = append(what, "no schedstat (CONFIG_SCHED_INFO): a starved thread is not seen")
	}
	if s.cgroups.none() {
		what = append(what, "no cgroups with a CPU controller: a quota is not seen")
	}
	if s.noPSI != nil {
		what = append(what, fmt.Sprintf("no pressure stall information (CONFIG_PSI, and psi=1 on the kernel's command line): %v", s.noPSI))
	}
	nothing := len(what) == 3
	if s.outside {
		what = append(what, "ranks' cgroups are not shown here: mount the host's /sys/fs/cgroup at /host/sys/fs/cgroup")
	}
	switch {
	case len(what) == 0:
		return nil
	case nothing:
		return fmt.Errorf("%w: %s", source.ErrNoData, strings.Join(what, "; "))
	}
	return fmt.Errorf("%w: %s", source.ErrPartly, strings.Join(what, "; "))
}

// errNone is of a file that says nothing of what is sought.
var errNone = errors.New("not as the kernel writes it")
