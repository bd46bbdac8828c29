package transport

import (
	"fmt"
	"testing"

	"github.com/lockstep-ccl/lockstep/ccl/internal/rdma"
	"github.com/lockstep-ccl/lockstep/record"
	"golang.org/x/sys/unix"
)

// pairOfLinks gives f both ends of a link of fake NICs, to be used by one
// goroutine: what is measured is this library and the fake's copy.
func pairOfLinks(tb testing.TB, recorded bool, f func(a, b Link)) {
	var rec *record.Writer
	var comm *record.Comm
	if recorded {
		var err error
		if rec, err = record.Create(record.Options{Dir: tb.TempDir(), Identity: record.Identity{Job: "j"}}); err != nil {
			tb.Fatal(err)
		}
		defer rec.Close()
		comm, _ = rec.AddComm(record.CommEntry{ID: 1, Name: "test", Size: 2})
	}
	links, done := make(chan Link), make(chan struct{})
	goroutines(tb, overRDMA, 2, func(c *Config) {
		c.RDMA.Lanes = 1
		if recorded && c.Rank == 0 {
			c.Recorder, c.Comm = rec, comm
		}
	}, func(m *Mesh, rank, _ int) error {
		l, err := m.Link(1 - rank)
		if err != nil {
			return err
		}
		if err := meet(m, l); err != nil {
			return err
		}
		if rank == 1 {
			links <- l
			<-done
			return nil
		}
		defer close(done)
		f(l, <-links)
		return nil
	})
}

// meet returns when both ends of a link have heard of each other.
func meet(m *Mesh, l Link) error {
	if err := writeLine(m, l, nil, 0); err != nil {
		return err
	}
	_, _, err := readLine(m, l, make([]byte, LinePayload))
	return err
}

// move sends b and receives it.
func move(from, to Link, b []byte) error {
	for sent, got := 0, 0; got < len(b); {
		n, err := from.TrySend(b[sent:])
		if err != nil {
			return err
		}
		sent += n
		if n, err = to.TryRecv(b[got:sent]); err != nil {
			return err
		}
		got += n
	}
	return nil
}

// BenchmarkRDMAWorkRequest is one message from post to consumption, its
// completion and its share of the credit included, without and with the monitor.
func BenchmarkRDMAWorkRequest(b *testing.B) {
	for _, size := range []int{64, 8 << 10, 256 << 10} {
		for _, recorded := range []bool{false, true} {
			b.Run(fmt.Sprintf("%dB/monitor=%v", size, recorded), func(b *testing.B) {
				pairOfLinks(b, recorded, func(from, to Link) {
					buf := make([]byte, size)
					b.ReportAllocs()
					b.SetBytes(int64(size))
					b.ResetTimer()
					for b.Loop() {
						if err := move(from, to, buf); err != nil {
							b.Fatal(err)
						}
					}
					b.StopTimer()
				})
			})
		}
	}
}

// BenchmarkRDMALine is one line, there and back.
func BenchmarkRDMALine(b *testing.B) {
	pairOfLinks(b, true, func(from, to Link) {
		var line [LinePayload]byte
		b.ReportAllocs()
		b.ResetTimer()
		for b.Loop() {
			for _, l := range [2][2]Link{{from, to}, {to, from}} {
				if ok, err := l[0].TryWriteLine(line[:8], 1); !ok || err != nil {
					b.Fatal(ok, err)
				}
				if _, _, ok, err := l[1].TryReadLine(line[:]); !ok || err != nil {
					b.Fatal(ok, err)
				}
			}
		}
		b.StopTimer()
	})
}

// TestRDMAPathDoesNotAllocate: moving bytes and lines costs no garbage.
func TestRDMAPathDoesNotAllocate(t *testing.T) {
	pairOfLinks(t, true, func(from, to Link) {
		small, large := make([]byte, 100), make([]byte, 300<<10)
		var line [LinePayload]byte
		n := testing.AllocsPerRun(200, func() {
			for _, b := range [][]byte{small, large} {
				if err := move(from, to, b); err != nil {
					t.Error(err)
				}
			}
			if ok, err := from.TryWriteLine(line[:], 7); !ok || err != nil {
				t.Error(ok, err)
			}
			if _, _, ok, err := to.TryReadLine(line[:]); !ok || err != nil {
				t.Error(ok, err)
			}
		})
		if n > 0 {
			t.Errorf("%v allocations", n)
		}
	})
}

// BenchmarkRDMASend is 1 MiB through the outbox, and from where it lies.
func BenchmarkRDMASend(b *testing.B) {
	const size = 1 << 20
	mem, err := unix.Mmap(-1, 0, size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANON)
	if err != nil {
		b.Fatal(err)
	}
	defer unix.Munmap(mem)
	region, err := rdma.Register(mem)
	if err != nil {
		b.Fatal(err)
	}
	defer region.Close()
	for _, kept := range []bool{false, true} {
		b.Run(fmt.Sprintf("kept=%v", kept), func(b *testing.B) {
			pairOfLinks(b, true, func(from, to Link) {
				b.ReportAllocs()
				b.SetBytes(size)
				b.ResetTimer()
				for b.Loop() {
					send := from.TrySend
					if kept {
						send = from.TrySendKept
					}
					for sent, got := 0, 0; got < size; {
						n, err := send(mem[sent:])
						if err != nil {
							b.Fatal(err)
						}
						sent += n
						in, err := to.Peek() // read in place, as reductions do
						if err != nil {
							b.Fatal(err)
						}
						to.Advance(len(in))
						got += len(in)
					}
				}
				b.StopTimer()
			})
		})
	}
}
