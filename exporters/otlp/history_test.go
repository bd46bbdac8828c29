package otlp_test

import (
	"context"
	"testing"
	"time"

	coltracepb "go.opentelemetry.io/proto/otlp/collector/trace/v1"

	"github.com/lockstep-ccl/lockstep/collector"
	"github.com/lockstep-ccl/lockstep/exporters/names"
	"github.com/lockstep-ccl/lockstep/exporters/otlp"
	"github.com/lockstep-ccl/lockstep/record"
)

// full is as much as the history around a collective may hold.
func full(int32, int64, int64) (h collector.Around) {
	conn := &collector.Conn{
		Transport: record.TransportRDMA, QP: 4711, PeerQP: 815, NIC: "mlx5_0", Port: 1, Rail: 1,
		Address: "fe80::9a03:9bff:fe8f:8f1a", Name: "mlx5_0/1 fe80::9a03:9bff:fe8f:8f1a to fe80::9a03:9bff:fe8f:8f1b",
	}
	for i := range int64(collector.MaxHistory) {
		h.Windows = append(h.Windows, collector.Window{Peer: 1, Conn: conn, First: 1000 + i, Last: 2000 + i, Bytes: 1 << 20, WRs: 16, Backlog: 4})
		h.Links = append(h.Links, collector.LinkEvent{Peer: 1, Conn: conn, State: record.LinkDown, At: 1000 + i})
	}
	return h
}

// ask has the spans of a collective of so many ranks exported, and then what was around it.
func ask(tracer *otlp.Tracer, ranks int) (spans, histories int) {
	for rank := range int32(ranks) {
		c := collective(7, false)
		c.Rank = rank
		tracer.Collective(c)
	}
	spans = tracer.Retroactive("llama", 7, record.AllReduce, 7, func(collector.Traced) {})
	return spans, tracer.History("llama", 7, record.AllReduce, 7, full)
}

// However much is around the collectives of a batch, a request is one that a backend takes: gRPC's
// servers refuse more than 4 MiB.
func TestRequestsAreOfASizeThatServersTake(t *testing.T) {
	r := newReceiver()
	tracer := newTracer(t, config(r.serveGRPC(t)), otlp.Options{})
	spans, histories := ask(tracer, 250)
	shutdown(t, tracer)
	if exported, dropped := counts(t, tracer); spans != 250*spansOf || histories != 250 || exported != float64(spans+histories) || sum(dropped) != 0 {
		t.Errorf("%d spans and %d histories, exported %v, dropped %v", spans, histories, exported, dropped)
	}
}

// While a backend does not answer, what was around collectives does not pile up.
func TestHistoriesThatWaitAreBounded(t *testing.T) {
	r := newReceiver()
	stuck := make(chan struct{})
	r.answer = func(int) (*coltracepb.ExportTraceServiceResponse, error) {
		<-stuck
		return &coltracepb.ExportTraceServiceResponse{}, nil
	}
	const ranks = 3000
	tracer := newTracer(t, config(r.serveGRPC(t)), otlp.Options{Queue: 4 * ranks})
	spans, histories := ask(tracer, ranks)
	_, dropped := counts(t, tracer)
	if spans != ranks*spansOf || histories == 0 || dropped[names.DropQueueFull] != float64(ranks-histories) || dropped[names.DropQueueFull] == 0 {
		t.Errorf("%d spans and %d histories, dropped %v", spans, histories, dropped)
	}
	close(stuck)
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	if err := tracer.Shutdown(ctx); err != nil {
		t.Error(err)
	}
	if exported, dropped := counts(t, tracer); exported+sum(dropped) != float64(spans+ranks) || exported != float64(spans+histories) {
		t.Errorf("of %d spans and %d histories exported %v, dropped %v", spans, ranks, exported, dropped)
	}
}
