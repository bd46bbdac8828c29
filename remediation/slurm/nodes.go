package slurm

import (
	"context"
	"errors"
	"fmt"
	"net"
	"slices"
	"strings"
	"time"
	"unicode"
)

// node is what Slurm says of a node.
type node struct {
	name, addr, port string
	state, reason    string
}

func (n *node) drained() bool { return strings.HasPrefix(n.state, "drain") }

var nodeColumns = []column{{"NodeList", 72}, {"NodeAddr", 72}, {"Port", 12}, {"StateLong", 32}, {"Reason", 256}}

// node returns nil when Slurm has none of that name.
func (c *client) node(ctx context.Context, name string) (*node, error) {
	if !nodeName.MatchString(name) {
		return nil, fmt.Errorf("slurm: %.80q is no name of a node", name)
	}
	out, err := c.run(ctx, "sinfo", "-h", "-N", "-n", name, "-O", format(nodeColumns))
	if err != nil {
		return nil, err
	}
	rows, err := table(out, nodeColumns)
	if err != nil {
		return nil, fmt.Errorf("node %s: %w", name, err)
	}
	for _, r := range rows { // one a partition
		if r[0] == name {
			return &node{r[0], r[1], r[2], r[3], r[4]}, nil
		}
	}
	return nil, nil
}

// free returns the idle nodes of a partition, and those of a reservation.
func (c *client) free(ctx context.Context, partition, reservation string) ([]string, error) {
	if !objectName.MatchString(partition) {
		return nil, fmt.Errorf("slurm: %.80q is no partition's name", partition)
	}
	out, err := c.run(ctx, "sinfo", "-h", "-N", "-p", partition, "-t", "idle", "-o", "%N")
	if err != nil {
		return nil, err
	}
	free := strings.Fields(out)
	if reservation != "" {
		spares, err := c.reserved(ctx, reservation)
		if err != nil {
			return nil, err
		}
		free = union(free, spares)
	}
	return free, nil
}

// reserved returns the nodes of a reservation, none when there is no such.
func (c *client) reserved(ctx context.Context, name string) ([]string, error) {
	out, err := c.run(ctx, "scontrol", "-o", "show", "reservation", name)
	if err != nil {
		if strings.Contains(err.Error(), "not found") {
			return nil, nil
		}
		return nil, err
	}
	for _, f := range strings.Fields(out) {
		if list, ok := strings.CutPrefix(f, "Nodes="); ok {
			return c.expand(ctx, list)
		}
	}
	return nil, nil
}

// release takes one node out of the reservation of spares, for a job that has lost one.
func (a *Actuator) release(ctx context.Context, e *entry) error {
	if a.o.Spares == "" || e.Released == "-" {
		return nil
	}
	spares, err := a.c.reserved(ctx, a.o.Spares)
	if err != nil {
		return err
	}
	if e.Released == "" { // decided on before it is done, so that a repeat releases no second one
		if spares = minus(spares, e.Leave); len(spares) == 0 {
			e.Released = "-"
			e.note("the reservation %s has no spare left", a.o.Spares)
			return a.journal.put(e)
		}
		e.Released = spares[len(spares)-1]
		if err := a.journal.put(e); err != nil {
			return err
		}
	}
	if !slices.Contains(spares, e.Released) {
		return nil
	}
	e.note("spare %s released", e.Released)
	if rest := minus(spares, []string{e.Released}); len(rest) > 0 {
		_, err = a.c.run(ctx, "scontrol", "update", "reservationname="+a.o.Spares, "nodes="+strings.Join(rest, ","))
	} else {
		_, err = a.c.run(ctx, "scontrol", "delete", "reservationname="+a.o.Spares)
	}
	return err
}

// drain keeps other jobs off a node, with who and why; what a person has drained stays as it is.
func (a *Actuator) drain(ctx context.Context, e *entry, name string) {
	if !a.o.Drain {
		return
	}
	n, err := a.c.node(ctx, name)
	if err == nil && n == nil {
		return
	}
	if err == nil && !n.drained() {
		_, err = a.c.run(ctx, "scontrol", "update", "nodename="+name, "state=drain", "reason="+reason(e))
	}
	a.noteDrain(e, name, err)
}

func (a *Actuator) noteDrain(e *entry, name string, err error) {
	switch {
	case err == nil:
		e.note("%s is drained", name)
	case errors.Is(err, ErrDenied):
		e.note("%s is not drained: this account may not (it takes AdminLevel=Administrator)", name)
	default:
		e.note("%s is not drained: %v", name, err)
	}
}

// reason is what a drained node says: by whom, why.
func reason(e *entry) string {
	clean := strings.Map(func(r rune) rune {
		if unicode.IsPrint(r) && r != '"' {
			return r
		}
		return ' '
	}, e.Reason)
	if len(clean) > 160 {
		clean = strings.ToValidUTF8(clean[:160], "")
	}
	return fmt.Sprintf("lockstep action %s job %s: %s", e.Action, e.ID, clean)
}

// setDown sets a node down whose slurmd is not there, and reports whether it is: else a
// requeued job, which wants every node's word that it has ended, waits for Slurm's own
// time-out. The node is drained first, so that it does not come back by itself.
func (a *Actuator) setDown(ctx context.Context, e *entry, j *job) bool {
	name := e.Culprit
	if name == "" || !a.dead(ctx, e, j) {
		return false
	}
	var err error
	if _, err = a.c.run(ctx, "scontrol", "update", "nodename="+name, "state=drain", "reason="+reason(e)); err == nil {
		_, err = a.c.run(ctx, "scontrol", "update", "nodename="+name, "state=down", "reason="+reason(e))
	}
	if err != nil {
		a.noteDrain(e, name, err)
		return false
	}
	e.note("%s does not answer, set down and drained", name)
	return true
}

// dead reports whether the culprit's node does not answer: its agent is silent, or nothing
// listens where its slurmd does. Where no other node of the job can be reached either, the
// fault is not the node's.
func (a *Actuator) dead(ctx context.Context, e *entry, j *job) bool {
	n, err := a.c.node(ctx, e.Culprit)
	if err != nil || n == nil {
		return false
	}
	return e.Lost || strings.HasPrefix(n.state, "down") || !answers(ctx, n) && a.anyAnswers(ctx, minus(j.nodes, []string{e.Culprit}))
}

// answers reports whether something listens where a node's slurmd does. In doubt it does.
func answers(ctx context.Context, n *node) bool {
	if n.addr == "" || n.port == "" || n.port == "0" {
		return true
	}
	d := net.Dialer{Timeout: answerTimeout}
	conn, err := d.DialContext(ctx, "tcp", net.JoinHostPort(n.addr, n.port))
	if err == nil {
		conn.Close()
	}
	return err == nil || ctx.Err() != nil
}

// anyAnswers asks a few nodes.
func (a *Actuator) anyAnswers(ctx context.Context, names []string) bool {
	for _, name := range names[:min(len(names), 3)] {
		if n, err := a.c.node(ctx, name); err == nil && n != nil && n.port != "" && answers(ctx, n) {
			return true
		}
	}
	return false
}

const answerTimeout = time.Second
