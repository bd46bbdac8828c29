package transport

import (
	"bytes"
	"fmt"
	"io"
	"net"
	"sync"
	"testing"
	"time"

	"github.com/lockstep-ccl/lockstep/internal/accept"
	"github.com/lockstep-ccl/lockstep/internal/accept/acceptest"
)

// attackers returns the kinds of unauthenticated peers of a data listener.
func attackers() []acceptest.Behaviour {
	return []acceptest.Behaviour{
		acceptest.Silent,
		acceptest.Drips(append([]byte(dataMagic), make([]byte, dataHello)...)),
		acceptest.Says([]byte("\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03")), // TLS
		acceptest.Says(append([]byte(dataMagic), make([]byte, dataHello)...)),
		acceptest.Says([]byte(controlMagic)),
	}
}

// TestLinksUnderFlood: ranks connect, and connect again, while unauthenticated connections
// take all room at their data listeners.
func TestLinksUnderFlood(t *testing.T) {
	goroutines(t, apart, 3, nil, func(m *Mesh, rank, size int) error {
		n := m.net
		f := acceptest.Start(t, n.addr(), 560, attackers()...)
		defer f.Stop()
		for round := range 3 {
			if err := exchange(m, rank, size, uint64(round), 20, 50_000); err != nil {
				return err
			}
			if rank == 0 && round < 2 { // after the last nobody drives the link: what is lost with its sockets stays so
				m.links[1].(*tcpLink).reset(t)
			}
		}
		c := n.accept.Counts()
		for deadline := time.Now().Add(patience); c.Refused[accept.Garbage] == 0 || c.Refused[accept.Unproved] == 0; c = n.accept.Counts() {
			if time.Now().After(deadline) {
				return fmt.Errorf("refusals are not counted: %+v of %d made", c, f.Made.Load())
			}
			time.Sleep(time.Millisecond)
		}
		return nil
	})
}

// TestReplayedGreeting: a replay of a member's greeting opens no other socket, and does not disturb
// the member's.
func TestReplayedGreeting(t *testing.T) {
	looked := make(chan struct{})
	goroutines(t, apart, 2, nil, func(m *Mesh, rank, size int) error {
		n := m.net
		if rank == 1 {
			<-looked // its own attempt would take the place of the one that is looked at
			return exchange(m, rank, size, 3, 20, 4096)
		}
		look := sync.OnceFunc(func() { close(looked) })
		defer look()
		g := dataGreeting{src: 0, dst: 1, total: 2, attempt: newNonce(), number: 1, once: newNonce()}
		hello := n.encode(g)
		say := func() (answer []byte, conn net.Conn, err error) {
			if conn, err = net.Dial("tcp", n.m.infos[1].Addr); err != nil {
				return nil, nil, err
			}
			conn.SetDeadline(time.Now().Add(patience))
			conn.Write(hello)
			b := make([]byte, dataReply)
			got, err := io.ReadFull(conn, b)
			return b[:got], conn, err
		}
		answer, first, err := say()
		if err != nil || len(answer) != dataReply {
			return fmt.Errorf("greeting: %d bytes, %w", len(answer), err)
		}
		answer, second, err := say()
		if err == nil || len(answer) > 0 {
			return fmt.Errorf("a replayed greeting was answered: %d bytes, %v", len(answer), err)
		}
		second.Close()
		first.SetReadDeadline(time.Now().Add(10 * time.Millisecond))
		if _, err := first.Read(make([]byte, 1)); err == nil || err == io.EOF {
			return fmt.Errorf("the socket that was opened: %v", err)
		}
		first.Close()
		look()
		return exchange(m, rank, size, 3, 20, 4096)
	})
}

// FuzzUnauthenticated gives a data listener the bytes of a peer that does not know the key. It accepts
// none of them, and does not panic.
func FuzzUnauthenticated(f *testing.F) {
	m := &Mesh{cfg: Config{ID: 7, Rank: 1, Size: 4, Key: []byte("key")}, infos: make([]peerInfo, 4)}
	n := &network{m: m}
	f.Add([]byte(dataMagic))
	f.Add(append([]byte(controlMagic), make([]byte, dataHello)...))
	other := &network{m: &Mesh{cfg: Config{ID: 7, Rank: 0, Size: 4, Key: []byte("another")}, infos: make([]peerInfo, 4)}}
	f.Add(other.encode(dataGreeting{src: 0, dst: 1, total: 2, number: 3}))
	f.Fuzz(func(t *testing.T, in []byte) {
		ours, theirs := net.Pipe()
		go func() { // the other end may have hung up
			_, _ = io.Copy(ours, bytes.NewReader(in))
			ours.Close()
		}()
		var b [dataHello]byte
		if g, err := n.readGreeting(accept.Wrap(theirs), b[:]); err == nil {
			t.Fatalf("taken: %+v", g)
		}
		theirs.Close()
	})
}
