package launcher

import (
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"
)

// Launcher is how one launcher tells a process who it is. Of each list the first
// variable that is set counts.
type Launcher struct {
	Name string
	// Each is set in a process that is a rank of this launcher, and in no other.
	Marks []string
	Rank  []string
	// World may be missing where the launcher does not tell it (Kubernetes).
	World []string
	Local []string // rank on its node
	// Attempt counts restarts from 0.
	Attempt []string
}

// Launchers is every launcher known, the innermost first: a process may have
// variables of several, since launchers start each other.
var Launchers = []Launcher{
	{
		Name:  "lockstep", // run, and attach
		Marks: []string{"LOCKSTEP_RANK"},
		Rank:  []string{"LOCKSTEP_RANK"}, World: []string{"LOCKSTEP_WORLD_SIZE", "WORLD_SIZE"},
		Local: []string{"LOCKSTEP_LOCAL_RANK", "LOCAL_RANK"}, Attempt: []string{"LOCKSTEP_RESTART_COUNT", "TORCHELASTIC_RESTART_COUNT"},
	},
	{
		// torchrun, and whoever sets the variables of torch.distributed's env:// method.
		Name:  "torchrun",
		Marks: []string{"RANK", "WORLD_SIZE"},
		Rank:  []string{"RANK"}, World: []string{"WORLD_SIZE"}, Local: []string{"LOCAL_RANK"},
		Attempt: []string{"TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT"},
	},
	{
		Name:  "openmpi",
		Marks: []string{"OMPI_COMM_WORLD_RANK"},
		Rank:  []string{"OMPI_COMM_WORLD_RANK"}, World: []string{"OMPI_COMM_WORLD_SIZE"}, Local: []string{"OMPI_COMM_WORLD_LOCAL_RANK"},
		Attempt: []string{"OMPI_MCA_orte_num_restarts", "SLURM_RESTART_COUNT"},
	},
	{
		Name:  "mpich", // Hydra, and Intel MPI
		Marks: []string{"PMI_RANK", "PMI_SIZE"},
		Rank:  []string{"PMI_RANK"}, World: []string{"PMI_SIZE"},
		Local: []string{"MPI_LOCALRANKID", "PMI_LOCAL_RANK", "SLURM_LOCALID"}, Attempt: []string{"SLURM_RESTART_COUNT"},
	},
	{
		// A batch script has SLURM_PROCID too, and no step. PMIx under srun names only the
		// rank; Slurm's own variables say the rest.
		Name:  "slurm",
		Marks: []string{"SLURM_STEP_ID", "SLURM_PROCID"},
		Rank:  []string{"SLURM_PROCID"}, World: []string{"SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"}, Local: []string{"SLURM_LOCALID"},
		Attempt: []string{"SLURM_RESTART_COUNT"},
	},
	{
		// An indexed Job, or a JobSet's: one rank a pod. Kubernetes tells no world size:
		// the pod's specification does (docs/attach/kubernetes.md).
		Name:  "kubernetes",
		Marks: []string{"KUBERNETES_SERVICE_HOST", "JOB_COMPLETION_INDEX"},
		Rank:  []string{"JOB_GLOBAL_INDEX", "JOB_COMPLETION_INDEX"}, World: []string{"LOCKSTEP_WORLD_SIZE", "WORLD_SIZE"},
		Attempt: []string{"JOBSET_RESTART_ATTEMPT"},
	},
}

// Job is where a job's name is found: the first variable that is set, after Prefix.
type Job struct{ Prefix, Var, Not string }

// Jobs are the variables that name a job, the most explicit first. A job's name must
// be the same on all its nodes, and no other job's.
var Jobs = []Job{
	{"", "LOCKSTEP_JOB", ""},
	{"", "JOBSET_NAME", ""},
	{"", "JOB_NAME", ""}, // by the downward API, docs/attach/kubernetes.md
	{"slurm-", "SLURM_JOB_ID", ""},
	{"", "TORCHELASTIC_RUN_ID", "none"},
}

// Nodes are the variables that name a node; without one it is the host's name.
var Nodes = []string{"LOCKSTEP_NODE", "NODE_NAME", "SLURMD_NODENAME"}

// Identity is what is known of a process.
type Identity struct {
	Launcher string // "" when no launcher has started it as a rank
	Job      string // "" when nobody has named it; else a DNS label
	Node     string
	Rank     int // -1 when it is no rank
	World    int // 0 when unknown
	Local    int
	Attempt  int
}

// ErrVariable is what errors of Detect wrap: a launcher's variable holds nothing
// that it could.
var ErrVariable = errors.New("a launcher's variable is not to be understood")

// maxRank bounds what a variable may say: what no job has is a mistake.
const maxRank = 1 << 24

// Detect reads the process's environment by lookup, os.LookupEnv when nil. On an
// error the Identity is still what could be understood.
func Detect(lookup func(string) (string, bool)) (Identity, error) {
	if lookup == nil {
		lookup = os.LookupEnv
	}
	get := func(names ...string) (name, value string) {
		for _, n := range names {
			if v, ok := lookup(n); ok && v != "" {
				return n, v
			}
		}
		return "", ""
	}
	var errs []error
	number := func(fallback int, names []string) int {
		name, v := get(names...)
		if name == "" {
			return fallback
		}
		n, err := strconv.Atoi(v)
		if err != nil || n < 0 || n > maxRank {
			errs = append(errs, fmt.Errorf("%w: %s is %q, want a number from 0", ErrVariable, name, v))
			return fallback
		}
		return n
	}
	id := Identity{Rank: -1}
	for _, l := range Launchers {
		if !all(l.Marks, func(n string) bool { name, _ := get(n); return name != "" }) {
			continue
		}
		id.Launcher = l.Name
		id.Rank, id.World = number(-1, l.Rank), number(0, l.World)
		id.Local, id.Attempt = number(0, l.Local), number(0, l.Attempt)
		if id.World > 0 && id.Rank >= id.World {
			errs = append(errs, fmt.Errorf("%w: rank %d of %d (%s)", ErrVariable, id.Rank, id.World, l.Name))
		}
		break
	}
	for _, j := range Jobs {
		if _, v := get(j.Var); v != "" && v != j.Not {
			id.Job = Label(j.Prefix + v)
			break
		}
	}
	if _, id.Node = get(Nodes...); id.Node == "" {
		host, err := os.Hostname()
		if err != nil {
			host = "node"
		}
		id.Node = host
	}
	return id, errors.Join(errs...)
}

func all(names []string, ok func(string) bool) bool {
	for _, n := range names {
		if !ok(n) {
			return false
		}
	}
	return len(names) > 0
}

// maxLabel is the longest DNS label.
const maxLabel = 63

// Label makes a DNS label of a name, as jobs must have: small letters, digits, and
// single hyphens in between. "" when nothing of it is left.
func Label(name string) string {
	var b strings.Builder
	for i := 0; i < len(name) && b.Len() < maxLabel; i++ {
		switch c := name[i]; {
		case c >= 'a' && c <= 'z', c >= '0' && c <= '9':
			b.WriteByte(c)
		case c >= 'A' && c <= 'Z':
			b.WriteByte(c - 'A' + 'a')
		case b.Len() > 0 && !strings.HasSuffix(b.String(), "-"):
			b.WriteByte('-')
		}
	}
	return strings.TrimRight(b.String(), "-")
}
