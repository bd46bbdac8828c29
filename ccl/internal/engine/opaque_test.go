package engine_test

import (
	"testing"

	"github.com/lockstep-ccl/lockstep/ccl/internal/algo"
	"github.com/lockstep-ccl/lockstep/ccl/internal/engine"
	"github.com/lockstep-ccl/lockstep/ccl/internal/transport"
	"github.com/lockstep-ccl/lockstep/record"
)

// taker is a link that accepts all bytes and counts them.
type taker struct {
	transport.Link
	copied, kept int // bytes of TrySend and of TrySendKept
}

func (l *taker) Kind() record.Transport            { return record.TransportRDMA }
func (l *taker) AlignSend()                        {}
func (l *taker) TrySend(b []byte) (int, error)     { l.copied += len(b); return len(b), nil }
func (l *taker) TrySendKept(b []byte) (int, error) { l.kept += len(b); return len(b), nil }

// oneLink is a mesh with the same link to every peer.
type oneLink struct {
	link *taker
}

func (m oneLink) Link(int) (transport.Link, error) { return m.link, nil }

// TestOpaque: the engine does not copy an opaque part behind the header, however short it is.
func TestOpaque(t *testing.T) {
	const size = 100
	step := algo.Step{Act: algo.Send, Header: true, Kept: true, Src: algo.Ref{Space: engine.GroupSpace}, Len: size}
	for _, opaque := range []bool{false, true} {
		link := &taker{}
		e := engine.New(oneLink{link: link}, 1)
		op := engine.Op{Parts: []engine.Part{{Buf: make([]byte, size), DType: record.Uint8, Opaque: opaque}}}
		e.Begin(&algo.Schedule{Tracks: []algo.Track{{step}}}, &op)
		if _, err := e.Step(); err != nil || !e.Done() {
			t.Fatalf("done %v, %v", e.Done(), err)
		}
		if want := map[bool]int{true: size}[opaque]; link.kept != want || link.copied == 0 {
			t.Errorf("opaque %v: %d bytes sent zero-copy, %d copied", opaque, link.kept, link.copied)
		}
	}
}
