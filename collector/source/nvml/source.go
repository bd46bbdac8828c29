package nvml

import (
	"cmp"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync/atomic"
	"time"

	"github.com/lockstep-ccl/lockstep/collector"
	"github.com/lockstep-ccl/lockstep/collector/source"
	"github.com/lockstep-ccl/lockstep/collector/source/bounded"
	"github.com/lockstep-ccl/lockstep/diagnosis"
	"github.com/lockstep-ccl/lockstep/record"
)

// Options of a Source. Zero fields take the defaults.
type Options struct {
	Period time.Duration // between two probes; 5 s
	// Bound is how long a probe may take before the driver is called
	// unresponsive; 10 s. A probe of 8 GPUs takes some 100 ms.
	Bound time.Duration
	Log   *slog.Logger // nil: slog.Default()
}

const (
	// lookAgain is the time between two attempts to find a driver.
	lookAgain = int64(time.Minute)
	// maxQueued bounds the Xids that wait for the agent's next pass.
	maxQueued = 256
	// maxCodes bounds the codes that are counted apart for one GPU.
	maxCodes = 64
	// maxFatal bounds the fatal Xids of one GPU that are remembered.
	maxFatal = 32
	// waitXid is how long a call waits for an Xid; closing waits for it.
	waitXid = 500 * time.Millisecond
	// calmDown is the wait after waiting itself failed, as it does at once while a GPU is lost.
	calmDown = 2 * time.Second
)

// driver is what the source needs of NVML. Every call may hang for ever; open,
// probe and close are called by one goroutine at a time.
type driver interface {
	// open finds the library and its GPUs. The error is a source.ErrNoData when
	// there is nothing to see.
	open() error
	// probe asks all GPUs. at is told of each call before it is made.
	probe(at func(gpu int, call string)) collector.GPUs
	// wait waits for an Xid until the timeout; errTimeout then, errNoEvents when
	// no GPU tells of any.
	wait(timeout time.Duration) (xid, error)
	close()
}

var (
	errTimeout  = errors.New("no Xid in this time")
	errNoEvents = errors.New("no GPU tells of Xids")
)

// xid is one report; gpu is -1 when the driver does not say whose it is.
type xid struct {
	gpu  int
	code uint32
	at   int64
}

// Source asks the driver. Update is for one goroutine; Close ends it.
type Source struct {
	o       Options
	d       driver
	now     func() int64
	probes  *bounded.Prober[probe]
	xids    chan xid
	dropped atomic.Uint64

	open    bool  // the library is
	err     error // of the last probe
	node    collector.GPUs
	gpus    map[int]*history
	matches map[*source.Process]match
}

// probe is a probe's outcome.
type probe struct {
	node collector.GPUs
	err  error
}

// history is what is kept of a GPU from probe to probe.
type history struct {
	lostAt, throttledAt int64
	xids                []collector.Xid
	fatal               []collector.Xid // one each, oldest first
}

// New returns a source that opens nothing before its first Update. Close it.
func New(o Options) *Source { return newSource(o, newLibrary()) }

func newSource(o Options, d driver) *Source {
	o.Period = cmp.Or(o.Period, 5*time.Second)
	o.Bound = cmp.Or(o.Bound, 10*time.Second)
	o.Log = cmp.Or(o.Log, slog.Default())
	s := &Source{
		o: o, d: d, now: record.Now, xids: make(chan xid, maxQueued),
		gpus: map[int]*history{}, matches: map[*source.Process]match{},
	}
	s.probes = bounded.New(bounded.Options{Period: o.Period, Bound: o.Bound, What: "the GPU driver", Log: o.Log}, s.probe)
	s.at(-1, "Init")
	return s
}

// Update implements source.Source: it takes in what has come, starts the next
// probe when it is due, and never waits. The error is source.ErrNoData on a node without GPUs.
func (s *Source) Update(v *source.View) error {
	if p, began, ok := s.probes.Take(); ok {
		s.take(p, began, v.Now)
	}
	s.takeXids()
	s.probes.Ask(v.Now)
	err := s.err
	if s.node.UnresponsiveAt, s.node.Hangs = s.probes.Hangs(v.Now); s.node.UnresponsiveAt != 0 {
		err = fmt.Errorf("the GPU driver does not answer: %s has not returned", s.node.Hangs)
	}
	s.publish(v)
	s.match(v)
	return err
}

// Close ends the source's goroutines and closes the library; calls that do not
// return are left behind. Update is not to be called after it.
func (s *Source) Close() error { return s.probes.Close(s.d.close) }

// probe runs in a goroutine of its own, one at a time.
func (s *Source) probe() probe {
	if !s.open {
		if err := s.d.open(); err != nil {
			return probe{err: err}
		}
	}
	began := time.Now()
	node := s.d.probe(s.at)
	node.ProbeNs = max(time.Since(began).Nanoseconds(), 1)
	return probe{node: node}
}

// at notes the call that comes next: it may be the one that hangs. A gpu below 0 is none.
func (s *Source) at(gpu int, call string) {
	if gpu >= 0 {
		call = fmt.Sprintf("%s of GPU %d", call, gpu)
	}
	s.probes.At(call)
}

// take takes in a probe's outcome.
func (s *Source) take(p probe, began, now int64) {
	if p.err != nil {
		if s.err == nil || s.err.Error() != p.err.Error() {
			if errors.Is(p.err, source.ErrNoData) {
				s.o.Log.Info("no GPUs are watched", "why", p.err)
			} // others are the agent's to tell of
		}
		s.err = p.err
		s.probes.Next(now + lookAgain)
		return
	}
	if !s.open {
		s.open, s.err = true, nil
		s.o.Log.Info("GPUs are watched", "gpus", len(p.node.GPUs), "driver", p.node.DriverVersion)
		s.probes.Go(s.watch)
	}
	s.node = p.node
	s.node.ProbedAt = began
	for i := range s.node.GPUs {
		g := &s.node.GPUs[i]
		h := s.history(g.Index)
		since(&h.lostAt, g.Lost, began)
		slow := g.Throttle != nil && *g.Throttle&diagnosis.SlowedDown != 0
		since(&h.throttledAt, slow, began)
	}
}

// since keeps in at when something began to hold.
func since(at *int64, holds bool, now int64) {
	switch {
	case !holds:
		*at = 0
	case *at == 0:
		*at = now
	}
}

func (s *Source) history(gpu int) *history {
	h := s.gpus[gpu]
	if h == nil {
		h = &history{}
		s.gpus[gpu] = h
	}
	return h
}

// watch waits for Xids.
func (s *Source) watch() {
	told := ""
	for s.probes.Context().Err() == nil {
		x, err := s.d.wait(waitXid)
		switch {
		case err == nil:
			x.at = s.now()
			select {
			case s.xids <- x:
			default:
				s.dropped.Add(1)
			}
			continue
		case errors.Is(err, errTimeout):
			continue
		case errors.Is(err, errNoEvents):
			s.o.Log.Warn("Xids are not seen", "err", err)
			return
		}
		if err.Error() != told {
			told = err.Error()
			s.o.Log.Warn("waiting for Xids fails", "err", err)
		}
		select {
		case <-s.probes.Context().Done():
		case <-time.After(calmDown):
		}
	}
}

// takeXids counts what has come since the last pass.
func (s *Source) takeXids() {
	for range maxQueued {
		select {
		case x := <-s.xids:
			s.count(x)
		default:
			return
		}
	}
}

func (s *Source) count(x xid) {
	text, effect := diagnosis.DescribeXid(x.code)
	if x.gpu < 0 {
		s.o.Log.Warn("an Xid that the driver assigns to no GPU", "xid", x.code, "meaning", text)
		s.dropped.Add(1)
		return
	}
	h := s.history(x.gpu)
	i := slices.IndexFunc(h.xids, func(c collector.Xid) bool { return c.Code == x.code })
	if i < 0 {
		if len(h.xids) == maxCodes {
			s.dropped.Add(1)
			return
		}
		i = len(h.xids)
		h.xids = append(h.xids, collector.Xid{Code: x.code})
		s.o.Log.Warn("Xid", "gpu", x.gpu, "xid", x.code, "meaning", text, "ends", effect) // later ones are counted only
	}
	h.xids[i].Count++
	h.xids[i].At = x.at
	if effect.Fatal() {
		if len(h.fatal) == maxFatal {
			h.fatal = slices.Delete(h.fatal, 0, 1)
		}
		h.fatal = append(h.fatal, collector.Xid{Code: x.code, Count: 1, At: x.at})
	}
}

// publish hands a copy to the view: what was published before stays as it is.
func (s *Source) publish(v *source.View) {
	v.GPUs = nil
	if !s.open && s.node.UnresponsiveAt == 0 {
		return
	}
	out := s.node
	out.XidsDropped = s.dropped.Load()
	out.GPUs = slices.Clone(s.node.GPUs)
	for i := range out.GPUs {
		g := &out.GPUs[i]
		h := s.history(g.Index)
		g.LostAt, g.ThrottledAt, g.Xids = h.lostAt, h.throttledAt, slices.Clone(h.xids)
	}
	v.GPUs = &out
}
