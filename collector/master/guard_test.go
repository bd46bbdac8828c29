package master

import (
	"context"
	"net"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/encoding"
	_ "google.golang.org/grpc/encoding/gzip"
	"google.golang.org/grpc/mem"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/lockstep-ccl/lockstep/collector/wire"
	"github.com/lockstep-ccl/lockstep/collector/wire/wiretest"
	"github.com/lockstep-ccl/lockstep/internal/crowd"
)

func TestAHostileMessageIsNotTakenApart(t *testing.T) {
	m := start(t, Options{})
	t.Run("compressed", func(t *testing.T) {
		s := dial(t, m, grpc.UseCompressor("gzip"))
		say(t, s, hello(), nil)
		if err := recvError(t, s); !strings.Contains(err.Error(), "compressed") {
			t.Error(err)
		}
	})
	t.Run("a long hello", func(t *testing.T) {
		s := dial(t, m)
		h := hello()
		h.BootId = strings.Repeat("x", maxFirst)
		say(t, s, h, nil)
		if err := recvError(t, s); !strings.Contains(err.Error(), "at most 1024") {
			t.Error(err)
		}
	})
	t.Run("too many entries", func(t *testing.T) {
		s := dial(t, m)
		say(t, s, hello(), nil)
		r := &wire.Report{Sequence: 1}
		for range wire.MaxEntries + 1 {
			r.Arrivals = append(r.Arrivals, &wire.Arrival{})
		}
		say(t, s, nil, r)
		if err := recvError(t, s); !strings.Contains(err.Error(), "more than 8192 entries") {
			t.Error(err)
		}
	})
}

// A caller of another role is refused before it has said anything.
func TestTheRoleIsKnownBeforeTheFirstMessage(t *testing.T) {
	ca := wiretest.NewAuthority(t)
	own := ca.Master("job")
	m := start(t, Options{TLS: &own})
	for name, files := range map[string]wire.TLS{"a remediator": ca.Remediator(), "an agent of another job": ca.Agent("n0", "else")} {
		creds, err := files.MasterOf("job")
		if err != nil {
			t.Fatal(err)
		}
		conn, err := grpc.NewClient(m.Addr().String(), grpc.WithTransportCredentials(creds))
		if err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
		c, err := wire.NewCollectorClient(conn).Progress(ctx)
		if err == nil {
			_, err = c.Recv() // nothing was sent
		}
		if status.Code(err) != codes.PermissionDenied {
			t.Errorf("%s: %v", name, err)
		}
		cancel()
		conn.Close()
	}
}

func TestConnectionsAreBounded(t *testing.T) {
	inner, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	l, err := crowd.Limit(inner, 1, false)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	accepted := make(chan net.Conn)
	go func() {
		defer close(accepted)
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			accepted <- c
		}
	}()
	dial := func() net.Conn {
		c, err := net.Dial("tcp", l.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { c.Close() })
		_ = c.SetDeadline(time.Now().Add(30 * time.Second))
		_, _ = c.Write([]byte("GET / HTTP/1.0\r\n\r\n")) // who says nothing is not let in
		return c
	}
	dial()
	one := <-accepted
	if _, err := dial().Read(make([]byte, 1)); err == nil || strings.Contains(err.Error(), "timeout") {
		t.Errorf("one too many is not hung up on: %v", err)
	}
	one.Close()
	one.Close()
	dial()
	(<-accepted).Close()
	l.Close()
	for range accepted {
	}
}

// FuzzEntries holds that counting agrees with what taking apart makes.
func FuzzEntries(f *testing.F) {
	seed, err := proto.Marshal(&wire.AgentMessage{Body: &wire.AgentMessage_Report{Report: troubled()}})
	if err != nil {
		f.Fatal(err)
	}
	f.Add(seed)
	f.Fuzz(func(t *testing.T, b []byte) {
		n, err := entries(b, inMessage)
		var m wire.AgentMessage
		if proto.Unmarshal(b, &m) != nil {
			return
		}
		if err != nil {
			t.Fatalf("counting fails where taking apart does not: %v", err)
		}
		r := m.GetReport()
		made := len(r.GetRanks()) + len(r.GetMembers()) + len(r.GetConnections()) + len(r.GetArrivals())
		for _, w := range r.GetRanks() {
			made += len(w.Calls)
		}
		if n < min(made, wire.MaxEntries+1) {
			t.Errorf("%d counted, %d made", n, made)
		}
		if n <= wire.MaxEntries {
			var again wire.AgentMessage
			if err := (protocol{encoding.GetCodecV2("proto")}).Unmarshal(mem.BufferSlice{mem.SliceBuffer(b)}, &again); err != nil && len(b) <= wire.MaxMessage {
				t.Error(err)
			}
		}
	})
}
