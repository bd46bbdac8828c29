package diagnosis

import "math"

// sum sums up what every rank did in the window and what its history says of it.
func (d *drags) sum(elapsed float64) (own, ops, active float64) {
	d.grown, d.inside = zeroed(d.grown, len(d.ev.Comms)), zeroed(d.inside, len(d.ev.Comms))
	d.shares = shares(d.shares, d.ev)
	d.parts = resized(d.parts, len(d.shares))
	inShares(d.shares, func(k, lo, hi int) {
		p := &d.parts[k]
		*p = dragPart{did: zeroed(p.did, len(d.ranks))}
		for ci := lo; ci < hi; ci++ {
			d.sumComm(p, ci, elapsed)
		}
	})
	d.did, d.parts[0].did = d.parts[0].did, d.did
	for k := range d.parts {
		p := &d.parts[k]
		if own, ops = own+p.own, ops+p.ops; k == 0 {
			continue
		}
		for r := range p.did {
			x, y := &d.did[r], &p.did[r]
			x.own, x.pred, x.inside, x.usual = x.own+y.own, x.pred+y.pred, x.inside+y.inside, x.usual+y.usual
		}
	}
	for r := range d.ranks {
		if d.did[r].own > 0 {
			active++
		}
	}
	return own, ops, active
}

// dragPart are the sums of some communicators.
type dragPart struct {
	did      []rankDid // by world rank
	own, ops float64
}

// sumComm adds what a communicator's members did.
func (d *drags) sumComm(p *dragPart, ci int, elapsed float64) {
	members, of := d.ev.Comms[ci].Members, d.members[d.first[ci]:]
	least, told := math.Inf(1), 0
	in := &d.inside[ci]
	for i := range members {
		m, u := &members[i], &of[i]
		now := d.until(ci, i)
		n := now.ops - u.ops
		in.ops, in.wait, in.transfer = in.ops+m.Ops, in.wait+m.WaitNs, in.transfer+m.TransferNs
		if uint32(m.World) >= uint32(len(p.did)) || n == 0 || now.ops < u.ops {
			continue
		}
		x := &p.did[m.World]
		x.own += float32(now.own - u.own)
		x.inside += float32(now.inside - u.inside)
		if u.n > 0 {
			x.pred += u.ownNs / u.n * float32(n)
			x.usual += u.insideNs / u.n * float32(n)
			told++
			least = min(least, float64(now.inside-u.inside)-float64(u.insideNs/u.n)*float64(n))
		}
		p.own += float64(now.own - u.own)
		p.ops += float64(n)
	}
	if told > 1 && 4*told >= 3*len(members) {
		d.grown[ci] = float32(least / elapsed)
	}
}
