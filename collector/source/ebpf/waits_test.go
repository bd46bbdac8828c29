package ebpf_test

import (
	"fmt"
	"os/exec"
	"path/filepath"
	"syscall"
	"testing"

	"github.com/lockstep-ccl/lockstep/collector/source"
	"github.com/lockstep-ccl/lockstep/collector/source/ebpf"
	"github.com/lockstep-ccl/lockstep/diagnosis"
	"github.com/lockstep-ccl/lockstep/record"
)

// waiting starts a rank and a source that looks at it as at one with a recorder of its own.
func waiting(t *testing.T, attr *syscall.SysProcAttr) (j *job, r *rank, p *source.Process) {
	t.Helper()
	j = newJob(t, 1)
	cmd := exec.Command(filepath.Join(standIn(t), "rank"), "0", "1", j.file)
	cmd.SysProcAttr = attr
	r = j.startAs(0, cmd)
	r.do("hello")
	p = &source.Process{HostPID: int32(r.Process.Pid), State: diagnosis.ProcRunning, Comms: make([]record.CommStatus, 1)}
	j.v.Processes = []*source.Process{p}
	j.watch(ebpf.Options{})
	return j, r, p
}

func TestUninterruptibleSleepIsSeen(t *testing.T) {
	j, r, p := waiting(t, nil)
	fmt.Fprintln(r.in, "asleep 3000")
	eventually(t, "the rank in state D", func() bool { j.update(); return p.OffCPU.Disk > 0.5 && p.OffCPU.ChildDisk == 0 })
	r.do("child 3000") // answers once it is awake
	eventually(t, "a child in state D", func() bool { j.update(); return p.OffCPU.ChildDisk > 0.5 && p.OffCPU.Disk == 0 })
	eventually(t, "nobody in state D", func() bool { j.update(); return p.OffCPU.ChildDisk == 0 })
}

func TestAStarvedProxyIsSeen(t *testing.T) {
	j, r, p := waiting(t, nil)
	r.do("starve 20000")
	eventually(t, "NCCL's threads wait for a CPU", func() bool { j.update(); return p.OffCPU.NCCLStarved > 0.5 })
	if p.OffCPU.Disk != 0 || p.OffCPU.ChildDisk != 0 || p.OffCPU.ChildStarved != 0 {
		t.Errorf("%+v", p.OffCPU)
	}
}

// A connection's segments that are sent again are those of the process that has it.
func TestSegmentsSentAgain(t *testing.T) {
	if syscall.Getuid() != 0 {
		t.Skip("it takes root to make a network that does not answer")
	}
	j, r, p := waiting(t, &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNET})
	for _, args := range [][]string{
		{"link", "add", "v0", "type", "veth", "peer", "name", "v1"}, {"addr", "add", "10.9.9.1/24", "dev", "v0"}, {"link", "set", "v0", "up"}, {"link", "set", "v1", "up"},
		{"neigh", "add", "10.9.9.9", "lladdr", "02:00:00:00:00:09", "dev", "v0"},
	} {
		args = append([]string{"-t", fmt.Sprint(r.Process.Pid), "-n", "ip"}, args...)
		if out, err := exec.Command("nsenter", args...).CombinedOutput(); err != nil {
			t.Skipf("a network that does not answer: nsenter %v: %v: %s", args, err, out)
		}
	}
	r.do("connect 10.9.9.9")
	eventually(t, "a segment is sent again", func() bool { j.update(); return p.OffCPU.Resent > 0 })
}
