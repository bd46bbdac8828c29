package remediatorcmd

import (
	"context"
	"errors"
	"net"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/lockstep-ccl/lockstep/collector/wire"
	"github.com/lockstep-ccl/lockstep/remediation"
)

type another struct {
	wire.UnimplementedIncidentsServer
}

func (another) Incident(context.Context, *wire.IncidentRequest) (*wire.IncidentReply, error) {
	return nil, status.Error(codes.FailedPrecondition, "this is the master of another job")
}

// The master of another job is no master: to ask it again is of no use.
func TestAnotherJobsMaster(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	s := grpc.NewServer()
	wire.RegisterIncidentsServer(s, another{})
	served := make(chan error, 1)
	go func() { served <- s.Serve(l) }()
	defer func() {
		s.Stop()
		if err := <-served; err != nil {
			t.Error(err)
		}
	}()
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	m := masters{address: func(string) string { return l.Addr().String() }}
	if _, err := m.Incident(ctx, "job", "i"); !errors.Is(err, remediation.ErrNoMaster) {
		t.Error(err)
	}
}
