package ccl_test

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"regexp"
	"testing"
	"time"

	"github.com/lockstep-ccl/lockstep/ccl"
)

// TestDataAddress: without Config.Interface ranks listen for data where the others
// reach them, as for the control plane, and not at 127.0.0.1, which is each host's own.
func TestDataAddress(t *testing.T) {
	const host = "127.0.0.2" // all of 127/8 is this host's
	l, err := net.Listen("tcp", host+":0")
	if err != nil {
		t.Skip(err)
	}
	addr := l.Addr().String()
	l.Close()
	id, err := ccl.NewUniqueID(addr)
	if err != nil {
		t.Fatal(err)
	}
	ranks(t, 2, func(cfg *ccl.Config) {
		nodes(1)(cfg)
		cfg.ID = id
	}, func(ctx context.Context, c *ccl.Comm) error {
		if err := sum(ctx, c); err != nil || c.Rank() != 0 {
			return err
		}
		// Who dialled has an address of the kernel's choice, so the listeners are looked at.
		table, err := os.ReadFile("/proc/self/net/tcp")
		if err != nil {
			return err
		}
		if n := len(regexp.MustCompile(`(?m)^ *\d+: 0200007F:[0-9A-F]{4} \S+ 0A`).FindAll(table, -1)); n < 2 {
			return fmt.Errorf("%d listeners at %s, want the control plane's and the data's", n, host)
		}
		return nil
	})
}

// TestCloseUnfinished: operations that Close could not finish end with it, those of
// other communicators that come after them go on, and Wait waits for these, too.
func TestCloseUnfinished(t *testing.T) {
	t.Parallel()
	closed := make(chan struct{})
	ranks(t, 2, nil, func(ctx context.Context, c *ccl.Comm) error {
		other, err := c.Split(ctx, 0, 0, "other")
		if err != nil {
			return err
		}
		s, x := c.NewStream(), []int64{1}
		if c.Rank() == 1 { // it never calls the barrier
			<-closed
			time.Sleep(20 * time.Millisecond)
			return errors.Join(do(ctx, s, c.AllReduce(s, ccl.Of(x), ccl.Of(x), ccl.Sum)), other.Close())
		}
		// At once: nobody but Close works on it.
		err = errors.Join(other.Barrier(s), other.Close())
		close(closed)
		if !errors.Is(err, ccl.ErrTimeout) {
			return fmt.Errorf("Close of a communicator that cannot finish: %w", err)
		}
		if err := c.AllReduce(s, ccl.Of(x), ccl.Of(x), ccl.Sum); err != nil {
			return err
		}
		if err := s.Wait(ctx); !errors.Is(err, ccl.ErrClosed) {
			return fmt.Errorf("want ErrClosed, got %w", err)
		}
		if x[0] != 2 {
			return fmt.Errorf("sum %d, want 2: Wait returned before the operation ended", x[0])
		}
		return s.Wait(ctx)
	})
}

// TestAbortBehind: an operation that comes after one of another communicator, which
// hangs, ends with its own communicator, whoever is waiting there on its behalf.
func TestAbortBehind(t *testing.T) {
	t.Parallel()
	for _, end := range []string{"abort", "close"} {
		ended := make(chan struct{})
		ranks(t, 2, nil, func(ctx context.Context, hung *ccl.Comm) error {
			c, err := hung.Split(ctx, 0, 0, "behind")
			if err != nil {
				return err
			}
			s, other := c.NewStream(), c.NewStream()
			if hung.Rank() == 1 {
				<-ended
				_ = c.Close() // it may have heard of the abort, or not yet
				return errors.Join(hung.Barrier(s), hung.Barrier(s), s.Wait(ctx))
			}
			if err := errors.Join(hung.Barrier(s), c.Barrier(s), hung.Barrier(other)); err != nil {
				return err
			}
			waiting, cancel := context.WithCancel(ctx)
			waited := make(chan error, 1)
			go func() { waited <- other.Wait(waiting) }() // so that the other has to sleep, or this
			time.Sleep(20 * time.Millisecond)
			if end == "abort" {
				c.Abort(nil)
			}
			err = c.Close()
			close(ended)
			cancel()
			<-waited
			if want := map[string]error{"abort": ccl.ErrAborted, "close": ccl.ErrTimeout}[end]; !errors.Is(err, want) {
				return fmt.Errorf("Close: want %w, got %w", want, err)
			}
			if err := s.Wait(ctx); err == nil {
				return errors.New("what could not run ended well")
			}
			return other.Wait(ctx)
		})
	}
}

// TestDeriveAgain: a communicator still splits after some of its ranks have made one
// without the others, and after a Split that one of them gave up.
func TestDeriveAgain(t *testing.T) {
	givenUp := make(chan struct{})
	ranks(t, 3, nil, func(ctx context.Context, c *ccl.Comm) error {
		for _, out := range []int{2, 1, 2} {
			if c.Rank() == out {
				continue
			}
			small, err := c.Shrink(ctx, []int{out}, ccl.ShrinkDefault, "small")
			if err != nil {
				return err
			}
			if err := errors.Join(sum(ctx, small), small.Close()); err != nil {
				return err
			}
		}
		if c.Rank() == 0 {
			gone, cancel := context.WithCancel(ctx)
			cancel()
			if _, err := c.Split(gone, 0, 0, "given up"); !errors.Is(err, context.Canceled) {
				return fmt.Errorf("want Canceled, got %v", err)
			}
			close(givenUp)
		} else {
			select {
			case <-givenUp: // with the others' part it would be done at once
			case <-ctx.Done():
			}
			if _, err := c.Split(ctx, ccl.NoColor, 0, ""); err != nil {
				return err
			}
		}
		all, err := c.Split(ctx, 0, 0, "all")
		if err != nil {
			return err
		}
		return errors.Join(sum(ctx, all), all.Close())
	})
}

// TestLastBytes: what was sent before Close arrives, also when nobody waits for the
// receiver's Close any more, as a member has left before.
func TestLastBytes(t *testing.T) {
	t.Parallel()
	sent := make(chan struct{})
	ranks(t, 3, nodes(1), func(ctx context.Context, c *ccl.Comm) error {
		s, x := c.NewStream(), ccl.Of(make([]float32, 400_000)) // less than a connection's window
		// The others' credit for these stays unread: closing such a socket resets it.
		for range 40 {
			if err := do(ctx, s, c.Broadcast(s, x.Slice(0, 1), x.Slice(0, 1), 1)); err != nil {
				return err
			}
		}
		switch c.Rank() {
		case 1:
			time.Sleep(6 * time.Second) // rank 2 leaves after 5
			err := do(ctx, s, c.Send(s, x, 0))
			close(sent)
			return err
		case 0:
			<-sent
			time.Sleep(100 * time.Millisecond)
			return do(ctx, s, c.Recv(s, x, 1))
		}
		return nil
	})
}
