package bootstrap

import (
	"context"
	"errors"
	"sync"
	"testing"
	"time"
)

// TestAnotherAttempt: a rank of an earlier attempt cannot join, though it knows the secret and
// the ID.
func TestAnotherAttempt(t *testing.T) {
	id := freeAddress(t)
	var controls [2]*Control
	var errs [3]error
	ctx := testContext(t)
	old, cancel := context.WithCancel(ctx)
	defer cancel()
	var wg sync.WaitGroup
	wg.Go(func() {
		_, errs[2] = Join(old, Config{ID: id, Rank: 1, Size: 2, Secret: secret, Attempt: "attempt 6"})
	})
	for r := range 2 {
		wg.Go(func() {
			if r == 1 { // the rank of the other attempt tries first
				time.Sleep(50 * time.Millisecond)
			}
			controls[r], errs[r] = Join(ctx, Config{ID: id, Rank: r, Size: 2, Secret: secret, Attempt: "attempt 7"})
			if r == 0 {
				cancel()
			}
		})
	}
	wg.Wait()
	if err := errors.Join(errs[:2]...); err != nil {
		t.Fatal(err)
	}
	defer leaveAll(controls[:])
	if !errors.Is(errs[2], ErrSecret) && !errors.Is(errs[2], context.Canceled) {
		t.Errorf("a rank of another attempt: %v", errs[2])
	}
	if _, err := Join(shortContext(t), Config{ID: id, Rank: 1, Size: 2, Secret: secret, Attempt: "attempt 6"}); err == nil {
		t.Error("it came in after the others had met")
	}
	if _, err := Join(shortContext(t), Config{ID: id, Rank: 1, Size: 2, Secret: secret}); err == nil {
		t.Error("a rank without an attempt came in")
	}
}

func shortContext(t *testing.T) context.Context {
	ctx, cancel := context.WithTimeout(t.Context(), 500*time.Millisecond)
	t.Cleanup(cancel)
	return ctx
}

// freeAddress returns an ID at whose address rank 0 can listen.
func freeAddress(t *testing.T) ID {
	t.Helper()
	ln, err := Listen("127.0.0.1:0", secret)
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	return ln.NewID()
}

func TestAttemptFromEnvironment(t *testing.T) {
	plain := attemptKey(secret, "")
	t.Setenv(FenceEnv, "attempt 7")
	if string(attemptKey(secret, "")) != string(attemptKey(secret, "attempt 7")) || string(attemptKey(secret, "")) == string(plain) {
		t.Error("the variable has no effect")
	}
	controls := mustJoin(t, 3) // Listen and Join derive the same key
	if len(controls) != 3 {
		t.Error(len(controls))
	}
}
