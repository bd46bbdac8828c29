package otlp

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"go.opentelemetry.io/otel"
	"go.opentelemetry.io/otel/exporters/otlp/otlptrace"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/trace"
	"go.opentelemetry.io/otel/trace/noop"
	coltracepb "go.opentelemetry.io/proto/otlp/collector/trace/v1"
	tracepb "go.opentelemetry.io/proto/otlp/trace/v1"
	"google.golang.org/protobuf/proto"

	"github.com/lockstep-ccl/lockstep/collector"
	"github.com/lockstep-ccl/lockstep/exporters/names"
)

// Control is a tracer for the control plane's own work: diagnosis passes,
// incidents, actions. It is the SDK's, with the endpoint, headers, TLS
// and retries of its Config; what is rare is always sampled, and what is lost is
// counted. Its methods are safe for concurrent use.
type Control struct {
	trace.Tracer
	provider *sdktrace.TracerProvider // nil when nothing is exported
	queue    *queue
	end      context.CancelFunc
}

// NewControl returns the tracer of the instrumentation scope name. Without an endpoint it does
// nothing.
func NewControl(c Config, name string) (*Control, error) {
	if !c.Enabled() {
		return &Control{Tracer: noop.NewTracerProvider().Tracer(name), queue: &queue{}}, nil
	}
	to, err := newSender(c)
	if err != nil {
		return nil, err
	}
	running, end := context.WithCancel(context.Background())
	exporter, err := otlptrace.New(running, client{to, running})
	if err != nil {
		end()
		return nil, err
	}
	q := newQueue(exporter, running)
	provider := sdktrace.NewTracerProvider(
		sdktrace.WithSpanProcessor(q),
		sdktrace.WithResource(c.Resource),
		sdktrace.WithIDGenerator(ids{}),
		sdktrace.WithSampler(sdktrace.AlwaysSample()))
	return &Control{Tracer: provider.Tracer(name, trace.WithInstrumentationVersion(c.version())), provider: provider, queue: q, end: end}, nil
}

// Shutdown sends what is left and returns when ctx ends at the latest.
func (c *Control) Shutdown(ctx context.Context) error {
	if c.provider == nil {
		return nil
	}
	defer c.end() // what is still being retried
	return c.provider.Shutdown(ctx)
}

// Describe implements prometheus.Collector.
func (c *Control) Describe(ch chan<- *prometheus.Desc) {
	ch <- exportedDesc
	ch <- droppedDesc
}

// Collect implements prometheus.Collector.
func (c *Control) Collect(ch chan<- prometheus.Metric) {
	q := c.queue
	ch <- prometheus.MustNewConstMetric(exportedDesc, prometheus.CounterValue, float64(q.exported.Load()))
	for reason, n := range map[string]*atomic.Uint64{names.DropQueueFull: &q.full, names.DropExportFailed: &q.failed, names.DropRejected: &q.rejected, names.DropShutdown: &q.late} {
		ch <- prometheus.MustNewConstMetric(droppedDesc, prometheus.CounterValue, float64(n.Load()), reason)
	}
}

const (
	controlQueue = 2048 // spans that wait
	controlBatch = 256
)

// queue is the SDK's batch processor, but that it counts what it loses.
type queue struct {
	exporter sdktrace.SpanExporter
	running  context.Context
	spans    chan sdktrace.ReadOnlySpan
	flush    chan chan struct{}
	stop     chan struct{}
	done     chan struct{}
	once     sync.Once

	exported, full, failed, rejected, late atomic.Uint64
}

func newQueue(e sdktrace.SpanExporter, running context.Context) *queue {
	q := &queue{
		exporter: e, running: running, spans: make(chan sdktrace.ReadOnlySpan, controlQueue),
		flush: make(chan chan struct{}), stop: make(chan struct{}), done: make(chan struct{}),
	}
	go q.run()
	return q
}

func (q *queue) OnStart(context.Context, sdktrace.ReadWriteSpan) {}

func (q *queue) OnEnd(s sdktrace.ReadOnlySpan) {
	select {
	case <-q.stop:
		q.late.Add(1)
		return
	default:
	}
	select {
	case q.spans <- s:
	default:
		q.full.Add(1)
	}
}

func (q *queue) run() {
	defer close(q.done)
	tick := time.NewTicker(batchDelay * 5)
	defer tick.Stop()
	for {
		select {
		case <-tick.C:
			q.drain()
		case flushed := <-q.flush:
			q.drain()
			close(flushed)
		case <-q.stop:
			q.drain()
			return
		}
	}
}

// drain sends what waits.
func (q *queue) drain() {
	for {
		var batch []sdktrace.ReadOnlySpan
		for len(batch) < controlBatch {
			select {
			case s := <-q.spans:
				batch = append(batch, s)
				continue
			default:
			}
			break
		}
		if len(batch) == 0 {
			return
		}
		var partly *partial
		switch err := q.exporter.ExportSpans(q.running, batch); {
		case err == nil:
			q.exported.Add(uint64(len(batch)))
		case errors.As(err, &partly):
			rejected := min(uint64(max(partly.rejected, 0)), uint64(len(batch)))
			q.exported.Add(uint64(len(batch)) - rejected)
			q.rejected.Add(rejected)
			otel.Handle(err)
		case q.running.Err() != nil:
			q.late.Add(uint64(len(batch)))
		default:
			q.failed.Add(uint64(len(batch)))
			otel.Handle(err)
		}
	}
}

func (q *queue) ForceFlush(ctx context.Context) error {
	flushed := make(chan struct{})
	select {
	case q.flush <- flushed:
	case <-q.done:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
	select {
	case <-flushed:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

func (q *queue) Shutdown(ctx context.Context) error {
	q.once.Do(func() { close(q.stop) })
	select {
	case <-q.done:
		return q.exporter.Shutdown(ctx)
	case <-ctx.Done():
		return fmt.Errorf("otlp: spans left behind at shutdown: %w", context.Cause(ctx))
	}
}

// CollectiveLink links a control-plane span to the trace of a collective, such
// as the one that shows an incident.
func CollectiveLink(traceID [16]byte) trace.Link {
	return trace.Link{SpanContext: trace.NewSpanContext(trace.SpanContextConfig{
		TraceID:    traceID,
		SpanID:     collector.SpanID(traceID, rootRank),
		TraceFlags: trace.FlagsSampled,
		Remote:     true,
	})}
}

// client lets the SDK's exporter send as the tracer does.
type client struct {
	to      *sender
	running context.Context // ends with the tracer
}

func (c client) Start(context.Context) error { return nil }

func (c client) Stop(context.Context) error { return c.to.close() }

func (c client) UploadTraces(ctx context.Context, spans []*tracepb.ResourceSpans) error {
	request, err := proto.Marshal(&coltracepb.ExportTraceServiceRequest{ResourceSpans: spans})
	if err != nil {
		return fmt.Errorf("otlp: %w", err)
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	defer context.AfterFunc(c.running, cancel)()
	rejected, message, err := deliver(ctx, c.to, request)
	if err != nil {
		return fmt.Errorf("otlp: %s: %w", c.to.endpoint, err)
	}
	if rejected > 0 || message != "" {
		return &partial{c.to.endpoint, rejected, message}
	}
	return nil
}

// partial is the error of a request that a backend has accepted, but for some spans, or with a warning.
type partial struct {
	endpoint string
	rejected int64
	message  string
}

func (p *partial) Error() string {
	if p.rejected <= 0 {
		return fmt.Sprintf("otlp: %s took the spans, and says: %s", p.endpoint, p.message)
	}
	return fmt.Sprintf("otlp: %s rejected %d spans: %s", p.endpoint, p.rejected, p.message)
}
