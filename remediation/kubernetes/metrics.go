package kubernetes

import (
	"strings"

	"github.com/prometheus/client_golang/prometheus"
	apierrors "k8s.io/apimachinery/pkg/api/errors"

	"github.com/lockstep-ccl/lockstep/exporters/names"
	"github.com/lockstep-ccl/lockstep/exporters/prom"
)

type metrics struct {
	calls    *prometheus.CounterVec
	out      *prometheus.GaugeVec
	returned *prometheus.CounterVec
	spares   *prometheus.GaugeVec
	fenced   *prometheus.CounterVec
	forced   prometheus.Counter
	leading  prometheus.Gauge
}

func newMetrics(reg prometheus.Registerer) (*metrics, error) {
	forced, leading := prom.CounterVec(names.ForcedDeletions), prom.GaugeVec(names.Leading)
	m := &metrics{
		calls: prom.CounterVec(names.SchedulerCalls), out: prom.GaugeVec(names.NodesOut), returned: prom.CounterVec(names.NodesReturned),
		spares: prom.GaugeVec(names.SpareNodes), fenced: prom.CounterVec(names.Fences),
		forced: forced.WithLabelValues(), leading: leading.WithLabelValues(),
	}
	m.leading.Set(1)
	for _, why := range []string{whySuspect, whySilent} {
		m.out.WithLabelValues(why)
		m.returned.WithLabelValues(why)
	}
	for _, result := range []string{"proven", "unproven", "waiting"} {
		m.fenced.WithLabelValues(result)
	}
	if reg == nil {
		return m, nil
	}
	for _, c := range []prometheus.Collector{m.calls, m.out, m.returned, m.spares, m.fenced, forced, leading} {
		if err := reg.Register(c); err != nil {
			return nil, err
		}
	}
	return m, nil
}

// called counts a request to the API server.
func (m *metrics) called(verb string, err error) {
	result := "ok"
	if err != nil {
		if result = strings.ToLower(string(apierrors.ReasonForError(err))); result == "" {
			result = "no_answer"
		}
	}
	m.calls.WithLabelValues(verb, result).Inc()
}
