package record

import (
	"fmt"
	"math/bits"
	"strings"
	"time"
	"unicode"
)

// Header is what a recorder file says of its process.
type Header struct {
	Identity
	Version   uint32
	BootID    [16]byte
	PID       int32  // in the process's own PID namespace
	StartTime uint64 // clock ticks since boot, field 22 of /proc/PID/stat
	Created   time.Time
	Closed    bool // the process left in good order
	Anchor    Anchor

	RingSlots, CommSlots, ConnSlots, DeviceSlots, DescSlots, StampSlots int
	HistorySlots                                                        int // 0 in files of before there were any

	Appended        uint64 // records ever, dropped ones included
	DroppedByWriter uint64
	CommOverflow    uint64 // communicators that found no slot
	ConnOverflow    uint64
	DescOverflow    uint64 // operations whose descriptor found no slot
	StampOverflow   uint64 // communicators whose stamps found no room
	HistoryOverflow uint64 // connections that have no history

	Refused [NumRefusals]uint64 // connections that the process's listeners turned away

	// Source is what wrote it. Of a writer that learns of another library's operations: by which version of
	// that library's interface, which events (a mask of that interface) it asks for
	// now, operations that have a number and no record, operations recorded whose end
	// nobody saw, parts of operations and transfers that found no room, events of
	// other processes' operations.
	Source        Source
	SourceVersion uint32
	EventMask     uint64
	OpsLost       uint64
	OpsUnseen     uint64
	EventsLost    uint64
	EventsForeign uint64
}

// MarksOnly reports whether the file is of Options.MarksOnly.
func (h Header) MarksOnly() bool { return h.CommSlots == 0 }

// ToReal maps a recorder time to wall-clock time by the latest anchor.
func (h Header) ToReal(mono int64) time.Time {
	return time.Unix(0, h.Anchor.Real+(mono-h.Anchor.Mono))
}

func (h *diskHeader) check(size int64) (geometry, error) {
	g := geometry{comms: h.commSlots, conns: h.connSlots, devices: h.deviceSlots, descs: h.descSlots, stamps: h.stampSlots, ring: h.ringSlots}
	if h.historyWindows == HistoryWindows { // else this program does not know that table
		g.histories = h.historySlots
		g.peers = h.peerSlots
	}
	switch {
	case h.version > LayoutVersion:
		return g, fmt.Errorf("%w: layout %d, this program reads %d to %d: upgrade this program (the node's agent, lockstep inspect) to the version of the job's library", ErrVersion, h.version, OldestLayout, LayoutVersion)
	case h.version < OldestLayout:
		return g, fmt.Errorf("%w: layout %d, this program reads %d to %d: build the job with a newer library, or load a newer libnccl-profiler-lockstep.so, and start it again", ErrVersion, h.version, OldestLayout, LayoutVersion)
	}
	if h.headerSize != HeaderSize {
		return g, fmt.Errorf("%w: header of %d bytes, want %d", ErrCorrupt, h.headerSize, HeaderSize)
	}
	for _, s := range []struct {
		what   string
		n, max uint32
	}{
		{"communicator", g.comms, MaxCommSlots}, {"connection", g.conns, MaxConnSlots}, {"device", g.devices, MaxDeviceSlots},
		{"descriptor", g.descs, MaxDescSlots}, {"stamp", g.stamps, MaxStampSlots}, {"ring", g.ring, MaxRingSlots},
		{"history", g.histories, MaxHistorySlots}, {"peer", g.peers, g.stamps},
	} {
		if s.n > s.max {
			return g, fmt.Errorf("%w: %d %s slots, at most %d are possible", ErrCorrupt, s.n, s.what, s.max)
		}
	}
	if bits.OnesCount32(g.ring) != 1 {
		return g, fmt.Errorf("%w: %d ring slots, not a power of two", ErrCorrupt, g.ring)
	}
	if h.fileSize != g.size() {
		return g, fmt.Errorf("%w: header says %d bytes, its regions need %d", ErrCorrupt, h.fileSize, g.size())
	}
	if uint64(size) < g.memory() {
		return g, fmt.Errorf("%w: %d of %d bytes", ErrTruncated, size, g.memory())
	}
	return g, nil
}

// header decodes the words that never change.
func (h *diskHeader) header() Header {
	source := SourceCCL
	if h.source < uint32(numSources) {
		source = Source(h.source)
	}
	return Header{
		Source: source,
		Identity: Identity{
			Job: getName(&h.job), Node: getName(&h.node),
			Rank: h.rank, WorldSize: h.worldSize, LocalRank: h.localRank, Attempt: h.attempt,
		},
		Version: h.version, BootID: h.bootID, PID: h.pid, StartTime: h.startTime,
		Created:   time.Unix(0, h.created),
		RingSlots: int(h.ringSlots), CommSlots: int(h.commSlots), ConnSlots: int(h.connSlots), DeviceSlots: int(h.deviceSlots), DescSlots: int(h.descSlots), StampSlots: int(h.stampSlots),
		HistorySlots: int(h.historySlots),
	}
}

// getName reads a NUL-terminated name; what a terminal or a label could not
// show becomes U+FFFD.
func getName(b *[nameSize]byte) string {
	s, _, _ := strings.Cut(string(b[:]), "\x00")
	return strings.Map(func(r rune) rune {
		if !unicode.IsPrint(r) {
			return unicode.ReplacementChar
		}
		return r
	}, s)
}
