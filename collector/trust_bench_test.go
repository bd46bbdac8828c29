package collector_test

import (
	"context"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/prometheus/procfs"
	"google.golang.org/grpc"

	"github.com/lockstep-ccl/lockstep/collector/master"
	"github.com/lockstep-ccl/lockstep/collector/wire"
	"github.com/lockstep-ccl/lockstep/collector/wire/wiretest"
	"github.com/lockstep-ccl/lockstep/diagnosis"
	"github.com/lockstep-ccl/lockstep/record"
)

// BenchmarkTrust is what authentication costs: an agent process that follows 8 ranks at
// 4,000 collectives a second, without (a master that lets in whoever comes), by the owners
// of the sockets, and with mutual TLS. cores is the agent's; report is from a rank's mark
// to the master's snapshot, polls, intervals and passes of 100 ms included; connect is a
// connection with its handshake to the first ack.
func BenchmarkTrust(b *testing.B) {
	for _, mode := range []string{"insecure", "loopback", "mtls"} {
		b.Run(mode, func(b *testing.B) { benchmarkTrust(b, mode) })
	}
}

func benchmarkTrust(b *testing.B, mode string) {
	o := master.Options{Insecure: mode == "insecure"}
	var own *wire.TLS
	var env []string
	if mode == "mtls" {
		certs := wiretest.NewAuthority(b)
		m, a := certs.Master("job"), certs.Agent("node")
		second := certs.Agent("second")
		o.TLS, own = &m, &second
		env = []string{"LOCKSTEP_TEST_CERT=" + a.CertFile, "LOCKSTEP_TEST_KEY=" + a.KeyFile, "LOCKSTEP_TEST_CA=" + a.CAFile}
	}
	m, _ := startMaster(b, o)
	dir := b.TempDir()
	const n, perSecond = 8, 4_000
	r := newRanks(b, dir, n, 0)
	cmd := spawn(b, "agent", append(env, "LOCKSTEP_TEST_DIR="+dir, "LOCKSTEP_TEST_MASTER="+m.Addr().String())...)
	eventually(b, "the agent is there", func() bool { return m.Snapshot().Ranks[diagnosis.ProcRunning] == n })
	pfs, err := procfs.NewDefaultFS()
	if err != nil {
		b.Fatal(err)
	}
	cpu := func() float64 {
		p, err := pfs.Proc(cmd.Process.Pid)
		if err != nil {
			b.Fatal(err)
		}
		st, err := p.Stat()
		if err != nil {
			b.Fatal(err)
		}
		return st.CPUTime()
	}
	var took []time.Duration
	done, step, marked := 0, uint64(0), time.Time{}
	work := func(d time.Duration) {
		begin := time.Now()
		for did := 0; time.Since(begin) < d; time.Sleep(time.Millisecond) {
			for want := int(time.Since(begin).Seconds() * perSecond); did < want; did++ {
				i, seq := done%n, uint64(done/n)+1
				r.enter(i, seq)
				r.leave(i, seq, time.Millisecond)
				done++
			}
			if m.Snapshot().Step >= step {
				if !marked.IsZero() {
					took = append(took, time.Since(marked))
				}
				step++
				marked = time.Now()
				r.w[0].Append(&record.Record{Kind: record.KindMark, Mono: record.Now(), Code: uint8(record.MarkStep), Value: step})
			}
		}
	}
	work(2 * time.Second)
	took = nil
	before, begin := cpu(), time.Now()
	for b.Loop() {
		work(5 * time.Second)
	}
	b.ReportMetric((cpu()-before)/time.Since(begin).Seconds(), "cores")
	b.ReportMetric(median(took), "report-ms")
	var connects []time.Duration
	for range 21 {
		connects = append(connects, connect(b, m.Addr().String(), own))
	}
	b.ReportMetric(median(connects), "connect-ms")
	b.ReportMetric(0, "ns/op")
}

func median(d []time.Duration) float64 {
	slices.Sort(d)
	return float64(d[len(d)/2].Microseconds()) / 1e3
}

// connect opens a stream to its first ack, as an agent does.
func connect(b *testing.B, address string, own *wire.TLS) time.Duration {
	b.Helper()
	creds, err := own.MasterOf("job")
	if err != nil {
		b.Fatal(err)
	}
	begin := time.Now()
	conn, err := grpc.NewClient(address, grpc.WithTransportCredentials(creds))
	if err != nil {
		b.Fatal(err)
	}
	defer conn.Close()
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	c, err := wire.NewCollectorClient(conn).Progress(ctx)
	if err == nil {
		err = c.Send(&wire.AgentMessage{Body: &wire.AgentMessage_Hello{Hello: &wire.Hello{ProtocolVersion: wire.ProtocolVersion, Job: "job", Node: "second", Instance: 1, BootId: "b"}}})
	}
	if err == nil {
		_, err = c.Recv()
	}
	if err != nil {
		b.Fatal(fmt.Errorf("connect: %w", err))
	}
	return time.Since(begin)
}
