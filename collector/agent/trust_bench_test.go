package agent

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"os"
	"os/exec"
	"slices"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/proto"

	"github.com/lockstep-ccl/lockstep/collector/master"
	"github.com/lockstep-ccl/lockstep/collector/wire"
	"github.com/lockstep-ccl/lockstep/collector/wire/wiretest"
	"github.com/lockstep-ccl/lockstep/diagnosis"
	"github.com/lockstep-ccl/lockstep/record"
)

// benchEnv has this program be a master, or an agent's stream, of BenchmarkReport.
const benchEnv = "AGENT_TEST_BENCH"

// A round is so much of the streams of so many nodes, which report as often as agents do. A master
// acknowledges every third report or so.
const (
	benchNodes  = 16
	roundTicks  = 20
	reportEvery = 100 * time.Millisecond
)

// round is what came of one.
type round struct {
	CPU   int64   // ns, of the process; a master's since it began
	Sent  int     // reports
	Bytes int     // of one of them
	Took  []int64 // ns, of those that were acknowledged, from sending to that
	Addr  string  // a master's
}

// benchMode is one way of authentication: a master, a process with the streams, and what came of it.
type benchMode struct {
	name          string
	master, agent *child
	took          []int64
	cpus          [2][]float64 // ns a report, the agent's and the master's
	bytes         int
}

func (m *benchMode) round(b *testing.B) {
	before := m.master.answer(b)
	r := m.agent.answer(b)
	after := m.master.answer(b)
	m.took, m.bytes = append(m.took, r.Took...), r.Bytes
	m.cpus[0] = append(m.cpus[0], float64(r.CPU)/float64(max(r.Sent, 1)))
	m.cpus[1] = append(m.cpus[1], float64(after.CPU-before.CPU)/float64(max(r.Sent, 1)))
}

// BenchmarkReport is what authentication costs a report: agents' streams and a master, in
// processes of their own, on loopback, without authentication (plain), with the owner of the socket
// asked of the kernel (loopback), and with mutual TLS (mtls). All run at the same time, so what else
// the machine does is the same for each. A report has what 8 ranks at 500 collectives a second tell in 100 ms.
func BenchmarkReport(b *testing.B) {
	certs := wiretest.NewAuthority(b)
	of := certs.Master("job")
	modes := []*benchMode{{name: "plain"}, {name: "loopback"}, {name: "mtls"}}
	for _, m := range modes {
		masters, agents := []string{"INSECURE=" + fmt.Sprint(m.name == "plain")}, []string{"DIR=" + b.TempDir()}
		if m.name == "mtls" {
			masters = append(masters, "CERT="+of.CertFile, "KEY="+of.KeyFile, "CA="+of.CAFile)
			for i := range benchNodes {
				a := certs.Agent(benchNode(i))
				agents = append(agents, fmt.Sprint("CERT", i, "=", a.CertFile), fmt.Sprint("KEY", i, "=", a.KeyFile), fmt.Sprint("CA", i, "=", a.CAFile))
			}
		}
		m.master = startChild(b, "master", masters...)
		m.agent = startChild(b, "agent", append(agents, "MASTER="+m.master.answer(b).Addr)...)
		m.agent.answer(b) // all is warm
	}
	for b.Loop() {
		var wg sync.WaitGroup
		for _, m := range modes {
			wg.Go(func() { m.round(b) })
		}
		wg.Wait()
	}
	b.Logf("reports of %d bytes, µs: sent to acknowledged median, 99 %% of %d; CPU a report, agent, master: medians of rounds", modes[0].bytes, len(modes[0].took))
	for _, m := range modes {
		b.Logf("%-8s %6.0f %6.0f   %4.0f %4.0f", m.name, us(m.took, .5), us(m.took, .99), us(m.cpus[0], .5), us(m.cpus[1], .5))
	}
	plain, mtls := modes[0], modes[2]
	b.ReportMetric(us(mtls.took, .5)/us(plain.took, .5), "latency-ratio")
	b.ReportMetric(us(mtls.cpus[0], .5)/us(plain.cpus[0], .5), "agent-CPU-ratio")
	b.ReportMetric(us(mtls.cpus[1], .5)/us(plain.cpus[1], .5), "master-CPU-ratio")
	b.ReportMetric(0, "ns/op")
}

func benchNode(i int) string { return fmt.Sprint("node", i) }

// us is a quantile of what is in ns.
func us[T int64 | float64](all []T, share float64) float64 {
	if len(all) == 0 {
		return 0
	}
	slices.Sort(all)
	return float64(all[int(share*float64(len(all)-1))]) / 1e3
}

// child is a process that answers each line with one.
type child struct {
	in  io.Writer
	out *bufio.Reader
}

func startChild(b *testing.B, as string, env ...string) *child {
	cmd := exec.Command(os.Args[0], "-test.run=^$")
	cmd.Env = append(os.Environ(), benchEnv+"="+as)
	for _, e := range env {
		cmd.Env = append(cmd.Env, benchEnv+"_"+e)
	}
	cmd.Stderr = os.Stderr
	in, err := cmd.StdinPipe()
	if err != nil {
		b.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err == nil {
		err = cmd.Start()
	}
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	})
	return &child{in, bufio.NewReader(out)}
}

// answer is a child's, to one line.
func (c *child) answer(b *testing.B) (r round) {
	b.Helper()
	fmt.Fprintln(c.in)
	line, err := c.out.ReadBytes('\n')
	if err == nil {
		err = json.Unmarshal(line, &r)
	}
	if err != nil {
		b.Errorf("a process of the benchmark has ended: %v", err)
	}
	return r
}

// answers is a child's end: it answers each line of standard input.
func answers(f func() round) {
	for in := bufio.NewScanner(os.Stdin); in.Scan(); {
		b, err := json.Marshal(f())
		if err != nil {
			panic(err)
		}
		fmt.Println(string(b))
	}
	os.Exit(0)
}

func cpuTime() int64 {
	var u unix.Rusage
	_ = unix.Getrusage(unix.RUSAGE_SELF, &u) // it fails for no valid argument
	return u.Utime.Nano() + u.Stime.Nano()
}

// benchMain is what a child does.
func benchMain(as string) {
	get := func(name string, of ...any) string { return os.Getenv(benchEnv + "_" + name + fmt.Sprint(of...)) }
	certs := func(of ...any) *wire.TLS {
		if get("CERT", of...) == "" {
			return nil
		}
		return &wire.TLS{CertFile: get("CERT", of...), KeyFile: get("KEY", of...), CAFile: get("CA", of...)}
	}
	quiet := slog.New(slog.DiscardHandler)
	if as == "master" {
		// Its own passes would cost more than the reports, and not be theirs.
		m, err := master.New(master.Options{Job: "job", Listen: "127.0.0.1:0", TLS: certs(), Insecure: get("INSECURE") == "true", Interval: 10 * time.Second, Patience: time.Hour, Log: quiet})
		if err != nil {
			panic(err)
		}
		go m.Run(context.Background())
		answers(func() round { return round{CPU: cpuTime(), Addr: m.Addr().String()} })
	}
	var nodes []*benchStream
	for i := range benchNodes {
		a, err := New(Options{Node: benchNode(i), Dir: get("DIR"), Master: func(string) string { return get("MASTER") }, TLS: certs(i), Log: quiet})
		if err != nil {
			panic(err)
		}
		s := &benchStream{stream: a.newStream("job"), node: i, began: time.Now().UnixNano()}
		s.start(context.Background())
		nodes = append(nodes, s)
	}
	answers(func() round {
		before := cpuTime()
		var all round
		var mu sync.Mutex
		var wg sync.WaitGroup
		for _, s := range nodes {
			wg.Go(func() {
				r := s.round()
				mu.Lock()
				defer mu.Unlock()
				all.Sent, all.Bytes, all.Took = all.Sent+r.Sent, r.Bytes, append(all.Took, r.Took...)
			})
		}
		wg.Wait()
		all.CPU = cpuTime() - before
		return all
	})
}

// benchStream is a node's stream, with reports that are made up.
type benchStream struct {
	*stream
	node      int
	began     int64
	sequence  uint64
	last      report // and before it was sent: the time, what heard and sent were
	lastAt    int64
	lastHeard int64
	lastSent  uint64
	counted   int64 // the last of which there is a sample
}

func (s *benchStream) round() (r round) {
	time.Sleep(rand.N(reportEvery)) // nodes report at different times
	tick := time.NewTicker(reportEvery)
	defer tick.Stop()
	for range roundTicks {
		<-tick.C
		at, heard, sent := record.Now(), s.heard.Load(), s.sent.Load()
		if s.last.Report != nil && sent != s.lastSent { // else the master asked for everything again meanwhile
			r.Sent++
			r.Bytes = proto.Size(s.last.Report)
			// A report says when the last ack came before it, and heard when what that acknowledges was sent.
			came := s.last.Echo.GetMonoReceivedNs()
			if was := s.lastHeard; was != s.counted && came < s.lastAt && came > was {
				if s.counted != 0 {
					r.Took = append(r.Took, came-was)
				}
				s.counted = was
			}
		}
		if s.last = (report{}); s.ready() {
			s.last = report{s.epoch.Load(), benchReport(s.node, s.began, s.sequence)}
			s.lastAt, s.lastHeard, s.lastSent = at, heard, sent
			s.reports <- s.last
			s.sequence += 50
		}
	}
	return r
}

// benchReport is of 8 ranks of a node, which are at a collective.
func benchReport(node int, created int64, sequence uint64) *wire.Report {
	const ranks = 8
	now, comm := record.Now(), uint64(7+node)
	r := &wire.Report{}
	for i := range int32(ranks) {
		world := int32(node*ranks) + i
		r.Ranks = append(r.Ranks, &wire.Rank{WorldRank: world, WorldSize: ranks * benchNodes, Pid: 100 + i, CreatedUnixNs: created, Proc: uint32(diagnosis.ProcRunning), Cpu: .5, Step: sequence / 50})
		r.Members = append(r.Members, &wire.Member{
			CommId: comm, CommName: "dp", WorldRank: world, Rank: i, Size: ranks, State: uint32(record.CommJoined),
			Coll: uint32(record.AllReduce), Peer: -1, Bytes: 1 << 20, Enqueued: sequence + 50, Started: sequence + 50, Finished: sequence + 49,
			MonoEnqueuedNs: now, MonoStartedNs: now, MonoFinishedNs: now - 1e6, Ops: sequence + 49, OwnNs: sequence * 1e5, WaitNs: sequence * 1e5, TransferNs: sequence * 1e6, MaxOwnNs: 1e6,
		})
		r.Connections = append(r.Connections, &wire.Connection{
			CommId: comm, Rank: i, Peer: (i + 1) % ranks, Transport: uint32(record.TransportTCP), Name: "tcp", Posted: sequence * 1e6, Completed: sequence * 1e6, Received: sequence * 1e6, MonoPostedNs: now, BytesPerSecond: 1e9,
		})
		for k := range uint64(6) { // of which an agent samples so many
			r.Arrivals = append(r.Arrivals, &wire.Arrival{CommId: comm, Seq: sequence + 1 + 8*k, Coll: uint32(record.AllReduce), Rank: i, MonoStartedNs: now - 2e6, MonoEndedNs: now - 1e6})
		}
	}
	return r
}
