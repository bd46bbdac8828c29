package process

import (
	"bytes"
	"encoding/binary"
	"errors"
	"log/slog"
	"net"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/lockstep-ccl/lockstep/internal/statedir"
)

func testCoordinator(t *testing.T, log *slog.Logger) *coordinator {
	t.Helper()
	dir, err := statedir.OpenPrivate(filepath.Join(t.TempDir(), "state"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { dir.Close() })
	nobody, err := net.Listen("tcp", "127.0.0.1:0") // who comes: hosts come by pipes
	if err != nil {
		t.Fatal(err)
	}
	h := HostOptions{Options: Options{Job: "j", Ranks: 2, Logger: log}, Name: "n0", Hosts: 2, Lease: time.Hour, Join: time.Hour, Listener: nobody}
	c, err := newCoordinator(&h, dir, 1)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.admission.Close() })
	return c
}

// lines counts what is logged.
type lines struct {
	mu sync.Mutex
	bytes.Buffer
}

func (l *lines) Write(b []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.Buffer.Write(b)
}

// TestWhoIsTurnedAway: each refusal of a coordinator is counted by its reason, said to a supervisor whom it
// concerns, and logged once, however many there are.
func TestWhoIsTurnedAway(t *testing.T) {
	var log lines
	c := testCoordinator(t, slog.New(slog.NewTextHandler(&log, nil)))
	good := Report{Protocol: protocol, Seq: 1, Job: "j", Node: "n1", Holder: "a", Boot: "b", Local: 1}
	but := func(f func(*Report)) Report {
		r := good
		f(&r)
		return r
	}
	// connect has somebody connect, whose certificate is of node n1.
	connect := func() (conn net.Conn, gone chan struct{}) {
		here, there := net.Pipe()
		gone = make(chan struct{})
		go func() {
			defer close(gone)
			c.attend(t.Context(), there, func(node string) error {
				if node != "n1" {
					return errors.New("the certificate is n1's")
				}
				return nil
			})
		}()
		t.Cleanup(func() { here.Close(); <-gone })
		return here, gone
	}
	real, _ := connect()
	if err := writeMessage(real, good); err != nil {
		t.Fatal(err)
	}
	var o Order
	c.change(func(g *group, now time.Time) {}) // as run does: the books are written
	if err := readMessage(real, &o); err != nil || o.Kind != orderWait {
		t.Fatalf("%+v, %v", o, err)
	}
	const times = 3
	for _, x := range []struct {
		why  RefusalReason
		say  any
		told string
	}{
		{RefusedMessage, but(func(r *Report) { r.Protocol++ }), "run the same lockstep on all hosts"},
		{RefusedMessage, but(func(r *Report) { r.Node = "../n1" }), "node name"},
		{RefusedMessage, but(func(r *Report) { r.Local = maxLocal + 1 }), "ranks a host"},
		{RefusedMessage, but(func(r *Report) { r.Meet = map[string]string{"LD_PRELOAD": "x"} }), "meeting place"},
		{RefusedJob, but(func(r *Report) { r.Job = "other" }), "it is of job"},
		{RefusedJob, but(func(r *Report) { r.Local = 2 }), "the same --ranks and --hosts"},
		{RefusedCertificate, but(func(r *Report) { r.Node = "n2" }), "the certificate is n1's"},
		{RefusedName, but(func(r *Report) { r.Holder = "c" }), "a name of its own by --node"},
		{RefusedName, but(func(r *Report) { r.Holder, r.Boot = "c", "d" }), ""}, // it may be let in later
		{RefusedMessage, []byte("GET / HTTP/1.1\r\n\r\n"), ""},
		{RefusedMessage, append(binary.BigEndian.AppendUint32(nil, 3), "{]}"...), ""},
	} {
		for range times {
			before := c.stats().Refused
			conn, gone := connect()
			if b, raw := x.say.([]byte); raw {
				_, _ = conn.Write(b)
			} else if err := writeMessage(conn, x.say); err != nil {
				t.Fatal(err)
			}
			var o Order
			err := readMessage(conn, &o)
			if x.told == "" && err == nil || x.told != "" && (err != nil || o.Kind != orderRefuse || !strings.Contains(o.Why, x.told)) {
				t.Errorf("%s, %+v: answered %+v, %v", x.why, x.say, o, err)
			}
			<-gone
			for _, why := range RefusalReasons() {
				want := before[why]
				if why == x.why {
					want++
				}
				if n := c.stats().Refused[why]; n != want {
					t.Errorf("%s, %+v: %d refused as %s, want %d", x.why, x.say, n, why, want)
				}
			}
		}
	}
	s := c.stats()
	if s.Joined != 1 || s.Connections != 1 || s.Hosts[HostStandby] != 1 || s.Needed != 2 || s.Attempt != -1 || s.Unwritten != "" {
		t.Errorf("%+v", s)
	}
	log.mu.Lock()
	defer log.mu.Unlock()
	if n := strings.Count(log.String(), "refused a host"); n == 0 || n > 5*times { // one in ten seconds, on a machine that is as slow as can be
		t.Errorf("%d lines about refusals:\n%s", n, log.String())
	}
}

// TestStatsWaitForNobody: who asks while the disk does not answer is told of that.
func TestStatsWaitForNobody(t *testing.T) {
	c := testCoordinator(t, slog.New(slog.DiscardHandler))
	c.mu.Lock()
	defer c.mu.Unlock()
	if s := c.stats(); s.Unwritten != "" || s.Attempt != -1 {
		t.Errorf("%+v", s)
	}
	c.writing.Store(time.Now().Add(-time.Minute).UnixNano())
	if s := c.stats(); !strings.Contains(s.Unwritten, "has not answered for 1m") {
		t.Errorf("%+v", s)
	}
}
