package otlp

import (
	"bytes"
	"encoding/hex"
	"maps"
	"math"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/google/go-cmp/cmp"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/sdk/resource"
	coltracepb "go.opentelemetry.io/proto/otlp/collector/trace/v1"
	commonpb "go.opentelemetry.io/proto/otlp/common/v1"
	tracepb "go.opentelemetry.io/proto/otlp/trace/v1"
	"google.golang.org/protobuf/proto"
	"pgregory.net/rapid"

	"github.com/lockstep-ccl/lockstep/collector"
	"github.com/lockstep-ccl/lockstep/exporters/names"
	"github.com/lockstep-ccl/lockstep/record"
)

// encodeRequest is the whole way from an operation to a request.
func encodeRequest(o *operation, windows []collector.Window, links ...collector.LinkEvent) ([]byte, int) {
	var e encoder
	spans, n := e.operation(nil, o, windows, links, peersOf(o))
	return o.track.resource.appendRequest(nil, spans), n
}

// peersOf makes up what o's peers sent, times of all kinds among them.
func peersOf(o *operation) []collector.Leg {
	legs := make([]collector.Leg, o.npeers)
	for i := range legs {
		k := int64(i)
		legs[i] = collector.Leg{Peer: int32(i), Reduce: i%2 == 0, First: o.started + k*10, Last: o.ended - k, Wait: 10 * k, Stall: k}
	}
	return legs
}

// decode fails the test unless request is a canonical, valid OTLP request.
func decode(t interface {
	Helper()
	Fatalf(string, ...any)
}, request []byte) *coltracepb.ExportTraceServiceRequest {
	t.Helper()
	var r coltracepb.ExportTraceServiceRequest
	if err := proto.Unmarshal(request, &r); err != nil {
		t.Fatalf("not an OTLP request: %v", err)
	}
	again, err := proto.MarshalOptions{Deterministic: true}.Marshal(&r)
	if err != nil {
		t.Fatalf("%v", err)
	}
	if !bytes.Equal(again, request) {
		t.Fatalf("not what protobuf would write:\nours %x\npb   %x", request, again)
	}
	return &r
}

func example() (*operation, []collector.Window) {
	c := &collector.Collective{Job: "llama", Comm: "dp", CommID: 0xabc, Rank: 0, Size: 8, World: 3, Attempt: 2, Node: "node-1", Workload: &collector.Workload{Attributes: []collector.Attribute{{Key: "k8s.pod.name", Value: "trainer-3"}}}}
	process := resource.NewWithAttributes("https://example.test/schema", attribute.String("service.name", "lockstep-agent"))
	return &operation{
			track: newTrack(c, newJobResource(process, c.Job)), kind: record.AllReduce, seq: 41, bytes: 1 << 20, dtype: record.BFloat16, op: record.Avg,
			algo: record.AlgoRing, proto: record.ProtoSimple, root: -1, channels: 4, result: record.ResultPeerLost, nwindows: 2,
			enqueued: 900, started: 1000, ended: 2_001_000, wait: 500_000, transfer: 1_500_000, realOffset: 1_700_000_000_000_000_000,
			waitedFor: 6, nlinks: 1, jobClock: true, mapErr: 40_000, correction: -50_000_000, clock: record.ClockGPU, clockErr: 2_000, replay: true,
		}, []collector.Window{
			{Peer: 1, Bytes: 1 << 20, WRs: 8, Backlog: 16, First: 501_000, Last: 1_501_000, Cause: record.CauseNetwork, Conn: exampleConn},
		}
}

var exampleConn = &collector.Conn{Transport: record.TransportRDMA, Channel: 1, QP: 0x11c, PeerQP: 0x20, Address: "fe80::1", NIC: "mlx5_0", Port: 1, Rail: 3, Name: "mlx5_0/1->mlx5_2/1"}

func TestExampleSpan(t *testing.T) {
	o, windows := example()
	request, n := encodeRequest(o, windows, collector.LinkEvent{Peer: 1, State: record.LinkSwitched, At: 700_000, Conn: exampleConn})
	r := decode(t, request)
	if n != 3 {
		t.Fatalf("%d spans, want rank, wait and transfer", n)
	}
	rs := r.ResourceSpans[0]
	if diff := cmp.Diff(map[string]any{"service.name": "lockstep-agent", names.AttrJob: "llama"}, attrs(rs.Resource.Attributes)); diff != "" {
		t.Errorf("resource -want +got:\n%s", diff)
	}
	if rs.SchemaUrl != "https://example.test/schema" || rs.ScopeSpans[0].Scope.Name != scopeName {
		t.Errorf("schema %q, scope %q", rs.SchemaUrl, rs.ScopeSpans[0].Scope.Name)
	}
	spans := rs.ScopeSpans[0].Spans
	rank, wait, transfer := spans[0], spans[1], spans[2]
	trace := collector.TraceID("llama", 0xabc, record.AllReduce, 41)
	id, root := collector.SpanID(trace, 0), collector.SpanID(trace, -1)
	for _, s := range spans {
		if !bytes.Equal(s.TraceId, trace[:]) || s.Kind != tracepb.Span_SPAN_KIND_INTERNAL || s.Flags&1 == 0 {
			t.Errorf("span %q: trace %x kind %v flags %x", s.Name, s.TraceId, s.Kind, s.Flags)
		}
	}
	if rank.Name != "rank 3 (node-1) AllReduce" || !bytes.Equal(rank.ParentSpanId, root[:]) ||
		!bytes.Equal(rank.SpanId, id[:]) || !bytes.Equal(wait.ParentSpanId, id[:]) || !bytes.Equal(transfer.ParentSpanId, id[:]) {
		t.Error("the spans are no tree")
	}
	const zero = 1_700_000_000_000_000_000
	for _, x := range []struct {
		s          *tracepb.Span
		start, end uint64
	}{{rank, zero + 1000, zero + 2_001_000}, {wait, zero + 1000, zero + 501_000}, {transfer, zero + 501_000, zero + 2_001_000}} {
		if x.s.StartTimeUnixNano != x.start || x.s.EndTimeUnixNano != x.end {
			t.Errorf("%s: %d–%d, want %d–%d", x.s.Name, x.s.StartTimeUnixNano, x.s.EndTimeUnixNano, x.start, x.end)
		}
	}
	want := map[string]any{
		names.AttrCollective: "AllReduce", names.AttrCommunicator: "dp", names.AttrCommID: "0000000000000abc", names.AttrCommSize: int64(8),
		names.AttrRank: int64(0), names.AttrWorldRank: int64(3), names.AttrAttempt: int64(2), names.AttrSequence: int64(41),
		names.AttrBytes: int64(1 << 20), names.AttrDType: "bfloat16", names.AttrOp: "avg", names.AttrAlgo: "ring", names.AttrProto: "simple",
		names.AttrChannels: int64(4), names.AttrResult: "peer_lost", names.AttrQueueTime: 1e-7,
		names.AttrClock: "gpu", names.AttrClockScale: "job", names.AttrClockError: 42e-6, names.AttrClockCorrection: -0.05, names.AttrStampError: 2e-6,
		names.AttrReplay: true, "k8s.pod.name": "trainer-3",
	}
	if diff := cmp.Diff(want, attrs(rank.Attributes)); diff != "" {
		t.Errorf("attributes -want +got:\n%s", diff)
	}
	if rank.Status.GetCode() != tracepb.Status_STATUS_CODE_ERROR || rank.Status.GetMessage() != "peer_lost" {
		t.Errorf("status %v", rank.Status)
	}
	if len(rank.Events) != 2 || rank.DroppedEventsCount != 1 || rank.Events[0].TimeUnixNano != zero+1_501_000 {
		t.Fatalf("events %v and %d dropped", rank.Events, rank.DroppedEventsCount)
	}
	if diff := cmp.Diff(map[string]any{names.AttrPeer: int64(6)}, attrs(wait.Attributes)); diff != "" {
		t.Errorf("wait -want +got:\n%s", diff)
	}
	if len(transfer.Attributes) != 0 {
		t.Errorf("a collective's transfer is with several: %v", transfer.Attributes)
	}
	send := *o
	send.kind, send.root = record.Send, 5
	to, _ := encodeRequest(&send, nil)
	sent := decode(t, to).ResourceSpans[0].ScopeSpans[0].Spans[2]
	if diff := cmp.Diff(map[string]any{names.AttrPeer: int64(5)}, attrs(sent.Attributes)); diff != "" {
		t.Errorf("a message's transfer -want +got:\n%s", diff)
	}
	who := map[string]any{
		names.AttrTransport: "rdma", names.AttrConnection: "mlx5_0/1->mlx5_2/1", names.AttrChannel: int64(1),
		names.AttrQueuePair: int64(0x11c), names.AttrPeerQueuePair: int64(0x20), names.AttrAddress: "fe80::1",
		names.AttrNIC: "mlx5_0", names.AttrPort: int64(1), names.AttrRail: int64(3),
	}
	want = map[string]any{
		names.AttrCause: "network", names.AttrPeer: int64(1), names.AttrBandwidth: float64(1<<20) / 1e-3,
		names.AttrBytes: int64(1 << 20), names.AttrWRs: int64(8), names.AttrBacklog: int64(16),
	}
	maps.Copy(want, who)
	if diff := cmp.Diff(want, attrs(rank.Events[0].Attributes)); diff != "" {
		t.Errorf("window -want +got:\n%s", diff)
	}
	want = map[string]any{names.AttrLinkState: "switched", names.AttrPeer: int64(1)}
	maps.Copy(want, who)
	if diff := cmp.Diff(want, attrs(rank.Events[1].Attributes)); diff != "" || rank.Events[1].TimeUnixNano != zero+700_000 {
		t.Errorf("link at %d, -want +got:\n%s", rank.Events[1].TimeUnixNano-zero, diff)
	}
}

// What a port's counter gained is an event with the port, not with one of its connections.
func TestPortEvent(t *testing.T) {
	o, windows := example()
	o.nwindows, o.nlinks = 0, 1
	conn := &collector.Conn{Transport: record.TransportRDMA, Channel: 1, QP: 7, NIC: "mlx5_0", Port: 1, Rail: 3, Name: "a->b"}
	request, _ := encodeRequest(o, windows[:0], collector.LinkEvent{Peer: -1, At: 700_000, Conn: conn, Counter: "out_of_sequence", Gained: 12, Since: 200_000})
	var events []*tracepb.Span_Event
	for _, s := range decode(t, request).ResourceSpans[0].ScopeSpans[0].Spans {
		events = append(events, s.Events...)
	}
	want := map[string]any{
		names.AttrNICCounter: "out_of_sequence", names.AttrNICGained: int64(12), names.AttrNICInterval: 5e-4,
		names.AttrNIC: "mlx5_0", names.AttrPort: int64(1), names.AttrRail: int64(3),
	}
	if len(events) != 1 || events[0].Name != "nic" {
		t.Fatalf("events %v", events)
	}
	if diff := cmp.Diff(want, attrs(events[0].Attributes)); diff != "" {
		t.Errorf("-want +got:\n%s", diff)
	}
}

// The root covers what its own times say, and whatever ends after it was sent is linked to it and no child.
func TestRoot(t *testing.T) {
	o, _ := example()
	o.track = newTrack(&collector.Collective{Job: "llama", Comm: "dp", CommID: 0xabc, Rank: -1, World: -1, Size: 8, Node: "node-1"}, o.track.resource)
	o.nwindows, o.nlinks, o.ranks, o.result, o.realOffset = 0, 0, 8, record.ResultOK, 0
	request, n := encodeRequest(o, nil)
	root := decode(t, request).ResourceSpans[0].ScopeSpans[0].Spans[0]
	if n != 1 || root.Name != "AllReduce dp" || len(root.ParentSpanId) != 0 || root.StartTimeUnixNano != 1000 || root.EndTimeUnixNano != 2_001_000 || attrs(root.Attributes)[names.AttrTracedRanks] != int64(8) {
		t.Errorf("%d spans, root %v", n, root)
	}
	o, _ = example()
	o.late, o.nwindows, o.nlinks = true, 0, 0
	request, _ = encodeRequest(o, nil)
	late := decode(t, request).ResourceSpans[0].ScopeSpans[0].Spans[0]
	if len(late.ParentSpanId) != 0 || len(late.Links) != 1 || !bytes.Equal(late.Links[0].SpanId, root.SpanId) || !bytes.Equal(late.Links[0].TraceId, root.TraceId) {
		t.Errorf("late span %v", late)
	}
}

func TestOpenSnapshotHasItsOwnSpan(t *testing.T) {
	o, _ := example()
	o.ended, o.wait, o.transfer, o.nwindows, o.result = 0, 0, 0, 0, record.ResultOK
	o.seen = 5_000_000_000
	now := o.realOffset + o.seen
	request, _ := encodeRequest(o, nil)
	spans := decode(t, request).ResourceSpans[0].ScopeSpans[0].Spans
	final := collector.SpanID(collector.TraceID("llama", 0xabc, record.AllReduce, 41), 0)
	last := spans[len(spans)-1]
	if bytes.Equal(last.SpanId, final[:]) {
		t.Error("the snapshot takes the id of the span that will end")
	}
	if last.EndTimeUnixNano != uint64(now) || attrs(last.Attributes)[names.AttrOpen] != true {
		t.Errorf("open until %d, want %d, with %v", last.EndTimeUnixNano, now, attrs(last.Attributes))
	}
	if _, ok := attrs(last.Attributes)[names.AttrResult]; ok {
		t.Error("an open collective has a result")
	}
}

func TestAllRanksMeetInOneTrace(t *testing.T) {
	ids := map[string]int{}
	parents := map[string]bool{}
	for rank := int32(-1); rank < 8; rank++ {
		o, _ := example()
		o.track = newTrack(&collector.Collective{Job: "llama", Comm: "dp", CommID: 0xabc, Rank: rank, Size: 8}, o.track.resource)
		request, _ := encodeRequest(o, nil)
		for _, s := range decode(t, request).ResourceSpans[0].ScopeSpans[0].Spans {
			ids[hex.EncodeToString(s.TraceId)+hex.EncodeToString(s.SpanId)]++
			parents[hex.EncodeToString(s.TraceId)+hex.EncodeToString(s.ParentSpanId)] = len(s.ParentSpanId) > 0
		}
	}
	if len(ids) != 1+8*3 {
		t.Errorf("%d spans, want one root and three a rank", len(ids))
	}
	for parent, real := range parents {
		if real && ids[parent] != 1 {
			t.Errorf("parent %s is sent %d times", parent, ids[parent])
		}
	}
}

// operations draws anything that the fold could hand over, hostile values included.
func operations() *rapid.Generator[*operation] {
	return rapid.Custom(func(t *rapid.T) *operation {
		c := &collector.Collective{
			Job: rapid.OneOf(rapid.String(), rapid.StringMatching(`[\x80-\xff]*`)).Draw(t, "job"), Comm: string(rapid.SliceOf(rapid.Byte()).Draw(t, "comm")),
			CommID: rapid.Uint64().Draw(t, "id"), Rank: rapid.Int32().Draw(t, "rank") % 3, Size: rapid.Int32().Draw(t, "size"),
			World: rapid.Int32().Draw(t, "world"), Attempt: rapid.Uint32().Draw(t, "attempt"),
		}
		stamp := rapid.OneOf(rapid.Just(int64(0)), rapid.Int64Range(0, 1<<50), rapid.Int64())
		return &operation{
			track: newTrack(c, newJobResource(resource.NewSchemaless(attribute.Int("n", 1)), c.Job)), seq: rapid.Uint64().Draw(t, "seq"), bytes: rapid.Uint64().Draw(t, "bytes"),
			enqueued: stamp.Draw(t, "enqueued"), started: stamp.Draw(t, "started"), ended: stamp.Draw(t, "ended"),
			wait: stamp.Draw(t, "wait"), transfer: stamp.Draw(t, "transfer"), realOffset: stamp.Draw(t, "offset"),
			root: rapid.Int32().Draw(t, "root"), channels: rapid.Uint16().Draw(t, "channels"), nwindows: rapid.Uint8().Draw(t, "windows"),
			kind: record.CollKind(rapid.Uint8().Draw(t, "kind")), dtype: record.DType(rapid.Uint8().Draw(t, "dtype")), op: record.RedOp(rapid.Uint8().Draw(t, "op")),
			algo: record.Algo(rapid.Uint8().Draw(t, "algo")), proto: record.Proto(rapid.Uint8().Draw(t, "proto")), result: record.Result(rapid.Uint8().Draw(t, "result")),
			late: rapid.Bool().Draw(t, "late"), jobClock: rapid.Bool().Draw(t, "job clock"), replay: rapid.Bool().Draw(t, "replay"), clock: record.Clock(rapid.Uint8().Draw(t, "clock")),
			mapErr: stamp.Draw(t, "map error"), correction: stamp.Draw(t, "correction"), clockErr: stamp.Draw(t, "clock error"), seen: stamp.Draw(t, "seen"),
			npeers: rapid.Uint8Max(collector.MaxPeers).Draw(t, "peers"), waitedFor: rapid.Int32().Draw(t, "waited for"), ranks: rapid.Int32().Draw(t, "ranks"), nlinks: rapid.Uint8().Draw(t, "links"),
		}
	})
}

func TestWhateverIsEncodedIsValid(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		o := operations().Draw(t, "operation")
		windows := rapid.SliceOfN(rapid.Custom(func(t *rapid.T) collector.Window {
			return collector.Window{
				Peer: rapid.Int32().Draw(t, "peer"), Bytes: rapid.Uint64().Draw(t, "bytes"), WRs: rapid.Uint32().Draw(t, "wrs"), Backlog: rapid.Uint32().Draw(t, "backlog"),
				First: rapid.Int64().Draw(t, "first"), Last: rapid.Int64().Draw(t, "last"), Cause: record.Cause(rapid.Uint8().Draw(t, "cause")),
			}
		}), 0, collector.MaxWindows).Draw(t, "windows")
		links := rapid.SliceOfN(rapid.Custom(func(t *rapid.T) collector.LinkEvent {
			return collector.LinkEvent{
				Peer: rapid.Int32().Draw(t, "peer"), State: record.LinkState(rapid.Uint8().Draw(t, "state")), At: rapid.Int64().Draw(t, "at"),
				Counter: rapid.SampledFrom([]string{"", "", "np_cnp_sent", "\xff"}).Draw(t, "counter"), Gained: rapid.Uint64().Draw(t, "gained"), Since: rapid.Int64().Draw(t, "since"),
				Conn: rapid.OneOf(rapid.Just[*collector.Conn](nil), rapid.Custom(func(t *rapid.T) *collector.Conn {
					return &collector.Conn{Transport: record.Transport(rapid.Uint8().Draw(t, "transport")), Channel: rapid.Uint16().Draw(t, "channel"), QP: rapid.Uint64().Draw(t, "qp"),
						PeerQP: rapid.Uint32().Draw(t, "peer qp"), Address: string(rapid.SliceOf(rapid.Byte()).Draw(t, "address")), Name: string(rapid.SliceOf(rapid.Byte()).Draw(t, "name"))}
				})).Draw(t, "conn"),
			}
		}), 0, collector.MaxLinks).Draw(t, "links")
		request, n := encodeRequest(o, windows, links...)
		spans := decode(t, request).ResourceSpans[0].ScopeSpans[0].Spans
		if len(spans) != n || n != countSpans(o) || n > maxSpans {
			t.Fatalf("%d spans, said %d, counted %d", len(spans), n, countSpans(o))
		}
		for _, s := range spans {
			if len(s.TraceId) != 16 || len(s.SpanId) != 8 || bytes.Equal(s.SpanId, make([]byte, 8)) {
				t.Fatalf("malformed ids: %x %x", s.TraceId, s.SpanId)
			}
			if s.EndTimeUnixNano < s.StartTimeUnixNano {
				t.Fatalf("%s ends before it starts: %d–%d", s.Name, s.StartTimeUnixNano, s.EndTimeUnixNano)
			}
		}
	})
}

// What each peer sent is a span below its rank's, within it, from when the rank came to it.
func TestPeers(t *testing.T) {
	o, _ := example()
	o.nwindows, o.nlinks, o.npeers = 0, 0, 3
	var e encoder
	legs := []collector.Leg{
		{Peer: 2, Reduce: true, First: 400_000, Last: 900_000, Wait: 399_000, Stall: 120_000},
		{Peer: 2, First: 1_000_000, Last: 2_001_000, Wait: 100_000},
		{Peer: 5, First: -10, Last: 9_000_000, Wait: 7}, // stamps that cannot be
	}
	spans, n := e.operation(nil, o, nil, nil, legs)
	got := decode(t, o.track.resource.appendRequest(nil, spans)).ResourceSpans[0].ScopeSpans[0].Spans
	if n != 6 || n != countSpans(o) || len(got) != n {
		t.Fatalf("%d spans, said %d, counted %d", len(got), n, countSpans(o))
	}
	const zero = 1_700_000_000_000_000_000
	ids := map[string]bool{}
	for i, want := range []struct {
		name       string
		start, end uint64
		attrs      map[string]any
	}{
		{"reduce", zero + 1000, zero + 900_000, map[string]any{names.AttrPeer: int64(2), names.AttrPeerWait: 399e-6, names.AttrPeerStall: 120e-6}},
		{"receive", zero + 900_000, zero + 2_001_000, map[string]any{names.AttrPeer: int64(2), names.AttrPeerWait: 100e-6}},
		{"receive", zero + 1000, zero + 2_001_000, map[string]any{names.AttrPeer: int64(5), names.AttrPeerWait: 7e-9}},
	} {
		s := got[3+i]
		if s.Name != want.name || s.StartTimeUnixNano != want.start || s.EndTimeUnixNano != want.end || !bytes.Equal(s.ParentSpanId, got[0].SpanId) {
			t.Errorf("%s %d–%d below %x, want %+v", s.Name, s.StartTimeUnixNano, s.EndTimeUnixNano, s.ParentSpanId, want)
		}
		if diff := cmp.Diff(want.attrs, attrs(s.Attributes)); diff != "" {
			t.Errorf("attributes -want +got:\n%s", diff)
		}
	}
	for _, s := range got {
		ids[string(s.SpanId)] = true
	}
	if len(ids) != n {
		t.Errorf("%d ids of %d spans", len(ids), n)
	}
}

func FuzzNames(f *testing.F) {
	f.Add("llama", "dp", uint64(1), int64(1000), int64(2000))
	f.Add("a\xffb", "\xc3", uint64(math.MaxUint64), int64(-1), int64(math.MaxInt64))
	f.Add(strings.Repeat("é", 200), strings.Repeat("\x80", 300), uint64(0), int64(math.MinInt64), int64(1))
	f.Fuzz(func(t *testing.T, job, comm string, seq uint64, started, ended int64) {
		c := &collector.Collective{Job: job, Comm: comm, CommID: seq, Rank: -1}
		o := &operation{track: newTrack(c, newJobResource(nil, job)), kind: record.Broadcast, seq: seq, started: started, ended: ended, wait: ended, root: int32(seq)}
		request, _ := encodeRequest(o, nil)
		r := decode(t, request).ResourceSpans[0]
		span := r.ScopeSpans[0].Spans[0]
		if name := strings.TrimPrefix(span.Name, "Broadcast "); !utf8.ValidString(name) || len(name) > maxName {
			t.Errorf("communicator %q became %q", comm, name)
		}
		if utf8.ValidString(comm) && len(comm) <= maxName && attrs(span.Attributes)[names.AttrCommunicator] != comm {
			t.Errorf("communicator %q became %v", comm, attrs(span.Attributes)[names.AttrCommunicator])
		}
		if utf8.ValidString(job) && len(job) <= maxName && attrs(r.Resource.Attributes)[names.AttrJob] != job {
			t.Errorf("job %q became %v", job, attrs(r.Resource.Attributes)[names.AttrJob])
		}
	})
}

func attrs(kvs []*commonpb.KeyValue) map[string]any {
	m := map[string]any{}
	for _, kv := range kvs {
		switch v := kv.Value.Value.(type) {
		case *commonpb.AnyValue_StringValue:
			m[kv.Key] = v.StringValue
		case *commonpb.AnyValue_IntValue:
			m[kv.Key] = v.IntValue
		case *commonpb.AnyValue_DoubleValue:
			m[kv.Key] = v.DoubleValue
		case *commonpb.AnyValue_BoolValue:
			m[kv.Key] = v.BoolValue
		}
	}
	return m
}

// BenchmarkSpan prints the cost of one span, ours and with reused protobuf
// structs, and their ratio. The budget is 500 ns and no allocation.
func BenchmarkSpan(b *testing.B) {
	o, _ := example()
	o.result, o.nwindows = record.ResultOK, 0
	o.track = newTrack(&collector.Collective{Job: "llama", Comm: "dp", CommID: 0xabc, Rank: 1, Size: 8}, o.track.resource)
	var ours float64
	b.Run("fixed_layout", func(b *testing.B) {
		var e encoder
		var buf []byte
		spans := 0
		b.ReportAllocs()
		for b.Loop() {
			var n int
			o.seq++
			buf, n = e.operation(buf[:0], o, nil, nil, nil)
			spans += n
		}
		ours = float64(b.Elapsed().Nanoseconds()) / float64(spans)
		b.ReportMetric(ours, "ns/span")
	})
	b.Run("protobuf_structs", func(b *testing.B) {
		var e encoder
		spansBytes, n := e.operation(nil, o, nil, nil, nil)
		r := decode(b, o.track.resource.appendRequest(nil, spansBytes))
		spans := r.ResourceSpans[0].ScopeSpans[0].Spans
		var buf []byte
		b.ReportAllocs()
		for b.Loop() {
			var err error
			for _, s := range spans { // the fields that change are set, the others reused
				s.StartTimeUnixNano++
				s.EndTimeUnixNano++
				if buf, err = (proto.MarshalOptions{}).MarshalAppend(buf[:0], s); err != nil {
					b.Fatal(err)
				}
			}
		}
		theirs := float64(b.Elapsed().Nanoseconds()) / float64(b.N*n)
		b.ReportMetric(theirs, "ns/span")
		b.ReportMetric(theirs/ours, "times-ours")
	})
}
