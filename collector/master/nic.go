package master

import (
	"slices"

	"github.com/lockstep-ccl/lockstep/collector/wire"
	"github.com/lockstep-ccl/lockstep/diagnosis"
)

// maxNICs bounds the ports of all nodes together.
const maxNICs = 1 << 16

// mergeNIC takes in what has changed of one of node n's RDMA ports. It is words beside a verdict, which
// it does not change.
func (s *state) mergeNIC(n int32, w *wire.NIC, now int64) {
	if w == nil || w.Device == "" {
		return
	}
	device, clock := bounded(w.Device), &s.nodes[n].clock
	when := clock.real(w.MonoAtNs, now)
	at, ok := s.nicOf[nicKey{n, device, w.Port}]
	if !ok {
		if s.nodes[n].nics >= diagnosis.MaxNodeNICs || len(s.ev.NICs) >= maxNICs {
			s.overflow++
			return
		}
		if s.nicOf == nil {
			s.nicOf = map[nicKey]int32{}
		}
		at = int32(len(s.ev.NICs))
		s.nodes[n].nics++
		s.nicOf[nicKey{n, device, w.Port}] = at
		s.ev.NICs = append(s.ev.NICs, diagnosis.NIC{Node: n, Device: device, Port: w.Port, SeenAt: when})
	}
	p := &s.ev.NICs[at]
	p.Flaps, p.FlapAt, p.DownAt = w.Flaps, clock.real(w.MonoFlapNs, now), clock.real(w.MonoDownNs, now)
	for _, c := range w.Counters {
		name := bounded(c.Name)
		k := slices.IndexFunc(p.Counters, func(x diagnosis.NICCounter) bool { return x.Name == name })
		if k < 0 {
			if len(p.Counters) >= diagnosis.MaxNICCounters || c.Kind == 0 || c.Kind > uint32(diagnosis.NICError) {
				continue
			}
			k = len(p.Counters)
			p.Counters = append(p.Counters, diagnosis.NICCounter{Name: name, Kind: diagnosis.NICKind(c.Kind)})
			if p.SeenAt < when {
				p.Counters[k].Add(p.SeenAt, 0) // so far it was not worth telling
			}
		}
		p.Counters[k].Add(when, c.Value)
	}
}

// nicKey is a port of a node.
type nicKey struct {
	node   int32
	device string
	port   uint32
}

// dropNICs forgets a node's ports.
func (s *state) dropNICs(n int32) {
	if s.nodes[n].nics == 0 {
		return
	}
	s.nodes[n].nics = 0
	s.ev.NICs = slices.DeleteFunc(s.ev.NICs, func(p diagnosis.NIC) bool { return p.Node == n })
	clear(s.nicOf)
	for i := range s.ev.NICs {
		p := &s.ev.NICs[i]
		s.nicOf[nicKey{p.Node, p.Device, p.Port}] = int32(i)
	}
}
