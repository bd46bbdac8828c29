package transport

import (
	"context"
	"net/netip"

	"github.com/lockstep-ccl/lockstep/ccl/internal/verbs"
)

// How connections over RoCE v2 get their paths. Only a primary path is planned: a backup
// carries nothing, as a rule, and hashes.

// moves reports whether queue pairs of the link to a rank may be replaced by others that send from
// other ports, which both ends decide alike: where one has a plan, and packets have ports.
func (m *Mesh) moves(rank int) bool {
	mine, theirs := &m.infos[m.cfg.Rank], &m.infos[rank]
	primary := &m.rdma.paths[rank][0]
	return (mine.Paths || theirs.Paths) && mine.RDMA.Moves && theirs.RDMA.Moves && primary.Own.Addr.Is4() && primary.Peer.Addr.Is4()
}

// plan asks for the link's ports, as far as its own end has a plan. The connector's lock is held.
func (l *rdmaLink) plan(lanes int) []uint16 {
	if l.m.cfg.Paths == nil || !l.m.moves(l.peer) {
		return nil
	}
	p := &l.paths[0]
	l.path = l.m.cfg.Paths.Open(PathConn{
		Comm: l.m.cfg.ID, Name: l.m.cfg.Name, Rank: l.m.cfg.Rank, Peer: l.peer, RoCE: true,
		Local: p.Own.Addr, Remote: netip.AddrPortFrom(p.Peer.Addr, verbs.RoCEPort),
	}, l.replan)
	l.planned = l.path
	ctx, cancel := context.WithTimeout(l.m.ctx, l.m.cfg.Bounds.Ports)
	defer cancel()
	return l.planned.Ports(ctx, lanes)
}

// replan has queue pairs go over to the plan's ports.
func (l *rdmaLink) replan() {
	l.n.mu.Lock()
	defer l.n.mu.Unlock()
	if l.n.closed {
		return
	}
	l.n.wg.Go(func() {
		l.mu.Lock()
		conn, p := l.conn, l.path
		l.mu.Unlock()
		if conn == nil || p == nil {
			return // it is only coming up
		}
		ctx, cancel := context.WithTimeout(l.m.ctx, l.m.cfg.Bounds.Ports)
		defer cancel()
		if ports := p.Ports(ctx, l.lanes); ports != nil {
			conn.SetPorts(0, ports)
		}
	})
}

// progress is how far a lane of the primary path was when the plan was last told.
type progress struct {
	completed uint64
	owed      int64 // since when something is, and nothing has completed; 0: nothing is
}

// survey tells the plan how the lanes of this end fare.
func (l *rdmaLink) survey(now int64) {
	if l.planned == nil || now-l.surveyed < int64(lookLanes) {
		return
	}
	l.surveyed = now
	l.ports = l.conn.Ports(0, l.ports)
	l.states = l.states[:0]
	l.conn.Lock()
	for i, port := range l.ports {
		m, g := l.at(i, 0), &l.progress[i]
		switch {
		case m.posted <= m.completed:
			g.owed = 0
		case g.owed == 0 || g.completed != m.completed:
			g.owed = now
		}
		g.completed = m.completed
		l.states = append(l.states, LaneState{Port: port, Acked: m.completed, Stalled: g.owed > 0 && now-g.owed >= stalledAfter})
	}
	l.conn.Unlock()
	l.planned.Seen(l.states)
}
