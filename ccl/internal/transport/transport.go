package transport

import (
	"time"

	"github.com/lockstep-ccl/lockstep/ccl/internal/nic"
	"github.com/lockstep-ccl/lockstep/ccl/internal/rdma"
	"github.com/lockstep-ccl/lockstep/record"
)

// Link is the pair of ordered byte streams between this rank and one peer of
// one communicator: what A sends is received by B in order, whatever carries
// it. A Link is owned by the communicator's executor: at any moment one
// goroutine calls it. No call blocks; a byte count of 0 with a nil error means
// "no credit yet" or "nothing arrived yet". Errors are final.
//
// Flow control is by credit: the receiver's buffer is the sender's credit, so
// bytes are Outstanding from the moment they are taken from the caller until
// the receiver has consumed them, and a sender without credit knows that it is
// the receiver who is not ready. That is what lets windowmon tell a slow
// network from a slow peer.
type Link interface {
	Peer() int
	Kind() record.Transport

	// TrySend takes up to len(b) bytes. The caller may reuse b[:n] at once.
	TrySend(b []byte) (n int, err error)
	// TrySendKept is TrySend of bytes that the caller leaves as they are until
	// Mesh.Settled: a link may send them from where they lie.
	TrySendKept(b []byte) (n int, err error)
	// TryRecv copies up to len(b) arrived bytes into b.
	TryRecv(b []byte) (n int, err error)
	// Peek returns arrived bytes in place without consuming them (nil: none);
	// they stay valid until Advance. A message that began at an aligned
	// position (see Align) is returned in pieces whose lengths are multiples of
	// 64 but for its last, each 64-byte aligned in memory, so that a reducer can
	// read elements straight from the transport's buffer.
	Peek() (b []byte, err error)
	Advance(n int)
	// AlignSend and AlignRecv skip to the next 64-byte boundary of the stream;
	// both sides call theirs between messages. They cost no wire traffic of their own.
	AlignSend()
	AlignRecv()

	// TryWriteLine and TryReadLine are the low-latency path: one 64-byte message
	// of at most LinePayload bytes, flags in the data, a stream of its own beside
	// the byte stream (its order against the byte stream is not defined).
	TryWriteLine(b []byte, tag uint32) (ok bool, err error)
	// TryReadLine copies the next line's payload into b (LinePayload bytes) and returns its tag.
	TryReadLine(b []byte) (n int, tag uint32, ok bool, err error)
	// PrefetchLine hints that the next line will be read soon: its way here can
	// overlap with other work.
	PrefetchLine()

	// WantRecv tells the monitor that this rank is ready for this peer's bytes
	// since now and has none (0: not any more).
	WantRecv(since int64)
	// Flush publishes counters (windows, outstanding) after an operation.
	Flush(now int64)
}

// LinePayload is how many bytes one low-latency line carries.
const LinePayload = 48

// Mesh is all links of one communicator's rank, and how to sleep on them.
type Mesh interface {
	// Link returns the link to a peer, connecting it on first use (lazily; it
	// must not block longer than ctx of the communicator allows). Both sides
	// may call it at different times.
	Link(peer int) (Link, error)
	// Wait returns when any link of this rank may have made progress, when Wake
	// was called, or after d. It spins for a short, adaptive time first, and
	// yields or sleeps when there are more local ranks than cores. polled means
	// that it did neither, and took next to no time.
	Wait(d time.Duration) (polled bool)
	// Wake makes Wait return (abort, new work). Safe from any goroutine.
	Wake()
	// Look notices what was consumed, and tells; for the time between operations.
	// It reports whether there was, and may still be, something to notice.
	Look() (due bool)
	// Settled reports whether every byte taken from the caller has left this rank's
	// hands, and what TrySendKept took may be changed. It is false while an injected
	// fault holds bytes back, as nobody else would deliver them, and while a peer has
	// not consumed bytes that are sent from where they lie; an operation ends when it is true.
	Settled() bool
	// Lent is a mark in what was sent to a peer, after all that TrySendKept took so far:
	// 0 when the link has copied everything. Returned reports whether what is before a
	// mark may be changed, though the operation goes on; what a peer consumes in the midst
	// of one it has to Acknowledge.
	Lent(peer int) (mark uint64)
	Returned(peer int, mark uint64) bool
	Acknowledge(peer int)
	// Rails are the ports of this rank's over which links to peers go, and those that are
	// their backups; an error where a link goes another way. Need has the devices of ports
	// register a DMA buffer, before the first bytes: a link that TrySendKept gives some of it
	// uses no path that cannot send them. The error says which device cannot.
	Rails(peers []int) (primary, backup []nic.Port, err error)
	Need(r *rdma.Region, ports []nic.Port) error
	// Abandon ends the links for which Settled is not true, where the operation has
	// failed: the caller gets back what TrySendKept took.
	Abandon()
	// Local reports whether a peer shares this rank's node (shared memory).
	Local(peer int) bool
	// Board returns the shared entry board of this node's members, nil when
	// there is none: one word per member of the communicator.
	Board() Board
	// Patience is for how long the network that sockets take may be away without harm
	// to this rank's links: 0 where they need it.
	Patience() time.Duration
	Close() error
}

// Board lets members of one node see when each of them entered its current
// collective: entering is one store, and at the end a member reads the others.
type Board interface {
	Enter(seq uint64, mono int64)
	// Entered returns when a local member entered seq, 0 when it has not or its word has moved on.
	Entered(member int, seq uint64) int64
}
