package perf

// Validate implements kong's check of a command line.
func (c *Cmd) Validate() error {
	_, err := c.plan()
	return err
}

// Complete lists the collectives, for shells.
func (c *Cmd) Complete(name string) []string {
	if name != "collective" {
		return nil
	}
	var all []string
	for _, c := range collectives {
		all = append(all, c.name)
	}
	return all
}
