package master

import (
	"fmt"
	"testing"

	"github.com/lockstep-ccl/lockstep/collector/wire"
	"github.com/lockstep-ccl/lockstep/diagnosis"
)

// What agents tell of NICs is kept by port and counter, within bounds whatever they say, and
// goes with the node.
func TestMergeNIC(t *testing.T) {
	s := newState("job", Limits{Nodes: 2})
	now := int64(1e18)
	tell := func(node string, nics ...*wire.NIC) {
		now += 1e9
		s.merge(s.node(node), &wire.Report{MonoSentNs: now - 1e18 + 1e9, Nics: nics}, now)
	}
	nic := func(value uint64) *wire.NIC {
		return &wire.NIC{Device: "mlx5_0", Port: 1, MonoAtNs: now - 1e18 + 1e9, Counters: []*wire.NICCounter{{Name: "packet_seq_err", Kind: uint32(diagnosis.NICLoss), Value: value}}}
	}
	tell("a", &wire.NIC{Device: "mlx5_0", Port: 1, MonoAtNs: 1e9})
	tell("a", nic(7))
	tell("a", nic(9))
	tell("b", nic(5))
	if len(s.ev.NICs) != 2 {
		t.Fatalf("%+v", s.ev.NICs)
	}
	c := s.ev.NICs[0].Counters[0]
	if len(c.Samples) != 3 || c.Samples[0].Value != 0 || c.Samples[2].Value != 9 {
		t.Errorf("%+v", c)
	}
	if c = s.ev.NICs[1].Counters[0]; len(c.Samples) != 1 {
		t.Errorf("of a port whose first word it is: %+v", c)
	}
	for i := range 3 * diagnosis.MaxNodeNICs {
		w := &wire.NIC{Device: fmt.Sprint("x", i), Port: 1, MonoAtNs: 1e9}
		for k := range 3 * diagnosis.MaxNICCounters {
			w.Counters = append(w.Counters, &wire.NICCounter{Name: fmt.Sprint("c", k), Kind: uint32(k % 5), Value: 1})
		}
		tell("a", w, nil)
	}
	if n := len(s.ev.NICs); n != diagnosis.MaxNodeNICs+1 {
		t.Errorf("%d ports", n)
	}
	for _, p := range s.ev.NICs {
		if len(p.Counters) > diagnosis.MaxNICCounters {
			t.Errorf("%d counters of %s", len(p.Counters), p.Device)
		}
		for _, c := range p.Counters {
			if c.Kind == 0 || c.Kind > diagnosis.NICError {
				t.Errorf("kind %d", c.Kind)
			}
		}
	}
	s.node("c") // one of the others makes room
	if n := len(s.ev.NICs); n != 1 && n != diagnosis.MaxNodeNICs && n != 0 {
		t.Errorf("%d ports after a node was forgotten", n)
	}
}
