package transport

import "github.com/lockstep-ccl/lockstep/record"

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

// Board lets members of one node see when each of them entered its current
// collective: entering is one store, and at the end a member reads the others.
type Board interface {
	Enter(seq uint64, mono int64)
	// Entered returns when a local member entered seq, 0 when it has not or its word has moved on.
	Entered(member int, seq uint64) int64
}
