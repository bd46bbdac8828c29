package ccl_test

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"testing"

	"github.com/lockstep-ccl/lockstep/ccl"
)

// TestGPUSendRecv: rings and meshes of messages of all sizes, with receivers that
// are early and late.
func TestGPUSendRecv(t *testing.T) {
	n, gpus := gpuRanks(t)
	for _, window := range []bool{true, false} {
		if testing.Short() && window {
			continue
		}
		t.Run(fmt.Sprintf("window %v", window), func(t *testing.T) {
			ranks(t, n, onGPUs(t, gpus, fewPlaces), func(ctx context.Context, c *ccl.Comm) error {
				s := c.NewStream()
				m, err := newMemory(ctx, c, 128<<20, window)
				if err != nil {
					return err
				}
				next, prev := (c.Rank()+1)%n, (c.Rank()+n-1)%n
				for i, size := range []int{1, 7, 4096, 40_001, 256 << 10, 256<<10 + 1, 1 << 20, manyPieces, 33<<20 + 5, 8} {
					k := call{dt: ccl.Uint8, salt: i}
					in, out := make([]byte, size), make([]byte, size)
					for j := range in {
						in[j] = byte(k.value(c.Rank(), j))
					}
					send, recv := m.bytes(ccl.Uint8, i%2, size), m.bytes(ccl.Uint8, 64<<20+i%3, size)
					if err := c.CopyIn(send, in); err != nil {
						return err
					}
					err := c.Group(s, func(g *ccl.Group) error {
						if i%2 == c.Rank()%2 {
							return errors.Join(g.Send(send, next), g.Recv(recv, prev))
						}
						return errors.Join(g.Recv(recv, prev), g.Send(send, next))
					})
					if err := do(ctx, s, err); err != nil {
						return err
					}
					if err := c.CopyOut(out, recv); err != nil {
						return err
					}
					for j := range out {
						if want := byte(k.value(prev, j)); out[j] != want {
							return fmt.Errorf("%d bytes from rank %d: byte %d is %d, want %d", size, prev, j, out[j], want)
						}
					}
				}
				// Lone sends and receives, down a chain.
				big := m.bytes(ccl.Float32, 0, 4<<20)
				for range 3 {
					if c.Rank() > 0 {
						if err := c.Recv(s, big, c.Rank()-1); err != nil {
							return err
						}
					}
					if c.Rank() < n-1 {
						if err := c.Send(s, big, c.Rank()+1); err != nil {
							return err
						}
					}
				}
				if err := s.Wait(ctx); err != nil {
					return err
				}
				return m.free(ctx)
			})
		})
	}
}

// message is a message of the tests below.
type message struct {
	from, to, size int
	at             int // in both sides' memory, sent from the first half and received in the second
}

// messages are messages from every rank to every rank, itself too, several of each,
// and how much memory they need.
func messages(n, each int, sizes []int) (list []message, area int) {
	for i := range each {
		for from := range n {
			for to := range n {
				size := sizes[(from+2*to+i)%len(sizes)]
				list = append(list, message{from, to, size, area + (from+i)%3})
				area += (size + 31) &^ 15
			}
		}
	}
	return list, area
}

// value is byte j of the message.
func (l message) value(j, salt int) byte {
	return byte(l.from*31 + l.to*7 + l.size + l.at/16 + j*j/255 + j + salt)
}

// write puts what this rank sends in m, and zeros where it receives.
func (m *memory) write(list []message, area, salt int) error {
	for _, l := range list {
		b := make([]byte, l.size)
		if l.to == m.c.Rank() {
			if err := m.c.CopyIn(m.bytes(ccl.Uint8, area+l.at, l.size), b); err != nil {
				return err
			}
		}
		if l.from == m.c.Rank() {
			for j := range b {
				b[j] = l.value(j, salt)
			}
			if err := m.c.CopyIn(m.bytes(ccl.Uint8, l.at, l.size), b); err != nil {
				return err
			}
		}
	}
	return nil
}

// read checks what this rank has received.
func (m *memory) read(list []message, area, salt int) error {
	for i, l := range list {
		if l.to != m.c.Rank() {
			continue
		}
		b := make([]byte, l.size)
		if err := m.c.CopyOut(b, m.bytes(ccl.Uint8, area+l.at, l.size)); err != nil {
			return err
		}
		for j := range b {
			if b[j] != l.value(j, salt) {
				return fmt.Errorf("message %d, %d bytes from rank %d to %d: byte %d is %d, want %d", i, l.size, l.from, l.to, j, b[j], l.value(j, salt))
			}
		}
	}
	return nil
}

// call adds this rank's part of the message to a group.
func (l message) call(g *ccl.Group, m *memory, area int, send bool) error {
	if send {
		return g.Send(m.bytes(ccl.Uint8, l.at, l.size), l.to)
	}
	return g.Recv(m.bytes(ccl.Uint8, area+l.at, l.size), l.from)
}

// post puts this rank's messages in m, sends all of them in one group, and checks
// what comes; run runs the group's call, maybe several times.
func post(ctx context.Context, c *ccl.Comm, m *memory, list []message, area, salt int, run func(call func(*ccl.Stream) error) error) error {
	if err := m.write(list, area, salt); err != nil {
		return err
	}
	err := run(func(s *ccl.Stream) error {
		return c.Group(s, func(g *ccl.Group) error {
			for _, l := range list {
				if l.from == c.Rank() {
					if err := l.call(g, m, area, true); err != nil {
						return err
					}
				}
				if l.to == c.Rank() {
					if err := l.call(g, m, area, false); err != nil {
						return err
					}
				}
			}
			return nil
		})
	})
	if err != nil {
		return err
	}
	return m.read(list, area, salt)
}

// manyPieces is a message that passes staging memory of fewPlaces in many pieces.
const manyPieces = 16<<20 + 1

// fewPlaces makes staging memory small.
func fewPlaces(cfg *ccl.Config) { cfg.GPU.Staging = 4 }

// TestGPUMessages sends messages of every way at once between all ranks, several of
// each pair, in groups and in replays of a captured group.
func TestGPUMessages(t *testing.T) {
	n, gpus := gpuRanks(t)
	for _, window := range []bool{true, false} {
		if testing.Short() && window {
			continue
		}
		for _, way := range []string{"", "ll", "sym"} {
			sizes := []int{0, 5, 8 << 10, 100_001, 256<<10 + 16, 700_003}
			if way == "" {
				sizes = append(sizes, manyPieces)
			}
			t.Run(fmt.Sprintf("window %v, way %q", window, way), func(t *testing.T) {
				force := func(cfg *ccl.Config) {
					cfg.GPU.Algo = way
					if testing.Short() { // threads that wait leave a slow rank no time under the race detector
						fewBlocks(cfg)
					}
				}
				ranks(t, n, onGPUs(t, gpus, fewPlaces, force), func(ctx context.Context, c *ccl.Comm) error {
					s := c.NewStream()
					list, area := messages(n, 2, sizes)
					m, err := newMemory(ctx, c, 2*area+32, window)
					if err != nil {
						return err
					}
					for salt := range 2 {
						err := post(ctx, c, m, list, area, salt, func(call func(*ccl.Stream) error) error { return do(ctx, s, call(s)) })
						if err != nil {
							return err
						}
					}
					var g *ccl.Graph
					for salt := range 3 {
						err := post(ctx, c, m, list, area, salt, func(call func(*ccl.Stream) error) (err error) {
							if g == nil {
								if g, err = capture(ctx, c, s, gpus, func() error { return call(s) }); err != nil {
									return err
								}
							}
							return do(ctx, s, g.Launch(s))
						})
						if err != nil {
							return fmt.Errorf("replay %d: %w", salt, err)
						}
					}
					return errors.Join(g.Close(), m.free(ctx))
				})
			})
		}
	}
}

// TestGPUSendAbort: nobody receives.
func TestGPUSendAbort(t *testing.T) {
	n, gpus := gpuRanks(t)
	for _, size := range []int{100, 1 << 20, 40 << 20} {
		for _, window := range []bool{true, false} {
			held := make([]any, 2*n) // until Close has seen the kernels leave
			ranks(t, n, onGPUs(t, gpus, fewPlaces), func(ctx context.Context, c *ccl.Comm) error {
				s := c.NewStream()
				m, err := newMemory(ctx, c, size, window)
				if err != nil {
					return err
				}
				held[2*c.Rank()], held[2*c.Rank()+1] = s, m
				if err = do(ctx, s, c.Barrier(s)); err != nil && !errors.Is(err, ccl.ErrAborted) {
					return err
				}
				if c.Rank() == n-1 {
					c.Abort(errors.New("on purpose"))
					return errExpected
				}
				for range 4 { // more than a sender may be ahead
					if err == nil && c.Rank() == 0 {
						err = c.Send(s, m.bytes(ccl.Uint8, 0, size), n-1)
					} else if err == nil {
						err = c.Recv(s, m.bytes(ccl.Uint8, 0, size), n-1)
					}
				}
				if err == nil {
					err = s.Wait(ctx)
				}
				if !errors.Is(err, ccl.ErrAborted) {
					return fmt.Errorf("%d bytes: got %v, want an abort", size, err)
				}
				return errExpected
			})
			runtime.KeepAlive(held)
		}
	}
}
