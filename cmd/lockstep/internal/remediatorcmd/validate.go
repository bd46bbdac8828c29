package remediatorcmd

import (
	"errors"
	"fmt"

	"github.com/lockstep-ccl/lockstep/cmd/lockstep/internal/flags"
)

// Validate implements kong's check of a command line.
func (c *Cmd) Validate() error {
	switch {
	case c.Check:
		return nil
	case c.TokenFile == "":
		return errors.New("--token-file is missing: without a token, who could reach the webhook could restart jobs")
	case c.Actuator == "kubernetes" && c.Kubernetes.MaxOut < 1:
		return fmt.Errorf("--kubernetes.max-out %d: want at least 1; a rule with action restart takes no node out", c.Kubernetes.MaxOut)
	case len(c.Master) == 0 && !c.InsecureBelieveAlerts:
		return errors.New("--master is missing: it is asked about each incident, an alert alone is no reason to restart a job")
	}
	_, err := flags.Masters(c.Master)
	return errors.Join(err, c.TLS.Check(), c.Web.Check())
}
