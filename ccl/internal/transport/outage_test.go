package transport

import (
	"errors"
	"fmt"
	"net"
	"strings"
	"syscall"
	"testing"
	"time"
	"unsafe"

	"github.com/lockstep-ccl/lockstep/record"
	"golang.org/x/sys/unix"
)

// reset ends a link's sockets as a middlebox does that forgets them: both ends' kernels
// learn that the connections are no more.
func (l *tcpLink) reset(t testing.TB) {
	for _, s := range l.socks {
		none := unix.RawSockaddr{Family: unix.AF_UNSPEC}
		if _, _, errno := unix.RawSyscall(unix.SYS_CONNECT, uintptr(s.fd), uintptr(unsafe.Pointer(&none)), unsafe.Sizeof(none)); errno != 0 {
			t.Error(errno)
		}
	}
}

// deafen has the kernel throw away what arrives at a socket.
func deafen(t testing.TB, fd int) {
	nothing := unix.SockFilter{Code: unix.BPF_RET | unix.BPF_K} // 0 bytes of a segment
	if err := unix.SetsockoptSockFprog(fd, unix.SOL_SOCKET, unix.SO_ATTACH_FILTER, &unix.SockFprog{Len: 1, Filter: &nothing}); err != nil {
		t.Error(err)
	}
}

// recordedPair runs two ranks with a recorder each; read returns what a rank's says of
// its connection, and its link records.
func recordedPair(t *testing.T, f func(m *Mesh, rank int) error) (read func(rank int) (record.ConnStatus, []record.LinkState)) {
	t.Helper()
	var writers [2]*record.Writer
	var comms [2]*record.Comm
	for r := range writers {
		w, err := record.Create(record.Options{Dir: t.TempDir(), Identity: record.Identity{Job: "j", Rank: int32(r)}})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { w.Close() })
		writers[r] = w
		comms[r], _ = w.AddComm(record.CommEntry{ID: 1, Name: "test", Rank: int32(r), Size: 2})
	}
	goroutines(t, apart, 2, func(c *Config) { c.Recorder, c.Comm = writers[c.Rank], comms[c.Rank] },
		func(m *Mesh, rank, _ int) error { return f(m, rank) })
	return func(rank int) (s record.ConnStatus, states []record.LinkState) {
		r, err := record.Open(writers[rank].Path())
		if err != nil {
			t.Fatal(err)
		}
		defer r.Close()
		buf := make([]record.Record, 10_000)
		for _, rec := range buf[:r.Next(buf)] {
			if rec.Kind == record.KindLink {
				states = append(states, record.LinkState(rec.Code))
			}
		}
		return r.Conns(nil)[0], states
	}
}

// TestBrokenSockets: a link whose sockets are reset, or carry nothing any more, goes on
// over others, whoever notices; both ends record when it was down, and how often.
func TestBrokenSockets(t *testing.T) {
	const rounds = 4
	for _, how := range []string{"reset", "silence", "silence of all but one"} {
		t.Run(how, func(t *testing.T) {
			some := how == "silence of all but one" // over that one the stream goes on: an outage is no must
			read := recordedPair(t, func(m *Mesh, rank int) error {
				for round := range rounds {
					if err := exchange(m, rank, 2, uint64(round), 30, 300_000); err != nil {
						return fmt.Errorf("round %d: %w", round, err)
					}
					if round == rounds-1 {
						break
					}
					l := m.links[1-rank].(*tcpLink)
					if how == "reset" {
						if rank == round%2 {
							l.reset(t)
						}
						continue
					}
					for i, s := range l.socks {
						if !some || i != round%len(l.socks) {
							deafen(t, s.fd)
						}
					}
				}
				return nil
			})
			for rank := range 2 {
				s, states := read(rank)
				down, up := 0, 0
				for i, state := range states {
					if want := []record.LinkState{record.LinkUp, record.LinkDown}[i%2]; state != want && i < 2*rounds-1 {
						t.Errorf("rank %d: link record %d is %v, want %v", rank, i, state, want)
					}
					switch state {
					case record.LinkDown:
						down++
					case record.LinkUp:
						up++
					}
				}
				if !some && (down < rounds-1 || s.Switches < rounds-1) {
					t.Errorf("rank %d: %d outages in %d rounds, %d times on other sockets: %v", rank, down, rounds, s.Switches, states)
				}
			}
		})
	}
}

// TestWaitIsToldThroughAnOutage: while there is no path, who waits for bytes is seen to
// wait since before, and the receiver is not blamed for bytes that cannot be sent.
func TestWaitIsToldThroughAnOutage(t *testing.T) {
	const since = 12345
	checked, quiet := make(chan struct{}), make(chan struct{})
	recordedPair(t, func(m *Mesh, rank int) error {
		if err := exchange(m, rank, 2, 1, 5, 1000); err != nil {
			return err
		}
		l := m.links[1-rank].(*tcpLink)
		status := func() (s record.ConnStatus) {
			r, err := record.Open(m.cfg.Recorder.Path())
			if err != nil {
				t.Fatal(err)
			}
			defer r.Close()
			return r.Conns(nil)[0]
		}
		if rank == 1 {
			close(quiet)
			<-checked // its executor does not run before, so nothing goes on
			var b [1]byte
			if err := recvAll(m, l, make([]byte, 3<<20)); err != nil {
				return err
			}
			return sendAll(m, l, b[:])
		}
		<-quiet
		l.WantRecv(since)
		l.reset(t)
		b := make([]byte, 3<<20) // more than the window
		sent := 0
		err := eventually(m, "an outage is recorded", func() bool {
			n, err := l.TrySend(b[sent:])
			if err != nil {
				t.Error(err)
			}
			sent += n
			return status().Link == record.LinkDown
		})
		if s := status(); s.RxWaitingSince != since || s.TxBlockedSince != 0 {
			t.Errorf("waiting since %d, blocked since %d", s.RxWaitingSince, s.TxBlockedSince)
		}
		close(checked)
		if err != nil {
			return err
		}
		if err := sendAll(m, l, b[sent:]); err != nil {
			return err
		}
		return recvAll(m, l, b[:1])
	})
}

// TestStoppedThroughReset: a stopped peer is late, also where its sockets were reset and
// it answers no attempt to connect: its kernel does. The bound does not count.
func TestStoppedThroughReset(t *testing.T) {
	m, cmds := processes(t, apart, 2, "sink")
	m.cfg.Outage = 3 * time.Second
	l, err := m.Link(1)
	if err != nil {
		t.Fatal(err)
	}
	b := make([]byte, 1<<20)
	round := func(n int) {
		t.Helper()
		var head [8]byte
		head[0], head[1], head[2] = byte(n), byte(n>>8), byte(n>>16)
		if err := errors.Join(sendAll(m, l, head[:])); err != nil {
			t.Fatal(err)
		}
		l.AlignSend()
		if n == 0 {
			return
		}
		if err := sendAll(m, l, b[:n]); err != nil {
			t.Fatal(err)
		}
		l.AlignSend()
		if err := recvAll(m, l, b[:1]); err != nil {
			t.Fatal(err)
		}
		l.AlignRecv()
	}
	round(1 << 20)
	cmds[1].Process.Signal(syscall.SIGSTOP)
	for u := wait(m); !stopped(t, cmds[1].Process.Pid); {
		if err := u.again(); err != nil {
			t.Fatal(err)
		}
	}
	l.WantRecv(record.Now())
	l.(*tcpLink).reset(t)
	for stop := time.Now().Add(5 * time.Second); time.Now().Before(stop); m.Wait(10 * time.Millisecond) {
		if _, err := l.TryRecv(b[:1]); err != nil {
			t.Fatalf("a stopped peer's link: %v", err)
		}
	}
	cmds[1].Process.Signal(syscall.SIGCONT)
	round(1 << 20)
	round(0)
	if err := recvAll(m, l, b[:1]); err != nil {
		t.Fatal(err)
	}
}

// TestNobodyThere: a link that has lost its sockets ends soon when another program
// listens in its peer's place, and at the bound when nobody answers; it says so.
func TestNobodyThere(t *testing.T) {
	for _, who := range []string{"another program", "silence"} {
		t.Run(who, func(t *testing.T) {
			ln, err := net.Listen("tcp4", "127.0.0.1:0")
			if err != nil {
				t.Fatal(err)
			}
			defer ln.Close()
			lc := net.ListenConfig{}
			lc.SetMultipathTCP(false)
			deaf, err := lc.Listen(t.Context(), "tcp4", "127.0.0.1:0")
			if err != nil {
				t.Fatal(err)
			}
			defer deaf.Close()
			raw, err := deaf.(*net.TCPListener).SyscallConn()
			if err != nil {
				t.Fatal(err)
			}
			raw.Control(func(fd uintptr) { deafen(t, int(fd)) })
			go func() {
				for {
					c, err := ln.Accept()
					if err != nil {
						return
					}
					c.Close()
				}
			}()
			done, quiet := make(chan struct{}), make(chan struct{})
			goroutines(t, apart, 2, func(c *Config) {
				if who == "silence" { // another program answers, so the bound does not count
					c.Outage = 3 * time.Second
				}
			}, func(m *Mesh, rank, _ int) error {
				if err := exchange(m, rank, 2, 1, 3, 1000); err != nil {
					return err
				}
				if rank == 1 {
					close(quiet) // from here on it takes over no sockets
					<-done
					return nil
				}
				defer close(done)
				<-quiet
				l := m.links[1].(*tcpLink)
				addr, want := ln.Addr().String(), errStranger.Error()
				if who == "silence" {
					addr, want = deaf.Addr().String(), "nothing came from its host for"
				}
				l.mu.Lock()
				m.infos[1].Addr = addr
				l.mu.Unlock()
				l.WantRecv(record.Now()) // as an executor says that waits
				l.reset(t)
				var b [1]byte
				err := recvAll(m, l, b[:])
				if err == nil || !strings.Contains(err.Error(), want) || !strings.Contains(err.Error(), addr) || !strings.Contains(err.Error(), "rank 1") {
					return fmt.Errorf("want %q of rank 1 at %s, got %v", want, addr, err)
				}
				return nil
			})
		})
	}
}

// TestLastBytesThroughReset: what a rank that closes has sent arrives also where the
// network resets its connection at the end.
func TestLastBytesThroughReset(t *testing.T) {
	const n = 512 << 10
	gone := make(chan struct{})
	goroutines(t, apart, 2, nil, func(m *Mesh, rank, _ int) error {
		if err := exchange(m, rank, 2, 1, 3, 1000); err != nil {
			return err
		}
		l := m.links[1-rank]
		l.AlignSend()
		l.AlignRecv()
		b := make([]byte, n)
		if rank == 0 {
			fill(b, 0, 1, 0)
			err := sendAll(m, l, b) // the window takes it
			l.(*tcpLink).reset(t)
			close(gone)
			return errors.Join(err, m.Close())
		}
		<-gone
		if err := recvAll(m, l, b); err != nil {
			return err
		}
		for i := range b {
			if b[i] != pattern(0, 1, uint64(i)) {
				return fmt.Errorf("wrong byte %d", i)
			}
		}
		return nil
	})
}

// TestOneSocketEnds: a link of which one socket ends, and swallows a frame before, goes
// on over others.
func TestOneSocketEnds(t *testing.T) {
	const n = 1000
	fds, sent := make(chan int, 1), make(chan struct{})
	goroutines(t, apart, 2, nil, func(m *Mesh, rank, _ int) error {
		if err := exchange(m, rank, 2, 1, 3, 1000); err != nil {
			return err
		}
		l := m.links[1-rank].(*tcpLink)
		l.AlignSend()
		l.AlignRecv()
		b := make([]byte, n)
		if rank == 1 {
			fill(b, 1, 0, 0)
			swallower := <-fds
			if err := sendAll(m, l, b); err != nil {
				return err
			}
			var frame [frameSize + n]byte
			err := eventually(m, "the frame is there", func() bool {
				k, _, _ := unix.Recvfrom(swallower, frame[:], unix.MSG_PEEK|unix.MSG_DONTWAIT)
				return k >= len(frame)
			})
			if err != nil {
				return err
			}
			for k := 1; k > 0; {
				k, _ = unix.Read(swallower, frame[:])
			}
			if err := unix.Shutdown(l.socks[0].fd, unix.SHUT_WR); err != nil {
				return err
			}
			close(sent)
			return recvAll(m, l, b[:1])
		}
		fds <- l.socks[0].fd
		<-sent // nobody else reads it before
		l.WantRecv(record.Now())
		if err := recvAll(m, l, b); err != nil {
			return err
		}
		for i := range b {
			if b[i] != pattern(1, 0, uint64(i)) {
				return fmt.Errorf("wrong byte %d", i)
			}
		}
		return sendAll(m, l, b[:1])
	})
}

// TestLostBytes: what the peer had twice was not lost.
func TestLostBytes(t *testing.T) {
	for _, test := range []struct {
		segments, twice uint32
		bytes, want     uint64
	}{{0, 0, 0, 0}, {4, 0, 4000, 4000}, {4, 3, 4000, 1000}, {4, 4, 4000, 0}, {4, 9, 4000, 0}} {
		if got := lostBytes(&unix.TCPInfo{Total_retrans: test.segments, Dsack_dups: test.twice, Bytes_retrans: test.bytes}); got != test.want {
			t.Errorf("%+v: %d bytes", test, got)
		}
	}
}

// TestRTTMean: the mean is by what sockets have carried, and what was told is taken back when a link carries too little
// for it: a path may have become so slow that nothing is acknowledged.
func TestRTTMean(t *testing.T) {
	var r rttMean
	now := int64(5e9)
	r.next(now)
	r.add(&unix.TCPInfo{Bytes_acked: 3 * rttBytes, Rtt: 100}, 0)
	r.add(&unix.TCPInfo{Bytes_acked: 9 * rttBytes, Rtt: 900}, 8*rttBytes)
	if ns, news := r.next(now + 1); !news || ns != 300e3 {
		t.Errorf("%d ns, %v", ns, news)
	}
	r.add(&unix.TCPInfo{Bytes_acked: 9*rttBytes + 1, Rtt: 900}, 9*rttBytes)
	if ns, news := r.next(now + rttFor/2); news {
		t.Errorf("%d ns by a byte", ns)
	}
	if ns, news := r.next(now + 1 + rttFor); !news || ns != 0 {
		t.Errorf("%d ns, %v, of what is old", ns, news)
	}
}

// TestClosedSocketIsNotWaitedFor: bytes that nobody owes any more, on a socket that the kernel has closed and whose
// error was told before, keep no rank from leaving.
func TestClosedSocketIsNotWaitedFor(t *testing.T) {
	l, _ := bareLink(t)
	ln, err := net.Listen("tcp4", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	ours, err := net.Dial("tcp4", ln.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer ours.Close()
	theirs, err := ln.Accept()
	if err != nil {
		t.Fatal(err)
	}
	fd, err := detach(ours)
	if err != nil {
		t.Fatal(err)
	}
	peer, err := detach(theirs)
	if err != nil {
		t.Fatal(err)
	}
	unix.Close(l.socks[0].fd)
	l.socks[0].fd = fd
	deafen(t, peer)
	l.giveCredit()                         // which is not acknowledged
	_ = theirs.(*net.TCPConn).SetLinger(0) // a reset
	theirs.Close()
	unix.Close(peer)
	for range 1000 {
		if info, err := unix.GetsockoptTCPInfo(fd, unix.IPPROTO_TCP, unix.TCP_INFO); err == nil && info.State == tcpClosed {
			break
		}
		time.Sleep(time.Millisecond)
	}
	_, _ = unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_ERROR)
	l.socks[0].ended = true
	if left, _ := unix.IoctlGetInt(fd, unix.SIOCOUTQ); left == 0 {
		t.Fatal("everything was acknowledged")
	}
	for range 3 {
		if l.finish() {
			return
		}
	}
	t.Error("it waits")
}
