package replay

import (
	"cmp"
	"context"
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"sync/atomic"
	"time"

	"github.com/lockstep-ccl/lockstep/diagnosis"
)

// Suffix of recordings' names.
const Suffix = ".evidence"

// RecorderOptions of a Recorder. Dir and Job are required; zero fields take the defaults named.
type RecorderOptions struct {
	// Dir gets two directories of mode 0700: recording, the rolling one in segments,
	// and incidents, a recording for each.
	Dir      string
	Job      string
	Program  string        // version of this program
	Interval time.Duration // intended between two passes; 100 ms
	Config   diagnosis.Config
	// MaxBytes and MaxAge bound the rolling recording (64 MiB, 30 min). A job so large
	// that this holds less than three minutes is recorded in fewer passes.
	MaxBytes int64
	MaxAge   time.Duration
	// Incidents and IncidentBytes bound the incidents' recordings by number and all
	// together (64, 512 MiB); the oldest ones are removed. MaxBytes bounds each.
	Incidents     int
	IncidentBytes int64
	// Before and After are how long before its onset and after its end an incident's recording
	// begins and ends (5 min, 10 s).
	Before, After time.Duration
	// Open are the incidents that an earlier recorder left open: their recordings go on.
	Open []string
	Log  *slog.Logger // nil: slog.Default()
}

func (o *RecorderOptions) setDefaults() {
	o.Interval = cmp.Or(o.Interval, 100*time.Millisecond)
	o.MaxBytes = cmp.Or(o.MaxBytes, 64<<20)
	o.MaxAge = cmp.Or(o.MaxAge, 30*time.Minute)
	o.Incidents = cmp.Or(o.Incidents, 64)
	o.IncidentBytes = cmp.Or(o.IncidentBytes, 512<<20)
	o.Before = cmp.Or(o.Before, 5*time.Minute)
	o.After = cmp.Or(o.After, 10*time.Second)
	o.Log = cmp.Or(o.Log, slog.Default())
	o.Config = effective(o.Config)
}

// Least values that make sense.
const (
	MinBytes = 1 << 20
	MinAge   = time.Minute
)

func (o *RecorderOptions) check() error {
	switch {
	case o.Dir == "" || o.Job == "":
		return errors.New("no directory or job")
	case o.MaxBytes < MinBytes:
		return fmt.Errorf("a rolling recording of %d bytes, want at least %d", o.MaxBytes, MinBytes)
	case o.MaxAge < MinAge:
		return fmt.Errorf("a rolling recording of %v, want at least %v", o.MaxAge, MinAge)
	case o.Incidents < 1 || o.IncidentBytes < o.MaxBytes:
		return fmt.Errorf("recordings of %d incidents with %d bytes in all, want at least one, and the %d bytes of one", o.Incidents, o.IncidentBytes, o.MaxBytes)
	case o.Before < 0 || o.After < 0 || o.Interval < 0:
		return errors.New("a negative duration")
	}
	return nil
}

// Skip is why a pass was not recorded.
type Skip uint8

const (
	SkipPaced  Skip = iota // recording all passes would cost too much time or space
	SkipBusy               // the disk does not keep up
	SkipFailed             // it refuses
	numSkips
)

func (s Skip) String() string {
	return [...]string{"paced", "busy", "failed", "unknown"}[min(s, numSkips)]
}

// Skips lists them all.
func Skips() []Skip { return []Skip{SkipPaced, SkipBusy, SkipFailed} }

// Stats are a Recorder's counters.
type Stats struct {
	Passes  uint64
	Bytes   uint64           // written to the rolling recording
	Skipped [numSkips]uint64 // passes
	Size    int64            // of the rolling recording now
	Oldest  int64            // its first pass, unix ns; 0 when there is none
}

// Recorder keeps a job's rolling recording and those of its incidents. Record is
// for one goroutine; Stats is safe for concurrent use.
type Recorder struct {
	o   RecorderOptions
	log *slog.Logger

	// Of the goroutine that records.
	number uint64
	marks  []Mark // since the pass recorded last
	paused bool   // some pass since then was
	told   []diagnosis.Verdict
	states int // that exist

	queue chan *item
	free  chan *item
	next  atomic.Int64 // no sooner than this is a pass of no interest recorded, unix ns

	passes, bytes atomic.Uint64
	skipped       [numSkips]atomic.Uint64
	size, oldest  atomic.Int64

	writer rolling // of Run
}

// item is one pass on its way to the disk.
type item struct {
	state  *state
	number uint64
	told   []diagnosis.Verdict
	marks  []Mark
}

const (
	maxQueue     = 16       // passes that wait for the disk
	maxQueueSize = 64 << 20 // bytes, about, of all of them; two may wait whatever they take
	minReach     = 3 * time.Minute
	dutyCycle    = 10 // one part in so many of a core is for recording
)

// NewRecorder makes the directories. Run must follow, and writes.
func NewRecorder(o RecorderOptions) (*Recorder, error) {
	o.setDefaults()
	if err := o.check(); err != nil {
		return nil, fmt.Errorf("record evidence: %w", err)
	}
	r := &Recorder{o: o, log: o.Log, queue: make(chan *item, maxQueue), free: make(chan *item, maxQueue)}
	var run [8]byte
	_, _ = rand.Read(run[:]) // never fails
	r.writer = rolling{
		o: &r.o, dir: filepath.Join(o.Dir, "recording"), incidents: filepath.Join(o.Dir, "incidents"),
		header: Header{Job: o.Job, Run: binary.LittleEndian.Uint64(run[:]), Program: o.Program, Interval: o.Interval, Config: o.Config},
	}
	for _, dir := range []string{r.writer.dir, r.writer.incidents} {
		if err := os.MkdirAll(dir, 0o700); err != nil {
			return nil, fmt.Errorf("record evidence: %w", err)
		}
	}
	if err := r.writer.scan(); err != nil {
		return nil, fmt.Errorf("record evidence: %w", err)
	}
	return r, nil
}

// Record takes a copy of one pass: the evidence, what the engine said to it, and what
// became of it. It never waits: what finds no place is counted, and the next pass
// recorded carries all that has changed.
func (r *Recorder) Record(ev *diagnosis.Evidence, told []diagnosis.Verdict, marks ...Mark) {
	r.number++
	if room := maxMarks - len(r.marks); len(marks) > room {
		marks = marks[:room]
	}
	r.marks = append(r.marks, marks...)
	r.paused = r.paused || ev.Paused
	if len(r.marks) == 0 && !r.paused && ev.Now < r.next.Load() && sameVerdicts(r.told, told) {
		r.skipped[SkipPaced].Add(1)
		return
	}
	var it *item
	select {
	case it = <-r.free:
	default:
		if r.states >= 2 && (r.states >= maxQueue || r.states*size(ev) > maxQueueSize) {
			r.skipped[SkipBusy].Add(1)
			return
		}
		r.states++
		it = &item{state: &state{}}
	}
	it.state.copyFrom(ev)
	it.state.paused = r.paused
	it.number, it.told, it.marks = r.number, told, r.marks
	r.marks, r.paused, r.told = nil, false, told
	r.queue <- it // there is room: no more items exist than it holds
}

// size is about what a copy of ev takes.
func size(ev *diagnosis.Evidence) int {
	n := len(ev.Nodes)*64 + len(ev.Ranks)*256 + len(ev.Conns)*256
	for i := range ev.Comms {
		n += len(ev.Comms[i].Members) * 160
	}
	for i := range ev.Arrivals {
		n += len(ev.Arrivals[i].Start) * 16
	}
	return n
}

// Stats returns the counters.
func (r *Recorder) Stats() (s Stats) {
	s.Passes, s.Bytes, s.Size, s.Oldest = r.passes.Load(), r.bytes.Load(), r.size.Load(), r.oldest.Load()
	for i := range r.skipped {
		s.Skipped[i] = r.skipped[i].Load()
	}
	return s
}

// Run writes what is recorded until ctx is done, and then what still waits.
func (r *Recorder) Run(ctx context.Context) {
	defer r.writer.close()
	var pace pacing
	for {
		var it *item
		select {
		case it = <-r.queue:
		default:
			select {
			case it = <-r.queue:
			case <-ctx.Done():
				select {
				case it = <-r.queue:
				default:
					return
				}
			}
		}
		r.write(it, &pace)
	}
}

// write writes one pass; pace says when the next one is wanted.
func (r *Recorder) write(it *item, pace *pacing) {
	now := it.state.now
	begin, before := time.Now(), r.writer.written
	ok := r.writer.pass(it)
	n := r.writer.written - before
	r.bytes.Add(uint64(n))
	if ok {
		r.passes.Add(1)
		pace.observe(time.Since(begin), n)
	} else {
		r.skipped[SkipFailed].Add(1)
	}
	r.next.Store(now + int64(pace.interval(r.o.Interval, r.o.MaxBytes)))
	size, oldest := r.writer.extent()
	r.size.Store(size)
	r.oldest.Store(oldest)
	it.told, it.marks = nil, nil
	r.free <- it
}

// pacing bounds what recording costs: its share of a core, and of the space that is
// to hold some minutes.
type pacing struct {
	costs [8]time.Duration // of the last passes
	n     int
	bytes float64 // of a pass, on average
}

func (p *pacing) observe(cost time.Duration, bytes int64) {
	p.costs[p.n%len(p.costs)] = cost
	p.n++
	const memory = 64
	p.bytes += (float64(bytes) - p.bytes) / float64(min(p.n, memory))
}

// interval is how long after a pass the next one of no interest is wanted; 0: at once.
func (p *pacing) interval(passes time.Duration, maxBytes int64) time.Duration {
	if p.n < len(p.costs) {
		return 0
	}
	least := p.costs[0]
	for _, c := range p.costs { // one that was interrupted says nothing
		least = min(least, c)
	}
	want := max(dutyCycle*least, time.Duration(p.bytes*float64(minReach)/float64(maxBytes)))
	if want <= passes {
		return 0
	}
	return want - passes/2 // ticks are not exact
}
