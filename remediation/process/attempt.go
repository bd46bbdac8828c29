package process

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"syscall"
	"time"

	"github.com/lockstep-ccl/lockstep/fence"
)

// attempt is one set of rank processes.
type attempt struct {
	n     int
	ranks []*child
	exits chan exit
}

// secretVar tells a rank where the secret is.
const secretVar = "LOCKSTEP_SECRET_FILE"

// killPatience bounds the wait for a process to go after SIGKILL: one in
// uninterruptible sleep (a dead NFS server, a hung GPU driver) may never.
const killPatience = 15 * time.Second

func (s *Supervisor) start(ctx context.Context, n int, secret string) (*attempt, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	s.sweep(secret)
	s.keepAttempt(n)
	if s.o.BeforeStart != nil {
		s.o.BeforeStart(n)
	}
	meet, err := s.o.Rendezvous()
	if err != nil {
		return nil, fmt.Errorf("run: %w", err)
	}
	token := s.nextToken(n).String()
	a := &attempt{n: n, exits: make(chan exit, s.o.Ranks)}
	ranks := make([]RankStatus, s.o.Ranks)
	for r := range s.o.Ranks {
		perNode := s.o.Ranks / s.o.Nodes
		node := s.o.Node(r / perNode)
		rank, local := strconv.Itoa(r), strconv.Itoa(r%perNode)
		world, count := strconv.Itoa(s.o.Ranks), strconv.Itoa(n)
		cmd := exec.Command(s.o.Command[0], s.o.Command[1:]...)
		cmd.Env = slices.Concat(os.Environ(), s.o.Env, meet, []string{
			"RANK=" + rank, "WORLD_SIZE=" + world, "LOCAL_RANK=" + local,
			"LOCAL_WORLD_SIZE=" + strconv.Itoa(perNode), "GROUP_RANK=" + strconv.Itoa(r/perNode),
			"TORCHELASTIC_RESTART_COUNT=" + count,
			"LOCKSTEP_RANK=" + rank, "LOCKSTEP_WORLD_SIZE=" + world, "LOCKSTEP_LOCAL_RANK=" + local,
			"LOCKSTEP_JOB=" + s.o.Job, "LOCKSTEP_NODE=" + node, "LOCKSTEP_SLOT=" + strconv.Itoa(s.slots[r]),
			"LOCKSTEP_RESTART_COUNT=" + count, secretVar + "=" + secret, fence.Env + "=" + token,
			"LOCKSTEP_RUNTIME_DIR=" + s.o.RuntimeDir(node),
		})
		c, err := s.startRank(a, r, node, cmd)
		if err != nil {
			return nil, errors.Join(fmt.Errorf("run: rank %d: %w", r, err), a.stop(0))
		}
		a.ranks = append(a.ranks, c)
		ranks[r] = RankStatus{Rank: r, Slot: s.slots[r], Node: node, PID: c.pid, State: "running"}
	}
	s.mu.Lock()
	s.status.Attempt, s.status.Ranks = n, ranks
	s.mu.Unlock()
	s.setState("running")
	return a, nil
}

// startRank starts one process with its output going to its log file, and
// through a pipe to the terminal too when there is one. The pipe is ours, not
// exec's: a grandchild that keeps it open must not delay the news of an exit.
func (s *Supervisor) startRank(a *attempt, rank int, node string, cmd *exec.Cmd) (*child, error) {
	log, err := s.create(fmt.Sprintf(logName, rank, a.n))
	if err != nil {
		return nil, fmt.Errorf("log file: %w", err)
	}
	defer func() { log.Close() }() // nil when the copier has it
	exited := s.exited(a, rank, node, time.Now())
	if s.terminal == nil {
		cmd.Stdout, cmd.Stderr = log, log
		return startChild(cmd, exited)
	}
	read, write, err := os.Pipe()
	if err != nil {
		return nil, fmt.Errorf("output: %w", err)
	}
	defer write.Close()
	cmd.Stdout, cmd.Stderr = write, write
	c, err := startChild(cmd, func(e ended) {
		_ = read.SetReadDeadline(time.Now().Add(drainTime))
		exited(e)
	})
	if err != nil {
		read.Close()
		return nil, err
	}
	file := log
	log = nil
	s.terminal.lines.Go(func() {
		defer read.Close()
		defer file.Close()
		s.terminal.copy(file, rank, read)
	})
	return c, nil
}

// create makes a log file.
func (s *Supervisor) create(name string) (*os.File, error) {
	return os.OpenFile(s.dir.Join(name), os.O_CREATE|os.O_WRONLY|os.O_TRUNC|syscall.O_NOFOLLOW, 0o600)
}

// exited is called when a rank's process has been reaped. The word of it goes out before
// anything is done about it.
func (s *Supervisor) exited(a *attempt, rank int, node string, started time.Time) func(ended) {
	return func(e ended) {
		if s.o.OnExit != nil {
			x := Exit{Attempt: a.n, Rank: rank, Node: node, Started: started, At: e.at, Asked: e.asked}
			x.PID, x.Code = e.pid, e.status.ExitStatus()
			if e.status.Signaled() {
				x.Code, x.Signal = 0, e.status.Signal()
			}
			s.o.OnExit(x)
		}
		a.exits <- exit{rank, e.err}
	}
}

// stop ends all processes of the attempt: SIGTERM, after grace SIGKILL. A
// stopped process cannot act on SIGTERM, so it gets SIGCONT with it.
func (a *attempt) stop(grace time.Duration) error {
	signal := func(sig syscall.Signal) {
		for _, c := range a.ranks {
			c.signal(sig)
		}
	}
	if grace > 0 {
		signal(syscall.SIGTERM)
		signal(syscall.SIGCONT)
		a.wait(grace)
	}
	signal(syscall.SIGKILL)
	if stuck := a.wait(killPatience); stuck != nil {
		return fmt.Errorf("run: process %d is still there %v after SIGKILL, in uninterruptible sleep; see /proc/%d/stack", stuck.pid, killPatience, stuck.pid)
	}
	return nil
}

// wait returns a rank that has not ended within d, nil when all have.
func (a *attempt) wait(d time.Duration) *child {
	deadline := time.NewTimer(d)
	defer deadline.Stop()
	for _, c := range a.ranks {
		select {
		case <-c.gone:
		case <-deadline.C:
			return c
		}
	}
	return nil
}

// hook runs the restart hook, its output in a file of its own.
func (s *Supervisor) hook(ctx context.Context, attempt int) error {
	if len(s.o.OnRestart) == 0 {
		return nil
	}
	name := fmt.Sprintf("restart-hook.attempt%d.log", attempt)
	fail := func(err error) error {
		return fmt.Errorf("run: restart hook before attempt %d: %w (its output is in %s)", attempt, err, s.dir.Join(name))
	}
	f, err := s.create(name)
	if err != nil {
		return fail(err)
	}
	defer f.Close()
	cmd := exec.Command(s.o.OnRestart[0], s.o.OnRestart[1:]...)
	cmd.Env = slices.Concat(os.Environ(), s.o.Env, []string{"LOCKSTEP_JOB=" + s.o.Job, "LOCKSTEP_RESTART_COUNT=" + strconv.Itoa(attempt)})
	cmd.Stdout, cmd.Stderr = f, f
	done := make(chan error, 1)
	c, err := startChild(cmd, func(e ended) { done <- e.err })
	if err != nil {
		return fail(err)
	}
	ctx, cancel := context.WithTimeout(ctx, hookTimeout)
	defer cancel()
	select {
	case err = <-done:
	case <-ctx.Done():
		c.signal(syscall.SIGKILL)
		err = ctx.Err()
		select {
		case <-c.gone:
		case <-time.After(killPatience):
		}
	}
	if err != nil {
		return fail(err)
	}
	return nil
}

const hookTimeout = time.Minute
