package ras

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"runtime/debug"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"go.uber.org/goleak"

	"github.com/lockstep-ccl/lockstep/collector"
	"github.com/lockstep-ccl/lockstep/collector/source"
	"github.com/lockstep-ccl/lockstep/diagnosis"
	"github.com/lockstep-ccl/lockstep/record"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// answers are of each version that differs.
var answers = map[string]*collector.RAS{
	"json-2.29": {Version: "2.29.1", Comms: []collector.RASComm{{ID: 0xae94423cfbb2ef4a, Size: 2, Missing: []collector.RASRank{{Rank: 1, PID: 1524345}}}}},
	"text-2.24-mismatch": {Comms: []collector.RASComm{{ID: 0x27a079b828ff1a75, Behind: []collector.RASBehind{
		{Rank: 0, Launched: 6649, Most: 6650}, {Rank: 2, Launched: 6649, Most: 6650}, {Rank: 3, Launched: 6649, Most: 6650},
		{Rank: 4, Launched: 6649, Most: 6650}, {Rank: 5, Launched: 6649, Most: 6650}, {Rank: 7, Launched: 6649, Most: 6650},
	}}}},
	"text-2.24-incomplete": {Comms: []collector.RASComm{{ID: 0xcf264af53edbe986, Missing: []collector.RASRank{{Rank: 21}}}}},
	"text-2.24-status":     {Comms: []collector.RASComm{{ID: 0x9e17999afaa87dbb}}},
	"text-2.28-dead": {Version: "2.28.3", Comms: []collector.RASComm{{
		ID: 0x00fa7e12cc0192ab, Missing: []collector.RASRank{{Rank: 2, PID: 4102, Dead: true}},
		Behind: []collector.RASBehind{{Rank: 3, Coll: "AllReduce", Launched: 100, Most: 101}, {Rank: 0, Coll: "Broadcast", Launched: 0, Most: 7}},
	}}},
	"text-2.28-healthy": {Version: "2.28.9"},
}

func sample(t testing.TB, name string) []byte {
	b, err := os.ReadFile(filepath.Join("testdata", name+".txt"))
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func TestParse(t *testing.T) {
	for name, want := range answers {
		b := sample(t, name)
		got, err := Parse(b)
		if err != nil {
			t.Errorf("%s: %v", name, err)
			continue
		}
		if d := cmp.Diff(want, got); d != "" {
			t.Errorf("%s: %s", name, d)
		}
		// A telnet's line ends are the same, and an answer cut short is no error once it has begun.
		if crlf, err := Parse(bytes.ReplaceAll(b, []byte("\n"), []byte("\r\n"))); err != nil || cmp.Diff(want, crlf) != "" && !strings.HasPrefix(name, "json") {
			t.Errorf("%s with CRLF: %+v, %v", name, crlf, err)
		}
		for _, n := range []int{len(b) / 2, len(b) - 10} {
			if _, err := Parse(b[:n]); err != nil {
				t.Errorf("%s, its first %d bytes: %v", name, n, err)
			}
		}
	}
}

func TestParseJSONCounts(t *testing.T) {
	var ranks []string
	for r := range 40 {
		n := 100
		if r%2 == 1 {
			n = 99
		}
		ranks = append(ranks, fmt.Sprintf(`{"rank": %d, "host": "x", "collective_counts": {"AllReduce": %d, "Reduce": 5}, "new": [1, {"a": null}]}`, r, n))
	}
	got, err := Parse([]byte(`{"unknown": {"x": [1, 2]}, "communicators": [{"hash": "zz"}, {"hash": "0x10", "size": 41, "ranks": [` + strings.Join(ranks, ",") +
		`], "missing_ranks": [{"rank": 40, "status": {"unresponsive": false, "considered_dead": false}}]}]}`))
	if err != nil {
		t.Fatal(err)
	}
	c := got.Comms[0]
	if len(got.Comms) != 1 || len(c.Behind) != collector.MaxRASRanks || !c.More || c.Behind[1] != (collector.RASBehind{Rank: 3, Coll: "AllReduce", Launched: 99, Most: 100}) || len(c.Missing) != 0 {
		t.Errorf("%+v", got)
	}
}

// Of a communicator of a large job only the first ranks fit into what is read: they count.
func TestParseJSONCutShort(t *testing.T) {
	ranks := strings.Repeat(`{"rank": 1, "collective_counts": {"AllReduce": 5}}, `, 3)
	got, err := Parse([]byte(`{"nccl_version": "2.29", "communicators": [{"hash": "0x10", "size": 9, "ranks": [{"rank": 0, "collective_counts": {"AllReduce": 6}}, ` + ranks + `{"rank": 7, "coll`))
	if err != nil {
		t.Fatal(err)
	}
	if len(got.Comms) != 1 || got.Comms[0].ID != 0x10 || got.Comms[0].Size != 9 || len(got.Comms[0].Behind) != 3 {
		t.Errorf("%+v", got)
	}
}

// The largest answer takes little more memory than itself, whatever is in it.
func TestParseInBoundedMemory(t *testing.T) {
	const begin = `{"communicators": [{"hash": "0x1", "ranks": [{`
	for name, s := range map[string][3]string{
		"missing ranks":  {`{"communicators": [{"hash": "0x1", "missing_ranks": [{}`, `,{}`, `]}]}`},
		"ranks":          {begin + `}`, `,{}`, `]}]}`},
		"communicators":  {`{"communicators": [{}`, `,{}`, `]}`},
		"counts":         {begin + `"collective_counts": {"": 1`, `,"":1`, `}}]}]}`},
		"kinds of calls": {begin + `"collective_counts": {"": 1`, `,"%07x":1`, `}}]}]}`},
		"lines":          {"NCCL version 2.28\n", "#0-0 (1) MISMATCH\n", ""},
	} {
		var b bytes.Buffer
		for i := 0; b.Len() < maxAnswer/2; i++ {
			if i == 0 {
				b.WriteString(s[0])
			}
			if strings.Contains(s[1], "%") {
				fmt.Fprintf(&b, s[1], i)
			} else {
				b.WriteString(s[1])
			}
		}
		b.WriteString(s[2])
		var before runtime.MemStats
		runtime.GC()
		runtime.ReadMemStats(&before)
		if peak := peakOf(func() {
			if _, err := Parse(b.Bytes()); err != nil {
				t.Errorf("%s: %v", name, err)
			}
		}); peak > before.HeapAlloc+maxAnswer {
			t.Errorf("%s: %d MiB for an answer of %d", name, (peak-before.HeapAlloc)>>20, b.Len()>>20)
		}
	}
}

// peakOf is the largest heap that was seen while f ran, without much garbage.
func peakOf(f func()) (peak uint64) {
	defer debug.SetGCPercent(debug.SetGCPercent(10))
	done := make(chan struct{})
	go func() {
		defer close(done)
		f()
	}()
	for {
		var m runtime.MemStats
		runtime.ReadMemStats(&m)
		peak = max(peak, m.HeapAlloc)
		select {
		case <-done:
			return peak
		case <-time.After(time.Millisecond):
		}
	}
}

func TestNoAnswers(t *testing.T) {
	for _, s := range []string{"", " \n", "HTTP/1.1 400 Bad Request\r\n", "{", `{"a": 1}`, `{"communicators": 7}`, "ERROR: Unknown command", "\x00\x01"} {
		if got, err := Parse([]byte(s)); !errors.Is(err, ErrAnswer) {
			t.Errorf("%q: %+v, %v", s, got, err)
		}
	}
}

func FuzzParse(f *testing.F) {
	for name := range answers {
		f.Add(sample(f, name))
	}
	f.Add([]byte("#0-0 (1) INCOMPLETE\n  The missing ranks: 0-99999999,3, -4\n"))
	f.Fuzz(func(t *testing.T, b []byte) {
		a, err := Parse(b)
		if err != nil {
			return
		}
		if len(a.Comms) > collector.MaxRASComms || len(a.Version) > 32 {
			t.Fatalf("%+v", a)
		}
		for _, c := range a.Comms {
			if len(c.Missing) > collector.MaxRASRanks || len(c.Behind) > collector.MaxRASRanks {
				t.Fatalf("%+v", c)
			}
			for _, x := range c.Behind {
				if x.Rank < 0 || x.Launched >= x.Most {
					t.Fatalf("%+v", x)
				}
			}
		}
	})
}

// server speaks RAS's protocol as one version does.
type server struct {
	net.Listener
	json   bool // knows SET FORMAT
	hello  string
	status func(c net.Conn, json bool)
	asked  atomic.Int32
}

func serve(t *testing.T, s *server) string {
	t.Helper()
	var err error
	if s.Listener, err = net.Listen("tcp", "127.0.0.1:0"); err != nil {
		t.Fatal(err)
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		for {
			c, err := s.Accept()
			if err != nil {
				return
			}
			s.talk(c)
			c.Close()
		}
	}()
	t.Cleanup(func() { s.Close(); <-done })
	return s.Addr().String()
}

func (s *server) talk(c net.Conn) {
	asJSON := false
	for in := bufio.NewScanner(c); in.Scan(); {
		switch line := strings.ToLower(in.Text()); {
		case strings.HasPrefix(line, "client protocol "):
			fmt.Fprintln(c, s.hello)
		case strings.HasPrefix(line, "timeout "):
			fmt.Fprintln(c, "OK")
		case line == "set format json" && s.json:
			asJSON = true
			fmt.Fprintln(c, "OK")
		case line == "verbose status":
			s.asked.Add(1)
			s.status(c, asJSON)
			return
		default:
			fmt.Fprintf(c, "ERROR: Unknown command %s\n", in.Text())
		}
	}
}

func TestAsk(t *testing.T) {
	write := func(name string) func(net.Conn, bool) {
		return func(c net.Conn, asJSON bool) {
			if asJSON != strings.HasPrefix(name, "json") {
				t.Errorf("%s: JSON %v", name, asJSON)
			}
			c.Write(sample(t, name))
		}
	}
	for _, name := range []string{"json-2.29", "text-2.24-incomplete", "text-2.28-dead"} {
		addr := serve(t, &server{json: strings.HasPrefix(name, "json"), hello: "SERVER PROTOCOL 2", status: write(name)})
		got, err := Ask(t.Context(), addr, time.Second)
		if err != nil || cmp.Diff(answers[name], got) != "" {
			t.Errorf("%s: %+v, %v", name, got, err)
		}
	}
}

// Who is not RAS, says nothing, or says too much costs bounded time and memory.
func TestAskStrangers(t *testing.T) {
	for _, s := range []*server{
		{hello: "HTTP/1.1 400 Bad Request"},
		{hello: strings.Repeat("x", 1<<16)},
		{hello: "SERVER PROTOCOL 99", status: func(c net.Conn, _ bool) {}},
		{hello: "SERVER PROTOCOL 99", status: func(c net.Conn, _ bool) { fmt.Fprint(c, strings.Repeat("x", 1<<20)) }},
	} {
		if got, err := Ask(t.Context(), serve(t, s), time.Second); err == nil {
			t.Errorf("%.30q: %+v", s.hello, got)
		}
	}
	stop := make(chan struct{})
	addr := serve(t, &server{hello: "SERVER PROTOCOL 2", status: func(net.Conn, bool) { <-stop }})
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if _, err := Ask(ctx, addr, time.Second); err == nil {
		t.Error("an answer of somebody who says nothing")
	}
	close(stop)
}

// The source asks while a rank is held up, and not otherwise.
func TestSource(t *testing.T) {
	s := &server{json: true, hello: "SERVER PROTOCOL 2", status: func(c net.Conn, _ bool) { c.Write(sample(t, "json-2.29")) }}
	src := New(Options{Addr: serve(t, s)})
	defer src.Close()
	v := &source.View{Now: 1}
	p := &source.Process{Header: record.Header{Identity: record.Identity{Rank: 3, WorldSize: 100}}, State: diagnosis.ProcRunning}
	p.Comms = []record.CommStatus{{Started: 5, StartedAt: 1, Finished: 5}}
	v.Processes = []*source.Process{p}
	pass := func(d time.Duration) error {
		v.Now += int64(d)
		return src.Update(v)
	}
	for range 3 {
		if err := pass(time.Minute); !errors.Is(err, source.ErrNoData) {
			t.Fatal(err)
		}
	}
	p.Comms[0].Started, p.Comms[0].StartedAt = 6, v.Now
	_ = pass(time.Second)
	p.Rank = askers
	_ = pass(time.Hour)
	if s.asked.Load() != 0 {
		t.Fatal("it asks without need")
	}
	p.Rank = 3
	for deadline := time.Now().Add(time.Minute); v.RAS == nil; time.Sleep(time.Millisecond) {
		if err := pass(0); err != nil && !errors.Is(err, source.ErrNoData) {
			t.Fatal(err)
		}
		if time.Now().After(deadline) {
			t.Fatal("no answer")
		}
	}
	if v.RAS.Comms[0].ID != 0xae94423cfbb2ef4a || v.RAS.At != v.Now || s.asked.Load() != 1 {
		t.Errorf("%+v, asked %d times", v.RAS, s.asked.Load())
	}
	p.Comms[0].Finished = 6
	_ = pass(2 * time.Minute)
	if v.RAS != nil {
		t.Error("an old answer is kept")
	}
}

func TestSourceWithoutRAS(t *testing.T) {
	// A socket that does not listen keeps the port from others, and refuses who connects.
	fd, err := syscall.Socket(syscall.AF_INET, syscall.SOCK_STREAM|syscall.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer syscall.Close(fd)
	if err := syscall.Bind(fd, &syscall.SockaddrInet4{Addr: [4]byte{127, 0, 0, 1}}); err != nil {
		t.Fatal(err)
	}
	at, err := syscall.Getsockname(fd)
	if err != nil {
		t.Fatal(err)
	}
	src := New(Options{Addr: fmt.Sprint("127.0.0.1:", at.(*syscall.SockaddrInet4).Port)})
	p := &source.Process{State: diagnosis.ProcRunning}
	p.Comms = []record.CommStatus{{Started: 6, StartedAt: 1}}
	v := &source.View{Now: int64(time.Hour), Processes: []*source.Process{p}}
	for deadline := time.Now().Add(time.Minute); src.asked == 0 || src.asking; time.Sleep(time.Millisecond) {
		if err := src.Update(v); !errors.Is(err, source.ErrNoData) {
			t.Fatal(err)
		}
		if time.Now().After(deadline) {
			t.Fatal("it asks for ever")
		}
	}
	if err := src.Close(); err != nil {
		t.Error(err)
	}
}
