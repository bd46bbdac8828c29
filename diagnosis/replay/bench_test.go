package replay_test

import (
	"bytes"
	"fmt"
	"testing"

	"github.com/lockstep-ccl/lockstep/diagnosis"
	"github.com/lockstep-ccl/lockstep/diagnosis/replay"
	"github.com/lockstep-ccl/lockstep/record"
)

// job is ranks of 8 a node in three communicators each (neighbours, strided, all),
// with a ring of connections in each.
func job(ranks int) *diagnosis.Evidence {
	const now = int64(1_700_000_000e9)
	ev := &diagnosis.Evidence{Job: "big", Now: now}
	for n := range (ranks + 7) / 8 {
		ev.Nodes = append(ev.Nodes, diagnosis.Node{Name: fmt.Sprintf("node%d", n), LastSeen: now, MapError: 1e5})
	}
	for r := range ranks {
		ev.Ranks = append(ev.Ranks, diagnosis.Rank{Node: int32(r / 8), PID: int32(1000 + r), Proc: diagnosis.ProcRunning, CPU: 1, Step: 1})
	}
	comm := func(size int, world func(i int) int) {
		c := diagnosis.Comm{ID: uint64(len(ev.Comms) + 1), Name: "c", Members: make([]diagnosis.Member, size)}
		for i := range c.Members {
			c.Members[i] = diagnosis.Member{World: int32(world(i)), State: record.CommJoined, Coll: record.AllReduce, Peer: -1, Bytes: 1 << 20,
				Enqueued: 100, Started: 100, Finished: 100, EnqueuedAt: now, StartedAt: now - 2e6, FinishedAt: now - 1e6, Ops: 100, OwnNs: 100e6, WaitNs: 50e6, TransferNs: 50e6, MaxOwnNs: 5e6}
			ev.Conns = append(ev.Conns, diagnosis.Conn{Comm: int32(len(ev.Comms)), Src: int32(i), Dst: int32((i + 1) % size), Transport: record.TransportRDMA, Windows: 10, LatencyNs: 1e6, LastCompletion: now})
		}
		ev.Comms = append(ev.Comms, c)
	}
	for g := range ranks / 8 {
		comm(8, func(i int) int { return g*8 + i })
	}
	for g := range 8 {
		comm(ranks/8, func(i int) int { return g + i*8 })
	}
	comm(ranks, func(i int) int { return i })
	return ev
}

// advance is a tenth of a second in which one rank of so many has news.
func advance(ev *diagnosis.Evidence, n, of int) {
	ev.Now += 1e8
	news := func(i int) bool { return (i+n)%of == 0 }
	for i := range ev.Nodes {
		if news(i) {
			ev.Nodes[i].LastSeen = ev.Now - int64(i%90)*1e6
		}
	}
	for i := range ev.Ranks {
		if news(i) {
			ev.Ranks[i].Step++
		}
	}
	k := 0
	for ci := range ev.Comms {
		for i := range ev.Comms[ci].Members {
			m, c := &ev.Comms[ci].Members[i], &ev.Conns[k]
			if k++; !news(k) {
				continue
			}
			at := ev.Now - int64(k*7919%90_000_000)
			m.Enqueued, m.Started, m.Finished, m.Ops = m.Enqueued+5, m.Started+5, m.Finished+5, m.Ops+5
			m.EnqueuedAt, m.StartedAt, m.FinishedAt = at, at+1e4, at+1e6+int64(k%1000)*997
			m.OwnNs, m.WaitNs, m.TransferNs = m.OwnNs+5e6+uint64(k%7)*1e5, m.WaitNs+3e6+uint64(k*31%1e5), m.TransferNs+2e6+uint64(k*17%1e5)
			c.Windows++
			c.LatencyNs, c.LastCompletion, c.LastPost = 1e6+float64(k%97)*1e3, at+9e5, at+1e5
		}
	}
}

// BenchmarkRecord is what a pass costs the master's own goroutine (copy) and the
// recorder's (encode), and what it takes on the disk, when all ranks or one of a
// hundred have news. Budget: the copy at most 10 ms at 32,768 ranks in three
// communicators each; all else is paced to a tenth of a core.
func BenchmarkRecord(b *testing.B) {
	for _, ranks := range []int{8, 64, 512, 4096, 32768} {
		for _, of := range []int{1, 100} {
			ev := job(ranks)
			b.Run(fmt.Sprintf("copy/ranks=%d/news=1:%d", ranks, of), func(b *testing.B) {
				c := replay.NewCopy()
				b.ReportAllocs()
				for b.Loop() {
					c.From(ev)
				}
			})
			b.Run(fmt.Sprintf("encode/ranks=%d/news=1:%d", ranks, of), func(b *testing.B) {
				var sink counter
				w, err := replay.NewWriter(&sink, replay.Header{})
				if err != nil {
					b.Fatal(err)
				}
				n := 1
				if err := w.Write(1, ev, nil); err != nil {
					b.Fatal(err)
				}
				key := sink
				b.ReportAllocs()
				b.ResetTimer()
				for b.Loop() {
					b.StopTimer()
					advance(ev, n, of)
					b.StartTimer()
					n++
					if err := w.Write(uint64(n), ev, nil); err != nil {
						b.Fatal(err)
					}
				}
				b.ReportMetric(float64(key), "key-bytes")
				b.ReportMetric(float64(sink-key)/float64(n-1), "bytes/pass")
			})
		}
	}
}

type counter int

func (c *counter) Write(b []byte) (int, error) { *c += counter(len(b)); return len(b), nil }

// TestProportional: what a pass takes grows with what has changed, not with the job.
func TestProportional(t *testing.T) {
	for _, ranks := range []int{64, 1024} {
		ev := job(ranks)
		var file bytes.Buffer
		w, err := replay.NewWriter(&file, replay.Header{})
		if err != nil {
			t.Fatal(err)
		}
		size := func() int {
			before := file.Len()
			if err := w.Write(uint64(file.Len()), ev, nil); err != nil {
				t.Fatal(err)
			}
			return file.Len() - before
		}
		key := size()
		ev.Now++
		if idle := size(); idle > 64 {
			t.Errorf("%d ranks: a pass without news takes %d bytes", ranks, idle)
		}
		ev.Comms[0].Members[0].Finished++
		if one := size(); one > 128 {
			t.Errorf("%d ranks: one member's news take %d bytes", ranks, one)
		}
		if key < 500 {
			t.Errorf("%d ranks: a key frame of %d bytes", ranks, key)
		}
	}
}
