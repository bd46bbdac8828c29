package jobsim

import "time"

// nodeDown takes a node away with all that runs on it. Nobody sees its processes end.
func (j *Job) nodeDown(id int32) {
	n := &j.nodes[id]
	n.silent, n.down, n.cut = true, true, true
	for i := n.first; i < n.first+n.ranks; i++ {
		r := &j.ranks[i]
		j.freeze(r, stuckIdle)
		r.done = true
	}
	for i := n.first; i < n.first+n.ranks; i++ {
		r := &j.ranks[i]
		j.at(j.now+int64(j.cfg.Dying.Silent), func() { j.bereave(r, int64(time.Second)) })
	}
}

// nodeCut takes a node off the network. Both sides give each other up.
func (j *Job) nodeCut(f *fault, id int32) {
	n := &j.nodes[id]
	n.silent, n.cut = true, true
	j.stallHit(f)
	j.at(j.now+int64(j.cfg.Dying.Silent), func() {
		if j.cfg.Dying.Reaction == Linger {
			return
		}
		for _, c := range j.comms {
			// Each side names a member of the other.
			in, out := int32(-1), int32(-1)
			for i := range c.members {
				if j.ranks[c.members[i].World].node == id {
					in = int32(i)
				} else {
					out = int32(i)
				}
			}
			if in < 0 || out < 0 {
				continue
			}
			for i := range c.members {
				x := &j.ranks[c.members[i].World]
				peer := in
				if x.node == id {
					peer = out
				}
				m := int32(i)
				j.at(j.now+x.rng.int63n(int64(time.Second)), func() { j.lose(x, ref{c, m}, peer) })
			}
		}
	})
}

// cut is a pair's connections that carry nothing, until they do again or are given up.
func (j *Job) cut(f *fault) {
	r := &j.ranks[f.Rank]
	if f.Until > 0 {
		// Retransmissions back off: what was cut for long is noticed later to be whole again.
		away := float64(f.Until - f.At)
		f.cured = int64(f.Until) + int64(away*r.rng.between(0.02, 0.3)) + int64(50*time.Millisecond)
	}
	j.stallHit(f)
	mark := func(down bool) {
		for _, c := range f.comms {
			for _, h := range c.hits {
				if e := &c.edges[h.edge]; h.fault == f && e.down != down {
					if e.down = down; down {
						e.downAt = j.now
					} else {
						e.outages++
						e.resent += held * 4
					}
				}
			}
			c.touched = j.tick
		}
	}
	if seen := int64(f.At) + int64(1500*time.Millisecond); f.cured == 0 || f.cured > seen {
		j.at(seen, func() { mark(true) })
	}
	bound := int64(f.At) + int64(j.cfg.Dying.Bound)
	if f.cured > 0 && f.cured < bound {
		j.at(f.cured, func() { mark(false); j.resumeHit(f) })
		return
	}
	j.at(bound, func() {
		if j.cfg.Dying.Reaction == Linger {
			return
		}
		for _, c := range f.comms {
			for _, h := range c.hits {
				if h.fault != f {
					continue
				}
				e := &c.edges[h.edge]
				j.lose(&j.ranks[c.members[e.src].World], ref{c, e.src}, e.dst)
				j.lose(&j.ranks[c.members[e.dst].World], ref{c, e.dst}, e.src)
				for i := range c.members {
					x, m := &j.ranks[c.members[i].World], int32(i)
					j.at(j.now+1_000_000+x.rng.int63n(50_000_000), func() { j.lose(x, ref{c, m}, e.dst) })
				}
			}
		}
	})
}

// portDown takes one port of a NIC: what it carries goes over the other one.
func (j *Job) portDown(f *fault) {
	f.onset = j.now
	j.stallHit(f)
	for _, c := range f.comms {
		for _, h := range c.hits {
			if e := &c.edges[h.edge]; h.fault == f {
				e.downAt = j.now
				if e.path == 0 {
					e.down = true
				}
			}
		}
		c.touched = j.tick
	}
	j.at(j.now+switchOver+int64(Tick), func() {
		for _, c := range f.comms {
			for _, h := range c.hits {
				if e := &c.edges[h.edge]; h.fault == f && e.path > 0 {
					e.switched, e.downAt = true, j.now
					e.switches++
				}
			}
		}
		j.resumeHit(f)
	})
}
