package slurm

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os/user"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/lockstep-ccl/lockstep/remediation"
)

// Options of an Actuator.
type Options struct {
	// Users are whose jobs may be acted on; "*" is everybody's. Empty: this process's user alone.
	Users []string
	// Journal is a directory of this process's own.
	Journal string
	// Run runs Slurm's commands, Commands("") when nil.
	Run Runner
	// Drain drains nodes that are left out, and sets those down that do not answer: a
	// requeued job is then not held up by them. It needs an account with Slurm's
	// AdminLevel=Administrator, SlurmUser or root; without that right it is noted, and
	// the job leaves them out all the same.
	Drain bool
	// Spares names a reservation that keeps spare nodes out of others' jobs: a requeued
	// job that leaves a node out gets one of them. It needs Operator or above.
	Spares string
	// WaitForNodes requeues a job without its bad node also when no node is free to take its
	// place, and lets it wait; else it is restarted where it is.
	WaitForNodes bool
	// Fence, when set, is asked before an attempt is followed by the next one, for the node
	// of the rank to blame and those that do not answer.
	Fence remediation.Fencer
	// RequireProof acts only when it is proven that the old attempt has ended there.
	RequireProof bool
	// FenceTimeout bounds the wait for proof, 3 s by default.
	FenceTimeout time.Duration
	// LeaseWait is how much longer it waits when that proves it: until the lease of a node that
	// is not heard is over. 15 s by default.
	LeaseWait time.Duration
	Logger    *slog.Logger

	tick     time.Duration // between looks at Slurm
	patience time.Duration // with a loop
	queue    time.Duration // with a job that waits for nodes
	again    time.Duration // until what Slurm has said yes to, and not done, is asked for again
}

// client is Slurm, asked through its commands.
type client struct {
	run      Runner
	mu       sync.Mutex
	expanded map[string][]string
}

// Actuator implements remediation.Actuator. Safe for concurrent use.
type Actuator struct {
	o       Options
	c       *client
	journal *journal

	mu   sync.Mutex
	jobs map[string]*sync.Mutex // actions on one job come one after the other
}

// New opens the actuator's journal; nothing is asked of Slurm yet.
func New(o Options) (*Actuator, error) {
	if len(o.Users) == 0 {
		u, err := user.Current()
		if err != nil {
			return nil, fmt.Errorf("slurm: whose jobs to act on: %w", err)
		}
		o.Users = []string{u.Username}
	}
	for _, u := range o.Users {
		if u != "*" && !objectName.MatchString(u) {
			return nil, fmt.Errorf("slurm: %.80q is no user's name", u)
		}
	}
	if o.Spares != "" && !objectName.MatchString(o.Spares) {
		return nil, fmt.Errorf("slurm: %.80q is no reservation's name", o.Spares)
	}
	if o.Run == nil {
		o.Run = Commands("")
	}
	if o.Logger == nil {
		o.Logger = slog.New(slog.DiscardHandler)
	}
	def := func(d *time.Duration, v time.Duration) {
		if *d <= 0 {
			*d = v
		}
	}
	def(&o.FenceTimeout, 3*time.Second)
	def(&o.LeaseWait, 15*time.Second)
	def(&o.tick, 150*time.Millisecond)
	def(&o.patience, 20*time.Second)
	def(&o.queue, time.Minute)
	def(&o.again, 3*time.Second)
	j, err := openJournal(o.Journal)
	if err != nil {
		return nil, err
	}
	return &Actuator{o: o, c: &client{run: o.Run, expanded: map[string][]string{}}, journal: j, jobs: map[string]*sync.Mutex{}}, nil
}

// Close gives the journal back.
func (a *Actuator) Close() error { return a.journal.dir.Close() }

// Name implements remediation.Actuator.
func (*Actuator) Name() string { return "slurm" }

// find asks for a job by what Lockstep calls it: slurm-ID, or the name that its user gave it.
func (a *Actuator) find(ctx context.Context, name string) (*job, error) {
	if !jobLabel.MatchString(name) {
		return nil, fmt.Errorf("%w: %.80q is no name of a job", remediation.ErrGone, name)
	}
	id, ok := strings.CutPrefix(name, "slurm-")
	if !ok || !number.MatchString(id) {
		ids, err := a.c.named(ctx, name, a.o.Users)
		switch {
		case err != nil:
			return nil, err
		case len(ids) == 0:
			return nil, fmt.Errorf("%w: slurm has no job named %s of %s", remediation.ErrGone, name, strings.Join(a.o.Users, ", "))
		case len(ids) > 1:
			return nil, fmt.Errorf("slurm: %d jobs are named %s (%s): which one is meant is not known; call it slurm-ID", len(ids), name, strings.Join(ids[:2], ", "))
		}
		id = ids[0]
	}
	j, err := a.c.job(ctx, id)
	if err != nil {
		return nil, err
	}
	if !slices.Contains(a.o.Users, j.user) && !slices.Contains(a.o.Users, "*") {
		return nil, fmt.Errorf("%w: slurm job %s is user %.40q's, whose jobs are none of this actuator's", remediation.ErrGone, id, j.user)
	}
	return j, nil
}

// Inventory implements remediation.Actuator: a unit is a node.
func (a *Actuator) Inventory(ctx context.Context, name string) (remediation.Inventory, error) {
	j, err := a.find(ctx, name)
	if err != nil {
		return remediation.Inventory{}, err
	}
	if j.over() {
		return remediation.Inventory{}, fmt.Errorf("%w: slurm job %s is over (%s)", remediation.ErrGone, j.id, j.state)
	}
	steps, err := a.c.steps(ctx, j.id)
	if err != nil {
		return remediation.Inventory{}, err
	}
	layout, err := a.layout(ctx, j, steps)
	if err != nil {
		a.o.Logger.Warn("where a job's tasks run is not known", "job", name, "err", err)
	}
	return remediation.Inventory{
		Units: len(j.nodes),
		Unit:  func(rank int) string { return layout[rank] },
		UnitOn: func(rank int, node string) string {
			if n := among(j.nodes, node); n != "" {
				return n
			}
			return layout[rank]
		},
	}, nil
}

// layout maps the ranks of the job's youngest step to nodes.
func (a *Actuator) layout(ctx context.Context, j *job, steps []step) (map[int]string, error) {
	if j.state != "RUNNING" {
		return nil, nil
	}
	if len(steps) > 0 {
		return a.c.layout(ctx, steps[len(steps)-1].id)
	}
	id, err := a.c.lastStep(ctx, j.id)
	if err != nil || id == "" {
		return nil, err
	}
	return a.c.layout(ctx, id)
}

// among finds a node that an agent has named, by its full name or its first label.
func among(nodes []string, node string) string {
	if slices.Contains(nodes, node) {
		return node
	}
	short, _, dotted := strings.Cut(node, ".")
	if dotted && slices.Contains(nodes, short) {
		return short
	}
	return ""
}

// Act implements remediation.Actuator.
func (a *Actuator) Act(ctx context.Context, act remediation.Action) (remediation.Answer, error) {
	if !actionID.MatchString(act.ID) {
		return remediation.Answer{}, fmt.Errorf("slurm: %.80q is no action's id", act.ID)
	}
	if act.Kind != remediation.ActionRestart && act.Kind != remediation.ActionExclude {
		return remediation.Answer{}, fmt.Errorf("slurm actuator cannot %q", act.Kind)
	}
	defer a.hold(act.Job)()
	e, known := a.journal.get(act.ID)
	switch {
	case known && e.Job != act.Job:
		return remediation.Answer{}, fmt.Errorf("slurm: action %s is of job %s, not of %.80q", act.ID, e.Job, act.Job)
	case known && e.Done:
		return e.answer(), nil
	case !known:
		var over string
		var err error
		if e, over, err = a.begin(ctx, act); err != nil {
			return remediation.Answer{}, err
		}
		if over != "" {
			return remediation.Answer{Detail: over}, nil
		}
		if err := a.journal.put(e); err != nil {
			return remediation.Answer{}, err
		}
	}
	if err := a.carryOut(ctx, e); err != nil {
		return remediation.Answer{}, err
	}
	return e.answer(), nil
}

func (a *Actuator) carryOut(ctx context.Context, e *entry) error {
	if a.o.RequireProof && !e.Go {
		if proven, how := a.fence(ctx, e); !proven {
			return fmt.Errorf("slurm: job %s: it is not proven that attempt %d has ended on %s (%s), and proof is required", e.ID, e.Attempt, e.Culprit, how)
		}
	}
	for _, n := range e.Leave {
		a.drain(ctx, e, n)
	}
	if e.InPlace {
		err := a.inPlace(ctx, e)
		if !errors.Is(err, errNoLoop) {
			return err
		}
		e.InPlace = false
		e.note("%v, requeued", err)
		if err := a.journal.put(e); err != nil {
			return err
		}
	}
	return a.requeue(ctx, e)
}

// hold keeps other actions off a job.
func (a *Actuator) hold(name string) (release func()) {
	a.mu.Lock()
	l := a.jobs[name]
	if l == nil {
		if len(a.jobs) >= maxEntries {
			clear(a.jobs) // at worst two actions of one job meet, and each looks before it acts
		}
		l = &sync.Mutex{}
		a.jobs[name] = l
	}
	a.mu.Unlock()
	l.Lock()
	return l.Unlock
}

// begin looks at a job and says what is to be done about it; over is why nothing is.
func (a *Actuator) begin(ctx context.Context, act remediation.Action) (e *entry, over string, err error) {
	j, err := a.find(ctx, act.Job)
	if err != nil {
		return nil, "", err
	}
	if j.over() {
		return nil, "", fmt.Errorf("%w: slurm job %s is over (%s)", remediation.ErrGone, j.id, j.state)
	}
	steps, err := a.c.steps(ctx, j.id)
	if err != nil {
		return nil, "", err
	}
	m, loop := parseMarker(j.comment)
	if !loop && len(steps) > 0 { // a slurmctld that died has forgotten it
		m, loop = marker{do: doNothing, attempt: -1, nodes: len(steps[len(steps)-1].nodes)}, true
	}
	e = &entry{
		Action: act.ID, Job: act.Job, ID: j.id, Began: time.Now().UTC(), Reason: act.Reason, Restarts: j.restarts, InPlace: loop && j.state == "RUNNING",
		Nodes: m.nodes,
	}
	e.Attempt, over = current(act, j, steps, m, loop)
	if over != "" {
		return nil, over, nil
	}
	if !e.InPlace && j.state != "RUNNING" && act.Attempt != nil && j.restarts > *act.Attempt {
		e.Restarts = j.restarts - 1 // Slurm has requeued it by itself
	}
	e.Lost = act.Cause == nodeLost
	layout, lerr := a.layout(ctx, j, steps)
	// What the breakers have allowed, what the rank's agent has told, what Slurm says.
	if e.Culprit = cmp.Or(among(j.nodes, act.Unit), among(j.nodes, act.Node)); e.Culprit == "" && act.Rank >= 0 {
		e.Culprit = layout[act.Rank]
	}
	if act.Kind == remediation.ActionExclude {
		switch {
		case e.Culprit == "" && lerr != nil && !errors.Is(lerr, ErrDenied):
			return nil, "", lerr
		case e.Culprit == "":
			e.note("which node rank %d is on is not known, none is left out", act.Rank)
			a.o.Logger.Warn("which node to leave out is not known", "job", act.Job, "rank", act.Rank, "node", act.Node, "err", lerr)
		default:
			e.Leave = []string{e.Culprit}
		}
	}
	if len(e.Leave) == 0 && e.Culprit != "" && a.dead(ctx, e, j) {
		e.Leave = []string{e.Culprit} // to start there again would be to wait for it
		e.note("%s does not answer and is left out", e.Culprit)
	}
	return e, "", a.place(ctx, e, j, m)
}

// nodeLost is a verdict's reason: the node's agent is not heard any more.
const nodeLost = "node_lost"

// current is the attempt that a job is in, and why the action is about an earlier one.
func current(act remediation.Action, j *job, steps []step, m marker, loop bool) (attempt int, over string) {
	attempt = j.restarts
	if loop {
		attempt = j.restarts * attemptsPerAllocation
		if m.do == doGo && m.attempt >= attempt {
			attempt = m.attempt + 1
		}
		if len(steps) > 0 {
			attempt = steps[len(steps)-1].attempt
		}
	}
	switch {
	case act.Attempt == nil, *act.Attempt == attempt:
	case loop && *act.Attempt < attempt,
		// Launchers within a step count for themselves, so that a number below the job's
		// may be of now; but not when the job has just been restarted.
		!loop && *act.Attempt < attempt && j.state == "RUNNING" && time.Since(j.started) < settle:
		return 0, fmt.Sprintf("attempt %d is over: slurm job %s is in attempt %d", *act.Attempt, j.id, attempt)
	default:
		return *act.Attempt, ""
	}
	return attempt, ""
}

// settle is how long after a start agents have told of the new attempt.
const settle = 30 * time.Second

// place decides where the next attempt runs when nodes are to be left out.
func (a *Actuator) place(ctx context.Context, e *entry, j *job, m marker) error {
	if len(e.Leave) == 0 {
		return nil
	}
	if e.InPlace && len(minus(j.nodes, union(m.without, e.Leave))) >= m.nodes {
		return nil
	}
	// Nodes of a slurmctld that has just started are in no state yet, and what has just ended
	// somewhere is still completing.
	var free []string
	for deadline := time.Now().Add(2 * a.o.again); ; {
		var err error
		if free, err = a.c.free(ctx, j.partition, a.o.Spares); err != nil {
			return err
		}
		free = minus(free, union(e.Leave, m.without))
		if len(free) > 0 || a.o.WaitForNodes || time.Now().After(deadline) {
			break
		}
		if err := wait(ctx, a.o.tick); err != nil {
			return err
		}
	}
	if len(free) == 0 && !a.o.WaitForNodes {
		e.note("no node is free to take the place of %s, restarted with it", strings.Join(e.Leave, ", "))
		e.Leave = nil
		return nil
	}
	if e.InPlace {
		e.note("no spare is left in the allocation, requeued")
		e.InPlace = false
		e.Leave = union(e.Leave, m.without)
	}
	return nil
}
