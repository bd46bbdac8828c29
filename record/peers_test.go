package record_test

import (
	"sync/atomic"
	"testing"
	"unsafe"

	"github.com/lockstep-ccl/lockstep/record"
)

// peer writes a peer's entry of an operation's row.
func (g gpu) peer(seq uint64, peer int, came, there, trip uint32) {
	off, _ := g.comm.PeerRange()
	_, n := g.comm.StampRange()
	e := (*[2]uint64)(unsafe.Pointer(&g.mem[off+int(seq&uint64(n-1))*128+16*peer]))
	atomic.StoreUint64(&e[0], uint64(there)<<32|uint64(came))
	atomic.StoreUint64(&e[1], uint64(trip)<<32|uint64(uint32(seq)))
}

// TestStampPeers: a row is its operation's alone, and what does not fit the operation is not told.
func TestStampPeers(t *testing.T) {
	_, g, r := withGPU(t, 4, 0)
	if _, ok := g.comm.PeerRange(); !ok {
		t.Fatal("no rows")
	}
	buf := make([]record.Stamp, 8)
	next := func(seq uint64, length uint64) [record.MaxStampPeers]record.StampPeer {
		t.Helper()
		at := era + ahead + 10_000*seq
		g.begin(seq, 0, at)
		g.end(seq, 0, 0xff, at+length)
		if n := r.Stamps(buf); n != 1 || buf[0].Seq != seq {
			t.Fatalf("operation %d: %d stamps, %+v", seq, n, buf[0])
		}
		return buf[0].Peers
	}
	g.peer(1, 1, 300, 700, 50)
	g.peer(1, 2, 0, 900, 0)
	g.peer(1, 3, 700, 300, 0)   // came after its last word
	g.peer(1, 4, 300, 1001, 0)  // whose last word came after the end
	g.peer(2, 5, 300, 700, 0)   // of the next operation
	g.peer(1+4, 7, 300, 700, 0) // of the next lap
	want := [record.MaxStampPeers]record.StampPeer{1: {Seen: true, Came: 300, There: 700, Trip: 50}, 2: {Seen: true, There: 900}}
	if got := next(1, 1000); got != want {
		t.Errorf("got  %+v\nwant %+v", got, want)
	}
	if got := next(2, 1000); !got[5].Seen || got[1].Seen {
		t.Errorf("the next operation: %+v", got)
	}
	next(3, 1000)
	next(4, 1000)
	if got := next(5, 1000); !got[7].Seen || got[1].Seen || got[2].Seen {
		t.Errorf("the next lap has what is left of the one before: %+v", got)
	}
	var none *record.Comm
	if _, ok := none.PeerRange(); ok {
		t.Error("rows of no communicator")
	}
}

// TestStampPeersPrivate: there are none of stamps in memory of the process's own.
func TestStampPeersPrivate(t *testing.T) {
	w, g, _ := withGPU(t, 4, 0)
	if _, err := w.PrivateStamps(); err != nil {
		t.Fatal(err)
	}
	if _, ok := g.comm.PeerRange(); ok {
		t.Error("rows where the GPU cannot write")
	}
}
