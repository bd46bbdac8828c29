package algo

import "github.com/lockstep-ccl/lockstep/record"

// PartSpace is the Space of a group's first message. Message i has PartSpace + i.
const PartSpace = Acc + 1

// Message is one send or receive of a group.
type Message struct {
	Peer int32
	Send bool
	Len  int // bytes
}

// Vector is the layout of an AlltoAllv. Each slice has one entry per rank, in elements.
type Vector struct {
	SendCounts, SendOffsets, RecvCounts, RecvOffsets []int
}

// NextSelf returns the index of the first message from msgs[i] on that rank sends to itself, or
// receives from itself if send is false. It returns -1 if there is none. The k-th such send
// matches the k-th such receive.
func NextSelf(msgs []Message, rank, i int, send bool) int {
	for ; i < len(msgs); i++ {
		if msgs[i].Send == send && int(msgs[i].Peer) == rank {
			return i
		}
	}
	return -1
}

// Messages builds the schedules of sends, receives, groups and AlltoAllv. These depend on more
// than a shape, so they are not cached. A schedule is valid until the next is built, since they
// share memory. Every message carries its signature, because the two ends must agree on each.
type Messages struct {
	schedule Schedule
	tracks   []Track // one for each peer and direction, so that no message waits for another peer
}

func (m *Messages) reset(n int) {
	for len(m.tracks) < n {
		m.tracks = append(m.tracks, nil)
	}
	for i := range m.tracks {
		m.tracks[i] = m.tracks[i][:0]
	}
}

func (m *Messages) add(track int, s Step) { m.tracks[track] = append(m.tracks[track], s) }

func (m *Messages) build() *Schedule {
	m.schedule.Algo, m.schedule.Proto = record.AlgoDirect, record.ProtoSimple
	m.schedule.Tracks = m.schedule.Tracks[:0]
	for _, t := range m.tracks {
		if len(t) > 0 {
			m.schedule.Tracks = append(m.schedule.Tracks, t)
		}
	}
	return &m.schedule
}

// Single returns the schedule of one Send or Recv.
func (m *Messages) Single(msg Message) *Schedule {
	m.reset(1)
	if msg.Send {
		m.add(0, Step{Act: Send, Header: true, Kept: true, Peer: msg.Peer, Src: Ref{Space: SendBuf}, Len: msg.Len})
	} else {
		m.add(0, Step{Act: Recv, Header: true, Peer: msg.Peer, Dst: Ref{Space: RecvBuf}, Len: msg.Len})
	}
	return m.build()
}

// Group returns the schedule of rank's messages in a group among size ranks. Messages of different
// peers and directions are in flight at once. Message i lies in Space PartSpace + i.
func (m *Messages) Group(rank, size int, msgs []Message) *Schedule {
	m.reset(2 * size)
	part := func(i int) Ref { return Ref{Space: PartSpace + Space(i)} }
	for i, msg := range msgs {
		switch {
		case int(msg.Peer) == rank:
			continue
		case msg.Send:
			m.add(2*int(msg.Peer), Step{Act: Send, Header: true, Kept: true, Peer: msg.Peer, Src: part(i), Len: msg.Len})
		default:
			m.add(2*int(msg.Peer)+1, Step{Act: Recv, Header: true, Peer: msg.Peer, Dst: part(i), Len: msg.Len})
		}
	}
	in := NextSelf(msgs, rank, 0, false)
	for out := NextSelf(msgs, rank, 0, true); out >= 0; out, in = NextSelf(msgs, rank, out+1, true), NextSelf(msgs, rank, in+1, false) {
		m.add(2*rank, Step{Act: Copy, Peer: -1, Len: msgs[out].Len, Dst: part(in), Src: part(out)})
	}
	return m.build()
}

// AlltoAllv returns the schedule of an AlltoAllv for rank of size ranks. element is the size of an
// element in bytes. The buffers do not overlap.
func (m *Messages) AlltoAllv(rank, size int, v *Vector, element int) *Schedule {
	m.reset(2 * size)
	for k := range size {
		to, from := (rank+k)%size, (rank-k+size)%size
		src := Ref{Space: SendBuf, Off: v.SendOffsets[to] * element}
		dst := Ref{Space: RecvBuf, Off: v.RecvOffsets[from] * element}
		if k == 0 {
			m.add(0, Step{Act: Copy, Peer: -1, Dst: dst, Src: src, Len: v.SendCounts[to] * element})
			continue
		}
		m.add(2*k, Step{Act: Send, Header: true, Kept: true, Peer: int32(to), Src: src, Len: v.SendCounts[to] * element})
		m.add(2*k+1, Step{Act: Recv, Header: true, Peer: int32(from), Dst: dst, Len: v.RecvCounts[from] * element})
	}
	return m.build()
}
