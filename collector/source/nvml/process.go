package nvml

import (
	"cmp"
	"encoding/hex"
	"slices"
	"strings"
	"time"

	"github.com/lockstep-ccl/lockstep/collector"
	"github.com/lockstep-ccl/lockstep/collector/source"
	"github.com/lockstep-ccl/lockstep/diagnosis"
)

// lastWords is how long after a process was found dead its GPU's Xids are still its own:
// they are what it died of.
const lastWords = 5 * time.Second

// match is the GPUs that a process uses, by index. It outlives the process,
// which the driver forgets.
type match struct {
	gpus   []int
	tables int   // devices in the recorder's table when gpus were found in it; 0: by pid
	since  int64 // when it was first made
}

// match tells each process how its GPU is.
func (s *Source) match(v *source.View) {
	here := make(map[*source.Process]bool, len(v.Processes))
	sharers := map[int]int{}
	for _, p := range v.Processes {
		here[p] = true
		s.find(p)
		if !p.Dead() {
			for _, g := range s.matches[p].gpus {
				sharers[g]++
			}
		}
	}
	for p := range s.matches {
		if !here[p] {
			delete(s.matches, p)
		}
	}
	for _, p := range v.Processes {
		s.tell(p, sharers)
	}
}

// find looks for a process's GPUs.
func (s *Source) find(p *source.Process) {
	m := s.matches[p]
	if len(p.Devices) > m.tables {
		var byUUID []int
		for i := range p.Devices {
			for k := range s.node.GPUs {
				if g := &s.node.GPUs[k]; sameUUID(g.UUID, p.Devices[i].UUID) && !slices.Contains(byUUID, g.Index) {
					byUUID = append(byUUID, g.Index)
				}
			}
		}
		if len(byUUID) > 0 {
			s.matches[p] = match{byUUID, len(p.Devices), cmp.Or(m.since, s.now())}
			return
		}
	}
	if m.tables > 0 || p.Dead() || p.HostPID == 0 {
		return
	}
	// The driver tells an agent pids of the agent's own namespace.
	var byPID []int
	for k := range s.node.GPUs {
		if g := &s.node.GPUs[k]; slices.Contains(g.PIDs, p.HostPID) {
			byPID = append(byPID, g.Index)
		}
	}
	if len(byPID) > 0 {
		s.matches[p] = match{gpus: byPID, since: cmp.Or(m.since, s.now())}
	}
}

// sameUUID compares NVML's text with the recorder's bytes.
func sameUUID(text string, id [16]byte) bool {
	text, ok := strings.CutPrefix(text, "GPU-")
	if !ok || id == [16]byte{} {
		return false
	}
	return strings.ReplaceAll(text, "-", "") == hex.EncodeToString(id[:])
}

// tell fills in a process's GPU: of several the one in the worst state.
func (s *Source) tell(p *source.Process, sharers map[int]int) {
	p.GPU, p.Xid = diagnosis.GPU{}, 0
	worst := -1
	for _, index := range s.matches[p].gpus {
		h := s.history(index)
		g := diagnosis.GPU{Seen: true, Index: uint16(index), UnresponsiveAt: s.node.UnresponsiveAt}
		x := h.reason(p, s.matches[p].since, sharers[index])
		g.XidAt = x.At
		if !p.Dead() { // later it is of no matter to it
			g.LostAt, g.ThrottledAt = h.lostAt, h.throttledAt
			if h.throttledAt != 0 {
				g.Throttle = s.throttle(index) & diagnosis.SlowedDown
			}
		}
		if n := badness(x.Code, &g); n > worst {
			worst = n
			p.GPU, p.Xid = g, x.Code
		}
	}
}

func (s *Source) throttle(index int) diagnosis.Throttle {
	for i := range s.node.GPUs {
		if g := &s.node.GPUs[i]; g.Index == index && g.Throttle != nil {
			return *g.Throttle
		}
	}
	return 0
}

func badness(code uint32, g *diagnosis.GPU) int {
	_, effect := diagnosis.DescribeXid(code)
	n := 0
	if code != 0 {
		n += 4 * int(effect)
	}
	if g.LostAt != 0 {
		n += 2
	}
	if g.ThrottledAt != 0 {
		n++
	}
	return n
}

// reason is the fatal Xid of a process's time that counts: the gravest, and of
// these the first, since the others follow from it. One that ends an
// application says nothing of a process that shares the GPU with others: the driver
// does not tell which of them it means.
// met is when the process was there at the latest, whatever the real-time clock,
// which may have been set back since, makes of its creation.
func (h *history) reason(p *source.Process, met int64, sharers int) collector.Xid {
	created := min(met, p.Anchor.Mono+(p.Created.UnixNano()-p.Anchor.Real))
	var best collector.Xid
	var gravest diagnosis.XidEffect
	for _, x := range h.fatal {
		_, effect := diagnosis.DescribeXid(x.Code)
		switch {
		case x.At < created,
			p.Dead() && x.At > p.StateAt+lastWords.Nanoseconds(),
			effect == diagnosis.XidApplication && sharers > 1,
			effect <= gravest:
			continue
		}
		best, gravest = x, effect
	}
	return best
}
