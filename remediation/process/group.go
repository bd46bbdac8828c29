package process

import (
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/lockstep-ccl/lockstep/fence"
)

// phase of a run of the job.
type phase string

const (
	phaseGather phase = "gather" // hosts come, and what is left of the last attempt ends
	phaseRun    phase = "run"
	phaseDone   phase = "done"
	phaseFailed phase = "failed"
)

// books are what a coordinator must not forget. They are on disk before anybody hears of them.
type books struct {
	Version    int                     `json:"version"`
	Job        string                  `json:"job"`
	Run        string                  `json:"run"`
	Rev        uint64                  `json:"rev"`
	Phase      phase                   `json:"phase"`
	Attempt    int                     `json:"attempt"` // the last begun; -1 none
	Generation uint64                  `json:"generation"`
	Token      string                  `json:"token,omitempty"`
	Secret     string                  `json:"secret,omitempty"`
	Meet       map[string]string       `json:"meet,omitempty"`
	Hosts      []place                 `json:"hosts"`    // of the last attempt, in the order of their ranks
	Excluded   []string                `json:"excluded"` // nodes
	Restarts   int                     `json:"restarts"` // that nobody asked for
	Asked      string                  `json:"asked,omitempty"`
	Detail     string                  `json:"detail,omitempty"` // of what was asked
	Actions    map[string]RestartReply `json:"actions"`
	Why        string                  `json:"why,omitempty"` // how the last attempt, or the job, ended
}

const booksVersion = 1

// keepActions bounds the answers that are kept; breakers allow far fewer restarts.
const keepActions = 1024

// place is a host of an attempt, and whose word proves that nothing of it is left there.
type place struct {
	Node   string `json:"node"`
	Holder string `json:"holder"`
	Boot   string `json:"boot"` // for who reads the books
}

// hostView is what a coordinator has heard of a host since it was started.
type hostView struct {
	Report
	conn     int       // whose words count; 0: none
	since    time.Time // no former holder has been answered since
	heard    time.Time
	answered time.Time // when the last answer to it went out: its lease cannot end later than a lease after that
}

// group decides for all hosts of a job: which of them run the attempt, when it is over, when the next may
// begin. It is pure: time, reports and requests come from the caller, which saves the books whenever
// dirty says so, before it tells anybody an order.
type group struct {
	o     groupOptions
	b     books
	dirty bool
	since time.Time // when this coordinator was started
	from  time.Time // when the phase began
	hook  hookState

	hosts  map[string]*hostView
	failed *failure
}

type groupOptions struct {
	Hosts, Local      int
	Lease, Margin     time.Duration
	Grace, Hold, Join time.Duration
	MaxRestarts       int
	Hook              bool
}

type hookState int

const (
	hookNone hookState = iota
	hookDue
	hookRuns
)

// failure is why the attempt is over, from when it was seen.
type failure struct {
	why string
	at  time.Time
}

func newBooks(job string, attempt int, generation, rev uint64) books {
	var id [8]byte
	rand.Read(id[:]) // never fails
	return books{Version: booksVersion, Job: job, Run: hex.EncodeToString(id[:]), Rev: rev + 1, Phase: phaseGather,
		Attempt: attempt, Generation: generation, Hosts: []place{}, Excluded: []string{}, Actions: map[string]RestartReply{}}
}

// newGroup goes on with the books, also with those of a coordinator that was killed: what it
// knew of hosts is gone, so each is taken for heard and answered now.
func newGroup(o groupOptions, b books, now time.Time) *group {
	b.Rev++
	g := &group{o: o, b: b, dirty: true, since: now, from: now, hosts: map[string]*hostView{}}
	if o.Hook && b.Phase == phaseGather && len(b.Hosts) > 0 {
		g.hook = hookDue
	}
	return g
}

// report takes a host's word. An error is for that supervisor alone.
func (g *group) report(now time.Time, conn int, r Report) error {
	h := g.hosts[r.Node]
	switch {
	case r.Local != g.o.Local:
		return &refusal{fmt.Errorf("it was told of %d ranks a host, the coordinator of %d: give all hosts the same --ranks and --hosts", r.Local, g.o.Local), RefusedJob}
	case h != nil && h.conn != 0 && h.conn != conn && h.Holder != r.Holder && now.Sub(h.heard) < g.o.Lease:
		err := fmt.Errorf("another supervisor calls itself node %s: give each host a name of its own by --node", r.Node)
		if h.Boot != r.Boot { // or the machine was switched off and on
			err = fmt.Errorf("%w: %w", errLater, err)
		}
		return &refusal{err, RefusedName}
	case h != nil && h.conn > conn:
		return &refusal{err: fmt.Errorf("node %s has connected anew since", r.Node)}
	case h == nil && len(g.hosts) >= maxHosts:
		return &refusal{fmt.Errorf("%d hosts are here already", len(g.hosts)), RefusedFull}
	}
	if h == nil {
		h = &hostView{answered: g.since}
		g.hosts[r.Node] = h
	}
	if h.Holder != r.Holder {
		h.since = h.answered
	}
	h.Report, h.conn, h.heard = r, conn, now
	return nil
}

const maxHosts = 1 << 14

// errLater has a supervisor try again.
var errLater = errors.New("not yet")

// gone says that a connection has ended: no proof of anything.
func (g *group) gone(conn int) {
	for _, h := range g.hosts {
		if h.conn == conn {
			h.conn = 0
		}
	}
}

// order is what a host is to do, in answer to its last report.
func (g *group) order(now time.Time, node string) Order {
	o := Order{Protocol: protocol, Run: g.b.Run, Rev: g.b.Rev, Kind: orderWait, Lease: g.o.Lease, Grace: g.o.Grace}
	if h := g.hosts[node]; h != nil {
		o.Seq, h.answered = h.Seq, now
	}
	i := slices.IndexFunc(g.b.Hosts, func(p place) bool { return p.Node == node })
	switch {
	case g.b.Phase == phaseDone:
		o.Kind = orderDone
	case g.b.Phase == phaseFailed:
		o.Kind, o.Why = orderFailed, g.b.Why
	case g.b.Phase == phaseRun && i >= 0 && g.hosts[node] != nil && g.hosts[node].Holder == g.b.Hosts[i].Holder:
		o.Kind, o.Generation, o.Attempt, o.Token, o.Secret = orderRun, g.b.Generation, g.b.Attempt, g.b.Token, g.b.Secret
		o.Group, o.Groups, o.Meet = i, len(g.b.Hosts), g.b.Meet
	}
	return o
}

// tick looks at all that may have come to be due.
func (g *group) tick(now time.Time) {
	switch g.b.Phase {
	case phaseGather:
		g.gather(now)
	case phaseRun:
		g.watch(now)
	}
}

// enter changes the phase.
func (g *group) enter(now time.Time, to phase, why string) {
	g.b.Phase, g.b.Why, g.b.Rev = to, why, g.b.Rev+1
	g.from, g.failed, g.dirty = now, nil, true
	if to != phaseRun { // nobody is to join this attempt any more
		g.b.Token, g.b.Secret, g.b.Meet = "", "", nil
	}
}

// hooked says what came of the hook.
func (g *group) hooked(now time.Time, err error) {
	if g.hook = hookNone; err != nil && g.b.Phase == phaseGather {
		g.enter(now, phaseFailed, err.Error())
	}
}

// watch looks at the attempt that runs.
func (g *group) watch(now time.Time) {
	done := true
	for _, p := range g.b.Hosts {
		ended, why := g.look(now, p)
		done = done && ended
		if why != "" && g.failed == nil {
			g.failed = &failure{why, now}
		}
	}
	switch {
	case done:
		g.enter(now, phaseDone, "")
	case g.failed != nil && now.Sub(g.failed.at) >= g.o.Hold:
		why := g.failed.why
		if g.b.Restarts >= g.o.MaxRestarts {
			g.enter(now, phaseFailed, fmt.Sprintf("attempt %d: %s (restarts on its own: at most %d, see --max-restarts)", g.b.Attempt, why, g.o.MaxRestarts))
			return
		}
		g.b.Restarts++
		g.again(now, why)
	}
}

// again ends the attempt, and has the next one follow.
func (g *group) again(now time.Time, why string) {
	g.enter(now, phaseGather, why)
	if g.o.Hook {
		g.hook = hookDue
	}
}

// look says how an attempt does on one of its hosts.
func (g *group) look(now time.Time, p place) (ended bool, why string) {
	h := g.hosts[p.Node]
	heard := g.since
	if h != nil {
		heard = h.heard
	}
	switch {
	case now.Sub(heard) >= g.o.Lease:
		return false, fmt.Sprintf("node %s: its supervisor has not been heard for %v", p.Node, g.o.Lease)
	case h == nil:
		return false, ""
	case h.Holder != p.Holder:
		return false, fmt.Sprintf("node %s: its supervisor was replaced by one with another state directory", p.Node)
	case h.Leaving:
		return false, fmt.Sprintf("node %s: its supervisor was told to end", p.Node)
	case h.Last >= g.b.Generation && h.Holds != g.b.Generation:
		if h.Failed != "" {
			return false, fmt.Sprintf("node %s: %s", p.Node, h.Failed)
		}
		return false, fmt.Sprintf("node %s: its ranks have ended with their supervisor, which was started again", p.Node)
	case h.Holds != g.b.Generation:
		return false, "" // it has not begun
	}
	ended = true
	for _, r := range h.Ranks {
		if r.State != "exited" {
			ended = false
		} else if r.Exit != exitedWell {
			return false, fmt.Sprintf("rank %d on node %s: %s", r.Rank, p.Node, r.Exit)
		}
	}
	return ended && len(h.Ranks) == g.o.Local, ""
}

const exitedWell = "exit status 0"

// fenced reports whether nothing of the last attempt can be left on a host: its supervisor says so after
// it was told to have none; or it was silent until its lease was long over. Another boot id proves nothing
// where the holder is another, too: another machine may have taken the name of one that is cut off.
func (g *group) fenced(now time.Time, p place) bool {
	h := g.hosts[p.Node]
	if h == nil {
		return now.Sub(g.since) >= g.o.Lease+g.o.Margin
	}
	if h.conn != 0 && h.Rev >= g.b.Rev && h.Holds == 0 && h.Holder == p.Holder {
		return true
	}
	return h.conn == 0 && now.Sub(h.answered) >= g.o.Lease+g.o.Margin || h.Holder != p.Holder && now.Sub(h.since) >= g.o.Lease+g.o.Margin
}

// free reports whether a host can take ranks: it is heard, has nothing, and knows that.
func (g *group) free(now time.Time, node string) bool {
	h := g.hosts[node]
	return h != nil && h.conn != 0 && now.Sub(h.heard) < g.o.Lease && h.Rev >= g.b.Rev && h.Holds == 0 && !h.Leaving &&
		len(h.Meet) > 0 && !slices.Contains(g.b.Excluded, node)
}

// gather begins the next attempt as soon as there are hosts enough and nothing is left of the last one.
func (g *group) gather(now time.Time) {
	if g.hook == hookRuns {
		return
	}
	var owing []string
	for _, p := range g.b.Hosts {
		if !g.fenced(now, p) {
			owing = append(owing, p.Node)
		}
	}
	chosen := g.choose(now)
	switch {
	case len(owing) == 0 && g.hook == hookDue:
		g.hook = hookRuns // the caller runs it, and says what came of it
		return
	case len(owing) == 0 && len(chosen) == g.o.Hosts:
		g.begin(now, chosen)
		return
	}
	if now.Sub(g.from) < g.o.Join {
		return
	}
	why := fmt.Sprintf("%d of %d hosts were there within %v", len(chosen), g.o.Hosts, g.o.Join)
	if len(owing) > 0 {
		for i, n := range owing {
			if h := g.hosts[n]; h != nil && h.Failed != "" {
				owing[i] += " (" + h.Failed + ")"
			}
		}
		why = fmt.Sprintf("within %v nothing has shown that the last attempt's processes are gone from %s", g.o.Join, strings.Join(owing, ", "))
	}
	if g.b.Why != "" {
		why += " (the last attempt: " + g.b.Why + ")"
	}
	g.enter(now, phaseFailed, why)
}

// choose keeps each host in its place that can stay there, and fills the others' in the order of names.
func (g *group) choose(now time.Time) []string {
	list := make([]string, g.o.Hosts)
	for i, p := range g.b.Hosts {
		if i < len(list) && g.free(now, p.Node) {
			list[i] = p.Node
		}
	}
	for _, node := range slices.Sorted(maps.Keys(g.hosts)) {
		if i := slices.Index(list, ""); i >= 0 && g.free(now, node) && !slices.Contains(list, node) {
			list[i] = node
		}
	}
	return slices.DeleteFunc(list, func(n string) bool { return n == "" })
}

// begin puts the next attempt into the books.
func (g *group) begin(now time.Time, nodes []string) {
	b := &g.b
	b.Attempt++
	t := fence.New(b.Attempt, b.Generation)
	var secret [32]byte
	rand.Read(secret[:])
	b.Generation, b.Token, b.Secret = t.Generation, t.String(), hex.EncodeToString(secret[:])
	b.Hosts, b.Meet = b.Hosts[:0:0], maps.Clone(g.hosts[nodes[0]].Meet)
	for _, n := range nodes {
		b.Hosts = append(b.Hosts, place{n, g.hosts[n].Holder, g.hosts[n].Boot})
	}
	if b.Asked != "" {
		g.keep(b.Asked, RestartReply{Attempt: b.Attempt, At: now, Detail: fmt.Sprintf("attempt %d started%s", b.Attempt, b.Detail)})
		b.Asked, b.Detail = "", ""
	}
	g.enter(now, phaseRun, "")
}

// keep remembers an answer; the oldest go when there are too many.
func (g *group) keep(action string, r RestartReply) {
	g.b.Actions[action] = r
	for len(g.b.Actions) > keepActions {
		oldest := action
		for id, o := range g.b.Actions {
			if o.At.Before(g.b.Actions[oldest].At) {
				oldest = id
			}
		}
		delete(g.b.Actions, oldest)
	}
}

// request takes what the remediator wants. It returns the answer, or that it comes when the next
// attempt has begun (the same question is to be asked again).
func (g *group) request(now time.Time, r RestartRequest) (reply RestartReply, answered bool) {
	reply, repeated := g.b.Actions[r.Action]
	switch {
	case repeated:
		reply.Repeated = true
		reply.Detail += " (answered again)"
		return reply, true
	case g.b.Asked == r.Action:
		return RestartReply{}, false
	case r.Attempt != nil && *r.Attempt != g.b.Attempt:
		return RestartReply{Attempt: g.b.Attempt, Detail: fmt.Sprintf("nothing done: the decision was about attempt %d, attempt %d runs", *r.Attempt, g.b.Attempt)}, true
	case g.b.Phase == phaseGather && (g.b.Asked != "" || len(g.b.Hosts) == 0):
		return RestartReply{Attempt: g.b.Attempt, Detail: fmt.Sprintf("nothing done: attempt %d is about to be started", g.b.Attempt+1)}, true
	}
	g.b.Asked, g.b.Detail, g.dirty = r.Action, g.exclude(now, r.Exclude), true
	if g.b.Phase == phaseRun {
		g.again(now, "asked to: "+bound(r.Reason))
	}
	return RestartReply{}, false
}

// exclude takes the hosts of ranks out where others can take their places, and says so.
func (g *group) exclude(now time.Time, ranks []int) (detail string) {
	for _, rank := range ranks {
		if rank < 0 || rank >= len(g.b.Hosts)*g.o.Local {
			continue
		}
		node := g.b.Hosts[rank/g.o.Local].Node
		if slices.Contains(g.b.Excluded, node) {
			continue
		}
		spares := 0
		for n, h := range g.hosts {
			if h.conn != 0 && now.Sub(h.heard) < g.o.Lease && !h.Leaving && !slices.Contains(g.b.Excluded, n) &&
				!slices.ContainsFunc(g.b.Hosts, func(p place) bool { return p.Node == n }) {
				spares++
			}
		}
		for _, p := range g.b.Hosts { // whose places those spares take already
			if slices.Contains(g.b.Excluded, p.Node) {
				spares--
			}
		}
		if spares < 1 {
			detail += fmt.Sprintf(", rank %d stays on node %s (no other host stands by)", rank, node)
			continue
		}
		g.b.Excluded = append(g.b.Excluded, node)
		detail += fmt.Sprintf(", node %s of rank %d is left out", node, rank)
	}
	return detail
}
