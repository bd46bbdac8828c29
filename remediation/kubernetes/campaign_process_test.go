package kubernetes

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"net/url"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/rest"

	"github.com/lockstep-ccl/lockstep/exporters/names"
	"github.com/lockstep-ccl/lockstep/remediation"
)

// calendar is the clock on the wall, which jumps forward.
type calendar struct{ ahead atomic.Int64 }

func (c *calendar) now() time.Time      { return time.Now().Add(time.Duration(c.ahead.Load())).Round(0) }
func (c *calendar) add(d time.Duration) { c.ahead.Add(int64(d)) }
func (c *calendar) set(t time.Time)     { c.ahead.Add(int64(t.Sub(c.now()))) }

// process is a remediator, and the one after it when it was killed: webhook, journal, the
// master's word, breakers, leader's lease, actuator and keeper, as the command puts them together.
type process struct {
	c       *campaign
	config  *rest.Config // with the rights of its service account
	options Options
	retry   time.Duration
	file    string
	// identity is a new process's name among those that would lead.
	identity func(n int) string

	n      int
	r      *remediation.Remediator
	a      *Actuator
	mortal *mortal
	ended  chan struct{}
}

var campaignToken, campaignOperator = []byte("campaign-webhook-token"), []byte("campaign-operator-token")

func (c *campaign) start() {
	c.r = &process{c: c, file: filepath.Join(c.t.TempDir(), "journal.db")}
	c.bed.cluster(c)
	c.r.run()
}

func (p *process) run() {
	c := p.c
	ctx, kill := context.WithCancel(context.Background())
	p.mortal = &mortal{c: c, kill: kill}
	config := rest.CopyConfig(p.config)
	config.Wrap(func(rt http.RoundTripper) http.RoundTripper { p.mortal.next = rt; return p.mortal })
	client, err := dynamic.NewForConfig(config)
	c.must(err)
	o := p.options
	o.Client, o.Identity, o.Fencer, o.now = client, p.identity(p.n), c, c.calendar.now
	a, err := New(o)
	c.must(err)
	yes, no := true, false
	cfg := remediation.DefaultConfig()
	cfg.DryRun, cfg.MaxAge, cfg.ActionTimeout = &no, 30*24*time.Hour, 15*time.Minute
	for i := range cfg.Policies {
		cfg.Policies[i].ActWithoutProof = &yes
	}
	p.r, err = remediation.New(remediation.Options{
		Config: cfg, Journal: p.file, Token: campaignToken, OperatorToken: campaignOperator, Actuator: a, Masters: c.master, Now: c.calendar.now,
		Logger: o.Logger, Retry: p.retry,
	})
	c.must(err)
	p.a = a
	p.n++
	ended := make(chan struct{})
	p.ended = ended
	r, log := p.r, o.Logger
	go func() {
		defer close(ended)
		ran := false
		err := a.Lead(ctx, func(ctx context.Context) error {
			var keeping sync.WaitGroup
			keeping.Go(func() { a.Keep(ctx) })
			ran = true
			err := r.Run(ctx)
			keeping.Wait()
			return err
		})
		log.Info("remediator ended", "err", err)
		kill()
		if !ran { // killed before it led: the journal is open
			r.Run(ctx)
		}
	}()
}

func (c *campaign) stop() {
	if c.r != nil && c.r.ended != nil {
		c.r.mortal.kill()
		<-c.r.ended
	}
}

// revive starts the next process when this one has died.
func (p *process) revive() {
	select {
	case <-p.ended:
		p.c.seen[map[bool]string{true: "remediator killed", false: "remediator lost its lease"}[p.mortal.isDead()]]++
		p.run()
	default:
	}
}

// mortal counts a process's requests, and is its death.
type mortal struct {
	c    *campaign
	next http.RoundTripper
	kill func()

	mu   sync.Mutex
	dead bool
}

// WrappedRoundTripper lets client-go cancel requests.
func (m *mortal) WrappedRoundTripper() http.RoundTripper { return m.next }

var (
	errDead     = errors.New("the process was killed")
	errCut      = errors.New("the connection ended before the answer")
	errNotThere = errors.New("connection refused")
)

func (m *mortal) isDead() bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.dead
}

func (m *mortal) die() {
	m.mu.Lock()
	m.dead = true
	m.mu.Unlock()
	m.kill()
}

func (m *mortal) RoundTrip(r *http.Request) (*http.Response, error) {
	if m.isDead() {
		return nil, errDead
	}
	if m.c.deaths.away(theServer) {
		m.c.counts.failed()
		return nil, errNotThere
	}
	var now []*doom
	if !strings.Contains(r.URL.Path, "/leases/"+LeaseName) {
		now = m.c.deaths.struck(atRequest, whatOf(r))
		if r.Method != http.MethodGet {
			now = append(now, m.c.deaths.struck(atWrite, whatOf(r))...)
		}
	}
	if m.c.strike(now, false)[theRemediator] {
		m.die()
		return nil, errDead
	}
	m.c.counts.add(r)
	resp, err := m.next.RoundTrip(r)
	switch dies := m.c.strike(now, true); {
	case dies[theRemediator]:
		m.die()
		if err == nil {
			resp.Body.Close()
			err = errDead
		}
	case dies[theServer] && err == nil:
		resp.Body.Close()
		err = errCut
	}
	if err != nil {
		m.c.counts.failed()
		return nil, err
	}
	return resp, nil
}

// post sends Alertmanager's webhook.
func (p *process) post(labels map[string]string) {
	now := p.c.calendar.now()
	labels["alertname"] = "Lockstep"
	body, err := json.Marshal(map[string]any{"version": "4", "status": "firing", "receiver": "lockstep", "alerts": []any{
		map[string]any{"status": "firing", "labels": labels, "startsAt": now.UTC().Format(time.RFC3339Nano), "fingerprint": labels[names.LabelIncident]},
	}})
	p.c.must(err)
	for try := 0; ; try++ { // as Alertmanager does
		code, text := p.ask(http.MethodPost, "/webhook", campaignToken, body)
		switch {
		case code == http.StatusOK:
			return
		case try == 3:
			p.c.fatalf("webhook: %d %s", code, text)
		}
		p.next()
	}
}

// next waits until a process that does not answer has died, and starts the one after it.
func (p *process) next() {
	select {
	case <-p.ended:
		p.revive()
	case <-time.After(time.Minute):
		p.c.fatalf("the remediator neither answers nor dies")
	}
}

func (p *process) ask(method, path string, token, body []byte) (int, string) {
	req := httptest.NewRequest(method, path, bytes.NewReader(body))
	req.Header.Set("Authorization", "Bearer "+string(token))
	if method == http.MethodPost && path != "/webhook" {
		req.Header.Set("Content-Type", "application/x-www-form-urlencoded")
	}
	w := httptest.NewRecorder()
	p.r.Handler().ServeHTTP(w, req)
	return w.Code, w.Body.String()
}

// entries is the journal.
func (p *process) entries() []remediation.Entry {
	for try := 0; ; try++ {
		code, text := p.ask(http.MethodGet, "/api/v1/actions", campaignToken, nil)
		var list []remediation.Entry
		switch {
		case code == http.StatusOK && json.Unmarshal([]byte(text), &list) == nil:
			return list
		case try == 3:
			p.c.fatalf("journal: %d %s", code, text)
		}
		p.next()
	}
}

func (p *process) open() int {
	return len(slices.DeleteFunc(p.entries(), func(e remediation.Entry) bool { return e.State == remediation.Closed }))
}

func (p *process) refused() bool {
	_, text := p.ask(http.MethodGet, "/api/v1/breakers", campaignToken, nil)
	return strings.Contains(text, `"scope"`)
}

func (p *process) closeBreakers() {
	_, text := p.ask(http.MethodGet, "/api/v1/breakers", campaignToken, nil)
	var list []remediation.BreakerState
	if json.Unmarshal([]byte(text), &list) != nil {
		return
	}
	for _, b := range list {
		p.ask(http.MethodPost, "/api/v1/breakers/close", campaignOperator, []byte(url.Values{"scope": {b.Scope}}.Encode()))
	}
}

func (p *process) journal() string {
	list := p.entries()
	var lines []string
	for _, e := range list[max(0, len(list)-6):] {
		lines = append(lines, fmt.Sprintf("%s %s rank %d of %s: %s %s %s %s", e.Alert.Incident, e.Kind, e.Alert.Rank, e.Alert.Node, e.State, e.Outcome, e.Unit, e.Detail))
	}
	return strings.Join(lines, "\n")
}

// master is the job's: what it is asked about is what the campaign has broken.
type master struct {
	c *campaign

	mu        sync.Mutex
	n         int
	incidents map[string]*incident
	attempt   int
}

type incident struct {
	remediation.Incident
	id     string
	posted time.Time // by this process's clock
	at     spot
	booked bool
	lost   bool // the master was killed before it was on its disk
}

// spot is where an incident is.
type spot struct {
	rank, attempt int
	node          string
}

// Incident implements remediation.Masters.
func (m *master) Incident(_ context.Context, job, id string) (remediation.Incident, error) {
	now := m.c.deaths.struck(atQuestion, atQuestion)
	m.c.strike(now, false)
	if m.c.deaths.away(theMaster) && !slices.ContainsFunc(now, func(x *doom) bool { return x.after }) {
		return remediation.Incident{}, errNotThere
	}
	if m.c.strike(now, true)[theMaster] {
		return remediation.Incident{}, errCut
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	in := m.incidents[id]
	if in == nil || in.lost || job != campaignJob {
		return remediation.Incident{}, remediation.ErrUnknownIncident
	}
	i := in.Incident
	i.AttemptNow = max(m.attempt, i.Attempt)
	return i, nil
}

const campaignJob = "llm"

// forget is what a master that is killed has not written yet: it will find it again, as another incident.
func (m *master) forget() {
	m.mu.Lock()
	defer m.mu.Unlock()
	if in := m.incidents[fmt.Sprintf("i%d", m.n)]; in != nil {
		in.lost = true
	}
}

func (m *master) forgot(id string) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.incidents[id] != nil && m.incidents[id].lost
}

// anew has everything told again that is still so: a person has closed a breaker.
func (m *master) anew() {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, in := range m.incidents {
		in.posted = time.Time{}
	}
}

// gone tells of a rank whose process has ended.
func (m *master) gone(rank int, node string, attempt int) {
	m.tell(spot{rank, attempt, node}, names.ClassNoncommunicationHang, "process_gone")
}

// alert tells of what is wrong now, again when that has led to nothing.
func (m *master) alert(v *jobView) {
	m.mu.Lock()
	m.attempt = v.attempt
	m.mu.Unlock()
	if len(v.on) != m.c.need || m.c.deaths.away(theMaster) || !m.calm() {
		return // it starts, or nobody sees it, or somebody is at it
	}
	for rank, at := range m.c.hung {
		if at-1 == v.attempt {
			m.tell(spot{rank, v.attempt, v.on[rank]}, names.ClassNoncommunicationHang, "idle")
		}
	}
	for _, rank := range sortedRanks(v.on) {
		switch node := v.on[rank]; m.c.ill[node] {
		case slow:
			m.tell(spot{rank, v.attempt, node}, names.ClassNoncommunicationSlow, "computing")
		case off, cut_:
			m.tell(spot{rank, v.attempt, node}, names.ClassNoncommunicationHang, names.ReasonNodeLost)
		}
	}
}

// calm is when no alert is open, and what became of the last one is in the books: a node that was
// cured by a restart in place is told of no more.
func (m *master) calm() bool {
	entries := m.c.r.entries()
	m.mu.Lock()
	defer m.mu.Unlock()
	return !slices.ContainsFunc(entries, func(e remediation.Entry) bool {
		return e.State != remediation.Closed || e.Outcome == remediation.OutcomeDone && e.Kind == remediation.ActionExclude && !m.incidents[e.Alert.Incident].booked
	})
}

func sortedRanks(on map[int]string) []int {
	var list []int
	for r := range on {
		list = append(list, r)
	}
	slices.Sort(list)
	return list
}

func (m *master) tell(at spot, class, reason string) {
	m.mu.Lock()
	for _, in := range m.incidents {
		if in.at == at && !in.lost && time.Since(in.posted) < m.c.again {
			m.mu.Unlock()
			return
		}
	}
	m.n++
	id := fmt.Sprintf("i%d", m.n)
	if m.incidents == nil {
		m.incidents = map[string]*incident{}
	}
	m.incidents[id] = &incident{Incident: remediation.Incident{
		Class: class, Level: names.LevelConfirmed, CulpritKind: "rank", Culprit: fmt.Sprintf("rank %d", at.rank), Node: at.node, Reason: reason,
		Rank: at.rank, Attempt: at.attempt, Opened: m.c.calendar.now(),
	}, id: id, posted: time.Now(), at: at}
	m.mu.Unlock()
	m.c.r.post(map[string]string{
		names.LabelJob: campaignJob, names.LabelIncident: id, names.LabelClass: class, names.LabelLevel: names.LevelConfirmed,
		names.LabelCulprit: fmt.Sprintf("rank %d", at.rank), names.LabelCulpritKind: "rank", names.LabelRank: fmt.Sprint(at.rank),
		names.LabelNode: at.node, names.LabelReason: reason, names.LabelAttempt: fmt.Sprint(at.attempt),
	})
}

// Fence implements remediation.Fencer: of a node without power it is known at once that its
// ranks have ended; of one that is cut off, when their lease has ended.
func (c *campaign) Fence(_ context.Context, _ string, _ int, node string) (remediation.Proof, error) {
	now := c.deaths.struck(atFence, atFence)
	c.strike(now, false)
	c.strike(now, true)
	switch {
	case c.deaths.away(theMaster):
		return remediation.Proof{}, errNotThere
	case c.deaths.away(theAgent):
		return remediation.Proof{How: "its agent does not answer"}, nil
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.ill[node] == cut_ {
		if c.asked[node]++; c.asked[node] < 3 {
			return remediation.Proof{How: "its agent does not answer, and its ranks may run on"}, nil
		}
		return remediation.Proof{Proven: true, How: "the lease of its ranks has ended"}, nil
	}
	return remediation.Proof{Proven: true, How: "its power is off"}, nil
}

var discard = slog.New(slog.DiscardHandler)
