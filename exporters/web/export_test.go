package web

import (
	"net/http/httptest"
	"time"

	"github.com/lockstep-ccl/lockstep/collector"
)

// Page renders the status page again and again, for benchmarks.
func Page(snapshot func() *collector.MasterSnapshot, job func() *collector.JobView) func() {
	s := &status{snapshot, job, Links{}, time.Now}
	return func() { s.html(httptest.NewRecorder(), httptest.NewRequest("GET", "/status", nil)) }
}
