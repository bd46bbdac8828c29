package demo

import (
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/lockstep-ccl/lockstep/deploy/local"
)

// Validate implements kong's check of a command line.
func (c *Cmd) Validate() error {
	if err := c.Cluster.validate(c); err != nil {
		return err
	}
	if err := c.validate(); err != nil {
		return err
	}
	if c.Trainer == "torch" || c.Device != "cpu" {
		return nil // how many ranks there are depends on the GPUs, which Run asks for
	}
	_, err := c.shape()
	return err
}

// validate says what does not go together, whatever ranks there are.
func (c *Cmd) validate() error {
	if kinds := c.faults(); c.Fault != "any" && c.Fault != "none" && !slices.Contains(kinds, c.Fault) {
		return fmt.Errorf("--fault %s: ranks on %s have only %s", c.Fault, c.ranksOn(), strings.Join(kinds, ", "))
	}
	if !c.Alerts && (c.Panels || c.Kill == local.Prometheus || c.Kill == local.Alertmanager) {
		return errors.New("--no-alerts: there is no Prometheus and no Alertmanager to ask or to kill")
	}
	if c.Trainer == "torch" && (c.Panels || c.OnLoss != "restart" || c.Device != "cpu") {
		return errors.New("--trainer torch: its communicators have no names that --panels could ask for, and torchrun restarts it; --panels, --on-loss and --device are for --trainer ccl")
	}
	if c.OnLoss == "shrink" && (c.Fault != faultKilled || !c.Once) {
		return errors.New("--on-loss shrink is for --once --fault rank_killed")
	}
	return nil
}

// shape is what the job is run as: GPUs share nothing but a node, and get a rank each.
func (c *Cmd) shape() (shape, error) {
	s, err := c.wholeShape()
	if err != nil {
		return shape{}, err
	}
	if c.OnLoss == "shrink" {
		s.dp, s.tp, s.pp = s.world(), 1, 1
	}
	return s, c.fits(s)
}

// fits says which options the job's shape has no place for.
func (c *Cmd) fits(s shape) error {
	if c.Rank >= s.world() {
		return fmt.Errorf("--rank %d: the job has ranks 0 to %d", c.Rank, s.world()-1)
	}
	if parts := s.parts(); c.Kill != "" && !slices.Contains(parts, c.Kill) {
		return fmt.Errorf("--kill %s: want one of %s", c.Kill, strings.Join(parts, ", "))
	}
	return nil
}
