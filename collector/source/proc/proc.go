// Package proc is the source that looks at each process in /proc: whether it
// exists, runs, is stopped or in uninterruptible sleep, how much of a core it
// uses and whether it reads or writes storage. What an idle one's children use counts
// as its own: it waits for them, as for a data loader's workers.
//
// A process is known by boot, pid and start time, so one that took over a dead
// rank's pid is not mistaken for it. One in a container has a pid of its own there,
// under which it is looked for when this /proc has none such. A process that it
// never had need not be gone: it may just not be shown. That it keeps anchoring its
// recorder's clock tells.
//
// Reads happen in a goroutine of their own: one that hangs costs the agent the
// news of that process, and nothing else.
package proc

import (
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"strconv"
	"strings"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/prometheus/procfs"

	"github.com/lockstep-ccl/lockstep/collector/source"
	"github.com/lockstep-ccl/lockstep/diagnosis"
)

const (
	// within is how long a pass waits for its reads, which take microseconds;
	// when they take longer, a later pass gets the news.
	within = 20 * time.Millisecond
	// stuckAfter gives a read up, and leaves its goroutine to it.
	stuckAfter = time.Second
	// maxStuck bounds the goroutines left behind; with that many, the source gives up.
	maxStuck = 4
	// endWithin is how long the other threads of a process that has ended may take, ns.
	endWithin = int64(500 * time.Millisecond)
	// userHz is the unit of CPU time in /proc/PID/stat, the same on every Linux.
	userHz = 100
	// samples is the number of passes that a rate is taken over.
	samples = 10
	// idleShare of a core is so little that threads are looked at one by one: the one
	// in uninterruptible sleep need not be the first, which is all that PID/stat tells of.
	idleShare = 0.02
	// maxThreads bounds that look.
	maxThreads = 512
	// childrenEvery is the time between two looks at an idle process's children, ns;
	// maxChildren bounds one.
	childrenEvery = int64(500 * time.Millisecond)
	maxChildren   = 256
	// searchEvery is the least time between two searches of all of /proc for one process, ns.
	searchEvery = int64(time.Second)
	// silent is the age, ns, at which a recorder's anchor is nobody's any more. A living process makes one every
	// 10 s while it has a communicator, but it may wait for the first one, or be frozen.
	silent = int64(5 * time.Minute)
	// initNamespace is the first PID namespace's, whose /proc shows all processes (PROC_PID_INIT_INO).
	initNamespace = "pid:[4026531836]"
)

// Source reads /proc. It is for one goroutine.
type Source struct {
	within  time.Duration
	root    string
	fs      procfs.FS
	local   bool // fs is this machine's own
	all     bool // and shows the processes of all containers
	boot    string
	watched map[*source.Process]*watch
	flight  *flight
	stuck   []*flight
	deaths  *deaths // nil: they are known to a pass
	unheld  error   // why there are processes whose are
}

// watch is what is kept of a process from pass to pass.
type watch struct {
	pid      int   // as this /proc has it
	met      bool  // the process was there once
	searched int64 // when it was last looked for under other pids, ns; 0: it was not
	doubt    error // of that search
	anchor   int64 // its recorder's last anchor when it was not found, ns; 0: it was not looked for
	ring     [samples]sample
	n        int
	children sample // of its children, while it is idle; at is 0 when they were not looked at
	cpu      float32
	io       bool         // these two: what they used between the last two looks
	asleep   map[int]bool // threads in uninterruptible sleep at the last sample
	appended uint64       // records appended when the process was found gone
	missed   bool         // the last pass did not find it
	revived  int          // passes since in which there were more
	foreign  bool         // it lives though /proc knows nothing of it: another pid namespace's
	hangs    bool         // a read of it does not return
	life     *lifeline    // nil: its death is noticed by a pass
	tried    bool         // to take hold of it
	ending   int64        // since when its first thread was seen to have ended, ns
}

type sample struct {
	at int64
	use
}

// use is what has been used since a process began.
type use struct {
	ticks uint
	bytes uint64
}

// target is a process to look at; sight what was seen.
type target struct {
	p      *source.Process
	pid    int
	inner  int // its own pid where it is
	path   string
	start  uint64
	idle   bool
	family bool // look at its children, too
	search bool // under other pids, when it is not found
	hold   bool // take hold of it
}

type sight struct {
	target
	state  diagnosis.ProcState // ProcGone, too, when it left in good order
	absent bool                // there is no such process under the target's pid
	doubt  bool                // err is that it may be one of several
	asleep []int
	use
	children *use // nil when they were not looked at
	life     *lifeline
	unheld   error // why there is none
	err      error
}

// flight is one pass's reads.
type flight struct {
	began   time.Time
	targets []target
	at      atomic.Int32    // index of the target being read
	seen    chan []sight    // capacity 1
	hung    *source.Process // whose read made this flight be given up
}

// New returns a source on the given proc file system, normally "/proc".
func New(root string) (*Source, error) {
	f, err := procfs.NewFS(root)
	if err != nil {
		return nil, fmt.Errorf("proc source: %w", err)
	}
	boot, err := os.ReadFile(root + "/sys/kernel/random/boot_id")
	if err != nil {
		return nil, fmt.Errorf("proc source: boot id: %w", err)
	}
	namespace, _ := os.Readlink(root + "/self/ns/pid")
	_, hidden := os.ReadFile(root + "/1/stat") // by hidepid
	return &Source{
		root: root, fs: f, local: root == procfs.DefaultMountPoint,
		all:     namespace == initNamespace && hidden == nil,
		boot:    strings.ReplaceAll(strings.TrimSpace(string(boot)), "-", ""),
		watched: map[*source.Process]*watch{},
		within:  within,
	}, nil
}

// Update implements source.Source.
func (s *Source) Update(v *source.View) error {
	s.track(v)
	errs := []error{s.giveUp(v.Now)}
	defer s.exits(v)
	if s.flight == nil {
		s.open()
		f := &flight{began: time.Now(), seen: make(chan []sight, 1)}
		for _, p := range v.Processes {
			w := s.watched[p]
			if w.foreign && !p.Dead() && (p.Closed || v.Now-p.Anchor.Mono >= silent) {
				s.set(p, gone(p), v.Now)
			}
			if w.foreign || w.hangs || p.Dead() && p.Appended <= w.appended {
				continue
			}
			search := !w.met && !w.missed
			if search && w.searched != 0 && v.Now-w.searched < searchEvery {
				errs = append(errs, w.doubt)
				continue
			}
			idle := w.idle()
			f.targets = append(f.targets, target{p, w.pid, int(p.PID), p.Path, p.StartTime, idle, idle && v.Now-w.children.at >= childrenEvery, search, s.deaths != nil && !w.tried})
		}
		if len(f.targets) == 0 {
			return s.result(errs)
		}
		s.flight = f
		go s.look(f)
	}
	wait := time.NewTimer(s.within)
	defer wait.Stop()
	select {
	case seen := <-s.flight.seen:
		s.flight = nil
		for i := range seen {
			errs = append(errs, s.apply(&seen[i], v.Now))
		}
	case <-wait.C:
		// A later pass takes the result, or gives up.
	}
	return s.result(errs)
}

// track keeps watched and the view's processes the same set.
func (s *Source) track(v *source.View) {
	here := make(map[*source.Process]bool, len(v.Processes))
	for _, p := range v.Processes {
		here[p] = true
		if s.watched[p] != nil {
			continue
		}
		w := &watch{pid: int(p.PID)}
		s.watched[p] = w
		if hex.EncodeToString(p.BootID[:]) != s.boot {
			w.foreign = true // its process went with its boot, and its pid means another one now
			s.set(p, gone(p), v.Now)
		}
	}
	for p, w := range s.watched {
		if !here[p] {
			s.let(w)
			delete(s.watched, p)
		}
	}
}

// giveUp abandons reads that take too long, and takes back those that returned after all.
func (s *Source) giveUp(now int64) error {
	kept := s.stuck[:0]
	for _, f := range s.stuck {
		select {
		case seen := <-f.seen:
			letAll(seen)
			if w := s.watched[f.hung]; w != nil {
				w.hangs = false
			}
		default:
			kept = append(kept, f)
		}
	}
	clear(s.stuck[len(kept):])
	s.stuck = kept
	if f := s.flight; f != nil && time.Since(f.began) > stuckAfter && len(f.seen) == 0 {
		if len(s.stuck) == maxStuck {
			return fmt.Errorf("reads of %d processes hang: no news of any process until one returns", maxStuck+1)
		}
		f.hung = f.targets[f.at.Load()].p
		if w := s.watched[f.hung]; w != nil {
			w.hangs = true
			s.set(f.hung, diagnosis.ProcUnknown, now)
		}
		s.stuck = append(s.stuck, f)
		s.flight = nil
	}
	if len(s.stuck) > 0 {
		return fmt.Errorf("reads of %d processes hang, one of them pid %d", len(s.stuck), s.stuck[0].hung.PID)
	}
	return nil
}

// look reads all targets. It touches nothing of the source that changes.
func (s *Source) look(f *flight) {
	seen := make([]sight, len(f.targets))
	var all map[uint64][]int
	for i, t := range f.targets {
		f.at.Store(int32(i))
		seen[i] = s.see(t)
		if t.search && seen[i].absent {
			if all == nil {
				all = s.byStart()
			}
			switch pids := s.inside(all[t.start], &t); len(pids) {
			case 0:
			case 1:
				t.pid = pids[0]
				seen[i] = s.see(t)
			default:
				seen[i] = sight{target: t, doubt: true, err: fmt.Errorf("pid %d of a container may be any of %d processes here", t.inner, len(pids))}
			}
		}
	}
	f.seen <- seen
}

func (s *Source) see(t target) sight {
	v := sight{target: t}
	p, err := s.fs.Proc(t.pid)
	var st procfs.ProcStat
	if err == nil {
		st, err = p.Stat()
	}
	switch {
	case errors.Is(err, fs.ErrNotExist) || errors.Is(err, syscall.ESRCH):
		// With hidepid, /proc denies processes that are there.
		if s.local && !errors.Is(syscall.Kill(t.pid, 0), syscall.ESRCH) {
			v.err = fmt.Errorf("pid %d exists and /proc does not show it (hidepid?)", t.pid)
			return v
		}
		v.state, v.absent = diagnosis.ProcGone, true
		return v
	case err != nil:
		v.err = fmt.Errorf("pid %d: %w", t.pid, err)
		return v
	case st.Starttime != t.start:
		v.state, v.absent = diagnosis.ProcGone, true
		return v
	case st.State == "Z" || st.State == "X":
		v.state = diagnosis.ProcGone
		return v
	case st.State == "T" || st.State == "t":
		v.state = diagnosis.ProcStopped
	default:
		v.state = diagnosis.ProcRunning
	}
	if t.hold {
		v.life, v.unheld = s.hold(t)
	}
	v.use = used(p, &st)
	if st.State == "D" {
		v.asleep = append(v.asleep, t.pid)
	} else if t.idle && v.state == diagnosis.ProcRunning {
		v.asleep, v.children = s.behind(&t)
	}
	return v
}

func used(p procfs.Proc, st *procfs.ProcStat) use {
	u := use{ticks: st.UTime + st.STime}
	if io, err := p.IO(); err == nil { // another user's is not readable: then there is no IO to tell of
		u.bytes = io.ReadBytes + io.WriteBytes
	}
	return u
}

// behind looks at the threads of an idle process one by one: which are in uninterruptible
// sleep, and what the living processes that they have started have used.
func (s *Source) behind(t *target) (asleep []int, children *use) {
	threads, err := s.fs.AllThreads(t.pid)
	if err != nil {
		return nil, nil // it has just ended: the next pass tells
	}
	var pids []string
	for i := range min(len(threads), maxThreads) {
		tid := threads[i].PID
		if st, err := threads[i].Stat(); err == nil && st.State == "D" {
			asleep = append(asleep, tid)
		}
		if t.family {
			list, _ := os.ReadFile(fmt.Sprintf("%s/%d/task/%d/children", s.root, t.pid, tid)) // not every kernel has it
			pids = append(pids, strings.Fields(string(list))...)
		}
	}
	if !t.family {
		return asleep, nil
	}
	children = new(use)
	for i := range min(len(pids), maxChildren) {
		child, err := strconv.Atoi(pids[i])
		if err != nil {
			continue
		}
		if p, err := s.fs.Proc(child); err == nil {
			if st, err := p.Stat(); err == nil {
				u := used(p, &st)
				children.ticks, children.bytes = children.ticks+u.ticks, children.bytes+u.bytes
			}
		}
	}
	return asleep, children
}
