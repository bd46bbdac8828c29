package pathplan

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"time"
)

// Planner holds the plan of a whole fabric. Not safe for concurrent use.
type Planner struct {
	fabric
	opt   Options
	jobs  map[jobID]*job
	maps  map[mapKey]*portTable
	used  map[usedPort]struct{} // source ports that lanes have
	lanes int
	ports int // source ports in maps
	// tenants' lanes, and how often they have been moved lately, so that they take turns.
	tenants map[string]*tenant
	resided map[int32]struct{} // leaves where a side may have gone or come back
	now     time.Time          // of the call that runs
	judged  time.Time          // when links were last judged by what lanes said
	// unsteered: there may be lanes that have no path, and now could.
	unsteered bool
	shunning  int                 // tenants that shun paths
	suspects  map[int32]time.Time // links that senders lost segments on: when that was last seen
	pass      uint64              // numbers calls that place lanes
	dirty     []int32             // ports whose connections' loads have to be reckoned anew
	chain     chainSearch
}

type jobID struct{ tenant, job string }

type job struct {
	id      jobID
	expires time.Time
	conns   map[string]*conn
	lanes   int
}

type tenant struct {
	lanes    int
	moved    int
	since    time.Time
	shunned  map[route]time.Time // paths that its lanes keep off, until when
	backoffs map[route]backoff   // of those of them that lost segments
	losses   []lossBucket        // oldest first
}

// conn is a planned connection.
type conn struct {
	id       ConnID
	src, dst [2]int32 // ports by side, or none
	nics     [2]NIC
	weight   int64
	use      [2]int64 // weight times the share of bytes, by side
	gone     bool
	lanes    []lane
	at       [2][2]int // place in ports' lists: by side, then source or destination
}

// lane is one lane's place. A lane with no links is local or unsteered.
type lane struct {
	conn      *conn
	index     int
	side      Side
	up, down  int32
	at        [2]int // place in the links' lists
	port      uint16
	share     int
	load      int64 // bit/s on its links
	pass      uint64
	moved     time.Time
	moves     int
	congested time.Time // since when its windows say network
	excused   time.Time // when what it said was taken back
	heard     time.Time // when they last said anything
	part      float64   // of what is fair that it carries, 0: not known
	sentOver  int32     // the uplink that its sender has told of
	sentFrom  time.Time // since when
}

func withDefaults(o Options) Options {
	or := func(d *time.Duration, v time.Duration) {
		if *d <= 0 {
			*d = v
		}
	}
	or(&o.Lease, time.Minute)
	or(&o.PortsTTL, 10*time.Minute)
	or(&o.Hold, 10*time.Second)
	or(&o.Persist, time.Second)
	if !(o.MinGain > 0) {
		o.MinGain = 0.02
	}
	if !(o.LossMax > 0) {
		o.LossMax = 0.0005
	}
	limit := func(n *int, v int) {
		if *n <= 0 {
			*n = v
		}
	}
	limit(&o.Limits.Lanes, 1<<20)
	limit(&o.Limits.LanesPerTenant, 1<<18)
	limit(&o.Limits.LanesPerJob, 1<<17)
	limit(&o.Limits.Jobs, 1<<14)
	limit(&o.Limits.Ports, 1<<24)
	return o
}

// New returns a planner of a fabric whose links are all well. It keeps the topology's
// slices: the caller must not change them afterwards.
func New(t Topology, o Options) (*Planner, error) {
	f, err := compile(&t)
	if err != nil {
		return nil, fmt.Errorf("planner: %w", err)
	}
	p := &Planner{fabric: *f, opt: withDefaults(o)}
	p.clear()
	return p, nil
}

// clear forgets the plan and what is known of links.
func (p *Planner) clear() {
	p.jobs, p.maps = map[jobID]*job{}, map[mapKey]*portTable{}
	p.used, p.tenants = map[usedPort]struct{}{}, map[string]*tenant{}
	p.dirty, p.resided, p.unsteered = nil, map[int32]struct{}{}, false
	p.shunning, p.suspects = 0, map[int32]time.Time{}
	p.lanes, p.ports = 0, 0
	for i := range p.links {
		l := &p.links[i]
		l.state, l.class, l.planned, l.background, l.measured, l.derate, l.lanes = LinkState{}, well, 0, 0, -1, 0, nil
		l.changed, l.back = time.Time{}, time.Time{}
		l.refresh()
	}
	for i := range p.fabric.ports {
		p.fabric.ports[i] = port{HostPort: p.fabric.ports[i].HostPort, leaf: p.fabric.ports[i].leaf}
	}
}

// Allocate plans connections and renews their jobs' leases. Requests of one call are
// balanced together: ask for a job's connections at once where possible. A connection that
// is planned already, with the same ends and lanes, keeps what it has; with others it is
// planned anew. The result has a connection's lanes together, in the order of requests.
// A request that cannot be planned has no assignments, and its error is part of the
// returned error (errors.Join; ErrInvalid, ErrUnknown, ErrNoPath, ErrLimit); the others
// stand. Lanes that other calls planned do not move: Rebalance does that.
func (p *Planner) Allocate(now time.Time, reqs []Request) ([]Assignment, error) {
	p.pass++
	p.now = now
	var errs []error
	conns := make([]*conn, 0, len(reqs))
	var fresh []*lane
	for i := range reqs {
		c, isNew, err := p.admit(now, &reqs[i])
		if err != nil {
			errs = append(errs, err)
			continue
		}
		conns = append(conns, c)
		if isNew {
			for l := range c.lanes {
				if l < len(reqs[i].Current) {
					c.lanes[l].port = reqs[i].Current[l]
				}
				fresh = append(fresh, &c.lanes[l])
			}
		}
	}
	p.reload()
	p.placeFresh(fresh)
	out := make([]Assignment, 0, len(fresh))
	for _, c := range conns {
		for l := range c.lanes {
			if !c.gone { // a later request of the same call has replaced it
				out = append(out, p.assignment(now, &c.lanes[l]))
			}
		}
	}
	return out, errors.Join(errs...)
}

// admit checks a request and makes its connection, without paths.
func (p *Planner) admit(now time.Time, r *Request) (_ *conn, isNew bool, err error) {
	defer func() {
		if err != nil {
			err = fmt.Errorf("plan %.100s/%.100s/%.100s: %w", r.Conn.Tenant, r.Conn.Job, r.Conn.Conn, err)
		}
	}()
	src, dst, err := p.check(r)
	if err != nil {
		return nil, false, err
	}
	key := jobID{r.Conn.Tenant, r.Conn.Job}
	j := p.jobs[key]
	weight := int64(max(r.Weight, 1))
	if j != nil {
		j.expires = now.Add(p.opt.Lease)
		if c := j.conns[r.Conn.Conn]; c != nil {
			if c.nics == [2]NIC{r.Src, r.Dst} && len(c.lanes) == r.Lanes && c.weight == weight {
				return c, false, nil
			}
			p.drop(j, c)
			j = p.jobs[key]
		}
	}
	if err := p.room(key, j, r.Lanes); err != nil {
		return nil, false, err
	}
	if j == nil {
		j = &job{id: key, expires: now.Add(p.opt.Lease), conns: map[string]*conn{}}
		p.jobs[key] = j
	}
	c := &conn{id: r.Conn, src: src, dst: dst, nics: [2]NIC{r.Src, r.Dst}, weight: weight, lanes: make([]lane, r.Lanes)}
	p.enter(j, c)
	for i := range c.lanes {
		c.lanes[i] = lane{conn: c, index: i, up: none, down: none, sentOver: none, pass: p.pass}
	}
	p.takeSides(c)
	return c, true, nil
}

// check finds what a request names.
func (p *Planner) check(r *Request) (src, dst [2]int32, err error) {
	for _, n := range []struct{ what, name string }{{"tenant", r.Conn.Tenant}, {"job", r.Conn.Job}, {"connection", r.Conn.Conn}} {
		if err := checkName(n.what, n.name); err != nil {
			return src, dst, err
		}
	}
	if r.Lanes < 1 || r.Lanes > MaxLanes || r.Weight < 0 || r.Weight > MaxWeight || len(r.Current) > r.Lanes {
		return src, dst, fmt.Errorf("%d lanes, %d of them current, weight %d: want 1 to %d, no more, 0 to %d: %w",
			r.Lanes, len(r.Current), r.Weight, MaxLanes, MaxWeight, ErrInvalid)
	}
	src, ok := p.byNIC[r.Src]
	if !ok {
		return src, dst, fmt.Errorf("NIC %.260s: not in the topology: %w", r.Src, ErrUnknown)
	}
	if dst, ok = p.byNIC[r.Dst]; !ok {
		return src, dst, fmt.Errorf("NIC %.260s: not in the topology: %w", r.Dst, ErrUnknown)
	}
	for side := range Right + 1 {
		if p.usable(src, dst, side) {
			return src, dst, nil
		}
	}
	return src, dst, fmt.Errorf("from %s to %s: no side joins them over links that are up: %w", r.Src, r.Dst, ErrNoPath)
}

// usable says whether a side joins two NICs.
func (p *Planner) usable(src, dst [2]int32, side Side) bool {
	s, d := src[side], dst[side]
	if s == none || d == none || p.fabric.ports[s].down || p.fabric.ports[d].down {
		return false
	}
	return p.joined(p.fabric.ports[s].leaf, p.fabric.ports[d].leaf)
}

// room says whether limits leave room for more lanes.
func (p *Planner) room(id jobID, j *job, lanes int) error {
	l, ofJob, ofTenant := p.opt.Limits, lanes, lanes
	if j != nil {
		ofJob += j.lanes
	}
	if t := p.tenants[id.tenant]; t != nil {
		ofTenant += t.lanes
	}
	switch {
	case j == nil && len(p.jobs) >= l.Jobs:
		return fmt.Errorf("%d jobs are planned: %w", len(p.jobs), ErrLimit)
	case ofJob > l.LanesPerJob:
		return fmt.Errorf("%d lanes of the job, at most %d: %w", ofJob, l.LanesPerJob, ErrLimit)
	case ofTenant > l.LanesPerTenant:
		return fmt.Errorf("%d lanes of the tenant, at most %d: %w", ofTenant, l.LanesPerTenant, ErrLimit)
	case p.lanes+lanes > l.Lanes:
		return fmt.Errorf("%d lanes of all tenants, at most %d: %w", p.lanes+lanes, l.Lanes, ErrLimit)
	}
	return nil
}

// enter counts a connection with its job, tenant and ports.
func (p *Planner) enter(j *job, c *conn) {
	j.conns[c.id.Conn] = c
	j.lanes += len(c.lanes)
	p.lanes += len(c.lanes)
	t := p.tenants[c.id.Tenant]
	if t == nil {
		t = &tenant{}
		p.tenants[c.id.Tenant] = t
	}
	t.lanes += len(c.lanes)
	for side := range 2 {
		for end, id := range [2]int32{c.src[side], c.dst[side]} {
			if id == none {
				continue
			}
			pt := &p.fabric.ports[id]
			c.at[side][end] = len(pt.conns[end])
			pt.conns[end] = append(pt.conns[end], c)
		}
	}
}

// drop forgets a connection.
func (p *Planner) drop(j *job, c *conn) {
	for i := range c.lanes {
		p.unplace(&c.lanes[i])
	}
	c.gone = true
	p.setUse(c, [2]int64{})
	delete(j.conns, c.id.Conn)
	j.lanes -= len(c.lanes)
	p.lanes -= len(c.lanes)
	for side := range 2 {
		for end, id := range [2]int32{c.src[side], c.dst[side]} {
			if id == none {
				continue
			}
			pt := &p.fabric.ports[id]
			list := pt.conns[end]
			last := list[len(list)-1]
			list[c.at[side][end]], last.at[side][end] = last, c.at[side][end]
			list[len(list)-1] = nil
			pt.conns[end] = list[:len(list)-1]
		}
	}
	if t := p.tenants[c.id.Tenant]; t != nil {
		if t.lanes -= len(c.lanes); t.lanes == 0 {
			if len(t.shunned) > 0 {
				p.shunning--
			}
			delete(p.tenants, c.id.Tenant)
		}
	}
	if len(j.conns) == 0 {
		delete(p.jobs, j.id)
	}
}

// Renew keeps a job's connections for another lease. ErrUnknown: it has none (it expired,
// or the planner lost its state): allocate again, with Current.
func (p *Planner) Renew(now time.Time, tenant, job string) error {
	j := p.jobs[jobID{tenant, job}]
	if j == nil {
		return fmt.Errorf("renew job %.130s of tenant %.130s: no such lease: %w", job, tenant, ErrUnknown)
	}
	j.expires, p.now = now.Add(p.opt.Lease), now
	return nil
}

// Release forgets a connection; an empty Conn, all of its job's.
func (p *Planner) Release(id ConnID) error {
	j := p.jobs[jobID{id.Tenant, id.Job}]
	var conns []*conn
	if j != nil {
		conns = j.named(id.Conn)
	}
	if len(conns) == 0 {
		return fmt.Errorf("release %.100s/%.100s/%.100s: not planned: %w", id.Tenant, id.Job, id.Conn, ErrUnknown)
	}
	for _, c := range conns {
		p.drop(j, c)
	}
	p.reload()
	return nil
}

// named returns one connection, or all in order.
func (j *job) named(name string) []*conn {
	if name != "" {
		if c := j.conns[name]; c != nil {
			return []*conn{c}
		}
		return nil
	}
	list := make([]*conn, 0, len(j.conns))
	for _, c := range j.conns {
		list = append(list, c)
	}
	slices.SortFunc(list, func(a, b *conn) int { return cmp.Compare(a.id.Conn, b.id.Conn) })
	return list
}

// Expire releases the jobs whose leases have run out and returns how many lanes that freed.
func (p *Planner) Expire(now time.Time) (lanes int) {
	var out []*job
	for _, j := range p.jobs {
		if !j.expires.After(now) {
			out = append(out, j)
		}
	}
	slices.SortFunc(out, func(a, b *job) int { return compareJobs(a.id, b.id) })
	for _, j := range out {
		lanes += j.lanes
		for _, c := range j.named("") {
			p.drop(j, c)
		}
	}
	p.reload()
	return lanes
}

func compareJobs(a, b jobID) int {
	return cmp.Or(cmp.Compare(a.tenant, b.tenant), cmp.Compare(a.job, b.job))
}

// Assignments returns what a job has, of one connection or (empty Conn) all, as of the last
// call that was told the time.
func (p *Planner) Assignments(id ConnID) []Assignment {
	j := p.jobs[jobID{id.Tenant, id.Job}]
	if j == nil {
		return nil
	}
	var out []Assignment
	for _, c := range j.named(id.Conn) {
		for i := range c.lanes {
			out = append(out, p.assignment(p.now, &c.lanes[i]))
		}
	}
	return out
}

// Jobs is how many jobs have a lease.
func (p *Planner) Jobs() int { return len(p.jobs) }

// Conns returns the connections that are planned, in no order.
func (p *Planner) Conns() (out []ConnID) {
	for _, j := range p.jobs {
		for _, c := range j.conns {
			out = append(out, c.id)
		}
	}
	return out
}

// FairRates appends the rate in bit/s that each lane of a connection gets when all lanes of its
// links send, 0 of one without links.
func (p *Planner) FairRates(id ConnID, to []float64) []float64 {
	j := p.jobs[jobID{id.Tenant, id.Job}]
	if j == nil || j.conns[id.Conn] == nil {
		return to
	}
	for _, l := range j.conns[id.Conn].lanes {
		rate := 0.0
		if l.up != none {
			up, down := &p.links[l.up], &p.links[l.down]
			rate = min(float64(up.rate)/float64(len(up.lanes)), float64(down.rate)/float64(len(down.lanes)))
		}
		to = append(to, rate)
	}
	return to
}

// Links returns all links, in the topology's order.
func (p *Planner) Links() []LinkView {
	out := make([]LinkView, len(p.links))
	for i := range p.links {
		l := &p.links[i]
		out[i] = LinkView{Link: l.Link, Rate: l.rate, State: l.state, Planned: l.planned, Measured: l.measured, Lanes: len(l.lanes)}
	}
	return out
}

// assignment is what a lane has, as callers see it.
func (p *Planner) assignment(now time.Time, l *lane) Assignment {
	a := Assignment{Conn: l.conn.id, Lane: l.index, Side: l.side, Path: p.path(l.up, l.down), SourcePort: l.port, Share: l.share}
	if l.port != 0 {
		if t := p.table(l.conn, l.side); t != nil {
			a.Stale = now.Sub(t.learnt) > p.opt.PortsTTL
		}
	}
	return a
}
