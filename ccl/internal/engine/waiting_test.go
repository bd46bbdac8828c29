package engine_test

import (
	"slices"
	"testing"

	"github.com/lockstep-ccl/lockstep/ccl/internal/algo"
	"github.com/lockstep-ccl/lockstep/ccl/internal/engine"
	"github.com/lockstep-ccl/lockstep/ccl/internal/transport"
	"github.com/lockstep-ccl/lockstep/record"
)

// shut is a link that accepts and delivers no bytes.
type shut struct{ transport.Link }

func (shut) Kind() record.Transport          { return record.TransportSHM }
func (shut) AlignSend()                      {}
func (shut) AlignRecv()                      {}
func (shut) TrySend([]byte) (int, error)     { return 0, nil }
func (shut) TrySendKept([]byte) (int, error) { return 0, nil }
func (shut) TryRecv([]byte) (int, error)     { return 0, nil }

type shutMesh struct{}

func (shutMesh) Link(int) (transport.Link, error) { return shut{}, nil }

// TestWaiting: a receive that waits for this rank's own send does not wait for its peer, whose bytes
// may have arrived. So the operation waits for the send's peer.
func TestWaiting(t *testing.T) {
	send := algo.Step{Act: algo.Send, Peer: 1, Len: 64}
	recv := algo.Step{Act: algo.Recv, Peer: 2, Len: 64}
	after := recv
	after.Need = 1
	for _, tt := range []struct {
		name   string
		rx     algo.Step
		expect []int32
	}{
		{"receive", recv, []int32{2}},
		{"receive after send", after, []int32{1}},
	} {
		e := engine.New(shutMesh{}, 3)
		op := engine.Op{Send: make([]byte, 64), Recv: make([]byte, 64)}
		e.Begin(&algo.Schedule{Tracks: []algo.Track{{send}, {tt.rx}}}, &op)
		if moved, err := e.Step(); moved || err != nil {
			t.Fatalf("%s: moved %v, %v", tt.name, moved, err)
		}
		if got := e.Waiting(nil); !slices.Equal(got, tt.expect) {
			t.Errorf("%s: waits for %v, want %v", tt.name, got, tt.expect)
		}
	}
}
