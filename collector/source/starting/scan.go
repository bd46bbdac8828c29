package starting

import (
	"bytes"
	"io"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"

	"github.com/lockstep-ccl/lockstep/launcher"
	"github.com/lockstep-ccl/lockstep/record"
)

const (
	// maxProcesses bounds the processes that are looked at.
	maxProcesses = 1 << 16
	// maxEnviron bounds what is read of a process's environment.
	maxEnviron = 1 << 20
)

// image is a process and what it runs: another start, or other addresses, and its environment
// is another one.
type image struct {
	start, env uint64
}

// candidate is what is known of a process.
type candidate struct {
	image
	id  *record.Identity // nil: it is no rank that is expected
	uid uint32
}

// stat is what /proc/PID/stat says.
type stat struct {
	image
	name      string // of its program
	state     byte
	parent    int
	user, sys uint64 // clock ticks
}

// sighting is a rank's process at one moment.
type sighting struct {
	pid int
	stat
	id     *record.Identity
	uid    uint32
	waits  wait
	sleeps uint64 // how often its first thread has gone to sleep
}

// scanner looks at all processes. It is for one goroutine at a time.
type scanner struct {
	proc  string
	dir   string // whose ranks these are
	node  string // "": any
	known map[int]candidate
}

// scan returns the first process of each rank that this node's agent should expect a recorder of.
func (s *scanner) scan() ([]sighting, error) {
	dir, err := os.Open(s.proc)
	if err != nil {
		return nil, err
	}
	names, err := dir.Readdirnames(-1)
	dir.Close()
	if err != nil {
		return nil, err
	}
	all := make(map[int]*sighting, len(s.known))
	for _, name := range names {
		pid, err := strconv.Atoi(name)
		if err != nil || len(all) >= maxProcesses {
			continue
		}
		st, ok := s.stat(pid)
		if !ok {
			continue
		}
		c, ok := s.known[pid]
		if !ok || c.image != st.image {
			c = candidate{image: st.image}
			c.id, c.uid = s.expected(pid)
			s.known[pid] = c
		}
		all[pid] = &sighting{pid: pid, stat: st, id: c.id, uid: c.uid}
	}
	for pid := range s.known {
		if all[pid] == nil {
			delete(s.known, pid)
		}
	}
	var found []sighting
	for _, x := range first(all) {
		x.waits, x.sleeps = s.wait(x.pid, x.state), s.sleeps(x.pid)
		found = append(found, *x)
	}
	return found, nil
}

// shells wait for the one command that they have been started for.
var shells = map[string]bool{"sh": true, "bash": true, "dash": true, "zsh": true, "ksh": true, "busybox": true}

// first picks of each rank's processes the one that stands for it. Children inherit the
// environment: the first is the one whose parent is no process of the rank, or, where
// that is a shell with one child, this child.
func first(all map[int]*sighting) (found []*sighting) {
	children := map[int][]*sighting{}
	for _, x := range all {
		if x.id == nil {
			continue
		}
		if up := all[x.parent]; up != nil && up.id != nil && *up.id == *x.id {
			children[x.parent] = append(children[x.parent], x)
		}
	}
	for _, x := range all {
		if x.id == nil {
			continue
		}
		if up := all[x.parent]; up != nil && up.id != nil && *up.id == *x.id {
			continue
		}
		for depth := 0; depth < 8 && shells[x.name] && len(children[x.pid]) == 1; depth++ {
			x = children[x.pid][0]
		}
		if !shells[x.name] || len(children[x.pid]) == 0 {
			found = append(found, x)
		}
	}
	return found
}

// stat reads /proc/PID/stat; ok is false for what has ended, and for the kernel's threads.
func (s *scanner) stat(pid int) (st stat, ok bool) {
	text, err := os.ReadFile(filepath.Join(s.proc, strconv.Itoa(pid), "stat"))
	if err != nil {
		return st, false
	}
	open, shut := bytes.IndexByte(text, '('), bytes.LastIndexByte(text, ')')
	if open < 0 || shut < open {
		return st, false
	}
	f := strings.Fields(string(text[shut+1:])) // from field 3 on
	if len(f) < 48 || f[0] == "Z" || f[0] == "X" || f[20] == "0" {
		return st, false
	}
	number := func(i int) uint64 {
		n, _ := strconv.ParseUint(f[i], 10, 64) // what is none is 0
		return n
	}
	st.name, st.state = string(text[open+1:shut]), f[0][0]
	st.parent = int(number(1))
	st.user, st.sys = number(11), number(12)
	st.start, st.env = number(19), number(47) // start of the process, of its environment
	return st, true
}

// sleeps is how often a process's first thread has given up its CPU to wait; 0 where that is not told.
func (s *scanner) sleeps(pid int) uint64 {
	text, err := os.ReadFile(filepath.Join(s.proc, strconv.Itoa(pid), "status"))
	if err != nil {
		return 0
	}
	for line := range strings.Lines(string(text)) {
		if value, ok := strings.CutPrefix(line, "voluntary_ctxt_switches:"); ok {
			n, _ := strconv.ParseUint(strings.TrimSpace(value), 10, 64) // what is none is 0
			return n
		}
	}
	return 0
}

// expected reads from a process's environment which rank it is, nil when none that a recorder
// is expected of here.
func (s *scanner) expected(pid int) (*record.Identity, uint32) {
	path := filepath.Join(s.proc, strconv.Itoa(pid))
	f, err := os.Open(filepath.Join(path, "environ"))
	if err != nil {
		return nil, 0 // not ours to see
	}
	defer f.Close()
	text, _ := io.ReadAll(io.LimitReader(f, maxEnviron)) // what there is; the process may end meanwhile
	if !bytes.Contains(text, []byte("LOCKSTEP_JOB=")) {
		return nil, 0
	}
	env := map[string]string{}
	for line := range bytes.SplitSeq(text, []byte{0}) {
		if k, v, ok := strings.Cut(string(line), "="); ok {
			env[k] = v
		}
	}
	id := s.identify(env)
	if id == nil {
		return nil, 0
	}
	fi, err := os.Stat(path)
	if err != nil {
		return nil, 0
	}
	st, ok := fi.Sys().(*syscall.Stat_t)
	if !ok {
		return nil, 0
	}
	return id, st.Uid
}

// identify is which rank an environment is of. It must be one of the plugin's, which names
// the job as this does, and of this agent's runtime directory. Launchers by whose variables
// a launcher inside of them looks like a rank (srun torchrun) are not asked.
func (s *scanner) identify(env map[string]string) *record.Identity {
	plugin := filepath.Base(env["NCCL_PROFILER_PLUGIN"])
	if env["LOCKSTEP_JOB"] == "" || env["LOCKSTEP_RECORDER"] == "off" || plugin != "lockstep" && plugin != pluginFile {
		return nil
	}
	if dir := env["LOCKSTEP_RUNTIME_DIR"]; dir == "" || filepath.Clean(dir) != s.dir {
		return nil
	}
	who, err := launcher.Detect(func(name string) (string, bool) { v, ok := env[name]; return v, ok })
	if err != nil || who.Launcher != "torchrun" && who.Launcher != "lockstep" || who.Rank < 0 || who.Rank >= who.World {
		return nil
	}
	if s.node != "" && env["LOCKSTEP_NODE"] != "" && env["LOCKSTEP_NODE"] != s.node {
		return nil
	}
	return &record.Identity{
		Job: who.Job, Node: who.Node, Rank: int32(who.Rank), WorldSize: int32(who.World), LocalRank: int32(who.Local), Attempt: uint32(who.Attempt),
	}
}

// pluginFile is the profiler plugin's.
const pluginFile = "libnccl-profiler-lockstep.so"
