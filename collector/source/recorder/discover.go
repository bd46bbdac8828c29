package recorder

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"slices"
	"syscall"
	"time"

	"github.com/lockstep-ccl/lockstep/collector/source"
	"github.com/lockstep-ccl/lockstep/record"
)

// passed is why a file is passed over: nothing in it is meant for this source, or
// (err) it could not be read. That may change though the file does not, so it is
// tried again at the given time.
type passed struct {
	err   error
	again int64 // CLOCK_MONOTONIC ns; 0: never
}

// tryAgain is the time between two attempts to read a file that cannot be read, ns.
const tryAgain = int64(10 * time.Second)

// deadAgain is that of a file whose process seems to be long dead.
const deadAgain = int64(time.Minute)

func (s *Source) discover(now int64) error {
	s.look(now)
	s.review(now)
	var failed error
	listed := map[key]bool{}
	s.overflow = 0
	var found []*file
	for _, place := range s.places {
		paths, err := record.List(place.Path)
		switch {
		case err == nil:
		case place.Path == s.o.Dir:
			failed = err
		case errors.Is(err, fs.ErrPermission): // another user's
		default:
			failed = cmp.Or(failed, err)
		}
		news := 0 // of one directory: it must not keep others' from being looked at
		for _, path := range paths {
			if news > s.o.Max {
				s.overflow++
			} else if f := s.open(path, now, listed); f != nil {
				f.place = place
				found = append(found, f)
				news++
			}
		}
	}
	slices.SortStableFunc(found, first)
	for _, f := range found {
		s.take(f, now, listed)
	}
	for k := range s.passed {
		if !listed[k] {
			delete(s.passed, k)
		}
	}
	for k, f := range s.files {
		if !listed[k] && f.reader == nil {
			s.remove(f) // its owner has removed it, and it has been read
		}
	}
	s.groupsErr = nil
	s.joinMarks()
	s.supersede()
	return cmp.Or(failed, s.unread(), s.groupsErr)
}

// open opens a file that was not open, nor passed over; nil when there is nothing new.
func (s *Source) open(path string, now int64, listed map[key]bool) *file {
	fi, err := os.Lstat(path)
	if err != nil {
		return nil // removed meanwhile
	}
	// A recorder is written through a mapping, which moves mtime at the kernel's
	// leisure: a file that is open is known by its inode alone.
	k := key{path: path, inode: inode(fi)}
	if _, ok := s.files[k]; ok {
		listed[k] = true
		return nil
	}
	b := key{path, k.inode, fi.Size(), fi.ModTime().UnixNano()}
	listed[b] = true
	if was, ok := s.passed[b]; ok && (was.again == 0 || now < was.again) {
		return nil
	}
	if st, ok := fi.Sys().(*syscall.Stat_t); ok && !s.room(st.Uid) {
		s.overflow++
		return nil
	}
	r, err := record.Open(path)
	if err != nil {
		if !errors.Is(err, fs.ErrNotExist) {
			s.passed[b] = passed{err, now + tryAgain}
		}
		return nil
	}
	return &file{Process: source.Process{Path: path}, key: k, seen: b, reader: r}
}

// take has a file that was opened in the view, when it is of this node, and its owner may
// speak of what it speaks of.
func (s *Source) take(f *file, now int64, listed map[key]bool) {
	f.refresh()
	if other := s.o.Node != "" && f.Node != "" && f.Node != s.o.Node; other || s.longDead(f) {
		p := passed{}
		if !other {
			p.again = now + deadAgain // it may be a process of another container that was stopped, and goes on
		}
		s.passed[f.seen] = p
		_ = f.reader.Close()
		return
	}
	err := s.admit(f, f.place, now)
	if err == nil && !s.room(f.user) {
		s.overflow++
		_ = f.reader.Close()
		return
	}
	if err != nil {
		s.count(f.seen, err)
		s.passed[f.seen] = passed{err, now + tryAgain}
		_ = f.reader.Close()
		return
	}
	delete(s.passed, f.seen)
	if f.Created.Before(s.began) {
		f.reader.SeekTail(f.RingSlots) // what was overwritten before this agent was there is not lost by it
	}
	listed[f.key] = true
	s.files[f.key] = f
	s.order = append(s.order, f)
}

// unread tells of the recorders that are there and are not read. What is refused for its
// owner is no failure of this source: who has no say must not be able to cause one.
func (s *Source) unread() error {
	var bad, refused trouble
	for k, p := range s.passed {
		var e *errRefused
		switch {
		case p.err == nil:
		case errors.As(p.err, &e):
			refused.add(k.path, p.err)
		default:
			bad.add(k.path, p.err)
		}
	}
	for _, err := range s.badDirs {
		refused.add(err.Error(), err)
	}
	switch {
	case bad.n > 0:
		return fmt.Errorf("%d recorder files cannot be read, one of them: %w", bad.n, bad.err)
	case s.overflow > 0:
		return fmt.Errorf("%d recorders are not read: %d are, the limit", s.overflow, s.o.Max)
	case refused.n > 0:
		return fmt.Errorf("%w: %d recorders or directories are refused, one of them: %w", source.ErrPartly, refused.n, refused.err)
	}
	return nil
}

// trouble is a number of errors, and the first by name, so that the same trouble has the
// same words.
type trouble struct {
	n    int
	name string
	err  error
}

func (t *trouble) add(name string, err error) {
	if t.n++; t.n == 1 || name < t.name {
		t.name, t.err = name, err
	}
}

func inode(fi fs.FileInfo) uint64 {
	if st, ok := fi.Sys().(*syscall.Stat_t); ok {
		return st.Ino
	}
	return 0
}

// longDead reports whether a recorder is of a process that died long ago: one
// that lives re-anchors its clock every few seconds.
func (s *Source) longDead(f *file) bool {
	return time.Since(time.Unix(0, f.Anchor.Real)) > s.o.Keep && !f.reader.Alive()
}

// owner is whose records a file has.
func (f *file) owner() *source.Process {
	if f.main != nil {
		return &f.main.Process
	}
	return &f.Process
}

// joinMarks finds, for files of marks, the recorders of the same processes. One that
// had been a process of its own is read again, so that its process has all of its marks.
func (s *Source) joinMarks() {
	type process struct {
		boot  [16]byte
		pid   int32
		start uint64
	}
	var mains map[process]*file
	for _, f := range s.order {
		if !f.MarksOnly() || f.main != nil || f.reader == nil {
			continue
		}
		if mains == nil {
			mains = map[process]*file{}
			for _, m := range s.order {
				if !m.MarksOnly() {
					mains[process{m.BootID, m.PID, m.StartTime}] = m
				}
			}
		}
		m := mains[process{f.BootID, f.PID, f.StartTime}]
		if m == nil || f.key.inode == m.key.inode {
			continue
		}
		if again, err := record.Open(f.Path); err == nil {
			_ = f.reader.Close()
			f.reader = again
		} // else what it said before is lost, and it goes on
		f.main, m.names = m, &f.groups
	}
	for _, f := range s.order {
		if f.MarksOnly() && f.reader != nil {
			if err := f.readGroups(); err != nil && s.groupsErr == nil {
				s.groupsErr = err
			}
		}
	}
}

// supersede marks the processes whose rank has a younger one.
func (s *Source) supersede() {
	type rank struct {
		job  string
		rank int32
	}
	youngest := map[rank]*file{}
	for _, f := range s.order {
		if f.Rank < 0 || f.main != nil {
			continue
		}
		r := rank{f.Job, f.Rank}
		if o := youngest[r]; o == nil || f.Younger(&o.Process) {
			youngest[r] = f
		}
	}
	for _, f := range s.order {
		f.Superseded = f.Rank >= 0 && f.main == nil && youngest[rank{f.Job, f.Rank}] != f
	}
}

// drop lets go of dead processes: first of the file, when it has been read to
// its end, then of the process.
func (s *Source) drop(now int64) {
	for _, f := range slices.Clone(s.order) {
		if f.main != nil {
			f.State, f.Superseded = f.main.State, s.files[f.main.key] != f.main // nobody else looks at it
		}
		if !f.Dead() {
			f.dead = 0
			continue
		}
		if f.dead == 0 {
			f.dead = now // and one pass more, for what was appended before the end
			continue
		}
		if f.reader != nil && (f.idle || f.reader.Err() != nil) {
			f.refresh()
			_ = f.reader.Close()
			f.reader = nil
		}
		if f.reader == nil && (f.Superseded || now-f.dead > s.o.Keep.Nanoseconds()) {
			s.remove(f)
			// Not to be opened again while it lies there.
			if fi, err := os.Lstat(f.Path); err == nil {
				s.passed[key{f.Path, inode(fi), fi.Size(), fi.ModTime().UnixNano()}] = passed{}
			}
		}
	}
}

func (s *Source) remove(f *file) {
	if f.reader != nil {
		_ = f.reader.Close()
	}
	delete(s.files, f.key)
	s.order = slices.DeleteFunc(s.order, func(o *file) bool { return o == f })
}
