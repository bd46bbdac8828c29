package demo

import (
	"os"
	"strings"

	"github.com/lockstep-ccl/lockstep/rules"
)

// policy is the remediator's configuration.
func (c *cluster) policy() string {
	if c.shrink {
		return strings.ReplaceAll(remediatorConfig, "class: noncommunication_hang, action: restart}", "class: noncommunication_hang, action: none}")
	}
	if !c.traits().spares {
		return strings.ReplaceAll(remediatorConfig, "restart_excluding", "restart")
	}
	return remediatorConfig
}

func writeRules(path string) error {
	var b strings.Builder
	if err := rules.Generate(&b, rules.FastConfig()); err != nil {
		return err
	}
	return os.WriteFile(path, []byte(b.String()), 0o600)
}

// remediatorConfig restarts on everything: this is a demo, and its job is cheap.
const remediatorConfig = `dry_run: false
max_age: 2m
action_timeout: 30s
policies:
- {name: hang-communication, class: communication_hang, action: restart}
- {name: hang-noncommunication, class: noncommunication_hang, action: restart}
- {name: slow-link, class: communication_slow, action: restart}
- {name: slow-rank, class: noncommunication_slow, action: restart_excluding}
breaker: {window: 1h, job: 500, total: 500, unit_share: 1, units: 500}
`
