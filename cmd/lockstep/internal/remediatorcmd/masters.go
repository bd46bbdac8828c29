package remediatorcmd

import (
	"context"
	"fmt"
	"net"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/lockstep-ccl/lockstep/collector/wire"
	"github.com/lockstep-ccl/lockstep/internal/accept"
	"github.com/lockstep-ccl/lockstep/remediation"
)

// masters asks jobs' masters for incidents, over a connection of its own each time:
// questions are as rare as incidents.
type masters struct {
	address func(job string) string
	tls     *wire.TLS
}

// Incident implements remediation.Masters.
func (m masters) Incident(ctx context.Context, job, id string) (remediation.Incident, error) {
	conn, address, err := m.dial(job)
	if err != nil {
		return remediation.Incident{}, err
	}
	defer conn.Close()
	r, err := wire.NewIncidentsClient(conn).Incident(ctx, &wire.IncidentRequest{Job: job, Id: id})
	switch {
	case status.Code(err) == codes.NotFound:
		return remediation.Incident{}, remediation.ErrUnknownIncident
	case status.Code(err) == codes.FailedPrecondition: // asking again changes nothing
		return remediation.Incident{}, fmt.Errorf("%w: at %s: %w", remediation.ErrNoMaster, address, err)
	case err != nil:
		return remediation.Incident{}, fmt.Errorf("master of job %s at %s: %w", job, address, err)
	case r.Job != job || r.Id != id:
		return remediation.Incident{}, fmt.Errorf("master of job %s at %s: answers for incident %.80q of job %.80q", job, address, r.Id, r.Job)
	}
	return remediation.Incident{
		Class: r.Class, Level: r.Level, CulpritKind: r.CulpritKind, Culprit: r.Culprit, Node: r.Node, Reason: r.Reason,
		Rank: int(r.Rank), Attempt: int(r.Attempt), AttemptNow: int(r.AttemptNow), Closed: r.ClosedUnixNs != 0,
		Opened: time.Unix(0, r.OpenedUnixNs),
	}, nil
}

// dial returns a connection to a job's master, and where that is.
func (m masters) dial(job string) (*grpc.ClientConn, string, error) {
	address := m.address(job)
	if address == "" {
		return nil, "", remediation.ErrNoMaster
	}
	if m.tls == nil && !loopback(address) {
		return nil, address, fmt.Errorf("master of job %s at %s: beyond loopback it must show a certificate: give --tls.cert, --tls.key and --tls.ca", job, address)
	}
	creds, err := m.tls.MasterOf(job)
	if err != nil {
		return nil, address, err
	}
	conn, err := grpc.NewClient(address, grpc.WithTransportCredentials(creds), grpc.WithDisableServiceConfig(), grpc.WithNoProxy(), grpc.WithContextDialer(accept.DialContext),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(64<<10)))
	if err != nil {
		return nil, address, fmt.Errorf("master of job %s at %s: %w", job, address, err)
	}
	return conn, address, nil
}

// fenceAgain is the time between two calls of a master that does not answer.
const fenceAgain = 500 * time.Millisecond

// Fence implements remediation.Fencer: the job's master has its agents stop what is left. A
// master that is started again meanwhile is asked again.
func (m masters) Fence(ctx context.Context, job string, attempt int, node string) (remediation.Proof, error) {
	if _, ok := ctx.Deadline(); !ok {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, time.Minute)
		defer cancel()
	}
	for {
		conn, address, err := m.dial(job)
		if err != nil {
			return remediation.Proof{}, err
		}
		r, err := wire.NewFencesClient(conn).Fence(ctx, &wire.FenceRequest{Job: job, Attempt: uint32(attempt), Node: node})
		conn.Close()
		if err == nil {
			return remediation.Proof{Proven: r.Proven, How: r.How, In: time.Duration(r.ProvenInNs)}, nil
		}
		err = fmt.Errorf("master of job %s at %s: %w", job, address, err)
		switch status.Code(err) {
		case codes.Unimplemented, codes.PermissionDenied, codes.FailedPrecondition, codes.InvalidArgument:
			return remediation.Proof{}, err // asking again changes nothing
		}
		select {
		case <-ctx.Done():
			return remediation.Proof{}, err
		case <-time.After(fenceAgain):
		}
	}
}

// loopback reports whether an address is this host's own by its form.
func loopback(address string) bool {
	host, _, err := net.SplitHostPort(address)
	ip := net.ParseIP(host)
	return err == nil && (host == "localhost" || ip != nil && ip.IsLoopback())
}
