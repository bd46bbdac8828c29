package peers

import (
	"bytes"
	"context"
	"fmt"
	"os/exec"
	"runtime"
	"syscall"
	"time"
)

// A time is the median of blocks of about this many milliseconds of
// back-to-back operations.
const (
	blocks      = 7
	blockMillis = 20
)

func onlineCPUs() int { return runtime.NumCPU() }

// command is a command that ends with ctx together with all its children.
func command(ctx context.Context, name string, args ...string) *exec.Cmd {
	cmd := exec.CommandContext(ctx, name, args...)
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGTERM) }
	cmd.WaitDelay = 5 * time.Second
	return cmd
}

// output runs cmd and returns what it printed; its error carries the end of
// what it said on standard error.
func output(cmd *exec.Cmd) ([]byte, error) {
	var errs bytes.Buffer
	cmd.Stderr = &errs
	out, err := cmd.Output()
	if err != nil {
		said := bytes.TrimSpace(errs.Bytes())
		return nil, fmt.Errorf("%s: %w: %s", cmd.Path, err, said[max(0, len(said)-2000):])
	}
	return out, nil
}
