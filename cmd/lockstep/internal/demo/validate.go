package demo

import "errors"

// Validate implements kong's check of a command line.
func (c *Cmd) Validate() error {
	if err := c.Cluster.validate(c); err != nil {
		return err
	}
	if c.Trainer == "torch" {
		if c.Panels || c.Tracing || c.Kill != "" || c.OnLoss != "restart" || c.Device != "cpu" || c.JSON != "" || c.Rank >= 0 {
			return errors.New("--trainer torch: torchrun runs and restarts the job, and there is no Prometheus; --panels, --tracing, --kill, --on-loss, --device, --rank and --json are for --trainer ccl")
		}
		return nil
	}
	if c.Device != "cpu" {
		return nil // how many ranks there are depends on the GPUs, which Run asks for
	}
	_, err := c.shape()
	return err
}
