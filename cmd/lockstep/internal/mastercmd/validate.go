package mastercmd

import (
	"errors"
	"fmt"

	"github.com/lockstep-ccl/lockstep/cmd/lockstep/internal/flags"
	"github.com/lockstep-ccl/lockstep/collector/wire"
)

// Validate implements kong's check of a command line.
func (c *Cmd) Validate() error {
	if err := wire.CheckJob(c.Job); err != nil && c.Job != "" { // kong says what is missing
		return fmt.Errorf("--job: %w", err)
	}
	return errors.Join(flags.Listen("listen", c.Listen), flags.Dial("planner", c.Planner), flags.Positive("patience", c.Patience), flags.Positive("start-patience", c.StartPatience), c.TLS.Check(), c.Web.Check())
}
