package doctor

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// healthy is a node with everything, as files; a name that ends in / is a directory, and
// a value that begins with -> a link.
var healthy = map[string]string{
	"/proc/sys/kernel/osrelease":                 "6.18.2-1-amd64\n",
	"/proc/self/ns/pid":                          "->" + firstPIDs,
	"/proc/self/mountinfo":                       "22 28 0:20 / /proc rw,nosuid - proc proc rw\n",
	"/proc/self/status":                          "Name:\tlockstep\nCapEff:\t000001ffffffffff\n",
	"/proc/self/limits":                          "Max open files            1024                 4096                 files\nMax locked memory         unlimited            unlimited            bytes\n",
	"/proc/self/schedstat":                       "1 2 3\n",
	"/proc/pressure/cpu":                         "some avg10=0.00\n",
	"/sys/fs/cgroup/cgroup.controllers":          "cpu memory\n",
	"/sys/kernel/btf/vmlinux":                    "x",
	"/sys/kernel/security/lockdown":              "[none] integrity confidentiality\n",
	"/sys/bus/pci/devices/0000:18:00.0/vendor":   "0x10de\n",
	"/sys/bus/pci/devices/0000:18:00.0/class":    "0x030200\n",
	"/dev/nvidia0":                               "",
	"/dev/shm/":                                  "",
	"/dev/infiniband/uverbs0":                    "",
	"/sys/class/infiniband/mlx5_0/ports/1/state": "4: ACTIVE\n",
	"/sys/class/infiniband/mlx5_1/ports/1/state": "1: DOWN\n",
	"/etc/ld.so.conf.d/cuda.conf":                "# CUDA\n/opt/cuda/lib64\n",
	"/opt/cuda/lib64/libnvidia-ml.so.1":          "",
	"/usr/lib64/libcuda.so.1":                    "",
	"/usr/lib64/libibverbs.so.1":                 "",
	"/usr/lib64/libnccl.so.2":                    "->libnccl.so.2.28.9",
	"/usr/lib64/libnccl.so.2.28.9":               "",
	"/usr/bin/" + plugin:                         "",
	"/home/u/":                                   "",
}

// plant makes a node of healthy with changes; "" in without removes files.
func plant(t *testing.T, with map[string]string, without ...string) *node {
	t.Helper()
	root := t.TempDir()
	put := func(path, text string) {
		at := filepath.Join(root, path)
		dir := filepath.Dir(at)
		if strings.HasSuffix(path, "/") {
			dir = at
		}
		if err := os.MkdirAll(dir, 0o755); err != nil {
			t.Fatal(err)
		}
		var err error
		if to, ok := strings.CutPrefix(text, "->"); ok {
			err = os.Symlink(to, at)
		} else if !strings.HasSuffix(path, "/") {
			err = os.WriteFile(at, []byte(text), 0o644)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	for path, text := range healthy {
		if _, changed := with[path]; !changed && !slices.ContainsFunc(without, func(p string) bool { return strings.HasPrefix(path, p) }) {
			put(path, text)
		}
	}
	for path, text := range with {
		put(path, text)
	}
	n := newNode(root, "/dev/shm/lockstep", 0)
	n.getenv = func(name string) string { return map[string]string{"HOME": "/home/u"}[name] }
	n.clock = func() (unix.Timex, error) { return unix.Timex{Maxerror: 1500}, nil }
	n.listen = func(string) error { return nil }
	n.space = func(string) (uint64, bool, error) { return 8 << 30, true, nil }
	n.gpus = func(context.Context) (string, error) { return "driver 580.1, 8 GPUs", nil }
	return n
}

func look(t *testing.T, n *node, name string) Finding {
	t.Helper()
	for _, c := range checks {
		if c.name == name {
			return c.look(t.Context(), n)
		}
	}
	t.Fatalf("no check %s", name)
	return Finding{}
}

func TestHealthy(t *testing.T) {
	n := plant(t, nil)
	for _, c := range checks {
		if (c.name == "gpu" || c.name == "rdma") && !cgo() {
			continue
		}
		if f := look(t, n, c.name); f.Status != OK || f.Found == "" {
			t.Errorf("%s: %+v", c.name, f)
		}
	}
	if left, _ := filepath.Glob(n.at("/dev/shm/*")); len(left) > 0 {
		t.Errorf("it has left %v", left)
	}
}

func TestWhatIsLacking(t *testing.T) {
	var unsynced = func(n *node) {
		n.clock = func() (unix.Timex, error) { return unix.Timex{Status: unix.STA_UNSYNC}, nil }
	}
	disk := func(n *node) { n.space = func(string) (uint64, bool, error) { return 8 << 30, false, nil } }
	for name, c := range map[string]struct {
		check   string
		with    map[string]string
		without []string
		change  func(*node)
		status  Status
		found   string
	}{
		"old kernel":        {"kernel", map[string]string{"/proc/sys/kernel/osrelease": "6.1.0\n"}, nil, nil, Lacks, "6.1.0"},
		"ancient kernel":    {"kernel", map[string]string{"/proc/sys/kernel/osrelease": "4.18.0-el8\n"}, nil, nil, Broken, "4.18"},
		"no proc":           {"kernel", nil, []string{"/proc/"}, nil, Broken, "no version"},
		"shm on a disk":     {"shm", nil, nil, disk, Lacks, "not on tmpfs"},
		"no shm":            {"shm", nil, nil, func(n *node) { n.space = func(string) (uint64, bool, error) { return 0, false, fs.ErrNotExist } }, Broken, "not exist"},
		"64 MiB of shm":     {"shm", nil, nil, func(n *node) { n.space = func(string) (uint64, bool, error) { return 64 << 20, true, nil } }, Lacks, "64 MiB"},
		"logind cleans up":  {"shm", map[string]string{"/run/systemd/seats/": ""}, nil, nil, Lacks, "logind"},
		"logind does not":   {"shm", map[string]string{"/run/systemd/seats/": "", "/etc/systemd/logind.conf": "[Login]\nRemoveIPC=no\n"}, nil, nil, OK, "tmpfs"},
		"runtime is a link": {"runtime", map[string]string{"/dev/shm/lockstep": "->/nowhere"}, nil, nil, Lacks, "symbolic link"},
		"runtime is a file": {"runtime", map[string]string{"/dev/shm/lockstep": "x"}, nil, nil, Lacks, "not a directory"},
		"runtime on a disk": {"runtime", nil, nil, disk, Lacks, "on a disk"},
		"no home":           {"state", nil, nil, func(n *node) { n.getenv = func(string) string { return "" } }, Lacks, "HOME"},
		"a container":       {"pids", map[string]string{"/proc/self/ns/pid": "->pid:[4026532001]"}, nil, nil, Lacks, "namespace"},
		"hidepid":           {"pids", map[string]string{"/proc/self/mountinfo": "22 28 0:20 / /proc rw - proc proc rw,hidepid=invisible\n"}, nil, nil, Lacks, "hidepid"},
		"no psi":            {"psi", nil, []string{"/proc/pressure"}, nil, Lacks, "pressure"},
		"cgroup v1":         {"psi", nil, []string{"/sys/fs/cgroup"}, nil, Lacks, "cgroup v2"},
		"nobody keeps time": {"clock", nil, nil, unsynced, Lacks, "unsynchronized"},
		"no clock":          {"clock", nil, nil, func(n *node) { n.clock = func() (unix.Timex, error) { return unix.Timex{}, unix.EPERM } }, Lacks, "not permitted"},
		"a port is taken": {"ports", nil, nil, func(n *node) {
			n.listen = func(a string) error { return map[string]error{":9402": unix.EADDRINUSE}[a] }
		}, Lacks, ":9402 (master)"},
		"no GPU":             {"gpu", nil, []string{"/dev/nvidia0", "/sys/bus"}, nil, Lacks, "no NVIDIA GPU"},
		"no driver":          {"gpu", nil, []string{"/dev/nvidia0"}, nil, Lacks, "no /dev/nvidia"},
		"no NVML":            {"gpu", nil, []string{"/opt/cuda"}, nil, Lacks, "libnvidia-ml"},
		"no NCCL":            {"nccl", nil, []string{"/usr/lib64/libnccl"}, nil, Lacks, "no libnccl"},
		"old NCCL":           {"nccl", map[string]string{"/usr/lib64/libnccl.so.2": "->libnccl.so.2.19.3", "/usr/lib64/libnccl.so.2.19.3": ""}, nil, nil, Lacks, "2.19.3"},
		"NCCL of PyTorch":    {"nccl", map[string]string{"/usr/local/lib/python3.12/dist-packages/nvidia/nccl/lib/libnccl.so.2": ""}, []string{"/usr/lib64/libnccl"}, nil, OK, "dist-packages"},
		"no plugin":          {"nccl", nil, []string{"/usr/bin/"}, nil, Lacks, plugin},
		"no NIC":             {"rdma", nil, []string{"/sys/class"}, nil, Lacks, "no RDMA device"},
		"all ports down":     {"rdma", map[string]string{"/sys/class/infiniband/mlx5_0/ports/1/state": "1: DOWN\n"}, nil, nil, Lacks, "mlx5_0:1, mlx5_1:1"},
		"no uverbs":          {"rdma", nil, []string{"/dev/infiniband"}, nil, Lacks, "uverbs"},
		"no libibverbs":      {"rdma", nil, []string{"/usr/lib64/libibverbs"}, nil, Lacks, "libibverbs"},
		"8 MiB of memlock":   {"memlock", map[string]string{"/proc/self/limits": "Max locked memory         8388608              8388608              bytes\n", "/proc/self/status": "CapEff:\t0\n"}, nil, nil, Lacks, "8 MiB"},
		"CAP_IPC_LOCK":       {"memlock", map[string]string{"/proc/self/limits": "Max locked memory         8388608              8388608              bytes\n"}, nil, nil, OK, "CAP_IPC_LOCK"},
		"no BTF":             {"ebpf", nil, []string{"/sys/kernel/btf"}, nil, Lacks, "btf"},
		"no capabilities":    {"ebpf", map[string]string{"/proc/self/status": "CapEff:\t0000000000000000\n"}, nil, nil, Lacks, "CAP_BPF and CAP_PERFMON"},
		"least capabilities": {"ebpf", map[string]string{"/proc/self/status": "CapEff:\t000000c000000000\n"}, nil, nil, Lacks, "CAP_SYS_PTRACE"},
		"locked down":        {"ebpf", map[string]string{"/sys/kernel/security/lockdown": "none integrity [confidentiality]\n"}, nil, nil, Lacks, "locked down"},
		"kernel before BPF":  {"ebpf", map[string]string{"/proc/sys/kernel/osrelease": "5.4.0\n"}, nil, nil, Lacks, "5.15"},
	} {
		t.Run(name, func(t *testing.T) {
			n := plant(t, c.with, c.without...)
			if c.change != nil {
				c.change(n)
			}
			f := look(t, n, c.check)
			if f.Status != c.status && !(c.status == OK && !cgo()) || !strings.Contains(f.Found, c.found) {
				t.Errorf("%+v, want %s with %q", f, c.status, c.found)
			}
			if f.Status != OK && f.Without == "" && f.Do == "" {
				t.Errorf("%+v says neither what works without it nor what to do", f)
			}
		})
	}
}

// Whatever a node lacks, Lockstep works there unless that was required.
func TestStatus(t *testing.T) {
	root := plant(t, nil).root
	for _, c := range []struct {
		require []string
		bad     bool
	}{{nil, false}, {[]string{"memlock"}, false}, {[]string{"memlock", "gpu"}, true}} {
		var out bytes.Buffer
		err := (&Cmd{JSON: true, Root: root, RuntimeDir: "/dev/shm/lockstep", Require: c.require}).Run(t.Context(), &out)
		var bad *BadError
		if errors.As(err, &bad) != c.bad {
			t.Errorf("--require %v: %v\n%s", c.require, err, &out)
		}
		var r Report
		if err := json.Unmarshal(out.Bytes(), &r); err != nil || r.OK == c.bad || len(r.Checks) != len(checks) {
			t.Errorf("--require %v: %v, %+v", c.require, err, r)
		}
	}
	if err := (&Cmd{Require: []string{"gpus"}}).Validate(); err == nil || !strings.Contains(err.Error(), "gpu") {
		t.Errorf("an unknown check: %v", err)
	}
}
