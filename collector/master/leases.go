package master

import (
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"os"

	"github.com/lockstep-ccl/lockstep/collector/wire"
)

// This file saves which nodes have ranks with a lease, for the next master. It would know
// nothing of a node that is cut off, and could prove nothing about it.

const (
	leaseFile   = "leases.json"
	leaseFormat = 1
	leaseLimit  = 64 << 20
	// leaseLook is the time between two looks at what is to be kept, ns.
	leaseLook = int64(2e9)
)

// leases are those of an attempt's nodes, by name.
type leases struct {
	Attempt uint32              `json:"attempt"`
	Nodes   map[string]expected `json:"nodes"`
}

type savedLeases struct {
	Version int    `json:"version"`
	Job     string `json:"job"`
	leases
}

// keepLeases saves the nodes that have ranks with a lease when they have changed. Each pass
// calls it with Master.mu held. It does not wait for the file, which is of no use after the
// host's next boot.
func (m *Master) keepLeases(now int64) {
	if m.dir == nil || m.state.epochs == 0 || now-m.fences.keptAt < leaseLook {
		return
	}
	m.fences.keptAt = now
	f := fence{Attempt: m.state.attempt, Expected: map[string]expected{}}
	m.expectHeard(&f)
	l, kept := leases{f.Attempt, map[string]expected{}}, &m.fences.kept
	if l.Attempt == kept.Attempt {
		maps.Copy(l.Nodes, kept.Nodes) // a node that is not heard has its ranks still
	}
	for name, e := range f.Expected {
		e.LastSeen = 0 // the next master counts from its own start
		if l.Nodes[name] = e; e.Lease == 0 {
			delete(l.Nodes, name)
		}
	}
	if l.Attempt == kept.Attempt && maps.Equal(l.Nodes, kept.Nodes) {
		return
	}
	b, err := json.Marshal(savedLeases{leaseFormat, m.o.Job, l})
	if err == nil {
		err = m.dir.ReplaceUntilBoot(leaseFile, b)
	}
	if err != nil {
		if !m.fences.unkept {
			m.log.Error("which nodes have leases is not known to this master's successor", "err", err)
		}
		m.fences.unkept = true
		return
	}
	m.fences.kept, m.fences.unkept = l, false
}

// loadLeases reads what the last master has saved. A damaged file is no error: without it
// nothing is proven about nodes that do not come back.
func (m *Master) loadLeases() {
	b, err := m.dir.ReadFile(leaseFile, leaseLimit)
	if errors.Is(err, os.ErrNotExist) {
		return
	}
	var l leases
	if err == nil {
		l, err = parseLeases(b, m.o.Job)
	}
	if err != nil {
		m.log.Warn("leases of the last run are lost", "err", err)
		return
	}
	m.fences.kept = leases{l.Attempt, maps.Clone(l.Nodes)} // for the next one, too
	for name, e := range l.Nodes {
		e.LastSeen = m.now() // the last master may have heard it until it ended
		l.Nodes[name] = e
	}
	m.fences.former = l
}

func parseLeases(b []byte, job string) (leases, error) {
	var s savedLeases
	if err := json.Unmarshal(b, &s); err != nil {
		return leases{}, err
	}
	if s.Version != leaseFormat || s.Job != job || s.Attempt > maxAttempt {
		return leases{}, fmt.Errorf("version %d, job %.64q, attempt %d", s.Version, s.Job, s.Attempt)
	}
	for name, e := range s.Nodes {
		if len(name) > wire.MaxName || e.Lease <= 0 || e.Margin <= 0 {
			return leases{}, fmt.Errorf("node %.64q: lease %d, margin %d", name, e.Lease, e.Margin)
		}
	}
	return s.leases, nil
}

// expectFormer adds to an order the nodes that the last master knew and this one has not heard.
func (m *Master) expectFormer(f *fence) {
	if m.fences.former.Attempt > f.Attempt {
		return
	}
	for name, e := range m.fences.former.Nodes {
		if _, known := f.Expected[name]; !known && (f.Node == "" || f.Node == name) && m.nodeIndex(name) < 0 {
			f.Expected[name] = e
		}
	}
}
