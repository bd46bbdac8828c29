package collector_test

import (
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/lockstep-ccl/lockstep/collector/agent"
	"github.com/lockstep-ccl/lockstep/collector/master"
	"github.com/lockstep-ccl/lockstep/diagnosis"
)

// TestKilledRank kills a rank's process, and closes the incident by restarting the job.
func TestKilledRank(t *testing.T) {
	dir := t.TempDir()
	r := newSplitRanks(t, dir, 4)
	m, _ := startMaster(t, master.Options{})
	startAgent(t, agent.Options{Dir: dir, Master: at(m.Addr().String())})
	stop := r.steps()
	defer stop()
	eventually(t, "all ranks run", func() bool { return m.Snapshot().Ranks[diagnosis.ProcRunning] == 4 })
	fault := time.Now()
	if err := r.remote.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	eventually(t, "an incident is confirmed", func() bool {
		i := m.Snapshot().Incidents
		return len(i) == 1 && !i[0].Confirmed.IsZero()
	})
	t.Logf("confirmed after %v", time.Since(fault))
	v := m.Snapshot().Incidents[0].Verdict
	if v.Class != diagnosis.NoncommunicationHang || v.Culprits[0].Rank != 3 || v.Culprits[0].Reason != "process_gone" {
		t.Errorf("verdict %+v", v)
	}
	stop()
	r.close()
	again := newRanks(t, t.TempDir(), 4, 1)
	for _, w := range again.w {
		if err := os.Rename(w.Path(), filepath.Join(dir, "again."+filepath.Base(w.Path()))); err != nil {
			t.Fatal(err)
		}
	}
	defer again.steps()()
	eventually(t, "the incident closes with the restart", func() bool {
		s := m.Snapshot()
		return s.Attempt == 1 && s.Ranks[diagnosis.ProcRunning] == 4 && len(s.Incidents) == 1 && !s.Incidents[0].Closed.IsZero()
	})
}

// TestAgentKilled: a job whose agent dies is not a job that hangs.
func TestAgentKilled(t *testing.T) {
	dir := t.TempDir()
	r := newRanks(t, dir, 4, 0)
	defer r.steps()()
	m, _ := startMaster(t, master.Options{Patience: time.Second})
	env := []string{"LOCKSTEP_TEST_DIR=" + dir, "LOCKSTEP_TEST_MASTER=" + m.Addr().String()}
	first := spawn(t, "agent", env...)
	running := func() bool { return m.Snapshot().Ranks[diagnosis.ProcRunning] == 4 }
	eventually(t, "all ranks run", running)
	if err := first.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the agent is lost", func() bool {
		s := m.Snapshot()
		return len(s.Agents) == 1 && s.Agents[0].Lost && s.Ranks[diagnosis.ProcUnknown] == 4
	})
	time.Sleep(2 * time.Second) // long enough for a hang's verdict
	for _, i := range m.Snapshot().Incidents {
		for _, c := range i.Verdict.Culprits {
			if c.Kind != diagnosis.CulpritNode { // the engine may blame the node, in the end
				t.Errorf("an incident: %+v", i)
			}
		}
	}
	spawn(t, "agent", env...)
	eventually(t, "the next agent goes on", func() bool { return running() && !m.Snapshot().Agents[0].Lost })
}

func TestMasterRestart(t *testing.T) {
	dir := t.TempDir()
	r := newRanks(t, dir, 2, 3)
	m, first := startMaster(t, master.Options{})
	var where whereabouts
	where.m.Store(m)
	a, _ := startAgent(t, agent.Options{Dir: dir, Master: where.of})
	r.step()
	complete := func() bool {
		s := m.Snapshot()
		return s.Attempt == 3 && s.Ranks[diagnosis.ProcRunning] == 2
	}
	eventually(t, "the first master sees all", complete)
	first.kill(t)
	eventually(t, "the agent notices", func() bool { return !a.Snapshot().Master[0].Connected })
	m, _ = startMaster(t, master.Options{})
	where.m.Store(m)
	eventually(t, "the second master sees all", complete)
	eventually(t, "the agent counts it", func() bool { return a.Snapshot().Master[0].Reconnect > 0 })
}

func TestAgentRestart(t *testing.T) {
	dir := t.TempDir()
	r := newRanks(t, dir, 2, 0)
	stop := r.steps()
	defer stop()
	m, _ := startMaster(t, master.Options{Patience: time.Second})
	o := agent.Options{Dir: dir, Master: at(m.Addr().String())}
	_, first := startAgent(t, o)
	running := func() bool { return m.Snapshot().Ranks[diagnosis.ProcRunning] == 2 }
	eventually(t, "all ranks seen", running)
	first.kill(t)
	eventually(t, "the agent is lost, and nothing is known of its ranks", func() bool {
		s := m.Snapshot()
		return s.Agents[0].Lost && !s.Agents[0].Connected && s.Ranks[diagnosis.ProcUnknown] == 2
	})
	a, _ := startAgent(t, o)
	eventually(t, "its successor goes on", func() bool { return running() && !m.Snapshot().Agents[0].Lost })
	stop()
	eventually(t, "and reads on", func() bool {
		s := a.Snapshot()
		return len(s.Jobs) == 1 && s.Jobs[0].Comms[0].Finished == 2*r.seq
	})
	if s := a.Snapshot(); s.Jobs[0].Lost != 0 {
		t.Errorf("%d records lost; what was overwritten before the agent came is not", s.Jobs[0].Lost)
	}
}

// TestJobRestart checks that the recorders of a job's next attempt take the
// place of the last one's.
func TestJobRestart(t *testing.T) {
	dir := t.TempDir()
	old := newRanks(t, dir, 3, 0)
	old.step()
	m, _ := startMaster(t, master.Options{})
	a, _ := startAgent(t, agent.Options{Dir: dir, Master: at(m.Addr().String())})
	eventually(t, "the first attempt", func() bool { return m.Snapshot().Ranks[diagnosis.ProcRunning] == 3 })
	old.close()
	again := newRanks(t, t.TempDir(), 2, 1)
	for _, w := range again.w { // the same process cannot have two recorders of one rank in one directory
		if err := os.Rename(w.Path(), filepath.Join(dir, "again."+filepath.Base(w.Path()))); err != nil {
			t.Fatal(err)
		}
	}
	again.step()
	eventually(t, "the second attempt", func() bool {
		s := m.Snapshot()
		return s.Attempt == 1 && s.WorldSize == 2 && s.Ranks[diagnosis.ProcRunning] == 2
	})
	eventually(t, "the agent counts the living", func() bool {
		s := a.Snapshot()
		return s.Jobs[0].Ranks[diagnosis.ProcRunning] == 3 // the superseded rank 2 lives on in this process's name
	})
}

// TestJobStartedAnew restarts what restarts the job: attempts are counted from 0 again.
func TestJobStartedAnew(t *testing.T) {
	dir := t.TempDir()
	old := newRanks(t, dir, 2, 2)
	old.step()
	m, _ := startMaster(t, master.Options{})
	startAgent(t, agent.Options{Dir: dir, Master: at(m.Addr().String())})
	eventually(t, "the last attempt", func() bool {
		s := m.Snapshot()
		return s.Attempt == 2 && s.Ranks[diagnosis.ProcRunning] == 2
	})
	old.close()
	again := newRanks(t, t.TempDir(), 2, 0)
	for _, w := range again.w {
		if err := os.Rename(w.Path(), filepath.Join(dir, "again."+filepath.Base(w.Path()))); err != nil {
			t.Fatal(err)
		}
	}
	again.step()
	eventually(t, "the first attempt of the job's next life", func() bool {
		s := m.Snapshot()
		return s.Attempt == 0 && s.WorldSize == 2 && s.Ranks[diagnosis.ProcRunning] == 2
	})
}
