package ebpf_test

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"syscall"
	"testing"

	"github.com/lockstep-ccl/lockstep/collector/source/ebpf"
	"github.com/lockstep-ccl/lockstep/record"
)

// A rank in a root directory and in namespaces of processes and mounts of its own is found by its
// library, which has no name outside, and named by the host's pid.
func TestARankInAContainer(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("it takes root to make a container")
	}
	j := newJob(t, 1)
	dir := standIn(t)
	root := t.TempDir()
	libraries, err := exec.Command("ldd", filepath.Join(dir, "rank")).Output()
	if err != nil {
		t.Skip("ldd: ", err)
	}
	for _, m := range regexp.MustCompile(`(/\S+) \(0x`).FindAllSubmatch(libraries, -1) {
		path := string(m[1])
		to := filepath.Join(root, path)
		if filepath.Dir(path) == dir {
			to = filepath.Join(root, "opt", filepath.Base(path))
		}
		copyFile(t, path, to)
	}
	copyFile(t, filepath.Join(dir, "rank"), filepath.Join(root, "opt", "rank"))
	cmd := exec.Command("/opt/rank", "0", "1", "/opt/steps")
	cmd.SysProcAttr = &syscall.SysProcAttr{Chroot: root, Cloneflags: syscall.CLONE_NEWPID | syscall.CLONE_NEWNS}
	cmd.Dir = "/"
	j.env = []string{"LD_LIBRARY_PATH=/opt"}
	r := j.startAs(0, cmd)
	r.do("hello")
	j.watch(ebpf.Options{})
	j.attached(1)
	r.do("init world")
	r.do("call AllReduce 4")
	rec := j.reader(0)
	j.comm(rec, "4 calls", func(c record.CommStatus) bool { return c.Finished == 4 })
	if h := rec.Header(); int(h.PID) != r.Process.Pid || h.Job != "standin" {
		t.Errorf("%+v", h)
	}
	fmt.Fprintln(r.in, "exit 0")
	eventually(t, "closed", func() bool { return rec.Header().Closed })
}

func copyFile(t *testing.T, from, to string) {
	t.Helper()
	b, err := os.ReadFile(from)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.MkdirAll(filepath.Dir(to), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(to, b, 0o755); err != nil {
		t.Fatal(err)
	}
}
