package process

import (
	"bufio"
	"context"
	"crypto/rand"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"sync"
	"syscall"
	"time"
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
	// CommID makes the unique id by which an attempt's ranks meet; each attempt needs its own.
	CommID func() (string, error)

	Dir     string // supervisor's own state: control socket, secret, log files; made 0700
	Control bool   // serve the control socket at Dir/control.sock

	// MaxRestarts bounds restarts that nobody asked for (a rank failed and no
	// decision came within Hold). Hold is 0 without a remediator.
	MaxRestarts int
	Hold        time.Duration
	Grace       time.Duration // SIGTERM → SIGKILL
	// OnRestart runs before each restart (a checkpoint check, a cache clean-up), with
	// LOCKSTEP_RESTART_COUNT set to the coming attempt. Its failure fails the job.
	OnRestart []string

	Output io.Writer // the ranks' lines, prefixed; nil: only the log files
	Logger *slog.Logger
	// OnEvent is told of what happens; it must not block.
	OnEvent func(Event)
}

// Event is something that happened to the job.
type Event struct {
	At      time.Time
	Kind    string // started, rank_exited, holding, restarting, done, failed
	Attempt int
	Rank    int // -1 when it does not apply
	PID     int
	Detail  string
}

// Supervisor runs one job. Its methods are safe for concurrent use.
type Supervisor struct {
	o        Options
	requests chan request

	mu      sync.Mutex
	status  Status
	slots   []int          // rank → slot
	actions map[string]int // action id → attempt it led to; kept for the job's life
}

type request struct {
	RestartRequest
	reply chan result
}

type result struct {
	r   RestartReply
	err error
}

type exit struct {
	rank    int
	attempt int
	err     error
}

// New checks the options and makes the state directory.
func New(o Options) (*Supervisor, error) {
	switch {
	case o.Job == "":
		return nil, errors.New("run: the job needs a name")
	case len(o.Command) == 0:
		return nil, errors.New("run: no command; write it after --, as in `lockstep run --ranks 8 -- python train.py`")
	case o.Ranks < 1 || o.Spares < 0:
		return nil, fmt.Errorf("run: %d ranks and %d spares; at least 1 and 0 are needed", o.Ranks, o.Spares)
	case o.Nodes < 1:
		o.Nodes = 1
	}
	if o.Ranks%o.Nodes != 0 {
		return nil, fmt.Errorf("run: %d ranks cannot be spread evenly over %d nodes", o.Ranks, o.Nodes)
	}
	if o.Logger == nil {
		o.Logger = slog.New(slog.DiscardHandler)
	}
	if o.Grace <= 0 {
		o.Grace = 5 * time.Second
	}
	if err := os.MkdirAll(o.Dir, 0o700); err != nil {
		return nil, fmt.Errorf("run: state directory: %w", err)
	}
	if o.Output != nil {
		o.Output = &lineWriter{w: o.Output}
	}
	s := &Supervisor{o: o, requests: make(chan request), actions: map[string]int{}}
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
// of the job is left behind.
func (s *Supervisor) Run(ctx context.Context) error {
	secret := filepath.Join(s.o.Dir, "secret")
	if err := writeSecret(secret); err != nil {
		return err
	}
	if s.o.Control {
		stop, err := s.serve()
		if err != nil {
			return err
		}
		defer stop()
	}
	restarts := 0
	for attempt := 0; ; attempt++ {
		a, err := s.start(ctx, attempt, secret)
		if err != nil {
			s.setState("failed")
			return err
		}
		s.event(Event{Kind: "started", Attempt: attempt, Rank: -1})
		why, asked := s.watch(ctx, a)
		if why == nil {
			a.stop(s.o.Grace)
			s.setState("done")
			s.event(Event{Kind: "done", Attempt: attempt, Rank: -1})
			return nil
		}
		s.setState("restarting")
		if ctx.Err() == nil && (asked != nil || restarts < s.o.MaxRestarts) {
			s.event(Event{Kind: "restarting", Attempt: attempt + 1, Rank: -1, Detail: why.Error()})
		}
		a.stop(s.o.Grace)
		if ctx.Err() != nil {
			s.setState("failed")
			return ctx.Err()
		}
		if asked == nil {
			if restarts++; restarts > s.o.MaxRestarts {
				s.setState("failed")
				s.event(Event{Kind: "failed", Attempt: attempt, Rank: -1, Detail: why.Error()})
				return fmt.Errorf("attempt %d: %w (restarts on its own: at most %d, see --max-restarts)", attempt, why, s.o.MaxRestarts)
			}
		}
		detail := s.exclude(asked)
		if err := s.hook(ctx, attempt+1); err != nil {
			s.setState("failed")
			if asked != nil {
				asked.reply <- result{err: err}
			}
			return err
		}
		if asked != nil {
			// Answered once the decision cannot get lost any more; start comes next
			// and its failure ends the job, which the status shows.
			s.mu.Lock()
			s.actions[asked.Action] = attempt + 1
			s.mu.Unlock()
			asked.reply <- result{r: RestartReply{Attempt: attempt + 1, Detail: fmt.Sprintf("attempt %d started%s", attempt+1, detail)}}
		}
	}
}

// watch returns when the attempt is over: nil when all ranks ended well, else why,
// with the request when it was one.
func (s *Supervisor) watch(ctx context.Context, a *attempt) (why error, asked *request) {
	var hold <-chan time.Time
	left := len(a.cmds)
	for {
		select {
		case <-ctx.Done():
			return ctx.Err(), nil
		case r := <-s.requests:
			s.mu.Lock()
			done, repeated := s.actions[r.Action]
			s.mu.Unlock()
			if !repeated && r.Attempt != nil && *r.Attempt != a.n {
				r.reply <- result{r: RestartReply{Attempt: a.n, Detail: fmt.Sprintf("nothing done: the decision was about attempt %d, attempt %d runs", *r.Attempt, a.n)}}
				continue
			}
			if repeated {
				r.reply <- result{r: RestartReply{Attempt: done, Repeated: true, Detail: fmt.Sprintf("attempt %d started (answered again)", done)}}
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

// attempt is one set of processes.
type attempt struct {
	n     int
	cmds  []*exec.Cmd
	done  []chan struct{} // closed when the process is reaped
	exits chan exit
}

func (s *Supervisor) start(ctx context.Context, n int, secret string) (*attempt, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	commID, err := s.o.CommID()
	if err != nil {
		return nil, err
	}
	a := &attempt{n: n, exits: make(chan exit, s.o.Ranks)}
	ranks := make([]RankStatus, s.o.Ranks)
	perNode := s.o.Ranks / s.o.Nodes
	for r := range s.o.Ranks {
		node := s.o.Node(r / perNode)
		cmd := exec.Command(s.o.Command[0], s.o.Command[1:]...)
		cmd.Env = append(os.Environ(), s.o.Env...)
		for k, v := range map[string]string{
			"RANK": strconv.Itoa(r), "WORLD_SIZE": strconv.Itoa(s.o.Ranks), "LOCAL_RANK": strconv.Itoa(r % perNode),
			"LOCAL_WORLD_SIZE": strconv.Itoa(perNode), "GROUP_RANK": strconv.Itoa(r / perNode),
			"TORCHELASTIC_RESTART_COUNT": strconv.Itoa(n),
			"LOCKSTEP_RANK":              strconv.Itoa(r), "LOCKSTEP_WORLD_SIZE": strconv.Itoa(s.o.Ranks), "LOCKSTEP_LOCAL_RANK": strconv.Itoa(r % perNode),
			"LOCKSTEP_JOB": s.o.Job, "LOCKSTEP_NODE": node, "LOCKSTEP_SLOT": strconv.Itoa(s.slots[r]),
			"LOCKSTEP_RESTART_COUNT": strconv.Itoa(n), "LOCKSTEP_COMM_ID": commID, "LOCKSTEP_SECRET_FILE": secret,
			"LOCKSTEP_RUNTIME_DIR": s.o.RuntimeDir(node),
		} {
			cmd.Env = append(cmd.Env, k+"="+v)
		}
		// A group of its own, so that what a rank has forked goes with it; and
		// dead with its supervisor, so that nothing is left behind.
		cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
		out, err := s.rankLog(r, n)
		if err != nil {
			a.stop(0)
			return nil, err
		}
		cmd.Stdout, cmd.Stderr = out, out
		cmd.WaitDelay = 2 * time.Second // a grandchild that keeps the pipe open must not keep us
		started := make(chan error, 1)
		done := make(chan struct{})
		go func() {
			// Pdeathsig is sent when the starting *thread* ends, so it must live as long as the child.
			runtime.LockOSThread()
			err := cmd.Start()
			started <- err
			if err != nil {
				out.Close()
				return
			}
			err = cmd.Wait()
			out.Close()
			close(done)
			a.exits <- exit{r, n, err}
		}()
		if err := <-started; err != nil {
			a.stop(0)
			return nil, fmt.Errorf("run: rank %d: start %s: %w", r, s.o.Command[0], err)
		}
		a.cmds = append(a.cmds, cmd)
		a.done = append(a.done, done)
		ranks[r] = RankStatus{Rank: r, Slot: s.slots[r], Node: node, PID: cmd.Process.Pid, State: "running"}
	}
	s.mu.Lock()
	s.status.Attempt, s.status.Ranks = n, ranks
	s.mu.Unlock()
	s.setState("running")
	return a, nil
}

// stop ends all processes of the attempt: SIGTERM, after grace SIGKILL. A
// stopped process cannot act on SIGTERM, so it gets SIGCONT with it.
func (a *attempt) stop(grace time.Duration) {
	signal := func(sig syscall.Signal) {
		for i, c := range a.cmds {
			select {
			case <-a.done[i]:
				// Reaped; its group may still hold children that it has left behind.
				_ = syscall.Kill(-c.Process.Pid, syscall.SIGKILL)
			default:
				_ = syscall.Kill(-c.Process.Pid, sig)
			}
		}
	}
	if grace > 0 {
		signal(syscall.SIGTERM)
		signal(syscall.SIGCONT)
		deadline := time.NewTimer(grace)
		defer deadline.Stop()
	wait:
		for _, d := range a.done {
			select {
			case <-d:
			case <-deadline.C:
				break wait
			}
		}
	}
	signal(syscall.SIGKILL)
	for _, d := range a.done {
		<-d
	}
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
func (s *Supervisor) exclude(r *request) string {
	if r == nil {
		return ""
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	detail := ""
	for _, rank := range r.Exclude {
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
	}
	return detail
}

func (s *Supervisor) hook(ctx context.Context, attempt int) error {
	if len(s.o.OnRestart) == 0 {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, s.o.OnRestart[0], s.o.OnRestart[1:]...)
	cmd.Env = append(append(os.Environ(), s.o.Env...), "LOCKSTEP_JOB="+s.o.Job, "LOCKSTEP_RESTART_COUNT="+strconv.Itoa(attempt))
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("run: restart hook %s: %w: %s", s.o.OnRestart[0], err, out)
	}
	return nil
}

func (s *Supervisor) setState(state string) {
	s.mu.Lock()
	s.status.State, s.status.Since = state, time.Now()
	s.mu.Unlock()
}

func (s *Supervisor) event(e Event) {
	e.At = time.Now()
	s.o.Logger.Info("job "+e.Kind, "job", s.o.Job, "attempt", e.Attempt, "rank", e.Rank, "detail", e.Detail)
	if s.o.OnEvent != nil {
		s.o.OnEvent(e)
	}
}

// serve answers the control socket until stop is called.
func (s *Supervisor) serve() (stop func(), err error) {
	path := s.ControlSocket()
	_ = os.Remove(path) // of a supervisor that was killed; a live one holds Dir
	l, err := net.Listen("unix", path)
	if err != nil {
		return nil, fmt.Errorf("run: control socket: %w", err)
	}
	if err := os.Chmod(path, 0o600); err != nil {
		l.Close()
		return nil, fmt.Errorf("run: control socket: %w", err)
	}
	ended := make(chan struct{})
	mux := http.NewServeMux()
	mux.HandleFunc("GET /v1/status", func(w http.ResponseWriter, _ *http.Request) {
		_ = json.NewEncoder(w).Encode(s.Status())
	})
	mux.HandleFunc("POST /v1/restart", func(w http.ResponseWriter, req *http.Request) {
		r := request{reply: make(chan result, 1)}
		if err := json.NewDecoder(io.LimitReader(req.Body, 1<<16)).Decode(&r.RestartRequest); err != nil || r.Action == "" {
			http.Error(w, fmt.Sprintf("restart request: %v; an action id is needed", err), http.StatusBadRequest)
			return
		}
		select {
		case s.requests <- r:
		case <-ended:
			http.Error(w, errNotRunning.Error(), http.StatusGone)
			return
		case <-req.Context().Done():
			return
		}
		select {
		case res := <-r.reply:
			if res.err != nil {
				http.Error(w, res.err.Error(), http.StatusInternalServerError)
				return
			}
			_ = json.NewEncoder(w).Encode(res.r)
		case <-ended:
			http.Error(w, errNotRunning.Error(), http.StatusGone)
		}
	})
	srv := &http.Server{Handler: mux, ReadHeaderTimeout: 5 * time.Second}
	go srv.Serve(l)
	return func() { close(ended); srv.Close() }, nil
}

// rankLog is a writer that prefixes lines, to the rank's log file and to Output.
func (s *Supervisor) rankLog(rank, attempt int) (io.WriteCloser, error) {
	f, err := os.OpenFile(filepath.Join(s.o.Dir, fmt.Sprintf("rank%d.attempt%d.log", rank, attempt)), os.O_CREATE|os.O_WRONLY|os.O_TRUNC, 0o600)
	if err != nil {
		return nil, fmt.Errorf("run: rank %d: log file: %w", rank, err)
	}
	if s.o.Output == nil {
		return f, nil
	}
	pr, pw := io.Pipe()
	done := make(chan struct{})
	go func() {
		defer close(done)
		sc := bufio.NewScanner(pr)
		sc.Buffer(make([]byte, 4096), 1<<20)
		for sc.Scan() {
			fmt.Fprintf(f, "%s\n", sc.Bytes())
			fmt.Fprintf(s.o.Output, "[%d] %s\n", rank, sc.Bytes())
		}
		_, _ = io.Copy(io.Discard, pr) // an overlong line: the rank must not block on it
	}()
	return &pipeLog{pw, f, done}, nil
}

// lineWriter keeps the lines of several ranks apart.
type lineWriter struct {
	mu sync.Mutex
	w  io.Writer
}

func (l *lineWriter) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.w.Write(p)
}

type pipeLog struct {
	*io.PipeWriter
	f    *os.File
	done chan struct{}
}

func (p *pipeLog) Close() error {
	return errors.Join(p.PipeWriter.Close(), func() error { <-p.done; return p.f.Close() }())
}

func writeSecret(path string) error {
	b := make([]byte, 32)
	rand.Read(b)
	_ = os.Remove(path)
	if err := os.WriteFile(path, []byte(hex.EncodeToString(b)+"\n"), 0o600); err != nil {
		return fmt.Errorf("run: secret: %w", err)
	}
	return nil
}
