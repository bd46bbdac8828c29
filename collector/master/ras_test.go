package master

import (
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/lockstep-ccl/lockstep/collector"
	"github.com/lockstep-ccl/lockstep/collector/wire"
	"github.com/lockstep-ccl/lockstep/diagnosis"
)

func TestMergeRAS(t *testing.T) {
	now := int64(time.Hour)
	s := newState("job", Limits{})
	for id := range uint64(400) {
		s.commOf[id] = int32(len(s.ev.Comms))
		s.ev.Comms = append(s.ev.Comms, diagnosis.Comm{ID: id, Members: make([]diagnosis.Member, 4)})
	}
	w := &wire.RAS{CommId: 7, Missing: []*wire.RASRank{{Rank: 3, Dead: true}, {Rank: 4}, {Rank: -1}}, More: true,
		Behind: []*wire.RASBehind{{Rank: 1, Coll: "All\x1b[31mReduce#", Launched: 1, Most: 2}, {Rank: 1, Launched: 2, Most: 2}}}
	s.mergeRAS(w, now, now)
	want := []diagnosis.RAS{{Comm: 7, At: now, More: true, Missing: []diagnosis.RASRank{{Rank: 3, Dead: true}}, Behind: []diagnosis.RASBehind{{Rank: 1, Coll: "AllmReduce", Launched: 1, Most: 2}}}}
	if d := cmp.Diff(want, s.ev.RAS); d != "" {
		t.Error(d)
	}
	s.mergeRAS(&wire.RAS{CommId: 7}, now-1, now) // older
	s.mergeRAS(&wire.RAS{CommId: 7000}, now, now)
	s.mergeRAS(&wire.RAS{CommId: 8}, now+1, now)
	if d := cmp.Diff(want, s.ev.RAS); d != "" {
		t.Error(d)
	}
	for id := range uint64(400) {
		s.mergeRAS(&wire.RAS{CommId: id}, now+1, now+2)
	}
	if len(s.ev.RAS) != collector.MaxRASComms {
		t.Errorf("%d entries", len(s.ev.RAS))
	}
	s.mergeRAS(&wire.RAS{CommId: 1}, now+2*diagnosis.RASKeep, now+2*diagnosis.RASKeep)
	if len(s.ev.RAS) != 1 {
		t.Errorf("old ones stay: %d", len(s.ev.RAS))
	}
}
