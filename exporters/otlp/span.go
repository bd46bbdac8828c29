package otlp

import (
	"encoding/binary"
	"math"

	"google.golang.org/protobuf/encoding/protowire"

	"github.com/lockstep-ccl/lockstep/collector"
	"github.com/lockstep-ccl/lockstep/exporters/names"
	"github.com/lockstep-ccl/lockstep/record"
)

// Attributes whose value is an enumeration, encoded once.
var (
	collAttrs      = enum[record.CollKind](tagAttribute, names.AttrCollective)
	dtypeAttrs     = enum[record.DType](tagAttribute, names.AttrDType)
	opAttrs        = enum[record.RedOp](tagAttribute, names.AttrOp)
	algoAttrs      = enum[record.Algo](tagAttribute, names.AttrAlgo)
	protoAttrs     = enum[record.Proto](tagAttribute, names.AttrProto)
	resultAttrs    = enum[record.Result](tagAttribute, names.AttrResult)
	causeAttrs     = enum[record.Cause](tagEventAttribute, names.AttrCause)
	connStateAttrs = enum[record.Cause](tagEventAttribute, names.AttrConnState)
	stateAttrs     = enum[record.LinkState](tagEventAttribute, names.AttrLinkState)
	carrier        = enum[record.Transport](tagEventAttribute, names.AttrTransport)

	hostAttr = appendString(nil, tagAttribute, names.AttrClock, "host")
	gpuAttr  = appendString(nil, tagAttribute, names.AttrClock, "gpu")
	jobAttr  = appendString(nil, tagAttribute, names.AttrClockScale, "job")
	nodeAttr = appendString(nil, tagAttribute, names.AttrClockScale, "node")
)

func enum[T interface {
	~uint8
	String() string
}](tag byte, key string) [256][]byte {
	var encoded [256][]byte
	for v := range encoded {
		encoded[v] = appendString(nil, tag, key, T(v).String())
	}
	return encoded
}

var (
	waitName     = appendText(nil, tagName, "wait")
	transferName = appendText(nil, tagName, "transfer")
	reduceName   = appendText(nil, tagName, "reduce")
	receiveName  = appendText(nil, tagName, "receive")
	historyName  = appendText(nil, tagName, "windows")
	windowName   = appendText(nil, tagEventName, "window")
	linkName     = appendText(nil, tagEventName, "link")
	nicName      = appendText(nil, tagEventName, "nic")
)

// encoder appends spans to a request. It is reused: after the first few spans
// it allocates nothing. The zero value is ready.
type encoder struct {
	span, part []byte
	leftOut    int // events of spans so far
}

// Children's ids derive from their parent's.
const (
	childWait     = 1
	childTransfer = 2
	childHistory  = 3
	childPeer     = 16 // and above
)

// operation appends o's spans to b, each as a field of ScopeSpans, and returns
// how many there were: countSpans(o). windows and links are o's, or fewer when some are gone; peers are o's.
func (e *encoder) operation(b []byte, o *operation, windows []collector.Window, links []collector.LinkEvent, peers []collector.Leg) ([]byte, int) {
	t := o.track
	trace := collector.TraceID(t.job, t.id, o.kind, o.seq)
	first, last := o.interval()
	start, end := unix(first, o.realOffset), unix(last, o.realOffset)
	end = max(end, start)
	root := collector.SpanID(trace, rootRank)
	if t.rank == rootRank {
		return e.root(b, o, trace, root, start, end), 1
	}
	rank := t.rank
	if o.ended == 0 {
		rank = openRank - rank
	}
	id, parent := collector.SpanID(trace, rank), root
	if o.late || o.rootless {
		parent = [8]byte{}
	}
	e.begin(trace, id, parent, t.name[index(o.kind)], start, end)
	e.attributes(o)
	for i := range windows {
		e.window(&windows[i], o.realOffset)
	}
	for i := range links {
		e.link(&links[i], o.realOffset)
	}
	e.without(int(o.nwindows) - len(windows) + int(o.nlinks) - len(links) + int(o.leftOut))
	if o.late && !o.rootless {
		e.part = appendField(appendField(e.part[:0], tagTraceID, trace[:]), tagSpanID, root[:])
		e.span = appendField(e.span, tagLink, e.part)
	}
	if o.result != record.ResultOK {
		message := o.result.String()
		e.span = protowire.AppendVarint(append(e.span, tagStatus), uint64(4+len(message)))
		e.span = append(appendText(e.span, tagStatusMessage, message), tagStatusCode, statusError)
	}
	flags := uint32(flagSampled | flagParentKnown)
	if parent != ([8]byte{}) {
		flags |= flagParentRemote
	}
	b, phases := e.phases(e.end(b, flags), o, trace, id, start, end)
	return e.legs(b, o, trace, id, start, end, peers), 1 + phases + len(peers)
}

// root appends the span that covers all ranks'.
func (e *encoder) root(b []byte, o *operation, trace [16]byte, id [8]byte, start, end uint64) []byte {
	t := o.track
	e.begin(trace, id, [8]byte{}, t.name[index(o.kind)], start, end)
	e.span = append(append(e.span, collAttrs[o.kind]...), t.shared...)
	e.span = appendInt(e.span, tagAttribute, names.AttrSequence, int64(o.seq))
	e.span = appendInt(e.span, tagAttribute, names.AttrTracedRanks, int64(o.ranks))
	e.times(o)
	return e.end(b, flagSampled|flagParentKnown)
}

// phases appends the spans of o's wait and of its transfer below span id, which lasts from start
// to end, and returns how many there were.
func (e *encoder) phases(b []byte, o *operation, trace [16]byte, id [8]byte, start, end uint64) (_ []byte, spans int) {
	wait, transfer := o.phases()
	if wait > 0 {
		spans++
		e.begin(trace, child(id, childWait), id, waitName, start, min(start+uint64(wait), end))
		if o.waitedFor >= 0 {
			e.span = appendInt(e.span, tagAttribute, names.AttrPeer, int64(o.waitedFor))
		}
		b = e.end(b, flagSampled|flagParentKnown)
	}
	if transfer > 0 {
		spans++
		from := min(start+uint64(max(wait, 0)), end)
		e.begin(trace, child(id, childTransfer), id, transferName, from, min(from+uint64(transfer), end))
		if o.kind.PointToPoint() && o.root >= 0 { // a collective's transfer is with several, and its record tells no parts
			e.span = appendInt(e.span, tagAttribute, names.AttrPeer, int64(o.root))
		}
		b = e.end(b, flagSampled|flagParentKnown)
	}
	return b, spans
}

// legs appends a span for what each peer was to o, likewise.
func (e *encoder) legs(b []byte, o *operation, trace [16]byte, id [8]byte, start, end uint64, peers []collector.Leg) []byte {
	for i := range peers {
		l := &peers[i]
		name := receiveName
		if l.Reduce {
			name = reduceName
		}
		from := min(max(unix(l.First-l.Wait, o.realOffset), start), end)
		e.begin(trace, child(id, childPeer+uint64(i)), id, name, from, max(from, min(unix(l.Last, o.realOffset), end)))
		e.span = appendInt(e.span, tagAttribute, names.AttrPeer, int64(l.Peer))
		e.span = appendDouble(e.span, tagAttribute, names.AttrPeerWait, float64(l.Wait)/1e9)
		if l.Stall > 0 {
			e.span = appendDouble(e.span, tagAttribute, names.AttrPeerStall, float64(l.Stall)/1e9)
		}
		b = e.end(b, flagSampled|flagParentKnown)
	}
	return b
}

// history appends a span below a rank's that has windows of before and during it, of all its
// connections at their own resolution.
func (e *encoder) history(b []byte, o *operation, windows []collector.Window, links []collector.LinkEvent, leftOut int) []byte {
	t := o.track
	trace := collector.TraceID(t.job, t.id, o.kind, o.seq)
	first, last := o.interval()
	start, end := unix(first, o.realOffset), unix(last, o.realOffset)
	rank := t.rank
	if o.ended == 0 {
		rank = openRank - rank
	}
	id := collector.SpanID(trace, rank)
	e.begin(trace, child(id, childHistory), id, historyName, start, max(end, start))
	for i := range windows {
		e.window(&windows[i], o.realOffset)
	}
	for i := range links {
		e.link(&links[i], o.realOffset)
	}
	e.without(leftOut)
	return e.end(b, flagSampled|flagParentKnown)
}

// without says how many events the span had no room for.
func (e *encoder) without(events int) {
	if events > 0 {
		e.span = protowire.AppendVarint(append(e.span, tagDroppedEvents), uint64(events))
		e.leftOut += events
	}
}

func (e *encoder) attributes(o *operation) {
	t := o.track
	b := append(e.span, collAttrs[o.kind]...)
	b = append(b, t.shared...)
	b = append(b, t.own...)
	b = appendInt(b, tagAttribute, names.AttrSequence, int64(o.seq))
	b = appendInt(b, tagAttribute, names.AttrBytes, int64(min(o.bytes, math.MaxInt64)))
	if o.kind.HasData() {
		b = append(b, dtypeAttrs[o.dtype]...)
	}
	if o.kind.Reduces() {
		b = append(b, opAttrs[o.op]...)
	}
	if o.algo != record.AlgoNone {
		b = append(b, algoAttrs[o.algo]...)
	}
	if o.proto != record.ProtoNone {
		b = append(b, protoAttrs[o.proto]...)
	}
	if o.root >= 0 {
		key := names.AttrRoot
		if o.kind.PointToPoint() {
			key = names.AttrPeer
		}
		b = appendInt(b, tagAttribute, key, int64(o.root))
	}
	if o.channels != 0 {
		b = appendInt(b, tagAttribute, names.AttrChannels, int64(o.channels))
	}
	if o.enqueued != 0 && o.started > o.enqueued {
		b = appendDouble(b, tagAttribute, names.AttrQueueTime, float64(o.started-o.enqueued)/1e9)
	}
	if o.ended == 0 {
		b = appendTrue(b, tagAttribute, names.AttrOpen)
	} else {
		b = append(b, resultAttrs[o.result]...)
	}
	if o.replay {
		b = appendTrue(b, tagAttribute, names.AttrReplay)
	}
	if o.late {
		b = appendTrue(b, tagAttribute, names.AttrLate)
	}
	if o.clock == record.ClockGPU {
		b = append(b, gpuAttr...)
		b = appendDouble(b, tagAttribute, names.AttrStampError, float64(o.clockErr)/1e9)
	} else {
		b = append(b, hostAttr...)
	}
	e.span = b
	e.times(o)
}

// times says what o's times are worth.
func (e *encoder) times(o *operation) {
	if !o.jobClock {
		e.span = append(e.span, nodeAttr...)
		return
	}
	b := append(e.span, jobAttr...)
	b = appendDouble(b, tagAttribute, names.AttrClockError, float64(o.mapErr+o.clockErr)/1e9)
	if o.track.rank != rootRank {
		b = appendDouble(b, tagAttribute, names.AttrClockCorrection, float64(o.correction)/1e9)
	}
	e.span = b
}

func (e *encoder) window(w *collector.Window, realOffset int64) {
	b := appendFixed64(e.part[:0], tagEventTime, unix(w.Last, realOffset))
	b = append(b, windowName...)
	b = append(b, causeAttrs[w.Cause]...)
	if w.Peer >= 0 {
		b = appendInt(b, tagEventAttribute, names.AttrPeer, int64(w.Peer))
	}
	if w.Last > w.First {
		b = appendDouble(b, tagEventAttribute, names.AttrBandwidth, float64(w.Bytes)/(float64(w.Last-w.First)/1e9))
	}
	b = appendInt(b, tagEventAttribute, names.AttrBytes, int64(min(w.Bytes, math.MaxInt64)))
	b = appendInt(b, tagEventAttribute, names.AttrWRs, int64(w.WRs))
	b = appendInt(b, tagEventAttribute, names.AttrBacklog, int64(w.Backlog))
	if w.State != record.CauseNone {
		b = append(b, connStateAttrs[w.State]...)
	}
	if w.Overlaps {
		b = appendTrue(b, tagEventAttribute, names.AttrOverlaps)
	}
	e.part = identity(b, w.Conn)
	e.span = appendField(e.span, tagEvent, e.part)
}

func (e *encoder) link(l *collector.LinkEvent, realOffset int64) {
	b := appendFixed64(e.part[:0], tagEventTime, unix(l.At, realOffset))
	if l.Counter != "" {
		b = append(b, nicName...)
		b = appendString(b, tagEventAttribute, names.AttrNICCounter, clean(l.Counter))
		b = appendInt(b, tagEventAttribute, names.AttrNICGained, int64(min(l.Gained, math.MaxInt64)))
		b = appendDouble(b, tagEventAttribute, names.AttrNICInterval, float64(max(l.At-l.Since, 0))/1e9)
		if l.Conn != nil {
			b = portOf(b, l.Conn)
		}
		e.part = b
		e.span = appendField(e.span, tagEvent, e.part)
		return
	}
	b = append(b, linkName...)
	b = append(b, stateAttrs[l.State]...)
	if l.Peer >= 0 {
		b = appendInt(b, tagEventAttribute, names.AttrPeer, int64(l.Peer))
	}
	e.part = identity(b, l.Conn)
	e.span = appendField(e.span, tagEvent, e.part)
}

// identity appends what tells a connection from all others.
func identity(b []byte, c *collector.Conn) []byte {
	if c == nil {
		return b
	}
	b = append(b, carrier[c.Transport]...)
	b = appendString(b, tagEventAttribute, names.AttrConnection, clean(c.Name))
	b = appendInt(b, tagEventAttribute, names.AttrChannel, int64(c.Channel))
	if c.QP != 0 {
		b = appendInt(b, tagEventAttribute, names.AttrQueuePair, int64(min(c.QP, math.MaxInt64)))
	}
	if c.PeerQP != 0 {
		b = appendInt(b, tagEventAttribute, names.AttrPeerQueuePair, int64(c.PeerQP))
	}
	if c.Address != "" {
		b = appendString(b, tagEventAttribute, names.AttrAddress, clean(c.Address))
	}
	return portOf(b, c)
}

// portOf appends which port of the node a connection has.
func portOf(b []byte, c *collector.Conn) []byte {
	if c.NIC != "" {
		b = appendString(b, tagEventAttribute, names.AttrNIC, clean(c.NIC))
		b = appendInt(b, tagEventAttribute, names.AttrPort, int64(c.Port))
	}
	if c.Rail != 0 {
		b = appendInt(b, tagEventAttribute, names.AttrRail, int64(c.Rail))
	}
	return b
}

// begin starts a span; its parent is left out when it has none.
func (e *encoder) begin(trace [16]byte, id, parent [8]byte, name []byte, start, end uint64) {
	b := append(e.span[:0], tagTraceID, 16)
	b = append(b, trace[:]...)
	b = append(b, tagSpanID, 8)
	b = append(b, id[:]...)
	if parent != ([8]byte{}) {
		b = append(b, tagParentID, 8)
		b = append(b, parent[:]...)
	}
	b = append(b, name...)
	b = append(b, tagKind, kindInternal)
	b = appendFixed64(b, tagStart, start)
	e.span = appendFixed64(b, tagEnd, end)
}

func (e *encoder) end(b []byte, flags uint32) []byte {
	e.span = binary.LittleEndian.AppendUint32(append(e.span, tagFlags&0x7f|0x80, tagFlags>>7), flags)
	return appendField(b, tagSpan, e.span)
}

func child(parent [8]byte, n uint64) [8]byte {
	h := (binary.BigEndian.Uint64(parent[:]) ^ n) * 0x9e3779b97f4a7c15
	if h == 0 {
		h = n
	}
	var id [8]byte
	binary.BigEndian.PutUint64(id[:], h)
	return id
}

func unix(mono, realOffset int64) uint64 { return uint64(max(mono+realOffset, 0)) }
