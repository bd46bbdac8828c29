package demo

// Validate implements kong's check of a command line.
func (c *Cmd) Validate() error {
	if c.Device != "cpu" {
		return nil // how many ranks there are depends on the GPUs, which Run asks for
	}
	_, err := c.shape()
	return err
}
