package collector_test

import (
	"strings"
	"sync/atomic"
	"testing"

	"github.com/lockstep-ccl/lockstep/collector/agent"
	"github.com/lockstep-ccl/lockstep/collector/master"
	"github.com/lockstep-ccl/lockstep/collector/source"
	"github.com/lockstep-ccl/lockstep/diagnosis"
	"github.com/lockstep-ccl/lockstep/record"
)

// fallsOff plays the nvml source: the GPU of a rank falls off the bus.
type fallsOff struct {
	rank int32
	at   atomic.Int64 // CLOCK_MONOTONIC ns, 0 before
}

func (f *fallsOff) Update(v *source.View) error {
	for _, p := range v.Processes {
		p.GPU = diagnosis.GPU{Seen: true, Index: uint16(p.Rank)}
		if at := f.at.Load(); at != 0 && p.Rank == f.rank {
			p.Xid, p.GPU.XidAt, p.GPU.LostAt = 79, at, at
		}
	}
	return nil
}

// The incident of a rank that dies of its GPU says so, on the word of the agent.
func TestKilledByItsGPU(t *testing.T) {
	dir := t.TempDir()
	r := newSplitRanks(t, dir, 4)
	m, _ := startMaster(t, master.Options{})
	gpu := &fallsOff{rank: 3}
	startAgent(t, agent.Options{Dir: dir, Master: at(m.Addr().String()), Sources: []agent.NamedSource{{Name: "nvml", Source: gpu}}})
	defer r.steps()()
	eventually(t, "all ranks run", func() bool { return m.Snapshot().Ranks[diagnosis.ProcRunning] == 4 })
	gpu.at.Store(record.Now())
	if err := r.remote.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	eventually(t, "an incident is confirmed", func() bool {
		i := m.Snapshot().Incidents
		return len(i) == 1 && !i[0].Confirmed.IsZero()
	})
	v := m.Snapshot().Incidents[0].Verdict
	why := strings.Join(v.Why, "\n")
	if v.Class != diagnosis.NoncommunicationHang || v.Culprits[0].Rank != 3 || v.Culprits[0].Reason != "process_gone" {
		t.Errorf("verdict %+v", v)
	}
	if !strings.Contains(why, "rank 3: GPU 3 of its node reported Xid 79 (the GPU has fallen off the bus)") || strings.Contains(why, "GPU 1") {
		t.Errorf("it says\n%s", why)
	}
}
