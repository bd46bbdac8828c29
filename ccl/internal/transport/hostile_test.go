package transport

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

func init() {
	roles["sleep"] = func(m *Mesh, _, _ int) error {
		l, err := m.Link(0)
		if err != nil {
			return err
		}
		if err := sendAll(m, l, []byte{1}); err != nil {
			return err
		}
		var b [1]byte
		return recvAll(m, l, b[:])
	}
}

// A killed peer breaks its TCP links and leaves nothing in the runtime
// directory (tempDir checks); Wait on shared memory keeps its bound.
func TestKilledPeer(t *testing.T) {
	for _, p := range []place{oneNode, apart} {
		t.Run(string(p), func(t *testing.T) {
			m, cmds := processes(t, p, 2, "sleep")
			l, err := m.Link(1)
			if err != nil {
				t.Fatal(err)
			}
			var b [1]byte
			if err := recvAll(m, l, b[:]); err != nil {
				t.Fatal(err)
			}
			if err := cmds[1].Process.Signal(syscall.SIGKILL); err != nil {
				t.Fatal(err)
			}
			cmds[1].Wait()
			if p == apart {
				if err := recvAll(m, l, b[:]); !errors.Is(err, io.EOF) && !errors.Is(err, unix.ECONNRESET) {
					t.Fatalf("receive from a dead peer: %v", err)
				}
				return
			}
			for range 3000 {
				if n, err := l.TryRecv(b[:]); n > 0 || err != nil {
					t.Fatal(n, err)
				}
				m.Wait(time.Millisecond)
			}
		})
	}
}

// A stopped peer is late, not dead: the link survives, however full.
func TestStoppedPeer(t *testing.T) {
	for _, p := range []place{oneNode, apart} {
		t.Run(string(p), func(t *testing.T) {
			m, cmds := processes(t, p, 2, "sink")
			l, err := m.Link(1)
			if err != nil {
				t.Fatal(err)
			}
			b := make([]byte, 8<<20)
			round := func(while func()) {
				binary.LittleEndian.PutUint64(b, uint64(len(b)))
				if err := sendAll(m, l, b[:8]); err != nil {
					t.Fatal(err)
				}
				l.AlignSend()
				sent := 0
				for stop := time.Now().Add(2500 * time.Millisecond); while != nil && time.Now().Before(stop); {
					n, err := l.TrySend(b[sent:])
					if err != nil {
						t.Fatalf("a stopped peer's link: %v", err)
					}
					sent += n
					m.Wait(10 * time.Millisecond)
				}
				if while != nil {
					if sent == len(b) {
						t.Error("all was taken: there is no flow control")
					}
					while()
				}
				if err := sendAll(m, l, b[sent:]); err != nil {
					t.Fatal(err)
				}
				l.AlignSend()
				if err := recvAll(m, l, b[:1]); err != nil {
					t.Fatal(err)
				}
				l.AlignRecv()
			}
			round(nil)
			cmds[1].Process.Signal(syscall.SIGSTOP)
			for u := wait(m); !stopped(t, cmds[1].Process.Pid); { // all its threads, on a busy machine
				if err := u.again(); err != nil {
					t.Fatal(err)
				}
			}
			round(func() { cmds[1].Process.Signal(syscall.SIGCONT) })
			var end [8]byte
			if err := sendAll(m, l, end[:]); err != nil {
				t.Fatal(err)
			}
			if err := recvAll(m, l, end[:1]); err != nil {
				t.Fatal(err)
			}
		})
	}
}

// A socket that its dialler gave up, since this rank was stopped or slow to answer, does
// not pass for the one that took its place.
func TestDialledAgain(t *testing.T) {
	dialled := make(chan struct{})
	goroutines(t, apart, 2, nil, func(m *Mesh, rank, size int) error {
		if rank == 1 {
			<-dialled
			return exchange(m, rank, size, 5, 50, 100_000)
		}
		err := func() error {
			defer close(dialled)
			n := m.net
			l := n.peer(1)
			t := l.connecting()
			t.attempt, t.number, t.dialing = newNonce(), 1, true
			fd, status, _, err := n.greet(n.m.ctx, dataGreeting{src: 0, dst: 1, total: n.sockets(1), attempt: t.attempt, number: 1}, 0)
			if err != nil || status != replyOK {
				return fmt.Errorf("greeting: status %d: %w", status, err)
			}
			unix.Close(fd)
			return n.dial(l, 1, t.attempt)
		}()
		return errors.Join(err, exchange(m, rank, size, 5, 50, 100_000))
	})
}

// stopped reports whether a process is.
func stopped(t *testing.T, pid int) bool {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		t.Fatal(err)
	}
	return bytes.Contains(b, []byte(") T "))
}

// Strangers at the data listener, and members with another key, are turned
// away; they do not disturb the members.
func TestStrangersAreTurnedAway(t *testing.T) {
	for _, p := range []place{apart, overRDMA} {
		t.Run(string(p), func(t *testing.T) { testStrangers(t, p) })
	}
}

func testStrangers(t *testing.T, p place) {
	goroutines(t, p, 2, nil, func(m *Mesh, rank, size int) error {
		addr := m.infos[1-rank].Addr
		for _, hello := range [][]byte{nil, []byte("GET / HTTP/1.1\r\n\r\n"), make([]byte, dataHello), append([]byte(dataMagic), make([]byte, dataHello)...),
			append([]byte(controlMagic), make([]byte, dataHello)...), m.net.otherKind(rank), []byte(dataMagic)} {
			conn, err := net.Dial("tcp", addr)
			if err != nil {
				return err
			}
			conn.SetDeadline(time.Now().Add(patience))
			conn.Write(hello)
			conn.(*net.TCPConn).CloseWrite()
			if n, _ := conn.Read(make([]byte, 1)); n > 0 {
				t.Errorf("an answer to %q", hello)
			}
			conn.Close()
		}
		return exchange(m, rank, size, 3, 20, 4096)
	})

	errs := make(chan error, 2)
	goroutines(t, apart, 2, func(c *Config) {
		if c.Rank == 0 {
			c.Key = []byte("not the key")
			end := time.Now().Add(300 * time.Millisecond)
			c.Err = func() error {
				if time.Now().After(end) {
					return context.DeadlineExceeded
				}
				return nil
			}
		}
	}, func(m *Mesh, rank, size int) error {
		if rank == 1 {
			return nil
		}
		l, err := m.Link(1)
		if err != nil {
			return err
		}
		errs <- sendAll(m, l, []byte{1})
		return nil
	})
	if err := <-errs; err == nil {
		t.Error("connected with another key")
	}
}

// otherKind is a member's greeting, proved, for a link that it does not have.
func (n *network) otherKind(rank int) []byte {
	b := n.encode(dataGreeting{src: rank, dst: 1 - rank, total: 1, attempt: newNonce(), number: 1})
	b = b[:dataBody]
	if n.magic(1-rank) == dataMagic {
		copy(b, controlMagic)
	} else {
		copy(b, dataMagic)
	}
	return append(b, n.prove("hello", n.m.infos[1-rank].Nonce, b)...)
}

// FuzzHandshake gives a listener greetings, and a dialler replies, of somebody who knows
// the communicator's key: what is taken is within bounds.
func FuzzHandshake(f *testing.F) {
	m := &Mesh{cfg: Config{ID: 7, Rank: 1, Size: 4, Key: []byte("key")}, infos: make([]peerInfo, 4)}
	n := &network{m: m}
	whole := n.encode(dataGreeting{src: 1, dst: 0, index: 1, total: 2, number: 3})
	f.Add(whole[:dataHello-sha256.Size])
	f.Add([]byte{replyStale, 9, 0, 0, 0})
	f.Fuzz(func(t *testing.T, in []byte) {
		body := make([]byte, dataHello-sha256.Size)
		copy(body, in)
		hello := append(body, n.prove("hello", n.nonce, body)...)
		if g, err := n.decode(hello); err == nil && (g.src < 0 || g.src >= 4 || g.src == 1 || g.dst != 1 || g.index >= g.total || g.total > maxSockets || g.number == 0 || g.number > maxNumber) {
			t.Fatalf("%+v", g)
		}
		reply := make([]byte, 5)
		copy(reply, in)
		reply = append(reply, n.prove("reply", m.infos[2].Nonce, append(bytes.Clone(hello), reply...))...)
		if status, number, err := n.decodeReply(2, hello, reply); err == nil && (status < replyOK || status > replyOver || number > maxNumber) {
			t.Fatalf("reply %d, %d", status, number)
		}
	})
}
