package master

import "slices"

// collect removes the communicators that everybody has left a while ago.
func (s *state) collect(now int64) {
	over := func(c commIndex) bool { return c.leftAt != 0 && now-c.leftAt > leftFor }
	if !slices.ContainsFunc(s.comms, over) {
		return
	}
	moved := make([]int32, len(s.comms))
	kept := int32(0)
	for i := range s.comms {
		if over(s.comms[i]) {
			moved[i] = -1
			continue
		}
		moved[i] = kept
		kept++
	}
	s.clock.clear() // communicators are renumbered
	old := s.ev
	oldComms, oldConns, oldBy, oldSamples := s.comms, s.conns, s.connBy, s.samples
	s.clearComms()
	for i, to := range moved {
		if to >= 0 {
			s.commOf[old.Comms[i].ID] = to
			s.ev.Comms = append(s.ev.Comms, old.Comms[i])
			s.comms = append(s.comms, oldComms[i])
			s.members += len(old.Comms[i].Members)
			if by := oldComms[i].by; by != several {
				s.nodes[by].apart.comms++
				s.nodes[by].apart.members += len(old.Comms[i].Members)
			}
		}
	}
	for i, k := range oldConns { // in order: the engine knows them by their indices
		if to := moved[k.comm]; to >= 0 {
			k.comm, old.Conns[i].Comm = to, to
			s.connOf[k] = int32(len(s.conns))
			s.conns = append(s.conns, k)
			s.connBy = append(s.connBy, oldBy[i])
			s.nodes[oldBy[i]].apart.conns++
			s.ev.Conns = append(s.ev.Conns, old.Conns[i])
		}
	}
	for i, a := range old.Arrivals {
		if to := moved[a.Comm]; to >= 0 {
			a.Comm = to
			s.arrived[arrivalKey{to, a.Seq}] = int32(len(s.ev.Arrivals))
			s.ev.Arrivals, s.samples = append(s.ev.Arrivals, a), append(s.samples, oldSamples[i])
			s.cells += len(a.Start)
		}
	}
}
