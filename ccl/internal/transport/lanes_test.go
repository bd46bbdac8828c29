package transport

import (
	"math"
	"math/rand/v2"
	"slices"
	"testing"

	"golang.org/x/sys/unix"
)

// TestNextFrame: whatever sockets' rates are and however much they still have, a message that is split
// is there soon after the earliest time at which it could be, and none of it is lost or sent twice.
func TestNextFrame(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	for round := range 5000 {
		n := 1 + r.IntN(8)
		queued, rates := make([]int, n), make([]float64, n)
		alive, slowest := 0, math.Inf(1)
		for i := range n {
			if r.IntN(5) > 0 {
				rates[i] = math.Exp(r.Float64()*3-7) * 10 // some MB/s to 200
				slowest = min(slowest, rates[i])
				alive++
			}
			if r.IntN(2) == 0 {
				queued[i] = r.IntN(1 << 18)
			}
		}
		size := splitLeast + r.IntN(4<<20)
		ideal := earliest(queued, rates, float64(size))
		rest := size
		for rest > 0 {
			i, k := nextFrame(queued, rates, min(rest, maxChunk), rest, splitLeast)
			if alive == 0 {
				if i >= 0 {
					t.Fatalf("round %d: socket %d takes bytes, and none does", round, i)
				}
				break
			}
			if i < 0 || rates[i] == 0 || k <= 0 || k > min(rest, maxChunk) || k < rest && (k%lineSize != 0 || k < splitLeast) {
				t.Fatalf("round %d: %d of %d bytes for socket %d of rates %v", round, k, rest, i, rates)
			}
			queued[i] += k
			rest -= k
		}
		if alive == 0 {
			continue
		}
		last := 0.0
		for i := range queued {
			if rates[i] > 0 {
				last = max(last, float64(queued[i])/rates[i])
			}
		}
		// A last frame of the least size may take the slowest socket's time.
		if most := max(1.05*ideal, ideal+1.6*splitLeast/slowest); last > most {
			t.Errorf("round %d: %d bytes over %v are there after %.2f ms, not %.2f", round, size, rates, last/1e6, ideal/1e6)
		}
	}
}

// earliest is when sockets can be done with what they have and get, by bisection, at least with what they have.
func earliest(queued []int, rates []float64, size float64) float64 {
	lo, hi, had := 0.0, 1e15, 0.0
	for range 200 {
		mid, room := (lo+hi)/2, 0.0
		for i, rate := range rates {
			room += max(0, mid*rate-float64(queued[i]))
		}
		if room < size {
			lo = mid
		} else {
			hi = mid
		}
	}
	for i, rate := range rates {
		if rate > 0 {
			had = max(had, float64(queued[i])/rate)
		}
	}
	return max(hi, had)
}

// TestPace: a socket's rate is that at which its backlog goes, whatever it does in between and however
// late its last bytes are acknowledged; one that is not used is taken for one like the others.
func TestPace(t *testing.T) {
	l := &tcpLink{socks: []*socket{{}, {}}, hi: 2}
	want := []float64{0.001, 0.0004} // 1 and 0.4 MB/s
	var info [2]unix.TCPInfo
	now, looked := int64(0), int64(0)
	step := func(used []int) {
		for _, i := range used {
			s := l.socks[i]
			s.drain(now, 0)
			s.left += 64 << 10
			for sent := 0; sent < 64<<10; sent += 1 << 10 { // frames come while it drains, and more often than acknowledgements
				s.drain(now+int64(float64(sent)/want[i]), 64<<10-sent&^(4<<10-1))
			}
			s.drain(now+300e6, 0) // the last acknowledgement is delayed
			info[i].Snd_mss, info[i].Unacked = 1448, 20
		}
		for range 6 {
			now += 50e6
			for i, s := range l.socks {
				if slices.Contains(used, i) {
					info[i].Bytes_acked += uint64(50e6 * want[i] / 5)
				} else {
					info[i].Unacked = 0
				}
				s.note(&info[i], now-looked)
			}
			looked = now
			l.weigh()
		}
	}
	for range 10 {
		step([]int{0, 1})
	}
	if !l.splits {
		t.Fatal("sockets as slow as that are not split by rate")
	}
	for i, s := range l.socks {
		if s.rate < 0.85*want[i] || s.rate > 1.2*want[i] {
			t.Errorf("socket %d: %.2f MB/s, not %.2f", i, s.rate*1e3, want[i]*1e3)
		}
	}
	for range 40 {
		step([]int{0})
	}
	if s := l.socks[1]; s.rate < 0.8*want[0] {
		t.Errorf("a socket that was not used for 12 s counts as slow: %.2f MB/s", s.rate*1e3)
	}
}

// BenchmarkNextFrame is what it costs to pick a socket by rate, once the kernel has been asked what each has.
func BenchmarkNextFrame(b *testing.B) {
	queued, rates := []int{1 << 16, 1 << 15, 0, 1 << 10}, []float64{0.1, 0.2, 0.3, 0.4}
	for b.Loop() {
		_, _ = nextFrame(queued, rates, maxChunk, 1<<20, splitLeast)
	}
}
