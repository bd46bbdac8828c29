package process

import (
	"errors"
	"fmt"
	"slices"
	"time"
)

// Stats are what a host's supervisor, and the coordinator where it is that, know and have counted.
type Stats struct {
	Job             string
	Heard           bool // the coordinator, within the lease
	Running, Exited int  // ranks of this host
	LeasesExpired   uint64
	Coordinator     *CoordinatorStats // nil unless this host coordinates
}

// CoordinatorStats are the coordinator's.
type CoordinatorStats struct {
	Attempt     int    // the last begun; -1 none
	Attempts    uint64 // begun since the books of the job were
	Needed      int    // hosts
	Hosts       map[HostState]int
	Connections int    // of supervisors that were let in
	Joined      uint64 // such connections ever
	HungUp      uint64 // connections, because there were too many
	Refused     map[RefusalReason]uint64
	Unwritten   string // why the last decision is not on disk; "" when it is
}

// HostState is what a host is to the coordinator.
type HostState string

const (
	HostRunning  HostState = "running"  // heard, and of the attempt that runs
	HostStandby  HostState = "standby"  // heard, and of none
	HostSilent   HostState = "silent"   // of the last attempt, and not heard
	HostExcluded HostState = "excluded" // left out, heard or not
)

// HostStates are all of them.
func HostStates() []HostState {
	return []HostState{HostRunning, HostStandby, HostSilent, HostExcluded}
}

// Stats is safe for concurrent use, at any time.
func (s *Host) Stats() Stats {
	s.mu.Lock()
	st := Stats{Job: s.o.Job, Heard: time.Now().Before(s.until), LeasesExpired: s.expired.Load()}
	for _, r := range s.ranks {
		if r.State == "exited" {
			st.Exited++
		} else {
			st.Running++
		}
	}
	s.mu.Unlock()
	if c := s.coordinator.Load(); c != nil {
		st.Coordinator = c.stats()
	}
	return st
}

// Ready returns why this host cannot do its part now.
func (s *Host) Ready() error {
	st := s.Stats()
	switch c := st.Coordinator; {
	case c != nil && c.Unwritten != "":
		return fmt.Errorf("the coordinator's books cannot be written: %s", c.Unwritten)
	case !st.Heard:
		return errors.New("the coordinator is not heard")
	}
	return nil
}

// stats waits for nobody: a disk that does not answer holds the coordinator's lock up, and who asks
// is told of that by what was so before.
func (c *coordinator) stats() *CoordinatorStats {
	s := CoordinatorStats{Attempt: -1}
	if c.mu.TryLock() {
		g := c.g
		s.Attempt, s.Attempts, s.Needed, s.Hosts = g.b.Attempt, g.b.Generation, g.o.Hosts, g.states(time.Now())
		s.Connections, s.Joined, s.Unwritten = len(c.peers), c.joined, c.unwritten
		kept := s
		c.last.Store(&kept)
		c.mu.Unlock()
	} else if last := c.last.Load(); last != nil {
		s = *last
	}
	if since := c.writing.Load(); since != 0 {
		if took := time.Since(time.Unix(0, since)); took > writePatience {
			s.Unwritten = fmt.Sprintf("the disk has not answered for %v", took.Round(time.Second))
		}
	}
	s.HungUp, s.Refused = c.admission.HungUp(), map[RefusalReason]uint64{}
	for why, n := range c.admission.refused {
		s.Refused[why] = n.Load()
	}
	s.Refused[RefusedSilent] += c.admission.Silent() // those that have not said even a first message
	return &s
}

const writePatience = 5 * time.Second

// states counts hosts by what they are now.
func (g *group) states(now time.Time) map[HostState]int {
	n := map[HostState]int{HostExcluded: len(g.b.Excluded)}
	heard := func(node string) bool {
		h := g.hosts[node]
		return h != nil && h.conn != 0 && now.Sub(h.heard) < g.o.Lease
	}
	of := map[string]bool{}
	for _, p := range g.b.Hosts {
		of[p.Node] = true
		switch {
		case slices.Contains(g.b.Excluded, p.Node):
		case !heard(p.Node):
			n[HostSilent]++
		case g.b.Phase == phaseRun:
			n[HostRunning]++
		default:
			n[HostStandby]++
		}
	}
	for node := range g.hosts {
		if !of[node] && heard(node) && !slices.Contains(g.b.Excluded, node) {
			n[HostStandby]++
		}
	}
	return n
}
