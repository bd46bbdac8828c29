package master

import (
	"errors"
	"io"
	"sync/atomic"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/lockstep-ccl/lockstep/collector"
	"github.com/lockstep-ccl/lockstep/collector/wire"
)

const (
	helloWithin = 5 * time.Second
	ackEvery    = 250 * time.Millisecond
	outbox      = 256 // roots of traces come in bursts
)

// stream is one agent's open stream. Its receiver merges; the goroutine that
// gRPC gave it sends.
type stream struct {
	out     chan *wire.MasterMessage
	done    chan error // ends the stream with this error; capacity 1
	dropped atomic.Uint64
	fences  map[uint64]bool // orders that it was sent; guarded by Master.mu
}

// send queues a message. A stream that does not drain loses it; the loss is counted.
func (s *stream) send(m *wire.MasterMessage) bool {
	select {
	case s.out <- m:
		return true
	default:
		s.dropped.Add(1)
		return false
	}
}

// end makes the stream return err; the first one wins.
func (s *stream) end(err error) {
	select {
	case s.done <- err:
	default:
	}
}

// service keeps the gRPC method out of Master's own surface.
type service struct {
	wire.UnimplementedCollectorServer
	*Master
}

// Progress serves one agent.
func (m service) Progress(g wire.Collector_ProgressServer) error {
	s := &stream{out: make(chan *wire.MasterMessage, outbox), done: make(chan error, 1)}
	m.receivers.Add(1)
	go func() {
		defer m.receivers.Done()
		s.end(m.receive(g, s))
	}()
	for {
		select {
		case msg := <-s.out:
			if a := msg.GetAck(); a != nil {
				a.MasterNs = uint64(m.now())
			}
			if err := g.Send(msg); err != nil {
				return err
			}
		case err := <-s.done:
			return err
		case <-g.Context().Done():
			return g.Context().Err()
		case <-m.stopping:
			return status.Error(codes.Unavailable, "master is stopping")
		}
	}
}

// receive reads one agent's stream to its end.
func (m *Master) receive(g wire.Collector_ProgressServer, s *stream) error {
	late := time.AfterFunc(helloWithin, func() {
		s.end(status.Error(codes.DeadlineExceeded, "no hello"))
	})
	first, err := g.Recv()
	late.Stop()
	if err != nil {
		return m.refuseMessage(err)
	}
	if err := m.mayReport(g.Context(), first.GetHello()); err != nil {
		return err
	}
	n, err := m.hello(first.GetHello(), s)
	if err != nil {
		return err
	}
	defer m.disconnect(n, s)
	if ends := wire.PeerExpires(g.Context()); !ends.IsZero() {
		over := time.AfterFunc(time.Until(ends), func() {
			s.end(status.Error(codes.Unauthenticated, "the agent's certificate has ended: connect again with another one"))
		})
		defer over.Stop()
	}
	s.send(&wire.MasterMessage{Body: &wire.MasterMessage_Ack{Ack: &wire.Ack{Roots: true}}})

	var sequence uint64
	var acked int64
	for {
		msg, err := g.Recv()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return m.refuseMessage(err)
		}
		switch {
		case msg.GetReport() != nil:
			r := msg.GetReport()
			now, ack, ok := m.report(n, s, r, r.Sequence != sequence+1)
			if !ok {
				return status.Error(codes.Aborted, "superseded")
			}
			sequence = r.Sequence
			if now-acked >= ackEvery.Nanoseconds() {
				acked = now
				ack.Sequence = sequence
				s.send(&wire.MasterMessage{Body: &wire.MasterMessage_Ack{Ack: ack}})
			}
		case msg.GetTraceResult() != nil:
			m.traced(n, s, msg.GetTraceResult())
		case msg.GetFenceResult() != nil:
			m.fenced(n, s, msg.GetFenceResult())
		default:
			return status.Error(codes.InvalidArgument, "neither a report nor a result")
		}
	}
}

// refuseMessage counts messages that could not be decoded, or are too large to be.
func (m *Master) refuseMessage(err error) error {
	switch status.Code(err) {
	case codes.ResourceExhausted, codes.Internal, codes.InvalidArgument, codes.Unimplemented:
		m.messages.Add(1)
	}
	return err
}

// duplicateAfter is how long an agent must have been silent before another instance
// takes its place, ns. Agents report ten times a second.
const duplicateAfter = int64(2 * time.Second)

// hello admits an agent. An agent that reconnects takes the place of its former stream. Another
// instance for the same node takes the place of one that is silent.
func (m *Master) hello(h *wire.Hello, s *stream) (int32, error) {
	switch {
	case h == nil:
		return 0, status.Error(codes.InvalidArgument, "the first message is not hello")
	case h.ProtocolVersion > wire.ProtocolVersion:
		return 0, status.Errorf(codes.FailedPrecondition, "the agent speaks protocol version %d, this master up to %d: upgrade the master of job %.*q (masters before agents)", h.ProtocolVersion, wire.ProtocolVersion, wire.MaxName, m.o.Job)
	case h.ProtocolVersion < wire.OldestProtocolVersion:
		return 0, status.Errorf(codes.FailedPrecondition, "the agent speaks protocol version %d, this master %d to %d: upgrade the agent of node %.*q", h.ProtocolVersion, wire.OldestProtocolVersion, wire.ProtocolVersion, wire.MaxName, h.Node)
	case h.Job != m.o.Job:
		return 0, status.Errorf(codes.FailedPrecondition, "this is the master of another job than %.*q", wire.MaxName, h.Job)
	case h.Node == "" || len(h.Node) > wire.MaxName:
		return 0, status.Errorf(codes.InvalidArgument, "node name of %d bytes, want 1 to %d", len(h.Node), wire.MaxName)
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	n := m.state.node(h.Node)
	if n < 0 {
		return 0, status.Errorf(codes.ResourceExhausted, "%d agents are connected, the limit", m.state.limits.Nodes)
	}
	nd := &m.state.nodes[n]
	switch {
	case nd.stream == nil:
	case (nd.instance != h.Instance || nd.bootID != h.BootId) && m.now()-m.state.ev.Nodes[n].LastSeen <= duplicateAfter:
		m.duplicates++
		if now := m.now(); now-m.duplicateAt > int64(time.Minute) {
			m.duplicateAt = now
			m.log.Error("two agents call themselves the same node: the one that was there first stays", "node", h.Node, "another_machine", nd.bootID != h.BootId)
		}
		return 0, status.Errorf(codes.AlreadyExists, "another agent speaks for node %q and is heard: give each agent a name of its own (--node), and a certificate to nobody else", h.Node)
	default:
		nd.stream.end(status.Error(codes.Aborted, "another stream of this node has taken over"))
	}
	if nd.bootID != h.BootId {
		nd.clock = clockMap{}
		m.state.clock.replaced(n)
		m.state.ev.Nodes[n].MapError = unknownError
	}
	if nd.instance != 0 && nd.instance != h.Instance {
		m.log.Info("agent has restarted", "node", h.Node)
	}
	m.state.setClaim(n, claim{}) // it says everything again
	nd.stream, nd.instance, nd.bootID, nd.stale = s, h.Instance, bounded(h.BootId), false
	m.state.ev.Nodes[n].LastSeen = m.now() // and lost, if it was, until it reports
	m.log.Info("agent connected", "node", h.Node)
	return n, nil
}

// report merges one report, unless another stream speaks for the node now. It asks for a full
// report when it knows that this one is not the whole story; gap says that reports before it
// are missing.
func (m *Master) report(n int32, s *stream, r *wire.Report, gap bool) (now int64, ack *wire.Ack, ok bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.state.nodes[n].stream != s {
		return 0, nil, false
	}
	now = m.now()
	m.state.ahead = max(0, time.Now().UnixNano()-now)
	epochs := m.state.epochs
	m.state.merge(n, r, now)
	nd := &m.state.nodes[n]
	if nd.fast > 0 {
		m.log.Warn("a node's clock is ahead of the master's: its new processes are not heard of until one of the two is set right", "node", m.state.ev.Nodes[n].Name, "ahead", time.Duration(nd.fast).Round(time.Second))
		nd.fast = -1
	}
	nd.stale = nd.stale || gap
	nd.askAgain()
	if m.state.epochs != epochs {
		m.askAll()
	}
	return now, &wire.Ack{ArrivalsPerSecond: m.state.arrivalsPerSecond(), JobClock: m.state.jobClock(n, now), Roots: true}, true
}

// askAgain asks an agent for a full report when the master knows that it lacks something.
func (nd *node) askAgain() {
	if nd.stale && nd.stream != nil {
		nd.stale = !nd.stream.send(&wire.MasterMessage{Body: &wire.MasterMessage_Resync{Resync: &wire.Resync{}}})
	}
}

// askAll asks every agent, when the job has begun anew.
func (m *Master) askAll() {
	for i := range m.state.nodes {
		m.state.nodes[i].askAgain()
	}
}

func (m *Master) disconnect(n int32, s *stream) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.state.nodes[n].stream != s {
		return
	}
	m.state.nodes[n].stream = nil
	m.state.disconnected(n)
	m.log.Warn("agent disconnected", "node", m.state.ev.Nodes[n].Name, "messages_dropped", s.dropped.Load())
}

// agentStatus describes the agents that are part of the job: those that are
// connected, that own ranks, or that were lost a short while ago. One whose ranks
// had all ended before it left has nothing more to say, and is not missed.
func (s *state) agentStatus(now int64) []collector.AgentStatus {
	owned, running := make([]int, len(s.nodes)), make([]int, len(s.nodes))
	for i := range s.ranks {
		if n := s.ranks[i].node; n >= 0 {
			owned[n]++
			if !ended(s.ev.Ranks[i].Proc) {
				running[n]++
			}
		}
	}
	var out []collector.AgentStatus
	for i := range s.nodes {
		n := &s.ev.Nodes[i]
		stranger := s.nodes[i].since == 0 && (s.nodes[i].stream == nil || n.Lost) // it never had ranks, and is not missed
		if n.Name == "" || stranger || s.nodes[i].stream == nil && running[i] == 0 && (owned[i] > 0 || now-n.LastSeen > rememberFor) {
			continue
		}
		a := collector.AgentStatus{
			Node: n.Name, Connected: s.nodes[i].stream != nil, Lost: n.Lost,
			LastSeen: time.Unix(0, n.LastSeen), Ranks: owned[i],
		}
		if n.MapError < unknownError {
			a.MapError = time.Duration(n.MapError)
		}
		out = append(out, a)
	}
	return out
}

// rememberFor is how long a lost agent without ranks is still shown, ns.
const rememberFor = int64(10 * time.Minute)
