package transport

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/lockstep-ccl/lockstep/record"
	"github.com/lockstep-ccl/lockstep/windowmon"
)

// BenchmarkMeterBurst is what the monitor and its part of the recorder cost of a burst through shared memory, by how long windows
// are: pieces of 16 KiB, a burst each 20 µs, all of which is consumed before the next. The median.
func BenchmarkMeterBurst(b *testing.B) {
	for _, resolution := range []time.Duration{10 * time.Microsecond, 100 * time.Microsecond} {
		b.Run(fmt.Sprint(resolution), func(b *testing.B) {
			rec, err := record.Create(record.Options{Dir: b.TempDir(), Identity: record.Identity{Job: "j"}})
			if err != nil {
				b.Fatal(err)
			}
			defer rec.Close()
			conn, _ := rec.AddConn(record.ConnEntry{Transport: record.TransportSHM})
			t := &meter{on: true, mem: true, rec: rec, conn: conn}
			t.mon.Init(windowmon.Config{Resolution: resolution})
			const piece, burst, bursts = 16 << 10, 256 << 10, 2000
			var total, waits uint64
			var all, blocks []int64
			for b.Loop() {
				due := record.Now()
				for range bursts {
					at := record.Now()
					for range burst / piece {
						total += piece
						t.postPaced(piece, total, waits)
					}
					done := record.Now()
					waits += paceWaits / 8
					t.block()
					t.unblock()
					blocks = append(blocks, record.Now()-done)
					for due += 20_000; record.Now() < due; {
					}
					at += record.Now() - done
					t.completeNext(total)
					all = append(all, record.Now()-at)
				}
			}
			slices.Sort(all)
			slices.Sort(blocks)
			b.ReportMetric(0, "ns/op")
			b.ReportMetric(float64(all[len(all)/2]), "ns/burst")
			b.ReportMetric(float64(blocks[len(blocks)/2]), "ns/wait-for-credit")
			b.ReportMetric(float64(t.mon.Windows())/float64(len(all)), "windows/burst")
		})
	}
}
