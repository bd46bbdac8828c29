package agent

import (
	"bytes"
	"fmt"
	"io"
	"os"

	"github.com/lockstep-ccl/lockstep/collector"
)

// maxEnviron bounds what is read of a process's environment.
const maxEnviron = 256 << 10

// workload reads where a rank's process runs from its environment, once: its pod, its Slurm job.
// It is nil where the agent may not read that (another user's process), or there is nothing. Of
// the environment, which holds secrets, only what Options.Workload asks for is kept.
func (a *Agent) workload(pid int32) *collector.Workload {
	if a.o.Workload == nil || pid <= 0 {
		return nil
	}
	f, err := os.Open(fmt.Sprintf("/proc/%d/environ", pid))
	if err != nil {
		return nil
	}
	defer f.Close()
	env, err := io.ReadAll(io.LimitReader(f, maxEnviron))
	if err != nil {
		return nil
	}
	w := a.o.Workload(func(name string) string {
		for kv := range bytes.SplitSeq(env, []byte{0}) {
			if k, v, ok := bytes.Cut(kv, []byte{'='}); ok && string(k) == name {
				return string(v)
			}
		}
		return ""
	})
	clear(env)
	return w
}
