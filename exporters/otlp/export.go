package otlp

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync/atomic"
	"time"

	"github.com/cenkalti/backoff/v5"

	"github.com/lockstep-ccl/lockstep/collector"
	"github.com/lockstep-ccl/lockstep/exporters/names"
)

const (
	batchOperations = 512     // some 1.5 thousand spans, as a rule in one request
	maxRequest      = 2 << 20 // bytes of spans with which a request is full: gRPC's servers take 4 MiB
	batchDelay      = 200 * time.Millisecond
	batchesWaiting  = 8
	retryFor        = time.Minute
	maxPause        = 10 * time.Minute // that a backend may ask for
)

// dropReasons index exporter.dropped.
var dropReasons = []string{
	names.DropQueueFull, names.DropEvicted, names.DropOverLimit,
	names.DropExportFailed, names.DropRejected, names.DropShutdown,
}

// exporter moves operations from the tracer's queue to the backend: one
// goroutine encodes, soon after they come, since memory is overwritten; another
// sends, at the backend's pace, and retries. Batches between them are few.
type exporter struct {
	to   *sender
	log  *slog.Logger
	take func(*pending) (more bool)

	awake   chan struct{}
	batches chan batch
	stop    chan struct{} // closed: drain the queue and end
	done    chan struct{}
	ctx     context.Context // of all sends
	cancel  context.CancelFunc

	exported atomic.Uint64
	events   atomic.Uint64 // that spans had no room for
	dropped  [8]atomic.Uint64
	logged   time.Time
}

// pending is what the encoder takes from the tracer at a time.
type pending struct {
	operations []taken
	windows    []collector.Window
	links      []collector.LinkEvent
	peers      []collector.Leg
}

type taken struct {
	operation
	fromWindow, toWindow int
	fromLink, toLink     int
	fromPeer, toPeer     int
	history              bool // only the windows go out
	leftOut              int  // then: windows beside these
}

type batch struct {
	request []byte
	spans   int
}

func newExporter(to *sender, log *slog.Logger, take func(*pending) bool) *exporter {
	e := &exporter{
		to: to, log: log, take: take,
		awake: make(chan struct{}, 1), batches: make(chan batch, batchesWaiting),
		stop: make(chan struct{}), done: make(chan struct{}),
	}
	e.ctx, e.cancel = context.WithCancel(context.Background())
	go e.encode()
	go e.send()
	return e
}

func (e *exporter) drop(reason string, spans int) {
	for i, r := range dropReasons {
		if r == reason {
			e.dropped[i].Add(uint64(spans))
		}
	}
}

// wake tells the encoder that there is something to do.
func (e *exporter) wake() {
	select {
	case e.awake <- struct{}{}:
	default:
	}
}

func (e *exporter) encode() {
	defer close(e.batches)
	pending := &pending{operations: make([]taken, 0, batchOperations)}
	var enc batchEncoder
	for stopping := false; !stopping; {
		select {
		case <-e.awake:
			select { // company makes a batch
			case <-time.After(batchDelay):
			case <-e.awake: // the queue is half full
			case <-e.stop:
			}
		case <-e.stop:
			stopping = true
		}
		for more := true; more; {
			more = e.take(pending)
			for rest := pending.operations; len(rest) > 0; {
				var b batch
				b, rest = enc.batch(pending, rest)
				e.batches <- b // the sender empties it until it is closed
			}
			e.events.Add(uint64(enc.leftOut))
			enc.leftOut = 0
		}
	}
}

// batchEncoder turns operations into requests, grouped by job.
type batchEncoder struct {
	encoder
	groups []group
}

type group struct {
	resource *jobResource
	spans    []byte
}

// batch encodes operations of p until a request is full, and returns those that are left.
func (e *batchEncoder) batch(p *pending, operations []taken) (b batch, rest []taken) {
	used, size := 0, 0
	for len(operations) > 0 && size < maxRequest {
		o := &operations[0]
		operations = operations[1:]
		g := 0
		for g < used && e.groups[g].resource != o.track.resource {
			g++
		}
		if g == used {
			if used == len(e.groups) {
				e.groups = append(e.groups, group{})
			}
			e.groups[g].resource, e.groups[g].spans = o.track.resource, e.groups[g].spans[:0]
			used++
		}
		n, before, spans := 1, len(e.groups[g].spans), e.groups[g].spans
		if o.history {
			spans = e.history(spans, &o.operation, p.windows[o.fromWindow:o.toWindow], p.links[o.fromLink:o.toLink], o.leftOut)
		} else {
			spans, n = e.operation(spans, &o.operation, p.windows[o.fromWindow:o.toWindow], p.links[o.fromLink:o.toLink], p.peers[o.fromPeer:o.toPeer])
		}
		e.groups[g].spans = spans
		b.spans += n
		size += len(spans) - before
	}
	for i := range e.groups[:used] {
		b.request = e.groups[i].resource.appendRequest(b.request, e.groups[i].spans)
		e.groups[i].resource = nil
	}
	return b, operations
}

func (e *exporter) send() {
	defer close(e.done)
	for b := range e.batches {
		rejected, message, err := deliver(e.ctx, e.to, b.request)
		switch {
		case err == nil:
			rejected = min(max(rejected, 0), int64(b.spans))
			e.exported.Add(uint64(b.spans) - uint64(rejected))
			e.drop(names.DropRejected, int(rejected))
			switch {
			case rejected > 0:
				e.warn("the backend rejected spans", "rejected", rejected, "spans", b.spans, "message", message)
			case message != "": // a warning: it has taken all of them
				e.warn("the backend took the spans, and says", "message", message)
			}
		case e.ctx.Err() != nil:
			e.drop(names.DropShutdown, b.spans)
		default:
			e.drop(names.DropExportFailed, b.spans)
			e.warn("traces not exported", "endpoint", e.to.endpoint, "spans", b.spans, "err", err)
		}
	}
}

// deliver sends a request until it is accepted, refused for good, or a minute has
// passed. A backend that wants to be left alone for longer than that loses the
// request, and is not sent the next one before.
func deliver(ctx context.Context, to *sender, request []byte) (rejected int64, message string, err error) {
	type answer struct {
		rejected int64
		message  string
	}
	if pause := time.Until(to.notBefore); pause > 0 {
		select {
		case <-time.After(pause):
		case <-ctx.Done():
			return 0, "", context.Cause(ctx)
		}
	}
	wait := backoff.NewExponentialBackOff()
	wait.InitialInterval, wait.MaxInterval = to.firstRetry, 30*time.Second
	a, err := backoff.Retry(ctx, func() (answer, error) {
		rejected, message, err := to.send(ctx, request)
		return answer{rejected, message}, err
	}, backoff.WithBackOff(wait), backoff.WithMaxElapsedTime(retryFor))
	var after *backoff.RetryAfterError
	if errors.As(err, &after) {
		to.notBefore = time.Now().Add(min(after.Duration, maxPause))
	}
	return a.rejected, a.message, err
}

// warn logs at most once a minute: a backend that is down is one story.
func (e *exporter) warn(message string, args ...any) {
	if now := time.Now(); now.Sub(e.logged) >= time.Minute {
		e.logged = now
		e.log.Warn("otlp: "+message, args...)
	}
}

// shutdown is called once.
func (e *exporter) shutdown(ctx context.Context) error {
	close(e.stop)
	var err error
	select {
	case <-e.done:
	case <-ctx.Done():
		err = fmt.Errorf("otlp: spans left behind at shutdown: %w", context.Cause(ctx))
		e.cancel()
		<-e.done
	}
	e.cancel()
	return errors.Join(err, e.to.close())
}
