package ccl_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/lockstep-ccl/lockstep/ccl"
	"github.com/lockstep-ccl/lockstep/ccl/ccltest"
)

// TestPeerLostInClose: a rank that dies while the others' Close waits for operations with it
// is named, and at once.
func TestPeerLostInClose(t *testing.T) {
	t.Parallel()
	for _, per := range []int{3, 1} {
		id := freeID(t)
		var ps []*rankProcess
		for r, role := range []string{"closer", "closer", "victim"} {
			ps = append(ps, startRank(t, id, r, 3, per, role))
		}
		for r, p := range ps {
			p.expect(t, r, "ready")
		}
		ps[0].expect(t, 0, "closing")
		ps[1].expect(t, 1, "closing")
		ps[2].cmd.Process.Kill()
		ps[0].expect(t, 0, "lost 2")
		ps[1].expect(t, 1, "lost 2")
	}
}

// TestCloseOfSlowOperation: Close finishes an operation that takes long, as long as it moves.
func TestCloseOfSlowOperation(t *testing.T) {
	t.Parallel()
	inj := []*ccltest.Injector{ccltest.New(), ccltest.New()}
	ranks(t, 2, func(cfg *ccl.Config) {
		nodes(1)(cfg)
		cfg.Faults = inj[cfg.Rank]
	}, func(ctx context.Context, c *ccl.Comm) error {
		s, x := c.NewStream(), make([]int64, 1<<20)
		for i := range x {
			x[i] = int64(i)
		}
		if err := do(ctx, s, c.Barrier(s)); err != nil {
			return err
		}
		inj[c.Rank()].Throttle("", c.Rank(), 1-c.Rank(), 1<<20) // 8 s
		begun := time.Now()
		if err := errors.Join(c.AllReduce(s, ccl.Of(x), ccl.Of(x), ccl.Sum), c.Close()); err != nil {
			return fmt.Errorf("after %v: %w", time.Since(begun), err)
		}
		for i := range x {
			if x[i] != 2*int64(i) {
				return fmt.Errorf("element %d is %d", i, x[i])
			}
		}
		return nil
	})
}

// TestShrinkAgain: ranks whose tries to shrink did not meet may try again.
func TestShrinkAgain(t *testing.T) {
	t.Parallel()
	for _, early := range []int{0, 1} {
		gaveUp := make(chan struct{})
		ranks(t, 3, nil, func(ctx context.Context, c *ccl.Comm) error {
			switch c.Rank() {
			case 2:
				return nil
			case early:
				soon, cancel := context.WithTimeout(ctx, 200*time.Millisecond)
				defer cancel()
				if _, err := c.Shrink(soon, []int{2}, ccl.ShrinkDefault, "small"); !errors.Is(err, context.DeadlineExceeded) {
					return fmt.Errorf("a Shrink to which nobody came: %w", err)
				}
				close(gaveUp)
			default:
				<-gaveUp
			}
			for range 2 {
				small, err := c.Shrink(ctx, []int{2}, ccl.ShrinkDefault, "small")
				if err != nil {
					return err
				}
				if err := errors.Join(sum(ctx, small), small.Close()); err != nil {
					return err
				}
			}
			return nil
		})
	}
}

// The nodes' data takes a network of its own, which fails; the control plane's is well.
const dataA, dataB = "10.83.12.1", "10.83.12.2"

// TestLastBytesThroughOutage: what a rank has sent arrives although it closes while the
// data's network is away, for longer than Close waits for the others.
func TestLastBytesThroughOutage(t *testing.T) {
	n := newTwoNodes(t)
	pid := strings.Split(n.ns[1], "/")[2]
	n.in(0, "ip", "link", "add", "lsdat0", "type", "veth", "peer", "name", "lsdat1", "netns", pid)
	for i, addr := range []string{dataA, dataB} {
		n.in(i, "ip", "addr", "add", addr+"/24", "dev", fmt.Sprint("lsdat", i))
		n.in(i, "ip", "link", "set", fmt.Sprint("lsdat", i), "up")
	}
	for _, gone := range []time.Duration{0, 9 * time.Second} {
		id, err := ccl.NewUniqueID(fmt.Sprintf("%s:%d", addrA, 20000+rand.N(10000)))
		if err != nil {
			t.Fatal(err)
		}
		var ps []*rankProcess
		for r := range 2 {
			ps = append(ps, startRankIn(t, []string{"nsenter", n.ns[r]}, id, r, 2, 1, "last bytes", fmt.Sprint("LOCKSTEP_IFNAME=lsdat", r)))
		}
		for r, p := range ps {
			p.expect(t, r, "now")
		}
		if gone > 0 {
			n.in(0, "ip", "link", "set", "lsdat0", "down")
		}
		begun(t, ps)
		time.Sleep(gone)
		n.in(0, "ip", "link", "set", "lsdat0", "up")
		for r, p := range ps {
			p.expect(t, r, "well")
		}
	}
}

// lastBytesChild sends to the other rank, or receives from it, and closes.
func lastBytesChild() error {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	cfg, err := ccl.ConfigFromEnv()
	if err != nil {
		return err
	}
	cfg.Recorder, cfg.Secret = nil, secret
	c, err := ccl.Init(ctx, cfg)
	if err != nil {
		return err
	}
	s := c.NewStream()
	if err := do(ctx, s, c.Barrier(s)); err != nil {
		return err
	}
	fmt.Println("now")
	if _, err := os.Stdin.Read(make([]byte, 1)); err != nil {
		return err
	}
	x := make([]int64, 5000) // what a kernel takes at once
	if c.Rank() == 0 {
		for i := range x {
			x[i] = int64(i)
		}
		err = do(ctx, s, c.Send(s, ccl.Of(x), 1))
	} else {
		err = do(ctx, s, c.Recv(s, ccl.Of(x), 0))
	}
	if err := errors.Join(err, c.Close()); err != nil {
		return err
	}
	for i := range x {
		if x[i] != int64(i) {
			return fmt.Errorf("element %d is %d", i, x[i])
		}
	}
	fmt.Println("well")
	return nil
}
