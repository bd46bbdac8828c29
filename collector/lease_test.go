package collector_test

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/lockstep-ccl/lockstep/collector/master"
	"github.com/lockstep-ccl/lockstep/fence"
)

// leaseTown is a master and an agent, a process of its own, behind a wire.
type leaseTown struct {
	*town
	agent *remote
}

func newLeaseTown(t *testing.T) *leaseTown {
	t.Helper()
	w := &leaseTown{town: newFenceTown(t, 0, master.Options{Patience: time.Second})}
	dir := filepath.Join(t.TempDir(), "rt")
	if err := os.Mkdir(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	w.dirs, w.links = []string{dir}, []*link{newLink(t, w.m.Addr().String())}
	w.startAgent(t)
	return w
}

func (w *leaseTown) startAgent(t *testing.T) {
	w.agent = spawn(t, "agent", "LOCKSTEP_TEST_DIR="+w.dirs[0], "LOCKSTEP_TEST_MASTER="+w.links[0].Addr().String())
}

func (w *leaseTown) killAgent() {
	_ = w.agent.Process.Kill()
	_ = w.agent.Wait()
}

// rank is a rank whose lease its agent has told the master of.
func (w *leaseTown) rank(t *testing.T, kind string, env ...string) *fenceRank {
	t.Helper()
	r := spawnRank(t, w.dirs[0], 0, 1, 0, kind, allowed(fence.New(0, 0), env...)...)
	w.ranks(t, 1, 0)
	eventually(t, "its lease is kept", func() bool {
		b, _ := os.ReadFile(filepath.Join(w.dirs[0], ".agent-node", "anchors.json"))
		return strings.Contains(string(b), `"job":`)
	})
	time.Sleep(500 * time.Millisecond) // and told
	return r
}

// TestLeaseOutlivesTheAgent: an agent that is killed while its node is cut off, late in the lease, and
// started again: when the master takes the lease as proof, the rank has ended, deaf as it is.
func TestLeaseOutlivesTheAgent(t *testing.T) {
	w := newLeaseTown(t)
	r := w.rank(t, "deaf", "LOCKSTEP_FENCE_LEASE=10s", "LOCKSTEP_FENCE_GRACE=2s")
	w.links[0].set(true)
	time.Sleep(9 * time.Second)
	w.killAgent()
	if !r.lives() {
		t.Fatal("it was stopped before its lease was over")
	}
	w.startAgent(t)
	reply := w.fence(t, 0, "", time.Minute)
	if !reply.Proven || !strings.Contains(reply.How, "by the lease") {
		t.Fatalf("%+v", reply)
	}
	if r.lives() {
		t.Error("the master has proof that it has ended, and it lives")
	}
}

// TestAgentAwayForALease: a job whose node is heard goes on, however long its agent was away.
func TestAgentAwayForALease(t *testing.T) {
	w := newLeaseTown(t)
	r := w.rank(t, "plain", "LOCKSTEP_FENCE_LEASE=5s")
	w.killAgent()
	heard := func(want bool) func() bool {
		return func() bool {
			s := w.m.Snapshot()
			return len(s.Agents) == 1 && s.Agents[0].Connected == want
		}
	}
	eventually(t, "the master misses it", heard(false))
	time.Sleep(6 * time.Second)
	w.startAgent(t)
	eventually(t, "the master hears it", heard(true))
	time.Sleep(6 * time.Second) // longer than it waits to be heard, and than the lease
	if !r.lives() {
		t.Error("a rank was stopped whose node is heard")
	}
}
