package train

import (
	"context"
	"os"
	"strings"
	"sync"
	"testing"
)

// TestMeet: ranks find rank 0 of their own attempt, and an address that is none is refused.
func TestMeet(t *testing.T) {
	dir := t.TempDir()
	as := func(rank, attempt string) {
		t.Setenv("LOCKSTEP_RANK", rank)
		t.Setenv("LOCKSTEP_WORLD_SIZE", "2")
		t.Setenv("LOCKSTEP_RESTART_COUNT", attempt)
		t.Setenv("MASTER_ADDR", "")
	}
	as("0", "0")
	if err := meet(t.Context(), dir, "10.0.0.1"); err != nil || os.Getenv("MASTER_ADDR") != "10.0.0.1" {
		t.Errorf("rank 0 is at %q, %v", os.Getenv("MASTER_ADDR"), err)
	}
	as("1", "0")
	if err := meet(t.Context(), dir, ""); err != nil || os.Getenv("MASTER_ADDR") != "10.0.0.1" {
		t.Errorf("rank 1 finds %q, %v", os.Getenv("MASTER_ADDR"), err)
	}
	as("1", "1") // whose rank 0 has not come
	ctx, cancel := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	wg.Go(func() {
		if err := meet(ctx, dir, ""); err == nil {
			t.Error("the address of an earlier attempt is taken")
		}
	})
	cancel()
	wg.Wait()
	as("0", "2")
	if err := meet(t.Context(), dir, "$(HOST_IP)"); err == nil || !strings.Contains(err.Error(), "IP address") {
		t.Errorf("%v", err)
	}
}
