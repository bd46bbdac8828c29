package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"math/rand/v2"
	"net"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	_ "google.golang.org/grpc/encoding/gzip"
	"google.golang.org/grpc/status"

	"github.com/lockstep-ccl/lockstep/collector/wire"
	"github.com/lockstep-ccl/lockstep/collector/wire/pki"
	"github.com/lockstep-ccl/lockstep/diagnosis"
	"github.com/lockstep-ccl/lockstep/exporters/names"
	"github.com/lockstep-ccl/lockstep/record"
)

// session is a raw stream to the master.
type session struct {
	wire.Collector_ProgressClient
	close func()
	sent  uint64
}

func (w *town) dial(t *testing.T, creds credentials.TransportCredentials, opts ...grpc.CallOption) (*session, error) {
	t.Helper()
	conn, err := grpc.NewClient(w.grpc, grpc.WithTransportCredentials(creds), grpc.WithNoProxy())
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(context.Background(), bound)
	c, err := wire.NewCollectorClient(conn).Progress(ctx, opts...)
	s := &session{Collector_ProgressClient: c, close: func() { cancel(); conn.Close() }}
	t.Cleanup(s.close)
	return s, err
}

// as opens a stream with a certificate and says hello as a node; the error is the master's.
func (w *town) as(t *testing.T, f wire.TLS, node string, opts ...grpc.CallOption) (*session, error) {
	t.Helper()
	creds, err := f.MasterOf(townJob)
	if err != nil {
		t.Fatal(err)
	}
	s, err := w.dial(t, creds, opts...)
	if err != nil {
		return nil, err
	}
	return s, s.hello(node)
}

func (s *session) hello(node string) error {
	h := &wire.Hello{ProtocolVersion: wire.ProtocolVersion, Job: townJob, Node: node, Instance: rand.Uint64(), BootId: "of an attacker"}
	if err := s.Send(&wire.AgentMessage{Body: &wire.AgentMessage_Hello{Hello: h}}); err != nil && !errors.Is(err, io.EOF) {
		return err
	}
	_, err := s.Recv()
	return err
}

func (s *session) report(r *wire.Report) error {
	s.sent++
	r.Sequence, r.MonoSentNs, r.RealSentNs = s.sent, record.Now(), time.Now().UnixNano()
	return s.Send(&wire.AgentMessage{Body: &wire.AgentMessage_Report{Report: r}})
}

// ended returns what the master says at the end of a stream.
func (s *session) ended() error {
	for {
		if _, err := s.Recv(); err != nil {
			return err
		}
	}
}

func hostOnTheNetwork(t *testing.T, w *town) {
	before := metric(t, w.web, names.MasterHandshakes)
	for range 5 {
		if s, err := w.dial(t, insecure.NewCredentials()); err == nil {
			if err := s.hello("node0"); err == nil {
				t.Error("a report without a certificate")
			}
		}
		c, err := net.Dial("tcp", w.grpc)
		if err != nil {
			t.Fatal(err)
		}
		_, _ = c.Write(bytes.Repeat([]byte("\x16\x03garbage"), 1<<10))
		c.Close()
	}
	grows(t, w.web, names.MasterHandshakes, before)
	for _, path := range []string{"/api/v1/actions", "/api/v1/breakers"} {
		if err := w.get(w.rem+path, "", nil); err == nil || !strings.Contains(err.Error(), "401") {
			t.Errorf("%s: %v", path, err)
		}
	}
}

func otherCertificates(t *testing.T, w *town) {
	theirs, err := pki.Init(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	before, handshakes := metric(t, w.web, names.MasterDenied), metric(t, w.web, names.MasterHandshakes)
	real := files(t, w.ca, "for-the-ca-file", wire.Identity{Role: wire.RoleRemediator})
	stranger := files(t, theirs, "x", wire.Identity{Role: wire.RoleAgent, Node: "node0"})
	stranger.CAFile = real.CAFile // they know whom to expect
	for name, c := range map[string]struct {
		files wire.TLS
		node  string
	}{
		"another authority's":         {stranger, "node0"},
		"another trust domain's":      {files(t, w.ca, "foreign", wire.Identity{Domain: "else.example", Role: wire.RoleAgent, Node: "node0"}), "node0"},
		"another node's":              {files(t, w.ca, "agent9", wire.Identity{Role: wire.RoleAgent, Node: "node9"}), "node0"},
		"another tenant's, same node": {files(t, w.ca, "agent0-theirs", wire.Identity{Role: wire.RoleAgent, Node: "node0", Jobs: []string{"theirs"}}), "node0"},
		"a remediator's":              {real, "node0"},
		"a master's":                  {files(t, w.ca, "master-theirs", wire.Identity{Role: wire.RoleMaster, Jobs: []string{"theirs"}}, "127.0.0.1"), "node0"},
	} {
		if s, err := w.as(t, c.files, c.node); err == nil {
			t.Errorf("%s certificate speaks for %s", name, c.node)
			s.close()
		}
	}
	grows(t, w.web, names.MasterDenied, before)
	grows(t, w.web, names.MasterHandshakes, handshakes)
	// Nobody but a remediator asks for incidents.
	f := files(t, w.ca, "agent9", wire.Identity{Role: wire.RoleAgent, Node: "node9"})
	creds, err := f.MasterOf(townJob)
	if err != nil {
		t.Fatal(err)
	}
	conn, err := grpc.NewClient(w.grpc, grpc.WithTransportCredentials(creds), grpc.WithNoProxy())
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	ctx, cancel := context.WithTimeout(context.Background(), bound)
	defer cancel()
	if _, err := wire.NewIncidentsClient(conn).Incident(ctx, &wire.IncidentRequest{Job: townJob, Id: "x"}); status.Code(err) != codes.PermissionDenied {
		t.Error(err)
	}
}

// forged is a report of an attacker's choice about some ranks, in a communicator of its own.
func forged(attempt uint32, world int32, created time.Time, proc diagnosis.ProcState, ranks ...int32) *wire.Report {
	r := &wire.Report{}
	now := record.Now()
	for i, rank := range ranks {
		r.Ranks = append(r.Ranks, &wire.Rank{WorldRank: rank, WorldSize: world, Pid: 1, Attempt: attempt, CreatedUnixNs: created.UnixNano(), Proc: uint32(proc), MonoProcNs: now - 60e9, Step: math.MaxUint64})
		m := &wire.Member{CommId: 0xbad, CommName: "forged", WorldRank: rank, Rank: int32(i), Size: int32(len(ranks)), Attempt: attempt, State: uint32(record.CommJoined), Coll: uint32(record.AllReduce), Peer: -1, Bytes: 8, Enqueued: 5, Started: 5, Finished: 4, MonoEnqueuedNs: now - 60e9, MonoStartedNs: now - 60e9}
		if i == 0 {
			m.Enqueued, m.Started = 4, 4 // it never entered
		}
		r.Members = append(r.Members, m)
	}
	return r
}

// The strongest stranger: a certificate for every job, of a node that the job does not run on.
func agentOfAnotherNode(t *testing.T, w *town) {
	f := files(t, w.ca, "agent-evil", wire.Identity{Role: wire.RoleAgent, Node: "evil"})
	foreign, refused := metric(t, w.web, names.MasterForeign), metric(t, w.web, names.MasterRefused)
	now := time.Now()
	lies := []*wire.Report{
		forged(0, townRanks, now.Add(9*time.Second), diagnosis.ProcGone, 0, 1, 2, 3),
		forged(0, townRanks, now.Add(9*time.Second), diagnosis.ProcStopped, 0, 1, 2, 3),
		forged(0, townRanks, time.Unix(1, 0), diagnosis.ProcGone, 3),
		forged(1, townRanks, now, diagnosis.ProcRunning, 0, 1, 2, 3),
		forged(1, townRanks, now, diagnosis.ProcGone, 0, 1, 2, 3),
		forged(999, townRanks, now.Add(9*time.Second), diagnosis.ProcStopped, 0, 1, 2, 3),
		forged(1<<20, townRanks, now, diagnosis.ProcRunning, 0, 1),
		forged(math.MaxUint32, townRanks, now, diagnosis.ProcRunning, 0, 1),
		forged(0, 100_000, now, diagnosis.ProcRunning, 0, 99_999),
		forged(0, math.MaxInt32, now, diagnosis.ProcRunning, 0, 1),
		forged(0, 1, now, diagnosis.ProcGone, 0),
		forged(0, townRanks, now.Add(time.Hour), diagnosis.ProcGone, 0),
		forged(0, townRanks, now, diagnosis.ProcGone, -1, math.MaxInt32, math.MinInt32),
	}
	s, err := w.as(t, f, "evil")
	if err != nil {
		t.Fatal(err)
	}
	go func() {
		for s.Collector_ProgressClient != nil {
			if _, err := s.Recv(); err != nil {
				return
			}
		}
	}()
	for range 5 {
		for _, lie := range lies {
			if err := s.report(lie); err != nil {
				t.Fatal(err)
			}
			time.Sleep(10 * time.Millisecond)
		}
	}
	// One that stays: an operator is told.
	if err := s.report(forged(7, townRanks, now, diagnosis.ProcRunning, 0, 1, 2, 3)); err != nil {
		t.Fatal(err)
	}
	eventually(t, "seen to disagree", func() error {
		if n := metric(t, w.web, names.MasterDisagree); n != 1 {
			return fmt.Errorf("%v agents disagree", n)
		}
		return nil
	})
	grows(t, w.web, names.MasterForeign, foreign)
	grows(t, w.web, names.MasterRefused, refused)
	s.close()
}

// A second process with the certificate of a node whose agent lives.
func stolenCertificate(t *testing.T, w *town) {
	before := metric(t, w.web, names.MasterDuplicates)
	f := files(t, w.ca, "stolen", wire.Identity{Role: wire.RoleAgent, Node: "node1"})
	for range 20 {
		if s, err := w.as(t, f, "node1"); status.Code(err) != codes.AlreadyExists {
			t.Errorf("while the node's agent is heard: %v", err)
		} else {
			s.close()
		}
	}
	grows(t, w.web, names.MasterDuplicates, before)
}

func hostileMessages(t *testing.T, w *town) {
	f := files(t, w.ca, "agent-evil", wire.Identity{Role: wire.RoleAgent, Node: "evil"})
	before := metric(t, w.web, names.MasterMessages)
	open := func(opts ...grpc.CallOption) *session {
		var s *session
		eventually(t, "let in", func() (err error) { s, err = w.as(t, f, "evil", opts...); return err })
		return s
	}
	bomb := &wire.Report{}
	for range wire.MaxEntries * 4 {
		bomb.Arrivals = append(bomb.Arrivals, &wire.Arrival{})
	}
	s := open()
	_ = s.report(bomb)
	if err := s.ended(); !strings.Contains(err.Error(), "more than 8192 entries") {
		t.Errorf("a report of %d entries: %v", len(bomb.Arrivals), err)
	}
	s.close()
	if s, err := w.as(t, f, "evil", grpc.UseCompressor("gzip")); err == nil {
		t.Error("a compressed hello was taken")
		s.close()
	}
	s = open()
	long := forged(0, townRanks, time.Now(), diagnosis.ProcRunning, 0)
	long.Members[0].CommName = strings.Repeat("x", wire.MaxMessage)
	_ = s.report(long)
	if err := s.ended(); status.Code(err) != codes.ResourceExhausted {
		t.Errorf("a report of %d bytes: %v", wire.MaxMessage, err)
	}
	s.close()
	grows(t, w.web, names.MasterMessages, before+2)
	// Reports as fast as they go, each of the most entries about ranks of others.
	s = open()
	most := &wire.Report{}
	for i := range int32(wire.MaxEntries / 2) {
		r := forged(uint32(i%8), townRanks, time.Now(), diagnosis.ProcRunning, i%townRanks)
		r.Members[0].CommId = uint64(i)
		most.Ranks, most.Members = append(most.Ranks, r.Ranks...), append(most.Members, r.Members...)
	}
	go func() { _ = s.ended() }()
	for begin := time.Now(); time.Since(begin) < time.Second; {
		if err := s.report(most); err != nil {
			break
		}
	}
	s.close()
}

// Connections and names by the hundred, silent and not, while an honest agent comes anew.
func floods(t *testing.T, w *town) {
	var conns []net.Conn
	defer func() {
		for _, c := range conns {
			c.Close()
		}
	}()
	for i := range 400 {
		addr := []string{w.grpc, w.web, w.rem, w.agents[0]}[i%4]
		c, err := net.Dial("tcp", addr)
		if err != nil {
			break
		}
		if i%3 == 0 {
			_, _ = c.Write([]byte("G"))
		}
		conns = append(conns, c)
	}
	f := files(t, w.ca, "agent-evil", wire.Identity{Role: wire.RoleAgent, Node: "evil"})
	denied := metric(t, w.web, names.MasterDenied)
	var names0 sync.WaitGroup
	for i := range 8 {
		names0.Go(func() {
			for k := range 5 {
				if s, err := w.as(t, f, fmt.Sprintf("node-%d-%d", i, k)); err == nil {
					t.Error("a node of an invented name")
					s.close()
				} else if s != nil {
					s.close()
				}
			}
		})
	}
	w.again(t, "node1", nil)
	names0.Wait()
	crowded := metric(t, w.rem, names.ConnsCrowded, names.ListenerWeb)
	for range 600 { // a page's listener holds 512, these and those above
		c, err := net.Dial("tcp", w.rem)
		if err != nil {
			break
		}
		conns = append(conns, c)
	}
	grows(t, w.rem, names.ConnsCrowded, crowded, names.ListenerWeb)
	grows(t, w.web, names.MasterDenied, denied)
	w.healthy(t)
}
