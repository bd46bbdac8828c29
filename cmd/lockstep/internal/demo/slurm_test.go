package demo

import (
	"context"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/lockstep-ccl/lockstep/collector/wire/pki"
)

func TestSlurmNodes(t *testing.T) {
	for _, c := range []struct {
		out         string
		works, idle int
		err         string
	}{
		{"5 idle main*\n", 5, 5, ""},
		{"2 idle small\n3 idle big*\n4 alloc big*\n1 mix big*\n9 down* big*\n2 drain big*\n", 8, 3, ""},
		{"4 idle* main*\n1 down main*\n", 0, 0, ""},
		{"3 alloc a\n3 idle b\n", 3, 3, ""},
		{"", 0, 0, ""},
		{"five idle main\n", 0, 0, "want a number"},
		{"5 idle\n", 0, 0, "want number, state and partition"},
	} {
		works, idle, err := slurmNodes(c.out)
		if works != c.works || idle != c.idle || (err == nil) != (c.err == "") || err != nil && !strings.Contains(err.Error(), c.err) {
			t.Errorf("%q: %d work, %d idle, %v", c.out, works, idle, err)
		}
	}
}

// slurmModel answers Slurm's commands for one job.
type slurmModel struct {
	mu     sync.Mutex
	states []string // what squeue says, one after the other; the last stays
	calls  []string
	fail   map[string]error
}

func (m *slurmModel) run(_ context.Context, name string, args ...string) (string, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	call := name + " " + strings.Join(args, " ")
	m.calls = append(m.calls, call)
	if err := m.fail[name]; err != nil {
		return "", err
	}
	switch {
	case name == "sbatch":
		return "77;lab", nil
	case name == "squeue" && slices.Contains(args, "-s"):
		return "agent|n1\nlockstep-0|n[1-4]\nfault|n2\nlockstep-10|n[2-5]\nlockstep-9|n[1-4]", nil
	case name == "squeue" && slices.Contains(args, "%B"):
		return "n1", nil
	case name == "squeue":
		s := m.states[0]
		if len(m.states) > 1 {
			m.states = m.states[1:]
		}
		return s, nil
	case name == "scancel":
		m.states = []string{"CANCELLED|"}
	case call == "scontrol show hostnames n[1-5]":
		return "n1\nn2\nn3\nn4\nn5", nil
	case call == "scontrol show hostnames n[2-5]":
		return "n2\nn3\nn4\nn5", nil
	case call == "scontrol show hostnames n[1-4],odd":
		return "n1\n../etc", nil
	case call == "scontrol -o show node":
		return "NodeName=n1 NodeAddr=127.0.0.1 State=IDLE\nNodeName=n2 NodeAddr=192.0.2.1", nil
	case call == "scontrol show config":
		return "Configuration data\nClusterName             = lab\nX = y", nil
	}
	return "", nil
}

func (m *slurmModel) called(part string) (n int) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, c := range m.calls {
		if strings.Contains(c, part) {
			n++
		}
	}
	return n
}

func modelled(t *testing.T, m *slurmModel) (*slurmSite, *cluster, certs) {
	t.Helper()
	dir := filepath.Join(t.TempDir(), "it's here")
	cl, err := newCluster(&cluster{dir: dir, job: "lockstep-demo-0a", masterGRPC: "127.0.0.1:9401", pace: time.Millisecond, device: "cpu"})
	if err != nil {
		t.Fatal(err)
	}
	cl.self = filepath.Join(t.TempDir(), "self")
	if err := os.WriteFile(cl.self, []byte("#!/bin/sh\n"), 0o700); err != nil {
		t.Fatal(err)
	}
	ca, err := pki.New(filepath.Join(dir, "pki"))
	if err != nil {
		t.Fatal(err)
	}
	s := &slurmSite{job: cl.job, dir: dir, shape: shape{dp: 2, tp: 2, pp: 2, nodes: 4}, spares: 1, wait: time.Minute, run: m.run, say: t.Logf, user: "alice", options: []string{"--partition=debug"}}
	cl.site = s
	t.Cleanup(s.remove)
	return s, cl, certs{ca}
}

// TestSlurmSite: a job is handed in, its nodes' agents get certificates when it has nodes, and it is cancelled in the end, once.
func TestSlurmSite(t *testing.T) {
	m := &slurmModel{states: []string{"PENDING|", "CONFIGURING|n[1-5]", "RUNNING|n[1-5]"}}
	s, cl, ca := modelled(t, m)
	if err := s.submit(t.Context(), cl, ca); err != nil {
		t.Fatal(err)
	}
	for _, f := range []string{"pki/agent-n1.crt", "pki/agent-n5.key", "secret", "lockstep", "job.sh"} {
		if _, err := os.Stat(filepath.Join(s.dir, f)); err != nil {
			t.Error(err)
		}
	}
	if m.called("sbatch --job-name=lockstep-demo-0a --nodes=5 --ntasks-per-node=2") != 1 || m.called("--partition=debug --parsable") != 1 {
		t.Errorf("calls %q", m.calls)
	}
	nodes, err := s.nodes(t.Context())
	if err != nil || !slices.Equal(nodes, []string{"n2", "n3", "n4", "n5"}) {
		t.Errorf("the youngest attempt is on %q, %v", nodes, err)
	}
	if err := s.canLose(t.Context(), "n1"); err == nil || !strings.Contains(err.Error(), "batch script") {
		t.Errorf("the batch script's host may be lost: %v", err)
	}
	if err := s.canLose(t.Context(), "n2"); err != nil {
		t.Error(err)
	}
	if err := s.exec(t.Context(), "n3", "fault", "{}"); err != nil || m.called("--nodelist=n3 --job-name=fault "+s.dir+"/lockstep fault {}") != 1 {
		t.Errorf("%v, calls %q", err, m.calls)
	}
	if a, err := s.prepare(t.Context()); err != nil || a != "127.0.0.1" {
		t.Errorf("nodes reach this machine by %q, %v", a, err)
	}
	s.remove()
	s.remove()
	if n := m.called("scancel 77"); n != 1 {
		t.Errorf("cancelled %d times", n)
	}
}

func TestSlurmSiteFails(t *testing.T) {
	for _, c := range []struct {
		name, want string
		model      *slurmModel
	}{
		{"refused", "invalid partition", &slurmModel{fail: map[string]error{"sbatch": errors.New("invalid partition")}}},
		{"ends at once", "is FAILED", &slurmModel{states: []string{"PENDING|", "FAILED|"}}},
		{"no nodes in time", "wait longer with --wait", &slurmModel{states: []string{"PENDING|"}}},
		{"slurmctld is away", "squeue does not answer", &slurmModel{fail: map[string]error{"squeue": errors.New("away")}}},
		{"a node's name", "which no certificate can name", &slurmModel{states: []string{"RUNNING|n[1-4],odd"}}},
	} {
		t.Run(c.name, func(t *testing.T) {
			s, cl, ca := modelled(t, c.model)
			if strings.Contains(c.want, "--wait") || strings.Contains(c.want, "squeue") {
				s.wait = 300 * time.Millisecond
			}
			err := s.submit(t.Context(), cl, ca)
			if err == nil || !strings.Contains(err.Error(), c.want) {
				t.Errorf("%v, want %q", err, c.want)
			}
			c.model.fail = nil
			if c.model.states == nil {
				c.model.states = []string{"CANCELLED|"}
			}
			s.remove()
			if c.name != "refused" && c.model.called("scancel 77") != 1 {
				t.Errorf("the job is left: %q", c.model.calls)
			}
		})
	}
}

// TestSlurmScripts plays what the steps run with stand-ins for scontrol and lockstep, in a directory of an awkward name.
func TestSlurmScripts(t *testing.T) {
	s, cl, _ := modelled(t, &slurmModel{states: []string{"CANCELLED|"}})
	bin := t.TempDir()
	for name, text := range map[string]string{
		filepath.Join(bin, "scontrol"):     "#!/bin/sh\ncase $1 in show) printf 'n7\\nn9\\n';; *) echo NodeName=$4 Arch=x86_64 NodeAddr=10.0.0.7 State=MIX;; esac\n",
		filepath.Join(s.dir, "lockstep"):   "#!/bin/sh\necho \"$@\"; env | grep -E '^(LOCKSTEP|MASTER)_'; true\n",
		filepath.Join(s.dir, "secret"):     "",
		filepath.Join(bin, "srun"):         "#!/bin/sh\necho srun \"$@\"\n",
		filepath.Join(s.dir, "unused.txt"): "",
	} {
		if err := os.WriteFile(name, []byte(text), 0o700); err != nil {
			t.Fatal(err)
		}
	}
	node := "test" + filepath.Base(t.TempDir())
	t.Cleanup(func() {
		os.RemoveAll(filepath.Join("/dev/shm", s.job, node))
		os.Remove(filepath.Join("/dev/shm", s.job))
	})
	for name, text := range s.scripts(cl) {
		file := filepath.Join(s.dir, name)
		if err := os.WriteFile(file, []byte(text), 0o700); err != nil {
			t.Fatal(err)
		}
		if out, err := exec.CommandContext(t.Context(), "sh", "-n", file).CombinedOutput(); err != nil {
			t.Errorf("%s: %v: %s", name, err, out)
		}
		if strings.Contains(text, "@") {
			t.Errorf("%s has something left to fill in:\n%s", name, text)
		}
	}
	s.requeue = true
	if text := s.scripts(cl)["job.sh"]; !strings.Contains(text, "\nsrun --mem=0 --ntasks=8 --ntasks-per-node=2") || strings.Contains(text, "slurm run") || strings.Contains(text, "@") {
		t.Errorf("a job that is requeued:\n%s", text)
	}
	if args := s.sbatch(); !slices.Contains(args, "--nodes=4") {
		t.Errorf("%q", args)
	}
	play := func(script string) string {
		cmd := exec.CommandContext(t.Context(), "sh", filepath.Join(s.dir, script))
		cmd.Env = append(os.Environ(), "PATH="+bin+":"+os.Getenv("PATH"), "SLURMD_NODENAME="+node, "SLURM_JOB_ID=77", "SLURM_RESTART_COUNT=103", "SLURM_JOB_NODELIST=n[7,9]", "SLURM_STEP_NODELIST=n[7,9]")
		out, err := cmd.CombinedOutput()
		if err != nil {
			t.Errorf("%s: %v: %s", script, err, out)
		}
		return string(out)
	}
	for script, want := range map[string][]string{
		"rank.sh": {"train --dp 2", "MASTER_ADDR=10.0.0.7\n", "MASTER_PORT=27706\n", "LOCKSTEP_JOB=" + s.job + "\n", "LOCKSTEP_SECRET_FILE=" + s.dir + "/secret\n", "LOCKSTEP_NODE=" + node},
		"job.sh":  {"slurm run --nodes 4 -- --mem=0 --ntasks=8 --ntasks-per-node=2 " + s.dir + "/rank.sh", "--nodelist=n7", "--nodelist=n9"},
	} {
		out := play(script)
		for _, w := range want {
			if !strings.Contains(out, w) {
				t.Errorf("%s lacks %q:\n%s", script, w, out)
			}
		}
	}
}
