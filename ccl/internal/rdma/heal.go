package rdma

import (
	"errors"
	"fmt"
	"time"

	"github.com/lockstep-ccl/lockstep/ccl/internal/verbs"
)

var errPortDown = errors.New("port is down")

const (
	// retryAfter is how soon a path that could not be connected is tried again; it
	// doubles to retryMost.
	retryAfter = 50 * time.Millisecond
	retryMost  = 2 * time.Second
	// settleFor is how long both ends get to connect a path before it is tried.
	settleFor = 100 * time.Millisecond
	// replaceWithin is how long a path that was left by choice may be without a
	// queue pair before it is called broken.
	replaceWithin = time.Second
)

// patience is how long a path has to be healthy before it is used again.
func (c *Conn) patience(t *attempts) time.Duration {
	return min(c.w.opt.FailbackAfter<<min(t.relapses, 16), max(maxFailback, c.w.opt.FailbackAfter))
}

// failed notes that a path could not be connected.
func (c *Conn) failed(lane, path int) {
	t := &c.tries[lane][path]
	t.next = time.Now().Add(min(retryAfter<<min(t.failures, 10), retryMost))
	t.failures++
}

// offer makes a new queue pair for a path whose port is up.
func (c *Conn) offer(lane, place int, now time.Time) bool {
	if c.err != nil {
		return false
	}
	path := c.m.pathOf(place)
	port := &c.pairs[path].Own
	n, err := c.w.nic(port.Device)
	if err == nil {
		if _, up := n.dev.healthy(port.Num); !up {
			err = errPortDown
		}
	}
	if err == nil {
		err = c.w.lacks(n.dev)
	}
	var q *queuePair
	var a verbs.PortAttr
	if err == nil {
		if q, err = c.newQueuePair(lane, place); err == nil {
			if a, err = n.dev.port(port.Num); err != nil {
				q.retire()
			}
		}
	}
	if err != nil {
		c.why = fmt.Errorf("%s: %w", c.pairs[path].String(), err)
		c.failed(lane, path)
		return false
	}
	c.qps[lane][place] = q
	c.m.offer(lane, place, q.endpoint(a.LID))
	return true
}

// needsTick is how soon the connection wants to be looked after, 0 for not at all.
func (c *Conn) needsTick() time.Duration {
	if c.err != nil || c.gone != nil {
		return 0
	}
	late := time.Duration(0)
	for i := range c.m.lanes {
		l := &c.m.lanes[i]
		if l.phase != running {
			return tickSoon
		}
		for p := range c.places() {
			switch l.paths[p].state {
			case pathLive:
				if !c.qps[i][p].proved {
					late = tickLate
				}
			case pathDown:
				if !c.spare(i, p) {
					late = tickLate
				}
			default:
				late = tickLate
			}
		}
		if c.m.better(i) >= 0 || !c.trouble[i].since.IsZero() {
			late = tickLate
		}
	}
	return late
}

// tick looks after what is broken.
func (c *Conn) tick(now time.Time) {
	if c.err != nil || c.gone != nil {
		return
	}
	c.watchdog(now)
	if c.look(now); c.err != nil {
		return
	}
	for i := range c.qps {
		for p := range c.places() {
			// What a lost device held completes no more, and writes no more either
			// once the queue pair is destroyed.
			if q := c.qps[i][p]; q != nil && q.halted && (q.nic.dev.usable() != nil || now.Sub(q.since) > drainFor) {
				c.drained(q)
			}
		}
		// A path that fails again and again is given up before it is offered again: the
		// peer may have offered its own already, and the lane would not be found seeking.
		if c.expired(i, now) && c.trouble[i].failures >= 2 {
			c.fail(c.lostPaths())
			return
		}
		for p := range c.places() {
			c.renew(i, p, now)
			c.prove(i, p, now)
		}
		c.judge(i, now)
		if c.err != nil {
			return
		}
	}
	c.mark()
}

// renew replaces a lost queue pair when its port has been healthy for long
// enough, or when the lane or the peer cannot wait.
func (c *Conn) renew(i, p int, now time.Time) {
	wanted, urgent := c.m.wants(i, p)
	path := c.m.pathOf(p)
	t := &c.tries[i][path]
	if !t.left.IsZero() && now.Sub(t.left) > replaceWithin {
		t.left, t.lost = time.Time{}, now
		c.announce(i, path, PathDown)
	}
	if !wanted || now.Before(t.next) || c.spare(i, p) {
		return
	}
	if !urgent {
		n, err := c.w.nic(c.pairs[path].Own.Device)
		if err != nil {
			c.failed(i, path)
			return
		}
		since, up := n.dev.healthy(c.pairs[path].Own.Num)
		if t.lost.After(since) {
			since = t.lost
		}
		if !up || t.left.IsZero() && !c.carries(i, c.m.sibling(p)) && now.Sub(since) < c.patience(t) {
			return
		}
	}
	c.offer(i, p, now)
}

// prove tries a path that carries nothing: one that does not work is better known
// before it is needed.
func (c *Conn) prove(i, p int, now time.Time) {
	l, q := &c.m.lanes[i], c.qps[i][p]
	if l.phase == running && l.active != p && l.paths[p].state == pathLive && !q.proved && now.Sub(q.live) > settleFor {
		q.probe()
	}
}

// judge ends troubles: goes back to a better path, or gives up.
func (c *Conn) judge(i int, now time.Time) {
	l, t := &c.m.lanes[i], &c.trouble[i]
	if l.phase == running {
		// A lane is out of trouble when something of this end's has come through since
		// the switch. That the peer's does is no sign: it may be all that passes.
		if l.transmitted != t.counted || l.acked != t.counted || l.transmitted == l.posted {
			*t = trouble{}
		}
		if c.lower && c.m.better(i) >= 0 && c.settled(i, now) {
			c.m.failback(i)
		}
		return
	}
	if t.since.IsZero() {
		t.since = now
	}
	if !c.expired(i, now) {
		return
	}
	// A peer that does not answer an offer may be stopped; whether it is dead is not
	// ours to say. One that runs says when its time is up, too.
	for p := range l.paths {
		if l.paths[p].state == pathOffered && t.failures < 2 && l.hope {
			if !t.told {
				t.told = true
				c.tell(&message{kind: msgExpired, lane: uint8(i)})
			}
			return
		}
	}
	c.fail(c.lostPaths())
}

// expired reports whether a lane has looked for a path for long enough.
func (c *Conn) expired(i int, now time.Time) bool {
	t := &c.trouble[i]
	return c.m.lanes[i].phase == seeking && !t.since.IsZero() && now.Sub(t.since) >= c.w.opt.GiveUpAfter
}

// settled reports whether the better path is known to work, and nothing is on its
// way over the one in use (for a while). A move does not wait for that.
func (c *Conn) settled(i int, now time.Time) bool {
	l := &c.m.lanes[i]
	p := c.m.better(i)
	if p < 0 {
		return false
	}
	q := c.qps[i][p]
	return q.proved && (p == c.m.sibling(l.active) || l.transmitted == l.posted || now.Sub(q.live) > settleFor+time.Second)
}

// watchdog finds writes that do not complete.
func (c *Conn) watchdog(now time.Time) {
	for i := range c.qps {
		for _, q := range c.qps[i] {
			if q != nil && q.why == nil && !q.halted && q.stuck(now, c.w.opt.Stuck) {
				q.fail(fmt.Errorf("a write has not completed for %v", now.Sub(q.seenAt).Round(time.Millisecond)))
			}
		}
	}
}
