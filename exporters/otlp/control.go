package otlp

import (
	"context"
	"fmt"

	"go.opentelemetry.io/otel/exporters/otlp/otlptrace"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/trace"
	"go.opentelemetry.io/otel/trace/noop"
	coltracepb "go.opentelemetry.io/proto/otlp/collector/trace/v1"
	tracepb "go.opentelemetry.io/proto/otlp/trace/v1"
	"google.golang.org/protobuf/proto"

	"github.com/lockstep-ccl/lockstep/collector"
)

// ControlTracer returns a tracer for the control plane's own work: diagnosis
// passes, incidents, actions. It is the SDK's, with the endpoint, headers, TLS
// and retries of c; what is rare is always sampled. Call shutdown to flush it;
// it returns when ctx ends at the latest. Without an endpoint the tracer does
// nothing.
func ControlTracer(c Config, name string) (tracer trace.Tracer, shutdown func(ctx context.Context) error, err error) {
	if !c.Enabled() {
		return noop.NewTracerProvider().Tracer(name), func(context.Context) error { return nil }, nil
	}
	to, err := newSender(c)
	if err != nil {
		return nil, nil, err
	}
	running, end := context.WithCancel(context.Background())
	exporter, err := otlptrace.New(running, client{to, running})
	if err != nil {
		end()
		return nil, nil, err
	}
	provider := sdktrace.NewTracerProvider(
		sdktrace.WithBatcher(exporter, sdktrace.WithBatchTimeout(batchDelay*5)),
		sdktrace.WithResource(c.Resource),
		sdktrace.WithIDGenerator(ids{}),
		sdktrace.WithSampler(sdktrace.AlwaysSample()))
	shutdown = func(ctx context.Context) error {
		defer end() // what is still being retried: the SDK returns from it and leaves it running
		return provider.Shutdown(ctx)
	}
	return provider.Tracer(name), shutdown, nil
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
		return fmt.Errorf("otlp: %s rejected %d spans: %s", c.to.endpoint, rejected, message)
	}
	return nil
}
