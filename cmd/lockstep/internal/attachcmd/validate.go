package attachcmd

import (
	"errors"

	"github.com/lockstep-ccl/lockstep/cmd/lockstep/internal/flags"
)

// Validate implements kong's check of a command line.
func (c *Cmd) Validate() error {
	if (len(c.Command) == 0 || len(c.Command) == 1 && c.Command[0] == "--") && !c.PrintEnv && !c.DryRun {
		return errNoCommand
	}
	if c.Wait <= 0 {
		return errors.New("--wait must be above 0")
	}
	if c.Patience < 0 {
		return errors.New("--start-patience must not be below 0")
	}
	return errors.Join(flags.Listen("agent-web", c.AgentWeb), flags.Listen("master-web", c.MasterWeb))
}
