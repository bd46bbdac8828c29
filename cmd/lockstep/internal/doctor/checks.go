package doctor

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"runtime/debug"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/lockstep-ccl/lockstep/record"
)

// check is one row: its name for --require, what it is about, and the look itself.
type check struct {
	name, about string
	look        func(context.Context, *node) Finding
}

var checks = []check{
	{"kernel", "the kernel's version", kernel},
	{"shm", "shared memory", shm},
	{"runtime", "the runtime directory", runtimeDir},
	{"state", "the state directory", stateDir},
	{"pids", "whether this process sees the ranks", pids},
	{"psi", "cgroups, pressure and scheduler statistics", pressure},
	{"clock", "whether something keeps the clock", clock},
	{"ports", "the ports that components listen on by default", ports},
	{"gpu", "GPUs and their driver", gpu},
	{"nccl", "NCCL, and the plugin for it", nccl},
	{"rdma", "RDMA ports and libibverbs", rdma},
	{"memlock", "how much memory ranks may lock", memlock},
	{"ebpf", "what the probes of --ebpf.watch take", ebpf},
}

func names() (all []string) {
	for _, c := range checks {
		all = append(all, c.name)
	}
	return all
}

var release = regexp.MustCompile(`^(\d+)\.(\d+)`)

// version of the kernel, as major*1000+minor; 0 when it does not say.
func (n *node) version() int {
	m := release.FindStringSubmatch(n.read("/proc/sys/kernel/osrelease"))
	if m == nil {
		return 0
	}
	major, _ := strconv.Atoi(m[1])
	minor, _ := strconv.Atoi(m[2])
	return major*1000 + minor
}

func kernel(_ context.Context, n *node) Finding {
	found := "Linux " + n.read("/proc/sys/kernel/osrelease")
	switch v := n.version(); {
	case v == 0:
		return Finding{Status: Broken, Found: "/proc/sys/kernel/osrelease tells no version", Do: "mount /proc"}
	case v < 5004:
		return Finding{Status: Broken, Found: found, Without: "nothing is tested below Linux 5.4", Do: "upgrade the kernel"}
	case v < 6015:
		return Finding{Status: Lacks, Found: found, Without: "how ranks end is told by lockstep run only: the kernel tells others since 6.15"}
	}
	return Finding{Status: OK, Found: found}
}

// A recorder is 1.6 to 4 MiB, communicators' buffers some more.
const shmLeast = 256 << 20

func shm(_ context.Context, n *node) Finding {
	const do = "mount a tmpfs there; in a container an emptyDir with medium: Memory, or --shm-size=1g"
	free, tmpfs, err := n.space(n.at("/dev/shm"))
	switch {
	case err != nil:
		return Finding{Status: Broken, Found: err.Error(), Without: "ranks share no memory and keep no recorders", Do: do}
	case !tmpfs:
		return Finding{Status: Lacks, Found: "/dev/shm is not on tmpfs", Without: "recorders are on a disk: GPUs' last stamps are lost when a process dies", Do: do}
	case free < shmLeast:
		return Finding{Status: Lacks, Found: fmt.Sprintf("/dev/shm has %d MiB free", free>>20), Without: "there is room for few ranks: recorders take 4 MiB each, communicators' buffers more", Do: do}
	}
	found := fmt.Sprintf("/dev/shm on tmpfs, %.1f GiB free", float64(free)/(1<<30))
	if removes(n) {
		return Finding{Status: Lacks, Found: found + "; systemd-logind removes a user's files there when the last session ends",
			Without: "an agent that starts after a logout does not find ranks that still run", Do: "set RemoveIPC=no in /etc/systemd/logind.conf, or let jobs belong to system users"}
	}
	return Finding{Status: OK, Found: found}
}

// removes reports whether logind is there and cleans up, as is its default.
func removes(n *node) bool {
	if !n.exists("/run/systemd/seats") {
		return false // no logind
	}
	says := ""
	for _, conf := range append([]string{"/etc/systemd/logind.conf"}, n.glob("/etc/systemd/logind.conf.d/*.conf")...) {
		if v := n.field(conf, "RemoveIPC="); v != "" {
			says = v
		}
	}
	return says != "no"
}

func runtimeDir(_ context.Context, n *node) Finding {
	base := n.at(n.runtimeDir)
	find := record.DirBelow
	if n.root == "/" && base == record.DefaultDir() {
		find = func(_, key string) (string, []error, error) { return record.Dir(key) }
	}
	beside, _ := filepath.Glob(base + "*")
	inside, _ := filepath.Glob(base + "/*")
	dir, refused, err := find(base, "")
	if err == nil && !slices.Contains(slices.Concat(beside, inside), dir) {
		_ = os.Remove(dir) // as it was; not when somebody has put something there meanwhile
	}
	do := "chmod 700 it when it is yours, else have it removed, or set LOCKSTEP_RUNTIME_DIR for ranks and agent alike"
	switch {
	case err != nil:
		return Finding{Status: Broken, Found: err.Error(), Without: "ranks keep no recorders: nobody sees what they do", Do: do}
	case len(refused) > 0:
		return Finding{Status: Lacks, Found: fmt.Sprintf("%s is used, since %v", dir, refused[0]), Without: "an agent that was told the other place does not find this user's ranks", Do: do}
	}
	free, tmpfs, err := n.space(filepath.Dir(dir))
	if err == nil && !tmpfs {
		return Finding{Status: Lacks, Found: fmt.Sprintf("%s, on a disk with %.1f GiB free", dir, float64(free)/(1<<30)), Without: "records are written to that disk, and GPUs' last stamps are lost when a process dies", Do: "use a tmpfs, such as /dev/shm"}
	}
	return Finding{Status: OK, Found: dir}
}

func stateDir(_ context.Context, n *node) Finding {
	base := n.getenv("XDG_STATE_HOME")
	if base == "" {
		if home := n.getenv("HOME"); home != "" {
			base = filepath.Join(home, ".local", "state")
		}
	}
	if base == "" {
		return Finding{Status: Lacks, Found: "neither XDG_STATE_HOME nor HOME is set", Without: "lockstep run and attach want --dir and --state-dir", Do: "set HOME"}
	}
	for dir := base; ; dir = filepath.Dir(dir) {
		err := unix.Access(n.at(dir), unix.W_OK)
		switch {
		case err == nil:
			return Finding{Status: OK, Found: base + " can be written"}
		case err != unix.ENOENT || dir == "/":
			return Finding{Status: Lacks, Found: fmt.Sprintf("%s: %v", dir, err), Without: "lockstep run and attach want --dir and --state-dir", Do: "make it writable, or set XDG_STATE_HOME"}
		}
	}
}

// The inode of the first PID namespace is a constant of the kernel (PROC_PID_INIT_INO).
const firstPIDs = "pid:[4026531836]"

func pids(_ context.Context, n *node) Finding {
	ns, _ := os.Readlink(n.at("/proc/self/ns/pid"))
	for line := range strings.Lines(n.read("/proc/self/mountinfo")) {
		if strings.Contains(line, " /proc ") && regexp.MustCompile(`hidepid=([1-9]|noaccess|invisible|ptraceable)`).MatchString(line) {
			return Finding{Status: Lacks, Found: "/proc hides other users' processes (hidepid)", Without: "an agent sees no more of other users' ranks than that their recorders are kept up to date",
				Do: "run the agent as root or in the group of the mount's gid= option"}
		}
	}
	if ns != firstPIDs {
		return Finding{Status: Lacks, Found: "a PID namespace of its own", Without: "an agent in here does not see ranks outside: their state is unknown, and hangs are told later; ranks in here are well",
			Do: "for an agent: hostPID: true, or --pid=host"}
	}
	return Finding{Status: OK, Found: "the host's processes are seen"}
}

func pressure(_ context.Context, n *node) Finding {
	var found, lacks []string
	note := func(ok bool, have, lack string) {
		if ok {
			found = append(found, have)
		} else {
			lacks = append(lacks, lack)
		}
	}
	note(n.exists("/sys/fs/cgroup/cgroup.controllers"), "cgroup v2", "no cgroup v2 at /sys/fs/cgroup")
	note(n.exists("/proc/pressure/cpu"), "pressure stall information", "no pressure stall information")
	note(n.exists("/proc/self/schedstat"), "schedstat", "no schedstat")
	if len(lacks) > 0 {
		return Finding{Status: Lacks, Found: strings.Join(append(lacks, found...), ", "), Without: "a rank that starves for CPU looks like one that computes",
			Do: "boot with psi=1, and give an agent in a container the host's /sys/fs/cgroup, at /host/sys/fs/cgroup"}
	}
	return Finding{Status: OK, Found: strings.Join(found, ", ")}
}

func clock(_ context.Context, n *node) Finding {
	const without = "spans of several nodes still lie on one clock, but times in logs differ, and a master refuses ranks from more than ten seconds in its future"
	t, err := n.clock()
	switch {
	case err != nil:
		return Finding{Status: Lacks, Found: fmt.Sprintf("the kernel does not tell: %v", err), Without: without, Do: "run chrony or systemd-timesyncd on the host"}
	case t.Status&unix.STA_UNSYNC != 0:
		return Finding{Status: Lacks, Found: "nobody keeps the clock: the kernel calls it unsynchronized", Without: without, Do: "run chrony or systemd-timesyncd on the host"}
	}
	return Finding{Status: OK, Found: fmt.Sprintf("synchronized, error below %d ms", (t.Maxerror+999)/1000)}
}

// The defaults of --web.listen-address and --listen.
var defaultPorts = []struct{ addr, of string }{
	{":9400", "agent"}, {"127.0.0.1:9401", "master, for agents"}, {":9402", "master"}, {"127.0.0.1:9410", "remediator"},
}

func ports(_ context.Context, n *node) Finding {
	var taken []string
	for _, p := range defaultPorts {
		if err := n.listen(p.addr); err != nil {
			taken = append(taken, fmt.Sprintf("%s (%s)", p.addr, p.of))
		}
	}
	if len(taken) > 0 {
		return Finding{Status: Lacks, Found: "taken: " + strings.Join(taken, ", "), Without: "by a component that runs already nothing is lost; beside anything else it needs another port",
			Do: "look with ss -ltnp; give the component another one with --web.listen-address or --listen"}
	}
	return Finding{Status: OK, Found: "9400, 9401, 9402 and 9410 are free"}
}

// cgo reports whether this program can open libraries at run time.
func cgo() bool {
	bi, ok := debug.ReadBuildInfo()
	if !ok {
		return true
	}
	for _, s := range bi.Settings {
		if s.Key == "CGO_ENABLED" {
			return s.Value == "1"
		}
	}
	return true
}
