package service

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/status"

	"github.com/lockstep-ccl/lockstep/internal/accept"
	"github.com/lockstep-ccl/lockstep/pathplan/service/planpb"
)

// Over which links a connection goes is the planner's to say: a verdict on a connection is
// told with it, so that a person knows which cable to look at.

const (
	// maxWhere bounds the connections that are asked for at once.
	maxWhere = 64
	// askEvery is how often a master asks, and wantFor for how long about one that nobody has
	// asked it for since.
	askEvery = time.Second
	wantFor  = 10 * time.Second
	askFor   = 2 * time.Second
)

// connName is a connection's name to a planner, in the direction in which rank sends.
func connName(comm uint64, rank, peer int) string {
	return fmt.Sprintf("%016x/%d-%d", comm, rank, peer)
}

// Where implements the service.
func (s *Server) Where(ctx context.Context, r *planpb.WhereRequest) (*planpb.Paths, error) {
	if err := s.who(ctx, r.GetHello(), jobMaster); err != nil {
		return nil, err
	}
	if len(r.GetConns()) > maxWhere {
		s.Refused.Add(1)
		return nil, status.Errorf(codes.ResourceExhausted, "%d connections, at most %d are told of", len(r.GetConns()), maxWhere)
	}
	st := &stream{tenant: r.GetHello().GetJob(), job: r.GetHello().GetJob()}
	out := &planpb.Paths{}
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, c := range r.GetConns() {
		if as := s.planner.Assignments(st.id(c)); len(as) > 0 {
			out.Assigned = append(out.Assigned, s.assigned(st.id(c), as, nil))
		}
	}
	return out, nil
}

// WhereOptions say who asks. All but Log are required.
type WhereOptions struct {
	Planner     string // HOST:PORT
	Credentials credentials.TransportCredentials
	Node, Job   string
	Log         *slog.Logger
}

// Where asks a planner for the paths of connections, beside whoever wants to know. Safe for
// concurrent use.
type Where struct {
	o    WhereOptions
	conn *grpc.ClientConn

	mu     sync.Mutex
	wanted map[string]*wanted
}

type wanted struct {
	at   time.Time
	path string
}

// NewWhere returns one; it asks while Run runs.
func NewWhere(o WhereOptions) (*Where, error) {
	if o.Planner == "" || o.Node == "" || o.Job == "" || o.Credentials == nil {
		return nil, errors.New("paths of connections: the planner's address, credentials, node and job are all needed")
	}
	if o.Log == nil {
		o.Log = slog.Default()
	}
	conn, err := grpc.NewClient(o.Planner, grpc.WithTransportCredentials(o.Credentials), grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(maxMessage)), grpc.WithNoProxy(), grpc.WithContextDialer(accept.DialContext))
	if err != nil {
		return nil, fmt.Errorf("paths of connections: %w", err)
	}
	return &Where{o: o, conn: conn, wanted: map[string]*wanted{}}, nil
}

// Path is the paths of a connection's lanes as far as they are known, "" while they are not.
// It does not wait: who asks for the first time has the answer in about a second.
func (w *Where) Path(comm uint64, rank, peer int) string {
	name, now := connName(comm, rank, peer), time.Now()
	w.mu.Lock()
	defer w.mu.Unlock()
	k := w.wanted[name]
	if k == nil {
		if len(w.wanted) >= maxWhere {
			return ""
		}
		k = &wanted{}
		w.wanted[name] = k
	}
	k.at = now
	return k.path
}

// Run asks until ctx ends.
func (w *Where) Run(ctx context.Context) {
	defer w.conn.Close()
	t := time.NewTicker(askEvery)
	defer t.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case now := <-t.C:
			if names := w.names(now); len(names) > 0 {
				w.ask(ctx, names)
			}
		}
	}
}

// names are those that somebody wants to know of.
func (w *Where) names(now time.Time) (out []string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for name, k := range w.wanted {
		if now.Sub(k.at) > wantFor {
			delete(w.wanted, name)
			continue
		}
		out = append(out, name)
	}
	return out
}

func (w *Where) ask(ctx context.Context, names []string) {
	ctx, cancel := context.WithTimeout(ctx, askFor)
	defer cancel()
	got, err := planpb.NewPlannerClient(w.conn).Where(ctx, &planpb.WhereRequest{Hello: &planpb.Hello{Version: version, Node: w.o.Node, Job: w.o.Job}, Conns: names})
	if err != nil {
		w.o.Log.Debug("the planner does not say over which links connections go", "planner", w.o.Planner, "err", err)
		return // what it last said may still be so
	}
	paths := map[string]string{}
	for _, a := range got.GetAssigned() {
		var lanes []string
		for _, l := range a.GetLanes() {
			lanes = append(lanes, l.GetName())
		}
		paths[a.GetConn()] = strings.Join(lanes, " and ")
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, name := range names {
		if k := w.wanted[name]; k != nil {
			k.path = paths[name]
		}
	}
}
