package launcher_test

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/lockstep-ccl/lockstep/launcher"
)

// What launchers set, as recorded from their documentation.
var environments = []struct {
	name string
	env  string
	want launcher.Identity
}{
	{"nobody", "HOME=/root", launcher.Identity{Rank: -1}},
	{
		"torchrun, standalone",
		"RANK=3 LOCAL_RANK=3 WORLD_SIZE=8 LOCAL_WORLD_SIZE=8 GROUP_RANK=0 MASTER_ADDR=127.0.0.1 MASTER_PORT=29500 TORCHELASTIC_RESTART_COUNT=1 TORCHELASTIC_MAX_RESTARTS=3 TORCHELASTIC_RUN_ID=9a2e_F0",
		launcher.Identity{Launcher: "torchrun", Job: "9a2e-f0", Rank: 3, World: 8, Local: 3, Attempt: 1},
	},
	{"torchrun, static", "RANK=0 LOCAL_RANK=0 WORLD_SIZE=2 TORCHELASTIC_RUN_ID=none", launcher.Identity{Launcher: "torchrun", Rank: 0, World: 2}},
	{
		"torchrun in srun",
		"SLURM_JOB_ID=77 SLURM_STEP_ID=0 SLURM_PROCID=1 SLURM_NTASKS=2 SLURM_LOCALID=0 SLURMD_NODENAME=gpu-2 SLURM_RESTART_COUNT=2 RANK=11 WORLD_SIZE=16 LOCAL_RANK=3",
		launcher.Identity{Launcher: "torchrun", Job: "slurm-77", Node: "gpu-2", Rank: 11, World: 16, Local: 3, Attempt: 2},
	},
	{
		"srun",
		"SLURM_JOB_ID=77 SLURM_JOB_NAME=llm SLURM_STEP_ID=1 SLURM_PROCID=5 SLURM_NTASKS=99 SLURM_STEP_NUM_TASKS=8 SLURM_LOCALID=1 SLURMD_NODENAME=gpu-1",
		launcher.Identity{Launcher: "slurm", Job: "slurm-77", Node: "gpu-1", Rank: 5, World: 8, Local: 1},
	},
	{"sbatch's script", "SLURM_JOB_ID=77 SLURM_PROCID=0 SLURM_NTASKS=8 SLURM_LOCALID=0 SLURMD_NODENAME=gpu-1", launcher.Identity{Job: "slurm-77", Node: "gpu-1", Rank: -1}},
	{
		"mpirun in sbatch",
		"SLURM_JOB_ID=77 SLURM_PROCID=0 SLURM_NTASKS=8 OMPI_COMM_WORLD_RANK=6 OMPI_COMM_WORLD_SIZE=8 OMPI_COMM_WORLD_LOCAL_RANK=2 OMPI_COMM_WORLD_LOCAL_SIZE=4",
		launcher.Identity{Launcher: "openmpi", Job: "slurm-77", Rank: 6, World: 8, Local: 2},
	},
	{"Hydra", "PMI_RANK=1 PMI_SIZE=4 MPI_LOCALRANKID=1 MPI_LOCALNRANKS=4", launcher.Identity{Launcher: "mpich", Rank: 1, World: 4, Local: 1}},
	{
		"indexed Job",
		"KUBERNETES_SERVICE_HOST=10.0.0.1 JOB_COMPLETION_INDEX=2 JOB_NAME=llm WORLD_SIZE=4 NODE_NAME=worker-3.example",
		launcher.Identity{Launcher: "kubernetes", Job: "llm", Node: "worker-3.example", Rank: 2, World: 4},
	},
	{
		"JobSet",
		"KUBERNETES_SERVICE_HOST=10.0.0.1 JOB_COMPLETION_INDEX=1 JOB_GLOBAL_INDEX=5 JOBSET_NAME=llm JOB_NAME=llm-workers-1 JOBSET_RESTART_ATTEMPT=3 WORLD_SIZE=8",
		launcher.Identity{Launcher: "kubernetes", Job: "llm", Rank: 5, World: 8, Attempt: 3},
	},
	{
		"lockstep run",
		"LOCKSTEP_JOB=job LOCKSTEP_RANK=2 LOCKSTEP_WORLD_SIZE=4 LOCKSTEP_LOCAL_RANK=2 LOCKSTEP_NODE=node0 LOCKSTEP_RESTART_COUNT=4 RANK=2 WORLD_SIZE=4 LOCAL_RANK=2",
		launcher.Identity{Launcher: "lockstep", Job: "job", Node: "node0", Rank: 2, World: 4, Local: 2, Attempt: 4},
	},
	{"empty variables", "RANK= WORLD_SIZE= LOCKSTEP_JOB= NODE_NAME=", launcher.Identity{Rank: -1}},
	{"a long name", "LOCKSTEP_JOB=--A--" + strings.Repeat("x", 70), launcher.Identity{Rank: -1, Job: "a-" + strings.Repeat("x", 61)}},
}

func fields(env string) map[string]string {
	m := map[string]string{}
	for _, kv := range strings.Fields(env) {
		k, v, _ := strings.Cut(kv, "=")
		m[k] = v
	}
	return m
}

func TestDetect(t *testing.T) {
	host, _ := os.Hostname()
	for _, e := range environments {
		m := fields(e.env)
		got, err := launcher.Detect(func(k string) (string, bool) { v, ok := m[k]; return v, ok })
		if e.want.Node == "" {
			e.want.Node = host
		}
		if err != nil || got != e.want {
			t.Errorf("%s: %+v, %v; want %+v", e.name, got, err, e.want)
		}
	}
}

func TestDetectErrors(t *testing.T) {
	for _, env := range []string{"RANK=x WORLD_SIZE=2", "RANK=-1 WORLD_SIZE=2", "RANK=2 WORLD_SIZE=2", "RANK=0 WORLD_SIZE=99999999999", "SLURM_STEP_ID=0 SLURM_PROCID=0 SLURM_NTASKS=2(x4)"} {
		m := fields(env)
		got, err := launcher.Detect(func(k string) (string, bool) { v, ok := m[k]; return v, ok })
		if !errors.Is(err, launcher.ErrVariable) {
			t.Errorf("%s: %+v, %v", env, got, err)
		}
	}
}

// C and Python read the same of each environment.
func TestLanguages(t *testing.T) {
	host, _ := os.Hostname()
	var in, want string
	for _, e := range environments {
		w := e.want
		if w.Rank < 0 {
			w.Rank, w.World = 0, 1
		}
		if w.Job == "" {
			w.Job = "job"
		}
		if w.Node == "" {
			w.Node = host
		}
		in += e.env + "\n"
		want += fmt.Sprintln(w.Job, w.Node, w.Rank, w.World, w.Local, w.Attempt)
	}
	t.Run("C", func(t *testing.T) {
		cc, err := exec.LookPath("cc")
		if err != nil {
			t.Skip("no C compiler: cc is not in PATH")
		}
		bin := filepath.Join(t.TempDir(), "whoami")
		if out, err := exec.Command(cc, "-std=c11", "-Wall", "-Wextra", "-Werror", "-I../marks/c", "-o", bin, "testdata/whoami.c").CombinedOutput(); err != nil {
			t.Fatalf("cc: %v\n%s", err, out)
		}
		got := ""
		for _, e := range environments {
			cmd := exec.Command(bin)
			cmd.Env = strings.Fields(e.env)
			out, err := cmd.Output()
			if err != nil {
				t.Fatal(err)
			}
			got += string(out)
		}
		if got != want {
			t.Errorf("C says\n%s, want\n%s", got, want)
		}
	})
	t.Run("Python", func(t *testing.T) {
		py, err := exec.LookPath("python3")
		if err != nil {
			t.Skip("no Python: python3 is not in PATH")
		}
		cmd := exec.Command(py, "testdata/whoami.py")
		cmd.Env = append(os.Environ(), "PYTHONPATH=../marks/python", "PYTHONDONTWRITEBYTECODE=1")
		cmd.Stdin = strings.NewReader(in)
		if out, err := cmd.Output(); err != nil || string(out) != want {
			t.Errorf("Python says\n%s%v, want\n%s", out, err, want)
		}
	})
}

func FuzzLabel(f *testing.F) {
	f.Add("Train_Me")
	f.Fuzz(func(t *testing.T, s string) {
		l := launcher.Label(s)
		if len(l) > 63 || strings.HasPrefix(l, "-") || strings.HasSuffix(l, "-") || launcher.Label(l) != l {
			t.Errorf("%q becomes %q", s, l)
		}
	})
}
