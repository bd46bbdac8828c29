// Package acceptest floods a listener with unauthenticated connections. They send nothing, too little,
// too slowly, or the wrong bytes, and connect again when they are closed. It is for tests.
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

// Behaviour plays one connection. It is called with age 0 when the connection is made, and then
// repeatedly with the time since.
type Behaviour func(conn net.Conn, age time.Duration)

// Silent sends nothing.
func Silent(net.Conn, time.Duration) {}

// Says writes b once.
func Says(b []byte) Behaviour {
	return func(conn net.Conn, age time.Duration) {
		if age == 0 {
			_, _ = conn.Write(b) // the listener may have closed it
		}
	}
}

// Drips writes b at ten bytes a second, one at a time.
func Drips(b []byte) Behaviour {
	var written sync.Map // bytes, by connection
	return func(conn net.Conn, age time.Duration) {
		v, _ := written.LoadOrStore(conn, new(atomic.Int64))
		n := v.(*atomic.Int64)
		if due := int64(age / (100 * time.Millisecond)); n.Load() < min(due, int64(len(b))) {
			_, _ = conn.Write(b[n.Load():][:1])
			n.Add(1)
		}
	}
}

// Flood is a number of connections under way.
type Flood struct {
	Made atomic.Int64 // connections made so far
	stop chan struct{}
	wg   sync.WaitGroup
}

// hands is how many goroutines a flood has, and how many source addresses.
const hands = 4

// Start keeps n connections to addr open, from several loopback addresses, until Stop or the end of the
// test. Connections have the given kinds in turn. It returns when it has tried n connections.
func Start(t testing.TB, addr string, n int, kinds ...Behaviour) *Flood {
	f := Begin(addr, n, kinds...)
	t.Cleanup(f.Stop)
	return f
}

// Begin is Start outside of a test. The caller must call Stop.
func Begin(addr string, n int, kinds ...Behaviour) *Flood { return BeginBy(hands, addr, n, kinds...) }

// BeginBy is Begin with hands goroutines that connect.
func BeginBy(hands int, addr string, n int, kinds ...Behaviour) *Flood {
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

func (f *Flood) play(addr string, hand, n int, kinds []Behaviour, first func()) {
	type connection struct {
		net.Conn
		play  Behaviour
		since time.Time
	}
	all := make([]connection, n)
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
					s.play(s.Conn, time.Since(s.since))
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
			*s = connection{conn, kinds[(i+hand)%len(kinds)], time.Now()}
			s.play(conn, 0)
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
