package demo

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"github.com/lockstep-ccl/lockstep/collector/wire"
	"github.com/lockstep-ccl/lockstep/exporters/web"
	"github.com/lockstep-ccl/lockstep/internal/ports"
)

// site is where ranks run when lockstep run does not have them here: a cluster's scheduler has
// them and their agents, or torchrun. The other parts stay here, and are reached from there.
type site interface {
	// check finds out whether the site can take the job, and changes nothing.
	check(ctx context.Context) error
	// plan says what prepare and submit will make there, and remove removes again.
	plan() []string
	// where is the site in words.
	where() string
	// prepare makes what the other parts need of the site, and returns the address of this machine
	// that its nodes reach.
	prepare(ctx context.Context) (string, error)
	// actuator is what the remediator is told.
	actuator() []string
	// traits are how the parts that run here differ for it.
	traits() traits
	// submit starts agents and ranks. They run until remove.
	submit(ctx context.Context, c *cluster, certs certs) error
	// exec runs lockstep with args beside a node's ranks.
	exec(ctx context.Context, node string, args ...string) error
	// nodes are those that the ranks of the youngest attempt are on, by the scheduler's word.
	nodes(ctx context.Context) ([]string, error)
	// canLose says why a node's loss would not be the story that is told.
	canLose(ctx context.Context, node string) error
	// remove takes everything away that they have made. It may be called again.
	remove()
}

// traits are how the parts of this machine differ by where the ranks run.
type traits struct {
	here   bool     // ranks are processes of this machine
	spares bool     // a job can leave a node out
	agent  []string // flags of this machine's agents
}

// traits are the site's, or those of ranks under lockstep run.
func (c *cluster) traits() traits {
	if c.site == nil {
		return traits{here: true, spares: true}
	}
	return c.site.traits()
}

// hold finds addresses for the parts, and says where agents reach the master.
func (c *cluster) hold(ctx context.Context) (string, error) {
	held, err := ports.Hold("127.0.0.1", c.shape.agents+3)
	if err != nil {
		return "", err
	}
	c.held = append(c.held, held) // until stop: parts start again at their addresses
	c.master, c.remediator, c.agents = held.Addrs[1], held.Addrs[2], held.Addrs[3:]
	if c.site == nil {
		return held.Addrs[0], nil
	}
	host, err := c.site.prepare(ctx)
	if err != nil {
		return "", err
	}
	if held, err = ports.Hold(host, 1); err != nil {
		return "", err
	}
	c.held, c.masterGRPC = append(c.held, held), held.Addrs[0]
	return c.masterGRPC, nil
}

// actuator is how the remediator reaches the job.
func (c *cluster) actuator() []string {
	if c.site != nil {
		return c.site.actuator()
	}
	return []string{"--supervisor", c.job + "=" + filepath.Join(c.dir, "run", "control.sock")}
}

// where the job runs, in words.
func (c *cluster) where() string {
	if c.site != nil {
		return c.site.where()
	}
	return fmt.Sprintf("%d logical nodes", c.shape.nodes)
}

// victim is where a rank is, in which attempt, and its process.
func (c *cluster) victim(ctx context.Context, rank int) (attempt int, r web.Standing, err error) {
	if c.site == nil {
		job, err := c.control.Status(ctx)
		if err != nil {
			return 0, r, err
		}
		return job.Attempt, web.Standing{Rank: rank, PID: int32(job.Ranks[rank].PID)}, nil
	}
	var st web.Status
	var all web.Standings
	if err := errors.Join(c.get(ctx, c.web.URL(c.master)+"/api/v1/status", &st), c.get(ctx, c.web.URL(c.master)+"/api/v1/ranks", &all)); err != nil {
		return 0, r, fmt.Errorf("ask the master where rank %d is: %w", rank, err)
	}
	for _, r := range all.Ranks {
		if r.Rank == rank && r.Node != "" && r.PID > 0 {
			return int(st.Attempt), r, nil
		}
	}
	return 0, r, fmt.Errorf("the master does not know where rank %d is", rank)
}

// breakIt injects a fault into a rank of this machine, or of the site.
func (c *cluster) breakIt(ctx context.Context, f fault, attempt int, r web.Standing) error {
	if c.traits().here {
		return c.program.inject(&f, attempt, int(r.PID))
	}
	if f.Name == faultNode {
		if err := c.site.canLose(ctx, r.Node); err != nil {
			return err
		}
		return c.power(ctx, c.powerOff, r.Node)
	}
	order, err := json.Marshal(injection{Fault: f, Attempt: attempt, PID: int(r.PID), Dir: c.faultDir(r.Node)})
	if err != nil {
		return err
	}
	return c.site.exec(ctx, r.Node, "fault", string(order))
}

// faultDir is where the ranks of a node listen for faults.
func (c *cluster) faultDir(node string) string { return filepath.Join(nodeDir(c.job, node), "faults") }

// nodeDir is on the node's own memory: what is there is gone with the node.
func nodeDir(job, node string) string { return filepath.Join("/dev/shm", job, node) }

// injection is an order to `lockstep fault`, which is run where the rank is.
type injection struct {
	Fault   fault
	Attempt int
	PID     int
	Dir     string
	Clean   bool // remove Dir, and break nothing
}

// FaultCmd is `lockstep fault`, by which the demo breaks a rank of another machine.
type FaultCmd struct {
	Order string `arg:""`
}

// Run injects it.
func (c *FaultCmd) Run() error {
	var order injection
	if err := json.Unmarshal([]byte(c.Order), &order); err != nil {
		return fmt.Errorf("fault: %w", err)
	}
	if order.Clean {
		if !strings.HasPrefix(filepath.Clean(order.Dir), "/dev/shm/"+jobPrefix) {
			return fmt.Errorf("fault: %s is not lockstep demo's", order.Dir)
		}
		return os.RemoveAll(order.Dir)
	}
	if order.PID <= 1 || !filepath.IsAbs(order.Dir) {
		return fmt.Errorf("fault: process %d, directory %q: this is for lockstep demo", order.PID, order.Dir)
	}
	return order.Fault.inject(order.Dir, order.Attempt, order.PID)
}

// agentCert issues the certificate of a node's agent.
func (c certs) agentCert(node string) error {
	_, err := c.flags("agent-"+node, wire.Identity{Role: wire.RoleAgent, Node: node})
	return err
}
