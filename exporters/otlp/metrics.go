package otlp

import (
	"github.com/prometheus/client_golang/prometheus"

	"github.com/lockstep-ccl/lockstep/exporters/names"
	"github.com/lockstep-ccl/lockstep/exporters/prom"
)

var (
	exportedDesc = prom.Desc(names.SpansExported)
	droppedDesc  = prom.Desc(names.SpansDropped)
)

var _ prometheus.Collector = (*Tracer)(nil)

// Describe implements prometheus.Collector.
func (t *Tracer) Describe(ch chan<- *prometheus.Desc) {
	ch <- exportedDesc
	ch <- droppedDesc
}

// Collect implements prometheus.Collector. A tracer without an endpoint has
// nothing to say.
func (t *Tracer) Collect(ch chan<- prometheus.Metric) {
	if t.exporter == nil {
		return
	}
	ch <- prometheus.MustNewConstMetric(exportedDesc, prometheus.CounterValue, float64(t.exporter.exported.Load()))
	for i, reason := range dropReasons {
		ch <- prometheus.MustNewConstMetric(droppedDesc, prometheus.CounterValue, float64(t.exporter.dropped[i].Load()), reason)
	}
}
