package nccl_test

import (
	"encoding/json"
	"os"
	"strings"
	"testing"

	"github.com/lockstep-ccl/lockstep/launcher"
	"github.com/lockstep-ccl/lockstep/record"
)

// identified is who the plugin takes a process for, in which rank 1 of 4 is the first communicator's.
func identified(t *testing.T, env string) record.Identity {
	t.Helper()
	dir := t.TempDir()
	play(t, plain, dir, strings.Fields(env), "5", "basic")
	return recorders(t, dir)[0].header.Identity
}

// Launchers' variables name the rank; without any, the first communicator is the world.
func TestIdentity(t *testing.T) {
	for _, c := range []struct {
		env  string
		want record.Identity
	}{
		{"", record.Identity{Job: "job", Rank: 1, WorldSize: 4}},
		{"RANK=3 WORLD_SIZE=8 LOCAL_RANK=1 TORCHELASTIC_RESTART_COUNT=2 TORCHELASTIC_RUN_ID=none SLURM_JOB_ID=77", record.Identity{Job: "slurm-77", Rank: 3, WorldSize: 8, LocalRank: 1, Attempt: 2}},
		{"SLURM_STEP_ID=0 SLURM_PROCID=5 SLURM_NTASKS=6 SLURM_LOCALID=1 SLURM_JOB_ID=9 SLURM_RESTART_COUNT=1", record.Identity{Job: "slurm-9", Rank: 5, WorldSize: 6, LocalRank: 1, Attempt: 1}},
		{"SLURM_JOB_ID=9 SLURM_PROCID=0 SLURM_NTASKS=8 OMPI_COMM_WORLD_RANK=3 OMPI_COMM_WORLD_SIZE=8 OMPI_COMM_WORLD_LOCAL_RANK=3", record.Identity{Job: "slurm-9", Rank: 3, WorldSize: 8, LocalRank: 3}},
		{"SLURM_JOB_ID=9 SLURM_PROCID=0 SLURM_NTASKS=8", record.Identity{Job: "slurm-9", Rank: 1, WorldSize: 4}}, // the batch script's own
		{"OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_SIZE=2 OMPI_COMM_WORLD_LOCAL_RANK=0", record.Identity{Job: "job", WorldSize: 2}},
		{"PMI_RANK=1 PMI_SIZE=2 MPI_LOCALRANKID=1", record.Identity{Job: "job", Rank: 1, WorldSize: 2, LocalRank: 1}},
		{"KUBERNETES_SERVICE_HOST=10.0.0.1 JOB_COMPLETION_INDEX=1 JOB_GLOBAL_INDEX=5 JOBSET_NAME=llm JOBSET_RESTART_ATTEMPT=3 WORLD_SIZE=8", record.Identity{Job: "llm", Rank: 5, WorldSize: 8, Attempt: 3}},
		// Without a world it is the first communicator, as far as that goes.
		{"KUBERNETES_SERVICE_HOST=10.0.0.1 JOB_COMPLETION_INDEX=2 JOB_NAME=llm", record.Identity{Job: "llm", Rank: 2, WorldSize: 4}},
		{"KUBERNETES_SERVICE_HOST=10.0.0.1 JOB_COMPLETION_INDEX=6 JOB_NAME=llm", record.Identity{Job: "llm", Rank: 6, WorldSize: 7}},
		{"LOCKSTEP_JOB=llm LOCKSTEP_RANK=7 LOCKSTEP_WORLD_SIZE=9 RANK=1 WORLD_SIZE=2", record.Identity{Job: "llm", Rank: 7, WorldSize: 9}},
		{"RANK=x WORLD_SIZE=-1", record.Identity{Job: "job", Rank: 1, WorldSize: 4}},
		{"RANK=2 WORLD_SIZE=2", record.Identity{Job: "job", Rank: 1, WorldSize: 4}},
	} {
		c.want.Node = "n7"
		if got := identified(t, c.env+" LOCKSTEP_NODE=n7"); got != c.want {
			t.Errorf("%s:\n got %+v\nwant %+v", c.env, got, c.want)
		}
	}
}

// The plugin takes a process for who `lockstep attach` and the agent do, whatever started it.
func TestIdentityAgreesWithLauncher(t *testing.T) {
	var environments []struct{ Name, Env string }
	b, err := os.ReadFile("../launcher/testdata/environments.json")
	if err == nil {
		err = json.Unmarshal(b, &environments)
	}
	if err != nil || len(environments) == 0 {
		t.Fatalf("no environments: %v", err)
	}
	for _, e := range environments {
		vars := map[string]string{}
		for _, kv := range strings.Fields(e.Env) {
			k, v, _ := strings.Cut(kv, "=")
			vars[k] = v
		}
		id, err := launcher.Detect(func(k string) (string, bool) { v, ok := vars[k]; return v, ok })
		if err != nil {
			t.Fatalf("%s: %v", e.Name, err)
		}
		want := record.Identity{Job: id.Job, Node: id.Node, Rank: int32(id.Rank), WorldSize: int32(id.World), LocalRank: int32(id.Local), Attempt: uint32(id.Attempt)}
		if want.Job == "" {
			want.Job = "job"
		}
		if id.Rank < 0 {
			want.Rank, want.WorldSize = 1, 4
		}
		if got := identified(t, e.Env); got != want {
			t.Errorf("%s:\n got %+v\nwant %+v", e.Name, got, want)
		}
	}
}
