package process

import (
	"cmp"
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/lockstep-ccl/lockstep/fence"
	"github.com/lockstep-ccl/lockstep/internal/statedir"
)

// Options of a Supervisor.
type Options struct {
	Job     string
	Command []string
	Ranks   int // processes
	Spares  int // further slots that stand by for excluded ones
	// Nodes spreads the ranks over so many logical nodes, in blocks: ranks of
	// different nodes talk TCP, and each node has a runtime directory of its own.
	Nodes      int
	RuntimeDir func(node string) string
	Node       func(i int) string // name of logical node i
	Env        []string           // further environment, KEY=VALUE
	// Devices are the GPUs of the slots, as CUDA_VISIBLE_DEVICES names them: a rank that is moved to
	// another slot then computes on another one. None, or one for each slot, spares included.
	Devices []string
	// Rendezvous returns the environment by which an attempt's ranks meet; each attempt needs its own.
	Rendezvous func() (env []string, err error)

	Dir     string // supervisor's own state: control socket, secret, number of the last attempt, log files; 0700, one supervisor at a time
	Control bool   // serve the control socket at Dir/control.sock

	// MaxRestarts bounds restarts that nobody asked for (a rank failed and no
	// decision came within Hold). Hold is 0 without a remediator.
	MaxRestarts int
	Hold        time.Duration
	Grace       time.Duration // SIGTERM → SIGKILL
	// OnRestart runs before each restart (a checkpoint check, a cache clean-up), with
	// LOCKSTEP_RESTART_COUNT set to the coming attempt. Its failure fails the job,
	// and so does running for over a minute.
	OnRestart []string
	// BeforeStart, when set, is called before an attempt's processes are started,
	// when those of former attempts are gone.
	BeforeStart func(attempt int)

	// OnExit, when set, is called when a rank's process has been reaped, before anything is
	// done about it; from other goroutines, of several ranks at once. It is to be quick.
	OnExit func(Exit)

	Output io.Writer // the ranks' lines, prefixed; nil: only the log files
	Logger *slog.Logger
	// OnEvent is told of what happens; it must not block.
	OnEvent func(Event)
}

// Event is something that happened to the job.
type Event struct {
	At      time.Time
	Kind    string // started, rank_exited, holding, restarting, done, failed, stopped
	Attempt int
	Rank    int // -1 when it does not apply
	PID     int
	Detail  string
}

// Exit is how a rank's process ended.
type Exit struct {
	Attempt, Rank int
	Node          string
	PID           int
	Code          int            // exit status, 0 when a signal ended it
	Signal        syscall.Signal // 0 when none did
	Asked         bool           // this supervisor had told it to end
	Started, At   time.Time      // with monotonic readings
}

// Supervisor runs one job, once. Its methods are safe for concurrent use.
type Supervisor struct {
	launcher
	requests chan request

	// Run's goroutine alone uses these.
	slots   []int                   // rank → slot
	actions map[string]RestartReply // by action id, to answer repeats; kept for the job's life

	generation uint64 // of the last attempt's token

	mu     sync.Mutex
	status Status
}

type request struct {
	RestartRequest
	reply chan result
}

type result struct {
	r   RestartReply
	err error // the job has ended
}

// answer is for a request that may be nil: a restart that nobody asked for.
func (r *request) answer(res result) {
	if r != nil {
		r.reply <- res
	}
}

type exit struct {
	rank int
	err  error
}

// maxName bounds a job's name, as the flight recorder does.
const maxName = 63

// New checks the options. Run makes the state directory.
func New(o Options) (*Supervisor, error) {
	switch {
	case o.Job == "" || o.Job == "." || o.Job == ".." || len(o.Job) > maxName || strings.ContainsAny(o.Job, "/\x00"):
		return nil, fmt.Errorf("run: job %q: a job needs a name of 1 to %d bytes, without a slash", o.Job, maxName)
	case len(o.Command) == 0:
		return nil, errNoCommand
	case o.Ranks < 1 || o.Spares < 0:
		return nil, fmt.Errorf("run: %d ranks and %d spares; at least 1 and 0 are needed", o.Ranks, o.Spares)
	case o.Nodes < 1:
		o.Nodes = 1
	}
	if o.Ranks%o.Nodes != 0 {
		return nil, fmt.Errorf("run: %d ranks cannot be spread evenly over %d nodes", o.Ranks, o.Nodes)
	}
	if n := len(o.Devices); n > 0 && n < o.Ranks+o.Spares {
		return nil, fmt.Errorf("run: %d GPUs for %d slots: each slot needs one of its own, the spares too", n, o.Ranks+o.Spares)
	}
	o.Logger = cmp.Or(o.Logger, slog.New(slog.DiscardHandler))
	if o.Grace <= 0 {
		o.Grace = 5 * time.Second
	}
	dir, err := filepath.Abs(o.Dir) // for ranks that change theirs
	if err != nil {
		return nil, fmt.Errorf("run: state directory: %w", err)
	}
	o.Dir = dir
	s := &Supervisor{launcher: launcher{o: o}, requests: make(chan request), actions: map[string]RestartReply{}}
	if o.Output != nil {
		s.terminal = &terminal{w: o.Output}
	}
	for r := range o.Ranks {
		s.slots = append(s.slots, r)
	}
	s.status = Status{Job: o.Job, State: "starting", Since: time.Now(), Excluded: []int{}, Spares: []int{}}
	for i := range o.Spares {
		s.status.Spares = append(s.status.Spares, o.Ranks+i)
	}
	return s, nil
}

// ControlSocket is where the control socket is served.
func (s *Supervisor) ControlSocket() string { return filepath.Join(s.o.Dir, "control.sock") }

// Status returns the present state.
func (s *Supervisor) Status() Status {
	s.mu.Lock()
	defer s.mu.Unlock()
	st := s.status
	st.Ranks, st.Spares, st.Excluded = slices.Clone(st.Ranks), slices.Clone(st.Spares), slices.Clone(st.Excluded)
	return st
}

// Run runs the job to its end. It returns nil when every rank has exited with
// status 0, and an error when ctx ended or the job failed for good. No process
// of the job is left behind, save one that SIGKILL cannot end.
func (s *Supervisor) Run(ctx context.Context) (err error) {
	// A second supervisor would take over the control socket and the secret of the first.
	if s.dir, err = statedir.OpenPrivate(s.o.Dir); errors.Is(err, statedir.ErrLocked) {
		return fmt.Errorf("run: %w (is this job running already? else give it another --job or --dir)", err)
	} else if err != nil {
		return fmt.Errorf("run: %w", err)
	}
	defer s.dir.Close()
	secret := s.dir.Join("secret")
	if err := s.writeSecret(); err != nil {
		return err
	}
	defer os.Remove(secret)
	if s.o.Control {
		stop, err := s.serve()
		if err != nil {
			return err
		}
		defer stop()
	}
	defer func() {
		if s.terminal != nil {
			s.terminal.flush()
		}
		if err != nil {
			kind := "failed"
			if ctx.Err() != nil {
				kind = "stopped"
			}
			s.setState(kind)
			s.event(Event{Kind: kind, Attempt: s.Status().Attempt, Rank: -1, Detail: err.Error()})
		}
	}()
	var asked *request // for the restart that leads to the next attempt
	detail, restarts := "", 0
	for n := s.nextAttempt(); ; n++ {
		a, err := s.start(ctx, n, secret)
		if err != nil {
			asked.answer(result{err: err})
			return err
		}
		s.event(Event{Kind: "started", Attempt: n, Rank: -1})
		if asked != nil {
			reply := RestartReply{Attempt: n, At: time.Now(), Detail: fmt.Sprintf("attempt %d started%s", n, detail)}
			s.actions[asked.Action] = reply
			asked.answer(result{r: reply})
		}

		var why error
		why, asked = s.watch(ctx, a)
		again := why != nil && ctx.Err() == nil && (asked != nil || restarts < s.o.MaxRestarts)
		if again {
			s.setState("restarting")
			s.event(Event{Kind: "restarting", Attempt: n + 1, Rank: -1, Detail: why.Error()})
		}
		err = a.stop(s.o.Grace)
		switch {
		case why == nil:
			s.setState("done")
			s.event(Event{Kind: "done", Attempt: n, Rank: -1})
			return nil
		case ctx.Err() != nil:
			err = errors.Join(ctx.Err(), err)
		case !again:
			err = errors.Join(fmt.Errorf("attempt %d: %w (restarts on its own: at most %d, see --max-restarts)", n, why, s.o.MaxRestarts), err)
		case err == nil:
			err = s.hook(ctx, n+1)
		}
		if err != nil {
			asked.answer(result{err: err})
			return err
		}
		if asked == nil {
			restarts++
		} else {
			detail = s.exclude(asked.Exclude)
		}
	}
}

// watch returns when the attempt is over: nil when all ranks ended well, else why,
// with the request when it was one.
func (s *Supervisor) watch(ctx context.Context, a *attempt) (why error, asked *request) {
	var hold <-chan time.Time
	left := len(a.ranks)
	for {
		select {
		case <-ctx.Done():
			return ctx.Err(), nil
		case r := <-s.requests:
			if reply, done := s.settled(&r, a.n); done {
				r.answer(result{r: reply})
				continue
			}
			return fmt.Errorf("asked to: %s", r.Reason), &r
		case x := <-a.exits:
			s.rankExited(a, x)
			if x.err == nil {
				if left--; left == 0 {
					return nil, nil
				}
				continue
			}
			if why == nil {
				why = fmt.Errorf("rank %d: %w", x.rank, x.err)
				if s.o.Hold <= 0 {
					return why, nil
				}
				s.setState("holding")
				s.event(Event{Kind: "holding", Attempt: a.n, Rank: x.rank, Detail: fmt.Sprintf("waiting up to %v for a decision", s.o.Hold)})
				t := time.NewTimer(s.o.Hold)
				defer t.Stop()
				hold = t.C
			}
		case <-hold:
			return fmt.Errorf("%w; no decision came within %v", why, s.o.Hold), nil
		}
	}
}

// settled answers a request that changes nothing: one that was done before, or
// that is about an attempt which is over.
func (s *Supervisor) settled(r *request, running int) (RestartReply, bool) {
	reply, repeated := s.actions[r.Action]
	switch {
	case repeated:
		reply.Repeated = true
		reply.Detail += " (answered again)"
		return reply, true
	case r.Attempt != nil && *r.Attempt != running:
		return RestartReply{Attempt: running, Detail: fmt.Sprintf("nothing done: the decision was about attempt %d, attempt %d runs", *r.Attempt, running)}, true
	}
	return RestartReply{}, false
}

func (s *Supervisor) rankExited(a *attempt, x exit) {
	state := "exit status 0"
	if x.err != nil {
		state = x.err.Error()
	}
	s.mu.Lock()
	r := &s.status.Ranks[x.rank]
	r.State, r.Exit = "exited", state
	pid := r.PID
	s.mu.Unlock()
	s.event(Event{Kind: "rank_exited", Attempt: a.n, Rank: x.rank, PID: pid, Detail: state})
}

// exclude moves ranks to spare slots and says so; without a spare the rank stays.
func (s *Supervisor) exclude(ranks []int) string {
	s.mu.Lock()
	defer s.mu.Unlock()
	detail := ""
	for _, rank := range ranks {
		if rank < 0 || rank >= len(s.slots) {
			continue
		}
		if len(s.status.Spares) == 0 {
			detail += fmt.Sprintf(", rank %d stays on slot %d (no spare)", rank, s.slots[rank])
			continue
		}
		old := s.slots[rank]
		s.slots[rank], s.status.Spares = s.status.Spares[0], s.status.Spares[1:]
		s.status.Excluded = append(s.status.Excluded, old)
		detail += fmt.Sprintf(", rank %d moved from slot %d to spare slot %d", rank, old, s.slots[rank])
		if len(s.o.Devices) > 0 {
			detail += fmt.Sprintf(", from GPU %s to %s", s.o.Devices[old], s.o.Devices[s.slots[rank]])
		}
	}
	return detail
}

func (s *Supervisor) setState(state string) {
	s.mu.Lock()
	s.status.State, s.status.Since = state, time.Now()
	s.mu.Unlock()
}

func (s *Supervisor) event(e Event) {
	e.At = time.Now()
	log := s.o.Logger.With("job", s.o.Job, "attempt", e.Attempt)
	if e.Rank >= 0 {
		log = log.With("rank", e.Rank)
	}
	if e.Detail != "" {
		log = log.With("detail", e.Detail)
	}
	log.Info("job " + e.Kind)
	if s.o.OnEvent != nil {
		s.o.OnEvent(e)
	}
}

// nextAttempt is one above the last attempt that this directory has seen, also
// under a former supervisor: a decision about that one must not end this one, its
// logs are there still, and whoever has heard of it takes a lower number for the past.
func (s *Supervisor) nextAttempt() int {
	b, err := s.dir.ReadFile(attemptFile, 64)
	if errors.Is(err, os.ErrNotExist) {
		return 0
	}
	last := 0
	if err == nil {
		last, err = strconv.Atoi(strings.TrimSpace(string(b)))
	}
	if err == nil && (last < 0 || last > maxAttempt) {
		err = fmt.Errorf("%d is out of range", last)
	}
	if err != nil {
		last = s.lastLogged()
		s.o.Logger.Error("the number of the last attempt cannot be read: going on from the last one that has a log; if that is too low, stop this, and write the number into the file",
			"job", s.o.Job, "file", s.dir.Join(attemptFile), "err", err, "attempt", last+1)
	}
	return last + 1
}

// lastLogged is the last attempt of which there is a log, -1 for none.
func (s *Supervisor) lastLogged() int {
	last := -1
	logs, _ := filepath.Glob(s.dir.Join("rank*.attempt*.log")) // the pattern is well-formed
	for _, path := range logs {
		var rank, n int
		if _, err := fmt.Sscanf(filepath.Base(path), logName, &rank, &n); err == nil && n <= maxAttempt {
			last = max(last, n)
		}
	}
	return last
}

// keepAttempt writes down which attempt begins. The job matters more than its number.
func (s *Supervisor) keepAttempt(n int) {
	if err := s.dir.Replace(attemptFile, []byte(strconv.Itoa(n)+"\n")); err != nil {
		s.o.Logger.Error("cannot write down the number of this attempt", "job", s.o.Job, "attempt", n, "err", err)
	}
}

// nextToken makes an attempt's, later than all that this directory has seen, also where the
// clock was set back.
func (s *Supervisor) nextToken(n int) fence.Token {
	if s.generation == 0 {
		if b, err := s.dir.ReadFile(generationFile, 64); err == nil {
			s.generation, _ = strconv.ParseUint(strings.TrimSpace(string(b)), 10, 63) // 0: the clock says what is later
		}
	}
	t := fence.New(n, s.generation)
	s.generation = t.Generation
	if err := s.dir.Replace(generationFile, []byte(strconv.FormatUint(t.Generation, 10)+"\n")); err != nil {
		s.o.Logger.Error("cannot write down the generation of this attempt", "job", s.o.Job, "attempt", n, "err", err)
	}
	return t
}

const (
	generationFile = "generation"
	attemptFile    = "attempt"
	logName        = "rank%d.attempt%d.log"
	maxAttempt     = 1 << 20 // what is above was never counted
)

func (s *Supervisor) writeSecret() error {
	b := make([]byte, 32)
	rand.Read(b)
	if err := s.dir.Replace("secret", []byte(hex.EncodeToString(b)+"\n")); err != nil {
		return fmt.Errorf("run: secret: %w", err)
	}
	return nil
}
