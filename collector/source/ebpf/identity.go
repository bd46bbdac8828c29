package ebpf

import (
	"bytes"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/lockstep-ccl/lockstep/record"
)

// maxEnviron bounds what is read of a process's environment.
const maxEnviron = 1 << 20

// launcher is how one launcher tells a process its place: names of environment variables.
type launcher struct {
	rank, size, local, job, attempt string
	prefix                          string // of the job's name
}

// launchers in the order of how much they know of the job: a launcher's own variables are also
// there when another one started it.
var launchers = []launcher{
	{"LOCKSTEP_RANK", "LOCKSTEP_WORLD_SIZE", "LOCKSTEP_LOCAL_RANK", "LOCKSTEP_JOB", "LOCKSTEP_RESTART_COUNT", ""},
	{"RANK", "WORLD_SIZE", "LOCAL_RANK", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", ""},
	{"OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "", "", ""},
	{"PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "", "", ""},
	{"SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_JOB_ID", "SLURM_RESTART_COUNT", "slurm-"},
}

// environ reads the environment that a process was started with.
func environ(proc string, pid int) map[string]string {
	f, err := os.Open(filepath.Join(proc, strconv.Itoa(pid), "environ"))
	if err != nil {
		return nil
	}
	defer f.Close()
	text, _ := io.ReadAll(io.LimitReader(f, maxEnviron)) // what there is; the process may end meanwhile
	env := map[string]string{}
	for line := range bytes.SplitSeq(text, []byte{0}) {
		if k, v, ok := strings.Cut(string(line), "="); ok {
			env[k] = v
		}
	}
	return env
}

// identify finds a process's place in its job; ok is false when its environment does not
// tell. The job's name is "" when only that is missing.
func identify(env map[string]string) (id record.Identity, ok bool) {
	number := func(name string) (int32, bool) {
		n, err := strconv.ParseInt(env[name], 10, 32)
		return int32(n), err == nil && n >= 0
	}
	for _, l := range launchers {
		rank, ok := number(l.rank)
		size, sized := number(l.size)
		if !ok || !sized || rank >= size {
			continue
		}
		id.Rank, id.WorldSize = rank, size
		id.LocalRank, _ = number(l.local)
		break
	}
	ok = id.WorldSize > 0
	for _, l := range launchers {
		// torchrun's own default says nothing.
		if name := env[l.job]; name != "" && name != "none" && id.Job == "" {
			id.Job = l.prefix + name
		}
		if n, told := number(l.attempt); told && id.Attempt == 0 {
			id.Attempt = uint32(n)
		}
	}
	return id, ok
}

// jobOf names a job that nobody has named by its first communicator, which all of its ranks have.
func jobOf(comm uint64) string { return fmt.Sprintf("nccl-%08x", uint32(comm^comm>>32)) }
