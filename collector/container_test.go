package collector_test

import (
	"os"
	"os/exec"
	"testing"
	"time"

	"github.com/lockstep-ccl/lockstep/collector/agent"
	"github.com/lockstep-ccl/lockstep/collector/master"
	"github.com/lockstep-ccl/lockstep/diagnosis"
	"github.com/lockstep-ccl/lockstep/record"
)

// container is a command in a PID namespace of its own.
func container(t *testing.T) *exec.Cmd {
	args := []string{"--pid", "--fork", "--kill-child", "--mount-proc"}
	if out, err := exec.Command("unshare", append(args, "true")...).CombinedOutput(); err != nil {
		t.Skipf("no PID namespace of its own can be made here: %v: %s", err, out)
	}
	return exec.Command("unshare", append(args, os.Args[0])...)
}

// TestAgentInAContainer: an agent that cannot see a rank's process does not take it for gone.
func TestAgentInAContainer(t *testing.T) {
	dir := t.TempDir()
	m, _ := startMaster(t, master.Options{})
	r := start(t, container(t), "rank", "LOCKSTEP_TEST_DIR="+dir, "LOCKSTEP_TEST_SIZE=1")
	eventually(t, "the rank has its recorder", func() bool {
		paths, err := record.List(dir)
		return err == nil && len(paths) == 1
	})
	time.Sleep(50 * time.Millisecond) // both are process 1 where they are: they must not begin in one tick of 10 ms
	start(t, container(t), "agent", "LOCKSTEP_TEST_DIR="+dir, "LOCKSTEP_TEST_MASTER="+m.Addr().String())
	unknown := func() bool {
		s := m.Snapshot()
		if s.Ranks[diagnosis.ProcGone] != 0 {
			t.Fatal("taken for gone")
		}
		return len(s.Agents) == 1 && s.Agents[0].Ranks == 1 && s.Ranks[diagnosis.ProcUnknown] == 1
	}
	eventually(t, "its state is unknown", unknown)
	time.Sleep(time.Second)
	eventually(t, "its state is unknown still", unknown)
	r.take(1)
	if err := r.done(); err != nil {
		t.Fatal(err)
	}
}

// TestRankInAContainer: a rank whose pid means another process, or none, to the
// agent is what it is: idle, running, stopped, dead.
func TestRankInAContainer(t *testing.T) {
	dir := t.TempDir()
	r := start(t, container(t), "rank", "LOCKSTEP_TEST_DIR="+dir, "LOCKSTEP_TEST_SIZE=1")
	a, _ := startAgent(t, agent.Options{Dir: dir})
	is := func(state diagnosis.ProcState) func() bool {
		return func() bool {
			s := a.Snapshot()
			if len(s.Jobs) == 0 {
				return false
			}
			if n := s.Jobs[0].Ranks[diagnosis.ProcGone]; n != 0 && state != diagnosis.ProcGone {
				t.Fatal("taken for gone")
			}
			return s.Jobs[0].Ranks[state] == 1
		}
	}
	eventually(t, "it runs", is(diagnosis.ProcRunning))
	time.Sleep(time.Second) // and does nothing at all
	eventually(t, "it runs still", is(diagnosis.ProcRunning))
	r.take(1)
	if err := r.done(); err != nil {
		t.Fatal(err)
	}
	eventually(t, "its collective is seen", func() bool { return a.Snapshot().Jobs[0].Comms[0].Finished == 1 })
	if err := r.Process.Kill(); err != nil { // with what it has forked
		t.Fatal(err)
	}
	eventually(t, "it is gone", is(diagnosis.ProcGone))
}
