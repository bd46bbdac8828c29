package prom

import (
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/lockstep-ccl/lockstep/exporters/names"
)

// Options bounds what a collector exports. The zero value means the defaults.
type Options struct {
	// SeriesPerFamily caps the label sets of one metric; default 500 on an
	// agent (a native histogram may grow to 30 KiB), 4000 on a master.
	SeriesPerFamily int
	// IdleExpiry is how long the series of a communicator outlive it; default 10 min.
	IdleExpiry time.Duration
	// ExemplarEvery is the least time between two exemplars of one series;
	// default 1 s.
	ExemplarEvery time.Duration
	// Now is the clock; default time.Now.
	Now func() time.Time
}

func (o Options) withDefaults(series int) Options {
	if o.SeriesPerFamily <= 0 {
		o.SeriesPerFamily = series
	}
	if o.IdleExpiry <= 0 {
		o.IdleExpiry = 10 * time.Minute
	}
	if o.ExemplarEvery <= 0 {
		o.ExemplarEvery = time.Second
	}
	if o.Now == nil {
		o.Now = time.Now
	}
	return o
}

// families exports constant metrics under a cap per family. It is safe for
// concurrent passes.
type families struct {
	limit    int
	metrics  []*names.Metric
	descs    map[*names.Metric]*prometheus.Desc
	overflow *prometheus.Desc

	mu     sync.Mutex
	excess map[*names.Metric]int    // label sets over the cap in the last pass
	total  map[*names.Metric]uint64 // label sets ever refused
}

// newFamilies prepares the metrics of a component. Those in elsewhere are
// described and collected by others; only their overflow is counted here, as
// that of all that have labels.
func newFamilies(from names.Component, limit int, elsewhere ...*names.Metric) *families {
	f := &families{
		limit:    limit,
		descs:    map[*names.Metric]*prometheus.Desc{},
		overflow: Desc(names.SeriesOverflow),
		excess:   map[*names.Metric]int{},
		total:    map[*names.Metric]uint64{},
	}
	for _, m := range names.Metrics() {
		if m.From != from {
			continue
		}
		if len(m.Labels) > 0 {
			f.metrics = append(f.metrics, m)
		}
		if !slices.Contains(elsewhere, m) {
			f.descs[m] = Desc(m)
		}
	}
	return f
}

// refuse counts a label set that a family had no room for.
func (f *families) refuse(m *names.Metric) {
	f.mu.Lock()
	f.total[m]++
	f.mu.Unlock()
}

// pass is one collection. It drops a label set that it has sent before, which
// would otherwise fail the whole scrape.
type pass struct {
	*families
	ch   chan<- prometheus.Metric
	sent map[*names.Metric]map[string]bool
	over map[*names.Metric]int
}

func (f *families) begin(ch chan<- prometheus.Metric) *pass {
	return &pass{families: f, ch: ch, sent: map[*names.Metric]map[string]bool{}, over: map[*names.Metric]int{}}
}

func (p *pass) send(m *names.Metric, v float64, labels ...string) {
	for i := range labels {
		labels[i] = valid(labels[i])
	}
	key := strings.Join(labels, "\xff") // no valid UTF-8 contains it
	sent := p.sent[m]
	if sent == nil {
		sent = map[string]bool{}
		p.sent[m] = sent
	}
	if sent[key] {
		return
	}
	if len(sent) >= p.limit {
		p.over[m]++
		return
	}
	sent[key] = true
	kind := prometheus.GaugeValue
	if m.Type == names.Counter {
		kind = prometheus.CounterValue
	}
	p.ch <- prometheus.MustNewConstMetric(p.descs[m], kind, v, labels...)
}

// end counts what this pass refused beyond the pass before, so that scraping
// an unchanged state again counts nothing, and sends the overflow counters of families
// that ever refused anything.
func (p *pass) end() {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, m := range p.metrics {
		if more := p.over[m] - p.excess[m]; more > 0 {
			p.total[m] += uint64(more)
		}
		p.excess[m] = p.over[m]
		if p.total[m] > 0 { // one series a family that never counts would be the most of a small job's
			p.ch <- prometheus.MustNewConstMetric(p.overflow, prometheus.CounterValue, float64(p.total[m]), m.Name)
		}
	}
}

func (f *families) Describe(ch chan<- *prometheus.Desc) {
	for _, d := range f.descs {
		ch <- d
	}
	ch <- f.overflow
}

func boolean(b bool) float64 {
	if b {
		return 1
	}
	return 0
}
