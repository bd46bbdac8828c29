package ebpf

import (
	"bytes"
	"errors"
	"maps"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/lockstep-ccl/lockstep/collector/wire"
	"github.com/lockstep-ccl/lockstep/diagnosis"
	"github.com/lockstep-ccl/lockstep/launcher"
	"github.com/lockstep-ccl/lockstep/record"
)

func TestIdentify(t *testing.T) {
	for _, c := range []struct {
		env  string
		want record.Identity
		ok   bool
	}{
		{"", record.Identity{}, false},
		{"RANK=3 WORLD_SIZE=8 LOCAL_RANK=1 TORCHELASTIC_RUN_ID=llm TORCHELASTIC_RESTART_COUNT=2", record.Identity{Job: "llm", Rank: 3, WorldSize: 8, LocalRank: 1, Attempt: 2}, true},
		{"RANK=3 WORLD_SIZE=8 TORCHELASTIC_RUN_ID=none SLURM_JOB_ID=77 SLURM_PROCID=0 SLURM_NTASKS=2", record.Identity{Job: "slurm-77", Rank: 3, WorldSize: 8}, true},
		{"SLURM_STEP_ID=0 SLURM_PROCID=5 SLURM_NTASKS=16 SLURM_LOCALID=5 SLURM_JOB_ID=77 SLURM_RESTART_COUNT=1", record.Identity{Job: "slurm-77", Rank: 5, WorldSize: 16, LocalRank: 5, Attempt: 1}, true},
		{"OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=2 OMPI_COMM_WORLD_LOCAL_RANK=1", record.Identity{Rank: 1, WorldSize: 2, LocalRank: 1}, true},
		{"SLURM_PROCID=0 SLURM_NTASKS=16 SLURM_JOB_ID=77", record.Identity{Job: "slurm-77"}, false}, // a batch script is no rank
		{"KUBERNETES_SERVICE_HOST=x JOB_COMPLETION_INDEX=2 WORLD_SIZE=4 JOBSET_NAME=llm", record.Identity{Job: "llm", Rank: 2, WorldSize: 4}, true},
		{"RANK=8 WORLD_SIZE=8", record.Identity{}, false},
		{"RANK=-1 WORLD_SIZE=8", record.Identity{}, false},
		{"LOCKSTEP_JOB=mine LOCKSTEP_RANK=0 LOCKSTEP_WORLD_SIZE=1 RANK=4 WORLD_SIZE=9 TORCHELASTIC_RUN_ID=other", record.Identity{Job: "mine", WorldSize: 1}, true},
	} {
		env := map[string]string{}
		for _, kv := range strings.Fields(c.env) {
			k, v, _ := strings.Cut(kv, "=")
			env[k] = v
		}
		if got, ok := identify(env); got != c.want || ok != c.ok {
			t.Errorf("%q: %+v %v, want %+v", c.env, got, ok, c.want)
		}
	}
}

// A process is the same rank of the same job by its probes as by its plugin and its marks, which have the launchers' table.
func TestIdentifyAsTheLaunchersTableDoes(t *testing.T) {
	for _, env := range []map[string]string{
		{"RANK": "3", "WORLD_SIZE": "8", "TORCHELASTIC_RUN_ID": "Llama_70b.2"},                                               // no DNS label
		{"RANK": "3", "WORLD_SIZE": "8", "TORCHELASTIC_RUN_ID": "29400", "SLURM_JOB_ID": "77"},                               // torchrun --rdzv-id $RANDOM in a batch script
		{"RANK": "3", "WORLD_SIZE": "8", "LOCKSTEP_JOB": "LLM", "JOB_NAME": "other"},                                         // the most explicit
		{"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_MCA_orte_num_restarts": "4", "LOCKSTEP_JOB": "mpi"}, // restarted
		{"KUBERNETES_SERVICE_HOST": "x", "JOB_COMPLETION_INDEX": "0", "JOB_GLOBAL_INDEX": "5", "WORLD_SIZE": "8", "JOBSET_NAME": "set", "JOBSET_RESTART_ATTEMPT": "2"},
	} {
		want, err := launcher.Detect(func(name string) (string, bool) { v, ok := env[name]; return v, ok })
		if err != nil {
			t.Fatal(err)
		}
		got, ok := identify(env)
		if !ok || got.Job != want.Job || int(got.Rank) != want.Rank || int(got.WorldSize) != want.World || int(got.Attempt) != want.Attempt {
			t.Errorf("%v: %+v %v, want %+v", env, got, ok, want)
		}
		if err := wire.CheckJob(got.Job); err != nil {
			t.Errorf("%v: no master watches it: %v", env, err)
		}
	}
}

func TestWhatAThreadWaitsFor(t *testing.T) {
	for function, want := range map[string]diagnosis.WaitFor{
		"folio_wait_bit_common": diagnosis.WaitForStorage, "nfs4_proc_getattr": diagnosis.WaitForNFS, "rpc_wait_bit_killable": diagnosis.WaitForNFS,
		"uvm_down_write": diagnosis.WaitForGPUDriver, "rwsem_down_write_slowpath": diagnosis.WaitForLock, "0": diagnosis.WaitForUnknown, "": diagnosis.WaitForUnknown,
	} {
		if got := waitForOf(function); got != want {
			t.Errorf("%s: %v, want %v", function, got, want)
		}
	}
}

func TestPlacesOfRankAndSize(t *testing.T) {
	memory := func(words ...int32) (b []byte) {
		for _, w := range words {
			b = append(b, byte(w), byte(w>>8), byte(w>>16), byte(w>>24))
		}
		return b
	}
	var p places
	p = p.learnFrom(memory(3, 8, 0, 3, 8, 1), 3, 8) // one of them is no such place
	p = p.learnFrom(memory(3, 8, 0, 4, 8, 2), 4, 8)
	if len(p) != 1 || !p[12] {
		t.Fatalf("places: %v", p)
	}
	if rank, size, ok := p.read(memory(9, 9, 9, 1, 4, 0), 8); !ok || rank != 1 || size != 4 {
		t.Errorf("rank %d of %d, %v", rank, size, ok)
	}
	for _, bad := range [][]byte{memory(0, 0, 0, 4, 4), memory(0, 0, 0, 1, 9), memory(0, 0, 0, -1, 4), memory(1)} {
		if rank, size, ok := p.read(bad, 8); ok {
			t.Errorf("%v is rank %d of %d", bad, rank, size)
		}
	}
	if _, _, ok := places(nil).read(memory(1, 2), 2); ok {
		t.Error("nothing is known, and something read")
	}
}

// What a former agent left in the name of processes that live is removed, and nothing else.
func TestFormerRecordersAreRemoved(t *testing.T) {
	dir := t.TempDir()
	var paths []string
	for i, source := range []record.Source{record.SourceNCCLProbes, record.SourceCCL} {
		w, err := record.Create(record.Options{Dir: dir, Source: source, RingSlots: 64, Identity: record.Identity{Job: "job", Rank: int32(i), WorldSize: 2}})
		if err != nil {
			t.Fatal(err)
		}
		paths = append(paths, w.Path())
	}
	if err := clean(dir); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(paths[0]); !errors.Is(err, os.ErrNotExist) {
		t.Error("it is still there: ", err)
	}
	if _, err := os.Stat(paths[1]); err != nil {
		t.Error(err)
	}
}

func TestFilesThatAreNoLibraries(t *testing.T) {
	dir := t.TempDir()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	garbage := filepath.Join(dir, "libnccl.so.2")
	if err := os.WriteFile(garbage, []byte("\x7fELF garbage"), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, path := range []string{self, garbage, dir, "/dev/null"} {
		f, _, err := open(path)
		if err == nil {
			_, err = symbols(f)
			f.Close()
		}
		if !errors.Is(err, ErrNotLibrary) {
			t.Errorf("%s: %v", path, err)
		}
	}
}

// FuzzForeign reads what other processes write: their files, environment and sockets.
func FuzzForeign(f *testing.F) {
	f.Add([]byte("\x7fELF\x02\x01\x01"), "RANK=1", "0100007F:1F90")
	f.Add([]byte{}, "", "00000000000000000000000001000000:0016")
	f.Fuzz(func(t *testing.T, file []byte, env, address string) {
		if offsets, err := symbols(bytes.NewReader(file)); err != nil && !errors.Is(err, ErrNotLibrary) || err == nil && len(offsets) == 0 {
			t.Errorf("%v, %v", maps.Keys(offsets), err)
		}
		k, v, _ := strings.Cut(env, "=")
		if id, ok := identify(map[string]string{k: v, "WORLD_SIZE": "4"}); ok && (id.Rank < 0 || id.Rank >= id.WorldSize) {
			t.Errorf("%+v", id)
		}
		endpoint(address)
		var p places
		p.learnFrom(file, 1, 2).read(file, 4)
	})
}
