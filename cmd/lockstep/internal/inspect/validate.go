package inspect

import "fmt"

// Validate implements kong's check of a command line.
func (c *Cmd) Validate() error {
	if c.Last < 0 {
		return fmt.Errorf("--last %d: want 0 or more", c.Last)
	}
	return nil
}
