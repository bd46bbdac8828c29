package runcmd

import (
	"errors"
	"fmt"
)

// Validate implements kong's check of a command line.
func (c *Cmd) Validate() error {
	switch {
	case len(c.Command) == 0 || len(c.Command) == 1 && c.Command[0] == "--":
		return errors.New("no command: write it after --, as in `lockstep run --ranks 8 -- python train.py`")
	case c.Ranks < 1 || c.Spares < 0:
		return fmt.Errorf("%d ranks and %d spares; at least 1 and 0 are needed", c.Ranks, c.Spares)
	case c.Nodes < 1 || c.Ranks%c.Nodes != 0:
		return fmt.Errorf("%d ranks cannot be spread evenly over %d nodes", c.Ranks, c.Nodes)
	case c.MaxRestarts < 0:
		return fmt.Errorf("--max-restarts %d: want 0 or more", c.MaxRestarts)
	case c.Coordinator != "" && (c.Spares > 0 || c.Nodes > 1):
		return fmt.Errorf("--coordinator goes with neither --spares nor --nodes: hosts beyond --hosts stand by, and each host is a node")
	case c.Hosts.Hosts > 0 && c.Ranks%c.Hosts.Hosts != 0:
		return fmt.Errorf("%d ranks cannot be spread evenly over %d hosts", c.Ranks, c.Hosts.Hosts)
	}
	return c.check()
}
