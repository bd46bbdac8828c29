package transport

import (
	"math/rand/v2"
	"testing"

	"pgregory.net/rapid"
)

// TestStreamPassesADeadLane: from any moment on, one socket of several carries nothing more, either way. Once
// it is known to be late, everything comes over the others, in order and once; and when it carries again, what
// it had is no harm.
func TestStreamPassesADeadLane(t *testing.T) {
	again, back := uint64(0), 0
	defer func() { t.Logf("%d bytes went over another socket, %d sockets carried again", again, back) }()
	rapid.Check(t, func(rt *rapid.T) {
		seed := rapid.Uint64().Draw(rt, "seed")
		messages := rapid.IntRange(4, 40).Draw(rt, "messages")
		sockets := rapid.IntRange(2, 4).Draw(rt, "sockets")
		splits := rapid.Bool().Draw(rt, "split by rate")
		dice := rand.New(rand.NewPCG(seed, 7))
		w := newWires(t, 64<<10)
		defer w.close()
		var ends [2]*talker
		for e := range ends {
			ends[e] = newTalker(w.ends[e], e, messages, seed)
		}
		w.connect(sockets)
		w.give(0)
		w.give(1)
		dead, from, notice := dice.IntN(sockets), dice.IntN(60), 1+dice.IntN(30)
		until := 1 << 30
		if dice.IntN(2) == 0 {
			until = from + notice + dice.IntN(60)
		}
		for turn := 0; !ends[0].done() || !ends[1].done(); turn++ {
			if turn > 50_000 {
				rt.Fatalf("no end: %d and %d of %d messages have come", ends[0].got, ends[1].got, messages)
			}
			if turn == until {
				back++
			}
			for _, l := range w.ends {
				if l.splits = splits; splits && dice.IntN(10) == 0 {
					for _, s := range l.mine() {
						s.rate = float64(1+dice.IntN(20)) / 1000
					}
				}
				for _, s := range l.socks {
					s.writable = true
					if err := s.flush(); err != nil {
						rt.Fatal(err)
					}
				}
				if len(l.socks) > 0 {
					l.socks[dead].late = turn >= from+notice && turn < until+notice
					l.passOver()
				}
			}
			for range 1 + dice.IntN(8) {
				carry := w.sets[0].carry
				i := dice.IntN(sockets)
				if i == dead && turn >= from && turn < until {
					carry = w.sets[0].deliver // what the peer's kernel has acknowledged
				}
				carry(dice.IntN(2), i, 1+dice.IntN(30<<10))
			}
			if err := ends[dice.IntN(2)].turn(dice); err != nil {
				rt.Fatalf("turn %d: %v", turn, err)
			}
		}
		for _, l := range w.ends {
			again += l.resent
		}
	})
	if again == 0 || back == 0 {
		t.Error("nothing was tried")
	}
}
