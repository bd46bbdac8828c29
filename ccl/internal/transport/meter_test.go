package transport

import (
	"testing"

	"github.com/lockstep-ccl/lockstep/record"
	"github.com/lockstep-ccl/lockstep/windowmon"
)

// TestCauseInMemory: no network is between two ranks that share memory.
func TestCauseInMemory(t *testing.T) {
	for _, tt := range []struct {
		mem  bool
		c    windowmon.Cause
		want record.Cause
	}{
		{false, windowmon.Network, record.CauseNetwork},
		{true, windowmon.Network, record.CauseReceiverNotReady},
		{true, windowmon.None, record.CauseNone},
		{true, windowmon.SenderStarved, record.CauseSenderStarved},
		{true, windowmon.CPUStarved, record.CauseCPUStarved},
	} {
		if got := (&meter{mem: tt.mem}).cause(tt.c); got != tt.want {
			t.Errorf("in memory %v: %v is told as %v, want %v", tt.mem, tt.c, got, tt.want)
		}
	}
}
