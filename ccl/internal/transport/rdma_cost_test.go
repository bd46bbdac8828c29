package transport

import (
	"fmt"
	"math"
	"runtime"
	"sync"
	"testing"
	"time"

	"github.com/lockstep-ccl/lockstep/record"
	"golang.org/x/sys/unix"
)

// cpuTime is what a clock of the kernel's says that this thread, or the process, has run, in ns.
func cpuTime(tb testing.TB, clock int32) int64 {
	var ts unix.Timespec
	if err := unix.ClockGettime(clock, &ts); err != nil {
		tb.Fatal(err)
	}
	return ts.Nano()
}

// watched turns the monitors of a link off and on; nothing is outstanding.
func (l *rdmaLink) watched(on bool) {
	l.conn.Lock()
	defer l.conn.Unlock()
	now := record.Now()
	for i := range l.meters {
		if p := &l.meters[i]; p.rec != nil {
			p.on = on
			p.flush(now, p.posted, p.completed, p.received)
			p.abandon(now)
		}
	}
}

// BenchmarkRDMAMonitorCost is what the monitor and the recorder cost of the same
// messages' CPU time, by turns without and with them; the least of all rounds of each.
// points are hundredths of one core that they take of what drives a port of 400 Gbit/s.
func BenchmarkRDMAMonitorCost(b *testing.B) {
	const port = 50e9 // bytes per second
	for _, size := range []int{8, 512, 4 << 10, 8 << 10, 16 << 10, 64 << 10, 128 << 10, 256 << 10, 1 << 20} {
		b.Run(fmt.Sprintf("%dB", size), func(b *testing.B) {
			pairOfLinks(b, true, func(from, to Link) {
				runtime.LockOSThread()
				defer runtime.UnlockOSThread()
				l, buf := from.(*rdmaLink), make([]byte, size)
				n := max(4, min(20_000, 20<<20/size))
				least := map[bool]float64{}
				for b.Loop() {
					for _, on := range []bool{false, true} {
						l.watched(on)
						began := cpuTime(b, unix.CLOCK_THREAD_CPUTIME_ID)
						for range n {
							if err := move(from, to, buf); err != nil {
								b.Fatal(err)
							}
						}
						took := float64(cpuTime(b, unix.CLOCK_THREAD_CPUTIME_ID)-began) / float64(n)
						if least[on] == 0 || took < least[on] {
							least[on] = took
						}
					}
				}
				extra := least[true] - least[false]
				b.ReportMetric(0, "ns/op")
				b.ReportMetric(least[false], "ns-without")
				b.ReportMetric(extra, "ns-more")
				b.ReportMetric(100*extra/least[false], "%-more")
				b.ReportMetric(100*extra*port/float64(size)/1e9, "points-of-a-core-at-400G")
			})
		})
	}
}

// BenchmarkRDMAMonitorAtLineRate is what monitor and recorder cost of one core when a port of
// 400 Gbit/s carries messages of one size: the calls that a connection makes at each post and completion,
// with the clock and the recorder that they always have, at the times of such a port. Bytes are
// not copied, for what copying costs varies by more than is measured. The least of all rounds.
func BenchmarkRDMAMonitorAtLineRate(b *testing.B) {
	for _, size := range []int{512, 4 << 10, 8 << 10, 16 << 10, 64 << 10, 128 << 10, 256 << 10, 1 << 20} {
		b.Run(fmt.Sprintf("%dB", size), func(b *testing.B) {
			pairOfLinks(b, true, func(from, _ Link) {
				runtime.LockOSThread()
				defer runtime.UnlockOSThread()
				l := from.(*rdmaLink)
				least := math.Inf(1)
				for b.Loop() {
					least = min(least, l.lineRate(size))
				}
				b.ReportMetric(0, "ns/op")
				b.ReportMetric(least, "ns/message")
				b.ReportMetric(100*least*lineRate/float64(size)/1e9, "points-of-a-core")
			})
		})
	}
}

const lineRate = 50e9 // bytes per second

// lineRate tells the link's first path of messages at the speed of a port, and returns what
// one took, ns.
func (l *rdmaLink) lineRate(size int) float64 {
	const (
		rounds = 400
		turn   = 1 << 20 // bytes from one wait for the port to the next
		lag    = 8       // messages outstanding, at least
	)
	l.conn.Lock()
	defer l.conn.Unlock()
	var clock int64 // what a look at it takes
	for i := range 1000 {
		at := record.Now()
		if d := record.Now() - at; i == 0 || d < clock {
			clock = d
		}
	}
	chunk := min(size, largestWrite)
	p := l.at(0, 0)
	posted, completed := p.posted-p.base, p.completed-p.base
	messages := max(turn/size, 1)
	var took int64
	began := record.Now()
	for r := range rounds {
		at := record.Now()
		for range messages {
			for n := 0; n < size; n += chunk {
				posted += uint64(chunk)
				l.Posted(0, 0, chunk, posted)
				if posted-completed > uint64(lag*chunk) {
					completed += uint64(chunk)
					l.Completed(0, 0, completed)
				}
			}
		}
		done := record.Now()
		took += done - at - clock
		for due := began + int64(float64(r+1)*float64(messages*size)/lineRate*1e9); done < due; {
			done = record.Now()
		}
	}
	l.Completed(0, 0, posted)
	return float64(took) / float64(rounds*messages)
}

// largestWrite of a connection, bytes.
const largestWrite = 256 << 10

// TestRDMAIdle: ranks that compute, and ranks that wait for one that does not answer,
// take no processor: nothing polls.
func TestRDMAIdle(t *testing.T) {
	const span = time.Second
	var used [2]int64 // by what the ranks did
	measure := func(what int) {
		began := cpuTime(t, unix.CLOCK_PROCESS_CPUTIME_ID)
		time.Sleep(span)
		used[what] = cpuTime(t, unix.CLOCK_PROCESS_CPUTIME_ID) - began
	}
	const ranks = 4
	var here sync.WaitGroup
	here.Add(ranks)
	computed, waited := make(chan struct{}), make(chan struct{})
	goroutines(t, overRDMA, ranks, nil, func(m *Mesh, rank, size int) error {
		if err := exchange(m, rank, size, 7, 5, 100<<10); err != nil {
			return err
		}
		here.Done()
		if rank == 0 {
			here.Wait()
			for m.Look() {
			}
			measure(0)
			close(computed)
			time.Sleep(50 * time.Millisecond) // the others have ceased to spin
			measure(1)
			close(waited)
			for p := 1; p < size; p++ {
				l, err := m.Link(p)
				if err == nil {
					err = writeLine(m, l, nil, 1)
				}
				if err != nil {
					return err
				}
			}
			return nil
		}
		for m.Look() {
		}
		<-computed
		l, err := m.Link(0)
		if err != nil {
			return err
		}
		var line [LinePayload]byte
		_, _, err = readLine(m, l, line[:])
		select {
		case <-waited:
		default:
			t.Error("a line came early")
		}
		return err
	})
	for i, what := range []string{"compute", "wait"} {
		share := float64(used[i]) / float64(span)
		t.Logf("%d ranks that %s: %.2f %% of a core", ranks, what, 100*share)
		if share > 0.25 {
			t.Errorf("%d ranks that %s use %.0f %% of a core", ranks, what, 100*share)
		}
	}
}

// TestRDMAConnectsOnFirstUse: a rank has queue pairs, one a lane and path, with those
// peers only that it has exchanged something with.
func TestRDMAConnectsOnFirstUse(t *testing.T) {
	rec, err := record.Create(record.Options{Dir: t.TempDir(), Identity: record.Identity{Job: "j"}})
	if err != nil {
		t.Fatal(err)
	}
	defer rec.Close()
	reader, err := record.Open(rec.Path())
	if err != nil {
		t.Fatal(err)
	}
	defer reader.Close()
	comm, _ := rec.AddComm(record.CommEntry{ID: 1, Name: "test", Size: 4})
	goroutines(t, overRDMA, 4, func(c *Config) {
		if c.Rank == 0 {
			c.Recorder, c.Comm = rec, comm
		}
	}, func(m *Mesh, rank, _ int) error {
		if rank > 1 {
			return nil
		}
		if n := len(reader.Conns(nil)); rank == 0 && n > 0 {
			t.Errorf("%d queue pairs before the first use", n)
		}
		l, err := m.Link(1 - rank)
		if err != nil {
			return err
		}
		if err := meet(m, l); err != nil || rank > 0 {
			return err
		}
		return eventually(m, "a queue pair for each of 2 lanes and 2 paths, with rank 1", func() bool {
			conns := reader.Conns(nil)
			for _, c := range conns {
				if c.Peer != 1 {
					t.Errorf("a queue pair with rank %d", c.Peer)
				}
			}
			return len(conns) == 4
		})
	})
}
