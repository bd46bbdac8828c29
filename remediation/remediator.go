package remediation

import (
	"cmp"
	"context"
	"crypto/subtle"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

// Options of a Remediator.
type Options struct {
	Config  Config
	Journal string // file
	Token   []byte // bearer token of webhooks, which Alertmanager has
	// OperatorToken is who closes breakers; it reads what Token does, too. nil: nobody can.
	OperatorToken []byte
	Actuator      Actuator
	// Fencer is asked before each action, unless the actuator fences by itself; nil: nobody is.
	Fencer Fencer
	// Masters are asked about each incident before anything is done.
	Masters Masters
	// BelieveAlerts acts on what alerts say, without asking: whoever can post to
	// Alertmanager can then restart jobs. It is exported as a metric.
	BelieveAlerts bool
	Logger        *slog.Logger
	Registry      prometheus.Registerer
	// OnEvent, when set, is told of every entry as it changes, after the change
	// is on disk. It is called from several goroutines and must not block.
	OnEvent func(Entry)
	// Now is the calendar: how old an incident is, and what breakers count; nil: time.Now.
	Now func() time.Time
	// Retry is after what time something is tried again, then after twice as long, up to 15 times; and how
	// often the journal is looked at. 0: a second.
	Retry time.Duration
}

// Remediator is the webhook and the worker behind it. Safe for concurrent use.
type Remediator struct {
	o    Options
	j    *journal
	m    *metrics
	wake chan struct{}

	mu   sync.Mutex
	busy map[string]bool // jobs with an entry in work
	late map[uint64]late // entries whose turn is put off, by their number
	wg   sync.WaitGroup

	deciding sync.Mutex // decisions count each other against the breakers

	wrote atomic.Pointer[wrote]

	warned atomic.Int64 // unix second of the last warning of a request without the token
}

// wrote is how the last attempt to write the journal ended.
type wrote struct {
	at  time.Time
	err error
}

// Ready returns an error while decisions could not be journaled: nothing is decided then.
func (r *Remediator) Ready() error {
	w := r.wrote.Load()
	switch {
	case w == nil:
		return errors.New("the journal has not been written yet")
	case w.err != nil:
		return fmt.Errorf("the journal cannot be written: %w", w.err)
	case time.Since(w.at) > hangsAfter:
		return fmt.Errorf("the journal was last written %v ago: the disk does not answer", time.Since(w.at).Round(time.Second))
	}
	return nil
}

// probe writes to the journal now and then, so that Ready knows.
func (r *Remediator) probe() {
	now := time.Now()
	if w := r.wrote.Load(); w != nil && w.err == nil && now.Sub(w.at) < probeEvery {
		return
	}
	err := r.j.writable(now)
	if was := r.wrote.Swap(&wrote{time.Now(), err}); err != nil && (was == nil || was.err == nil) {
		r.o.Logger.Error("the journal cannot be written: nothing is decided until it can", "err", err)
	}
	r.m.writable.Set(1)
	if err != nil {
		r.m.writable.Set(0)
	}
}

const (
	probeEvery = 5 * time.Second
	hangsAfter = 4 * probeEvery
)

const (
	maxBusy          = 16 // jobs in work at once
	maxTries         = 5  // calls of the actuator for one action, but for those that nobody answered
	retryDelay       = time.Second
	maxDelay         = 15 // times that
	inventoryTimeout = 30 * time.Second
	maxDetail        = 1024 // bytes of an actuator's answer that are kept
)

// New opens the journal; Run must be called for anything to be carried out.
func New(o Options) (*Remediator, error) {
	if err := o.Config.Validate(); err != nil {
		return nil, fmt.Errorf("remediator: %w", err)
	}
	if len(o.Token) < 16 {
		return nil, errors.New("remediator: the webhook token must have at least 16 bytes (openssl rand -hex 32)")
	}
	if o.OperatorToken != nil && len(o.OperatorToken) < 16 {
		return nil, errors.New("remediator: the operator's token must have at least 16 bytes (openssl rand -hex 32)")
	}
	if o.OperatorToken != nil && subtle.ConstantTimeCompare(o.OperatorToken, o.Token) == 1 {
		return nil, errors.New("remediator: the operator's token is the webhook's: who can post alerts could close breakers; make another one (openssl rand -hex 32)")
	}
	if o.Actuator == nil {
		return nil, errors.New("remediator: no actuator")
	}
	if o.Masters == nil && !o.BelieveAlerts {
		return nil, errors.New("remediator: no masters to ask: an alert alone is no reason to restart a job")
	}
	if o.Logger == nil {
		o.Logger = slog.New(slog.DiscardHandler)
	}
	if o.Now == nil {
		o.Now = time.Now
	}
	o.Retry = cmp.Or(o.Retry, retryDelay)
	j, err := openJournal(o.Journal)
	if err != nil {
		return nil, err
	}
	m, err := newMetrics(o.Registry, *o.Config.DryRun, o.BelieveAlerts)
	if err != nil {
		return nil, errors.Join(err, j.close())
	}
	return &Remediator{o: o, j: j, m: m, wake: make(chan struct{}, 1), busy: map[string]bool{}, late: map[uint64]late{}}, nil
}

// Run works through the journal until ctx ends, then waits for actions in
// flight to return (their context has ended too) and closes the journal.
func (r *Remediator) Run(ctx context.Context) error {
	t := time.NewTicker(r.o.Retry)
	defer t.Stop()
	for {
		if ctx.Err() == nil { // a tick that came with the end may have been taken first
			r.probe()
			if err := r.pass(ctx); err != nil {
				r.o.Logger.Error("journal pass failed", "err", err)
			}
		}
		select {
		case <-ctx.Done():
			r.wg.Wait()
			return r.j.close()
		case <-r.wake:
		case <-t.C:
		}
	}
}

// pass hands every job's oldest open entry to a goroutine of its own, one a job at a time.
func (r *Remediator) pass(ctx context.Context) error {
	var open []*Entry
	var history []past
	if err := r.j.each(func(e *Entry) {
		if e.State != Closed {
			open = append(open, e)
		}
		if !e.Started.IsZero() {
			history = append(history, e.past())
		}
	}); err != nil {
		return err
	}
	r.m.pending.Set(float64(len(open)))
	if err := r.publishBreakers(history); err != nil {
		return err
	}
	for _, e := range open {
		if !r.due(e.Seq) || !r.take(e.Alert.Job) {
			continue
		}
		r.wg.Go(func() {
			moved := r.work(ctx, e.Seq)
			r.release(e.Alert.Job)
			if moved {
				r.kick() // else the journal is in trouble: not before the next tick
			}
		})
	}
	return nil
}

func (r *Remediator) take(job string) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.busy[job] || len(r.busy) >= maxBusy {
		return false
	}
	r.busy[job] = true
	return true
}

func (r *Remediator) release(job string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	delete(r.busy, job)
}

func (r *Remediator) kick() {
	select {
	case r.wake <- struct{}{}:
	default:
	}
}

// work takes one entry as far as it goes and reports whether it is closed.
// Whoever calls it has taken the entry's job.
func (r *Remediator) work(ctx context.Context, seq uint64) (closed bool) {
	// Read again: between the pass that saw it open and the taking of its job,
	// it may have been closed.
	e, err := r.j.get(seq)
	if err != nil {
		r.o.Logger.Error("journal: cannot read entry", "seq", seq, "err", err)
		return false
	}
	switch e.State {
	case Closed:
		return true
	case Running:
		// A former process had decided on it and was killed before it had an
		// answer. The breakers have counted it; but it must not come back from
		// the dead, nor act for somebody who has forbidden that since.
		policy := r.o.Config.decide(&e.Alert)
		if outcome := r.notToAct(policy, e); outcome != "" {
			if outcome == OutcomeStale {
				outcome = OutcomeFailed // nobody knows: a person has to look
			}
			return r.close(e, outcome, "was in flight when a former remediator was killed and is not repeated now; whether it was done, the job's supervisor knows")
		}
	default:
		if !r.current(r.o.Now(), e) {
			if n := r.postponed(seq); n > 0 { // a person has to look
				return r.close(e, OutcomeFailed, fmt.Sprintf("whoever had to be asked did not answer, %d times, until it was stale", n))
			}
			return r.close(e, OutcomeStale, "")
		}
		if !*r.o.Config.DryRun { // which needs no actuator
			if err := r.ours(ctx, e); err != nil {
				return r.close(e, OutcomeFailed, err.Error())
			}
		}
		switch outcome, detail, ok := r.believe(ctx, e); {
		case !ok:
			return false
		case outcome != "":
			return r.close(e, outcome, detail)
		}
		policy := r.o.Config.decide(&e.Alert)
		e.Policy, e.Kind = policy.Name, policy.Action
		outcome := r.notToAct(policy, e)
		if outcome == OutcomeStale || outcome == OutcomeNone {
			return r.close(e, outcome, "")
		}
		total := 0
		if outcome == "" {
			var err error
			if total, err = r.unit(ctx, e); err != nil {
				if errors.Is(err, ErrAway) {
					if times, again := r.postpone(e); again {
						r.o.Logger.Warn("what the rank to blame runs on cannot be asked now", "job", e.Alert.Job, "times", times, "err", err)
						return false
					}
				}
				return r.close(e, OutcomeFailed, err.Error())
			}
		}
		switch outcome, detail, err := r.decide(e, policy, total); {
		case err != nil:
			r.o.Logger.Error("journal: cannot write the decision, not acting", "action", e.Action, "job", e.Alert.Job, "err", err)
			return false
		case outcome != "":
			return r.close(e, outcome, detail)
		}
		r.tell(e)
	}
	return r.act(ctx, e)
}

// current reports whether an entry is not stale at now. One that a person lets be decided anew is as old as that
// word, where its master says that the incident is still open: an alert by itself says nothing of now.
func (r *Remediator) current(now time.Time, e *Entry) bool {
	if !e.Again.IsZero() && !r.o.BelieveAlerts {
		return now.Sub(e.Again).Abs() <= r.o.Config.MaxAge
	}
	return r.o.Config.current(now, &e.Alert)
}

// ours returns ErrGone when the job is none of the actuator's: nobody need be asked about it then.
func (r *Remediator) ours(ctx context.Context, e *Entry) error {
	ctx, cancel := context.WithTimeout(ctx, inventoryTimeout)
	defer cancel()
	if _, err := r.o.Actuator.Inventory(ctx, e.Alert.Job); errors.Is(err, ErrGone) {
		return err
	}
	return nil // what else went wrong matters when the unit is looked for
}

// act calls the actuator until it answers, and closes the entry. When ctx ends
// first, the entry stays Running and the next process takes it up.
func (r *Remediator) act(ctx context.Context, e *Entry) (closed bool) {
	switch outcome, detail, ok := r.fence(ctx, e); {
	case !ok:
		return false
	case outcome != "":
		return r.close(e, outcome, detail)
	}
	policy := r.o.Config.decide(&e.Alert)
	for delay := r.o.Retry; ; delay = min(2*delay, maxDelay*r.o.Retry) {
		if ctx.Err() != nil {
			return false // a pass may have begun as the process was told to end
		}
		e.Tries++
		actx, cancel := context.WithTimeout(ctx, r.o.Config.ActionTimeout)
		answer, err := r.o.Actuator.Act(actx, Action{
			ID: e.Action, Job: e.Alert.Job, Incident: e.Alert.Incident, Kind: e.Kind, Rank: e.Alert.Rank, Attempt: e.Alert.Attempt,
			Reason: e.Alert.Class + ": " + e.Alert.Culprit, Node: e.Alert.Node, Cause: e.Alert.Reason, Unit: e.Unit,
			Opened: e.Alert.Opened, Made: e.Made,
			ActWithoutProof: policy.actsWithoutProof(e.Kind),
		})
		cancel()
		switch {
		case err == nil && answer.At.IsZero():
			e.Started = time.Time{} // nothing was done: no breaker counts it
			return r.close(e, OutcomeSuperseded, answer.Detail)
		case err == nil:
			e.Effective = answer.At
			return r.close(e, OutcomeDone, answer.Detail)
		case ctx.Err() != nil:
			return false
		case errors.Is(err, ErrAway):
			e.Unanswered++
		}
		switch {
		case errors.Is(err, ErrGone) || e.Tries-e.Unanswered >= maxTries || !r.current(r.o.Now().Add(delay), e):
			return r.close(e, OutcomeFailed, err.Error())
		}
		r.o.Logger.Warn("action failed, trying again", "action", e.Action, "job", e.Alert.Job, "try", e.Tries, "in", delay, "err", err)
		if err := r.j.update(e); err != nil { // for the count of tries only
			r.o.Logger.Error("journal: cannot write the number of tries", "seq", e.Seq, "err", err)
		}
		select {
		case <-ctx.Done():
			return false
		case <-time.After(delay):
		}
	}
}

// close ends an entry and reports whether that is on disk. When it is not, the
// entry is still open there and is taken up again; the actuator knows its id.
func (r *Remediator) close(e *Entry, o Outcome, detail string) bool {
	e.State, e.Outcome, e.Detail, e.Finished = Closed, o, cut(detail), r.o.Now()
	if err := r.j.update(e); err != nil {
		r.o.Logger.Error("journal: cannot close entry", "seq", e.Seq, "outcome", o, "err", err)
		return false
	}
	r.forget(e.Seq)
	r.m.closed(e)
	r.tell(e)
	return true
}

func (r *Remediator) tell(e *Entry) {
	level := slog.LevelInfo
	switch e.Outcome {
	case OutcomeFailed, OutcomeRefused, OutcomeUnfenced:
		level = slog.LevelError
	case OutcomeStale:
		level = slog.LevelWarn
	}
	r.o.Logger.Log(context.Background(), level, "remediation", "seq", e.Seq, "job", e.Alert.Job, "incident", e.Alert.Incident, "class", e.Alert.Class,
		"culprit", e.Alert.Culprit, "policy", e.Policy, "action", e.Kind, "state", e.State, "outcome", e.Outcome, "detail", e.Detail)
	if r.o.OnEvent != nil {
		r.o.OnEvent(*e)
	}
}

// publishBreakers is called by pass alone.
func (r *Remediator) publishBreakers(history []past) error {
	open, err := r.j.breakers()
	if err != nil {
		return err
	}
	closed, err := r.j.closedAt()
	if err != nil {
		return err
	}
	state := map[string]int{ScopeTotal: 0, ScopeUnits: 0}
	for _, b := range open {
		state[b.Scope] = 1
	}
	r.m.breaker.set(state)
	b := r.o.Config.Breaker
	r.m.remaining.set(b.remaining(b.count(r.o.Now(), history, func(s string) time.Time { return closed[s] }), open))
	return nil
}
