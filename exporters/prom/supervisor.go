package prom

import (
	"github.com/prometheus/client_golang/prometheus"

	"github.com/lockstep-ccl/lockstep/exporters/names"
)

// Supervision is what a supervisor of `lockstep run` on several machines knows at a moment.
type Supervision struct {
	Job           string
	Heard         bool // the coordinator, within the lease
	Ranks         map[string]int
	LeasesExpired uint64
	Coordination  *Coordination // nil where it does not coordinate
}

// Coordination is what the coordinator knows.
type Coordination struct {
	Attempt     int // -1: none
	Attempts    uint64
	Needed      int
	Hosts       map[string]int // by state
	Connections int
	Joined      uint64
	Refused     map[string]uint64 // by reason
}

// Supervisor exports a supervisor. It is safe for concurrent scrapes.
type Supervisor struct {
	snapshot func() Supervision
	families *families
}

var _ prometheus.Collector = (*Supervisor)(nil)

// NewSupervisor returns an exporter of what snapshot returns, which must return at once.
func NewSupervisor(snapshot func() Supervision, opts Options) *Supervisor {
	opts = opts.withDefaults(500)
	return &Supervisor{snapshot, newFamilies(names.Supervisor, opts.SeriesPerFamily)}
}

// Describe implements prometheus.Collector.
func (c *Supervisor) Describe(ch chan<- *prometheus.Desc) { c.families.Describe(ch) }

// Collect implements prometheus.Collector.
func (c *Supervisor) Collect(ch chan<- prometheus.Metric) {
	p := c.families.begin(ch)
	defer p.end()
	s := c.snapshot()
	p.send(names.SupervisorHeard, boolean(s.Heard), s.Job)
	p.send(names.SupervisorLeases, float64(s.LeasesExpired), s.Job)
	for state, n := range s.Ranks {
		p.send(names.SupervisorRanks, float64(n), s.Job, state)
	}
	k := s.Coordination
	if k == nil {
		return
	}
	p.send(names.CoordinatorAttempt, float64(k.Attempt), s.Job)
	p.send(names.CoordinatorAttempts, float64(k.Attempts), s.Job)
	p.send(names.CoordinatorNeeded, float64(k.Needed), s.Job)
	p.send(names.CoordinatorConns, float64(k.Connections), s.Job)
	p.send(names.CoordinatorJoins, float64(k.Joined), s.Job)
	for state, n := range k.Hosts {
		p.send(names.CoordinatorHosts, float64(n), s.Job, state)
	}
	for reason, n := range k.Refused {
		p.send(names.CoordinatorRefused, float64(n), s.Job, reason)
	}
}
