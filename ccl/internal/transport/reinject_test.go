package transport

import (
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"pgregory.net/rapid"
)

// TestStreamPassesADeadLane: from any moment on, one socket of several carries nothing more, either way. Once
// it is known to be late, everything comes over the others, in order and once, also where all were late for a
// while; and when it carries again, what it had is no harm.
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
		allLate := from + notice
		if dice.IntN(2) == 0 {
			allLate += dice.IntN(40)
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
					for i, s := range l.socks {
						s.late = turn >= from+notice && turn < until+notice && (i == dead || turn < allLate)
					}
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

// TestCreditIsToldAgain: credit that was given while all lanes were late is told again over the first that is not.
func TestCreditIsToldAgain(t *testing.T) {
	l, fds := bareSockets(t, 2)
	l.opened = true
	told := func(i int) bool {
		n, _ := unix.Read(fds[i], make([]byte, 4096))
		return n > 0
	}
	step := func(late ...bool) {
		for i, s := range l.socks {
			s.late = late[i]
		}
		l.passOver()
		if _, err := l.receive(nil, 0); err != nil {
			t.Fatal(err)
		}
	}
	if step(true, false); told(0) || !told(1) {
		t.Error("what the first lane may have had is not told over the second")
	}
	step(true, true)
	l.got, l.front = 1000, 1000
	if l.giveCredit(); !told(0) {
		t.Error("no credit while both are late")
	}
	if step(true, false); told(0) || !told(1) {
		t.Error("not told again when the second lane is back")
	}
}

// TestCloseLeavesADeadLane: what a dead lane has left, and others have carried, keeps no rank from leaving.
func TestCloseLeavesADeadLane(t *testing.T) {
	const messages, size, outage = 30, 256 << 10, 20 * time.Second
	var dead [2]chan struct{}
	for i := range dead {
		dead[i] = make(chan struct{})
	}
	goroutines(t, apart, 2, func(c *Config) { c.Sockets, c.Outage = 2, outage }, func(m *Mesh, rank, _ int) error {
		if err := exchange(m, rank, 2, 1, 3, 1000); err != nil {
			return err
		}
		l := m.links[1-rank].(*tcpLink)
		l.AlignSend()
		l.AlignRecv()
		deafen(t, l.socks[1].fd)
		close(dead[rank])
		<-dead[1-rank]
		b := make([]byte, size)
		began := time.Now()
		for i := range messages {
			if rank == 1 {
				if err := recvAll(m, l, b); err != nil {
					return err
				}
				l.refresh(0)
				continue
			}
			for time.Since(began) < time.Duration(i)*15*time.Millisecond {
				m.Wait(time.Millisecond)
			}
			if err := sendAll(m, l, b); err != nil {
				return err
			}
			if err := eventually(m, "consumed", func() bool { return l.completed() == l.posted() }); err != nil {
				return err
			}
		}
		began = time.Now()
		if err := m.Close(); err != nil {
			return err
		}
		if took := time.Since(began); took > outage/2 {
			return fmt.Errorf("closing took %v", took)
		}
		return nil
	})
}
