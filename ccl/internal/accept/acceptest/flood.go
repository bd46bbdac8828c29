// Package acceptest plays strangers at a listener: connections that say nothing, too little,
// too slowly, or the wrong thing, and come back whenever they are closed. It is for tests.
package acceptest

import (
	"errors"
	"fmt"
	"net"
	"os"
	"sync"
	"sync/atomic"
	"testing"
	"time"
)

// Stranger is how one connection behaves: it is called when the connection is made, and then
// every so often with the time since.
type Stranger func(conn net.Conn, age time.Duration)

// Silent says nothing.
func Silent(net.Conn, time.Duration) {}

// Says writes b at once, and no more.
func Says(b []byte) Stranger {
	return func(conn net.Conn, age time.Duration) {
		if age == 0 {
			_, _ = conn.Write(b) // whether it is taken is the listener's business
		}
	}
}

// Drips writes one byte of b at a time, ten a second.
func Drips(b []byte) Stranger {
	var said sync.Map // by connection
	return func(conn net.Conn, age time.Duration) {
		v, _ := said.LoadOrStore(conn, new(atomic.Int64))
		n := v.(*atomic.Int64)
		if due := int64(age / (100 * time.Millisecond)); n.Load() < min(due, int64(len(b))) {
			_, _ = conn.Write(b[n.Load():][:1])
			n.Add(1)
		}
	}
}

// Flood is a number of strangers at work.
type Flood struct {
	Made atomic.Int64 // connections
	stop chan struct{}
	wg   sync.WaitGroup
}

// hands is how many goroutines a flood has, however many connections, and how many addresses.
const hands = 4

// Start keeps n connections open to addr, of the given kinds in turn, from several loopback
// addresses, until Stop or the test's end. It returns when the first n have been tried.
func Start(t testing.TB, addr string, n int, kinds ...Stranger) *Flood {
	f := Begin(addr, n, kinds...)
	t.Cleanup(f.Stop)
	return f
}

// Begin is Start for a process that is no test; Stop it.
func Begin(addr string, n int, kinds ...Stranger) *Flood { return BeginBy(hands, addr, n, kinds...) }

// BeginBy is Begin with so many connections being made at a time.
func BeginBy(hands int, addr string, n int, kinds ...Stranger) *Flood {
	f := &Flood{stop: make(chan struct{})}
	var first sync.WaitGroup
	for h := range hands {
		first.Add(1)
		f.wg.Go(func() { f.play(addr, h, n/hands, kinds, first.Done) })
	}
	first.Wait()
	return f
}

// Stop ends the flood.
func (f *Flood) Stop() {
	select {
	case <-f.stop:
	default:
		close(f.stop)
	}
	f.wg.Wait()
}

func (f *Flood) play(addr string, hand, n int, kinds []Stranger, first func()) {
	type stranger struct {
		net.Conn
		is    Stranger
		since time.Time
	}
	all := make([]stranger, n)
	defer func() {
		for _, s := range all {
			if s.Conn != nil {
				s.Close()
			}
		}
	}()
	b := make([]byte, 256)
	for round := 0; ; round++ {
		for i := range all {
			select {
			case <-f.stop:
				if round == 0 {
					first()
				}
				return
			default:
			}
			s := &all[i]
			if s.Conn != nil {
				_ = s.SetReadDeadline(time.Now().Add(50 * time.Microsecond))
				if _, err := s.Read(b); err == nil || isTimeout(err) {
					s.is(s.Conn, time.Since(s.since))
					continue
				}
				s.Close()
			}
			d := net.Dialer{Timeout: 200 * time.Millisecond, LocalAddr: &net.TCPAddr{IP: net.ParseIP(fmt.Sprintf("127.0.0.%d", 1+hand%hands))}}
			conn, err := d.Dial("tcp", addr)
			if err != nil {
				s.Conn = nil
				continue
			}
			f.Made.Add(1)
			_ = conn.SetWriteDeadline(time.Now().Add(time.Minute))
			*s = stranger{conn, kinds[(i+hand)%len(kinds)], time.Now()}
			s.is(conn, 0)
		}
		if round == 0 {
			first()
		}
		time.Sleep(time.Millisecond)
	}
}

func isTimeout(err error) bool {
	return errors.Is(err, os.ErrDeadlineExceeded)
}
