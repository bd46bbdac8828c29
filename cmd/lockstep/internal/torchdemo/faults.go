package torchdemo

import (
	"fmt"
	"syscall"
)

// victim is the rank in which things break (FAULT_RANK of the job).
const victim = 1

// fault is what is broken: by a signal, or by the job itself.
type fault struct {
	name   string // as lockstep demo --fault has it
	env    string // FAULT of the job
	signal syscall.Signal
	class  string // that the verdict is to have
	text   string
}

var faults = []fault{
	{"rank_stopped", "sigstop", syscall.SIGSTOP, "noncommunication_hang", "rank 1 is stopped (SIGSTOP)"},
	{"noncommunication_hang", "loader_hang", 0, "noncommunication_hang", "the data loader of rank 1 does not come back"},
	{"noncommunication_slow", "loader_slow", 0, "noncommunication_slow", "the data loader of rank 1 takes 30 ms longer for each batch"},
	{"gpu_slow", "slow_gpu", 0, "noncommunication_slow", "the GPU of rank 1 has other work"},
	{"rank_killed", "restart", syscall.SIGKILL, "noncommunication_hang", "rank 1 is killed (SIGKILL), and torchrun starts all anew"},
}

// choose returns the faults to play, each in turn for any, none for none.
func choose(name string) ([]fault, error) {
	if name == "any" {
		return faults, nil
	}
	if name == "none" {
		return []fault{{name: "none", env: "healthy", text: "nothing is broken"}}, nil
	}
	for _, f := range faults {
		if f.name == name {
			return []fault{f}, nil
		}
	}
	return nil, fmt.Errorf("--fault %s: PyTorch ranks have only any, none, rank_stopped, noncommunication_hang, noncommunication_slow, gpu_slow and rank_killed", name)
}
