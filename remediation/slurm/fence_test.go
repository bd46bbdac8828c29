package slurm

import (
	"context"
	"strings"
	"testing"
	"time"

	"github.com/lockstep-ccl/lockstep/remediation"
)

// leaseFencer proves nothing before the lease is over.
type leaseFencer struct {
	over  time.Time
	known bool // it says when that will be
	asked int
}

func (f *leaseFencer) Fence(ctx context.Context, _ string, _ int, _ string) (remediation.Proof, error) {
	f.asked++
	select {
	case <-ctx.Done():
	case <-time.After(time.Until(f.over)):
		return remediation.Proof{Proven: true, How: "its lease is over"}, nil
	}
	p := remediation.Proof{How: "a node is not heard"}
	if f.known {
		p.In = time.Until(f.over)
	}
	return p, nil
}

// TestLeaseWait: proof by a lease is waited for where that is soon, and not where nobody knows.
func TestLeaseWait(t *testing.T) {
	for _, c := range []struct {
		name   string
		in     time.Duration
		known  bool
		proven bool
		asked  int
	}{
		{"soon", 150 * time.Millisecond, true, true, 2},
		{"late", time.Hour, true, false, 1},
		{"not known", 150 * time.Millisecond, false, false, 1},
		{"at once", 0, true, true, 1},
	} {
		t.Run(c.name, func(t *testing.T) {
			f := &leaseFencer{over: time.Now().Add(c.in), known: c.known}
			a := &Actuator{o: Options{Fence: f, FenceTimeout: 50 * time.Millisecond, LeaseWait: 10 * time.Second, tick: time.Millisecond}}
			proven, how := a.fence(t.Context(), &entry{Job: "j", Culprit: "n1"})
			if proven != c.proven || f.asked != c.asked || !proven && !strings.Contains(how, "a node is not heard") {
				t.Errorf("proven %v (%s), asked %d times", proven, how, f.asked)
			}
		})
	}
}
