package windowmon

// rare finds a network that is slow now and then, and never in most of the last windows: one that loses a
// packet of hundreds stands still until that is sent again, and works well in between. So time counts, not windows:
// what slow windows cost, beyond a share of the network's time that leaves what is usual far behind, adds up
// (a cumulative sum), and is taken back by windows that cost nothing. One long stop is none of this,
// it takes several runs of slow windows.
//
// While it adds up nothing of it becomes usual; what comes to nothing in a while does.
type rare struct {
	on     bool
	is     bool // the network is slow now and then
	before bool // the window before was slow
	runs   uint32

	lost, of float64 // ns that slow windows cost, of ns on the network: as a rule, older ones count less

	debt   float64 // ns beyond that, of late; 0: the rest is 0, too
	since  float64 // ns on the network since it began
	cost   float64 // ns that slow windows cost since
	behind float64 // ns on the network since the last of them
}

const (
	rareShare  = 0.1   // of the network's time that has to be lost, beyond
	rareTimes  = 3     // times what is lost as a rule
	rareDebt   = 200e6 // ns that are told
	rareMost   = 2     // times that, which is as much as counts
	rareRuns   = 4     // of slow windows
	rareOver   = 8     // times the mean time between two runs: without one for so long it is over
	rareFor    = 60e9  // ns on the network in which it is told or becomes usual
	rareMemory = 120e9 // ns on the network that are remembered
	rareFirst  = 1e9   // ns on the network which a first guess weighs,
	rareGuess  = 0.1   // and the share of it that is lost
)

// suspected reports whether slow windows have cost more than usual of late.
func (r *rare) suspected() bool { return r.debt > 0 }

// window takes over what a window cost of its time on the network, 0 when it was not slow.
func (r *rare) window(cost, network float64) {
	if !r.on {
		return
	}
	bar := rareShare + rareTimes*(r.lost+rareGuess*rareFirst)/(r.of+rareFirst)
	debt := min(r.debt+cost-bar*network, rareMost*rareDebt)
	if r.debt == 0 && debt <= 0 {
		r.learn(cost, network)
		r.before = cost > 0
		return
	}
	r.since += network
	r.cost += cost
	r.behind += network
	if cost > 0 {
		r.behind = 0
		if !r.before || r.runs == 0 {
			r.runs++
		}
	}
	r.before = cost > 0
	r.debt = max(debt, 0)
	switch {
	case r.debt == 0, r.is && r.behind*float64(r.runs) > rareOver*r.since:
		if !r.is {
			r.learn(r.cost, r.since)
		}
		r.forget()
	case r.is:
	case r.debt >= rareDebt && r.runs >= rareRuns:
		r.is = true
	case r.since >= rareFor:
		r.adopt()
	}
}

// adopt takes for usual what has added up.
func (r *rare) adopt() {
	r.learn(r.cost, r.since)
	r.forget()
}

func (r *rare) forget() {
	r.is, r.runs, r.debt, r.since, r.cost, r.behind = false, 0, 0, 0, 0, 0
}

func (r *rare) learn(cost, network float64) {
	r.lost += cost
	r.of += network
	if r.of > rareMemory {
		r.lost, r.of = r.lost/2, r.of/2
	}
}
