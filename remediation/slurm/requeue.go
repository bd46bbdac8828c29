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

const (
	// startDelay is how far ahead a requeued job's start is put: one that starts in the second
	// in which it was killed has its credential revoked, and fails.
	startDelay = 2
	maxRevived = 3
)

// requeue brings a job to run with one restart more than e found, without e's nodes.
func (a *Actuator) requeue(ctx context.Context, e *entry) error {
	r := &requeuing{Actuator: a, e: e, since: time.Now()}
	for {
		j, err := a.c.job(ctx, e.ID)
		if err != nil {
			return err
		}
		var done bool
		switch {
		case j.over():
			err = r.revive(ctx, j)
		case j.restarts <= e.Restarts && j.state != "PENDING":
			err = r.ask(ctx, j)
		case j.state == "RUNNING":
			done, err = r.runs(ctx, j)
		default:
			done, err = r.waits(ctx, j)
		}
		if done || err != nil {
			return err
		}
		if err := wait(ctx, a.o.tick); err != nil {
			return fmt.Errorf("slurm: job %s is %s: %w", e.ID, j.state, err)
		}
	}
}

type requeuing struct {
	*Actuator
	e      *entry
	since  time.Time
	asked  time.Time
	fenced bool
	downed bool // the culprit's node is, by us
	timed  bool // the start time is set, for this time that the job is pending
}

// ask requeues a running job, or has Slurm do so by itself where its node does not answer.
func (r *requeuing) ask(ctx context.Context, j *job) error {
	// A job that was submitted with --no-kill goes on without a node that is down.
	downed := r.downed && !slices.Contains(j.nodes, r.e.Culprit)
	if time.Since(r.asked) < r.o.again && !downed {
		return nil
	}
	if !r.fenced {
		r.fenced = true
		if r.o.Fence != nil {
			_, how := r.fence(ctx, r.e)
			r.e.note("%s", how)
		}
	}
	r.asked, r.timed = time.Now(), false
	if r.o.Drain && !r.downed && r.setDown(ctx, r.e, j) {
		r.downed = true
		return nil // the job goes by NODE_FAIL, and Slurm requeues it
	}
	r.downed = false
	_, err := r.c.run(ctx, "scontrol", "requeue", r.e.ID)
	if errors.Is(err, ErrDenied) || errors.Is(err, remediation.ErrGone) {
		return err
	}
	if err != nil {
		r.o.Logger.Warn("requeue failed, looking again", "job", r.e.ID, "err", err)
	}
	return nil
}

// revive requeues a job once more that came to an end by being requeued.
func (r *requeuing) revive(ctx context.Context, j *job) error {
	failed := slices.Contains([]string{"FAILED", "NODE_FAIL", "LAUNCH_FAILED", "BOOT_FAIL"}, j.state)
	if !failed || r.e.Revived >= maxRevived || j.restarts <= r.e.Restarts && r.asked.IsZero() && r.e.Revived == 0 && !r.recent() {
		return fmt.Errorf("%w: slurm job %s ended meanwhile (%s)", remediation.ErrGone, r.e.ID, j.state)
	}
	r.e.Revived++
	r.e.note("ended as %s by being requeued, requeued again", j.state)
	if err := r.journal.put(r.e); err != nil {
		return err
	}
	r.timed = false
	_, err := r.c.run(ctx, "scontrol", "requeue", r.e.ID)
	return err
}

// recent says that the action was begun before this call.
func (r *requeuing) recent() bool { return r.since.Sub(r.e.Began) > time.Second }

// waits sees to it that a job which waits to run again leaves nodes out, and does not wait
// for the delay that Slurm gives requeued jobs.
func (r *requeuing) waits(ctx context.Context, j *job) (bool, error) {
	if len(r.e.Leave) > 0 {
		has, err := r.c.excluded(ctx, j.id)
		if err != nil {
			return false, err
		}
		if len(minus(r.e.Leave, has)) > 0 { // it replaces the list
			_, err := r.c.run(ctx, "scontrol", "update", "jobid="+j.id, "excnodelist="+strings.Join(union(has, r.e.Leave), ","))
			if err != nil && !errors.Is(err, ErrNotPending) {
				return false, err
			}
			return false, nil // look again
		}
		if err := r.release(ctx, r.e); err != nil {
			r.e.note("no spare released: %v", err)
		}
	}
	if j.state == "PENDING" && !r.timed {
		r.timed = true
		if time.Until(j.started) > startDelay*time.Second || j.started.IsZero() {
			_, err := r.c.run(ctx, "scontrol", "update", "jobid="+j.id, fmt.Sprintf("starttime=now+%d", startDelay))
			if err != nil && !errors.Is(err, ErrNotPending) {
				return false, err
			}
		}
	}
	if time.Since(r.since) > r.o.queue {
		r.e.note("requeued; it is %s and waits for nodes", strings.ToLower(j.state))
		return true, r.done(r.e, time.Now())
	}
	return false, nil
}

// runs closes the entry, unless the job runs on a node that it is to be without.
func (r *requeuing) runs(ctx context.Context, j *job) (bool, error) {
	if bad := slices.ContainsFunc(j.nodes, func(n string) bool { return slices.Contains(r.e.Leave, n) }); bad {
		if !r.e.Again {
			r.e.Again, r.e.Restarts = true, j.restarts
			r.e.note("it came up on %s, requeued again", strings.Join(r.e.Leave, ", "))
			return false, r.journal.put(r.e)
		}
		r.e.note("it runs on %s all the same", strings.Join(r.e.Leave, ", "))
	}
	r.e.note("slurm job %s runs again on %s", j.id, brief(j.nodes))
	return true, r.done(r.e, j.started)
}

// brief is a list of nodes for people.
func brief(nodes []string) string {
	if len(nodes) > 8 {
		return fmt.Sprintf("%s and %d more nodes", strings.Join(nodes[:8], ", "), len(nodes)-8)
	}
	return strings.Join(nodes, ", ")
}
