package otlp

import (
	"github.com/prometheus/client_golang/prometheus"

	"github.com/lockstep-ccl/lockstep/exporters/names"
	"github.com/lockstep-ccl/lockstep/exporters/prom"
)

var (
	exportedDesc = prom.Desc(names.SpansExported)
	droppedDesc  = prom.Desc(names.SpansDropped)
	eventsDesc   = prom.Desc(names.TraceEventsDropped)
)

var _ prometheus.Collector = (*Tracer)(nil)

// Describe implements prometheus.Collector.
func (t *Tracer) Describe(ch chan<- *prometheus.Desc) {
	ch <- exportedDesc
	ch <- droppedDesc
	ch <- eventsDesc
}

// Collect implements prometheus.Collector. A tracer without an endpoint exports
// and drops nothing, and says so: a panel that is empty looks like a fault.
func (t *Tracer) Collect(ch chan<- prometheus.Metric) {
	e := t.exporter
	if e == nil {
		e = new(exporter)
	}
	ch <- prometheus.MustNewConstMetric(exportedDesc, prometheus.CounterValue, float64(e.exported.Load()))
	ch <- prometheus.MustNewConstMetric(eventsDesc, prometheus.CounterValue, float64(e.events.Load()))
	for i, reason := range dropReasons {
		ch <- prometheus.MustNewConstMetric(droppedDesc, prometheus.CounterValue, float64(e.dropped[i].Load()), reason)
	}
}
