package preflight

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"syscall"
	"time"

	"github.com/lockstep-ccl/lockstep/ccl"
)

// grace is how long the other ranks may take to end once rank 0 has.
const grace = 5 * time.Second

// launch starts the ranks as children that run the same command, and waits for
// them. What rank 0 says is the result.
func (c *Cmd) launch(ctx context.Context, out io.Writer) error {
	exe, err := os.Executable()
	if err != nil {
		return err
	}
	dir, err := os.MkdirTemp("", "lockstep-preflight-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	env, err := jobEnv(dir)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	type end struct {
		rank int
		err  error
	}
	ends := make(chan end, c.Ranks)
	started := 0
	var failure error
	for r := range c.Ranks {
		node := r * c.Nodes / c.Ranks
		first := (node*c.Ranks + c.Nodes - 1) / c.Nodes // rank on it
		cmd := exec.CommandContext(ctx, exe, os.Args[1:]...)
		cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
		cmd.Env = append(os.Environ(), env...)
		cmd.Env = append(cmd.Env, "LOCKSTEP_RANK="+strconv.Itoa(r), "LOCKSTEP_WORLD_SIZE="+strconv.Itoa(c.Ranks),
			"LOCKSTEP_LOCAL_RANK="+strconv.Itoa(r-first), "LOCKSTEP_NODE="+nodeName(node, c.Nodes))
		cmd.Stderr = os.Stderr
		if r == 0 {
			cmd.Stdout = out
		}
		if failure = cmd.Start(); failure != nil {
			cancel()
			break
		}
		started++
		go func() { ends <- end{r, cmd.Wait()} }()
	}
	told := false // rank 0 has ended: what it said stands
	for range started {
		e := <-ends
		if e.rank == 0 {
			told, failure = true, nil
			defer time.AfterFunc(grace, cancel).Stop() // whoever has not ended then is stuck
		}
		if e.err == nil || told && e.rank != 0 || failure != nil {
			continue
		}
		failure = fmt.Errorf("rank %d: %w", e.rank, e.err)
		if ctx.Err() != nil {
			failure = context.Cause(ctx)
		}
		var exit *exec.ExitError
		if errors.As(e.err, &exit) && exit.ExitCode() == StatusBad {
			failure = &BadError{} // it has told
		}
	}
	return failure
}

// nodeName is this machine's, or that of a logical node on it.
func nodeName(i, nodes int) string {
	name, err := os.Hostname()
	if err != nil {
		name = "node"
	}
	if v := os.Getenv("LOCKSTEP_NODE"); v != "" {
		name = v
	}
	if nodes > 1 {
		name = fmt.Sprintf("%s-%d", name, i)
	}
	return name
}

// jobEnv is what all ranks of a run have in common. dir holds the secret.
func jobEnv(dir string) ([]string, error) {
	id, err := newID()
	if err != nil {
		return nil, err
	}
	var secret [32]byte
	rand.Read(secret[:]) // never fails
	file := filepath.Join(dir, "secret")
	if err := os.WriteFile(file, []byte(hex.EncodeToString(secret[:])), 0o600); err != nil {
		return nil, err
	}
	return []string{"LOCKSTEP_COMM_ID=" + id.String(), "LOCKSTEP_SECRET_FILE=" + file}, nil
}

// newID is that of a communicator whose rank 0 will be on this machine, for ranks
// of this machine.
func newID() (ccl.UniqueID, error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return ccl.UniqueID{}, fmt.Errorf("find a port for a rendezvous: %w", err)
	}
	id, err := ccl.NewUniqueID(l.Addr().String())
	return id, errors.Join(err, l.Close())
}
