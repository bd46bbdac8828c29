package master

import (
	"fmt"
	"testing"

	"github.com/lockstep-ccl/lockstep/collector/wire"
	"github.com/lockstep-ccl/lockstep/record"
)

// callers is a communicator whose members are seen by their calls.
type callers struct {
	s    *state
	size int32
}

func newCallers(size int32) *callers {
	c := &callers{newState("job", Limits{}), size}
	c.s.node("node")
	return c
}

// tell reports that a rank has called operations up to called, the last at the given time, and
// that its calls up to returned came back.
func (c *callers) tell(rank int32, called, returned uint64, at int64, only bool) {
	c.s.merge(0, &wire.Report{
		MonoSentNs: 1e15,
		Ranks:      []*wire.Rank{{WorldRank: rank, WorldSize: c.size, CreatedUnixNs: 1, Pid: 1 + rank}},
		Members: []*wire.Member{{
			CommId: 1, WorldRank: rank, Rank: rank, Size: c.size, State: uint32(record.CommJoined), Coll: uint32(record.AllReduce), Peer: -1,
			Enqueued: called, Started: called, Finished: returned, MonoEnqueuedNs: at, MonoStartedNs: at, MonoFinishedNs: at + 1, CallsOnly: only,
		}},
	}, 1e15)
	c.s.settle()
}

// open says of each rank whether it is in an operation, and in which.
func (c *callers) open() string {
	text := ""
	for _, m := range c.s.ev.Comms[0].Members {
		switch {
		case m.World < 0:
			text += "? "
		case m.Open():
			text += fmt.Sprintf("%d ", m.Finished+1)
		default:
			text += "- "
		}
	}
	return text
}

func TestWhoWaitsByCallsAlone(t *testing.T) {
	c := newCallers(3)
	at := int64(1e14)
	expect := func(want string) {
		t.Helper()
		if got := c.open(); got != want {
			t.Errorf("in operations %q, want %q", got, want)
		}
	}
	c.tell(0, 5, 5, at, true)
	c.tell(1, 5, 5, at, true)
	expect("- - ? ") // who has not been reported may be there
	c.tell(2, 3, 3, at+1000, true)
	expect("4 4 - ")
	m := c.s.ev.Comms[0].Members
	if d := m[0].StartedAt - m[2].EnqueuedAt; d != 0 {
		t.Errorf("the wait began %d ns after the last one had called the operation before", d)
	}
	c.tell(2, 4, 4, at+2000, true)
	expect("5 5 - ")
	if d := c.s.ev.Comms[0].Members[0].StartedAt - c.s.ev.Comms[0].Members[2].EnqueuedAt; d != 0 {
		t.Error("a job that goes on looks as if it were held up since its first call")
	}
	c.tell(2, 5, 5, at+3000, true)
	expect("- - - ")
	c.tell(0, 6, 5, at+4000, true) // its call does not return, nor is it in the next
	expect("6 - - ")
	c.tell(1, 6, 6, at+4000, true)
	c.tell(2, 6, 6, at+4000, true)
	expect("6 - - ") // all have called: this one is held up in the call
}

// A member of which more is known is where it says.
func TestCallsBesideRecorders(t *testing.T) {
	c := newCallers(2)
	c.tell(0, 7, 7, 1e14, true)
	c.tell(1, 5, 4, 1e14, false)
	if got := c.open(); got != "6 5 " {
		t.Errorf("in operations %q", got)
	}
}
