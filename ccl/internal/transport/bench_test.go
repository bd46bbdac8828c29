package transport

import (
	"encoding/binary"
	"fmt"
	"testing"
)

func init() {
	roles["echo line"] = echoLine
	roles["ring line"] = ringLine
	roles["sink"] = sink
}

const stopTag = 99

func echoLine(m *Mesh, _, _ int) error {
	l, err := m.Link(0)
	if err != nil {
		return err
	}
	var b [LinePayload]byte
	for {
		n, tag, err := readLine(m, l, b[:])
		if err != nil {
			return err
		}
		if err := writeLine(m, l, b[:n], tag); err != nil || tag == stopTag {
			return err
		}
	}
}

// ringLine passes on to the right what comes from the left.
func ringLine(m *Mesh, rank, size int) error {
	left, err := m.Link((rank + size - 1) % size)
	if err != nil {
		return err
	}
	right, err := m.Link((rank + 1) % size)
	if err != nil {
		return err
	}
	var b [LinePayload]byte
	for {
		n, tag, err := readLine(m, left, b[:])
		if err != nil {
			return err
		}
		if err := writeLine(m, right, b[:n], tag); err != nil || tag == stopTag {
			return err
		}
	}
}

// sink consumes messages of the length that precedes each, and answers the last byte.
func sink(m *Mesh, _, _ int) error {
	l, err := m.Link(0)
	if err != nil {
		return err
	}
	buf := make([]byte, 8<<20)
	var head [8]byte
	for {
		if err := recvAll(m, l, head[:]); err != nil {
			return err
		}
		n := binary.LittleEndian.Uint64(head[:])
		if n == 0 {
			return sendAll(m, l, head[:1])
		}
		l.AlignRecv()
		if err := recvAll(m, l, buf[:n]); err != nil {
			return err
		}
		l.AlignRecv()
		if err := sendAll(m, l, buf[n-1:n]); err != nil {
			return err
		}
		l.AlignSend()
	}
}

// One-way latency of 8 bytes: half a round trip.
func BenchmarkLatency(b *testing.B) {
	for _, p := range []place{oneNode, apart} {
		b.Run(string(p), func(b *testing.B) {
			m, cmds := processes(b, p, 2, "echo line")
			l, err := m.Link(1)
			if err != nil {
				b.Fatal(err)
			}
			var buf [LinePayload]byte
			round := func(tag uint32) {
				if err := writeLine(m, l, buf[:8], tag); err != nil {
					b.Fatal(err)
				}
				if _, _, err := readLine(m, l, buf[:]); err != nil {
					b.Fatal(err)
				}
			}
			for range 1000 {
				round(0)
			}
			b.ReportAllocs()
			b.ResetTimer()
			for b.Loop() {
				round(0)
			}
			b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/2, "ns/one-way")
			round(stopTag)
			cmds[1].Wait()
		})
	}
}

// Eight ranks on however few cores there are: one hop of a token around them.
func BenchmarkRingHop(b *testing.B) {
	for _, p := range []place{oneNode, apart, pairwise} {
		for _, n := range []int{2, 8} {
			b.Run(fmt.Sprintf("%s/%d", p, n), func(b *testing.B) {
				m, cmds := processes(b, p, n, "ring line")
				right, err := m.Link(1)
				if err != nil {
					b.Fatal(err)
				}
				left, err := m.Link(n - 1)
				if err != nil {
					b.Fatal(err)
				}
				var buf [LinePayload]byte
				round := func(tag uint32) {
					if err := writeLine(m, right, buf[:8], tag); err != nil {
						b.Fatal(err)
					}
					if _, _, err := readLine(m, left, buf[:]); err != nil {
						b.Fatal(err)
					}
				}
				for range 100 {
					round(0)
				}
				for b.Loop() {
					round(0)
				}
				b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/float64(n), "ns/hop")
				round(stopTag)
				for _, cmd := range cmds[1:] {
					cmd.Wait()
				}
			})
		}
	}
}

func BenchmarkBandwidth(b *testing.B) {
	for _, p := range []place{oneNode, apart} {
		for _, size := range []int{4 << 10, 64 << 10, 1 << 20, 8 << 20} {
			b.Run(fmt.Sprintf("%s/%dKiB", p, size>>10), func(b *testing.B) {
				m, cmds := processes(b, p, 2, "sink")
				l, err := m.Link(1)
				if err != nil {
					b.Fatal(err)
				}
				buf := make([]byte, size)
				var head [8]byte
				round := func(n int) {
					binary.LittleEndian.PutUint64(head[:], uint64(n))
					if err := sendAll(m, l, head[:]); err != nil {
						b.Fatal(err)
					}
					l.AlignSend()
					if err := sendAll(m, l, buf[:n]); err != nil {
						b.Fatal(err)
					}
					l.AlignSend()
					if err := recvAll(m, l, head[:1]); err != nil {
						b.Fatal(err)
					}
					l.AlignRecv()
				}
				for range 5 {
					round(size)
				}
				b.ReportAllocs()
				b.SetBytes(int64(size))
				b.ResetTimer()
				for b.Loop() {
					round(size)
				}
				round(0)
				cmds[1].Wait()
			})
		}
	}
}

// What bandwidth can be at best: a copy into memory that the cache does not hold for long.
func BenchmarkMemcpy(b *testing.B) {
	src, dst := make([]byte, 8<<20), make([]byte, 8<<20)
	b.SetBytes(8 << 20)
	for b.Loop() {
		copy(dst, src)
	}
}
