package ebpf

import (
	"bytes"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/lockstep-ccl/lockstep/launcher"
	"github.com/lockstep-ccl/lockstep/record"
)

// maxEnviron bounds what is read of a process's environment.
const maxEnviron = 1 << 20

// environ reads the environment that a process was started with.
func environ(proc string, pid int) map[string]string {
	f, err := os.Open(filepath.Join(proc, strconv.Itoa(pid), "environ"))
	if err != nil {
		return nil
	}
	defer f.Close()
	text, _ := io.ReadAll(io.LimitReader(f, maxEnviron)) // what there is; the process may end meanwhile
	env := map[string]string{}
	for line := range bytes.SplitSeq(text, []byte{0}) {
		if k, v, ok := strings.Cut(string(line), "="); ok {
			env[k] = v
		}
	}
	return env
}

// identify finds a process's place in its job, as the plugin and marks find it: one process is to be one rank
// of one job to all of them. ok is false when its environment does not tell. The job's name is "" when only that
// is missing.
func identify(env map[string]string) (id record.Identity, ok bool) {
	who, _ := launcher.Detect(func(name string) (string, bool) { v, ok := env[name]; return v, ok }) // what is understood of it
	id = record.Identity{Job: who.Job, Attempt: uint32(who.Attempt)}
	if who.Rank < 0 || who.Rank >= who.World {
		return id, false
	}
	id.Rank, id.WorldSize, id.LocalRank = int32(who.Rank), int32(who.World), int32(who.Local)
	return id, true
}

// jobOf names a job that nobody has named by its first communicator, which all of its ranks have.
func jobOf(comm uint64) string { return fmt.Sprintf("nccl-%08x", uint32(comm^comm>>32)) }
