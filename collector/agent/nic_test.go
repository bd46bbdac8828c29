package agent

import (
	"testing"

	"github.com/lockstep-ccl/lockstep/collector"
	"github.com/lockstep-ccl/lockstep/collector/source"
)

type ports struct{ nics *collector.NICs }

func (p *ports) Update(v *source.View) error {
	v.NICs = p.nics
	return nil
}

// What the rdma source sees is published, and gone when it sees nothing any more.
func TestSnapshotHasNICs(t *testing.T) {
	p := &ports{&collector.NICs{Ports: []collector.NICPort{{Device: "mlx5_0", Port: 1}}}}
	a, err := New(Options{Node: "n", Dir: t.TempDir(), Sources: []NamedSource{{"rdma", p}}})
	if err != nil {
		t.Fatal(err)
	}
	for range 2 {
		a.update(t.Context(), 1)
		a.publish()
		if a.Snapshot().NICs != p.nics {
			t.Errorf("the snapshot has %v, the source %v", a.Snapshot().NICs, p.nics)
		}
		p.nics = nil
	}
}
