package transport

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/lockstep-ccl/lockstep/record"
)

// Fake NICs are of one process.
var (
	places    = []place{oneNode, apart, pairwise}
	allPlaces = []place{oneNode, apart, pairwise, overRDMA, mixedRDMA}
)

// pattern is the byte at a position of the stream from src to dst.
func pattern(src, dst int, at uint64) byte {
	x := at*0x9e3779b97f4a7c15 + uint64(src)*31 + uint64(dst)*17
	return byte(x >> 56)
}

func fill(b []byte, src, dst int, at uint64) {
	for i := range b {
		b[i] = pattern(src, dst, at+uint64(i))
	}
}

// exchange sends and receives messages of random sizes with every peer at once,
// in random pieces, by copy and in place, and lines beside them.
func exchange(m *Mesh, rank, size int, seed uint64, messages, maxSize int) error {
	type side struct {
		link     Link
		send     *rand.Rand // decides the sizes: the receiver has the same
		recv     *rand.Rand
		out      []byte
		sentAt   uint64
		gotAt    uint64
		sent     int
		got      int
		need     int
		lines    uint32
		linesGot uint32
	}
	mine := rand.New(rand.NewPCG(seed, uint64(rank)))
	gen := func(src, dst int) *rand.Rand { return rand.New(rand.NewPCG(seed, uint64(src*1000+dst))) }
	length := func(r *rand.Rand) int {
		if r.IntN(3) == 0 {
			return 1 + r.IntN(maxSize)
		}
		return 1 + r.IntN(200)
	}
	var sides []*side
	for p := range size {
		if p == rank {
			continue
		}
		l, err := m.Link(p)
		if err != nil {
			return err
		}
		if l.Peer() != p || (l.Kind() == record.TransportSHM) != m.Local(p) {
			return fmt.Errorf("link to %d says %d, %v", p, l.Peer(), l.Kind())
		}
		sides = append(sides, &side{link: l, send: gen(rank, p), recv: gen(p, rank)})
	}
	var line [LinePayload]byte
	buf := make([]byte, maxSize)
	u := wait(m)
	for {
		done, moved := true, false
		for _, s := range sides {
			p := s.link.Peer()
			// Send.
			if len(s.out) == 0 && s.sent < messages {
				s.link.AlignSend()
				s.out = make([]byte, length(s.send))
				fill(s.out, rank, p, s.sentAt)
				s.sentAt += uint64(len(s.out))
				s.sent++
			}
			if len(s.out) > 0 {
				n, err := s.link.TrySend(s.out)
				if err != nil {
					return fmt.Errorf("send to %d: %w", p, err)
				}
				s.out = s.out[n:]
				moved = moved || n > 0
			}
			// Receive.
			if s.need == 0 && s.got < messages {
				s.link.AlignRecv()
				s.need = length(s.recv)
				s.got++
			}
			if s.need > 0 {
				var b []byte
				var err error
				peeked := s.got%2 == 0
				if peeked {
					b, err = s.link.Peek()
					if b = b[:min(len(b), s.need)]; len(b) < s.need && len(b)%64 != 0 {
						return fmt.Errorf("piece of %d bytes of %d from %d", len(b), s.need, p)
					}
				} else {
					var n int
					n, err = s.link.TryRecv(buf[:min(s.need, 1+mine.IntN(maxSize))])
					b = buf[:n]
				}
				if err != nil {
					return fmt.Errorf("receive from %d: %w", p, err)
				}
				for i := range b {
					if b[i] != pattern(p, rank, s.gotAt+uint64(i)) {
						return fmt.Errorf("wrong byte %d from rank %d", s.gotAt+uint64(i), p)
					}
				}
				s.gotAt += uint64(len(b))
				s.need -= len(b)
				if peeked {
					s.link.Advance(len(b))
				}
				moved = moved || len(b) > 0
			}
			// Lines.
			if s.lines < uint32(messages) {
				n := int(s.lines % (LinePayload + 1))
				fill(line[:n], rank, p, uint64(s.lines))
				ok, err := s.link.TryWriteLine(line[:n], s.lines)
				if err != nil {
					return err
				}
				if ok {
					s.lines++
					moved = true
				}
			}
			if s.linesGot < uint32(messages) {
				n, tag, ok, err := s.link.TryReadLine(line[:])
				if err != nil {
					return err
				}
				if ok {
					if tag != s.linesGot || n != int(tag%(LinePayload+1)) {
						return fmt.Errorf("line %d of %d bytes from %d, want line %d", tag, n, p, s.linesGot)
					}
					for i := range n {
						if line[i] != pattern(p, rank, uint64(tag)+uint64(i)) {
							return fmt.Errorf("wrong line %d from %d", tag, p)
						}
					}
					s.linesGot++
					moved = true
				}
			}
			done = done && s.sent == messages && len(s.out) == 0 && s.got == messages && s.need == 0 && s.lines == uint32(messages) && s.linesGot == uint32(messages)
		}
		if done {
			return nil
		}
		if moved {
			u = wait(m)
		} else if err := u.again(); err != nil {
			return err
		}
	}
}

func TestExchange(t *testing.T) {
	for _, p := range allPlaces {
		for _, n := range []int{2, 4} {
			t.Run(fmt.Sprintf("%s/%d", p, n), func(t *testing.T) {
				goroutines(t, p, n, func(c *Config) { c.Ring, c.Window = 16<<10, 64<<10 }, func(m *Mesh, rank, size int) error {
					return exchange(m, rank, size, 1, 150, 150<<10)
				})
			})
		}
	}
}

func init() {
	roles["exchange"] = func(m *Mesh, rank, size int) error { return exchange(m, rank, size, 2, 200, 1<<20) }
}

func TestExchangeBetweenProcesses(t *testing.T) {
	for _, p := range places {
		t.Run(string(p), func(t *testing.T) {
			m, cmds := processes(t, p, 4, "exchange")
			if err := exchange(m, 0, 4, 2, 200, 1<<20); err != nil {
				t.Fatal(err)
			}
			for _, cmd := range cmds[1:] {
				if err := cmd.Wait(); err != nil {
					t.Error(err)
				}
			}
		})
	}
}

// A rank that sleeps is woken by its peer, whatever carries the link.
func TestWaitWakes(t *testing.T) {
	for _, p := range allPlaces {
		t.Run(string(p), func(t *testing.T) {
			goroutines(t, p, 4, nil, func(m *Mesh, rank, size int) error {
				var b [LinePayload]byte
				for round := range 12 {
					peer := rank ^ (1 + round%3)
					l, err := m.Link(peer)
					if err != nil {
						return err
					}
					if rank < peer {
						time.Sleep(5 * time.Millisecond) // the other one is asleep by then
						if err := writeLine(m, l, b[:8], uint32(round)); err != nil {
							return err
						}
					} else if _, tag, err := readLine(m, l, b[:]); err != nil || tag != uint32(round) {
						return fmt.Errorf("round %d: line %d, %w", round, tag, err)
					}
				}
				return nil
			})
		})
	}
}

func TestWakeAndAbort(t *testing.T) {
	for _, p := range []place{oneNode, apart, overRDMA} {
		t.Run(string(p), func(t *testing.T) {
			goroutines(t, p, 2, nil, func(m *Mesh, rank, size int) error {
				woken := make(chan struct{})
				stop := make(chan struct{})
				go func() {
					defer close(woken)
					for {
						select {
						case <-stop:
							return
						default:
							m.Wait(patience)
						}
					}
				}()
				time.Sleep(10 * time.Millisecond)
				close(stop)
				start := time.Now()
				m.Wake()
				<-woken
				if time.Since(start) > patience/2 {
					return errors.New("Wake did not wake")
				}
				return nil
			})
		})
	}
	aborted := errors.New("aborted")
	goroutines(t, oneNode, 2, func(c *Config) { c.Err = func() error { return aborted } }, func(m *Mesh, rank, size int) error {
		start := time.Now()
		for range 10_000 {
			m.Wait(patience)
		}
		if time.Since(start) > patience/2 {
			return errors.New("Wait sleeps in an aborted communicator")
		}
		return nil
	})
}

func TestBoard(t *testing.T) {
	now := record.Now()
	goroutines(t, pairwise, 4, nil, func(m *Mesh, rank, size int) error {
		b := m.Board()
		if rank%2 == 1 {
			b.Enter(65536, now-int64(time.Hour)) // low bits zero
			b.Enter(65537, now)
		} else {
			b.Enter(65537, now+5)
		}
		for u := wait(m); ; {
			at := b.Entered(rank^1, 65537)
			if d := at - now; at != 0 && d < int64(time.Second) && d > -int64(time.Second) {
				break
			} else if at != 0 {
				return fmt.Errorf("entered %v away", time.Duration(d))
			}
			if err := u.again(); err != nil {
				return err
			}
		}
		if b.Entered((rank+2)%4, 65537) != 0 || b.Entered(rank^1, 65536) != 0 || b.Entered(rank^1, 65538) != 0 {
			return errors.New("an entry that there is not")
		}
		return nil
	})
}

func TestOneRank(t *testing.T) {
	m, err := NewMesh(context.Background(), Config{Rank: 0, Size: 1, Dir: t.TempDir()})
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	if m.Board() != nil {
		t.Error("a board for one")
	}
	if _, err := m.Link(0); err == nil {
		t.Error("a link to itself")
	}
	m.Wait(time.Millisecond)
}

func TestConfigIsChecked(t *testing.T) {
	for _, c := range []Config{{Rank: 2, Size: 2}, {Size: 2, Ring: 100}, {Size: 2, Sockets: 99}, {Size: 2, Window: 12345}} {
		if _, err := NewMesh(context.Background(), c); err == nil {
			t.Errorf("%+v: no error", c)
		}
	}
}

// One rank that cannot open its transports fails all of them, with its reason.
func TestOpeningFailsTogether(t *testing.T) {
	dir := t.TempDir()
	ln := exchangeOf(2)
	errs := make(chan error, 2)
	for r := range 2 {
		go func() {
			c := Config{Rank: r, Size: 2, Node: "n", Dir: dir, Key: []byte("k"), Exchange: ln(r)}
			if r == 1 {
				c.Ring = 8 << 10
			}
			_, err := NewMesh(context.Background(), c)
			errs <- err
		}()
	}
	for range 2 {
		if err := <-errs; err == nil || !bytes.Contains([]byte(err.Error()), []byte("rings of")) {
			t.Error(err)
		}
	}
}

// exchangeOf is an allgather within a process.
func exchangeOf(n int) func(rank int) func(context.Context, []byte) ([][]byte, error) {
	type blob struct {
		rank int
		b    []byte
	}
	in := make(chan blob)
	out := make([]chan [][]byte, n)
	for i := range out {
		out[i] = make(chan [][]byte, 1)
	}
	go func() {
		all := make([][]byte, n)
		for range n {
			b := <-in
			all[b.rank] = b.b
		}
		for i := range out {
			out[i] <- all
		}
	}()
	return func(rank int) func(context.Context, []byte) ([][]byte, error) {
		return func(_ context.Context, b []byte) ([][]byte, error) {
			in <- blob{rank, b}
			return <-out[rank], nil
		}
	}
}
