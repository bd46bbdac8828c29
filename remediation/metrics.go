package remediation

import (
	"github.com/prometheus/client_golang/prometheus"

	"github.com/lockstep-ccl/lockstep/exporters/names"
)

type metrics struct {
	webhooks  *prometheus.CounterVec
	actions   *prometheus.CounterVec
	duration  *prometheus.HistogramVec
	pending   prometheus.Gauge
	breaker   *prometheus.GaugeVec
	remaining *prometheus.GaugeVec
}

func newMetrics(reg prometheus.Registerer, dryRun bool) (*metrics, error) {
	counter := func(m *names.Metric) *prometheus.CounterVec {
		return prometheus.NewCounterVec(prometheus.CounterOpts{Name: m.Name, Help: m.Help}, m.Labels)
	}
	gauge := func(m *names.Metric) *prometheus.GaugeVec {
		return prometheus.NewGaugeVec(prometheus.GaugeOpts{Name: m.Name, Help: m.Help}, m.Labels)
	}
	dry := gauge(names.DryRun)
	pending := gauge(names.ActionsPending)
	m := &metrics{
		webhooks:  counter(names.Webhooks),
		actions:   counter(names.Actions),
		duration:  prometheus.NewHistogramVec(prometheus.HistogramOpts{Name: names.ActionDuration.Name, Help: names.ActionDuration.Help, Buckets: []float64{.1, .5, 1, 2, 5, 10, 30, 60, 120}, NativeHistogramBucketFactor: 1.1}, names.ActionDuration.Labels),
		pending:   pending.WithLabelValues(),
		breaker:   gauge(names.BreakerOpen),
		remaining: gauge(names.BreakerRemaining),
	}
	dry.WithLabelValues().Set(0)
	if dryRun {
		dry.WithLabelValues().Set(1)
	}
	// A result that has not happened yet is 0, not absent: rate() sees its first step.
	for _, result := range []string{"accepted", "duplicate", "resolved", "stale", "truncated", "malformed", "version", "incomplete_alert", "unauthorized", "journal_error"} {
		m.webhooks.WithLabelValues(result)
	}
	if reg == nil {
		return m, nil
	}
	for _, c := range []prometheus.Collector{m.webhooks, m.actions, m.duration, pending, m.breaker, m.remaining, dry} {
		if err := reg.Register(c); err != nil {
			return nil, err
		}
	}
	return m, nil
}
