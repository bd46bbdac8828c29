package slurm

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/lockstep-ccl/lockstep/remediation"
)

// errNoLoop says that the restart inside the allocation leads nowhere.
var errNoLoop = errors.New("slurm: the loop in the batch script")

// inPlace ends the attempt's step and waits until the loop has started the next one.
func (a *Actuator) inPlace(ctx context.Context, e *entry) error {
	deadline := time.Now().Add(a.o.patience)
	var cancelled time.Time
	for {
		j, err := a.c.job(ctx, e.ID)
		switch {
		case err != nil:
			return err
		case j.over():
			return fmt.Errorf("%w: slurm job %s ended meanwhile (%s)", remediation.ErrGone, e.ID, j.state)
		case j.restarts != e.Restarts || j.state != "RUNNING":
			return fmt.Errorf("%w is gone with its allocation", errNoLoop)
		case time.Now().After(deadline):
			return fmt.Errorf("%w has started nothing within %v", errNoLoop, a.o.patience)
		}
		m, ok := parseMarker(j.comment)
		if !ok {
			m = marker{nodes: e.Nodes}
		}
		steps, err := a.c.steps(ctx, e.ID)
		if err != nil {
			return err
		}
		if done, err := a.started(e, steps); done || err != nil {
			return err
		}
		want := marker{nodes: m.nodes, do: doWait, action: e.Action, attempt: e.Attempt, without: union(m.without, e.Leave)}
		if e.Go {
			want.do = doGo
		}
		switch {
		case want.String() != m.String():
			// Read again before anything follows from it: a slurmctld that dies forgets it.
			err = a.tell(ctx, e.ID, j.comment, want)
		case time.Since(cancelled) > a.o.again && running(steps, e.Attempt):
			cancelled = time.Now()
			err = a.cancel(ctx, steps, e.Attempt)
		case !e.Go:
			_, how := a.fence(ctx, e)
			e.note("%s", how)
			e.Go = true
			if err = a.journal.put(e); err == nil {
				continue
			}
		default:
			err = wait(ctx, a.o.tick)
		}
		if err != nil {
			return err
		}
	}
}

// started closes the entry when an attempt after e's runs.
func (a *Actuator) started(e *entry, steps []step) (bool, error) {
	if len(steps) == 0 || steps[len(steps)-1].attempt <= e.Attempt {
		return false, nil
	}
	s := steps[len(steps)-1]
	bad := slices.ContainsFunc(s.nodes, func(n string) bool { return slices.Contains(e.Leave, n) })
	if bad && !e.Again {
		// A slurmctld that died forgot the marker before the loop had read it.
		e.Attempt, e.Again, e.Go = s.attempt, true, false
		e.note("attempt %d came up on %s, ended it too", s.attempt, strings.Join(e.Leave, ", "))
		return false, a.journal.put(e)
	}
	if bad {
		e.note("attempt %d runs on %s all the same", s.attempt, strings.Join(e.Leave, ", "))
	}
	e.note("attempt %d runs inside the allocation on %d nodes (step %s)", s.attempt, len(s.nodes), s.id)
	return true, a.done(e, s.started)
}

// done closes an entry: the job ran again at that time.
func (a *Actuator) done(e *entry, at time.Time) error {
	if e.Done, e.At = true, at.UTC(); at.IsZero() {
		e.At = time.Now().UTC()
	}
	return a.journal.put(e)
}

// tell puts a marker into the job's comment.
func (a *Actuator) tell(ctx context.Context, id, comment string, m marker) error {
	text, err := m.into(comment)
	if err != nil {
		return err
	}
	_, err = a.c.run(ctx, "scontrol", "update", "jobid="+id, "comment="+text)
	return err
}

func running(steps []step, attempt int) bool {
	return slices.ContainsFunc(steps, func(s step) bool { return s.attempt == attempt })
}

// cancel ends the step of an attempt, and what is left of earlier ones.
func (a *Actuator) cancel(ctx context.Context, steps []step, attempt int) error {
	for _, s := range steps {
		if s.attempt > attempt {
			continue
		}
		if _, err := a.c.run(ctx, "scancel", s.id); err != nil && !errors.Is(err, remediation.ErrGone) {
			return err
		}
	}
	return nil
}

// fence waits until it is known that nothing of the attempt that ends is left: by Slurm, whose
// step is over when all its nodes have said so, or by the agents.
func (a *Actuator) fence(ctx context.Context, e *entry) (proven bool, how string) {
	ctx, cancel := context.WithTimeout(ctx, a.o.FenceTimeout+a.o.LeaseWait)
	defer cancel()
	said := make(chan string, 1)
	yes := make(chan string, 1)
	bound := time.After(a.o.FenceTimeout)
	if a.o.Fence != nil {
		go func() {
			switch proof, err := a.ask(ctx, e); {
			case err != nil:
				said <- err.Error()
			case proof.Proven:
				yes <- proof.How
			default:
				said <- proof.How
			}
		}()
	} else {
		said <- "nobody to ask but Slurm"
	}
	agents, over := "", false
	for {
		if e.InPlace {
			if steps, err := a.c.steps(ctx, e.ID); err == nil && !running(steps, e.Attempt) {
				return true, fmt.Sprintf("attempt %d has ended: every node has told Slurm so", e.Attempt)
			}
		}
		select {
		case how := <-yes:
			return true, fmt.Sprintf("attempt %d is fenced: %s", e.Attempt, how)
		case agents = <-said:
			over = bound == nil
		case <-time.After(a.o.tick):
		case <-bound: // a lease may be waited for
			bound, over = nil, agents != ""
		case <-ctx.Done():
			over = true
		}
		if over || agents != "" && !e.InPlace {
			return false, fmt.Sprintf("no proof that attempt %d has ended on %s (%s)", e.Attempt, orAll(e.Culprit), agents)
		}
	}
}

// ask asks the fencer, and again when nothing but a lease is missing that is over soon: to go on
// without proof would save seconds only.
func (a *Actuator) ask(ctx context.Context, e *entry) (remediation.Proof, error) {
	within := a.o.FenceTimeout
	for {
		call, cancel := context.WithTimeout(ctx, within)
		proof, err := a.o.Fence.Fence(call, e.Job, e.Attempt, e.Culprit)
		cancel()
		if err != nil || proof.Proven || proof.In <= 0 || proof.In > a.o.LeaseWait || within > a.o.FenceTimeout {
			return proof, err
		}
		within = a.o.FenceTimeout + proof.In
	}
}

func orAll(node string) string {
	if node == "" {
		return "all its nodes"
	}
	return node
}

func wait(ctx context.Context, d time.Duration) error {
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-time.After(d):
		return nil
	}
}
