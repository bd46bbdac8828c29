package torchjob

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"

	"github.com/lockstep-ccl/lockstep/nccl/torch"
)

// Job is how the program is to run.
type Job struct {
	Machine Machine
	Ranks   int
	// Dir gets the program, its checkpoints and its losses (files as train has them).
	Dir string
	// Rendezvous is a host:port of this machine that torchrun's store may have.
	Rendezvous string
	// Restarts is how often torchrun begins anew.
	Restarts int
	// Faults is a folder with orders, "" for none.
	Faults string
	// Pace is the least duration of a step.
	Pace time.Duration
	// Steps is after how many it ends; 0: never.
	Steps int
	// Checkpoint is how many steps lie between two; 0: none are made.
	Checkpoint int
	// Sockets has NCCL use the network's path in place of NVLink and shared memory.
	Sockets bool
}

// Command writes the program, and returns what starts it.
func (j *Job) Command() ([]string, error) {
	program := filepath.Join(j.Dir, "program")
	if err := os.CopyFS(program, torch.Job); err != nil && !errors.Is(err, fs.ErrExist) {
		return nil, fmt.Errorf("write the training program: %w", err)
	}
	return []string{j.Machine.python, "-B", "-m", "torch.distributed.run", "--nnodes", "1", "--nproc_per_node", fmt.Sprint(j.Ranks),
		"--max_restarts", fmt.Sprint(j.Restarts), "--rdzv_backend", "c10d", "--rdzv_endpoint", j.Rendezvous, "--rdzv_id", "demo",
		filepath.Join(program, torch.Script)}, nil
}

// Environ is what the command needs beside this process's environment.
func (j *Job) Environ() []string {
	env := []string{
		"FAULTS=" + j.Faults, "PROGRESS=" + filepath.Join(j.Dir, "progress"), "PYTHONUNBUFFERED=1", "WIDTH=512",
		fmt.Sprintf("PACE=%g", j.Pace.Seconds()), fmt.Sprint("CHECKPOINT=", j.Checkpoint),
		// Attempts of torchrun share a store otherwise, in which a rank may find the former attempt's NCCL id
		// (pytorch/pytorch#135712).
		"TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1",
		// Losses are compared bit for bit.
		"CUBLAS_WORKSPACE_CONFIG=:4096:8",
		// Multicast is not allowed everywhere.
		"NCCL_NVLS_ENABLE=" + cmp.Or(os.Getenv("NCCL_NVLS_ENABLE"), "0"),
	}
	if j.Steps > 0 {
		env = append(env, fmt.Sprint("LAST_STEP=", j.Steps-1))
	}
	if j.Sockets {
		env = append(env, "NCCL_P2P_DISABLE=1", "NCCL_SHM_DISABLE=1", "NCCL_NET=Socket", "NCCL_SOCKET_IFNAME=lo", "NCCL_SOCKET_FAMILY=AF_INET")
	}
	return env
}

// What a rank can be ordered to do from its next step on, in one attempt.
const (
	BusyGPU = "gpu"  // its GPU has other work
	Skip    = "skip" // it leaves a collective out
	Swap    = "swap" // it calls two communicators the other way round
)

// Order gives one.
func Order(faults, what string, rank, attempt int) error {
	return os.WriteFile(filepath.Join(faults, fmt.Sprintf("rank%d.attempt%d.%s", rank, attempt, what)), nil, 0o600)
}

// Throttle has a process send no faster than rate bytes a second on each of its TCP connections, and returns how many
// they are: the kernel paces its sockets, which are borrowed. It takes the rights of a debugger.
func Throttle(pid int, rate int) (n int, err error) {
	proc, err := unix.PidfdOpen(pid, 0)
	if err != nil {
		return 0, fmt.Errorf("open process %d: %w", pid, err)
	}
	defer unix.Close(proc)
	fds, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", pid))
	if err != nil {
		return 0, err
	}
	for _, f := range fds {
		var number int
		if _, err := fmt.Sscan(f.Name(), &number); err != nil {
			continue
		}
		fd, err := unix.PidfdGetfd(proc, number, 0)
		if errors.Is(err, unix.EBADF) {
			continue // closed since
		}
		if err != nil {
			return n, fmt.Errorf("borrow file %d of process %d, which takes the rights of a debugger: %w", number, pid, err)
		}
		if paced(fd, rate) {
			n++
		}
		unix.Close(fd)
	}
	if n == 0 {
		return 0, fmt.Errorf("process %d has no TCP connections: NCCL does not use sockets there", pid)
	}
	return n, nil
}

// paced paces a file if it is a TCP connection.
func paced(fd, rate int) bool {
	kind, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_TYPE)
	if err != nil || kind != unix.SOCK_STREAM {
		return false
	}
	switch peer, err := unix.Getpeername(fd); peer.(type) {
	case *unix.SockaddrInet4, *unix.SockaddrInet6:
		return err == nil && unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_MAX_PACING_RATE, rate) == nil
	}
	return false
}
