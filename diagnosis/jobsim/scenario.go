package jobsim

import (
	"fmt"
	"time"

	"github.com/lockstep-ccl/lockstep/diagnosis"
)

// Set is a family of scenarios. Detectors are tuned on one and reported on
// another one, whose jobs, parameters and seeds are others.
type Set uint8

const (
	Tuning Set = iota
	Reporting
)

func (s Set) String() string { return [...]string{"tuning", "report"}[min(s, 1)] }

// maker makes one scenario.
type maker struct {
	set   Set
	rng   *rng
	ranks int
	c     Config
	s     *Scenario
	job   *Job // of c, without faults: what it is wired like
	// dearest is what a slower network costs a step, ns, by the slot that it costs most.
	dearest float64
}

// row is one kind of scenario: what it does to a job that fits, false when the job
// does not.
type row struct {
	name string
	fit  func(m *maker) // changes the job before it is wired; nil: nothing to change
	make func(m *maker) bool
}

// Rows lists the names of all kinds of scenario, the healthy ones first.
func Rows() []string {
	var names []string
	for i := range rows {
		names = append(names, rows[i].name)
	}
	return names
}

// Make makes the scenario of a set, a row, a seed and a size of the world. The
// same arguments make the same scenario.
func Make(set Set, name string, seed uint64, ranks int) (*Scenario, error) {
	for i := range rows {
		if rows[i].name != name {
			continue
		}
		r := rng(hash(seed, uint64(ranks), uint64(set)<<32|uint64(i)))
		for range 64 { // jobs that do not fit the fault are drawn again
			m := &maker{set: set, rng: &r, ranks: ranks, s: &Scenario{Name: name, Seed: seed}}
			if set == Tuning {
				m.c = tuningJob(m)
			} else {
				m.c = reportingJob(m)
			}
			m.c.Name, m.c.Seed = fmt.Sprintf("%v-%s-%d-%d", set, name, ranks, seed), r.next()
			if rows[i].fit != nil {
				rows[i].fit(m)
			}
			full, err := m.c.withDefaults()
			if err != nil || full.Ranks() != ranks {
				continue
			}
			m.c = full
			m.s.Step = m.c.stepTime()
			if rows[i].make(m) {
				m.s.Config = m.c
				return m.s, nil
			}
		}
		return nil, fmt.Errorf("jobsim: no job of %d ranks fits %s (seed %d)", ranks, name, seed)
	}
	return nil, fmt.Errorf("jobsim: no kind of scenario %q", name)
}

func pick[T any](m *maker, of ...T) T { return of[m.rng.intn(len(of))] }

func (m *maker) chance(p float64) bool { return m.rng.float() < p }

func (m *maker) between(lo, hi time.Duration) time.Duration {
	return lo + time.Duration(m.rng.int63n(int64(hi-lo)+1))
}

// factor draws how much slower something is: tuning from a few values, reporting
// from all between.
func (m *maker) factor(lo, hi float64) float64 {
	if m.set == Tuning {
		return lo + (hi-lo)*float64(m.rng.intn(4))/3
	}
	return m.rng.between(lo, hi)
}

// wired is the job without faults.
func (m *maker) wired() *Job {
	if m.job == nil {
		m.job, _ = New(m.c)
	}
	return m.job
}

func (m *maker) rank() int { return m.rng.intn(m.ranks) }

func (m *maker) nodes() int {
	return (m.ranks + m.c.Cluster.RanksPerNode - 1) / m.c.Cluster.RanksPerNode
}

func (m *maker) node(rank int) int32 { return int32(rank / m.c.Cluster.RanksPerNode) }

// pair draws a connection between nodes, as ranks; false when there is none.
func (m *maker) pair(told bool) (src, dst int, ok bool) {
	j := m.wired()
	for range 200 {
		c := j.comms[m.rng.intn(len(j.comms))]
		e := &c.edges[m.rng.intn(len(c.edges))]
		src, dst := c.members[e.src].World, c.members[e.dst].World
		if j.ranks[src].node != j.ranks[dst].node && (!told || e.told) && c.slot != slotWorld {
			return int(src), int(dst), true
		}
	}
	return 0, 0, false
}

// early is a moment for a fault that needs no history, late for one that takes a
// baseline: some dozen steps.
func (m *maker) early() time.Duration {
	return m.c.Warmup + 3*time.Second + m.between(4*m.s.Step, 8*m.s.Step)
}

func (m *maker) late() time.Duration {
	return m.c.Warmup + 2*time.Second + m.between(22*m.s.Step, 28*m.s.Step)
}

// fault adds a fault with its truth.
func (m *maker) fault(f Fault, t Truth) bool {
	t.Fault = len(m.c.Faults)
	m.c.Faults = append(m.c.Faults, f)
	if t.Within == 0 {
		t.Within = 30 * time.Second
		if t.Classes[0] == diagnosis.CommunicationSlow || t.Classes[0] == diagnosis.NoncommunicationSlow {
			t.Within, t.Steps = 5*time.Second+20*m.s.Step, 20
		}
	}
	m.s.Truths = append(m.s.Truths, t)
	if t.Steps > 0 && t.Want > 0 {
		m.s.Length = max(m.s.Length, f.At+t.Within+longer)
	}
	m.s.Length = max(m.s.Length, f.At+t.Within+after+2*m.s.Step)
	return true
}

func (m *maker) hang(f Fault, t Truth) bool {
	f.At = m.early()
	t.Classes, t.Want = append(t.Classes, diagnosis.NoncommunicationHang), diagnosis.Confirmed
	return m.fault(f, t)
}

func (m *maker) slow(f Fault, t Truth) bool {
	f.At = m.late()
	if len(t.Classes) == 0 {
		t.Classes = []diagnosis.Class{diagnosis.NoncommunicationSlow}
	}
	t.Want = diagnosis.Confirmed
	return m.fault(f, t)
}

var (
	commSlow = []diagnosis.Class{diagnosis.CommunicationSlow}
	commHang = []diagnosis.Class{diagnosis.CommunicationHang}
)

// healthy lets the job run for longer than suspicions take to count, where that is affordable.
func (m *maker) healthy() bool {
	switch {
	case m.ranks <= 16:
		m.s.Length = 30 * time.Minute
	case m.ranks <= 128:
		m.s.Length = 20 * time.Minute
	case m.ranks <= 1024:
		m.s.Length = 12 * time.Minute
	case m.ranks <= 8192:
		m.s.Length = 2 * time.Minute
	default:
		m.s.Length = time.Minute
	}
	return true
}

func (m *maker) pauses(p ...Pause) { m.c.Pauses = append(m.c.Pauses, p...) }
