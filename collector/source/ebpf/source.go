package ebpf

import (
	"cmp"
	"encoding/binary"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"slices"
	"sync"
	"sync/atomic"
	"time"
	"unsafe"

	"github.com/cilium/ebpf/ringbuf"

	"github.com/lockstep-ccl/lockstep/collector"
	"github.com/lockstep-ccl/lockstep/collector/source"
	"github.com/lockstep-ccl/lockstep/diagnosis"
	"github.com/lockstep-ccl/lockstep/record"
)

// Options of a Source. Zero fields take the defaults.
type Options struct {
	Dir  string // of the recorders; record.DefaultDir()
	Node string // logical node name
	Proc string // the host's proc file system; "/proc"
	// Job names the job of processes whose environment does not; "" names it by its first
	// communicator, "nccl-" and eight digits.
	Job string
	// Sample is how many calls of a communicator there are for one that is recorded, a
	// power of two; 1. All are counted.
	Sample int
	// Scan is the time between two looks for processes; 500 ms.
	Scan time.Duration
	Log  *slog.Logger // nil: slog.Default()
}

const (
	// pollEvery is the time between two looks at the programs' maps.
	pollEvery = 50 * time.Millisecond
	// unusedFor is how long a library may be mapped by nobody until its probes go.
	unusedFor = time.Minute
	// endWithin is how long the programs' word of a process's end may take.
	endWithin = 10 * time.Second
	// maxDrain bounds the calls taken from the ring in one go.
	maxDrain = 1 << 14
	// stuckAfter is the age of the last look from which on the source hangs.
	stuckAfter = 10 * time.Second
)

// Source watches the processes of this node. Update is for one goroutine; a goroutine of
// its own does the work.
type Source struct {
	o    Options
	log  *slog.Logger
	stop chan struct{}
	done sync.WaitGroup

	looked atomic.Int64 // CLOCK_MONOTONIC ns of the last look
	said   error        // by the last Update, which alone uses it

	mu      sync.Mutex // over what follows
	probes  *probes
	waits   *waits // nil where it is not seen what ranks wait for
	noWaits error  // why not
	targets []int  // processes of ranks
	scanner *scanner
	err     error // why there are no probes
	note    error // the last trouble with one process or library
	ranks   map[int]*rank
	places  map[libraryID]places
	ready   map[[2]uint64]bool      // splits that all members were through with at the last look, by parent and number
	using   map[libraryID]time.Time // when a library was seen mapped last
	others  map[int]bool            // processes that keep recorders of their own
	updated int64                   // when they were last looked at, CLOCK_MONOTONIC ns
	ring    *ringbuf.Reader
	ends    *ringbuf.Reader
	scanned time.Time
	stats   collector.Probes
}

// New loads the programs and begins to look for processes. It always returns a
// Source: what keeps it from working is Update's to say.
func New(o Options) *Source {
	if o.Dir == "" {
		o.Dir = record.DefaultDir()
	}
	if dir, _, err := record.DirBelow(o.Dir, ""); err == nil {
		o.Dir = dir // else Update says what is wrong with it
	}
	o.Proc, o.Scan, o.Sample = cmp.Or(o.Proc, "/proc"), cmp.Or(o.Scan, 500*time.Millisecond), max(o.Sample, 1)
	s := &Source{
		o: o, log: cmp.Or(o.Log, slog.Default()), stop: make(chan struct{}),
		ranks: map[int]*rank{}, using: map[libraryID]time.Time{}, places: map[libraryID]places{}, others: map[int]bool{},
	}
	if s.err = s.begin(); s.err != nil {
		return s
	}
	s.looked.Store(record.Now())
	s.done.Add(2)
	go s.run()
	go s.hear()
	return s
}

func (s *Source) begin() error {
	if s.o.Sample&(s.o.Sample-1) != 0 {
		return fmt.Errorf("ebpf: one of %d calls: not a power of two", s.o.Sample)
	}
	// Programs know processes by the host's numbers.
	if ns, err := os.Readlink("/proc/self/ns/pid"); err == nil && ns != initNamespace {
		return fmt.Errorf("ebpf: %w: give its container the host's (hostPID, --pid=host)", ErrNotHost)
	}
	p, err := loadProbes(uint64(s.o.Sample))
	if err != nil {
		return err
	}
	s.probes = p
	if s.ring, err = ringbuf.NewReader(p.calls.Ring); err == nil {
		s.ends, err = ringbuf.NewReader(p.calls.Ends)
	}
	if err == nil {
		err = clean(s.o.Dir)
	}
	if err != nil {
		return errors.Join(fmt.Errorf("ebpf: %w", err), p.close())
	}
	s.scanner = newScanner(s.o.Proc, p.attach)
	s.waits, s.noWaits = watchWaits(s.o.Proc)
	return nil
}

// initNamespace is the first PID namespace's (PROC_PID_INIT_INO).
const initNamespace = "pid:[4026531836]"

// Close takes all probes off. The recorders of processes that live are removed: nobody
// would write them any more.
func (s *Source) Close() error {
	if s.probes == nil || s.ends == nil {
		return nil
	}
	close(s.stop)
	errs := []error{s.ends.Close()}
	s.done.Wait()
	for _, r := range s.ranks {
		r.discard()
	}
	if s.waits != nil {
		errs = append(errs, s.waits.close())
	}
	errs = append(errs, s.ring.Close(), s.probes.close())
	s.probes = nil
	return errors.Join(errs...)
}

// Update implements source.Source. It takes in which processes tell of themselves. The
// error wraps source.ErrNoData where this machine does not allow probes at all.
func (s *Source) Update(v *source.View) error {
	if s.err != nil {
		v.Probes = &collector.Probes{Missing: missing(s.err)}
		return fmt.Errorf("%w: %w", source.ErrNoData, s.err)
	}
	others := map[int]bool{}
	var targets []int
	for _, p := range v.Processes {
		if p.HostPID != 0 && !p.Dead() {
			targets = append(targets, int(p.HostPID))
		}
		if p.HostPID != 0 && p.Source != record.SourceNCCLProbes && len(p.Comms) > 0 {
			others[int(p.HostPID)] = true
		}
	}
	if !s.mu.TryLock() { // a look is under way: the next pass gets what it finds
		if age := time.Duration(record.Now() - s.looked.Load()); age > stuckAfter {
			return fmt.Errorf("ebpf: a look at processes has been hanging for %v", age.Round(time.Second))
		}
		return s.said
	}
	defer s.mu.Unlock()
	s.others, s.targets, s.updated = others, targets, v.Now
	for _, p := range v.Processes {
		p.OffCPU = diagnosis.OffCPU{}
		if s.waits != nil && !p.Dead() && s.waits.ranks[int(p.HostPID)] != nil {
			p.OffCPU = s.waits.ranks[int(p.HostPID)].told
		}
	}
	stats := s.stats
	v.Probes = &stats
	s.said = s.status()
	return s.said
}

// status says what is not as it should be.
func (s *Source) status() error {
	switch {
	case s.note != nil:
		return s.note
	case s.probes.exit != nil:
		return fmt.Errorf("%w: %w", source.ErrPartly, s.probes.exit)
	case s.waits == nil:
		return fmt.Errorf("%w: %w", source.ErrPartly, s.noWaits)
	case s.waits.parts != nil:
		return fmt.Errorf("%w: %w", source.ErrPartly, s.waits.parts)
	}
	return nil
}

// trouble notes what keeps one process or library from being watched.
func (s *Source) trouble(err error) {
	if s.note == nil || s.note.Error() != err.Error() {
		s.log.Warn("probes", "err", err)
	}
	s.note = err
}

// run looks again and again.
func (s *Source) run() {
	defer s.done.Done()
	tick := time.NewTicker(pollEvery)
	defer tick.Stop()
	for {
		s.mu.Lock()
		if time.Since(s.scanned) >= s.o.Scan {
			s.note = nil
			s.scan()
			s.scanned = time.Now()
		}
		s.look(record.Now())
		if s.waits != nil {
			s.waits.look(s.targets, record.Now())
		}
		s.looked.Store(record.Now())
		s.mu.Unlock()
		select {
		case <-s.stop:
			return
		case <-tick.C:
		}
	}
}

// scan finds processes, attaches to what they have mapped, and lets go of what
// nobody has.
func (s *Source) scan() {
	using, err := s.scanner.scan()
	if err != nil {
		s.trouble(err)
		return
	}
	if s.scanner.err != nil {
		s.trouble(s.scanner.err)
	}
	now := time.Now()
	for _, id := range using {
		s.using[id] = now
	}
	for id, last := range s.using {
		if now.Sub(last) > unusedFor {
			delete(s.using, id)
			delete(s.places, id)
			s.scanner.forget(id)
			if err := s.probes.detach(id); err != nil {
				s.trouble(fmt.Errorf("take probes off: %w", err))
			}
		}
	}
	for pid, r := range s.ranks {
		switch {
		case exists(s.o.Proc, pid):
			r.missed = time.Time{}
		case r.missed.IsZero():
			r.missed = now
		case s.probes.exit != nil || now.Sub(r.missed) > endWithin: // how it ended will not be heard any more
			s.gone(r)
		}
	}
	s.stats.Libraries, s.stats.Processes = len(s.probes.on), len(using)
}

// look brings all recorders up to date. What is in the map comes first: records refer to it.
func (s *Source) look(now int64) {
	byPID := map[int][]*entry{}
	var key callsCommKey
	var value callsComm
	unidentified := 0
	each := s.probes.calls.Comms.Iterate()
	for each.Next(&key, &value) {
		byPID[int(key.Tgid)] = append(byPID[int(key.Tgid)], &entry{key, value})
	}
	// An iteration that changes under its feet is begun again; the next look has the rest.
	for pid := range byPID {
		if s.ranks[pid] == nil {
			s.ranks[pid] = s.newRank(pid, now)
		}
	}
	s.place(byPID, now)
	for pid, entries := range byPID {
		r := s.ranks[pid]
		slices.SortFunc(entries, func(a, b *entry) int { return cmp.Compare(a.Created, b.Created) })
		for _, e := range entries {
			if e.key.Comm&joiningKey != 0 {
				continue
			}
			if s.learn(r, e, now); !e.identified() {
				unidentified++
			}
		}
		if s.tell(r, entries, now) {
			s.flush(r)
		}
		s.forgetLeft(r, entries, now)
	}
	s.drain()
	s.count(len(byPID), unidentified)
}

// forgetLeft removes from the map the communicators that were left and told.
func (s *Source) forgetLeft(r *rank, entries []*entry, now int64) {
	for _, e := range entries {
		if (e.State == stateLeft || e.State == stateAborted) && now-int64(e.At) > int64(time.Second) {
			_ = s.probes.calls.Comms.Delete(e.key) // it may be another one's by now
			delete(r.comms, e.Id)
			delete(r.byAddr, e.key.Comm)
			delete(r.looked, e.key.Comm)
		}
	}
}

// drain takes the calls from the ring.
func (s *Source) drain() {
	var rec ringbuf.Record
	s.ring.SetDeadline(time.Unix(1, 0)) // it does not wait
	for range maxDrain {
		if s.ring.ReadInto(&rec) != nil {
			return
		}
		var k callsCall
		if len(rec.RawSample) < int(unsafe.Sizeof(k)) {
			continue
		}
		k = *(*callsCall)(unsafe.Pointer(&rec.RawSample[0]))
		if r := s.ranks[int(k.Tgid)]; r == nil || !r.record(&k) {
			s.stats.Unplaced++
		}
	}
}

// flush records the calls that waited for the recorder.
func (s *Source) flush(r *rank) {
	for i := range r.early {
		if !r.record(&r.early[i]) {
			s.stats.Unplaced++
		}
	}
	r.early = nil
}

// count publishes the counters.
func (s *Source) count(processes, unidentified int) {
	n := s.probes.stats()
	s.stats.Watched, s.stats.Unidentified = s.recorders(), unidentified
	s.stats.Calls, s.stats.PointToPoint = n[callsStatSTAT_CALLS], n[callsStatSTAT_P2P]
	s.stats.SampledOut, s.stats.RingFull = n[callsStatSTAT_SAMPLED_OUT], n[callsStatSTAT_RING_FULL]
	s.stats.TableFull, s.stats.Unread = n[callsStatSTAT_TABLE_FULL], n[callsStatSTAT_UNREAD]
}

func (s *Source) recorders() (n int) {
	for _, r := range s.ranks {
		if r.w != nil {
			n++
		}
	}
	return n
}

// hear waits for the ends of processes: a recorder of one that ended well is closed before
// anybody finds the process gone.
func (s *Source) hear() {
	defer s.done.Done()
	for {
		rec, err := s.ends.Read()
		if errors.Is(err, ringbuf.ErrClosed) {
			return
		}
		var e callsEnd
		if err != nil || len(rec.RawSample) < int(unsafe.Sizeof(e)) {
			continue
		}
		e.Tgid, e.Code = binary.NativeEndian.Uint32(rec.RawSample[8:]), binary.NativeEndian.Uint32(rec.RawSample[12:])
		s.mu.Lock()
		if r := s.ranks[int(e.Tgid)]; r != nil {
			s.look(record.Now()) // its last words
			r.ended(e.Code)
			s.gone(r)
		}
		s.mu.Unlock()
	}
}

// gone lets go of a process that is no more.
func (s *Source) gone(r *rank) {
	delete(s.ranks, r.pid)
	_ = s.probes.calls.Processes.Delete(uint32(r.pid)) // none is there when it was never put
	var key callsCommKey
	var value callsComm
	var keys []callsCommKey
	each := s.probes.calls.Comms.Iterate()
	for each.Next(&key, &value) {
		if key.Tgid == uint32(r.pid) {
			keys = append(keys, key)
		}
	}
	for _, k := range keys {
		_ = s.probes.calls.Comms.Delete(k)
	}
}
