package record

import (
	"sync/atomic"
	"unsafe"
)

// The peer table has a row for each slot of the stamp table: what each peer was to the
// operation that the slot is of. A kernel stores an entry of 16 bytes for each peer, before it
// stores the operation's end, and an entry says which operation it is of: a reader that finds
// another one's knows nothing of that peer. Like the history table it lies beyond the size
// that the header tells, so that a reader which does not know it sees a file as it was before.

// MaxStampPeers is how many ranks a row has entries of.
const MaxStampPeers = 8

// StampPeer is what a GPU has stamped of one peer in one operation. Times are ns.
type StampPeer struct {
	Seen  bool   // else nothing was stamped of it
	Came  uint32 // from Stamp.Start until it was there, 0 when it was not waited for
	There uint32 // from Stamp.Start until the last of what it sends, or its word that it has ended, was here
	Trip  uint32 // what a read of its memory took meanwhile, 0 when none was made
}

// diskPeer is struct PeerRow's entry of the kernels' abi.h.
type diskPeer struct{ times, told uint64 } // came | there << 32; low half of the sequence | trip << 32

type diskPeerRow [MaxStampPeers]diskPeer

const peerRowSize = uint64(unsafe.Sizeof(diskPeerRow{}))

// PeerRange is where a communicator's kernels leave what they stamp by peer: a row for each
// slot of StampRange, at byte off of Writer.Memory. ok is false where there are none: nor
// are there of stamps in memory of the process's own (PrivateStamps).
func (c *Comm) PeerRange() (off int, ok bool) {
	if c == nil || c.d.Load().stampCount == 0 || c.w.geo.peers == 0 || c.w.private.Load() != nil {
		return 0, false
	}
	return int(c.w.geo.peersAt() + uint64(c.d.Load().stampFirst)*peerRowSize), true
}

// peerRows are those of a ring of n slots from first on; nil when the file has none.
func (r *Reader) peerRows(first uint32, n int) []diskPeerRow {
	if n == 0 || uint64(first)+uint64(n) > uint64(r.geo.peers) {
		return nil
	}
	at := &r.mem[r.geo.peersAt()+uint64(first)*peerRowSize]
	return unsafe.Slice((*diskPeerRow)(unsafe.Pointer(at)), n)
}

// peersOf reads the row of an operation that took so long.
func (c *stampComm) peersOf(seq uint64, took uint64, dst *[MaxStampPeers]StampPeer) {
	if c.peers == nil {
		return
	}
	row := &c.peers[seq&uint64(len(c.peers)-1)]
	for p := range row {
		told := atomic.LoadUint64(&row[p].told)
		if uint32(told) != uint32(seq) {
			continue
		}
		times := atomic.LoadUint64(&row[p].times)
		s := StampPeer{Seen: true, Came: uint32(times), There: uint32(times >> 32), Trip: uint32(told >> 32)}
		if atomic.LoadUint64(&row[p].told) != told || s.Came > s.There || uint64(s.There) > took {
			continue // of two operations
		}
		dst[p] = s
	}
}
