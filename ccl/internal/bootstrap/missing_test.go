package bootstrap

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"
)

// held returns a listener that stays until the test's end, whoever leaves it, and an id of it.
func held(t *testing.T) (*Listener, ID) {
	t.Helper()
	ln, err := Listen("127.0.0.1:0", secret)
	if err != nil {
		t.Fatal(err)
	}
	id, hub := ln.NewID(), ln.hold()
	t.Cleanup(func() { hub.Close() })
	return ln, id
}

func TestMissingRanksAreNamed(t *testing.T) {
	ctx, cancel := context.WithCancel(testContext(t))
	defer cancel()
	errs := make([]error, 6)
	ln, id := held(t)
	var wg sync.WaitGroup
	for _, r := range []int{0, 1, 3} {
		wg.Go(func() {
			cfg := Config{ID: id, Rank: r, Size: 6, Secret: secret}
			if r == 0 {
				cfg.Listener = ln
			}
			_, errs[r] = Join(ctx, cfg)
		})
	}
	for ctx.Err() == nil { // until ranks 1 and 3 have joined
		if c := ln.route(id.Token); c != nil && len(c.missing().Ranks) == 3 {
			break
		}
		time.Sleep(time.Millisecond)
	}
	time.Sleep(500 * time.Millisecond) // and have been told who is missing
	cancel()
	wg.Wait()
	for _, r := range []int{0, 1, 3} {
		var m *MissingError
		if err := errs[r]; !errors.As(err, &m) || !errors.Is(err, ErrMissing) || fmt.Sprint(m.Ranks) != "[2 4 5]" {
			t.Errorf("rank %d: %v", r, err)
		} else if !strings.Contains(err.Error(), "3 of 6 ranks are missing: 2,4-5") {
			t.Errorf("rank %d: %v", r, err)
		}
	}
}

func TestUnreachableRootIsNamed(t *testing.T) {
	ctx, cancel := context.WithTimeout(context.Background(), 300*time.Millisecond)
	defer cancel()
	_, err := Join(ctx, Config{ID: NewID("127.0.0.1:1"), Rank: 1, Size: 2, Secret: secret})
	var m *MissingError
	if !errors.As(err, &m) || fmt.Sprint(m.Ranks) != "[0]" || !errors.Is(err, context.DeadlineExceeded) {
		t.Fatal(err)
	}
}

// TestMissingRanksAreCurrent: a rank that waits knows the ranks that are missing now, also when one has
// left and another has come between two ticks. It also knows that connections were rejected.
func TestMissingRanksAreCurrent(t *testing.T) {
	ln, id := held(t)
	var wg sync.WaitGroup
	defer wg.Wait()
	errs, ended := make([]error, 4), make([]chan struct{}, 4)
	join := func(r int) (leave func()) {
		ctx, cancel := context.WithCancel(testContext(t))
		ended[r] = make(chan struct{})
		wg.Go(func() {
			defer close(ended[r])
			cfg := Config{ID: id, Rank: r, Size: 4, Secret: secret}
			if r == 0 {
				cfg.Listener = ln
			}
			_, errs[r] = Join(ctx, cfg)
		})
		return cancel
	}
	until := func(missing string) {
		for ctx := testContext(t); ctx.Err() == nil; time.Sleep(time.Millisecond) {
			if c := ln.route(id.Token); c != nil && fmt.Sprint(c.missing().Ranks) == missing {
				return
			}
		}
		t.Fatalf("ranks %s are not missing", missing)
	}
	told := func() {
		c := ln.route(id.Token)
		for ctx, untold := testContext(t), true; untold && ctx.Err() == nil; time.Sleep(time.Millisecond) {
			c.mu.Lock()
			untold = c.untold
			c.mu.Unlock()
		}
	}
	defer join(0)()
	leave1, leave2 := join(1), join(2)
	until("[3]")
	told()
	leave2()
	until("[2 3]")
	defer join(3)()
	until("[2]")
	told()
	if _, err := Join(testContext(t), Config{ID: id, Rank: 2, Size: 4, Secret: []byte("another secret, as long as it is")}); !errors.Is(err, ErrSecret) {
		t.Fatal(err)
	}
	for ctx := testContext(t); ln.route(id.Token).missing().Rejected == 0 && ctx.Err() == nil; {
		time.Sleep(time.Millisecond)
	}
	told()
	leave1()
	<-ended[1]
	var m *MissingError
	if !errors.As(errs[1], &m) || fmt.Sprint(m.Ranks) != "[2]" || m.Rejected != 1 || !errors.Is(errs[1], ErrSecret) {
		t.Errorf("rank 1: %v", errs[1])
	}
}

// TestNobodyIsMissing: tellMissing sends nothing once the rendezvous is complete.
func TestNobodyIsMissing(t *testing.T) {
	controls := mustJoin(t, 3)
	controls[0].mu.Lock()
	controls[0].untold = true
	controls[0].mu.Unlock()
	controls[0].tellMissing()
	if err := each(controls, func(c *Control) error { return c.Barrier(testContext(t)) }); err != nil {
		t.Error(err)
	}
}
