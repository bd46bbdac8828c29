package collector_test

import (
	"fmt"
	"testing"
	"time"

	"github.com/prometheus/procfs"

	"github.com/lockstep-ccl/lockstep/collector/master"
	"github.com/lockstep-ccl/lockstep/diagnosis"
	"github.com/lockstep-ccl/lockstep/record"
)

// BenchmarkAgent has an agent of its own process follow 8 ranks that together
// do 50,000 collectives a second on 4 communicators, and measures that process.
func BenchmarkAgent(b *testing.B) {
	dir := b.TempDir()
	m, _ := startMaster(b, master.Options{})
	const n, perSecond = 8, 50_000
	r := newRanks(b, dir, n, 0)
	for i := range r.w {
		for c := range 3 {
			k, _ := r.w[i].AddComm(record.CommEntry{ID: uint64(c), Name: fmt.Sprint("c", c), Rank: int32(i), Size: n, State: record.CommJoined})
			for peer := range n - 1 {
				r.w[i].AddConn(record.ConnEntry{Comm: k.Index(), Peer: int32(peer), Transport: record.TransportTCP, Name: "tcp 127.0.0.1:4000->127.0.0.1:5000"})
			}
		}
	}
	cmd := spawn(b, "agent", "LOCKSTEP_TEST_DIR="+dir, "LOCKSTEP_TEST_MASTER="+m.Addr().String())
	eventually(b, "the agent is there", func() bool { return m.Snapshot().Ranks[diagnosis.ProcRunning] == n })
	pfs, err := procfs.NewDefaultFS()
	if err != nil {
		b.Fatal(err)
	}
	proc, err := pfs.Proc(cmd.Process.Pid)
	if err != nil {
		b.Fatal(err)
	}
	usage := func() (cpu float64, rss int) {
		st, err := proc.Stat()
		if err != nil {
			b.Fatal(err)
		}
		return st.CPUTime(), st.ResidentMemory()
	}
	done := 0
	work := func(d time.Duration) {
		begin := time.Now()
		for did := 0; time.Since(begin) < d; time.Sleep(time.Millisecond) {
			for want := int(time.Since(begin).Seconds() * perSecond); did < want; did++ {
				i := done % n
				seq := uint64(done/n) + 1
				r.enter(i, seq)
				r.leave(i, seq, time.Millisecond)
				done++
			}
		}
	}
	work(2 * time.Second)
	cpu, _ := usage()
	begin, before := time.Now(), done
	for b.Loop() {
		work(3 * time.Second)
	}
	after, rss := usage()
	took := time.Since(begin).Seconds()
	b.ReportMetric((after-cpu)/took, "cores")
	b.ReportMetric(float64(rss)/(1<<20), "MiB")
	b.ReportMetric(float64(done-before)/took, "collectives/s")
	b.ReportMetric(0, "ns/op")
}
