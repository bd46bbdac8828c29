package doctor

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/lockstep-ccl/lockstep/cmd/lockstep/internal/buildinfo"
	"github.com/lockstep-ccl/lockstep/cmd/lockstep/internal/progress"
)

// StatusBad is the exit status of a node that lacks what was required.
const StatusBad = 3

// Cmd is the command line.
type Cmd struct {
	JSON       bool          `name:"json" help:"Write JSON: one object with all checks."`
	Require    []string      `placeholder:"NAME" help:"Fail when this is not there, too: a check's name, such as gpu, rdma or ebpf. Repeatable."`
	RuntimeDir string        `default:"${runtime_dir}" type:"path" help:"Where the ranks of this node keep their flight recorders." env:"LOCKSTEP_RUNTIME_DIR"`
	Timeout    time.Duration `default:"10s" help:"How long the GPU driver may take to answer."`
	Root       string        `hidden:"" default:"/" type:"path" help:"Look below this root, and ask nobody."`
}

// Help implements kong's help provider.
func (*Cmd) Help() string {
	return `Looks at what this node has of what Lockstep can use, says what works without the rest, and what to do
about it. It changes nothing and needs no privilege; run it as the user and in the container that the
agent, or the ranks, will be run in, since that is what decides.

Examples:
  lockstep doctor                                        everything, with advice
  lockstep doctor --require gpu --require rdma           for provisioning: status 3 when one is not there
  lockstep doctor --json | jq '.checks[] | select(.status != "ok")'

Exit status: 0 when Lockstep works here, with or without options that are lacking, 2 when the command line is wrong,
3 when something is broken or what --require names is lacking.`
}

// BadError is a node on which something needed is not there. It was told already.
type BadError struct{}

func (*BadError) Error() string { return "" }

// ExitStatus is the command's.
func (*BadError) ExitStatus() int { return StatusBad }

// Validate implements kong's check of a command line.
func (c *Cmd) Validate() error {
	for _, r := range c.Require {
		if !slices.Contains(names(), r) {
			return fmt.Errorf("--require %s: want one of %s", r, strings.Join(names(), ", "))
		}
	}
	return nil
}

// Complete lists the checks, for shells.
func (c *Cmd) Complete(name string) []string {
	if name != "require" {
		return nil
	}
	return names()
}

// Run looks and tells.
func (c *Cmd) Run(ctx context.Context, out io.Writer) error {
	n := newNode(c.Root, c.RuntimeDir, c.Timeout)
	r := Report{Version: buildinfo.Version()}
	r.Node, _ = os.Hostname()
	waiting := progress.Start("looking")
	for _, ch := range checks {
		waiting.Set("looking at %s", ch.about)
		r.add(ch, ch.look(ctx, n), slices.Contains(c.Require, ch.name))
	}
	waiting.Stop()
	if err := ctx.Err(); err != nil {
		return err
	}
	if c.JSON {
		enc := json.NewEncoder(out)
		enc.SetIndent("", "  ")
		if err := enc.Encode(r); err != nil {
			return err
		}
	} else if err := r.text(out); err != nil {
		return err
	}
	if !r.OK {
		return &BadError{}
	}
	return nil
}
