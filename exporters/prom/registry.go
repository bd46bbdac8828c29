package prom

import (
	"fmt"
	"log/slog"
	"net/http"
	"runtime"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"

	"github.com/lockstep-ccl/lockstep/exporters/names"
)

// Build identifies the binary in lockstep_build_info.
type Build struct {
	Version, Revision string
}

// NewRegistry returns a registry with what every component exposes (build info,
// Go runtime, process) and the given collectors. It panics when two of them
// define the same metric, as prometheus.Registry.MustRegister does.
func NewRegistry(component names.Component, b Build, cs ...prometheus.Collector) *prometheus.Registry {
	reg := prometheus.NewRegistry()
	info := GaugeVec(names.BuildInfo)
	info.WithLabelValues(b.Version, b.Revision, runtime.Version(), string(component)).Set(1)
	reg.MustRegister(info, collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	reg.MustRegister(cs...)
	return reg
}

// Handler serves reg on /metrics. A collector that fails costs its own metrics
// and is logged; the others are still served.
func Handler(reg *prometheus.Registry, log *slog.Logger) http.Handler {
	return promhttp.HandlerFor(reg, promhttp.HandlerOpts{
		EnableOpenMetrics:   true, // exemplars exist in OpenMetrics only
		ErrorHandling:       promhttp.ContinueOnError,
		ErrorLog:            slog.NewLogLogger(log.Handler(), slog.LevelError),
		Registry:            reg,
		MaxRequestsInFlight: 8,
		CoalesceGather:      true,
		OfferedCompressions: []promhttp.Compression{promhttp.Gzip},
	})
}

// CounterVec builds the counter that m defines. Like its siblings it panics
// when m is of another type: that is a mistake in the program.
func CounterVec(m *names.Metric) *prometheus.CounterVec {
	must(m, names.Counter)
	return prometheus.NewCounterVec(prometheus.CounterOpts{Name: m.Name, Help: m.Help, Unit: m.Unit}, m.Labels)
}

// GaugeVec builds the gauge that m defines.
func GaugeVec(m *names.Metric) *prometheus.GaugeVec {
	must(m, names.Gauge)
	return prometheus.NewGaugeVec(prometheus.GaugeOpts{Name: m.Name, Help: m.Help, Unit: m.Unit}, m.Labels)
}

// HistogramVec builds the histogram that m defines: native, with the given
// classic buckets for servers that do not scrape native ones.
func HistogramVec(m *names.Metric, classic ...float64) *prometheus.HistogramVec {
	must(m, names.Histogram)
	return prometheus.NewHistogramVec(prometheus.HistogramOpts{
		Name: m.Name, Help: m.Help, Unit: m.Unit,
		Buckets:                     classic,
		NativeHistogramBucketFactor: 1.1,
		// Below a microsecond a duration is noise: one bucket for all of it
		// leaves 160 buckets, 20 powers of two, to what matters.
		NativeHistogramZeroThreshold:    1.0 / (1 << 20),
		NativeHistogramMaxBucketNumber:  160,
		NativeHistogramMaxZeroThreshold: 1.0 / (1 << 16),
		NativeHistogramMinResetDuration: time.Hour,
	}, m.Labels)
}

// Desc builds the description that m defines, for collectors of constant metrics.
func Desc(m *names.Metric) *prometheus.Desc {
	return prometheus.V2.NewDesc(m.Name, m.Help, prometheus.UnconstrainedLabels(m.Labels), nil, prometheus.WithUnit(m.Unit))
}

func must(m *names.Metric, t names.Type) {
	if m.Type != t {
		panic(fmt.Sprintf("%s is a %s, not a %s", m.Name, m.Type, t))
	}
}
