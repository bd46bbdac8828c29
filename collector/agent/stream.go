package agent

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/keepalive"

	"github.com/lockstep-ccl/lockstep/collector"
	"github.com/lockstep-ccl/lockstep/collector/wire"
	"github.com/lockstep-ccl/lockstep/internal/accept"
	"github.com/lockstep-ccl/lockstep/record"
)

const (
	queued      = 4 // reports between the fold goroutine and the stream
	connectIn   = 3 * time.Second
	ackWithin   = 10 * time.Second
	firstRetry  = 100 * time.Millisecond
	lastRetry   = 2 * time.Second
	stableAfter = 5 * time.Second
	tellAgain   = time.Minute // that there is no stream, for the same reason
)

// stream carries one job's reports to its master, over as many connections as
// it takes. Its goroutine owns the connection; the agent's hands it reports
// through a short queue and learns from epoch when to start over.
type stream struct {
	job     string
	hello   *wire.Hello
	address func(job string) string
	tls     *wire.TLS
	creds   credentials.TransportCredentials // made of tls for the first session, and kept: what could be read once serves
	traces  chan<- traceRequest
	log     *slog.Logger

	orders  chan<- fenceOrder
	fenced  chan *wire.FenceResult
	began   int64        // CLOCK_MONOTONIC ns
	heard   atomic.Int64 // when the last report was sent that the master is known to have, CLOCK_MONOTONIC ns
	pending inFlight

	reports chan report
	results chan *wire.TraceResult
	cancel  context.CancelFunc
	done    chan struct{}

	epoch     atomic.Uint64 // counts the occasions on which everything must be sent again
	connected atomic.Bool
	sent      atomic.Uint64
	dropped   atomic.Uint64
	reconnect atomic.Uint64
	wanted    atomic.Uint32 // arrivals per second and member
	traceLost atomic.Uint64
	jobClock  atomic.Pointer[jobClock] // nil while the master has not told
	roots     atomic.Bool              // the master tells how far traces reach
}

// report is a report with the epoch that it belongs to.
type report struct {
	epoch uint64
	*wire.Report
}

// jobClock is what a master has told of the job's clock.
type jobClock struct {
	offset, err int64
	at          int64 // when, CLOCK_MONOTONIC ns
}

// traceRequest is a master's request, or its answer, on its way to the agent's goroutine.
type traceRequest struct {
	*wire.TraceRequest
	root *wire.TraceRoot
	from *stream
}

func (s *stream) start(ctx context.Context) {
	ctx, s.cancel = context.WithCancel(ctx)
	s.done = make(chan struct{})
	go s.run(ctx)
}

func (s *stream) stop() {
	s.cancel()
	<-s.done
}

// ready reports whether the queue takes another report now.
func (s *stream) ready() bool { return s.connected.Load() && len(s.reports) < cap(s.reports) }

// run connects again and again until ctx is done.
func (s *stream) run(ctx context.Context) {
	defer close(s.done)
	retry := firstRetry
	told, toldAt := "", time.Time{}
	for {
		began := time.Now()
		err := s.session(ctx)
		s.roots.Store(false)
		if s.connected.Swap(false) {
			told = ""
		}
		if n := s.traceLost.Swap(0); n > 0 {
			s.log.Warn("trace requests came faster than they could be answered", "dropped", n)
		}
		if ctx.Err() != nil {
			return
		}
		if time.Since(began) > stableAfter {
			retry = firstRetry
		}
		s.reconnect.Add(1)
		wait := retry/2 + rand.N(retry) // agents that lost one master together come back apart
		if why := err.Error(); why != told || time.Since(toldAt) >= tellAgain {
			told, toldAt = why, time.Now()
			s.log.Warn("no stream to the master: trying again and again", "err", err, "retry_in", wait)
		}
		select {
		case <-ctx.Done():
			return
		case <-time.After(wait):
		}
		retry = min(2*retry, lastRetry)
	}
}

// dial prepares a connection; gRPC opens it with the first call.
func (s *stream) dial(address string) (*grpc.ClientConn, error) {
	if s.creds == nil {
		var err error
		if s.creds, err = s.tls.MasterOf(s.job); err != nil {
			return nil, fmt.Errorf("master of job %s: %w", s.job, err)
		}
	}
	conn, err := grpc.NewClient(address,
		grpc.WithTransportCredentials(s.creds.Clone()),
		grpc.WithKeepaliveParams(keepalive.ClientParameters{Time: ackWithin, Timeout: ackWithin / 2}),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(64<<10)),
		grpc.WithDisableServiceConfig(),
		grpc.WithNoProxy(), // a master is in the cluster
		grpc.WithContextDialer(accept.DialContext),
	)
	if err != nil {
		return nil, fmt.Errorf("master of job %s at %q: %w", s.job, address, err)
	}
	return conn, nil
}

// session is one connection's life.
func (s *stream) session(ctx context.Context) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	address := s.address(s.job)
	conn, err := s.dial(address)
	if err != nil {
		return err
	}
	defer conn.Close()
	wrap := func(what string, err error) error {
		if cause := context.Cause(ctx); cause != nil && !errors.Is(cause, context.Canceled) {
			err = cause
		}
		return fmt.Errorf("master of job %s at %s: %s: %w", s.job, address, what, err)
	}

	late := time.AfterFunc(connectIn, func() { cancel(fmt.Errorf("no answer within %v", connectIn)) })
	defer late.Stop()
	client, err := wire.NewCollectorClient(conn).Progress(ctx)
	if err != nil {
		return wrap("connect", err)
	}
	s.pending.reset()
	if err := client.Send(&wire.AgentMessage{Body: &wire.AgentMessage_Hello{Hello: s.hello}}); err != nil {
		_, err = client.Recv() // the status behind the EOF
		return wrap("hello", err)
	}
	first, err := client.Recv()
	if err != nil {
		return wrap("hello", err)
	}
	if ends := wire.PeerExpires(client.Context()); !ends.IsZero() {
		over := time.AfterFunc(time.Until(ends), func() { cancel(errors.New("its certificate has ended")) })
		defer over.Stop()
	}
	var echo atomic.Pointer[wire.ClockEcho]
	s.ack(first.GetAck(), &echo)
	s.epoch.Add(1)
	s.connected.Store(true)
	s.log.Info("stream to the master is up", "master", address)
	// From here on, the timer waits for acks.
	late.Reset(ackWithin)

	received := make(chan error, 1)
	go func() { received <- s.receive(ctx, client, late, &echo) }()
	// The receiver ends with the session's context; wait for it, so that none outlives its stream.
	defer func() { cancel(nil); <-received }() //nolint:errcheck // the loop below has its own error

	sequence := uint64(0)
	for {
		msg := &wire.AgentMessage{}
		select {
		case err := <-received:
			received <- err
			return wrap("receive", err)
		case r := <-s.reports:
			if r.epoch != s.epoch.Load() {
				continue
			}
			sequence++
			r.Sequence, r.Echo = sequence, echo.Load()
			r.RealSentNs, r.MonoSentNs = time.Now().UnixNano(), record.Now()
			s.pending.sent(sequence, r.MonoSentNs)
			msg.Body = &wire.AgentMessage_Report{Report: r.Report}
			s.sent.Add(1)
		case f := <-s.fenced:
			msg.Body = &wire.AgentMessage_FenceResult{FenceResult: f}
		case t := <-s.results:
			msg.Body = &wire.AgentMessage_TraceResult{TraceResult: t}
		}
		if err := client.Send(msg); err != nil {
			err = <-received // the status behind the EOF
			received <- err
			return wrap("send", err)
		}
	}
}

// receive takes what the master says until the session ends. Each ack puts the timer off.
func (s *stream) receive(ctx context.Context, client wire.Collector_ProgressClient, late *time.Timer, echo *atomic.Pointer[wire.ClockEcho]) error {
	for {
		msg, err := client.Recv()
		if err != nil {
			return err
		}
		switch {
		case msg.GetAck() != nil:
			late.Reset(ackWithin)
			s.ack(msg.GetAck(), echo)
		case msg.GetFenceOrder() != nil:
			select {
			case s.orders <- fenceOrder{msg.GetFenceOrder(), s}:
			case <-ctx.Done():
			}
		case msg.GetResync() != nil:
			s.epoch.Add(1)
		case msg.GetTraceRequest() != nil, msg.GetTraceRoot() != nil:
			select {
			case s.traces <- traceRequest{msg.GetTraceRequest(), msg.GetTraceRoot(), s}:
			default:
				s.traceLost.Add(1)
			}
		}
	}
}

func (s *stream) ack(a *wire.Ack, echo *atomic.Pointer[wire.ClockEcho]) {
	if a == nil {
		return
	}
	// A lease counts from when the report was sent, not from when its answer came.
	if at := s.pending.acked(a.Sequence); at > s.heard.Load() {
		s.heard.Store(at)
	}
	echo.Store(&wire.ClockEcho{MasterNs: a.MasterNs, MonoReceivedNs: record.Now()})
	s.roots.Store(a.Roots)
	if c := a.JobClock; c != nil && c.ErrorNs >= 0 {
		s.jobClock.Store(&jobClock{c.OffsetNs, c.ErrorNs, record.Now()})
	}
	if a.ArrivalsPerSecond != 0 {
		s.wanted.Store(a.ArrivalsPerSecond)
	}
}

func (s *stream) status() collector.StreamStatus {
	return collector.StreamStatus{
		Job: s.job, Connected: s.connected.Load(),
		Reports: s.sent.Load(), Dropped: s.dropped.Load(), Reconnect: s.reconnect.Load(),
	}
}

// inFlight knows when the latest reports of a session were sent. Safe for concurrent use.
type inFlight struct {
	mu    sync.Mutex
	hello int64
	at    [256]int64 // by sequence
	last  uint64
}

func (f *inFlight) reset() {
	f.mu.Lock()
	f.hello, f.last = record.Now(), 0
	f.mu.Unlock()
}

func (f *inFlight) sent(sequence uint64, at int64) {
	f.mu.Lock()
	f.at[sequence%uint64(len(f.at))], f.last = at, sequence
	f.mu.Unlock()
}

// acked returns when a report was sent; sequence 0 is hello. A report that is too old to be
// known counts as not acknowledged.
func (f *inFlight) acked(sequence uint64) int64 {
	f.mu.Lock()
	defer f.mu.Unlock()
	switch {
	case sequence == 0:
		return f.hello
	case sequence > f.last || f.last-sequence >= uint64(len(f.at)):
		return 0
	}
	return f.at[sequence%uint64(len(f.at))]
}
