package agent

import (
	"github.com/lockstep-ccl/lockstep/collector"
	"github.com/lockstep-ccl/lockstep/collector/wire"
	"github.com/lockstep-ccl/lockstep/diagnosis"
)

const (
	// nicsEvery is how often a master is told of NICs, ns: counters that tell of loss or
	// congestion may move all the time.
	nicsEvery = int64(2e9)
	// nicRoom is how many entries of a report that takes.
	nicRoom = diagnosis.MaxNodeNICs * (1 + diagnosis.MaxNICCounters)
)

// reportNICs is what has changed of the node's RDMA ports since a master was told: whether they
// are up, and counters that say whether they saw loss or congestion. What has always been 0 is left out.
func (j *job) reportNICs(n *collector.NICs, now int64) (out []*wire.NIC) {
	if n == nil || n.ProbedAt == j.nicsAt || now-j.nicsTold < nicsEvery && j.nicsTold != 0 {
		return nil
	}
	j.nicsAt, j.nicsTold = n.ProbedAt, now
	if j.nics == nil {
		j.nics = map[nicWord]uint64{}
	}
	for i := range n.Ports[:min(len(n.Ports), diagnosis.MaxNodeNICs)] {
		p := &n.Ports[i]
		w := &wire.NIC{Device: wireName(p.Device), Port: uint32(p.Port), MonoAtNs: n.ProbedAt, Flaps: p.Flaps, MonoFlapNs: p.FlapAt, MonoDownNs: p.DownAt}
		left := diagnosis.MaxNICCounters
		put := func(kind diagnosis.NICKind, counters []collector.NICCounter) {
			for _, c := range counters {
				k, v := nicWord{p.Device, p.Port, c.Name}, uint64(max(c.Value, 0))
				if v == j.nics[k] || left == 0 {
					continue
				}
				left--
				j.nics[k] = v
				w.Counters = append(w.Counters, &wire.NICCounter{Name: wireName(c.Name), Kind: uint32(kind), Value: v})
			}
		}
		put(diagnosis.NICLoss, p.Retransmissions)
		put(diagnosis.NICCongestion, p.Congestion)
		put(diagnosis.NICError, p.Errors)
		if p.TransmitWaits != nil {
			put(diagnosis.NICCongestion, []collector.NICCounter{{Name: "port_xmit_wait", Value: *p.TransmitWaits}})
		}
		// A port without counters is reported once, too: that it is there is news.
		state := nicWord{p.Device, p.Port, ""}
		word := p.Flaps<<1 | 1
		if p.DownAt != 0 {
			word ^= 1 << 63
		}
		if len(w.Counters) == 0 && j.nics[state] == word {
			continue
		}
		j.nics[state] = word
		out = append(out, w)
	}
	return out
}

// nicWord is a counter of a port, or its state.
type nicWord struct {
	device  string
	port    int
	counter string
}
