package master

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/lockstep-ccl/lockstep/collector/wire"
)

// This file has agents stop what is left of an attempt when a remediator asks for that, and
// says what is proven. An order is on disk before it goes out. It stands, so that a node that
// was cut off hears it when it comes back, but only once the job is in a later attempt or while
// a call waits for it: ranks that were restarted without a new attempt number must not be
// stopped by it.

const (
	maxFences   = 64 // orders that stand
	maxWaiting  = 32 // calls that wait at a time
	fenceLook   = 100 * time.Millisecond
	fenceFile   = "fences.json"
	fenceFormat = 1
)

// fence is an order that stands.
type fence struct {
	ID      uint64 `json:"id"`
	Attempt uint32 `json:"attempt"`
	Node    string `json:"node,omitempty"` // "": everywhere
	By      string `json:"by"`             // whose call it was first
	At      int64  `json:"at"`             // unix ns
	// Expected are the nodes that must report that nothing is left: those that had ranks when
	// the order was given.
	Expected map[string]expected `json:"expected"`

	waiting int
	results map[string]*wire.FenceResult
}

// expected is what was known of a node when an order was given.
type expected struct {
	Ranks    int   `json:"ranks"`
	Lease    int64 `json:"lease_ns,omitempty"`  // 0: not all of its ranks have one
	Margin   int64 `json:"margin_ns,omitempty"` // 0: a former master wrote this
	LastSeen int64 `json:"last_seen"`           // unix ns
}

// fences is guarded by Master.mu.
type fences struct {
	all     []*fence // oldest first
	last    uint64   // id
	waiting int
	// kept is what this master has saved of its nodes' leases, former what its predecessor had
	// saved.
	kept, former leases
	keptAt       int64
	unkept       bool // the last attempt failed

	proven, unproven, refused uint64 // calls
}

type savedFences struct {
	Version int      `json:"version"`
	Job     string   `json:"job"`
	All     []*fence `json:"fences"`
}

type fenceService struct {
	wire.UnimplementedFencesServer
	*Master
}

// Fence implements wire.FencesServer.
func (m fenceService) Fence(ctx context.Context, q *wire.FenceRequest) (*wire.FenceReply, error) {
	if err := m.admit(ctx, wire.Identity.Remediator); err != nil {
		return nil, err
	}
	f, err := m.order(ctx, q)
	if err != nil {
		m.mu.Lock()
		m.fences.refused++
		m.mu.Unlock()
		return nil, err
	}
	defer func() {
		m.mu.Lock()
		f.waiting--
		m.fences.waiting--
		m.mu.Unlock()
	}()
	look := time.NewTicker(fenceLook)
	defer look.Stop()
	deadline, _ := ctx.Deadline()
	// The answer "no proof" must arrive before the caller's deadline.
	last := time.After(max(0, time.Until(deadline)-min(500*time.Millisecond, time.Until(deadline)/4)))
	for over := false; ; {
		m.mu.Lock()
		m.sendFences()
		proven, how, in := m.proof(f)
		m.mu.Unlock()
		select {
		case <-m.stopping:
			return nil, status.Error(codes.Unavailable, "master is stopping")
		default:
		}
		if proven || over {
			m.mu.Lock()
			if proven {
				m.fences.proven++
			} else {
				m.fences.unproven++
			}
			m.mu.Unlock()
			m.log.Info("fence", "attempt", f.Attempt, "on", f.Node, "proven", proven, "how", how)
			return &wire.FenceReply{Proven: proven, How: how, ProvenInNs: in.Nanoseconds()}, nil
		}
		select {
		case <-look.C:
		case <-last:
			over = true
		case <-ctx.Done():
			if !errors.Is(ctx.Err(), context.DeadlineExceeded) {
				return nil, status.FromContextError(ctx.Err()).Err()
			}
			over = true // this process was held up; the caller may still listen
		case <-m.stopping:
		}
	}
}

// order makes the order that a call asks for and saves it, or finds the one that stands.
func (m *Master) order(ctx context.Context, q *wire.FenceRequest) (*fence, error) {
	if q.Job != m.o.Job {
		return nil, status.Errorf(codes.FailedPrecondition, "this is the master of another job than %.*q", wire.MaxName, q.Job)
	}
	if len(q.Node) > wire.MaxName {
		return nil, status.Errorf(codes.InvalidArgument, "node name of %d bytes, at most %d", len(q.Node), wire.MaxName)
	}
	if _, ok := ctx.Deadline(); !ok {
		return nil, status.Error(codes.InvalidArgument, "a call that waits for proof needs a deadline")
	}
	by := "a process of this user or root, on this host"
	if id, authenticated, err := wire.PeerIdentity(ctx); err == nil && authenticated {
		by = id.String()
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	switch {
	case m.fences.waiting >= maxWaiting:
		return nil, status.Errorf(codes.ResourceExhausted, "%d calls wait for proof, the limit", maxWaiting)
	case m.state.epochs > 0 && q.Attempt > m.state.attempt:
		return nil, status.Errorf(codes.FailedPrecondition, "the job is in attempt %d, not in %d yet", m.state.attempt, q.Attempt)
	}
	i := slices.IndexFunc(m.fences.all, func(f *fence) bool { return f.Attempt == q.Attempt && f.Node == q.Node })
	var f *fence
	if i >= 0 {
		f = m.fences.all[i]
		m.expect(f)
	} else {
		if f = m.newFence(q, by); f == nil {
			return nil, status.Errorf(codes.ResourceExhausted, "%d orders are waited for, the limit", maxFences)
		}
	}
	if err := m.saveFences(); err != nil {
		if i < 0 {
			m.fences.all = slices.DeleteFunc(m.fences.all, func(o *fence) bool { return o == f })
		}
		return nil, status.Errorf(codes.Unavailable, "the order cannot be written down, so it is not given: %v", err)
	}
	f.waiting++
	m.fences.waiting++
	if i < 0 {
		m.log.Warn("agents are told to stop what is left of an attempt", "attempt", f.Attempt, "on", f.Node, "by", f.By)
	}
	return f, nil
}

func (m *Master) newFence(q *wire.FenceRequest, by string) *fence {
	if len(m.fences.all) >= maxFences {
		i := slices.IndexFunc(m.fences.all, func(f *fence) bool { return f.waiting == 0 })
		if i < 0 {
			return nil
		}
		m.fences.all = slices.Delete(m.fences.all, i, i+1)
	}
	m.fences.last = max(m.fences.last+1, uint64(m.now())) // of another run of this master, too
	f := &fence{ID: m.fences.last, Attempt: q.Attempt, Node: q.Node, By: bounded(by), At: m.now(), Expected: map[string]expected{}, results: map[string]*wire.FenceResult{}}
	m.expect(f)
	m.fences.all = append(m.fences.all, f)
	return f
}

// expect notes which nodes must answer an order: those with ranks of its attempts.
func (m *Master) expect(f *fence) {
	m.expectFormer(f)
	m.expectHeard(f)
}

func (m *Master) expectHeard(f *fence) {
	if m.state.attempt > f.Attempt {
		return // they are of a later one
	}
	nodes := map[string]expected{}
	for r := range m.state.ranks {
		p := &m.state.ranks[r]
		if p.node < 0 || !m.state.trusted(p.node) {
			continue
		}
		name := m.state.ev.Nodes[p.node].Name
		if f.Node != "" && f.Node != name {
			continue
		}
		e, known := nodes[name]
		e.LastSeen = m.state.ev.Nodes[p.node].LastSeen
		if e.Ranks++; !known || e.Lease > 0 {
			e.Lease = max(e.Lease, p.lease)
		}
		if p.lease == 0 {
			e.Lease = 0
		}
		e.Margin = max(e.Margin, p.leaseMargin())
		nodes[name] = e
	}
	for name, e := range nodes {
		f.Expected[name] = e
	}
}

// leaseMargin is how much longer than its lease a rank's node must be silent, ns.
func (p *process) leaseMargin() int64 {
	if !p.leaseKept {
		return int64(wire.FormerLeaseMargin)
	}
	return int64(wire.LeaseMargin(time.Duration(p.lease)))
}

// sendFences sends each order to the agents it concerns, once on each of their streams.
func (m *Master) sendFences() {
	for _, f := range m.fences.all {
		if f.waiting == 0 && f.Attempt >= m.state.attempt {
			continue
		}
		for i := range m.state.nodes {
			s := m.state.nodes[i].stream
			if s == nil || f.Node != "" && f.Node != m.state.ev.Nodes[i].Name || s.fences[f.ID] {
				continue
			}
			if s.send(&wire.MasterMessage{Body: &wire.MasterMessage_FenceOrder{FenceOrder: &wire.FenceOrder{Id: f.ID, Attempt: f.Attempt}}}) {
				if s.fences == nil {
					s.fences = map[uint64]bool{}
				}
				s.fences[f.ID] = true
			}
		}
	}
}

// fenced takes in what an agent says of an order.
func (m *Master) fenced(n int32, s *stream, r *wire.FenceResult) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.state.nodes[n].stream != s || !s.fences[r.Id] {
		return
	}
	for _, f := range m.fences.all {
		if f.ID == r.Id {
			r.Detail = strings.ToValidUTF8(r.Detail[:min(len(r.Detail), 512)], "")
			f.results[m.state.ev.Nodes[n].Name] = r
		}
	}
}

// proof says what is known of an order, and which nodes have not answered. Where only leases
// that have not run out are missing, it also says in what time they will have; else 0.
func (m *Master) proof(f *fence) (proven bool, how string, in time.Duration) {
	var missing []string
	if m.state.attempt <= f.Attempt {
		if m.state.epochs == 0 {
			return false, "no agent has told of the job yet", 0
		}
		m.expect(f) // who has come meanwhile
		if f.Node == "" {
			if unseen := m.unseen(); unseen > 0 {
				missing = append(missing, fmt.Sprintf("no agent tells of %d of %d ranks", unseen, len(m.state.ranks)))
			}
		}
	}
	if f.Node != "" && len(f.Expected) == 0 && m.nodeIndex(f.Node) < 0 {
		missing = append(missing, fmt.Sprintf("no agent has told of node %s", f.Node))
	}
	names := map[string]bool{}
	for name := range f.Expected {
		names[name] = true
	}
	for i := range m.state.nodes { // others that are heard of: they may have some, too
		if nd := &m.state.nodes[i]; nd.stream != nil && nd.stream.fences[f.ID] && nd.since != 0 && m.state.trusted(int32(i)) {
			names[m.state.ev.Nodes[i].Name] = true
		}
	}
	if f.Node != "" {
		names[f.Node] = true
	}
	var ended, stopped, killed uint32
	nodes, leased := 0, []string(nil)
	running := 0 // leases
	for _, name := range sortedKeys(names) {
		r := f.results[name]
		switch why, left := m.withoutWord(f, name, r); {
		case r != nil && r.Living == 0:
			ended, stopped, killed = ended+r.Ended, stopped+r.Stopped, killed+r.Killed
			nodes++
		case why == "":
			leased = append(leased, name)
		default:
			missing = append(missing, why)
			if left > 0 {
				in = max(in, left)
				running++
			}
		}
	}
	if len(missing) > running {
		in = 0
	}
	if len(missing) > 0 {
		return false, firstOf(missing, 8), in
	}
	how = fmt.Sprintf("the agents of %d nodes say that nothing of attempt %d is left: %d processes had ended, %d ended when told to, %d were killed", nodes, f.Attempt, ended, stopped, killed)
	if len(leased) > 0 {
		how += "; by the lease that the job has asked for, so have those of " + firstOf(leased, 8)
	}
	return true, how, 0
}

// withoutWord says why a node that has not answered cannot be taken to be empty, "" when its
// lease has run out; and in what time the lease will have run out, 0 when it has none.
func (m *Master) withoutWord(f *fence, name string, r *wire.FenceResult) (why string, left time.Duration) {
	if r != nil && r.Living == 0 {
		return "", 0
	}
	i := m.nodeIndex(name)
	if i >= 0 && m.state.nodes[i].stream != nil && m.state.heard(i) {
		if r != nil {
			return fmt.Sprintf("node %s: %d processes live: %s", name, r.Living, r.Detail), 0
		}
		return fmt.Sprintf("node %s has not answered yet", name), 0
	}
	e := f.Expected[name]
	seen := e.LastSeen
	if i >= 0 {
		seen = max(seen, m.state.ev.Nodes[i].LastSeen)
	}
	if seen == 0 {
		return fmt.Sprintf("node %s is not heard", name), 0
	}
	silent := time.Duration(m.now() - seen)
	if e.Lease > 0 {
		margin := cmp.Or(time.Duration(e.Margin), wire.FormerLeaseMargin)
		if left = time.Duration(e.Lease) + margin - silent; left > 0 {
			return fmt.Sprintf("node %s is not heard for %v; its lease is over in %v", name, silent.Round(time.Second), left.Round(time.Second)), left
		}
		return "", 0
	}
	return fmt.Sprintf("node %s is not heard for %v, and its ranks have no lease (LOCKSTEP_FENCE_LEASE)", name, silent.Round(time.Second)), 0
}

// unseen is how many ranks no trusted agent reports.
func (m *Master) unseen() (n int) {
	for r := range m.state.ranks {
		if p := &m.state.ranks[r]; p.node < 0 || !m.state.trusted(p.node) {
			n++
		}
	}
	return n
}

func (m *Master) nodeIndex(name string) int32 {
	if i, ok := m.state.nodeOf[name]; ok {
		return i
	}
	return -1
}

func firstOf(list []string, most int) string {
	if n := len(list); n > most {
		return strings.Join(list[:most], "; ") + fmt.Sprintf("; and %d more", n-most)
	}
	return strings.Join(list, "; ")
}

func sortedKeys(m map[string]bool) []string {
	keys := make([]string, 0, len(m))
	for k := range m {
		keys = append(keys, k)
	}
	slices.Sort(keys)
	return keys
}

// dropFences forgets all orders. The job was started anew, and counts its attempts from another
// number.
func (m *Master) dropFences() {
	m.fences.former, m.fences.kept = leases{}, leases{}
	if len(m.fences.all) == 0 {
		return
	}
	m.fences.all = slices.DeleteFunc(m.fences.all, func(f *fence) bool { return f.waiting == 0 })
	if err := m.saveFences(); err != nil {
		m.log.Error("orders of a former run are still on disk", "err", err)
	}
}

func (m *Master) saveFences() error {
	if m.dir == nil {
		return nil
	}
	b, err := json.Marshal(savedFences{fenceFormat, m.o.Job, m.fences.all})
	if err != nil {
		return err
	}
	return m.dir.Replace(fenceFile, b)
}

// loadFences reads the orders of a former master. A damaged file is an error: without it nobody
// knows what a node that comes back has to stop.
func (m *Master) loadFences() error {
	b, err := m.dir.ReadFile(fenceFile, 1<<20)
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	all, err := parseFences(b, m.o.Job)
	if err != nil {
		m.log.Error("orders of the last run are lost: the file is set aside", "err", err)
		return os.Rename(m.dir.Join(fenceFile), m.dir.Join(fenceFile+".damaged"))
	}
	for _, f := range all {
		m.fences.last = max(m.fences.last, f.ID)
		for name, e := range f.Expected {
			e.LastSeen = m.now() // the last master may have heard it until it ended
			f.Expected[name] = e
		}
	}
	m.fences.all = all
	return nil
}

func parseFences(b []byte, job string) ([]*fence, error) {
	var s savedFences
	if err := json.Unmarshal(b, &s); err != nil {
		return nil, err
	}
	if s.Version != fenceFormat || s.Job != job || len(s.All) > maxFences {
		return nil, fmt.Errorf("version %d, job %.64q, %d orders", s.Version, s.Job, len(s.All))
	}
	for _, f := range s.All {
		if f == nil || f.Attempt > maxAttempt || len(f.Node) > wire.MaxName {
			return nil, errors.New("an order that nobody gave")
		}
		if f.Expected == nil {
			f.Expected = map[string]expected{}
		}
		f.results = map[string]*wire.FenceResult{}
	}
	return s.All, nil
}
