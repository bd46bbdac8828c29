package kubernetes

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/url"
	"strings"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	apierrors "k8s.io/apimachinery/pkg/api/errors"

	"github.com/lockstep-ccl/lockstep/exporters/names"
	"github.com/lockstep-ccl/lockstep/exporters/prom"
	"github.com/lockstep-ccl/lockstep/remediation"
)

type metrics struct {
	calls    *prometheus.CounterVec
	out      *prometheus.GaugeVec
	returned *prometheus.CounterVec
	spares   *prometheus.GaugeVec
	fenced   *prometheus.CounterVec
	forced   prometheus.Counter
	leading  prometheus.Gauge

	unanswered atomic.Int64 // Unix nanoseconds of the last request that the API server did not answer
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
		if isAway(err) {
			m.unanswered.Store(time.Now().UnixNano())
		}
		if result = strings.ToLower(string(apierrors.ReasonForError(err))); result == "" {
			result = "no_answer"
		}
	}
	m.calls.WithLabelValues(verb, result).Inc()
}

// isAway reports whether an error says that the API server was not there to answer: the connection
// failed, or it is starting, stopping or overloaded. What it says of a request (that something is not
// there, or forbidden) is an answer.
func isAway(err error) bool {
	switch {
	case err == nil, errors.Is(err, context.Canceled):
		return false
	case apierrors.IsServiceUnavailable(err), apierrors.IsServerTimeout(err), apierrors.IsTimeout(err), apierrors.IsTooManyRequests(err), apierrors.IsInternalError(err):
		return true
	}
	var answered apierrors.APIStatus
	if errors.As(err, &answered) {
		return answered.Status().Code >= 500
	}
	var request *url.Error // which every failed connection is
	return errors.As(err, &request) || errors.Is(err, io.ErrUnexpectedEOF) || errors.Is(err, syscall.ECONNRESET)
}

// away marks an error of that kind for who calls the actuator, unless it is the caller's time that was over.
func away(ctx context.Context, err error) error {
	if ctx.Err() == nil && isAway(err) && !errors.Is(err, remediation.ErrGone) {
		return fmt.Errorf("%w: %w", remediation.ErrAway, err)
	}
	return err
}
