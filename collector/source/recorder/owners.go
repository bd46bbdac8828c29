package recorder

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"os"
	"slices"
	"strconv"
	"time"

	"github.com/lockstep-ccl/lockstep/record"
)

// Whose word counts. A file speaks for its owner, in a directory that is its owner's, and of
// a process that is its owner's. A job is, on this node, the user's whose process was the
// first of it that was seen living, until claimFor after the last one's end; or whom
// Options.Users names. Recorders of other users that name it are refused.

// claimFor is how long a job stays its user's when none of its processes live: a job that
// is restarted must not be taken over in between.
const claimFor = int64(time.Minute)

// relook is the time between two searches for users' directories, ns.
const relook = int64(time.Second)

// Refusal is why a directory or a file is refused.
type Refusal uint8

const (
	RefusedDirectory Refusal = iota // it is not its user's alone
	RefusedFile                     // it is not the directory's owner's
	RefusedProcess                  // it names a process of another user
	RefusedJob                      // its job is another user's
	refusals
)

var refusalNames = [refusals]string{"directory", "file", "process", "job"}

func (r Refusal) String() string { return refusalNames[r] }

// Refusals are all there are.
func Refusals() []Refusal {
	return []Refusal{RefusedDirectory, RefusedFile, RefusedProcess, RefusedJob}
}

// Refused is how many directories and files were, ever, by Refusal.
func (s *Source) Refused() [refusals]uint64 { return s.refused }

// errRefused is what is passed over for its owner.
type errRefused struct {
	why Refusal
	err error
}

func (e *errRefused) Error() string { return e.err.Error() }
func (e *errRefused) Unwrap() error { return e.err }

func refuse(why Refusal, format string, args ...any) error {
	return &errRefused{why, fmt.Errorf(format, args...)}
}

// count counts what is refused now and was not before.
func (s *Source) count(b key, err error) {
	var e *errRefused
	if errors.As(err, &e) {
		if was, ok := s.passed[b]; !ok || was.err == nil {
			s.refused[e.why]++
		}
	}
}

// look finds users' directories.
func (s *Source) look(now int64) {
	if s.places != nil && now-s.placesAt < relook {
		return
	}
	s.placesAt = now
	var refused []error
	s.places, refused = record.Places(s.o.Dir)
	s.badDirs = s.badDirs[:0]
	bad := map[string]bool{}
	for _, err := range refused {
		text := err.Error()
		if bad[text] = true; !s.wasBad[text] {
			s.refused[RefusedDirectory]++
		}
		s.badDirs = append(s.badDirs, err)
	}
	s.wasBad = bad
}

// admit decides on a file that was opened: the file's owner, its process's, its job's.
func (s *Source) admit(f *file, at record.Place, now int64) error {
	f.user = f.reader.Owner()
	if !at.Shared && f.user != at.Owner {
		return refuse(RefusedFile, "%s is user %d's, in user %d's directory", f.Path, f.user, at.Owner)
	}
	if f.reader.Alive() {
		if err := s.verify(f, int(f.PID), now); err != nil {
			return err
		}
	}
	return s.claim(f, now)
}

// verify looks whose the process is that a file speaks of.
func (s *Source) verify(f *file, pid int, now int64) error {
	uids := processUsers(pid)
	switch {
	case len(uids) == 0: // it has just ended, or is not to be seen
		return nil
	case f.Source.CallsOnly() && (f.reader.Owner() == 0 || int(f.reader.Owner()) == os.Geteuid()):
		f.user = uids[0] // an agent, root's or this one, tells what it sees of another's process
	case !slices.Contains(uids, f.user):
		return refuse(RefusedProcess, "%s is user %d's, and process %d, of which it speaks, user %d's", f.Path, f.user, pid, uids[0])
	}
	f.verified, f.lived = pid, now
	return nil
}

// processUsers are the real, effective, saved and file system user of a process; none when
// there is no such.
func processUsers(pid int) (uids []uint32) {
	text, _ := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	for line := range bytes.Lines(text) {
		if rest, ok := bytes.CutPrefix(line, []byte("Uid:")); ok {
			for _, f := range bytes.Fields(rest) {
				if n, err := strconv.ParseUint(string(f), 10, 32); err == nil {
					uids = append(uids, uint32(n))
				}
			}
		}
	}
	return uids
}

// claim refuses a file whose job is another user's. One that is seen to live takes a job
// over from files of which no process was.
func (s *Source) claim(f *file, now int64) error {
	if uid, ok := s.o.Users[f.Job]; ok {
		if uid != f.user {
			return refuse(RefusedJob, "%s is user %d's, and job %q is user %d's, as this agent was told", f.Path, f.user, f.Job, uid)
		}
		return nil
	}
	for _, o := range s.order {
		if o.Job != f.Job || o.user == f.user {
			continue
		}
		if f.lived == 0 { // in a container, perhaps
			if pid, alive := f.reader.Process(); alive {
				if err := s.verify(f, pid, now); err != nil {
					return err
				}
			}
		}
		if f.lived == 0 || o.lived != 0 && now-o.lived <= claimFor {
			return refuse(RefusedJob, "%s is user %d's, and job %q is user %d's on this node: give one of them another name", f.Path, f.user, f.Job, o.user)
		}
	}
	for _, o := range slices.Clone(s.order) {
		if o.Job == f.Job && o.user != f.user {
			s.remove(o)
			s.passOver(o, refuse(RefusedJob, "%s is user %d's, and job %q is user %d's on this node now", o.Path, o.user, f.Job, f.user), now)
		}
	}
	return nil
}

// review looks again at files that are open: whose the processes are that have been found
// meanwhile, and which live.
func (s *Source) review(now int64) {
	for _, f := range slices.Clone(s.order) {
		switch {
		case f.HostPID == 0 || f.Dead():
		case f.verified == int(f.HostPID):
			f.lived = now
		default:
			if err := s.verify(f, int(f.HostPID), now); err != nil {
				s.remove(f)
				s.passOver(f, err, now)
			}
		}
	}
}

// passOver has a file that was open not be opened again while it is what it is.
func (s *Source) passOver(f *file, err error, now int64) {
	fi, e := os.Lstat(f.Path)
	if e != nil {
		return
	}
	b := key{f.Path, inode(fi), fi.Size(), fi.ModTime().UnixNano()}
	s.count(b, err)
	s.passed[b] = passed{err, now + tryAgain}
}

// room reports whether a user's file may be opened. When all places are taken, a user who
// has more than a fair share gives one back: so nobody fills them.
func (s *Source) room(owner uint32) bool {
	if len(s.files) < s.o.Max {
		return true
	}
	count := map[uint32]int{owner: 0}
	for _, f := range s.order {
		count[f.user]++
	}
	share := s.o.Max / len(count)
	if count[owner] >= share {
		return false
	}
	most := owner
	for uid, n := range count {
		if n > count[most] || n == count[most] && uid < most {
			most = uid
		}
	}
	if count[most] <= share {
		return false
	}
	for _, f := range slices.Backward(s.order) { // its latest
		if f.user == most {
			s.remove(f)
			return true
		}
	}
	return false
}

// first orders files that were found together: who lives, and has for longest, comes first.
func first(a, b *file) int {
	lives := func(f *file) int {
		if f.reader.Alive() {
			return 0
		}
		return 1
	}
	return cmp.Or(cmp.Compare(lives(a), lives(b)), cmp.Compare(a.StartTime, b.StartTime), cmp.Compare(a.Path, b.Path))
}
