package slurm

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/exec"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/lockstep-ccl/lockstep/fence"
)

const (
	// StepPrefix and the attempt are a step's name, by which the actuator finds it.
	StepPrefix = "lockstep-"
	// attemptsPerAllocation numbers attempts on over requeues: the first of an allocation
	// that Slurm has restarted r times is 100·r.
	attemptsPerAllocation = 100
	maxAttempt            = 1 << 20
)

// Loop runs a job's step again and again inside its allocation: it is the job's batch script.
type Loop struct {
	// Srun is what follows srun's own name: options and the command.
	Srun []string
	// Nodes is how many nodes a step takes; what the allocation has more are spares.
	Nodes int
	// Hold is how long the other tasks go on when one has ended, so that the pipeline can see
	// them and the remediator says what to do.
	Hold time.Duration
	// Decide is how long a step that failed waits for the remediator's word.
	Decide time.Duration
	// MaxRestarts bounds restarts that nobody asked for.
	MaxRestarts int
	// Patience bounds waits for slurmctld, and for the word to go once it is said to come.
	Patience time.Duration
	Run      Runner // of Slurm's commands but srun, Commands("") when nil
	SrunPath string // "srun" when empty
	Getenv   func(string) string
	Stdout   *os.File
	Stderr   io.Writer
	Logger   *slog.Logger

	tick time.Duration
}

// ErrNoNodes says that fewer nodes of the allocation are left than a step takes.
var ErrNoNodes = errors.New("slurm: not enough good nodes are left in the allocation")

// StepError is a step that failed and is not started again.
type StepError struct{ Status int }

func (e *StepError) Error() string {
	return fmt.Sprintf("slurm: the step ended with status %d", e.Status)
}

// ExitStatus is the step's, for the command to pass on.
func (e *StepError) ExitStatus() int { return e.Status }

// Start runs the loop until a step ends well, none may follow, or ctx ends.
func (l Loop) Start(ctx context.Context) error {
	if err := l.defaults(); err != nil {
		return err
	}
	id := l.Getenv("SLURM_JOB_ID")
	restarts, err := strconv.Atoi(cmp.Or(l.Getenv("SLURM_RESTART_COUNT"), "0"))
	if !number.MatchString(id) || err != nil || restarts < 0 || restarts > maxAttempt/attemptsPerAllocation-1 {
		return fmt.Errorf("slurm: SLURM_JOB_ID is %.40q and SLURM_RESTART_COUNT %.40q: the loop belongs into a batch script (sbatch)", id, l.Getenv("SLURM_RESTART_COUNT"))
	}
	r := &looping{Loop: l, c: &client{run: l.Run, expanded: map[string][]string{}}, id: id}
	if err := r.announce(ctx); err != nil {
		// Without it the job runs as well; only the remediator then requeues it.
		l.Logger.Warn("the remediator cannot restart this job inside its allocation", "err", err)
	}
	own := 0
	for attempt := restarts * attemptsPerAllocation; ; attempt++ {
		status, err := r.step(ctx, attempt)
		switch {
		case err != nil:
			return err
		case ctx.Err() != nil:
			return ctx.Err()
		case status == 0:
			return nil
		case attempt%attemptsPerAllocation == attemptsPerAllocation-1:
			l.Logger.Error("no more attempts in this allocation", "attempt", attempt)
			return &StepError{status}
		}
		told, err := r.decision(ctx, attempt)
		if err != nil {
			return err
		}
		if !told {
			if own++; own > l.MaxRestarts {
				return &StepError{status}
			}
		}
		l.Logger.Info("starting the next attempt", "after", attempt, "status", status, "asked", told)
	}
}

func (l *Loop) defaults() error {
	if l.Nodes < 1 || len(l.Srun) == 0 {
		return errors.New("slurm: the loop wants the number of nodes that a step takes, and a command")
	}
	if l.Run == nil {
		l.Run = Commands("")
	}
	if l.Getenv == nil {
		l.Getenv = os.Getenv
	}
	if l.Logger == nil {
		l.Logger = slog.New(slog.DiscardHandler)
	}
	if l.Stderr == nil {
		l.Stderr = os.Stderr
	}
	l.SrunPath = cmp.Or(l.SrunPath, "srun")
	l.Hold, l.Decide, l.Patience = cmp.Or(l.Hold, 30*time.Second), cmp.Or(l.Decide, 10*time.Second), cmp.Or(l.Patience, 2*time.Minute)
	l.tick = cmp.Or(l.tick, 200*time.Millisecond)
	return nil
}

type looping struct {
	Loop
	c          *client
	id         string
	generation uint64 // of the last attempt's fence token
}

// look asks for the job until slurmctld answers.
func (r *looping) look(ctx context.Context) (*job, error) {
	deadline := time.Now().Add(r.Patience)
	for delay := r.tick; ; delay = min(2*delay, 5*time.Second) {
		j, err := r.c.job(ctx, r.id)
		if err == nil || time.Now().After(deadline) {
			return j, err
		}
		if err := wait(ctx, delay); err != nil {
			return nil, err
		}
	}
}

// announce writes the marker, which says that this job can be restarted in place.
func (r *looping) announce(ctx context.Context) error {
	j, err := r.look(ctx)
	if err != nil {
		return err
	}
	m, ok := parseMarker(j.comment)
	if ok && m.nodes == r.Nodes {
		return nil
	}
	if !ok {
		m = marker{do: doNothing, attempt: -1}
	}
	m.nodes = r.Nodes
	text, err := m.into(j.comment)
	if err == nil {
		_, err = r.c.run(ctx, "scontrol", "update", "jobid="+r.id, "comment="+text)
	}
	return err
}

// step runs one attempt to its end.
func (r *looping) step(ctx context.Context, attempt int) (status int, err error) {
	j, err := r.look(ctx)
	if err != nil {
		return 0, err
	}
	m, _ := parseMarker(j.comment)
	good := minus(j.nodes, m.without)
	if len(good) < r.Nodes {
		return 0, fmt.Errorf("%w: %d of %d, a step takes %d; without %s", ErrNoNodes, len(good), len(j.nodes), r.Nodes, strings.Join(m.without, ", "))
	}
	args := []string{
		"--job-name=" + StepPrefix + strconv.Itoa(attempt), "--nodes=" + strconv.Itoa(r.Nodes),
		// A step of an earlier attempt holds its nodes until all of them have said that it is
		// over, which a dead one does not.
		"--overlap",
		"--kill-on-bad-exit=0", "--wait=" + strconv.Itoa(int(r.Hold.Seconds())),
	}
	if out := minus(j.nodes, good); len(out) > 0 {
		args = append(args, "--exclude="+strings.Join(out, ","))
	}
	cmd := exec.Command(r.SrunPath, append(args, r.Srun...)...)
	n := strconv.Itoa(attempt)
	token := fence.New(attempt, r.generation)
	r.generation = token.Generation
	// What tells srun of the whole allocation, spares included.
	cmd.Env = slices.DeleteFunc(os.Environ(), func(kv string) bool {
		name, _, _ := strings.Cut(kv, "=")
		return slices.Contains(ofAllocation, name)
	})
	cmd.Env = append(cmd.Env, "LOCKSTEP_RESTART_COUNT="+n, "SLURM_RESTART_COUNT="+n, fence.Env+"="+token.String())
	return r.srun(ctx, cmd)
}

var ofAllocation = []string{"SLURM_NTASKS", "SLURM_NPROCS", "SLURM_NNODES", "SLURM_JOB_NUM_NODES", "SLURM_TASKS_PER_NODE"}

// srun runs it, passes ctx's end on, and does not wait for nodes that will not answer.
func (r *looping) srun(ctx context.Context, cmd *exec.Cmd) (int, error) {
	w := &watched{w: r.Stderr, aborted: make(chan struct{})}
	if r.Stdout != nil {
		cmd.Stdout = r.Stdout
	}
	cmd.Stderr, cmd.WaitDelay = w, time.Second
	// Of a group of its own: who signals the batch script's group reaches the loop, which
	// passes on what is meant for the step.
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGTERM}
	started, ended := make(chan error, 1), make(chan error, 1)
	go func() {
		runtime.LockOSThread() // Pdeathsig means the thread that starts it, which ends with this goroutine
		err := cmd.Start()
		started <- err
		if err == nil {
			ended <- cmd.Wait()
		}
	}()
	if err := <-started; err != nil {
		return 0, fmt.Errorf("slurm: %w", err)
	}
	aborted, stop := w.aborted, ctx.Done()
	var giveUp <-chan time.Time
	for {
		select {
		case err := <-ended:
			return exitStatus(cmd, err)
		case <-stop:
			stop = nil
			_ = cmd.Process.Signal(syscall.SIGTERM)
			giveUp = time.After(srunPatience)
		case <-aborted:
			// The tasks have been killed where they can be: what srun waits for is a node
			// that does not answer, as long as KillWait.
			aborted = nil
			giveUp = time.After(srunPatience)
		case <-giveUp:
			_ = cmd.Process.Kill()
		}
	}
}

// srunPatience is how long srun may take once its step is over.
const srunPatience = time.Second

func exitStatus(cmd *exec.Cmd, err error) (int, error) {
	var exit *exec.ExitError
	switch {
	case err == nil:
		return 0, nil
	case errors.As(err, &exit) && exit.ExitCode() > 0:
		return exit.ExitCode(), nil
	case errors.As(err, &exit):
		if ws, ok := exit.Sys().(syscall.WaitStatus); ok && ws.Signaled() {
			return 128 + int(ws.Signal()), nil
		}
		return 1, nil
	case errors.Is(err, exec.ErrWaitDelay): // somebody has kept its standard error open
		return max(cmd.ProcessState.ExitCode(), 0), nil
	}
	return 0, fmt.Errorf("slurm: srun: %w", err)
}

// decision waits for the remediator's word about an attempt that has failed.
func (r *looping) decision(ctx context.Context, attempt int) (told bool, err error) {
	left, waits := r.Decide, false // not counting what slurmctld is away: nobody can say anything then
	for ; ; left -= r.tick {
		j, err := r.look(ctx)
		if err != nil {
			return false, err
		}
		if m, ok := parseMarker(j.comment); ok && m.attempt == attempt {
			switch {
			case m.do == doGo:
				return true, nil
			case m.do == doWait && !waits:
				waits, left = true, r.Patience
			}
		}
		if left <= 0 {
			if waits {
				r.Logger.Warn("the remediator has not said go, going on without", "attempt", attempt, "waited", r.Patience)
			}
			return waits, nil
		}
		if err := wait(ctx, r.tick); err != nil {
			return false, err
		}
	}
}

// watched passes standard error on and sees srun say that its step is over.
type watched struct {
	w       io.Writer
	tail    []byte
	once    sync.Once
	aborted chan struct{}
}

var abortedText = []byte("srun: Job step aborted")

func (w *watched) Write(p []byte) (int, error) {
	w.tail = append(w.tail, p...)
	if bytes.Contains(w.tail, abortedText) {
		w.once.Do(func() { close(w.aborted) })
	}
	if keep := len(abortedText) - 1; len(w.tail) > keep {
		w.tail = slices.Clone(w.tail[len(w.tail)-keep:])
	}
	return w.w.Write(p)
}
