package bootstrap

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"
	"pgregory.net/rapid"
)

func TestMain(m *testing.M) {
	if os.Getenv("BOOTSTRAP_TEST_RANK") != "" {
		rankMain()
		return
	}
	if id := os.Getenv(floodEnv); id != "" {
		floodMain(id)
	}
	goleak.VerifyTestMain(m)
}

var secret = []byte("0123456789abcdef0123456789abcdef")

func testContext(t testing.TB) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute) // generous: the machine may be busy
	t.Cleanup(cancel)
	return ctx
}

// joinAll joins n ranks in this process. change edits each rank's Config first.
func joinAll(t testing.TB, ctx context.Context, n int, change func(*Config)) ([]*Control, []error) {
	t.Helper()
	ln, err := Listen("127.0.0.1:0", secret)
	if err != nil {
		t.Fatal(err)
	}
	id := ln.NewID()
	controls, errs := make([]*Control, n), make([]error, n)
	var wg sync.WaitGroup
	for r := range n {
		cfg := Config{ID: id, Rank: r, Size: n, Secret: secret, Info: fmt.Appendf(nil, "rank %d", r)}
		if r == 0 {
			cfg.Listener = ln
		}
		if change != nil {
			change(&cfg)
		}
		wg.Go(func() { controls[r], errs[r] = Join(ctx, cfg) })
		for r > 8 && ctx.Err() == nil { // about 8 handshakes at a time, so that none times out
			if c := ln.route(id.Token); c != nil && n-len(c.missing().Ranks) > r-8 {
				break
			}
			time.Sleep(time.Millisecond)
		}
	}
	wg.Wait()
	return controls, errs
}

func mustJoin(t testing.TB, n int) []*Control {
	t.Helper()
	controls, errs := joinAll(t, testContext(t), n, nil)
	if err := errors.Join(errs...); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { leaveAll(controls) })
	return controls
}

func leaveAll(controls []*Control) {
	each(controls, func(c *Control) error {
		ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
		defer cancel()
		return c.Leave(ctx)
	})
}

func each(controls []*Control, f func(*Control) error) error {
	errs := make([]error, len(controls))
	var wg sync.WaitGroup
	for i, c := range controls {
		if c != nil {
			wg.Go(func() { errs[i] = f(c) })
		}
	}
	wg.Wait()
	return errors.Join(errs...)
}

// next returns c's next event, nil if none comes in time.
func next(c *Control, within time.Duration) *Event {
	select {
	case e, ok := <-c.Events():
		if ok {
			return &e
		}
	case <-time.After(within):
	}
	return nil
}

func TestIDRoundTrip(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		host := rapid.SampledFrom([]string{"127.0.0.1", "::1", "node-7.cluster"}).Draw(t, "host")
		id := NewID(net.JoinHostPort(host, strconv.Itoa(rapid.IntRange(1, 65535).Draw(t, "port"))))
		back, err := ParseID(id.String())
		if err != nil || back != id {
			t.Fatalf("%v -> %v, %v", id, back, err)
		}
	})
	for _, s := range []string{"", "lockstep1:", "lockstep1:host:aa", "lockstep2:h:1:00112233445566778899aabbccddeeff", "lockstep1:h:1:0011", "lockstep1:h:1:" + strings.Repeat("g", 32)} {
		if id, err := ParseID(s); err == nil {
			t.Errorf("ParseID(%q) = %v, want an error", s, id)
		}
	}
}

func TestJoinAndGather(t *testing.T) {
	for _, n := range []int{1, 2, 9} {
		controls := mustJoin(t, n)
		err := each(controls, func(c *Control) error {
			for r, m := range c.Members() {
				if string(m.Info) != fmt.Sprintf("rank %d", r) {
					return fmt.Errorf("rank %d knows rank %d as %q", c.Rank(), r, m.Info)
				}
			}
			if !bytes.Equal(c.Key("x"), controls[0].Key("x")) || bytes.Equal(c.Key("x"), c.Key("y")) {
				return errors.New("keys are wrong")
			}
			for round := range 20 {
				blobs, err := c.AllGather(testContext(t), bytes.Repeat([]byte{byte(c.Rank()), byte(round)}, round*c.Rank()*100))
				if err != nil {
					return err
				}
				for r, b := range blobs {
					if !bytes.Equal(b, bytes.Repeat([]byte{byte(r), byte(round)}, round*r*100)) {
						return fmt.Errorf("round %d: wrong blob of rank %d", round, r)
					}
				}
			}
			if err := c.Barrier(testContext(t)); err != nil {
				return err
			}
			b, err := c.Broadcast(testContext(t), n-1, fmt.Appendf(nil, "from %d", c.Rank()))
			if err != nil || string(b) != fmt.Sprintf("from %d", n-1) {
				return fmt.Errorf("broadcast: %q, %w", b, err)
			}
			return nil
		})
		if err != nil {
			t.Fatalf("size %d: %v", n, err)
		}
	}
}

func TestSlowStarters(t *testing.T) {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	id := NewID(ln.Addr().String())
	ln.Close() // rank 0 listens there again, after the others have tried
	controls := make([]*Control, 3)
	var wg sync.WaitGroup
	for i, r := range []int{2, 1, 0} {
		wg.Go(func() {
			time.Sleep(time.Duration(i) * 150 * time.Millisecond)
			c, err := Join(testContext(t), Config{ID: id, Rank: r, Size: 3, Secret: secret})
			if err != nil {
				t.Error(err)
			}
			controls[r] = c
		})
	}
	wg.Wait()
	leaveAll(controls)
}

func TestConflictsFailEveryRank(t *testing.T) {
	for _, tc := range []struct {
		name   string
		change func(*Config)
		want   error
		rank   int
	}{
		{"size", func(c *Config) {
			if c.Rank == 2 {
				c.Size = 7
			}
		}, ErrSize, 2},
		{"duplicate", func(c *Config) {
			if c.Rank == 3 {
				c.Rank = 1
			}
		}, ErrDuplicateRank, 1},
		{"second root", func(c *Config) {
			if c.Rank == 3 {
				c.Rank = 4
			}
		}, ErrRank, 4},
	} {
		t.Run(tc.name, func(t *testing.T) {
			_, errs := joinAll(t, testContext(t), 4, tc.change)
			for r, err := range errs {
				var e *ConflictError
				if !errors.As(err, &e) || !errors.Is(err, tc.want) || e.Rank != tc.rank {
					t.Errorf("rank %d: %v", r, err)
				}
			}
		})
	}
}

func TestVersionMismatchFailsEveryRank(t *testing.T) {
	ln, err := Listen("127.0.0.1:0", secret)
	if err != nil {
		t.Fatal(err)
	}
	id := ln.NewID()
	errs := make([]error, 3)
	var wg sync.WaitGroup
	for _, r := range []int{0, 1} {
		cfg := Config{ID: id, Rank: r, Size: 3, Secret: secret}
		if r == 0 {
			cfg.Listener = ln
		}
		wg.Go(func() { _, errs[r] = Join(testContext(t), cfg) })
	}
	wg.Go(func() { // rank 2 speaks a later version
		for errs[2] == nil {
			conn, err := net.Dial("tcp", id.Addr)
			if err != nil {
				errs[2] = err
				return
			}
			conn.SetDeadline(time.Now().Add(10 * time.Second))
			if err := clientHandshake(conn, secret, version+1, id.Token); err != nil {
				errs[2] = err
			}
			conn.Write(hello{rank: 2, size: 3}.encode())
			if f, fields, err := readFrame(conn, 1000); err != nil {
				errs[2] = err
			} else if f != frameRetry {
				errs[2] = decodeFailure(f, fields, 3)
			}
			conn.Close()
		}
	})
	wg.Wait()
	for r, err := range errs {
		var e *ConflictError
		if !errors.As(err, &e) || !errors.Is(err, ErrVersion) || e.Rank != 2 {
			t.Errorf("rank %d: %v", r, err)
		}
	}
}

func TestAbortReachesEveryone(t *testing.T) {
	for _, from := range []int{0, 2} {
		controls := mustJoin(t, 4)
		pending := make(chan error, 1)
		go func() { pending <- controls[1].Barrier(testContext(t)) }()
		controls[from].Abort([]byte("count differs"))
		for r, c := range controls {
			if r == from {
				continue
			}
			e := next(c, time.Minute)
			var a *AbortError
			if e == nil || e.Kind != Aborted || e.Rank != from || !errors.As(e.Err, &a) || string(a.Reason) != "count differs" {
				t.Fatalf("rank %d: %+v", r, e)
			}
		}
		if err := <-pending; !errors.Is(err, ErrAborted) {
			t.Fatal(err)
		}
		if err := controls[from].Barrier(testContext(t)); !errors.Is(err, ErrAborted) {
			t.Fatal(err)
		}
	}
}

func TestLeavingIsNotDying(t *testing.T) {
	controls := mustJoin(t, 3)
	if err := controls[1].Leave(testContext(t)); err != nil {
		t.Fatal(err)
	}
	for _, r := range []int{0, 2} {
		if e := next(controls[r], time.Minute); e == nil || e.Kind != Left || e.Rank != 1 {
			t.Fatalf("rank %d: %+v", r, e)
		}
		if err := controls[r].Barrier(testContext(t)); !errors.Is(err, ErrLost) {
			t.Fatal(err)
		}
	}
	leaveAll(controls)
	for r, c := range controls {
		for e := range c.Events() {
			if e.Kind != Left {
				t.Errorf("rank %d: %+v", r, e)
			}
		}
	}
}
