package remediation

import (
	"context"
	"crypto/sha256"
	"crypto/subtle"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"strings"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

// Action is one decision, handed to an Actuator.
type Action struct {
	ID       string // the same on every repeat
	Job      string
	Incident string
	Kind     ActionKind
	Rank     int    // to exclude; -1 none
	Attempt  *int   // the attempt that the incident is about: no other may be ended; nil when not known
	Reason   string // for logs and the job's own record: class and culprit
}

// Inventory is what an actuator knows of a job's units: slots of a node, nodes
// of a cluster; whatever an exclusion takes out.
type Inventory struct {
	Units int
	// Unit names the unit that a rank runs on now, "" when unknown.
	Unit func(rank int) string
}

// Actuator carries out actions. Act is called again with the same ID when the
// remediator was killed or the last call failed: an actuator must recognise an
// action that it has already done and answer as it did then. It must return
// when ctx ends. ErrGone ends the retries.
type Actuator interface {
	Name() string
	Inventory(ctx context.Context, job string) (Inventory, error)
	Act(ctx context.Context, a Action) (detail string, err error)
}

// ErrGone says that the job is not there any more: nothing to do.
var ErrGone = errors.New("job is gone")

// Options of a Remediator.
type Options struct {
	Config   Config
	Journal  string // file
	Token    []byte // bearer token that webhooks and operators must present
	Actuator Actuator
	Logger   *slog.Logger
	Registry prometheus.Registerer
	// OnEvent, when set, is told of every entry as it changes (the demo's story, tests).
	OnEvent func(Entry)
}

// Remediator is the webhook and the worker behind it. Safe for concurrent use.
type Remediator struct {
	o    Options
	j    *journal
	m    *metrics
	wake chan struct{}

	mu   sync.Mutex
	busy map[string]bool // jobs with an action in flight
	wg   sync.WaitGroup

	deciding sync.Mutex // decisions count each other against the breakers
}

const (
	maxTries   = 3
	retryDelay = time.Second
)

// New opens the journal; Run must be called for anything to be carried out.
func New(o Options) (*Remediator, error) {
	if err := o.Config.Validate(); err != nil {
		return nil, fmt.Errorf("remediator: %w", err)
	}
	if len(o.Token) < 16 {
		return nil, errors.New("remediator: the webhook token must have at least 16 bytes (openssl rand -hex 32)")
	}
	if o.Actuator == nil {
		return nil, errors.New("remediator: no actuator")
	}
	if o.Logger == nil {
		o.Logger = slog.New(slog.DiscardHandler)
	}
	j, err := openJournal(o.Journal)
	if err != nil {
		return nil, err
	}
	m, err := newMetrics(o.Registry, *o.Config.DryRun)
	if err != nil {
		return nil, errors.Join(err, j.close())
	}
	return &Remediator{o: o, j: j, m: m, wake: make(chan struct{}, 1), busy: map[string]bool{}}, nil
}

// Run works through the journal until ctx ends, then waits for actions in
// flight to return (their context has ended too) and closes the journal.
func (r *Remediator) Run(ctx context.Context) error {
	t := time.NewTicker(time.Second)
	defer t.Stop()
	for {
		if err := r.pass(ctx); err != nil {
			r.o.Logger.Error("journal pass failed", "err", err)
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
	pending := 0
	if err := r.j.each(func(e *Entry) {
		if e.State != Closed {
			open = append(open, e)
			pending++
		}
	}); err != nil {
		return err
	}
	r.m.pending.Set(float64(pending))
	r.publishBreakers()
	for _, e := range open {
		r.mu.Lock()
		taken := r.busy[e.Alert.Job] || len(r.busy) >= 16
		if !taken {
			r.busy[e.Alert.Job] = true
		}
		r.mu.Unlock()
		if taken {
			continue
		}
		r.wg.Go(func() {
			r.carryOut(ctx, e)
			r.mu.Lock()
			delete(r.busy, e.Alert.Job)
			r.mu.Unlock()
			r.kick()
		})
	}
	return nil
}

func (r *Remediator) kick() {
	select {
	case r.wake <- struct{}{}:
	default:
	}
}

// carryOut decides on one entry and does it. A Running entry is one that a
// former process had begun: it skips the decision, which is on disk.
func (r *Remediator) carryOut(ctx context.Context, e *Entry) {
	if e.State == Pending && !r.decide(ctx, e) {
		return
	}
	for {
		e.Tries++
		actx, cancel := context.WithTimeout(ctx, r.o.Config.ActionTimeout)
		detail, err := r.o.Actuator.Act(actx, Action{
			ID: e.Action, Job: e.Alert.Job, Incident: e.Alert.Incident, Kind: e.Kind, Rank: e.Alert.Rank, Attempt: e.Alert.Attempt,
			Reason: e.Alert.Class + ": " + e.Alert.Culprit,
		})
		cancel()
		switch {
		case err == nil:
			r.close(e, OutcomeDone, detail)
			return
		case ctx.Err() != nil:
			return // stays Running; the next process takes it up
		case errors.Is(err, ErrGone) || e.Tries >= maxTries:
			r.close(e, OutcomeFailed, err.Error())
			return
		}
		r.o.Logger.Warn("action failed, trying again", "action", e.Action, "job", e.Alert.Job, "try", e.Tries, "err", err)
		if err := r.j.update(e); err != nil {
			r.o.Logger.Error("journal", "err", err)
		}
		select {
		case <-ctx.Done():
			return
		case <-time.After(retryDelay << e.Tries):
		}
	}
}

// decide writes the decision to the journal and reports whether it is to act.
func (r *Remediator) decide(ctx context.Context, e *Entry) bool {
	r.deciding.Lock()
	defer r.deciding.Unlock()
	now := time.Now()
	if now.Sub(e.Alert.StartsAt) > r.o.Config.MaxAge {
		r.close(e, OutcomeStale, "")
		return false
	}
	p := r.o.Config.decide(&e.Alert)
	e.Policy, e.Kind = p.Name, p.Action
	if p.Action == ActionNone {
		r.close(e, OutcomeNone, "")
		return false
	}
	var history []past
	superseded := ""
	if err := r.j.each(func(o *Entry) {
		if o.Seq == e.Seq || o.Started.IsZero() {
			return
		}
		history = append(history, past{At: o.Started, Job: o.Alert.Job, Unit: o.Unit})
		if o.Alert.Job != e.Alert.Job || o.Outcome == OutcomeFailed {
			return
		}
		switch {
		case o.Action == e.Action:
			superseded = fmt.Sprintf("incident %s was acted on by entry %d", e.Alert.Incident, o.Seq)
		case o.Outcome == OutcomeDone && o.Finished.After(e.Alert.StartsAt):
			superseded = fmt.Sprintf("job was restarted by entry %d after this alert began", o.Seq)
		}
	}); err != nil {
		r.o.Logger.Error("journal", "err", err)
		return false
	}
	if superseded != "" {
		r.close(e, OutcomeSuperseded, superseded)
		return false
	}
	if p.DryRun {
		r.close(e, OutcomeDryRun, "")
		return false
	}
	total := 0
	if p.Action == ActionExclude {
		ictx, cancel := context.WithTimeout(ctx, 5*time.Second)
		inv, err := r.o.Actuator.Inventory(ictx, e.Alert.Job)
		cancel()
		if err != nil {
			// Without knowing the unit, restarting in place is the smaller step.
			r.o.Logger.Warn("inventory failed, restarting in place", "job", e.Alert.Job, "err", err)
			e.Kind = ActionRestart
		} else {
			total, e.Unit = inv.Units, inv.Unit(e.Alert.Rank)
		}
	}
	if scope, why := r.refuse(now, history, e, total); scope != "" {
		r.close(e, OutcomeRefused, scope+": "+why)
		return false
	}
	e.State, e.Started = Running, now
	if err := r.j.update(e); err != nil {
		r.o.Logger.Error("journal: cannot write the decision, not acting", "action", e.Action, "err", err)
		return false
	}
	r.tell(e)
	return true
}

// refuse opens breakers that the action would go over, and names an open one.
func (r *Remediator) refuse(now time.Time, history []past, e *Entry, units int) (scope, why string) {
	open, err := r.j.breakers()
	if err != nil {
		return "journal", err.Error()
	}
	for _, b := range open {
		if b.Scope == ScopeTotal || b.Scope == scopeJob+e.Alert.Job || (b.Scope == ScopeUnits && e.Unit != "") {
			return b.Scope, b.Why
		}
	}
	closed, err := r.j.closedAt()
	if err != nil {
		return "journal", err.Error()
	}
	scope, why = r.o.Config.Breaker.allow(now, history, func(s string) time.Time { return closed[s] }, e.Alert.Job, e.Unit, units)
	if scope != "" {
		if err := r.j.openBreaker(BreakerState{Scope: scope, Since: now, Why: why}); err != nil {
			r.o.Logger.Error("journal", "err", err)
		}
		r.o.Logger.Error("breaker opened; a person must close it", "scope", scope, "why", why)
		r.publishBreakers()
	}
	return scope, why
}

func (r *Remediator) close(e *Entry, o Outcome, detail string) {
	e.State, e.Outcome, e.Detail, e.Finished = Closed, o, detail, time.Now()
	if err := r.j.update(e); err != nil {
		r.o.Logger.Error("journal: cannot close entry", "seq", e.Seq, "err", err)
		return
	}
	r.m.actions.WithLabelValues(string(e.Kind), string(o), e.Alert.Class).Inc()
	if !e.Started.IsZero() {
		r.m.duration.WithLabelValues(string(e.Kind)).Observe(e.Finished.Sub(e.Started).Seconds())
	}
	r.tell(e)
}

func (r *Remediator) tell(e *Entry) {
	r.o.Logger.Info("remediation", "seq", e.Seq, "job", e.Alert.Job, "incident", e.Alert.Incident, "class", e.Alert.Class,
		"culprit", e.Alert.Culprit, "policy", e.Policy, "action", e.Kind, "state", e.State, "outcome", e.Outcome, "detail", e.Detail)
	if r.o.OnEvent != nil {
		r.o.OnEvent(*e)
	}
}

func (r *Remediator) publishBreakers() {
	open, err := r.j.breakers()
	if err != nil {
		return
	}
	r.m.breaker.Reset()
	for _, s := range []string{ScopeTotal, ScopeUnits} {
		r.m.breaker.WithLabelValues(s).Set(0)
	}
	for _, b := range open {
		r.m.breaker.WithLabelValues(b.Scope).Set(1)
	}
	var history []past
	if r.j.each(func(o *Entry) {
		if !o.Started.IsZero() {
			history = append(history, past{At: o.Started})
		}
	}) == nil {
		r.m.remaining.WithLabelValues(ScopeTotal).Set(float64(r.o.Config.Breaker.remaining(time.Now(), history)))
	}
}

// Handler serves
//
//	POST /webhook                  Alertmanager's webhook
//	GET  /api/v1/actions           the journal, oldest first
//	GET  /api/v1/breakers          open breakers
//	POST /api/v1/breakers/close    form value scope
//
// all of them behind the bearer token.
func (r *Remediator) Handler() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("POST /webhook", r.webhook)
	mux.HandleFunc("GET /api/v1/actions", func(w http.ResponseWriter, _ *http.Request) {
		list := []*Entry{}
		err := r.j.each(func(e *Entry) { list = append(list, e) })
		reply(w, list, err)
	})
	mux.HandleFunc("GET /api/v1/breakers", func(w http.ResponseWriter, _ *http.Request) {
		open, err := r.j.breakers()
		if open == nil {
			open = []BreakerState{}
		}
		reply(w, open, err)
	})
	mux.HandleFunc("POST /api/v1/breakers/close", func(w http.ResponseWriter, req *http.Request) {
		scope := req.FormValue("scope")
		was, err := r.j.closeBreaker(time.Now(), scope)
		if err == nil && !was {
			http.Error(w, fmt.Sprintf("no breaker is open in scope %q", scope), http.StatusNotFound)
			return
		}
		r.o.Logger.Warn("breaker closed by a person", "scope", scope, "from", req.RemoteAddr)
		r.publishBreakers()
		reply(w, map[string]string{"closed": scope}, err)
	})
	return http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		if !r.authorized(req) {
			r.m.webhooks.WithLabelValues("unauthorized").Inc()
			w.Header().Set("WWW-Authenticate", "Bearer")
			http.Error(w, ErrUnauthorized.Error(), http.StatusUnauthorized)
			return
		}
		mux.ServeHTTP(w, req)
	})
}

func reply(w http.ResponseWriter, v any, err error) {
	if err != nil {
		http.Error(w, err.Error(), http.StatusInternalServerError)
		return
	}
	w.Header().Set("Content-Type", "application/json")
	_ = json.NewEncoder(w).Encode(v) // the client went away: nobody to tell
}

// authorized compares digests, so that neither content nor length leaks by time.
func (r *Remediator) authorized(req *http.Request) bool {
	got, ok := strings.CutPrefix(req.Header.Get("Authorization"), "Bearer ")
	a, b := sha256.Sum256([]byte(got)), sha256.Sum256(r.o.Token)
	return subtle.ConstantTimeCompare(a[:], b[:]) == 1 && ok
}

// webhook answers 2xx only after the alerts are on disk: Alertmanager repeats
// what was not answered so, and the journal recognises a repeat.
func (r *Remediator) webhook(w http.ResponseWriter, req *http.Request) {
	firing, resolved, bad, err := decode(req.Body)
	if err != nil {
		result, code := "malformed", http.StatusBadRequest
		switch {
		case errors.Is(err, ErrTruncated):
			result = "truncated"
		case errors.Is(err, ErrVersion):
			result = "version"
		}
		r.m.webhooks.WithLabelValues(result).Inc()
		r.o.Logger.Warn("webhook refused", "result", result, "err", err)
		http.Error(w, err.Error(), code)
		return
	}
	if bad > 0 {
		r.m.webhooks.WithLabelValues("incomplete_alert").Add(float64(bad))
		r.o.Logger.Warn("webhook had alerts without the labels that a decision needs", "count", bad)
	}
	now := time.Now()
	fresh := firing[:0]
	for _, a := range firing {
		if now.Sub(a.StartsAt) > r.o.Config.MaxAge {
			r.m.webhooks.WithLabelValues("stale").Inc()
			continue
		}
		fresh = append(fresh, a)
	}
	added := 0
	if len(fresh) > 0 {
		if added, err = r.j.add(now, fresh); err != nil {
			r.m.webhooks.WithLabelValues("journal_error").Inc()
			r.o.Logger.Error("webhook not journaled", "err", err)
			http.Error(w, "not journaled, send it again", http.StatusServiceUnavailable)
			return
		}
	}
	switch {
	case added > 0:
		r.m.webhooks.WithLabelValues("accepted").Inc()
		r.kick()
	case len(fresh) > 0:
		r.m.webhooks.WithLabelValues("duplicate").Inc()
	case resolved > 0:
		r.m.webhooks.WithLabelValues("resolved").Inc()
	}
	reply(w, map[string]int{"journaled": added}, nil)
}
