// Package supervisor is the source that reads how processes ended by the word of whoever
// started them: `lockstep run` reaps its ranks, so it alone knows their wait status, and
// which of them it has told to end itself. It writes that beside the rank's recorder
// (record.WriteEnd) as soon as it has reaped it.
//
// The source runs after the proc source and looks for what is told of the processes that
// are dead, for a while: a shell between the supervisor and the rank may end later. It
// writes nothing, and believes a file of the recorder's own user and of root only.
package supervisor

import (
	"errors"
	"os"

	"github.com/lockstep-ccl/lockstep/collector/source"
	"github.com/lockstep-ccl/lockstep/diagnosis"
	"github.com/lockstep-ccl/lockstep/record"
)

// lookFor is for how long after a death its word is waited for, ns.
const lookFor = int64(10e9)

// Source reads what supervisors tell. It is for one goroutine.
type Source struct {
	dead map[*source.Process]int64 // since when those are that nothing is told of, as this source saw it
}

// New returns a source.
func New() *Source { return &Source{dead: map[*source.Process]int64{}} }

// Update implements source.Source. The error is of one of the files that cannot be read.
func (s *Source) Update(v *source.View) error {
	var failed error
	here := make(map[*source.Process]bool, len(s.dead))
	for _, p := range v.Processes {
		if !p.Dead() {
			continue
		}
		here[p] = true
		since, seen := s.dead[p]
		if !seen {
			since = v.Now
			s.dead[p] = since
		}
		if p.Exit.By == diagnosis.ExitSupervisor || v.Now-since > lookFor {
			continue
		}
		e, err := record.EndOf(p.Path, p.Header)
		switch {
		case err == nil:
			if e.PID > 0 && (e.PID == p.PID || e.PID == p.HostPID) { // and no shell above it
				// Both saw it after it had happened: who was earlier is nearer.
				e.At = min(e.At, p.StateAt)
				p.StateAt = e.At
			}
			p.Exit = diagnosis.Exit{By: diagnosis.ExitSupervisor, Code: e.Code, Signal: e.Signal, At: e.At, Asked: e.Asked}
		case !errors.Is(err, os.ErrNotExist):
			failed = err
		}
	}
	for p := range s.dead {
		if !here[p] {
			delete(s.dead, p)
		}
	}
	return failed
}
