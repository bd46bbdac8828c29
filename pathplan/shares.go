package pathplan

import (
	"math"
	"slices"
)

// Where a link is gone, lanes do not divide evenly over those left: five of 32 on one link,
// four on another. What is left over is evened out by how many bytes lanes carry: a
// connection's lanes of one side lie on several paths, and bytes go from the fuller to the
// emptier, until loads are even or a lane is at its least.

const (
	leastShare = 8       // a lane keeps this part of its even share
	fullLink   = 0.9     // bytes are shifted only where a link is this full
	fineShift  = 1. / 64 // a share that changes by less is left as it was
	maxSweeps  = 64
)

// evenShares shifts bytes between the lanes of connections.
func (r *rebalance) evenShares() {
	r.reason = Uneven
	conns := r.shiftable()
	for range maxSweeps {
		changed := false
		for _, c := range conns {
			for side := range Right + 1 {
				changed = r.shift(c, side) || changed
			}
		}
		if !changed {
			break
		}
	}
	for _, c := range conns {
		r.coarse(c)
	}
}

// shiftable are the connections that have a lane on a link that is full and fuller than
// others of its leaf.
func (r *rebalance) shiftable() []*conn {
	full := make([]bool, len(r.links))
	any := false
	for v := range vertex(2 * len(r.leaves)) {
		list := r.linksOf(v, r.chain.list)
		r.chain.list = list
		mean := 0.0
		for _, id := range list {
			mean += r.links[id].load() / float64(len(list))
		}
		for _, id := range list {
			if k := r.links[id].load(); k > fullLink && k > mean+r.opt.MinGain/2 {
				full[id], any = true, true
			}
		}
	}
	if !any {
		return nil
	}
	var out []*conn
	for i := range r.links {
		k := &r.links[i]
		if k.up || full[i] {
			for _, l := range k.lanes {
				if len(l.conn.lanes) > 1 && (full[l.up] || full[l.down]) {
					out = append(out, l.conn)
				}
			}
		}
	}
	// Those that they share links with take part: bytes pass on from one to the next.
	seen := map[*conn]bool{}
	out = slices.DeleteFunc(out, func(c *conn) bool { was := seen[c]; seen[c] = true; return was })
	for _, c := range out[:len(out):len(out)] {
		for j := range c.lanes {
			l := &c.lanes[j]
			if l.up == none {
				continue
			}
			for _, id := range [2]int32{l.up, l.down} {
				for _, o := range r.links[id].lanes {
					if len(o.conn.lanes) > 1 && !seen[o.conn] {
						seen[o.conn] = true
						out = append(out, o.conn)
					}
				}
			}
		}
	}
	slices.SortFunc(out, func(a, b *conn) int { return compareLanes(&a.lanes[0], &b.lanes[0]) })
	return out
}

// cost is what a lane's bytes meet on their path, with more bit/s of it there: the slope of
// the sum over links of load to a high power. Making that sum least makes the fullest link
// as empty as can be, where a sum of squares would fill one to spare many.
func (p *Planner) cost(l *lane, more int64) float64 {
	return steep(p.links[l.up].with(more)) + steep(p.links[l.down].with(more))
}

// steep is the 32nd power: two links that are both filled weigh no more than one that is
// 2 % fuller.
func steep(x float64) float64 {
	for range 5 {
		x *= x
	}
	return x
}

// flat is steep's inverse: a cost as the load of one link.
func flat(x float64) float64 {
	for range 5 {
		x = math.Sqrt(x)
	}
	return x
}

// shift moves bytes from the fullest to the emptiest lane of one side of a connection.
func (r *rebalance) shift(c *conn, side Side) bool {
	var from, to *lane
	n, shares := 0, 0
	for i := range c.lanes {
		l := &c.lanes[i]
		if l.side != side || l.up == none {
			continue
		}
		n++
		shares += l.share
		if from == nil || r.cost(l, 0) > r.cost(from, 0) {
			from = l
		}
		if to == nil || r.cost(l, 0) < r.cost(to, 0) {
			to = l
		}
	}
	if n < 2 || from.load <= 0 || from.share <= 0 || flat(r.cost(from, 0))-flat(r.cost(to, 0)) <= r.opt.MinGain/2 {
		return false
	}
	least := min(from.share, shares/n/leastShare)
	low, high := int64(0), int64(float64(from.load)*float64(from.share-least)/float64(from.share))
	for high-low > from.load/1024+1 {
		if mid := (low + high) / 2; r.differ(from, to, mid) > 0 {
			low = mid
		} else {
			high = mid
		}
	}
	share := int(float64(low) * float64(from.share) / float64(from.load))
	if share < shares/n/256+1 {
		return false
	}
	if !r.shares(c) {
		return false
	}
	load := int64(float64(from.load) * float64(share) / float64(from.share))
	from.share -= share
	to.share += share
	r.setLoad(from, from.load-load)
	r.setLoad(to, to.load+load)
	return true
}

// differ is how much more bytes meet at from than at to, when so many bit/s have gone from
// one to the other. Links that both cross carry the same as before.
func (r *rebalance) differ(from, to *lane, load int64) (v float64) {
	for i, a := range [2]int32{from.up, from.down} {
		if b := [2]int32{to.up, to.down}[i]; a != b {
			v += steep(r.links[a].with(-load)) - steep(r.links[b].with(load))
		}
	}
	return v
}

// shares notes that a connection's shares change, if there are as many moves left.
func (r *rebalance) shares(c *conn) bool {
	need := 0
	for i := range c.lanes {
		if _, ok := r.index[&c.lanes[i]]; !ok {
			need++
		}
	}
	if need > r.left() {
		return false
	}
	for i := range c.lanes {
		r.moving(&c.lanes[i])
	}
	return true
}

// coarse takes changes back that are not worth telling.
func (r *rebalance) coarse(c *conn) {
	for i := range c.lanes {
		l := &c.lanes[i]
		k, ok := r.index[l]
		if !ok {
			return
		}
		was := &r.before[k]
		if was.side != l.side || float64(abs(was.share-l.share)) > fineShift*float64(was.share) {
			return
		}
	}
	for i := range c.lanes {
		l := &c.lanes[i]
		l.share = r.before[r.index[l]].share
	}
	r.reloadConn(c)
}

func abs(n int) int { return max(n, -n) }
