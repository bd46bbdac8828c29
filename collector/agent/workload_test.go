package agent

import (
	"os"
	"testing"

	"github.com/lockstep-ccl/lockstep/collector"
)

// Where a rank runs is read from its own environment, and nothing else of that.
func TestWorkload(t *testing.T) {
	a := newAgent(t)
	a.o.Workload = func(getenv func(string) string) *collector.Workload {
		if getenv("NOT_SET_ANYWHERE") != "" {
			t.Error("a variable that is not there")
		}
		return &collector.Workload{Attributes: []collector.Attribute{{Key: "path", Value: getenv("PATH")}}}
	}
	w := a.workload(int32(os.Getpid()))
	if w == nil || w.Attributes[0].Value == "" {
		t.Errorf("workload %+v", w)
	}
	if a.workload(1<<30) != nil || a.workload(0) != nil {
		t.Error("of no process")
	}
}
