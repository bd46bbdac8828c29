package pathplan

import (
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
	"time"
)

// snapshotVersion is the encoding's version. A reader refuses others: a planner that starts
// without its plan learns it again from those who renew.
const snapshotVersion = 1

// maxSnapshot bounds what is decoded.
const maxSnapshot = 1 << 30

type snapshot struct {
	Version int            `json:"version"`
	Links   []snapshotLink `json:"links,omitempty"`
	Maps    []PortMap      `json:"maps,omitempty"`
	Jobs    []snapshotJob  `json:"jobs,omitempty"`
}

// snapshotLink is a link that is not well; an access link too.
type snapshotLink struct {
	Link
	LinkState
}

type snapshotJob struct {
	Tenant  string         `json:"tenant"`
	Job     string         `json:"job"`
	Expires time.Time      `json:"expires"`
	Conns   []snapshotConn `json:"conns"`
}

type snapshotConn struct {
	Conn   string         `json:"id"`
	Src    NIC            `json:"src"`
	Dst    NIC            `json:"dst"`
	Weight int64          `json:"weight"`
	Lanes  []snapshotLane `json:"lanes"`
}

type snapshotLane struct {
	Side  Side      `json:"side,omitempty"`
	Path  *Path     `json:"path,omitempty"`
	Port  uint16    `json:"port,omitempty"`
	Share int       `json:"share"`
	Moved time.Time `json:"moved,omitzero"`
}

// Snapshot returns the plan (links' states, maps of source ports, leases, lanes), in a
// versioned encoding. The same plan has the same snapshot.
func (p *Planner) Snapshot() []byte {
	s := snapshot{Version: snapshotVersion}
	for i := range p.links {
		if k := &p.links[i]; k.state != (LinkState{}) {
			s.Links = append(s.Links, snapshotLink{k.Link, k.state})
		}
	}
	for i := range p.fabric.ports {
		if pt := &p.fabric.ports[i]; pt.down {
			s.Links = append(s.Links, snapshotLink{Link{From: pt.Port.String(), To: pt.Leaf}, LinkState{Down: true}})
		}
	}
	for key, t := range p.maps {
		s.Maps = append(s.Maps, p.portMap(key, t))
	}
	slices.SortFunc(s.Maps, func(a, b PortMap) int {
		return cmp.Or(comparePorts(a.Key.Src, b.Key.Src), cmp.Compare(a.Key.DstLeaf, b.Key.DstLeaf), comparePorts(a.Key.Dst, b.Key.Dst))
	})
	for _, j := range p.jobs {
		s.Jobs = append(s.Jobs, p.snapshotJob(j))
	}
	slices.SortFunc(s.Jobs, func(a, b snapshotJob) int {
		return compareJobs(jobID{a.Tenant, a.Job}, jobID{b.Tenant, b.Job})
	})
	b, err := json.Marshal(s)
	if err != nil {
		panic(err) // strings, numbers and times of this century
	}
	return b
}

func comparePorts(a, b Port) int {
	return cmp.Or(cmp.Compare(a.Host, b.Host), cmp.Compare(a.Name, b.Name), cmp.Compare(a.Side, b.Side))
}

func (p *Planner) portMap(key mapKey, t *portTable) PortMap {
	m := PortMap{Key: PortKey{Src: p.fabric.ports[key.src].Port, DstLeaf: p.leaves[key.leaf]}, Version: t.version, Learnt: t.learnt}
	if key.dst != none {
		m.Key.Dst = p.fabric.ports[key.dst].Port
	}
	for id, ports := range t.paths {
		m.Paths = append(m.Paths, PathPorts{p.path(id.up, id.down), ports})
	}
	slices.SortFunc(m.Paths, func(a, b PathPorts) int {
		return cmp.Or(compareLinks(a.Path.Up, b.Path.Up), compareLinks(a.Path.Down, b.Path.Down))
	})
	return m
}

func compareLinks(a, b Link) int {
	return cmp.Or(cmp.Compare(a.From, b.From), cmp.Compare(a.To, b.To), cmp.Compare(a.Index, b.Index))
}

func (p *Planner) snapshotJob(j *job) snapshotJob {
	out := snapshotJob{Tenant: j.id.tenant, Job: j.id.job, Expires: j.expires}
	for _, c := range j.named("") {
		sc := snapshotConn{Conn: c.id.Conn, Src: c.nics[0], Dst: c.nics[1], Weight: c.weight}
		for i := range c.lanes {
			l := &c.lanes[i]
			sl := snapshotLane{Side: l.side, Port: l.port, Share: l.share, Moved: l.moved}
			if l.up != none {
				path := p.path(l.up, l.down)
				sl.Path = &path
			}
			sc.Lanes = append(sc.Lanes, sl)
		}
		out.Conns = append(out.Conns, sc)
	}
	return out
}

// Restore replaces the plan by a snapshot's. Connections and maps that the topology no
// longer has, or limits no longer allow, are dropped and counted. Jobs have at least one
// lease from now to say that they are still there. An error leaves the planner as it was.
func (p *Planner) Restore(now time.Time, data []byte) (dropped int, err error) {
	s, err := decodeSnapshot(data)
	if err != nil {
		return 0, fmt.Errorf("restore a plan of %d bytes: %w", len(data), err)
	}
	p.clear()
	p.now = now
	for _, l := range s.Links {
		if p.SetLink(now, l.Link, l.LinkState) != nil {
			dropped++
		}
	}
	for _, m := range s.Maps {
		if p.SetPorts(now, m) != nil {
			dropped++
		}
	}
	p.pass++
	for i := range s.Jobs {
		dropped += p.restoreJob(now, &s.Jobs[i])
	}
	p.reload()
	p.unsteered = true
	for i := range p.leaves {
		p.resided[int32(i)] = struct{}{}
	}
	return dropped, nil
}

func decodeSnapshot(data []byte) (*snapshot, error) {
	if len(data) > maxSnapshot {
		return nil, fmt.Errorf("more than %d bytes: %w", maxSnapshot, ErrInvalid)
	}
	var version struct {
		Version int `json:"version"`
	}
	if err := json.Unmarshal(data, &version); err != nil {
		return nil, errors.Join(err, ErrInvalid)
	}
	if version.Version != snapshotVersion {
		return nil, fmt.Errorf("version %d, this planner reads %d: %w", version.Version, snapshotVersion, ErrInvalid)
	}
	var s snapshot
	d := json.NewDecoder(bytes.NewReader(data))
	d.DisallowUnknownFields()
	if err := d.Decode(&s); err != nil {
		return nil, errors.Join(err, ErrInvalid)
	}
	if _, err := d.Token(); !errors.Is(err, io.EOF) {
		return nil, fmt.Errorf("something follows it: %w", ErrInvalid)
	}
	return &s, nil
}

// restoreJob plans a job as it was, and returns how many connections it could not.
func (p *Planner) restoreJob(now time.Time, s *snapshotJob) (dropped int) {
	for i := range s.Conns {
		sc := &s.Conns[i]
		if len(sc.Lanes) > MaxLanes || sc.Weight < 1 || sc.Weight > MaxWeight {
			dropped++
			continue
		}
		r := Request{Conn: ConnID{s.Tenant, s.Job, sc.Conn}, Src: sc.Src, Dst: sc.Dst, Lanes: len(sc.Lanes), Weight: int(sc.Weight)}
		c, isNew, err := p.admit(now, &r)
		if err != nil || !isNew {
			dropped++ // who holds it asks again when it renews
			continue
		}
		p.restoreLanes(c, sc)
	}
	if j := p.jobs[jobID{s.Tenant, s.Job}]; j != nil && s.Expires.After(j.expires) && s.Expires.Before(now.Add(24*time.Hour)) {
		j.expires = s.Expires
	}
	return dropped
}

// restoreLanes puts lanes where they were. What does not fit the topology hashes as it
// likes until Rebalance.
func (p *Planner) restoreLanes(c *conn, sc *snapshotConn) {
	var n [2]int
	for i := range sc.Lanes {
		l, sl := &c.lanes[i], &sc.Lanes[i]
		if sl.Side <= Right && c.src[sl.Side] != none && c.dst[sl.Side] != none {
			l.side = sl.Side
		}
		n[l.side]++
	}
	p.shareOut(c, n)
	p.restoreShares(c, sc)
	for i := range sc.Lanes {
		l, sl := &c.lanes[i], &sc.Lanes[i]
		if !sl.Moved.After(p.now) {
			l.moved = sl.Moved
		}
		if sl.Port != 0 && !p.opt.Steered && p.free(l, sl.Port) {
			p.takePort(l, sl.Port)
		}
		if sl.Path == nil || !p.opt.Steered && l.port == 0 {
			continue
		}
		from, to := p.ends(l)
		if up, down, ok := p.pathOf(*sl.Path, from, to); ok {
			p.place(l, up, down)
		}
	}
}

// restoreShares takes over shares that add up to what sides carry.
func (p *Planner) restoreShares(c *conn, sc *snapshotConn) {
	var want, sum [2]int
	for i := range c.lanes {
		side := c.lanes[i].side
		if sc.Lanes[i].Share < 0 || sc.Lanes[i].Share > ShareUnit {
			return
		}
		want[side] += c.lanes[i].share
		sum[side] += sc.Lanes[i].Share
	}
	if want != sum {
		return
	}
	for i := range c.lanes {
		c.lanes[i].share = sc.Lanes[i].Share
	}
}
