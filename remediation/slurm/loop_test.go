package slurm

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// TestLoop: what srun is told in each attempt, and that the remediator's word is waited for.
func TestLoop(t *testing.T) {
	dir := t.TempDir()
	log, srun := filepath.Join(dir, "log"), filepath.Join(dir, "srun")
	script := "#!/bin/sh\necho \"$* restart=$LOCKSTEP_RESTART_COUNT ${LOCKSTEP_FENCE_TOKEN%%%%-*} ntasks=$SLURM_NTASKS\" >>%s\ncase $LOCKSTEP_RESTART_COUNT in 300) exit 9;; 301) echo 'srun: Job step aborted: Waiting up to 32 seconds' >&2; exec sleep 60;; esac\n"
	if err := os.WriteFile(srun, fmt.Appendf(nil, script, log), 0o755); err != nil {
		t.Fatal(err)
	}
	t.Setenv("SLURM_NTASKS", "5")
	f := newFake(5, 4, 5, true)
	f.loop = false // the real one is here
	f.comment = "mine"
	env := map[string]string{"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "3"}
	l := Loop{
		Srun: []string{"python", "train.py"}, Nodes: 4, Hold: 30 * time.Second, Decide: 50 * time.Millisecond, MaxRestarts: 1, Run: f.run, SrunPath: srun,
		Getenv: func(k string) string { return env[k] }, Stderr: &bytes.Buffer{}, tick: 5 * time.Millisecond,
	}
	f.before = func(string) error { // the remediator's part, once the second attempt runs
		if b, _ := os.ReadFile(log); strings.Contains(string(b), "restart=301") {
			f.comment = "mine [lockstep/1 nodes=4 do=go action=x attempt=301 without=n2]"
		}
		return nil
	}
	if err := l.Start(within(t)); err != nil {
		t.Fatal(err)
	}
	b, err := os.ReadFile(log)
	want := ""
	for i, out := range []string{"", "", "--exclude=n2 "} {
		want += fmt.Sprintf("--job-name=lockstep-%d --nodes=4 --overlap --kill-on-bad-exit=0 --wait=30 %spython train.py restart=%d fence1 ntasks=\n", 300+i, out, 300+i)
	}
	if err != nil || string(b) != want {
		t.Errorf("srun was called as\n%s%v, want\n%s", b, err, want)
	}
	// Two attempts fail, nobody says anything, and one restart is all.
	f.before, f.comment = nil, "mine"
	if err := os.WriteFile(srun, []byte("#!/bin/sh\nexit 9\n"), 0o755); err != nil {
		t.Fatal(err)
	}
	var step *StepError
	if err := l.Start(within(t)); !errors.As(err, &step) || step.Status != 9 {
		t.Errorf("error %v", err)
	}
	f.comment = "[lockstep/1 nodes=4 do=none without=n1,n2]"
	if err := l.Start(within(t)); !errors.Is(err, ErrNoNodes) {
		t.Errorf("error %v", err)
	}
	env["SLURM_JOB_ID"] = ""
	if err := l.Start(context.Background()); err == nil {
		t.Error("a loop outside of a job")
	}
}

func FuzzMarker(f *testing.F) {
	f.Add("mine [lockstep/1 nodes=4 do=go action=5e1f attempt=102 without=n3,n7]")
	f.Add("[lockstep/1 nodes=1] [lockstep/1 nodes=2 do=wait]")
	f.Fuzz(func(t *testing.T, comment string) {
		m, ok := parseMarker(comment)
		if !ok {
			return
		}
		text, err := m.into(comment)
		if err != nil {
			return
		}
		if again, ok := parseMarker(text); !ok || again.String() != m.String() {
			t.Errorf("%q becomes %q", comment, text)
		}
		if strings.Count(text, "[lockstep/1 nodes=") != 1 && !strings.Contains(comment, "[[") && strings.Count(comment, "[lockstep/1 nodes=") == 1 {
			t.Errorf("%q becomes %q", comment, text)
		}
	})
}

func FuzzTable(f *testing.F) {
	f.Add(pad(jobColumns, "7", "0", "RUNNING", "alice", "main", "n1", "1", "n[1-4]", "a\nb UserId=root(0)"))
	f.Add(pad(stepColumns, "7.0", "RUNNING", "1", "n1", "lockstep-0"))
	f.Fuzz(func(t *testing.T, out string) {
		for _, c := range [][]column{jobColumns, stepColumns, nodeColumns} {
			rows, err := table(out, c)
			for _, r := range rows {
				if err != nil || len(r) != len(c) {
					t.Fatalf("%d columns, %v", len(r), err)
				}
			}
		}
		parseLayout(out)
	})
}

func TestHostileTexts(t *testing.T) {
	comment := "x\n8                   0           RUNNING UserId=root(0)"
	rows, err := table(pad(jobColumns, "7", "2", "RUNNING", "alice", "main", "n1", "1", "n1", comment), jobColumns)
	if err != nil || len(rows) != 1 || rows[0][3] != "alice" || rows[0][8] != comment {
		t.Errorf("%q, %v", rows, err)
	}
	if at := parseLayout("Job step layout:\n\t4 tasks, 2 nodes (n[1-2])\n\n\tNode 0 (n1), 2 task(s): 0 2 \n\tNode 1 (n2), 2 task(s): 1 3 \n"); len(at) != 4 || at[2] != "n1" || at[3] != "n2" {
		t.Error(at)
	}
}
