package master

import (
	"context"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/lockstep-ccl/lockstep/collector"
	"github.com/lockstep-ccl/lockstep/collector/wire"
	"github.com/lockstep-ccl/lockstep/diagnosis"
)

// mayReport refuses a stream whose certificate does not say what its hello does.
func (m *Master) mayReport(ctx context.Context, h *wire.Hello) error {
	return m.admit(ctx, func(id wire.Identity) error { return id.Agent(h.GetNode(), h.GetJob()) })
}

// admit refuses a caller whose certificate does not allow the call. Without TLS
// there is no certificate to look at: the listener let in whom it may.
func (m *Master) admit(ctx context.Context, allowed func(wire.Identity) error) error {
	if err := wire.PeerPresent(ctx); err != nil {
		return m.refuse(err)
	}
	return m.mayCall(ctx, allowed)
}

// mayCall is admit for who has said nothing yet.
func (m *Master) mayCall(ctx context.Context, allowed func(wire.Identity) error) error {
	id, authenticated, err := wire.PeerIdentity(ctx)
	if err == nil && authenticated {
		err = allowed(id)
	}
	return m.refuse(err)
}

func (m *Master) refuse(err error) error {
	if err != nil {
		m.denied.Add(1)
		if now := time.Now().Unix(); m.told.Swap(now) != now { // a line a second at most: whoever is refused could fill a disk
			m.log.Warn("call refused", "err", err)
		}
		return status.Error(codes.PermissionDenied, err.Error())
	}
	return nil
}

// incidentService keeps the gRPC method out of Master's own surface.
type incidentService struct {
	wire.UnimplementedIncidentsServer
	*Master
}

// Incident answers a remediator from the last pass's snapshot: a question costs
// the master no lock.
func (m incidentService) Incident(ctx context.Context, q *wire.IncidentRequest) (*wire.IncidentReply, error) {
	if err := m.admit(ctx, wire.Identity.Remediator); err != nil {
		return nil, err
	}
	if q.Job != m.o.Job {
		return nil, status.Errorf(codes.FailedPrecondition, "this is the master of another job than %.*q", wire.MaxName, q.Job)
	}
	s := m.Snapshot()
	if age := time.Since(s.At); age > staleAfter {
		return nil, status.Errorf(codes.Unavailable, "the last pass was %v ago", age.Round(time.Millisecond))
	}
	if s.Settling {
		return nil, status.Error(codes.Unavailable, "this master has started, and has not heard yet what runs: ask again")
	}
	for i := range s.Incidents {
		if in := &s.Incidents[i]; in.ID == q.Id {
			return reply(s, in), nil
		}
	}
	return nil, status.Errorf(codes.NotFound, "job %s has no incident %.256q", m.o.Job, q.Id)
}

// staleAfter is how old a snapshot may be to act on.
const staleAfter = 5 * time.Second

func reply(s *collector.MasterSnapshot, in *collector.Incident) *wire.IncidentReply {
	v := &in.Verdict
	r := &wire.IncidentReply{
		Id: in.ID, Job: s.Job, Attempt: in.Attempt, AttemptNow: s.Attempt,
		Class: v.Class.String(), Level: v.Level.String(), Rank: -1, OpenedUnixNs: in.Opened.UnixNano(),
	}
	if !in.Closed.IsZero() {
		r.ClosedUnixNs = in.Closed.UnixNano()
	}
	if len(v.Culprits) > 0 {
		c := &v.Culprits[0]
		r.CulpritKind, r.Culprit, r.Node, r.Reason = c.Kind.String(), c.String(), c.Node, c.Reason
		if c.Kind == diagnosis.CulpritRank && v.Undetermined == "" { // else nobody may be excluded for it
			r.Rank = c.Rank
		}
	}
	return r
}
