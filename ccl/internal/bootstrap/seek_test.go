package bootstrap

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"pgregory.net/rapid"
)

// cut simulates a network outage until mend is called: the kernel drops what arrives for the
// controls' connections and listeners.
func cut(t *testing.T, controls []*Control) (mend func()) {
	t.Helper()
	nothing := unix.SockFilter{Code: unix.BPF_RET | unix.BPF_K} // keep 0 bytes of a segment
	var all []syscall.Conn
	for _, c := range controls {
		all = append(all, c.listener.ln.(syscall.Conn))
		c.mu.Lock()
		for _, p := range c.peers {
			if p != nil && p.conn != nil {
				all = append(all, p.conn.(syscall.Conn))
			}
		}
		c.mu.Unlock()
	}
	each := func(f func(fd int) error) {
		for _, sc := range all {
			raw, err := sc.SyscallConn()
			if err != nil {
				continue // it is closed
			}
			raw.Control(func(fd uintptr) { err = f(int(fd)) })
			if err != nil {
				t.Error(err)
			}
		}
	}
	each(func(fd int) error {
		return unix.SetsockoptSockFprog(fd, unix.SOL_SOCKET, unix.SO_ATTACH_FILTER, &unix.SockFprog{Len: 1, Filter: &nothing})
	})
	return func() {
		each(func(fd int) error { return unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_DETACH_FILTER, 0) })
	}
}

// TestSilentHost: a host that is silent for Config.Outage counts as dead, and the error
// says what was tried.
func TestSilentHost(t *testing.T) {
	t.Parallel()
	controls, errs := joinAll(t, testContext(t), 3, func(c *Config) { c.Outage = 4 * time.Second })
	if err := errors.Join(errs...); err != nil {
		t.Fatal(err)
	}
	defer leaveAll(controls)
	cut(t, controls)
	for _, c := range controls {
		e := next(c, time.Minute)
		if e == nil || e.Kind != Lost || (c.rank != 0) != (e.Rank == 0) {
			t.Fatalf("rank %d, whose peers are silent: %+v", c.rank, e)
		}
		if s := e.Err.Error(); !strings.Contains(s, "nothing has come from its host for") || !strings.Contains(s, controls[e.Rank].listener.Addr()) {
			t.Errorf("rank %d: %s", c.rank, s)
		}
	}
}

// TestStarvedKernel: on a busy machine TCP_USER_TIMEOUT may end a connection before the kernel
// has processed an acknowledgement. Both processes live, so no rank is lost.
func TestStarvedKernel(t *testing.T) {
	t.Parallel()
	controls := mustJoin(t, 3)
	conn := func() net.Conn {
		controls[1].mu.Lock()
		defer controls[1].mu.Unlock()
		return controls[1].peers[0].conn
	}
	old := conn()
	cut(t, controls[1:2]) // other connections still work
	for deadline := time.Now().Add(time.Minute); conn() == old || conn() == nil; time.Sleep(10 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatal("the kernel has not given the connection up")
		}
	}
	if err := each(controls, func(c *Control) error { return c.Barrier(testContext(t)) }); err != nil {
		t.Error(err)
	}
	for r, c := range controls {
		if e := next(c, 0); e != nil {
			t.Errorf("rank %d: %+v: %v", r, e, e.Err)
		}
	}
}

// TestOutage: an outage shorter than Config.Outage loses no frame.
func TestOutage(t *testing.T) {
	t.Parallel()
	controls := mustJoin(t, 3)
	mend := cut(t, controls)
	done := make(chan error, 1)
	go func() { done <- each(controls, func(c *Control) error { return c.Barrier(testContext(t)) }) }()
	for _, c := range controls { // until the kernel has ended the connections
		for deadline := time.Now().Add(time.Minute); c.rank > 0; time.Sleep(10 * time.Millisecond) {
			c.mu.Lock()
			lost := c.peers[0].disconnected()
			c.mu.Unlock()
			if lost {
				break
			}
			if time.Now().After(deadline) {
				t.Fatalf("rank %d still has its connection", c.rank)
			}
		}
	}
	select {
	case err := <-done:
		t.Fatalf("a barrier without a network: %v", err)
	default:
	}
	mend()
	if err := <-done; err != nil {
		t.Error(err)
	}
	for r, c := range controls {
		if e := next(c, 0); e != nil {
			t.Errorf("rank %d: %+v", r, e)
		}
	}
}

// forwarder forwards connections to an address. It resets each after a number of bytes, 0 for
// never.
type forwarder struct {
	ln    net.Listener
	wg    sync.WaitGroup
	mu    sync.Mutex
	to    string
	after func() int
	cuts  int
	conns map[net.Conn]struct{}
}

func newForwarder(t testing.TB) *forwarder {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	f := &forwarder{ln: ln, after: func() int { return 0 }, conns: map[net.Conn]struct{}{}}
	f.wg.Go(func() {
		for {
			in, err := ln.Accept()
			if err != nil {
				return
			}
			f.wg.Go(func() { f.carry(in) })
		}
	})
	return f
}

func (f *forwarder) carry(in net.Conn) {
	f.mu.Lock()
	to, after := f.to, f.after()
	f.mu.Unlock()
	out, err := net.Dial("tcp", to)
	if err != nil {
		in.Close()
		return
	}
	f.mu.Lock()
	f.conns[in], f.conns[out] = struct{}{}, struct{}{}
	f.mu.Unlock()
	var once sync.Once
	end := func(reset bool) {
		once.Do(func() {
			for _, c := range []net.Conn{in, out} {
				if reset {
					c.(*net.TCPConn).SetLinger(0)
				}
				c.Close()
			}
		})
	}
	left := after
	var mu sync.Mutex
	one := func(dst, src net.Conn) {
		b := make([]byte, 512)
		for {
			n, err := src.Read(b)
			mu.Lock()
			if after > 0 && n >= left {
				n, err = left, errors.New("cut")
			}
			left -= n
			mu.Unlock()
			dst.Write(b[:n])
			if err != nil {
				if errors.Is(err, io.EOF) {
					dst.(*net.TCPConn).CloseWrite()
					return
				}
				f.mu.Lock()
				f.cuts++
				f.mu.Unlock()
				end(true)
				return
			}
		}
	}
	var wg sync.WaitGroup
	wg.Go(func() { one(out, in) })
	wg.Go(func() { one(in, out) })
	wg.Wait()
	end(false)
}

func (f *forwarder) close() {
	f.ln.Close()
	f.mu.Lock()
	for c := range f.conns {
		c.Close()
	}
	f.mu.Unlock()
	f.wg.Wait()
}

// TestCutsLoseNothing: resets after any byte, also of the handshake, neither lose nor repeat a
// frame. No rank is reported lost, and an abort is reported once.
func TestCutsLoseNothing(t *testing.T) {
	cuts := 0
	defer func() { t.Logf("%d connections cut", cuts) }()
	rapid.Check(t, func(rt *rapid.T) {
		seed := rapid.Uint64().Draw(rt, "seed")
		mean := rapid.IntRange(1000, 6000).Draw(rt, "bytes between cuts")
		rounds := rapid.IntRange(1, 25).Draw(rt, "operations")
		size := rapid.IntRange(0, mean/12).Draw(rt, "bytes each") // small enough that a frame gets through
		f := newForwarder(t)
		defer f.close()
		dice := rand.New(rand.NewPCG(seed, 1))
		ln, err := Listen("127.0.0.1:0", secret)
		if err != nil {
			t.Fatal(err)
		}
		f.mu.Lock()
		f.to, f.after = ln.Addr(), func() int { return 1 + dice.IntN(2*mean) }
		f.mu.Unlock()
		const n = 3
		id := NewID(f.ln.Addr().String())
		ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
		defer cancel()
		controls, errs := make([]*Control, n), make([]error, n)
		var wg sync.WaitGroup
		for r := range n {
			cfg := Config{ID: id, Rank: r, Size: n, Secret: secret}
			if r == 0 {
				cfg.Listener = ln
			}
			wg.Go(func() { controls[r], errs[r] = Join(ctx, cfg) })
		}
		wg.Wait()
		if err := errors.Join(errs...); err != nil {
			rt.Fatal(err)
		}
		err = each(controls, func(c *Control) error {
			for i := range rounds {
				c.Tell([]byte("something else"))
				word := func(r int) string { return fmt.Sprintf("%d of %d %s", i, r, strings.Repeat("x", size)) }
				got, err := c.AllGather(ctx, []byte(word(c.rank)))
				if err != nil {
					return err
				}
				for r := range got {
					if string(got[r]) != word(r) {
						return fmt.Errorf("rank %d, gather %d: %q from rank %d", c.rank, i, got[r], r)
					}
				}
			}
			return nil
		})
		if err != nil {
			rt.Fatalf("after %d cuts: %v", f.cuts, err)
		}
		f.mu.Lock()
		cuts += f.cuts
		f.mu.Unlock()
		controls[1].Abort([]byte("why"))
		for _, r := range []int{0, 2} {
			if e := next(controls[r], time.Minute); e == nil || e.Kind != Aborted || e.Rank != 1 {
				rt.Fatalf("rank %d: %+v, want the abort", r, e)
			}
			if e := next(controls[r], 0); e != nil {
				rt.Fatalf("rank %d: %+v after the abort", r, e)
			}
		}
		f.mu.Lock()
		f.after = func() int { return 0 }
		f.mu.Unlock()
		leaveAll(controls)
	})
}

// TestResetWhereNobodyDied: when a connection between two live processes is reset, no rank is
// lost.
func TestResetWhereNobodyDied(t *testing.T) {
	controls := mustJoin(t, 3)
	for _, side := range []int{0, 1} {
		c, other := controls[side], 1-side
		c.mu.Lock()
		conn := c.peers[other].conn.(*net.TCPConn)
		c.mu.Unlock()
		conn.SetLinger(0)
		conn.Close()
		if err := each(controls, func(c *Control) error { return c.Barrier(testContext(t)) }); err != nil {
			t.Errorf("rank %d's connection was reset: %v", side, err)
		}
	}
	for r, c := range controls {
		if e := next(c, 0); e != nil {
			t.Errorf("rank %d: %+v", r, e)
		}
	}
}

// TestAnotherProcess: a rank is lost if another process listens at its address, with or without the
// secret.
func TestAnotherProcess(t *testing.T) {
	for _, what := range []string{"rank of a later attempt", "another program"} {
		t.Run(what, func(t *testing.T) {
			f := newForwarder(t)
			defer f.close()
			ln, err := Listen("127.0.0.1:0", secret)
			if err != nil {
				t.Fatal(err)
			}
			f.mu.Lock()
			f.to = ln.Addr()
			f.mu.Unlock()
			id := NewID(f.ln.Addr().String())
			ctx := testContext(t)
			var controls [2]*Control
			var errs [2]error
			var wg sync.WaitGroup
			wg.Go(func() { controls[0], errs[0] = Join(ctx, Config{ID: id, Size: 2, Secret: secret, Listener: ln}) })
			wg.Go(func() { controls[1], errs[1] = Join(ctx, Config{ID: id, Size: 2, Rank: 1, Secret: secret}) })
			wg.Wait()
			if err := errors.Join(errs[:]...); err != nil {
				t.Fatal(err)
			}
			defer leaveAll(controls[:])
			f.mu.Lock()
			if what == "another program" {
				s, err := net.Listen("tcp", "127.0.0.1:0")
				if err != nil {
					t.Fatal(err)
				}
				defer s.Close()
				go func() {
					for {
						c, err := s.Accept()
						if err != nil {
							return
						}
						c.Write([]byte("220 hello, what can I do for you on this fine day, dear visitor from the network? Nothing, I am afraid\r\n"))
						c.Close()
					}
				}()
				f.to = s.Addr().String()
			} else {
				later, err := Listen("127.0.0.1:0", secret)
				if err != nil {
					t.Fatal(err)
				}
				defer later.Close()
				f.to = later.Addr()
			}
			for c := range f.conns {
				c.Close()
			}
			f.mu.Unlock()
			if e := next(controls[1], time.Minute); e == nil || e.Kind != Lost || e.Rank != 0 {
				t.Fatalf("%+v, want the loss of rank 0", e)
			}
		})
	}
}

// TestLeaveThroughOutage: a rank that leaves during an outage does not count as dead.
func TestLeaveThroughOutage(t *testing.T) {
	t.Parallel()
	controls := mustJoin(t, 3)
	mend := cut(t, controls[:1])
	c := controls[1]
	c.mu.Lock()
	p := c.peers[0]
	conn := p.conn.(*net.TCPConn)
	c.mu.Unlock()
	conn.SetLinger(0)
	conn.Close()
	began, left := time.Now(), make(chan error, 1)
	go func() { left <- c.Leave(testContext(t)) }()
	over := func() bool {
		p.mu.Lock()
		defer p.mu.Unlock()
		return p.over
	}
	for time.Since(began) < 2*flushTimeout && !over() {
		time.Sleep(10 * time.Millisecond)
	}
	mend()
	if err := <-left; err != nil {
		t.Error(err)
	}
	for _, r := range []int{0, 2} {
		if e := next(controls[r], time.Minute); e == nil || e.Kind != Left || e.Rank != 1 {
			t.Errorf("rank %d: %+v, want rank 1's leaving", r, e)
		}
	}
}
