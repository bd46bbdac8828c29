package attachcmd

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/lockstep-ccl/lockstep/cmd/lockstep/internal/presence"
)

func TestPlan(t *testing.T) {
	dir := t.TempDir()
	exe := filepath.Join(dir, "bin", "lockstep")
	plugin := filepath.Join(dir, "bin", PluginFile)
	for _, f := range []string{exe, plugin, filepath.Join(dir, "share/lockstep/python/lockstep/__init__.py")} {
		if err := os.MkdirAll(filepath.Dir(f), 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(f, nil, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	for _, c := range []struct {
		name, env, command string
		cmd                Cmd
		job                string
		nodes              int
		first, lead        bool
		master, warn       string
	}{
		{name: "torchrun on one node", command: "torchrun --standalone --nproc-per-node 8 train.py --lr 1", job: "train", nodes: 1, first: true, lead: true},
		{name: "python -m", command: "python -m torch.distributed.run --nnodes=2 --node_rank=1 --master_addr=head --rdzv_id=A train.py", job: "a", nodes: 2, warn: "no master that their agents could reach"},
		{name: "elastic", command: "torchrun --nnodes 1:4 --rdzv-endpoint head:29400 --rdzv-id x7 train.py --nnodes 99", job: "x7", nodes: 4, first: true, warn: "no master"},
		{name: "variables of Kubeflow", env: "PET_NNODES=3 PET_NODE_RANK=0 MASTER_ADDR=m JOB_NAME=llm", command: "torchrun train.py", cmd: Cmd{PKI: "/pki"}, job: "llm", nodes: 3, first: true, lead: true, master: "m:9401"},
		{name: "the same on another node", env: "PET_NNODES=3 PET_NODE_RANK=2 MASTER_ADDR=m JOB_NAME=llm", command: "torchrun train.py", cmd: Cmd{PKI: "/pki"}, job: "llm", nodes: 3, master: "m:9401"},
		{name: "a known master", env: "PET_NNODES=3 PET_NODE_RANK=0", command: "torchrun train.py", cmd: Cmd{Job: "j", Master: "m:1"}, job: "j", nodes: 3, first: true, master: "m:1"},
		{name: "a bad master", command: "torchrun train.py", cmd: Cmd{Job: "j", Master: "m"}, job: "j", nodes: 1, first: true, warn: "missing port"},
		{name: "torchrun in srun, one a node", env: "SLURM_JOB_ID=5 SLURM_STEP_ID=0 SLURM_PROCID=1 SLURM_NTASKS=2 SLURM_STEP_NUM_NODES=2 SLURM_NODEID=1", command: "torchrun --nnodes 2 --rdzv-endpoint h:1 t.py", cmd: Cmd{PKI: "/p"}, job: "slurm-5", nodes: 2, master: "h:9401"},
		{name: "srun, a rank each", env: "SLURM_JOB_ID=5 SLURM_STEP_ID=0 SLURM_PROCID=3 SLURM_NTASKS=8 SLURM_STEP_NUM_NODES=1 SLURM_NODEID=0", command: "python train.py", job: "slurm-5", nodes: 1, first: true, lead: true},
		{name: "srun, two nodes", env: "SLURM_JOB_ID=5 SLURM_STEP_ID=0 SLURM_PROCID=8 SLURM_NTASKS=16 SLURM_STEP_NUM_NODES=2 SLURM_NODEID=1 MASTER_ADDR=h", command: "python train.py", cmd: Cmd{PKI: "/p"}, job: "slurm-5", nodes: 2, master: "h:9401"},
		{name: "batch script", env: "SLURM_JOB_ID=5 SLURM_PROCID=0 SLURM_NTASKS=16 SLURM_JOB_NUM_NODES=2 SLURM_NODEID=0", command: "python one.py", job: "slurm-5", nodes: 1, first: true, lead: true},
		{name: "mpirun", env: "OMPI_COMM_WORLD_RANK=4 OMPI_COMM_WORLD_SIZE=8 OMPI_COMM_WORLD_LOCAL_SIZE=4 OMPI_COMM_WORLD_LOCAL_RANK=0", command: "./train", job: "train", nodes: 2, warn: "no name of its own"},
		{name: "a pod a rank", env: "KUBERNETES_SERVICE_HOST=x JOB_COMPLETION_INDEX=0 WORLD_SIZE=4 JOB_NAME=llm", command: "python t.py", job: "llm", nodes: 4, first: true, warn: "no master"},
		{name: "inside torchrun", env: "RANK=9 WORLD_SIZE=16 LOCAL_RANK=1 LOCAL_WORLD_SIZE=8 TORCHELASTIC_RUN_ID=r", command: "python t.py", job: "r", nodes: 2, warn: "no master"},
		{name: "a name that is none", command: "x", cmd: Cmd{Job: "My_Job"}, job: "my-job", nodes: 1, first: true, lead: true, warn: "DNS label"},
		{name: "nothing", command: "", job: "job", nodes: 1, first: true, lead: true},
		{name: "no RAS", env: "NCCL_RAS_ENABLE=0", command: "/bin/x.sh", job: "x", nodes: 1, first: true, lead: true},
	} {
		vars := map[string]string{}
		for _, kv := range strings.Fields(c.env) {
			k, v, _ := strings.Cut(kv, "=")
			vars[k] = v
		}
		p := c.cmd.plan(func(k string) (string, bool) { v, ok := vars[k]; return v, ok }, strings.Fields(c.command), exe)
		if p.Job != c.job || p.Nodes != c.nodes || p.First != c.first || p.Lead != c.lead || p.Master != c.master {
			t.Errorf("%s: job %s, %d nodes, first %v, lead %v, master %q; want %+v", c.name, p.Job, p.Nodes, p.First, p.Lead, p.Master, c)
		}
		if w := strings.Join(p.Warn, "\n"); !strings.Contains(w, c.warn) || (c.warn == "") != (w == "") {
			t.Errorf("%s: warns %q, want %q", c.name, w, c.warn)
		}
		env := p.environ([]string{"NCCL_PROFILER_PLUGIN=", "A=1", "PYTHONPATH="})
		want := "A=1\nLOCKSTEP_JOB=" + c.job + "\nLOCKSTEP_RUNTIME_DIR=\nNCCL_PROFILER_PLUGIN=" + plugin + "\nPYTHONPATH=" + filepath.Join(dir, "share/lockstep/python")
		if got := strings.Join(env, "\n"); got != want {
			t.Errorf("%s: environment\n%s\nwant\n%s", c.name, got, want)
		}
	}
}

func TestQuote(t *testing.T) {
	if got := quote("it's"); got != `'it'\''s'` {
		t.Error(got)
	}
}

// An agent that was there before knows a job's master when it was told of it, by name or for all jobs.
func TestReports(t *testing.T) {
	for _, x := range []struct {
		masters []string
		want    bool
	}{{nil, false}, {[]string{"a=m:1"}, true}, {[]string{"b=m:1"}, false}, {[]string{"m:1"}, true}, {[]string{"a=m:2", "m:1"}, false}} {
		if got := reports(presence.Info{Masters: x.masters}, "a", "m:1"); got != x.want {
			t.Errorf("an agent of %q: %v", x.masters, got)
		}
	}
}
