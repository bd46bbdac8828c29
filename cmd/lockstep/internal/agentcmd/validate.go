package agentcmd

import (
	"errors"
	"fmt"
	"math/bits"

	"github.com/lockstep-ccl/lockstep/cmd/lockstep/internal/flags"
	"github.com/lockstep-ccl/lockstep/collector/wire"
)

// Validate implements kong's check of a command line.
func (c *Cmd) Validate() error {
	if c.Node != "" {
		if err := wire.CheckNode(c.Node); err != nil {
			return fmt.Errorf("--node: %w", err)
		}
	}
	if c.EBPF.Sample < 1 || bits.OnesCount(uint(c.EBPF.Sample)) != 1 {
		return fmt.Errorf("--ebpf.sample %d: want a power of two", c.EBPF.Sample)
	}
	_, err := flags.Masters(c.Master)
	return errors.Join(err, flags.Dir("runtime-dir", c.RuntimeDir),
		flags.Positive("gpu.period", c.GPU.Period), flags.Positive("gpu.bound", c.GPU.Bound),
		flags.Positive("nic.period", c.NIC.Period), flags.Positive("nic.bound", c.NIC.Bound),
		c.TLS.Check(), c.Web.Check())
}
