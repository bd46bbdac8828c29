// Package children runs a command as several ranks on this machine: child processes
// with the command's own arguments, and with what ccl.ConfigFromEnv reads. They are
// for measurements and checks; a training job has a supervisor.
package children

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"syscall"

	"github.com/lockstep-ccl/lockstep/ccl"
	"github.com/lockstep-ccl/lockstep/internal/ports"
)

// Job is the ranks to start, spread over logical nodes in equal runs.
type Job struct {
	Ranks, Nodes int
	Node         func(i int) string // a node's name
	Env          []string           // besides this process's
	Out          io.Writer          // rank 0's standard output
}

// End is how a rank ended; Err is an *exec.ExitError where it ran at all.
type End struct {
	Rank, PID int
	Err       error
}

// NodeOf is the logical node of a rank, and First the first rank on it.
func (j *Job) NodeOf(rank int) (node, first int) {
	node = rank * j.Nodes / j.Ranks
	return node, (node*j.Ranks + j.Nodes - 1) / j.Nodes
}

// Start starts the ranks, which are killed when ctx ends. started ends will come.
// After an error some may have been started: the caller cancels, and takes their ends.
func (j *Job) Start(ctx context.Context) (ends <-chan End, started int, err error) {
	exe, err := os.Executable()
	if err != nil {
		return nil, 0, err
	}
	all := make(chan End, j.Ranks)
	for r := range j.Ranks {
		node, first := j.NodeOf(r)
		cmd := exec.CommandContext(ctx, exe, os.Args[1:]...)
		cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
		cmd.Env = append(append(os.Environ(), j.Env...),
			"LOCKSTEP_RANK="+strconv.Itoa(r), "LOCKSTEP_WORLD_SIZE="+strconv.Itoa(j.Ranks),
			"LOCKSTEP_LOCAL_RANK="+strconv.Itoa(r-first), "LOCKSTEP_NODE="+j.Node(node))
		cmd.Stderr = os.Stderr
		if r == 0 {
			cmd.Stdout = j.Out
		}
		if err := cmd.Start(); err != nil {
			return all, started, err
		}
		started++
		go func() { all <- End{r, cmd.Process.Pid, cmd.Wait()} }()
	}
	return all, started, nil
}

// Env is what all ranks have in common: the rendezvous, and the secret, which is
// kept in dir. The rendezvous is theirs until it is closed.
func Env(dir string) (env []string, meet io.Closer, err error) {
	id, meet, err := newID()
	if err != nil {
		return nil, nil, err
	}
	var secret [32]byte
	rand.Read(secret[:]) // never fails
	file := filepath.Join(dir, "secret")
	if err := os.WriteFile(file, []byte(hex.EncodeToString(secret[:])), 0o600); err != nil {
		return nil, nil, errors.Join(err, meet.Close())
	}
	return []string{"LOCKSTEP_COMM_ID=" + id.String(), "LOCKSTEP_SECRET_FILE=" + file}, meet, nil
}

// newID is that of a communicator whose rank 0 will be on this machine, for ranks
// of this machine. Until meet is closed nobody else is given its port.
func newID() (id ccl.UniqueID, meet io.Closer, err error) {
	held, err := ports.Hold("127.0.0.1", 1)
	if err != nil {
		return id, nil, fmt.Errorf("a port for a rendezvous: %w", err)
	}
	if id, err = ccl.NewUniqueID(held.Addrs[0]); err != nil {
		return id, nil, errors.Join(err, held.Close())
	}
	return id, held, nil
}
