// Package pkicmd is `lockstep pki`.
package pkicmd

import (
	"fmt"
	"io"
	"path/filepath"
	"strings"
	"time"

	"github.com/lockstep-ccl/lockstep/collector/wire"
	"github.com/lockstep-ccl/lockstep/collector/wire/pki"
)

// Cmd is the command line.
type Cmd struct {
	Init       Init       `cmd:"" help:"Make an authority."`
	Agent      Agent      `cmd:"" help:"Issue the certificate of a node's agent."`
	Master     Master     `cmd:"" help:"Issue the certificate of a job's master."`
	Remediator Remediator `cmd:"" help:"Issue the remediator's certificate."`
	Planner    Planner    `cmd:"" help:"Issue the certificate of the fabric's planner."`
}

// Help implements kong's help provider.
func (*Cmd) Help() string {
	return `Issues the certificates by which agents, masters and the remediator know each other. An agent's says
of which node, and if need be of which jobs, it may report; a master's of which job it is. Running
processes take a replaced certificate at their next connection, without a restart.

Keep ca.key where only who issues certificates can read it; each process needs its own .crt and .key, and ca.crt.
A cluster's own issuer (cert-manager, SPIRE) does as well: it puts the same URIs into its certificates.

Examples:
  lockstep pki init --dir pki
  lockstep pki agent --dir pki --node gpu-01
  lockstep pki agent --dir pki --node gpu-01 --job llm                     reports of this job only
  lockstep pki master --dir pki --job llm --host lockstep-master-llm --host 10.0.0.5
  lockstep pki remediator --dir pki
  lockstep pki planner --dir pki --host planner`
}

// Authority is where certificates come from.
type Authority struct {
	Dir string `default:"pki" type:"path" placeholder:"DIR" help:"The authority's directory (default: ${default})."`
}

// Init is `lockstep pki init`.
type Init struct{ Authority }

// Help implements kong's help provider.
func (*Init) Help() string {
	return `Examples:
  lockstep pki init --dir /etc/lockstep/pki`
}

// Run makes the authority.
func (c *Init) Run(out io.Writer) error {
	if _, err := pki.Init(c.Dir); err != nil {
		return err
	}
	fmt.Fprintf(out, "%s and %s are there\n", filepath.Join(c.Dir, "ca.crt"), filepath.Join(c.Dir, "ca.key"))
	return nil
}

// Certificate is what all certificates have in common.
type Certificate struct {
	Authority
	Domain string        `default:"lockstep.local" help:"SPIFFE trust domain (default: ${default})."`
	Life   time.Duration `default:"720h" help:"How long it is good for (default: ${default})."`
}

func (c *Certificate) issue(out io.Writer, name string, id wire.Identity, hosts []string) error {
	ca, err := pki.Open(c.Dir)
	if err != nil {
		return err
	}
	id.Domain = c.Domain
	files, err := ca.Issue(name, id, hosts, c.Life)
	if err != nil {
		return err
	}
	fmt.Fprintf(out, "%s\n  --tls.cert %s --tls.key %s --tls.ca %s\n", id, files.CertFile, files.KeyFile, files.CAFile)
	return nil
}

// Agent is `lockstep pki agent`.
type Agent struct {
	Certificate
	Node string   `required:"" help:"Name of the node (lockstep agent --node)."`
	Job  []string `help:"Job that it may report of; repeatable (default: every job on the node)."`
}

// Help implements kong's help provider.
func (*Agent) Help() string {
	return `Examples:
  lockstep pki agent --dir pki --node gpu-01                    every job on the node
  lockstep pki agent --dir pki --node gpu-01 --job llm          this one only`
}

// Run issues it.
func (c *Agent) Run(out io.Writer) error {
	return c.issue(out, strings.Join(append([]string{"agent-" + c.Node}, c.Job...), "+"), wire.Identity{Role: wire.RoleAgent, Node: c.Node, Jobs: c.Job}, nil)
}

// Master is `lockstep pki master`.
type Master struct {
	Certificate
	Job  string   `required:"" help:"The job."`
	Host []string `required:"" help:"Name or address by which agents and the remediator dial it; repeatable."`
}

// Help implements kong's help provider.
func (*Master) Help() string {
	return `Examples:
  lockstep pki master --dir pki --job llm --host lockstep-master-llm --host 10.0.0.5`
}

// Run issues it.
func (c *Master) Run(out io.Writer) error {
	return c.issue(out, "master-"+c.Job, wire.Identity{Role: wire.RoleMaster, Jobs: []string{c.Job}}, c.Host)
}

// Remediator is `lockstep pki remediator`.
type Remediator struct{ Certificate }

// Help implements kong's help provider.
func (*Remediator) Help() string {
	return `Examples:
  lockstep pki remediator --dir pki --life 24h`
}

// Run issues it.
func (c *Remediator) Run(out io.Writer) error {
	return c.issue(out, "remediator", wire.Identity{Role: wire.RoleRemediator}, nil)
}

// Planner is `lockstep pki planner`.
type Planner struct {
	Certificate
	Host []string `required:"" help:"Name or address by which jobs and probers dial it; repeatable."`
}

// Help implements kong's help provider.
func (*Planner) Help() string {
	return `Examples:
  lockstep pki planner --dir pki --host planner --host 10.0.0.6`
}

// Run issues it.
func (c *Planner) Run(out io.Writer) error {
	return c.issue(out, "planner", wire.Identity{Role: wire.RolePlanner}, c.Host)
}
