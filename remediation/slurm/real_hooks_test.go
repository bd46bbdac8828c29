package slurm

import (
	"context"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"
)

// TestRealHooks: slurmd runs the prolog, the epilog and the health check that are installed
// with the package; a node that preflight calls bad is drained, one that it cannot measure is not.
func TestRealHooks(t *testing.T) {
	rounds(t)
	t.Setenv("HCI", "2")
	l := newLab(t, 3, "")
	var sick atomic.Bool
	agent := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		fmt.Fprintf(w, "lockstep_gpu_up{gpu=\"0\"} %d\n", map[bool]int{true: 0, false: 1}[sick.Load()])
	}))
	defer agent.Close()
	top := filepath.Dir(l.dir)
	here, err := filepath.Abs("../../deploy/slurm")
	if err != nil {
		t.Fatal(err)
	}
	write := func(name, text string) {
		if err := os.WriteFile(name, []byte(text), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	write(filepath.Join(top, "lockstep"), "#!/bin/sh\necho ${SLURMD_NODENAME} bad\ncase $SLURMD_NODENAME in n2) exit 3;; n3) exit 1;; esac\n")
	write(filepath.Join(top, "slurm.env"), fmt.Sprintf("LOCKSTEP=%s/lockstep PREFLIGHT='--ranks 2' LOG=%s AGENT=%s RECORDERS=%s/kept LOCKSTEP_SHM=%s/shm\nexport SLURM_CONF=%s/slurm.conf\n", top, top, agent.URL, top, top, l.dir))
	for _, h := range []string{"prolog", "epilog", "health"} {
		write(filepath.Join(l.dir, "hooks", h+".user"), fmt.Sprintf("#!/bin/sh\nexport LOCKSTEP_SLURM_ENV=%s/slurm.env\nexec %s/%s\n", top, here, h))
	}
	state := func(node string) string {
		return l.slurm("sinfo", "-h", "-N", "-n", node, "-o", "%T %E")
	}
	until := func(what string, ok func() bool) {
		t.Helper()
		for deadline := time.Now().Add(time.Minute); !ok(); time.Sleep(200 * time.Millisecond) {
			if time.Now().After(deadline) {
				log, _ := os.ReadFile(filepath.Join(l.dir, "hooks.log"))
				t.Fatalf("not within a minute: %s; n2 %s, n3 %s\n%s\n%s", what, state("n2"), state("n3"), log, l.slurm("squeue", "-t", "all"))
			}
		}
	}
	shm := filepath.Join(top, "shm", "lockstep-0")
	if err := os.MkdirAll(shm, 0o700); err != nil {
		t.Fatal(err)
	}
	// The job leaves a recorder, whose process has ended by the time of the epilog.
	id := l.slurm("sbatch", "--parsable", "-N1", "-w", "n3", "-o", "/dev/null", "--wrap", "echo x > "+shm+"/slurm-$SLURM_JOB_ID.0.4194000.rec")
	until("a node that could not be measured runs its job", func() bool {
		j, err := (&client{run: l.run, expanded: map[string][]string{}}).job(context.Background(), id)
		return err == nil && j.state == "COMPLETED"
	})
	until("the recorder is kept", func() bool {
		_, err := os.Stat(filepath.Join(top, "kept", id+".n3", "slurm-"+id+".0.4194000.rec"))
		return err == nil
	})
	bad := l.slurm("sbatch", "--parsable", "-N1", "-w", "n2", "-o", "/dev/null", "--wrap", "sleep 60")
	until("a node that preflight calls bad is drained", func() bool { return strings.HasPrefix(state("n2"), "drain") })
	l.slurm("scancel", bad)
	if s := state("n3"); strings.HasPrefix(s, "drain") {
		t.Errorf("n3 is %s", s)
	}
	sick.Store(true)
	until("a node whose GPU is gone is drained by the health check", func() bool {
		return strings.HasPrefix(state("n3"), "drain") && strings.Contains(state("n3"), "lockstep agent: GPU has fallen off the bus")
	})
	if s := state("n2"); strings.Contains(s, "lockstep agent") {
		t.Errorf("the reason of n2, which was drained before, is replaced: %s", s)
	}
}
