// Package recorder is the source that finds the flight recorders of a runtime
// directory and reads them: their processes and live words on each pass, and
// their records whenever the agent drains them.
//
// A recorder outlives its process on purpose, so a dead one is read to its
// end and its last words stay in the view for a while. A file that cannot be
// read is counted, and tried again every few seconds; none stops the others. The
// package never writes, and never deletes a file.
package recorder

import (
	"errors"
	"time"

	"github.com/lockstep-ccl/lockstep/collector/source"
	"github.com/lockstep-ccl/lockstep/record"
)

// Options of a Source. Zero fields take the defaults.
type Options struct {
	Dir string // and the users' directories that belong to it (record.Places); "" is record.DefaultDir()
	// Users names the users of jobs, where it is known; others' recorders of them are refused.
	Users map[string]uint32
	// Node, when set, passes over recorders of other (logical) nodes.
	Node string
	// Max bounds the recorders that are open at a time; 256.
	Max int
	// Discover is the time between two looks at the directory; 200 ms.
	Discover time.Duration
	// Keep is how long a dead process stays in the view, unless a younger one takes
	// its place, and how long ago a process may have died to be taken in at all; 10 min.
	Keep time.Duration
}

// batch is how many records are read at a time.
const batch = 1024

// Source reads recorders. It is for one goroutine.
type Source struct {
	o         Options
	began     time.Time
	files     map[key]*file
	passed    map[key]passed // files passed over until they change
	looked    int64
	lookErr   error
	groupsErr error
	overflow  int
	buf       []record.Record
	stamps    []record.Stamp
	next      int // round robin of Drain
	order     []*file

	places   []record.Place
	placesAt int64
	badDirs  []error         // that are refused
	wasBad   map[string]bool // their errors
	refused  [refusals]uint64
}

// key identifies a file's content: a path can be taken over by another file.
type key struct {
	path  string
	inode uint64
	size  int64
	mtime int64
}

type file struct {
	source.Process
	key     key
	seen    key            // as it was found
	reader  *record.Reader // nil once a dead process's file has been read to its end
	dead    int64          // since when
	idle    bool           // the last drain left nothing
	groups  groups         // of a file of marks: what the program's process groups are called
	names   *groups        // of a process: those of its file of marks
	unnamed unnamed        // communicators that have no name
	main    *file          // of a file of marks: the recorder of the same process, whose marks they are

	place    record.Place
	user     uint32 // whose word it is
	verified int    // the pid whose users were looked at, 0: none was
	lived    int64  // when a process of its owner's was last seen to live, 0: never
}

// New returns a source that opens nothing before its first Update.
func New(o Options) *Source {
	if o.Dir == "" {
		o.Dir = record.DefaultDir()
	}
	if o.Max <= 0 {
		o.Max = 256
	}
	if o.Discover <= 0 {
		o.Discover = 200 * time.Millisecond
	}
	if o.Keep <= 0 {
		o.Keep = 10 * time.Minute
	}
	return &Source{o: o, began: time.Now(), files: map[key]*file{}, passed: map[key]passed{}, buf: make([]record.Record, batch), stamps: make([]record.Stamp, batch)}
}

// Close unmaps all recorders.
func (s *Source) Close() error {
	var errs []error
	for _, f := range s.order {
		if f.reader != nil {
			errs = append(errs, f.reader.Close())
		}
	}
	s.files, s.order = map[key]*file{}, nil
	return errors.Join(errs...)
}

// Overflow is how many recorders are not read because Max are open.
func (s *Source) Overflow() int { return s.overflow }

// Update implements source.Source: it discovers and drops recorders and
// refreshes the tables of all. The error names one of the files that cannot be read.
func (s *Source) Update(v *source.View) error {
	if s.looked == 0 || v.Now-s.looked >= s.o.Discover.Nanoseconds() {
		s.looked = v.Now
		s.lookErr = s.discover(v.Now)
		s.drop(v.Now)
	}
	err := s.lookErr
	v.Processes = v.Processes[:0]
	for _, f := range s.order {
		if f.reader != nil {
			f.refresh()
			if e := f.reader.Err(); e != nil && err == nil {
				err = e
			}
		}
		if f.main == nil {
			v.Processes = append(v.Processes, &f.Process)
		}
	}
	return err
}

func (f *file) refresh() {
	f.Header = f.reader.Header()
	f.Comms = f.reader.Comms(f.Comms[:0])
	if f.names != nil {
		f.names.rename(f.Comms)
	}
	f.unnamed.name(f.Comms)
	f.Conns = f.reader.Conns(f.Conns[:0])
	f.Devices = f.reader.Devices(f.Devices[:0])
	_, stamps, _ := f.reader.StampCount()
	f.Lost = f.reader.Lost() + stamps + f.OpsLost
}

// History appends what a process's recorder keeps of a connection's windows; none when it is
// not open any more.
func (s *Source) History(p *source.Process, c *record.ConnStatus, dst []record.Window) []record.Window {
	for _, f := range s.order {
		if &f.Process == p && f.reader != nil {
			return f.reader.History(c, dst)
		}
	}
	return dst
}

// Refresh reads a process's tables again, for a record that names an entry which
// the last Update has not seen yet.
func (s *Source) Refresh(p *source.Process) {
	for _, f := range s.order {
		if &f.Process == p && f.reader != nil {
			f.refresh()
		}
	}
}

// Drain hands over the records appended since the last call, process by
// process, at most limit in all (so that one busy recorder cannot keep the
// agent from reporting). The slice is reused. fill is the largest share of a
// ring that was waiting to be read: near 1, records are about to be lost.
func (s *Source) Drain(limit int, each func(*source.Process, []record.Record)) (n int, fill float64) {
	for i := range s.order {
		f := s.order[(s.next+i)%len(s.order)]
		if f.reader == nil {
			continue
		}
		f.idle = false
		for first := true; n < limit; first = false {
			got := f.reader.Next(s.buf)
			if first {
				fill = max(fill, float64(got+f.reader.Pending())/float64(f.RingSlots))
			}
			if got > 0 {
				n += got
				each(f.owner(), s.buf[:got])
			}
			if got < len(s.buf) {
				f.idle = f.reader.Pending() == 0
				break
			}
		}
	}
	s.next++
	return n, fill
}

// DrainStamps hands over the operations that GPUs stamped since the last call,
// and those that run, process by process, at most limit in all. The slice is
// reused.
func (s *Source) DrainStamps(limit int, each func(*source.Process, []record.Stamp)) (n int) {
	for i := range s.order {
		f := s.order[(s.next+i)%len(s.order)]
		if f.reader == nil || f.StampSlots == 0 {
			continue
		}
		for n < limit {
			got := f.reader.Stamps(s.stamps)
			if got > 0 {
				n += got
				each(&f.Process, s.stamps[:got])
			}
			if got < len(s.stamps) {
				break
			}
			f.idle = false
		}
	}
	return n
}
