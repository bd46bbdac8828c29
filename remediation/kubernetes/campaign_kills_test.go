package kubernetes

import (
	"fmt"
	"os"
	"testing"
	"time"
)

// TestKills kills remediator, API server, master and agent in the middle of actions, at random
// requests and questions, before or after they are heard: nothing is done twice or lost, no
// node is out with which nothing is wrong, and the breakers hold. `make test-kills` does it 50 times each.
func TestKills(t *testing.T) {
	kills, seed := 1, uint64(5)
	for name, v := range map[string]any{"LOCKSTEP_TEST_KILLS": &kills, "LOCKSTEP_TEST_KILLS_SEED": &seed} {
		if text := os.Getenv(name); text != "" {
			if _, err := fmt.Sscan(text, v); err != nil {
				t.Fatalf("%s=%s: %v", name, text, err)
			}
		}
	}
	b := newModelBed(t, 12, 3)
	c := newCampaign(t, b, seed, 12, "gpu")
	c.victims, c.kills = victims, kills
	began := time.Now()
	c.play(0)
	c.stop()
	c.tell()
	t.Logf("%d faults in %v", c.faults, time.Since(began).Round(time.Second))
}
