package master

import (
	"bytes"
	"context"
	"fmt"
	"log/slog"
	"net"
	"os"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"

	"github.com/lockstep-ccl/lockstep/collector"
	"github.com/lockstep-ccl/lockstep/collector/wire"
	"github.com/lockstep-ccl/lockstep/diagnosis"
)

// TestMain lets the test binary be a rank, so that a test can kill it.
func TestMain(m *testing.M) {
	if os.Getenv("LOCKSTEP_TEST_AS") == "rank" {
		beRank()
	}
	goleak.VerifyTestMain(m)
}

// start runs a master, changed before, to the end of the test.
func start(t *testing.T, o Options, change ...func(*Master)) *Master {
	t.Helper()
	o.Job, o.Listen, o.Log = "job", "127.0.0.1:0", slog.New(slog.DiscardHandler)
	m, err := New(o)
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range change {
		f(m)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error)
	go func() { done <- m.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
	return m
}

// dial opens a raw stream, to say on it what no agent would.
func dial(t *testing.T, m *Master, opts ...grpc.CallOption) wire.Collector_ProgressClient {
	t.Helper()
	conn, err := grpc.NewClient(m.Addr().String(), grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	t.Cleanup(cancel)
	c, err := wire.NewCollectorClient(conn).Progress(ctx, opts...)
	if err != nil {
		t.Fatal(err)
	}
	return c
}

func hello() *wire.Hello {
	return &wire.Hello{ProtocolVersion: wire.ProtocolVersion, Job: "job", Node: "n0", Instance: 1, BootId: "b"}
}

func say(t *testing.T, c wire.Collector_ProgressClient, h *wire.Hello, r *wire.Report) {
	t.Helper()
	m := &wire.AgentMessage{}
	if h != nil {
		m.Body = &wire.AgentMessage_Hello{Hello: h}
	} else if r != nil {
		m.Body = &wire.AgentMessage_Report{Report: r}
	}
	if err := c.Send(m); err != nil {
		t.Log(err) // the status comes with Recv
	}
}

func recvError(t *testing.T, c wire.Collector_ProgressClient) error {
	t.Helper()
	for {
		if _, err := c.Recv(); err != nil {
			return err
		}
	}
}

func TestRefusals(t *testing.T) {
	m := start(t, Options{Limits: Limits{Nodes: 1}})
	first := dial(t, m)
	say(t, first, hello(), nil)
	if _, err := first.Recv(); err != nil {
		t.Fatal(err)
	}
	with := func(f func(h *wire.Hello)) *wire.Hello { h := hello(); f(h); return h }
	for _, c := range []struct {
		name string
		h    *wire.Hello
		r    *wire.Report
		code codes.Code
		text string
	}{
		{"a report first", nil, &wire.Report{}, codes.InvalidArgument, "not hello"},
		{"an empty message", nil, nil, codes.InvalidArgument, "not hello"},
		{"a newer version", with(func(h *wire.Hello) { h.ProtocolVersion = wire.ProtocolVersion + 1 }), nil, codes.FailedPrecondition, `upgrade the master of job "job"`},
		{"an older version", with(func(h *wire.Hello) { h.ProtocolVersion = wire.OldestProtocolVersion - 1 }), nil, codes.FailedPrecondition, `upgrade the agent of node "n0"`},
		{"another job", with(func(h *wire.Hello) { h.Job = "else" }), nil, codes.FailedPrecondition, "another job"},
		{"no node", with(func(h *wire.Hello) { h.Node = "" }), nil, codes.InvalidArgument, "node name"},
		{"a long node name", with(func(h *wire.Hello) { h.Node = strings.Repeat("x", 64) }), nil, codes.InvalidArgument, "node name"},
		{"one agent too many", with(func(h *wire.Hello) { h.Node = "n1" }), nil, codes.ResourceExhausted, "limit"},
	} {
		t.Run(c.name, func(t *testing.T) {
			s := dial(t, m)
			say(t, s, c.h, c.r)
			err := recvError(t, s)
			if status.Code(err) != c.code || !strings.Contains(err.Error(), c.text) {
				t.Errorf("%v, want %v with %q", err, c.code, c.text)
			}
		})
	}
	t.Run("hello twice", func(t *testing.T) {
		s := dial(t, m)
		say(t, s, hello(), nil)
		say(t, s, hello(), nil)
		if err := recvError(t, s); status.Code(err) != codes.InvalidArgument {
			t.Error(err)
		}
	})
	// The second stream for node n0 took over the first.
	if err := recvError(t, first); status.Code(err) != codes.Aborted {
		t.Errorf("the first stream ended with %v", err)
	}
}

// Machines that are all called localhost push each other out: they are told why.
func TestTwoMachinesOneName(t *testing.T) {
	m := start(t, Options{})
	first, second := dial(t, m), dial(t, m)
	say(t, first, hello(), nil)
	if _, err := first.Recv(); err != nil {
		t.Fatal(err)
	}
	h := hello()
	h.BootId = "another"
	say(t, second, h, nil)
	if err := recvError(t, second); status.Code(err) != codes.AlreadyExists || !strings.Contains(err.Error(), "--node") {
		t.Error(err)
	}
	// The first one is heard no more: its stream is there, and silent.
	third := dial(t, m)
	for deadline := time.Now().Add(30 * time.Second); ; time.Sleep(100 * time.Millisecond) {
		say(t, third, h, nil)
		_, err := third.Recv()
		if err == nil {
			break
		}
		if time.Now().After(deadline) {
			t.Fatal(err)
		}
		third = dial(t, m)
	}
	if err := recvError(t, first); status.Code(err) != codes.Aborted {
		t.Error(err)
	}
}

func TestGapAsksForResync(t *testing.T) {
	m := start(t, Options{})
	c := dial(t, m)
	say(t, c, hello(), nil)
	r := report(2, 0)
	say(t, c, nil, r)
	r.Sequence = 3
	say(t, c, nil, r)
	for {
		msg, err := c.Recv()
		if err != nil {
			t.Fatal(err)
		}
		if msg.GetResync() != nil {
			return
		}
	}
}

// TestSilentAgent follows a node from connected over silent to lost and back.
func TestSilentAgent(t *testing.T) {
	m := start(t, Options{Patience: 700 * time.Millisecond})
	c := dial(t, m)
	say(t, c, hello(), nil)
	r := report(2, 0)
	r.Members, r.Connections = nil, nil // an operation that does not end would be a fault by and by
	speaks := true                      // else it is silent, and what is waited for lasts until it is seen
	until := func(what string, ok func(a agentView) bool) {
		t.Helper()
		for deadline := time.Now().Add(30 * time.Second); time.Now().Before(deadline); time.Sleep(5 * time.Millisecond) {
			if speaks {
				say(t, c, nil, r)
				r.Sequence++
			}
			s := m.Snapshot()
			if len(s.Agents) == 1 && ok(agentView{s.Agents[0].Connected, s.Agents[0].Lost, s.Ranks[diagnosis.ProcRunning], s.Ranks[diagnosis.ProcUnknown]}) {
				return
			}
		}
		t.Fatalf("never %s: %+v", what, m.Snapshot())
	}
	until("connected", func(a agentView) bool { return a == agentView{true, false, 2, 0} })
	speaks = false
	until("lost", func(a agentView) bool { return a == agentView{true, true, 0, 2} })
	speaks = true
	until("back", func(a agentView) bool { return a == agentView{true, false, 2, 0} })
	speaks = false
	if err := c.CloseSend(); err != nil {
		t.Fatal(err)
	}
	until("disconnected", func(a agentView) bool { return !a.connected && a.running == 0 && a.unknown == 2 })
	until("lost, too", func(a agentView) bool { return a == agentView{false, true, 0, 2} })
	if i := m.Snapshot().Incidents; len(i) != 0 {
		t.Errorf("an agent that went is no fault of the job's: %+v", i)
	}
}

type agentView struct {
	connected, lost  bool
	running, unknown int
}

// An agent says what has changed. After a silence for which its ranks were given
// up, nothing may have.
func TestAgentHeardAgainSaysEverything(t *testing.T) {
	m := start(t, Options{Patience: 300 * time.Millisecond})
	c := dial(t, m)
	say(t, c, hello(), nil)
	r := report(2, 0)
	r.Ranks[1].Proc = uint32(diagnosis.ProcStopped)
	say(t, c, nil, r)
	for deadline := time.Now().Add(30 * time.Second); len(m.Snapshot().Agents) == 0 || !m.Snapshot().Agents[0].Lost; time.Sleep(5 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatal("never lost")
		}
	}
	say(t, c, nil, &wire.Report{Sequence: 2, MonoSentNs: 2e9})
	if !asked(t, c, 2) {
		t.Error("its silence was forgiven, and what was forgotten of its ranks not asked for")
	}
}

// asked reports whether a resync came before the ack of a report.
func asked(t *testing.T, c wire.Collector_ProgressClient, sequence uint64) bool {
	t.Helper()
	for {
		msg, err := c.Recv()
		if err != nil {
			t.Fatal(err)
		}
		if msg.GetResync() != nil {
			return true
		}
		if msg.GetAck().GetSequence() == sequence {
			return false
		}
	}
}

// An agent under a new name (a pod that replaced another) is not believed while
// the old one speaks, and is asked again when that does no more.
func TestRenamedAgent(t *testing.T) {
	for _, silent := range []bool{false, true} {
		t.Run(fmt.Sprint("silent: ", silent), func(t *testing.T) {
			m := start(t, Options{Patience: 2 * time.Second})
			before, after := dial(t, m), dial(t, m)
			say(t, before, hello(), nil)
			say(t, before, nil, report(2, 0))
			if asked(t, before, 1) {
				t.Fatal("asked at once")
			}
			h := hello()
			h.Node = "n1"
			say(t, after, h, nil)
			r := report(2, 0)
			say(t, after, nil, r)
			if asked(t, after, 1) {
				t.Fatal("asked while another one speaks for the ranks")
			}
			if !silent {
				if err := before.CloseSend(); err != nil {
					t.Fatal(err)
				}
			}
			until := func(what string, ok func(s *collector.MasterSnapshot) bool) {
				t.Helper()
				for deadline := time.Now().Add(30 * time.Second); !ok(m.Snapshot()); time.Sleep(50 * time.Millisecond) {
					if time.Now().After(deadline) {
						t.Fatalf("never: %s: %+v", what, m.Snapshot())
					}
					r.Sequence++
					say(t, after, nil, &wire.Report{Sequence: r.Sequence, MonoSentNs: int64(r.Sequence) * 1e9})
				}
			}
			until("the old one is gone", func(s *collector.MasterSnapshot) bool { return s.Ranks[diagnosis.ProcUnknown] == 2 })
			time.Sleep(2 * ackEvery)
			r.Sequence++
			say(t, after, nil, &wire.Report{Sequence: r.Sequence, MonoSentNs: int64(r.Sequence) * 1e9})
			if !asked(t, after, r.Sequence) {
				t.Error("never asked again")
			}
			until("it is believed", func(s *collector.MasterSnapshot) bool { // once the other one is lost
				r.Sequence++
				say(t, after, nil, r)
				return s.Ranks[diagnosis.ProcRunning] == 2
			})
		})
	}
}

// An agent leaves a job whose ranks have ended: it is not lost.
func TestFinishedJobMissesNoAgent(t *testing.T) {
	m := start(t, Options{Patience: 300 * time.Millisecond})
	c := dial(t, m)
	say(t, c, hello(), nil)
	r := report(2, 0)
	for _, w := range r.Ranks {
		w.Proc = uint32(diagnosis.ProcExited)
	}
	say(t, c, nil, r)
	until := func(what string, ok func(*collector.MasterSnapshot) bool) {
		t.Helper()
		for deadline := time.Now().Add(30 * time.Second); !ok(m.Snapshot()); time.Sleep(5 * time.Millisecond) {
			// One that is still connected may be lost for a moment: on a busy machine it takes longer to leave.
			if s := m.Snapshot(); time.Now().After(deadline) || len(s.Agents) > 0 && s.Agents[0].Lost && !s.Agents[0].Connected {
				t.Fatalf("never %s: %+v", what, s)
			}
		}
	}
	until("seen", func(s *collector.MasterSnapshot) bool { return len(s.Agents) == 1 && s.Agents[0].Ranks == 2 })
	if err := c.CloseSend(); err != nil {
		t.Fatal(err)
	}
	until("gone", func(s *collector.MasterSnapshot) bool {
		return len(s.Agents) == 0 && s.Ranks[diagnosis.ProcExited] == 2
	})
}

// TestGarbageConnection: bytes that are no HTTP/2 end their own connection only.
func TestGarbageConnection(t *testing.T) {
	m := start(t, Options{})
	for _, garbage := range []string{"", "GET / HTTP/1.1\r\n\r\n", strings.Repeat("\x00\xff", 1<<15), "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + strings.Repeat("\xff", 1<<12)} {
		c, err := net.Dial("tcp", m.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		_, _ = c.Write([]byte(garbage))
		c.Close()
	}
	c := dial(t, m)
	say(t, c, hello(), nil)
	if _, err := c.Recv(); err != nil {
		t.Error(err)
	}
}

// Without TLS anyone on the network could have a job restarted.
func TestOpenListenerNeedsAFlag(t *testing.T) {
	for _, c := range []struct {
		listen          string
		insecure, there bool
	}{{"127.0.0.1:0", false, true}, {"0.0.0.0:0", false, false}, {"0.0.0.0:0", true, true}} {
		var log bytes.Buffer
		m, err := New(Options{Job: "job", Listen: c.listen, Insecure: c.insecure, Log: slog.New(slog.NewTextHandler(&log, nil))})
		if (err == nil) != c.there {
			t.Fatalf("%+v: %v", c, err)
		}
		if err != nil {
			continue
		}
		m.listener.Close()
		if told := strings.Contains(log.String(), "not authenticated"); told != c.insecure || m.Snapshot().Insecure != c.insecure {
			t.Errorf("%+v: logged %q", c, log.String())
		}
	}
}
