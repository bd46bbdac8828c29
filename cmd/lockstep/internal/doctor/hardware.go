package doctor

import (
	"context"
	"fmt"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

const withoutCgo = "this program was built without cgo and opens no libraries"

func gpu(ctx context.Context, n *node) Finding {
	devices := n.glob("/dev/nvidia[0-9]*")
	pci := 0
	for _, dev := range n.glob("/sys/bus/pci/devices/*") {
		class := n.read(dev + "/class")
		if n.read(dev+"/vendor") == "0x10de" && (strings.HasPrefix(class, "0x0302") || strings.HasPrefix(class, "0x0300")) {
			pci++
		}
	}
	without := "ranks run on the CPU, and Xids, heat and links of GPUs are no evidence"
	library := n.library("libnvidia-ml.so.1")
	switch {
	case len(devices) == 0 && pci == 0:
		return Finding{Status: Lacks, Found: "no NVIDIA GPU", Without: without}
	case len(devices) == 0:
		return Finding{Status: Lacks, Found: fmt.Sprintf("%d GPUs on the PCI bus and no /dev/nvidia*", pci), Without: without,
			Do: "load NVIDIA's driver; in a container use NVIDIA's runtime (runtimeClassName: nvidia, NVIDIA_VISIBLE_DEVICES=all)"}
	case library == "":
		return Finding{Status: Lacks, Found: fmt.Sprintf("%d GPUs and no libnvidia-ml.so.1", len(devices)), Without: without,
			Do: "install the driver's libraries; in a container add the driver capability utility (NVIDIA_DRIVER_CAPABILITIES=utility,compute)"}
	case !cgo():
		return Finding{Status: Lacks, Found: fmt.Sprintf("%d GPUs; %s", len(devices), withoutCgo), Without: without, Do: "use a build with cgo (make build)"}
	}
	found, err := n.gpus(ctx)
	if err != nil {
		return Finding{Status: Lacks, Found: fmt.Sprintf("%d GPUs: %v", len(devices), err), Without: without, Do: "look at nvidia-smi and dmesg"}
	}
	if n.library("libcuda.so.1") == "" {
		return Finding{Status: Lacks, Found: found + "; no libcuda.so.1", Without: "health is told, ranks cannot use the GPUs", Do: "add the driver capability compute"}
	}
	return Finding{Status: OK, Found: found}
}

const plugin = "libnccl-profiler-lockstep.so"

func nccl(_ context.Context, n *node) Finding {
	where := n.library("libnccl.so.2")
	if where == "" {
		for _, p := range []string{
			"/usr/lib/python3*/*-packages", "/usr/local/lib/python3*/*-packages", "/opt/*/lib/python3*/site-packages", "/opt/*/*/lib/python3*/site-packages",
			strings.TrimRight(n.getenv("VIRTUAL_ENV"), "/") + "/lib/python3*/site-packages", strings.TrimRight(n.getenv("CONDA_PREFIX"), "/") + "/lib/python3*/site-packages",
		} {
			if all := n.glob(p + "/nvidia/nccl/lib/libnccl.so.2"); len(all) > 0 {
				where = all[0]
				break
			}
		}
	}
	without := "jobs over NCCL are not seen in here; Lockstep's own collectives need none"
	if where == "" {
		return Finding{Status: Lacks, Found: "no libnccl.so.2 in the library path nor in Python's packages", Without: without, Do: "none, when NCCL is in the job's own container or environment"}
	}
	found := where
	if to, err := filepath.EvalSymlinks(n.at(where)); err == nil {
		if v, ok := strings.CutPrefix(filepath.Base(to), "libnccl.so."); ok && strings.Contains(v, ".") {
			found += ", " + v
			if old(v) {
				return Finding{Status: Lacks, Found: found, Without: "it loads no profiler plugin of this kind (2.27 or later): such ranks are seen with lockstep agent --ebpf.watch", Do: "upgrade NCCL"}
			}
		}
	}
	if p := filepath.Join(filepath.Dir(n.executable), plugin); n.getenv("LOCKSTEP_NCCL_PLUGIN") == "" && !n.exists(p) {
		return Finding{Status: Lacks, Found: found + "; no " + p, Without: "lockstep attach has no plugin to load into NCCL", Do: "put it beside this program (make build), or set LOCKSTEP_NCCL_PLUGIN"}
	}
	return Finding{Status: OK, Found: found}
}

// old reports whether a version of NCCL is before 2.27.
func old(v string) bool {
	parts := strings.SplitN(v, ".", 3)
	if len(parts) < 2 {
		return false
	}
	major, e1 := strconv.Atoi(parts[0])
	minor, e2 := strconv.Atoi(parts[1])
	return e1 == nil && e2 == nil && (major < 2 || major == 2 && minor < 27)
}

func rdma(_ context.Context, n *node) Finding {
	devices := n.glob("/sys/class/infiniband/*")
	without := "ranks of different nodes use TCP, and nobody watches ports"
	if len(devices) == 0 {
		return Finding{Status: Lacks, Found: "no RDMA device (/sys/class/infiniband)", Without: without, Do: "none, when there is no such NIC; else load its driver, and in a container mount the host's /sys"}
	}
	var up, down []string
	for _, d := range devices {
		for _, port := range n.glob(d + "/ports/*") {
			name := filepath.Base(d) + ":" + filepath.Base(port)
			if strings.Contains(n.read(port+"/state"), "ACTIVE") {
				up = append(up, name)
			} else {
				down = append(down, name)
			}
		}
	}
	found := fmt.Sprintf("%s active", strings.Join(up, ", "))
	if len(down) > 0 {
		found += fmt.Sprintf(", %s not", strings.Join(down, ", "))
	}
	verbs := n.glob("/dev/infiniband/uverbs*")
	closed := slices.ContainsFunc(verbs, func(v string) bool { return unix.Access(n.at(v), unix.R_OK|unix.W_OK) != nil })
	switch {
	case len(up) == 0:
		return Finding{Status: Lacks, Found: fmt.Sprintf("no port is active (%s)", strings.Join(down, ", ")), Without: without, Do: "look at cables, switch and ibstat; lockstep nics shows each port"}
	case len(verbs) == 0 || closed:
		return Finding{Status: Lacks, Found: found + "; /dev/infiniband/uverbs* cannot be opened for reading and writing", Without: "ports are watched, ranks use TCP", Do: "give ranks the devices; in a container map /dev/infiniband"}
	case n.library("libibverbs.so.1") == "":
		return Finding{Status: Lacks, Found: found + "; no libibverbs.so.1", Without: "ports are watched, ranks use TCP", Do: "install rdma-core (libibverbs1, ibverbs-providers)"}
	case !cgo():
		return Finding{Status: Lacks, Found: found + "; " + withoutCgo, Without: "ports are watched, ranks use TCP", Do: "use a build with cgo (make build)"}
	}
	return Finding{Status: OK, Found: found}
}

// A connection of RDMA takes about 4 MiB a peer.
const memlockLeast = 1 << 30

func memlock(_ context.Context, n *node) Finding {
	line := n.field("/proc/self/limits", "Max locked memory")
	soft := strings.Fields(line)
	switch {
	case len(soft) == 0:
		return Finding{Status: Lacks, Found: "/proc/self/limits does not tell", Without: "whether RDMA works is seen when ranks start"}
	case soft[0] == "unlimited":
		return Finding{Status: OK, Found: "unlimited"}
	}
	bytes, err := strconv.ParseUint(soft[0], 10, 64)
	if err == nil && bytes >= memlockLeast {
		return Finding{Status: OK, Found: fmt.Sprintf("%d MiB", bytes>>20)}
	}
	if n.capable(unix.CAP_IPC_LOCK) {
		return Finding{Status: OK, Found: fmt.Sprintf("%d MiB, and CAP_IPC_LOCK, which lifts it", bytes>>20)}
	}
	return Finding{Status: Lacks, Found: fmt.Sprintf("%d MiB", bytes>>20), Without: "TCP is not concerned; RDMA takes about 4 MiB a peer, and what MemAlloc allocates",
		Do: "ulimit -l unlimited (LimitMEMLOCK=infinity in systemd and Slurm); in Kubernetes the capability IPC_LOCK"}
}

// capable reports whether this process has a capability.
func (n *node) capable(c int) bool {
	set, err := strconv.ParseUint(n.field("/proc/self/status", "CapEff:"), 16, 64)
	return err == nil && set>>c&1 == 1
}

func ebpf(_ context.Context, n *node) Finding {
	without := "ranks with a recorder lose nothing; ranks without one are not seen, nor what threads wait for"
	if v := n.version(); v < 5015 {
		return Finding{Status: Lacks, Found: "the kernel is older than Linux 5.15", Without: without, Do: "upgrade the kernel"}
	}
	if !n.exists("/sys/kernel/btf/vmlinux") {
		return Finding{Status: Lacks, Found: "no /sys/kernel/btf/vmlinux", Without: without, Do: "a kernel with CONFIG_DEBUG_INFO_BTF; in a container mount the host's /sys"}
	}
	if l := n.read("/sys/kernel/security/lockdown"); strings.Contains(l, "[confidentiality]") {
		return Finding{Status: Lacks, Found: "the kernel is locked down (confidentiality)", Without: without, Do: "boot with lockdown=integrity"}
	}
	admin := n.capable(unix.CAP_SYS_ADMIN)
	var lacks []string
	for _, c := range []struct {
		cap  int
		name string
	}{{unix.CAP_BPF, "CAP_BPF"}, {unix.CAP_PERFMON, "CAP_PERFMON"}} {
		if !n.capable(c.cap) && !admin {
			lacks = append(lacks, c.name)
		}
	}
	if len(lacks) > 0 {
		return Finding{Status: Lacks, Found: "BTF; this user lacks " + strings.Join(lacks, " and "), Without: without, Do: "give the agent these, and for other users' ranks CAP_SYS_PTRACE and CAP_DAC_READ_SEARCH (AmbientCapabilities= in systemd, securityContext in Kubernetes)"}
	}
	found := "BTF, CAP_BPF and CAP_PERFMON"
	if !n.capable(unix.CAP_SYS_PTRACE) {
		return Finding{Status: Lacks, Found: found + ", no CAP_SYS_PTRACE", Without: "ranks of other users without a recorder are not seen", Do: "add CAP_SYS_PTRACE and CAP_DAC_READ_SEARCH where ranks are other users'"}
	}
	if n.version() < 6006 {
		return Finding{Status: OK, Found: found + "; before Linux 6.6 (uprobe_multi) each probe is attached by itself, which is slower"}
	}
	return Finding{Status: OK, Found: found}
}
