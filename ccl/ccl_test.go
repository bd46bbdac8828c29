package ccl_test

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"net"
	"os"
	"slices"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/lockstep-ccl/lockstep/ccl"
)

func TestMain(m *testing.M) {
	if role := os.Getenv(childEnv); role != "" {
		os.Exit(childMain(role))
	}
	dir, err := os.MkdirTemp("", "lockstep-ccl-test")
	if err != nil {
		panic(err)
	}
	os.Setenv("LOCKSTEP_RUNTIME_DIR", dir)
	defer os.RemoveAll(dir)
	flag.Parse()
	if f := flag.Lookup("rapid.checks"); f.Value.String() == f.DefValue {
		f.Value.Set("20") // each starts a few communicators
	}
	stop, err := fakeGPUs(dir)
	if err != nil {
		panic(err)
	}
	tellRanks()
	// A recorder that nobody holds any more is unmapped by a cleanup of the runtime, maybe just now.
	goleak.VerifyTestMain(m, goleak.IgnoreAnyFunction("runtime.runCleanups"), goleak.Cleanup(func(code int) {
		stop()
		os.RemoveAll(dir)
		os.Exit(code)
	}))
}

var secret = []byte("a secret of at least sixteen bytes")

// patience bounds what must end; it is no measurement.
const patience = 4 * time.Minute

func freeID(t tb) ccl.UniqueID {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	id, err := ccl.NewUniqueID(l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	return id
}

// tb is what *testing.T and *rapid.T have in common.
type tb interface {
	Helper()
	Fatal(args ...any)
	Errorf(format string, args ...any)
}

// ranks runs n ranks in this process, each in a goroutine, and fails the test
// with what they return. prepare may change each rank's configuration.
func ranks(t tb, n int, prepare func(cfg *ccl.Config), body func(ctx context.Context, c *ccl.Comm) error) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	ctx = context.WithValue(ctx, meetingKey{}, &meeting{of: n, all: make(chan struct{})})
	id := freeID(t)
	errs := make([]error, n)
	var wg sync.WaitGroup
	for r := range n {
		wg.Go(func() {
			cfg := ccl.Config{ID: id, Rank: r, Size: n, Secret: secret, Node: "node"}
			if prepare != nil {
				prepare(&cfg)
			}
			c, err := ccl.Init(ctx, cfg)
			if err != nil {
				errs[r] = err
				return
			}
			err = body(ctx, c)
			if err != nil && err != errExpected {
				c.Abort(err) // let the others go
			}
			e := c.Close()
			switch {
			case err == nil:
				err = e
			case err == errExpected && e != nil:
				err = nil
			case err == errExpected:
				err = errors.New("Close does not report the failure")
			}
			errs[r] = err
		})
	}
	wg.Wait()
	for r, err := range errs {
		if err != nil {
			t.Errorf("rank %d: %v", r, err)
		}
	}
}

// nodes spreads ranks over logical nodes, per on each, with TCP between them.
func nodes(per int) func(*ccl.Config) {
	return func(cfg *ccl.Config) { cfg.Node, cfg.Net = fmt.Sprintf("node%d", cfg.Rank/per), ccl.NetTCP }
}

func do(ctx context.Context, s *ccl.Stream, err error) error {
	if err != nil {
		return err
	}
	return s.Wait(ctx)
}

func TestTwoRanks(t *testing.T) {
	ranks(t, 2, nil, func(ctx context.Context, c *ccl.Comm) error {
		s := c.NewStream()
		for i := range 100 {
			in, out := []float32{float32(c.Rank()), 1, float32(i)}, make([]float32, 3)
			if err := do(ctx, s, c.AllReduce(s, ccl.Of(in), ccl.Of(out), ccl.Sum)); err != nil {
				return err
			}
			if want := []float32{1, 2, 2 * float32(i)}; !slices.Equal(out, want) {
				return fmt.Errorf("got %v, want %v", out, want)
			}
		}
		return nil
	})
}

// TestNobodyWaits: operations end without a Wait.
func TestNobodyWaits(t *testing.T) {
	ranks(t, 2, nil, func(ctx context.Context, c *ccl.Comm) error {
		s := c.NewStream()
		x := []int64{1}
		if err := c.AllReduce(s, ccl.Of(x), ccl.Of(x), ccl.Sum); err != nil {
			return err
		}
		for ctx.Err() == nil {
			if done, err := s.Query(); done {
				return err
			}
			time.Sleep(time.Millisecond)
		}
		return errors.New("it never ended")
	})
}

// TestStreamOverComms: a stream's operations run in order across communicators,
// also when ranks call those of different streams in different orders.
func TestStreamOverComms(t *testing.T) {
	ranks(t, 3, nil, func(ctx context.Context, a *ccl.Comm) error {
		b, err := a.Split(ctx, 0, -a.Rank(), "b")
		if err != nil {
			return err
		}
		defer b.Close()
		if want := a.Size() - 1 - a.Rank(); b.Rank() != want {
			return fmt.Errorf("rank %d in b, want %d", b.Rank(), want)
		}
		s, other := a.NewStream(), a.NewStream()
		x, y := []int64{1}, []int64{int64(a.Rank())}
		onOther := func() error { return b.AllReduce(other, ccl.Of(y), ccl.Of(y), ccl.Max) }
		if a.Rank() == 0 {
			if err := onOther(); err != nil {
				return err
			}
		}
		for range 5 {
			if err := a.AllReduce(s, ccl.Of(x), ccl.Of(x), ccl.Sum); err != nil {
				return err
			}
			if a.Rank() != 0 {
				continue
			}
		}
		if a.Rank() != 0 {
			if err := onOther(); err != nil {
				return err
			}
		}
		if err := b.AllReduce(s, ccl.Of(x), ccl.Of(x), ccl.Sum); err != nil {
			return err
		}
		if err := errors.Join(s.Wait(ctx), other.Wait(ctx)); err != nil {
			return err
		}
		if x[0] != 729 || y[0] != 2 {
			return fmt.Errorf("got %d and %d, want 729 and 2", x[0], y[0])
		}
		return nil
	})
}

// TestWaitTimeout: a Wait that is given up leaves the operation going.
func TestWaitTimeout(t *testing.T) {
	ranks(t, 2, nil, func(ctx context.Context, c *ccl.Comm) error {
		s := c.NewStream()
		x := []int64{1}
		if c.Rank() == 1 {
			time.Sleep(50 * time.Millisecond)
		}
		if err := c.AllReduce(s, ccl.Of(x), ccl.Of(x), ccl.Sum); err != nil {
			return err
		}
		if c.Rank() == 0 {
			short, cancel := context.WithTimeout(ctx, time.Millisecond)
			defer cancel()
			if err := s.Wait(short); err != nil && (!errors.Is(err, ccl.ErrTimeout) || !errors.Is(err, context.DeadlineExceeded)) {
				return fmt.Errorf("want a timeout, got %w", err)
			}
		}
		if err := s.Wait(ctx); err != nil {
			return err
		}
		if x[0] != 2 {
			return fmt.Errorf("got %d, want 2", x[0])
		}
		return nil
	})
}

func TestManyOutstanding(t *testing.T) {
	ranks(t, 2, nil, func(ctx context.Context, c *ccl.Comm) error {
		s := c.NewStream()
		x := make([]int32, 1000)
		for i := range x {
			x[i] = 1
			if err := c.AllReduce(s, ccl.Of(x[i:i+1]), ccl.Of(x[i:i+1]), ccl.Sum); err != nil {
				return err
			}
		}
		if err := s.Wait(ctx); err != nil {
			return err
		}
		for i, v := range x {
			if v != 2 {
				return fmt.Errorf("element %d is %d, want 2", i, v)
			}
		}
		return nil
	})
}

func TestAllocations(t *testing.T) {
	const n, warm, rounds = 2, 300, 200
	ranks(t, n, nil, func(ctx context.Context, c *ccl.Comm) error {
		s := c.NewStream()
		small, large := make([]float32, 2), make([]float32, 100_000)
		peer := 1 - c.Rank()
		counts, offsets := []int{10, 10}, []int{0, 10}
		group := func(g *ccl.Group) error {
			if err := g.Send(ccl.Of(large[:500]), peer); err != nil {
				return err
			}
			return g.Recv(ccl.Of(large[500:1000]), peer)
		}
		calls := []func() error{
			func() error { return c.AllReduce(s, ccl.Of(small), ccl.Of(small), ccl.Sum) },
			func() error { return c.AllReduce(s, ccl.Of(large), ccl.Of(large), ccl.Sum) },
			func() error { return c.Group(s, group) },
			func() error {
				return c.AlltoAllv(s, ccl.Of(large[:20]), counts, offsets, ccl.Of(large[20:40]), counts, offsets)
			},
			func() error { return c.Barrier(s) },
		}
		round := func() error {
			for _, call := range calls {
				if err := call(); err != nil {
					return err
				}
			}
			return s.Wait(ctx)
		}
		for range warm {
			if err := round(); err != nil {
				return err
			}
		}
		if c.Rank() != 0 {
			// AllocsPerRun counts the whole process, so this rank counts too.
			for range rounds + 1 {
				if err := round(); err != nil {
					return err
				}
			}
			return nil
		}
		var err error
		if allocs := testing.AllocsPerRun(rounds, func() {
			if e := round(); e != nil {
				err = e
			}
		}); allocs >= 1 && !raceEnabled {
			return fmt.Errorf("%v allocations a round", allocs)
		}
		return err
	})
}
