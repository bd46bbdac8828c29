package attachcmd

import (
	"cmp"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/lockstep-ccl/lockstep/collector/wire"
	"github.com/lockstep-ccl/lockstep/launcher"
)

// Plan is what attach is going to do. It is made of variables, arguments and a look at
// files, and changes nothing.
type Plan struct {
	Who   launcher.Identity
	Job   string
	Nodes int  // that the job runs on, as far as the launcher tells
	First bool // this node has rank 0

	Set    []Var // of the command's environment
	Kept   []Var // that the user has set, and so stay
	Master string
	Lead   bool // this node is to have the job's master
	Beyond bool // which agents of other nodes reach
	Warn   []string
}

// Var is one variable and why it is set, or kept.
type Var struct{ Name, Value, Why string }

// PluginFile is the profiler plugin's name beside the program.
const PluginFile = "libnccl-profiler-lockstep.so"

// env looks variables up.
type env func(string) (string, bool)

func (e env) get(name string) string { v, _ := e(name); return v }

// first is the first of the variables that is set.
func (e env) first(names ...string) string {
	for _, n := range names {
		if v := e.get(n); v != "" {
			return v
		}
	}
	return ""
}

// plan makes the plan for a command. exe is this program's own path.
func (c *Cmd) plan(e env, command []string, exe string) *Plan {
	p := &Plan{}
	var err error
	if p.Who, err = launcher.Detect(e); err != nil {
		p.warn("%v", err)
	}
	t := torchrun(e, command)
	p.place(e, t)
	if p.Job = c.Job; p.Job != "" && wire.CheckJob(p.Job) != nil {
		p.warn("%v: it is called %s", wire.CheckJob(p.Job), launcher.Label(p.Job))
		p.Job = launcher.Label(p.Job)
	}
	p.Job = cmp.Or(p.Job, p.Who.Job, launcher.Label(t.id), script(command))
	if p.Nodes > 1 && c.Job == "" && p.Who.Job == "" && t.id == "" {
		p.warn("the job has no name of its own and %d nodes: it is called %s on this one; give all the same with --job", p.Nodes, p.Job)
	}
	// The agent and the master go by these two, and the ranks must: a flag counts more than a variable, and ranks may be elsewhere.
	p.agree(e, "LOCKSTEP_JOB", p.Job, "the job, in each metric and verdict", launcher.Label(e.get("LOCKSTEP_JOB")) == p.Job)
	p.agree(e, "LOCKSTEP_RUNTIME_DIR", c.RuntimeDir, "where flight recorders go", e.get("LOCKSTEP_RUNTIME_DIR") == c.RuntimeDir)
	c.nccl(p, e, exe)
	if dir := besides(exe, "python", filepath.Join("share", "lockstep", "python"), filepath.Join("marks", "python")); dir != "" {
		path := dir
		if was := e.get("PYTHONPATH"); was != "" {
			path = was + string(os.PathListSeparator) + dir
		}
		p.Set = append(p.Set, Var{"PYTHONPATH", path, "import lockstep: marks"})
	}
	c.master(p, e, t)
	return p
}

func (p *Plan) warn(format string, args ...any) {
	p.Warn = append(p.Warn, fmt.Sprintf(format, args...))
}

// set sets a variable unless the user has.
func (p *Plan) set(e env, name, value, why string) {
	if was := e.get(name); was != "" {
		p.Kept = append(p.Kept, Var{name, was, why})
		return
	}
	p.Set = append(p.Set, Var{name, value, why})
}

// agree sets a variable unless what the user has set means the same.
func (p *Plan) agree(e env, name, value, why string, same bool) {
	if same {
		p.set(e, name, value, why)
		return
	}
	p.Set = append(p.Set, Var{name, value, why})
}

// nccl is what NCCL needs (docs/design/nccl.md): the plugin by its path. RAS is on unless
// the user has turned it off.
func (c *Cmd) nccl(p *Plan, e env, exe string) {
	plugin := cmp.Or(c.Plugin, besides(exe, PluginFile, filepath.Join("lib", "lockstep", PluginFile), filepath.Join("lib", PluginFile)))
	was := e.get("NCCL_PROFILER_PLUGIN")
	switch {
	case was != "" && was != plugin && was != "lockstep":
		p.Kept = append(p.Kept, Var{"NCCL_PROFILER_PLUGIN", was, "NCCL loads one plugin"})
		p.warn("NCCL_PROFILER_PLUGIN is %s and stays; NCCL loads one plugin, so its operations are not seen by Lockstep", was)
	case plugin == "":
		p.warn("no %s beside %s: operations of NCCL are not seen (make build makes it; --plugin says where it is)", PluginFile, exe)
	default:
		if _, err := os.Stat(plugin); err != nil {
			p.warn("NCCL's profiler plugin: %v: operations of NCCL are not seen", err)
		}
		p.set(e, "NCCL_PROFILER_PLUGIN", plugin, "NCCL tells its operations to the flight recorder")
	}
	if e.get("NCCL_RAS_ENABLE") == "0" {
		p.Kept = append(p.Kept, Var{"NCCL_RAS_ENABLE", "0", "the agent has no second opinion of NCCL's RAS"})
	}
}

// besides returns the first of the files that is there, relative to the program's folder
// or to the one above.
func besides(exe string, names ...string) string {
	dir := filepath.Dir(exe)
	for _, base := range []string{dir, filepath.Dir(dir)} {
		for _, n := range names {
			path := filepath.Join(base, n)
			if _, err := os.Stat(path); err == nil {
				if filepath.Base(path) == "python" {
					if _, err := os.Stat(filepath.Join(path, "lockstep", "__init__.py")); err != nil {
						continue
					}
				}
				return path
			}
		}
	}
	return ""
}

// master decides where the job's master is.
func (c *Cmd) master(p *Plan, e env, t torch) {
	p.Master = c.Master
	switch head := cmp.Or(e.get("MASTER_ADDR"), t.master); {
	case p.Master != "":
		if _, _, err := net.SplitHostPort(p.Master); err != nil {
			p.warn("--master %s: %v; the agent gets none", p.Master, err)
			p.Master = ""
		}
	case p.Nodes <= 1:
		p.Lead = true
	case c.PKI != "" && head != "":
		p.Master, p.Lead, p.Beyond = net.JoinHostPort(head, strconv.Itoa(masterPort)), p.First, true
	default:
		p.warn("the job has %d nodes and no master that their agents could reach: agents tell metrics, and nobody judges. Start lockstep master --job %s and pass --master HOST:%d, "+
			"or give certificates with --pki (docs/attach)", p.Nodes, p.Job, masterPort)
	}
}

// masterPort is where a job's master listens for agents of other nodes.
const masterPort = 9401

// place finds out how many nodes the job has, and whether rank 0 is on this one.
func (p *Plan) place(e env, t torch) {
	number := func(names ...string) int {
		n, err := strconv.Atoi(e.first(names...))
		if err != nil || n < 0 {
			return -1
		}
		return n
	}
	// apart tells by ranks: on this node, of all.
	apart := func(local, world int) {
		p.Nodes = 1
		if local > 0 && world > local {
			p.Nodes = (world + local - 1) / local
		}
		p.First = p.Who.Rank >= 0 && p.Who.Rank < max(local, 1)
	}
	switch {
	case t.is:
		p.Nodes, p.First = t.nodes, t.rank <= 0
		if n := number("SLURM_STEP_NUM_NODES", "SLURM_JOB_NUM_NODES"); t.rank < 0 && p.Nodes > 1 && n > 1 {
			p.First = number("SLURM_NODEID") <= 0
		}
	case p.Who.Launcher == "torchrun", p.Who.Launcher == "lockstep":
		apart(number("LOCAL_WORLD_SIZE"), p.Who.World)
		if p.Nodes == 1 && number("LOCAL_WORLD_SIZE") < 0 {
			p.Nodes = max(1, number("PET_NNODES"))
		}
	case p.Who.Launcher == "openmpi":
		apart(number("OMPI_COMM_WORLD_LOCAL_SIZE"), p.Who.World)
	case p.Who.Launcher == "mpich":
		apart(number("MPI_LOCALNRANKS"), p.Who.World)
	case e.get("SLURM_JOB_ID") != "":
		p.Nodes, p.First = max(1, number("SLURM_STEP_NUM_NODES", "SLURM_JOB_NUM_NODES", "SLURM_NNODES")), number("SLURM_NODEID") <= 0
		if p.Who.Launcher == "" { // the batch script: what it starts without srun is on this node
			p.Nodes, p.First = 1, true
		}
	case p.Who.Launcher == "kubernetes":
		p.Nodes, p.First = max(1, p.Who.World), p.Who.Rank == 0 // one rank a pod
	default:
		p.Nodes, p.First = 1, true
	}
}

// torch is what torchrun's own command line says, or its variables (PET_*).
type torch struct {
	is         bool
	nodes      int
	rank       int // of this node, -1 when nobody says
	master, id string
}

// torchrun reads a command line as torchrun does, as far as attach needs it.
func torchrun(e env, command []string) (t torch) {
	t.nodes, t.rank = 1, -1
	args := command
	for i, a := range command {
		switch base := filepath.Base(a); {
		case base == "torchrun", i > 0 && command[i-1] == "-m" && (a == "torch.distributed.run" || a == "torch.distributed.launch"):
			t.is, args = true, command[i+1:]
		default:
			continue
		}
		break
	}
	if !t.is {
		return t
	}
	opts := map[string]string{}
	for _, n := range []string{"nnodes", "node_rank", "master_addr", "rdzv_endpoint", "rdzv_id"} {
		opts[n] = e.get("PET_" + strings.ToUpper(n))
	}
	for i := 0; i < len(args); i++ {
		name, ok := strings.CutPrefix(args[i], "--")
		if !ok {
			if args[i] == "-m" || strings.HasPrefix(args[i], "-") {
				continue
			}
			if i == 0 || !strings.HasPrefix(args[i-1], "-") || strings.Contains(args[i-1], "=") {
				break // the script
			}
			continue
		}
		name, value, has := strings.Cut(name, "=")
		name = strings.ReplaceAll(name, "-", "_")
		if _, known := opts[name]; !known {
			continue
		}
		if !has && i+1 < len(args) {
			value = args[i+1]
		}
		opts[name] = value
	}
	if v := opts["nnodes"]; v != "" {
		_, most, ranged := strings.Cut(v, ":")
		if !ranged {
			most = v
		}
		if n, err := strconv.Atoi(most); err == nil && n > 0 {
			t.nodes = n
		}
	}
	if n, err := strconv.Atoi(opts["node_rank"]); err == nil {
		t.rank = n
	}
	t.master = opts["master_addr"]
	if host, _, err := net.SplitHostPort(opts["rdzv_endpoint"]); err == nil && t.master == "" {
		t.master = host
	}
	if t.id = opts["rdzv_id"]; t.id == "none" {
		t.id = ""
	}
	return t
}

// script names a job by what it runs.
func script(command []string) string {
	name := ""
	for _, a := range command {
		base := filepath.Base(a)
		if strings.HasSuffix(base, ".py") || strings.HasSuffix(base, ".sh") {
			name = strings.TrimSuffix(strings.TrimSuffix(base, ".py"), ".sh")
			break
		}
		if name == "" && !strings.HasPrefix(a, "-") {
			name = base
		}
	}
	return cmp.Or(launcher.Label(name), "job")
}

// environ is the command's environment.
func (p *Plan) environ(base []string) []string {
	out := append([]string(nil), base...)
	for _, v := range p.Set {
		out = append(out, v.Name+"="+v.Value)
	}
	return dedupe(out)
}

// dedupe keeps the last of each name: programs differ in which they take.
func dedupe(env []string) []string {
	last := map[string]int{}
	for i, kv := range env {
		k, _, _ := strings.Cut(kv, "=")
		last[k] = i
	}
	out := env[:0:0]
	for i, kv := range env {
		if k, _, _ := strings.Cut(kv, "="); last[k] == i {
			out = append(out, kv)
		}
	}
	return out
}

var errNoCommand = errors.New("nothing to attach to: lockstep attach -- COMMAND, or --print-env")
