package prom

import (
	"encoding/hex"
	"strings"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/lockstep-ccl/lockstep/collector"
	"github.com/lockstep-ccl/lockstep/exporters/names"
	"github.com/lockstep-ccl/lockstep/record"
)

// classicBuckets serve servers without native histograms: decades from a
// small NVLink all-reduce to a hang.
var classicBuckets = []float64{1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1, 10}

// collectives holds the metrics that every collective touches. The fold
// goroutine owns the way in, a scrape the way out; the lock between them is
// held for one collective or for one walk over the communicators.
type collectives struct {
	duration, wait *prometheus.HistogramVec
	count, bytes   *prometheus.CounterVec
	families       *families
	opts           Options

	mu    sync.Mutex
	known map[commName]*comm
	kinds int // label sets of duration, wait and bytes
	ends  int // label sets of count
	// recent maps a communicator's id to its name's series without hashing
	// strings. A slot that loses its place costs its communicator one map lookup.
	recent [256]recentComm
}

type commName struct{ job, comm string }

type recentComm struct {
	id        uint64
	job, comm string
	c         *comm // nil: refused
}

// comm holds the series of one communicator name in one job.
type comm struct {
	name    commName
	kinds   [record.NumColls]*kind // by record.CollKind
	touched bool                   // since the last walk
	used    time.Time
}

// results are those that have a series of their own. All that this version does not know share one more.
const results = record.NumResults + 1

type kind struct {
	labels         []string // job, communicator, collective
	duration, wait prometheus.Observer
	bytes          prometheus.Counter
	ends           [results]prometheus.Counter // by record.Result
	endsRefused    [results]bool
	nextExemplar   int64 // CLOCK_MONOTONIC ns
	refused        bool
}

func newCollectives(f *families, opts Options) *collectives {
	return &collectives{
		duration: HistogramVec(names.CollectiveDuration, classicBuckets...),
		wait:     HistogramVec(names.CollectiveWait, classicBuckets...),
		count:    CounterVec(names.Collectives),
		bytes:    CounterVec(names.CollectiveBytes),
		families: f,
		opts:     opts,
		known:    map[commName]*comm{},
	}
}

func (s *collectives) observe(c *collector.Collective) {
	if c.Ended == 0 || c.Former {
		return // only what has ended is counted, and only once: not again by each agent that finds it in the recorder
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	k := s.kind(c)
	if k == nil {
		return
	}
	if end := s.end(k, c.Result); end != nil {
		end.Inc()
	}
	k.bytes.Add(float64(c.Bytes))
	if c.Started == 0 {
		return // its start was lost: there is no duration to speak of
	}
	k.wait.Observe(seconds(c.Wait))
	d := seconds(c.Ended - c.Started)
	if !c.Anomalous || !c.Traced || c.Ended < k.nextExemplar { // an exemplar leads to a trace that is there
		k.duration.Observe(d)
		return
	}
	k.nextExemplar = c.Ended + int64(s.opts.ExemplarEvery)
	trace := collector.TraceID(c.Job, c.CommID, c.Kind, c.Seq)
	k.duration.(prometheus.ExemplarObserver).ObserveWithExemplar(d, prometheus.Labels{names.LabelTraceID: hex.EncodeToString(trace[:])})
}

// kind returns where c is counted, nil when a cap refuses it.
func (s *collectives) kind(c *collector.Collective) *kind {
	slot := &s.recent[c.CommID*0x9e3779b97f4a7c15>>56]
	if slot.id != c.CommID || slot.comm != c.Comm || slot.job != c.Job || slot.job == "" {
		*slot = recentComm{c.CommID, c.Job, c.Comm, s.comm(c.Job, c.Comm)}
	}
	if slot.c == nil {
		return nil
	}
	slot.c.touched = true
	coll := c.Kind
	if int(coll) >= len(slot.c.kinds) {
		coll = record.CollNone
	}
	k := slot.c.kinds[coll]
	if k == nil {
		k = s.newKind(slot.c.name, coll)
		slot.c.kinds[coll] = k
	}
	if k.refused {
		return nil
	}
	return k
}

func (s *collectives) comm(job, name string) *comm {
	key := commName{valid(job), valid(name)}
	c := s.known[key]
	if c == nil {
		if s.kinds >= s.opts.SeriesPerFamily {
			s.refuse(names.CollectiveDuration, names.CollectiveWait, names.CollectiveBytes, names.Collectives)
			return nil
		}
		c = &comm{name: key, used: s.opts.Now()}
		s.known[key] = c
	}
	return c
}

func (s *collectives) newKind(name commName, coll record.CollKind) *kind {
	if s.kinds >= s.opts.SeriesPerFamily {
		s.refuse(names.CollectiveDuration, names.CollectiveWait, names.CollectiveBytes, names.Collectives)
		return &kind{refused: true}
	}
	s.kinds++
	labels := []string{name.job, name.comm, coll.String()}
	return &kind{
		labels:   labels,
		duration: s.duration.WithLabelValues(labels...),
		wait:     s.wait.WithLabelValues(labels...),
		bytes:    s.bytes.WithLabelValues(labels...),
	}
}

func (s *collectives) end(k *kind, r record.Result) prometheus.Counter {
	i := min(int(r), results-1)
	if k.ends[i] == nil && !k.endsRefused[i] {
		if s.ends >= s.opts.SeriesPerFamily {
			k.endsRefused[i] = true
			s.refuse(names.Collectives)
			return nil
		}
		s.ends++
		k.ends[i] = s.count.WithLabelValues(append(k.labels[:3:3], record.Result(i).String())...)
	}
	return k.ends[i]
}

func (s *collectives) refuse(ms ...*names.Metric) {
	for _, m := range ms {
		s.families.refuse(m)
	}
}

// expire deletes the series of communicators that present does not name and that
// have been silent for IdleExpiry. Those of a job that hangs are present, and stay.
func (s *collectives) expire(present map[commName]bool) {
	now := s.opts.Now()
	s.mu.Lock()
	defer s.mu.Unlock()
	deleted := false
	for key, c := range s.known {
		if c.touched || present[key] {
			c.touched, c.used = false, now
			continue
		}
		if now.Sub(c.used) < s.opts.IdleExpiry {
			continue
		}
		deleted = true
		delete(s.known, key)
		for _, k := range c.kinds {
			if k != nil && !k.refused {
				s.drop(k)
			}
		}
	}
	if deleted { // there is room again for whom a cap refused
		clear(s.recent[:])
		for _, c := range s.known {
			c.readmit()
		}
	}
}

func (s *collectives) drop(k *kind) {
	s.kinds--
	s.duration.DeleteLabelValues(k.labels...)
	s.wait.DeleteLabelValues(k.labels...)
	s.bytes.DeleteLabelValues(k.labels...)
	for i, end := range k.ends {
		if end != nil {
			s.ends--
			s.count.DeleteLabelValues(append(k.labels[:3:3], record.Result(i).String())...)
		}
	}
}

func (c *comm) readmit() {
	for i, k := range c.kinds {
		switch {
		case k == nil:
		case k.refused:
			c.kinds[i] = nil
		default:
			clear(k.endsRefused[:])
		}
	}
}

func (s *collectives) Describe(ch chan<- *prometheus.Desc) {
	s.duration.Describe(ch)
	s.wait.Describe(ch)
	s.count.Describe(ch)
	s.bytes.Describe(ch)
}

func (s *collectives) Collect(ch chan<- prometheus.Metric) {
	s.duration.Collect(ch)
	s.wait.Collect(ch)
	s.count.Collect(ch)
	s.bytes.Collect(ch)
}

// seconds converts, and reads clocks that disagree as no time at all.
func seconds(ns int64) float64 { return float64(max(ns, 0)) / 1e9 }

func valid(s string) string { return strings.ToValidUTF8(s, "\uFFFD") }
