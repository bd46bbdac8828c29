package otlp

import (
	"context"
	"encoding/binary"
	"log/slog"
	"math"
	"slices"
	"sync"
	"time"

	"golang.org/x/time/rate"

	"github.com/lockstep-ccl/lockstep/collector"
	"github.com/lockstep-ccl/lockstep/exporters/names"
	"github.com/lockstep-ccl/lockstep/record"
)

// Options bounds a Tracer. The zero value means the defaults.
type Options struct {
	// Remember is how many collectives stay in memory for Retroactive, each
	// about 180 bytes with its windows; default 32768.
	Remember int
	// Queue is how many collectives may wait to be encoded; default 4096.
	Queue int
	// SpansPerSecond limits what the policy alone exports, with bursts of twice
	// as much; what a master names is exempt. Default 2000.
	SpansPerSecond int
	Log            *slog.Logger // default slog.Default
}

func (o Options) withDefaults() Options {
	if o.Remember <= 0 {
		o.Remember = 32768
	}
	if o.Queue <= 0 {
		o.Queue = 4096
	}
	if o.SpansPerSecond <= 0 {
		o.SpansPerSecond = 2000
	}
	if o.Log == nil {
		o.Log = slog.Default()
	}
	return o
}

// Bounds on the caches of encoded attributes; a cache that is full starts over.
const (
	maxTracks    = 4096
	maxResources = 256
)

// maxAround bounds the windows and changes around collectives that wait to be encoded, 4 MiB.
const maxAround = 1 << 16

const maxSpans = 3 + collector.MaxPeers // of one operation: the rank's, wait, transfer, what each peer sent

// Tracer is the collector.Tracer that exports collectives over OTLP. Collective
// and Retroactive belong to the agent's fold goroutine and never block on the
// network; Shutdown and Collect may be called from any.
type Tracer struct {
	config    Config
	opts      Options
	threshold uint64 // a trace id below it is sampled
	limit     *rate.Limiter
	exporter  *exporter // nil when nothing is exported

	mu        sync.Mutex
	closed    bool
	memory    []operation // ring; position p lives in memory[p % len]
	next      uint64      // position
	windows   []collector.Window
	nextWin   uint64
	links     []collector.LinkEvent // ring
	nextLink  uint64
	peers     []collector.Leg // ring
	nextPeer  uint64
	asked     asked
	queue     []waiting // ring
	head, len int
	around    int // windows and changes that histories in the queue have
	tracks    map[trackKey]*track
	resources map[string]*jobResource
}

// waiting is an operation to be encoded.
type waiting struct {
	pos     uint64
	spans   int32             // for the drop counter, should memory be overwritten first
	history *collector.Around // not nil: only this goes out, as a span below the rank's
}

// events is how many windows and changes wait with it.
func (w *waiting) events() int {
	if w.history == nil {
		return 0
	}
	return len(w.history.Windows) + len(w.history.Links)
}

var _ collector.HistoryTracer = (*Tracer)(nil)

// New returns a tracer for c. It connects when there is something to send, so
// a backend that is down is no error. End it with Shutdown.
func New(c Config, o Options) (*Tracer, error) {
	o = o.withDefaults()
	t := &Tracer{config: c, opts: o, threshold: threshold(c.Ratio)}
	if !c.Enabled() {
		return t, nil
	}
	to, err := newSender(c)
	if err != nil {
		return nil, err
	}
	t.limit = rate.NewLimiter(rate.Limit(o.SpansPerSecond), max(2*o.SpansPerSecond, maxSpans))
	t.memory = make([]operation, o.Remember)
	t.windows = make([]collector.Window, max(o.Remember/2, collector.MaxWindows))
	t.peers = make([]collector.Leg, max(o.Remember/4, collector.MaxPeers))
	t.links = make([]collector.LinkEvent, max(o.Remember/8, collector.MaxLinks))
	t.queue = make([]waiting, o.Queue)
	t.tracks = map[trackKey]*track{}
	t.resources = map[string]*jobResource{}
	t.exporter = newExporter(to, o.Log, t.take)
	return t, nil
}

// Enabled reports whether anything is exported.
func (t *Tracer) Enabled() bool { return t.exporter != nil }

// Collective remembers c, and exports it when it is anomalous or sampled. An
// open collective is only remembered: it is exported when it is named.
func (t *Tracer) Collective(c *collector.Collective) {
	if t.exporter == nil {
		return
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.closed {
		return
	}
	o, pos := t.remember(c)
	if o.queued || o.ended == 0 || !c.Anomalous && !o.late && !t.sampled(c) {
		return
	}
	n := countSpans(o)
	if !t.limit.AllowN(time.Now(), n) {
		t.exporter.drop(names.DropOverLimit, n)
		return
	}
	c.Traced = t.offer(pos) && !o.late
}

// Retroactive implements collector.Tracer.
func (t *Tracer) Retroactive(job string, commID uint64, kind record.CollKind, seq uint64, each func(collector.Traced)) int {
	if t.exporter == nil {
		return 0
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.closed {
		return 0
	}
	spans := 0
	for pos := t.oldest(); pos < t.next; pos++ {
		o := t.at(pos)
		if o.seq != seq || o.kind != kind || o.track.id != commID || o.track.job != job || o.track.rank == rootRank || !o.timed() {
			continue
		}
		if o.queued {
			spans += countSpans(o)
		} else if t.offer(pos) {
			spans += countSpans(o)
			if first, last := o.interval(); !o.late {
				each(collector.Traced{Rank: o.track.rank, First: first + o.realOffset, Last: max(first, last) + o.realOffset, Err: o.clockErr + o.mapErr, NodeClock: !o.jobClock})
			}
		}
	}
	if spans > 0 {
		t.asked.add(askedKey{job, commID, kind, seq})
	}
	return spans
}

// History implements collector.HistoryTracer.
func (t *Tracer) History(job string, commID uint64, kind record.CollKind, seq uint64, read func(rank int32, first, last int64) collector.Around) int {
	if t.exporter == nil {
		return 0
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	spans := 0
	for pos := t.oldest(); pos < t.next && !t.closed; pos++ {
		o := t.at(pos)
		if o.seq != seq || o.kind != kind || o.track.id != commID || o.track.job != job || o.track.rank == rootRank || !o.timed() || !o.queued || o.historyOut {
			continue
		}
		first, last := o.interval()
		h := read(o.track.rank, first, max(first, last))
		if len(h.Windows)+len(h.Links) == 0 {
			continue
		}
		o.historyOut = true
		w, l := min(len(h.Windows), collector.MaxHistory), min(len(h.Links), collector.MaxHistory)
		h.LeftOut += len(h.Windows) - w + len(h.Links) - l
		h.Windows, h.Links = slices.Clone(h.Windows[:w]), slices.Clone(h.Links[:l]) // they may be part of much more
		if t.enqueue(waiting{pos, 1, &h}) {
			spans++
		}
	}
	return spans
}

// Held implements collector.Tracer.
func (t *Tracer) Held(job string, commID uint64) (kind record.CollKind, seq uint64, ok bool) {
	if t.exporter == nil {
		return 0, 0, false
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	for pos := t.next; pos > t.oldest(); pos-- {
		if o := t.at(pos - 1); o.track.id == commID && o.track.job == job && o.track.rank != rootRank && o.timed() {
			return o.kind, o.seq, true
		}
	}
	return 0, 0, false
}

// Root implements collector.Tracer.
func (t *Tracer) Root(c *collector.Collective, ranks int) {
	if t.exporter == nil {
		return
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	key := askedKey{c.Job, c.CommID, c.Kind, c.Seq}
	if t.closed || t.asked.rooted(key) {
		return
	}
	o, pos := t.remember(c)
	o.ranks, o.late = int32(ranks), false
	t.offer(pos)
}

// Shutdown exports what is queued, as far as ctx allows, and stops. What had to
// be left behind is counted as dropped. Collectives are ignored from then on.
func (t *Tracer) Shutdown(ctx context.Context) error {
	if t.exporter == nil {
		return nil
	}
	t.mu.Lock()
	again := t.closed
	t.closed = true
	t.mu.Unlock()
	if again {
		return nil
	}
	return t.exporter.shutdown(ctx)
}

// threshold and sampled decide as the SDK's TraceIDRatioBased sampler does, on
// the lower half of the trace id.
func threshold(ratio float64) uint64 {
	if ratio >= 1 {
		return 1 << 63
	}
	return uint64(max(ratio, 0) * (1 << 63))
}

func (t *Tracer) sampled(c *collector.Collective) bool {
	switch t.threshold {
	case 0:
		return false
	case 1 << 63:
		return true
	}
	id := collector.TraceID(c.Job, c.CommID, c.Kind, c.Seq)
	return binary.BigEndian.Uint64(id[8:])>>1 < t.threshold
}

func (t *Tracer) at(pos uint64) *operation { return &t.memory[pos%uint64(len(t.memory))] }

func (t *Tracer) oldest() uint64 { return t.next - min(t.next, uint64(len(t.memory))) }

// remember copies c into memory. A collective that was seen open before takes
// the place of its snapshot, unless that has been exported.
func (t *Tracer) remember(c *collector.Collective) (*operation, uint64) {
	tr := t.track(c)
	pos := t.next
	if snap := tr.open; snap > t.oldest() {
		if o := t.at(snap - 1); o.track == tr && o.ended == 0 && o.kind == c.Kind && o.seq == c.Seq {
			switch {
			case !o.queued:
				pos = snap - 1
			case c.Ended == 0:
				return o, snap - 1
			}
		}
	}
	o := t.at(pos)
	if pos == t.next {
		t.next++
	}
	*o = operation{
		track: tr, seq: c.Seq, bytes: c.Bytes, enqueued: c.Enqueued, started: c.Started, ended: c.Ended,
		wait: c.Wait, transfer: c.Transfer, realOffset: c.RealOffset, windows: t.nextWin, links: t.nextLink, peers: t.nextPeer, root: c.Root, channels: c.Channels,
		seen: c.SeenAt, mapErr: c.MapErr, correction: c.Correction, clockErr: c.ClockErr, waitedFor: c.WaitedFor,
		jobClock: c.JobClock, replay: c.Replay, clock: c.Clock, rootless: c.Rootless || !c.Kind.Collective(),
		kind: c.Kind, dtype: c.DType, op: c.Op, algo: c.Algo, proto: c.Proto, result: c.Result,
		late: t.asked.has(askedKey{c.Job, c.CommID, c.Kind, c.Seq}),
	}
	o.nwindows = uint8(max(0, min(c.NWindows, collector.MaxWindows)))
	for i := range c.Windows[:o.nwindows] {
		t.windows[t.nextWin%uint64(len(t.windows))] = c.Windows[i]
		t.nextWin++
	}
	o.nlinks = uint8(max(0, min(c.NLinks, collector.MaxLinks)))
	for i := range c.Links[:o.nlinks] {
		t.links[t.nextLink%uint64(len(t.links))] = c.Links[i]
		t.nextLink++
	}
	for _, l := range c.Peers.All() {
		t.peers[t.nextPeer%uint64(len(t.peers))] = l
		t.nextPeer++
		o.npeers++
	}
	o.leftOut = uint16(max(0, min(c.LeftOut, math.MaxUint16)))
	if o.ended == 0 {
		tr.open = pos + 1
	}
	return o, pos
}

// windowsOf appends what is left of o's windows.
func (t *Tracer) windowsOf(dst []collector.Window, o *operation) []collector.Window {
	oldest := t.nextWin - min(t.nextWin, uint64(len(t.windows)))
	for p := max(o.windows, oldest); p < o.windows+uint64(o.nwindows); p++ {
		dst = append(dst, t.windows[p%uint64(len(t.windows))])
	}
	return dst
}

// linksOf is windowsOf for links.
func (t *Tracer) linksOf(dst []collector.LinkEvent, o *operation) []collector.LinkEvent {
	oldest := t.nextLink - min(t.nextLink, uint64(len(t.links)))
	for p := max(o.links, oldest); p < o.links+uint64(o.nlinks); p++ {
		dst = append(dst, t.links[p%uint64(len(t.links))])
	}
	return dst
}

// peersOf is windowsOf for what peers sent.
func (t *Tracer) peersOf(dst []collector.Leg, o *operation) []collector.Leg {
	oldest := t.nextPeer - min(t.nextPeer, uint64(len(t.peers)))
	for p := max(o.peers, oldest); p < o.peers+uint64(o.npeers); p++ {
		dst = append(dst, t.peers[p%uint64(len(t.peers))])
	}
	return dst
}

func (t *Tracer) track(c *collector.Collective) *track {
	tr := t.tracks[keyOf(c)]
	if tr != nil && tr.comm == c.Comm && tr.job == c.Job && tr.node == c.Node && tr.workload == c.Workload {
		return tr
	}
	if len(t.tracks) >= maxTracks {
		clear(t.tracks)
	}
	r := t.resources[c.Job]
	if r == nil {
		if len(t.resources) >= maxResources {
			clear(t.resources)
		}
		r = newJobResource(t.config.Resource, c.Job)
		t.resources[c.Job] = r
	}
	tr = newTrack(c, r)
	t.tracks[tr.trackKey] = tr
	return tr
}

// offer queues the operation at pos for export, or counts it as dropped.
func (t *Tracer) offer(pos uint64) bool {
	o := t.at(pos)
	if !t.enqueue(waiting{pos: pos, spans: int32(countSpans(o))}) {
		return false
	}
	o.queued = true
	return true
}

func (t *Tracer) enqueue(w waiting) bool {
	if t.len == len(t.queue) || t.around+w.events() > maxAround {
		t.exporter.drop(names.DropQueueFull, int(w.spans))
		return false
	}
	t.around += w.events()
	t.queue[(t.head+t.len)%len(t.queue)] = w
	t.len++
	if t.len == 1 || t.len == len(t.queue)/2 {
		t.exporter.wake()
	}
	return true
}

// take moves up to cap(b.operations) operations from the queue to b and
// reports whether there are more. What memory has overwritten is dropped.
func (t *Tracer) take(b *pending) (more bool) {
	b.operations, b.windows, b.links, b.peers = b.operations[:0], b.windows[:0], b.links[:0], b.peers[:0]
	t.mu.Lock()
	defer t.mu.Unlock()
	for t.len > 0 && len(b.operations) < cap(b.operations) {
		w := t.queue[t.head]
		t.queue[t.head].history = nil
		t.head = (t.head + 1) % len(t.queue)
		t.len--
		t.around -= w.events()
		if w.pos < t.oldest() {
			t.exporter.drop(names.DropEvicted, int(w.spans))
			continue
		}
		o := *t.at(w.pos)
		x := taken{operation: o, fromWindow: len(b.windows), fromLink: len(b.links), fromPeer: len(b.peers), history: w.history != nil}
		if x.history {
			b.windows, b.links, x.leftOut = append(b.windows, w.history.Windows...), append(b.links, w.history.Links...), w.history.LeftOut
		} else {
			b.windows, b.links, b.peers = t.windowsOf(b.windows, &o), t.linksOf(b.links, &o), t.peersOf(b.peers, &o)
		}
		x.toWindow, x.toLink, x.toPeer = len(b.windows), len(b.links), len(b.peers)
		if gone := int(o.npeers) - (x.toPeer - x.fromPeer); gone > 0 && !x.history {
			t.exporter.drop(names.DropEvicted, gone) // spans of their own
		}
		b.operations = append(b.operations, x)
	}
	return t.len > 0
}
