package process

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/lockstep-ccl/lockstep/fence"
	"github.com/lockstep-ccl/lockstep/internal/statedir"
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

// launcher starts and ends the processes of ranks on one machine.
type launcher struct {
	o        Options
	dir      *statedir.Dir // while Run runs
	terminal *terminal     // nil: the ranks' output goes to their logs alone
}

// assignment is one rank's numbers, slot and node in an attempt.
type assignment struct {
	rank, local, perNode int
	group                int // of its node among the nodes
	slot                 int
	node                 string
	devices              []string // that its node's ranks see, in the order of their local ranks; nil: what the environment says
}

// attemptSpec is what one attempt's processes on this machine are started with.
type attemptSpec struct {
	n, world      int
	token, secret string
	rendezvous    []string // environment by which the attempt's ranks meet
	ranks         []assignment
}

// start starts the processes, all or none.
func (l *launcher) start(m attemptSpec) (*attempt, error) {
	a := &attempt{n: m.n, exits: make(chan exit, len(m.ranks))}
	for _, at := range m.ranks {
		rank, local := strconv.Itoa(at.rank), strconv.Itoa(at.local)
		world, count := strconv.Itoa(m.world), strconv.Itoa(m.n)
		cmd := exec.Command(l.o.Command[0], l.o.Command[1:]...)
		cmd.Env = slices.Concat(os.Environ(), l.o.Env, m.rendezvous, []string{
			"RANK=" + rank, "WORLD_SIZE=" + world, "LOCAL_RANK=" + local,
			"LOCAL_WORLD_SIZE=" + strconv.Itoa(at.perNode), "GROUP_RANK=" + strconv.Itoa(at.group),
			"TORCHELASTIC_RESTART_COUNT=" + count,
			"LOCKSTEP_RANK=" + rank, "LOCKSTEP_WORLD_SIZE=" + world, "LOCKSTEP_LOCAL_RANK=" + local,
			"LOCKSTEP_JOB=" + l.o.Job, "LOCKSTEP_NODE=" + at.node, "LOCKSTEP_SLOT=" + strconv.Itoa(at.slot),
			"LOCKSTEP_RESTART_COUNT=" + count, secretVar + "=" + m.secret, fence.Env + "=" + m.token,
			"LOCKSTEP_RUNTIME_DIR=" + l.o.RuntimeDir(at.node),
		})
		if at.devices != nil {
			cmd.Env = append(cmd.Env, visibleDevices+"="+strings.Join(at.devices, ","))
		}
		c, err := l.startRank(a, at.rank, at.node, cmd)
		if err != nil {
			return nil, errors.Join(fmt.Errorf("run: rank %d: %w", at.rank, err), a.stop(0))
		}
		a.ranks = append(a.ranks, c)
	}
	return a, nil
}

func (s *Supervisor) start(ctx context.Context, n int, secret string) (*attempt, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	if !s.clear(ctx, secret) {
		if err := ctx.Err(); err != nil {
			return nil, err
		}
		s.o.Logger.Error("what former attempts left running is still there, and may hold their devices", "job", s.o.Job, "attempt", n, "after", killPatience)
	}
	s.keepAttempt(n)
	if s.o.BeforeStart != nil {
		s.o.BeforeStart(n)
	}
	rendezvous, err := s.o.Rendezvous()
	if err != nil {
		return nil, fmt.Errorf("run: %w", err)
	}
	m := attemptSpec{n: n, world: s.o.Ranks, token: s.nextToken(n).String(), secret: secret, rendezvous: rendezvous}
	perNode := s.o.Ranks / s.o.Nodes
	for r := range s.o.Ranks {
		m.ranks = append(m.ranks, assignment{
			rank: r, local: r % perNode, perNode: perNode, group: r / perNode, slot: s.slots[r],
			node: s.o.Node(r / perNode), devices: s.devices(r/perNode*perNode, perNode),
		})
	}
	a, err := s.launcher.start(m)
	if err != nil {
		return nil, err
	}
	s.mu.Lock()
	s.status.Attempt, s.status.Ranks = n, statuses(a, m.ranks)
	s.mu.Unlock()
	s.setState("running")
	return a, nil
}

func statuses(a *attempt, ranks []assignment) (list []RankStatus) {
	for i, at := range ranks {
		list = append(list, RankStatus{Rank: at.rank, Slot: at.slot, Node: at.node, PID: a.ranks[i].pid, State: "running"})
	}
	return list
}

// devices has a node's ranks see the GPUs of their slots, in the order of their local ranks: what
// takes the GPU of its LOCAL_RANK, as all do, takes its slot's, and the others' are there to be reached.
func (s *Supervisor) devices(first, n int) (list []string) {
	if len(s.o.Devices) == 0 {
		return nil
	}
	for _, slot := range s.slots[first : first+n] {
		list = append(list, s.o.Devices[slot])
	}
	return list
}

const visibleDevices = "CUDA_VISIBLE_DEVICES"

// startRank starts one process with its output going to its log file, and
// through a pipe to the terminal too when there is one. The pipe is ours, not
// exec's: a grandchild that keeps it open must not delay the news of an exit.
func (l *launcher) startRank(a *attempt, rank int, node string, cmd *exec.Cmd) (*child, error) {
	log, err := l.create(fmt.Sprintf(logName, rank, a.n))
	if err != nil {
		return nil, fmt.Errorf("log file: %w", err)
	}
	defer func() { log.Close() }() // nil when the copier has it
	exited := l.exited(a, rank, node, time.Now())
	if l.terminal == nil {
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
	l.terminal.lines.Go(func() {
		defer read.Close()
		defer file.Close()
		l.terminal.copy(file, rank, &drained{File: read})
	})
	return c, nil
}

// create makes a log file.
func (l *launcher) create(name string) (*os.File, error) {
	return os.OpenFile(l.dir.Join(name), os.O_CREATE|os.O_WRONLY|os.O_TRUNC|syscall.O_NOFOLLOW, 0o600)
}

// exited is called when a rank's process has been reaped. The word of it goes out before
// anything is done about it.
func (l *launcher) exited(a *attempt, rank int, node string, started time.Time) func(ended) {
	return func(e ended) {
		if l.o.OnExit != nil {
			x := Exit{Attempt: a.n, Rank: rank, Node: node, Started: started, At: e.at, Asked: e.asked}
			x.PID, x.Code = e.pid, e.status.ExitStatus()
			if e.status.Signaled() {
				x.Code, x.Signal = 0, e.status.Signal()
			}
			l.o.OnExit(x)
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
func (l *launcher) hook(ctx context.Context, attempt int) error {
	if len(l.o.OnRestart) == 0 {
		return nil
	}
	name := fmt.Sprintf("restart-hook.attempt%d.log", attempt)
	fail := func(err error) error {
		return fmt.Errorf("run: restart hook before attempt %d: %w (its output is in %s)", attempt, err, l.dir.Join(name))
	}
	f, err := l.create(name)
	if err != nil {
		return fail(err)
	}
	defer f.Close()
	cmd := exec.Command(l.o.OnRestart[0], l.o.OnRestart[1:]...)
	cmd.Env = slices.Concat(os.Environ(), l.o.Env, []string{"LOCKSTEP_JOB=" + l.o.Job, "LOCKSTEP_RESTART_COUNT=" + strconv.Itoa(attempt)})
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
