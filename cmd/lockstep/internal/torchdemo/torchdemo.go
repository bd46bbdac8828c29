package torchdemo

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/lockstep-ccl/lockstep/exporters/web"
)

// Options are those of lockstep demo that mean something here.
type Options struct {
	Fault string        // any, none or one of the table
	Limit time.Duration // for a verdict, and for running again
	Watch time.Duration // with none
	Dir   string        // where logs and data go
	Ready time.Duration // for the job to train at all; 0: three minutes
}

// warmUp is how many collectives of a communicator come before a fault.
const warmUp = 400

// errWrong is that a verdict was missing or wrong.
var errWrong = errors.New("not everything was as it should be (see above)")

// Run plays the faults, each in a job of its own.
func Run(ctx context.Context, w io.Writer, o Options) error {
	fs, err := choose(o.Fault)
	if err != nil {
		return err
	}
	exe, err := os.Executable()
	if err != nil {
		return fmt.Errorf("find this program: %w", err)
	}
	m, err := look(ctx, exe, os.Getenv("LOCKSTEP_NCCL_PLUGIN"))
	if err != nil {
		return err
	}
	if o.Ready == 0 {
		o.Ready = 3 * time.Minute
	}
	d := &demo{Options: o, w: w, exe: exe, m: m, ranks: min(m.GPUs, 8)}
	fmt.Fprintf(w, "lockstep demo: %d ranks of PyTorch %s over NCCL %s, started by torchrun under lockstep attach\n", d.ranks, m.Torch, m.NCCL)
	wrong := false
	for _, f := range fs {
		ok, err := d.play(ctx, f)
		if err != nil {
			return err
		}
		wrong = wrong || !ok
	}
	if wrong {
		return errWrong
	}
	return nil
}

type demo struct {
	Options
	w     io.Writer
	exe   string
	m     machine
	ranks int
}

func (d *demo) say(at time.Time, what, format string, args ...any) {
	fmt.Fprintf(d.w, "  %7.2f s  %-10s %s\n", time.Since(at).Seconds(), what, fmt.Sprintf(format, args...))
}

// play plays one fault, and reports whether class and culprit were right and what should run again did.
func (d *demo) play(ctx context.Context, f fault) (right bool, err error) {
	dir := filepath.Join(d.Dir, f.name)
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return false, err
	}
	j, err := start(d.exe, d.m, f, d.ranks, dir)
	if err != nil {
		return false, err
	}
	defer j.stop(d.ranks)
	fmt.Fprintf(d.w, "\n%s: %s\n", f.name, f.text)
	if err := d.trains(ctx, j); err != nil {
		return false, err
	}
	fmt.Fprintf(d.w, "  status page %s/status\n", j.page())
	at, err := d.breakIt(ctx, j, f)
	if err != nil {
		return false, err
	}
	d.say(at, "fault", "%s", f.text)
	if f.name == "none" {
		return d.nothing(ctx, j, at)
	}
	right, err = d.verdict(ctx, j, f, at)
	if err != nil || f.env != "restart" {
		return right, err
	}
	again, err := d.again(ctx, j, at)
	return right && again, err
}

// trains waits until the job is under way: all ranks are seen, and collectives end.
func (d *demo) trains(ctx context.Context, j *job) error {
	what := fmt.Sprintf("the job does not train within %v", d.Ready)
	return d.until(ctx, j, d.Ready, what, func() bool {
		st, err := j.status(ctx)
		return err == nil && progress(st) >= warmUp && j.pid(victim) > 0 && st.Attempt == 0 && len(st.Open) == 0
	})
}

// progress is how many operations the busiest communicator has ended on all ranks.
func progress(st *web.Status) (most uint64) {
	for _, c := range st.Communicators {
		most = max(most, c.Least)
	}
	return most
}

// until waits for something, for the job's end, or for too long.
func (d *demo) until(ctx context.Context, j *job, limit time.Duration, what string, ok func() bool) error {
	deadline := time.NewTimer(limit)
	defer deadline.Stop()
	for !ok() {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-j.done:
			return j.failed(fmt.Sprintf("%s: it has ended (%v)", what, j.err))
		case <-deadline.C:
			return j.failed(what)
		case <-time.After(50 * time.Millisecond):
		}
	}
	return nil
}

// breakIt breaks the job, or waits until it does so itself; it returns when that was.
func (d *demo) breakIt(ctx context.Context, j *job, f fault) (time.Time, error) {
	switch {
	case f.name == "none":
		return time.Now(), nil
	case f.signal != 0:
		pid := j.pid(victim)
		if pid == 0 {
			return time.Time{}, j.failed("rank 1 is gone")
		}
		return time.Now(), syscall.Kill(pid, f.signal)
	}
	var at time.Time
	err := d.until(ctx, j, d.Ready, "the job does not get to the step of its fault", func() bool {
		fi, err := os.Stat(filepath.Join(j.dir, "progress.fault"))
		if err == nil {
			at = fi.ModTime()
		}
		return err == nil
	})
	return at, err
}

// verdict follows what the master says until it is sure.
func (d *demo) verdict(ctx context.Context, j *job, f fault, at time.Time) (right bool, err error) {
	suspected := map[string]bool{}
	deadline := time.Now().Add(d.Limit)
	for time.Now().Before(deadline) {
		st, err := j.status(ctx)
		if err != nil { // the master may have gone with the job
			st = &web.Status{}
		}
		for _, in := range append(slices.Clone(st.Open), st.Closed...) {
			if in.Opened.Before(at) {
				continue // of before the fault
			}
			if !suspected[in.ID] {
				suspected[in.ID] = true
				d.say(at, "suspected", "%s %s", in.Class, culprits(in))
			}
			if in.Confirmed == nil {
				continue
			}
			d.say(at, "confirmed", "%s %s", in.Class, culprits(in))
			for _, e := range in.Evidence {
				fmt.Fprintf(d.w, "               %s\n", e)
			}
			right = in.Class == f.class && len(in.Culprits) == 1 && in.Culprits[0].Name == fmt.Sprint("rank ", victim)
			if !right {
				fmt.Fprintf(d.w, "  ✗ want %s, rank %d\n", f.class, victim)
			}
			return right, nil
		}
		select {
		case <-ctx.Done():
			return false, ctx.Err()
		case <-time.After(50 * time.Millisecond):
		}
	}
	fmt.Fprintf(d.w, "  ✗ no verdict within %v\n", d.Limit)
	return false, nil
}

func culprits(in web.Incident) string {
	var all []string
	for _, c := range in.Culprits {
		s := c.Name
		if c.Reason != "" {
			s += " (" + c.Reason + ")"
		}
		all = append(all, s)
	}
	return strings.Join(all, ", ")
}

// nothing watches a job that is well.
func (d *demo) nothing(ctx context.Context, j *job, at time.Time) (bool, error) {
	for d.Watch == 0 || time.Since(at) < d.Watch {
		if st, err := j.status(ctx); err == nil && len(st.Open)+len(st.Closed) > 0 {
			in := append(slices.Clone(st.Open), st.Closed...)[0]
			d.say(at, "✗ verdict", "%s %s in a healthy job", in.Class, culprits(in))
			return false, nil
		}
		select {
		case <-ctx.Done():
			return true, nil
		case <-j.done:
			return false, j.failed(fmt.Sprintf("the job has ended (%v)", j.err))
		case <-time.After(200 * time.Millisecond):
		}
	}
	d.say(at, "✓", "nothing was said")
	return true, nil
}

// again waits for torchrun's next attempt, for its end, and compares its losses with those of a job that nobody has disturbed.
func (d *demo) again(ctx context.Context, j *job, at time.Time) (bool, error) {
	told := false
	deadline := time.NewTimer(max(d.Limit, 2*time.Minute))
	defer deadline.Stop()
	for running := true; running; {
		if st, err := j.status(ctx); err == nil && st.Attempt > 0 && progress(st) > 0 && !told {
			told = true
			d.say(at, "running", "attempt %d", st.Attempt)
		}
		select {
		case <-ctx.Done():
			return false, ctx.Err()
		case <-j.done:
			running = false
		case <-deadline.C:
			fmt.Fprintf(d.w, "  ✗ %v\n", j.failed("the second attempt does not come to its end (docs/attach/torchrun.md: attempts share a store)"))
			return false, nil
		case <-time.After(50 * time.Millisecond):
		}
	}
	got := j.losses(d.ranks)
	if j.err != nil || got == "" {
		fmt.Fprintf(d.w, "  ✗ %v\n", j.failed(fmt.Sprintf("the job ended with %v and the losses %q", j.err, got)))
		return false, nil
	}
	d.say(at, "ended", "losses %s", got)
	quiet := fault{name: "undisturbed", env: "no_restart"}
	dir := filepath.Join(d.Dir, quiet.name)
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return false, err
	}
	k, err := start(d.exe, d.m, quiet, d.ranks, dir)
	if err != nil {
		return false, err
	}
	defer k.stop(d.ranks)
	select {
	case <-ctx.Done():
		return false, ctx.Err()
	case <-k.done:
	case <-time.After(d.Ready + d.Limit):
		return false, k.failed("the undisturbed job does not come to its end")
	}
	if want := k.losses(d.ranks); want == "" || want != got {
		fmt.Fprintf(d.w, "  ✗ losses of an undisturbed job are %q\n", want)
		return false, nil
	}
	d.say(at, "✓", "losses are those of an undisturbed job")
	return true, nil
}
