package slurm

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"time"

	"github.com/lockstep-ccl/lockstep/remediation"
)

// Runner runs one of Slurm's commands and returns what it printed.
type Runner func(ctx context.Context, name string, args ...string) (string, error)

// What callers branch on.
var (
	// ErrDenied says that the account may not do it: asking again changes nothing.
	ErrDenied = errors.New("slurm: permission denied")
	// ErrNotPending says that a job runs already, so that its list of excluded nodes cannot change.
	ErrNotPending = errors.New("slurm: the job is not pending any more")
)

const (
	commandTimeout = 20 * time.Second
	maxOutput      = 4 << 20
)

// limited keeps the first bytes that are written to it.
type limited struct {
	bytes.Buffer
	cut bool
}

func (l *limited) Write(p []byte) (int, error) {
	if room := maxOutput - l.Len(); len(p) > room {
		l.cut = true
		l.Buffer.Write(p[:room])
		return len(p), nil
	}
	return l.Buffer.Write(p)
}

// Commands runs Slurm's commands from a folder, from PATH when dir is "", with the
// process's environment (SLURM_CONF) but for what changes their output.
func Commands(dir string) Runner {
	return func(ctx context.Context, name string, args ...string) (string, error) {
		path := name
		if dir != "" {
			path = filepath.Join(dir, name)
		}
		ctx, cancel := context.WithTimeout(ctx, commandTimeout)
		defer cancel()
		cmd := exec.CommandContext(ctx, path, args...)
		cmd.Env = clean(os.Environ())
		cmd.WaitDelay = time.Second
		var out, errs limited
		cmd.Stdout, cmd.Stderr = &out, &errs
		err := cmd.Run()
		switch {
		case err == nil && out.cut:
			return "", fmt.Errorf("slurm: %s printed more than %d bytes", name, maxOutput)
		case err == nil:
			return out.String(), nil
		case ctx.Err() != nil:
			return "", fmt.Errorf("slurm: %s %s: no answer within %v: %w", name, first(args), commandTimeout, ctx.Err())
		}
		return "", explain(name, args, errs.String()+out.String(), err)
	}
}

// clean takes out what users set to change what commands print or do.
func clean(env []string) []string {
	keep := env[:0:0]
	for _, kv := range env {
		name, _, _ := strings.Cut(kv, "=")
		switch {
		case strings.HasPrefix(name, "SQUEUE_"), strings.HasPrefix(name, "SINFO_"), strings.HasPrefix(name, "SCANCEL_"), strings.HasPrefix(name, "SCONTROL_"):
		case name == "SLURM_TIME_FORMAT", name == "LC_ALL", name == "SLURM_CLUSTERS":
		default:
			keep = append(keep, kv)
		}
	}
	return append(keep, "SLURM_TIME_FORMAT=%s", "LC_ALL=C")
}

// explain makes an error of what a command said.
func explain(name string, args []string, said string, err error) error {
	said = strings.Join(strings.Fields(said), " ")
	if len(said) > 300 {
		said = strings.ToValidUTF8(said[:300], "") + "…"
	}
	wrap := err
	switch {
	case strings.Contains(said, "Invalid job id specified"):
		wrap = remediation.ErrGone
	case strings.Contains(said, "Access/permission denied"), strings.Contains(said, "Invalid user id"), strings.Contains(said, "User not authorized"):
		wrap = ErrDenied
	case strings.Contains(said, "no longer pending execution"):
		wrap = ErrNotPending
	case slices.ContainsFunc(unanswered, func(s string) bool { return strings.Contains(said, s) }):
		wrap = remediation.ErrAway
	}
	return fmt.Errorf("slurm: %s %s: %w: %s", name, first(args), wrap, said)
}

// unanswered is what commands say when slurmctld is away, or was before it has answered (Slurm's slurm_errno.c).
var unanswered = []string{
	"Unable to contact slurm controller", "Socket timed out on send/recv operation", "Zero Bytes were transmitted or received", "backup controller in standby mode",
}

func first(args []string) string { return strings.Join(args[:min(2, len(args))], " ") }

var (
	number     = regexp.MustCompile(`^[1-9][0-9]{0,9}$`)
	nodeName   = regexp.MustCompile(`^[A-Za-z0-9]([A-Za-z0-9._-]{0,62}[A-Za-z0-9])?$`)
	jobLabel   = regexp.MustCompile(`^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$`)
	actionID   = regexp.MustCompile(`^[A-Za-z0-9_-]{1,64}$`)
	objectName = regexp.MustCompile(`^[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}$`) // of users, reservations
	hostlist   = regexp.MustCompile(`^[A-Za-z0-9._,\[\]-]*$`)
)
