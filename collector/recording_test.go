package collector_test

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/lockstep-ccl/lockstep/collector/agent"
	"github.com/lockstep-ccl/lockstep/collector/master"
	"github.com/lockstep-ccl/lockstep/diagnosis"
	"github.com/lockstep-ccl/lockstep/diagnosis/replay"
)

// TestRecordedIncident: what a master told of a job with a killed rank is told again
// by a replay of what it recorded, of all of it and of the incident's part.
func TestRecordedIncident(t *testing.T) {
	dir, stateDir := t.TempDir(), t.TempDir()
	const size = 4
	r := newSplitRanks(t, dir, size)
	m, running := startMaster(t, master.Options{StateDir: stateDir, CloseAfter: time.Second, Recording: master.Recording{Program: "test"}})
	startAgent(t, agent.Options{Dir: dir, Master: at(m.Addr().String())})
	stop := r.steps()
	defer stop()
	eventually(t, "the job's ranks are known", func() bool {
		return m.Snapshot().WorldSize == size && m.Snapshot().Ranks[diagnosis.ProcRunning] == size
	})
	if err := r.remote.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	eventually(t, "a confirmed incident", func() bool {
		in := m.Snapshot().Incidents
		return len(in) > 0 && in[0].Verdict.Level == diagnosis.Confirmed
	})
	incident := m.Snapshot().Incidents[0]
	path := filepath.Join(stateDir, "incidents", replay.IncidentFile(incident.ID))
	eventually(t, "the incident has a recording that says so", func() bool {
		res, err := playFile(t, path)
		return err == nil && len(res.Recorded) == 1 && res.Recorded[0].Level == diagnosis.Confirmed
	})
	stop()
	running.kill(t)

	recordings, err := filepath.Glob(filepath.Join(stateDir, "recording", "*"+replay.Suffix))
	if err != nil || len(recordings) != 1 {
		t.Fatalf("rolling recording: %v, %v", recordings, err)
	}
	for _, path := range []string{recordings[0], path} {
		res, err := playFile(t, path)
		if err != nil {
			t.Fatal(err)
		}
		if !res.Identical || !res.Same() || res.Missing != 0 || res.History != 0 || len(res.Marks) < 2 || res.Header.Program != "test" || res.Header.Job != "job" {
			t.Errorf("%s: %+v", path, res)
		}
		if !strings.Contains(fmt.Sprint(res.Marks), incident.ID) {
			t.Errorf("no mark of %s in %+v", incident.ID, res.Marks)
		}
		found := false
		for _, e := range res.Replayed {
			found = found || e.Verdict.Key == incident.Verdict.Key && e.Verdict.Class == incident.Verdict.Class && e.Level == diagnosis.Confirmed
		}
		if !found {
			t.Errorf("the replay of %s found %+v, not %+v", path, res.Replayed, incident.Verdict)
		}
	}
	if s := m.Snapshot().Recording; s == nil || s.Passes == 0 || s.Bytes == 0 {
		t.Errorf("the snapshot tells of the recording: %+v", s)
	}
}

func playFile(t *testing.T, path string) (*replay.Result, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	r, err := replay.NewReader(f, replay.Limits{})
	if err != nil {
		return nil, err
	}
	return replay.Play(t.Context(), r, replay.PlayOptions{})
}
