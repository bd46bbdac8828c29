package diagnosis

// crowds is how short of CPU ranks and nodes usually are. Connections and operations are then
// as late as they usually are: only a rank or node that is shorter of CPU than that explains
// what has become late.
type crowds struct {
	windows int32
	ranks   []float32 // by world rank: share of time
	held    []float32 // by world rank: the part of it in which its cgroup's quota is used up
	nodes   []float32 // by node
	// stops are the ranks that have been found stopped, and go on again: something stops them, and
	// what they take is late whatever the network does.
	stops map[int32]*stops
}

// stops is how often a rank is found stopped.
type stops struct {
	share float32 // of the looks, the older ones counting less
	times int     // from running to stopped
	now   bool
}

const (
	crowdFirst = 8         // windows of which the mean is usual; until then nothing is
	crowdDown  = 1.0 / 8   // weight of a window with less
	crowdUp    = 1.0 / 256 // with more: a fault that lasts must not become usual
	// crowdAlways is from which share of its time on a rank is short of CPU, usual or not: from
	// there on what it does takes any time.
	crowdAlways = 0.3

	stopMemory = 64   // looks
	stopShare  = 0.08 // of the looks in which a rank is stopped that is stopped again and again
	stopTimes  = 3
	maxStops   = 64
)

// look takes in a pass.
func (c *crowds) look(ev *Evidence) {
	for r := range ev.Ranks {
		if ev.Ranks[r].Proc != ProcStopped || c.stops[int32(r)] != nil || len(c.stops) >= maxStops {
			continue
		}
		if c.stops == nil {
			c.stops = map[int32]*stops{}
		}
		c.stops[int32(r)] = &stops{}
	}
	for r, s := range c.stops {
		is := int(r) < len(ev.Ranks) && ev.Ranks[r].Proc == ProcStopped
		if is && !s.now {
			s.times++
		}
		if s.now = is; is {
			s.share += (1 - s.share) / stopMemory
		} else if s.share -= s.share / stopMemory; s.share < stopShare/8 {
			delete(c.stops, r)
		}
	}
}

// stopped is the share of the looks that find a rank stopped that is stopped again and again, else 0.
func (c *crowds) stopped(rank int32) float32 {
	if s := c.stops[rank]; s != nil && s.times >= stopTimes && s.share >= stopShare {
		return s.share
	}
	return 0
}

// hunger is the share of time in which a rank wants to run and does not.
func (r *Rank) hunger() float32 { return max(r.Starved, r.Throttled) }

// learn takes in a window's end.
func (c *crowds) learn(ev *Evidence) {
	if len(c.ranks) != len(ev.Ranks) || len(c.nodes) != len(ev.Nodes) {
		*c = crowds{ranks: zeroed(c.ranks, len(ev.Ranks)), held: zeroed(c.held, len(ev.Ranks)), nodes: zeroed(c.nodes, len(ev.Nodes)), stops: c.stops}
	}
	c.windows++
	learn := func(usual *float32, now float32) {
		switch {
		case c.windows <= crowdFirst:
			*usual += (now - *usual) / float32(c.windows)
		case now < *usual:
			*usual += (now - *usual) * crowdDown
		default:
			*usual += (now - *usual) * crowdUp
		}
	}
	for r := range ev.Ranks {
		learn(&c.ranks[r], ev.Ranks[r].hunger())
		learn(&c.held[r], ev.Ranks[r].Throttled)
	}
	for n := range ev.Nodes {
		learn(&c.nodes[n], ev.Nodes[n].CPUPressure)
	}
}

// usually is how short of CPU a rank and its node are as a rule, 0 while that is not known.
func (c *crowds) usually(rank, node int32) (hunger, pressure float32) {
	if c.windows < crowdFirst {
		return 0, 0
	}
	if int(rank) < len(c.ranks) {
		hunger = c.ranks[rank]
	}
	if node >= 0 && int(node) < len(c.nodes) {
		pressure = c.nodes[node]
	}
	return hunger, pressure
}

// usuallyHeld is for how much of its time a rank's quota holds it back as a rule, 0 while that is not known: what
// it usually shares with others is something else.
func (c *crowds) usuallyHeld(rank int32) float32 {
	if c.windows < crowdFirst || int(rank) >= len(c.held) {
		return 0
	}
	return c.held[rank]
}

// crowded reports whether a rank waits for a CPU more than it usually does, by its own word or,
// where that is not much, by its node's: then what it sends or takes is late, whatever the
// network does. The node's word is of the last ten seconds, and of all that runs there.
func (v *view) crowded(rank int32) bool {
	n, now := nodeOf(v.ev, rank), v.ev.Ranks[rank].hunger()
	hunger, pressure := v.crowds.usually(rank, n)
	if now > min(0.1+hunger, crowdAlways) || v.crowds.stopped(rank) > 0 {
		return true
	}
	return n >= 0 && (now == 0 || now > 0.05+hunger) && v.ev.Nodes[n].CPUPressure > max(0.4, pressure+0.15)
}
