package diagnosis

// window is the stretch of work that one slow decision looks at. It spans whole
// steps where the program marks them; elsewhere it ends when every communicator
// in use has had its turn, so that windows are alike whatever the job's phase.
type window struct {
	*view
	closed bool // it ends with this pass

	start  int64
	length int64 // of the former window
	step   uint64
	passes int          // since its start
	from   []rankSums   // at its start
	ops    []commWindow // by index into Evidence.Comms
	voids  int          // windows that ended without a decision
}

// commWindow is what a window sees of a communicator.
type commWindow struct {
	ops, inside uint64 // sums over members at the window's start: operations, ns in them
	active      bool   // had operations in the former window
}

func (w *window) forget() { *w = window{view: w.view, voids: w.voids} }

// advance takes in a pass, and reports whether what the ranks do is not
// comparable with what they did before: a change in the set of communicators
// (start, resize, restart) voids the window and all baselines.
func (w *window) advance() (other bool) {
	w.closed = false
	if w.changed || w.start == 0 || len(w.from) != len(w.ev.Ranks) {
		w.void()
		return w.changed
	}
	w.passes++
	if w.closed = w.due(); w.closed {
		w.sumRanks()
		w.crowds.learn(w.ev)
	}
	return false
}

// next begins a window when one has ended.
func (w *window) next() {
	if w.closed {
		w.restart()
	}
}

// void begins a window anew, without a decision on the one before.
func (w *window) void() {
	w.closed = false
	w.voids++
	w.restart()
}

func (w *window) restart() {
	if w.start > 0 {
		w.length = w.now - w.start
	}
	w.start, w.step, w.passes = w.now, w.view.step, 0
	w.sumRanks()
	w.from = append(w.from[:0], w.sums...)
	w.ops = resized(w.ops, len(w.comms))
	for i := range w.comms {
		h, c := &w.comms[i], &w.ops[i]
		*c = commWindow{ops: h.ops, inside: h.inside, active: h.ops > c.ops}
	}
}

// longWindow is how long half of a window's steps take at least that are enough, ns.
const longWindow = 1_000_000_000

// due reports whether the window is complete.
func (w *window) due() bool {
	elapsed := w.now - w.start
	if elapsed < int64(w.cfg.MinWindow) {
		return false
	}
	if w.view.step > 0 {
		done := w.view.step - min(w.step, w.view.step)
		return done >= w.cfg.WindowSteps || 2*done >= w.cfg.WindowSteps && elapsed >= longWindow
	}
	var ops, waiting uint64
	pipeline := false
	for i := range w.comms {
		h, c := &w.comms[i], &w.ops[i]
		pipeline = pipeline || (h.p2p && !h.former)
		n := uint64(len(w.ev.Comms[i].Members))
		done := h.ops - min(c.ops, h.ops)
		ops += done
		if (done > 0 || c.active) && done < 2*n {
			waiting++
		}
	}
	patient := waiting == 0 || (w.length > 0 && elapsed > 4*w.length)
	enough := w.cfg.WindowOps
	if !pipeline {
		enough /= 4 // all ranks are in the same phase: a part of a step will do
	}
	return patient && ops >= enough*uint64(max(1, w.alive))
}

// delta returns what a rank did in the window: own time and time inside
// collectives, ns, and operations.
func (w *window) delta(r int32) (own, inside, ops float64) {
	a, b := &w.from[r], &w.sums[r]
	if b.ops <= a.ops || b.own < a.own || b.inside < a.inside {
		return 0, 0, 0
	}
	return float64(b.own - a.own), float64(b.inside - a.inside), float64(b.ops - a.ops)
}

// insideOf returns what the members of a communicator did in the window: mean time
// inside an operation, ns, and operations of all members.
func (w *window) insideOf(ci int32) (perOp, ops float64, ok bool) {
	h, c := &w.comms[ci], &w.ops[ci]
	if h.ops <= c.ops || h.inside < c.inside {
		return 0, 0, false
	}
	ops = float64(h.ops - c.ops)
	return float64(h.inside-c.inside) / ops, ops, true
}

// baseline is what is normal: the middle of its first values, for among these are
// a warm-up's, and then a running mean of recent ones. Times err upwards (a
// hiccup, a pause), so one value can move it by a little only.
type baseline struct {
	mean  float64
	n     int32
	first [firstValues]float32
}

const (
	baselineMemory = 32
	firstValues    = 9
)

func (b *baseline) learn(v float64) {
	if b.n < firstValues {
		b.first[b.n] = float32(v)
		b.n++
		var buf [firstValues]float64
		for i, x := range b.first[:b.n] {
			buf[i] = float64(x)
		}
		b.mean = median(buf[:b.n])
		return
	}
	b.n = min(b.n+1, baselineMemory)
	b.mean += (min(max(v, b.mean/1.5), 1.5*b.mean) - b.mean) / float64(b.n)
}

// settled reports whether a baseline has seen enough to judge by.
func (v *view) settled(b *baseline) bool { return int(b.n) >= v.cfg.BaselineWindows }

// streak is how long something has been slow: windows in a row until it is
// told, then one that is normal takes back one that was slow, and several in a
// row end it.
type streak struct {
	since int64 // the first slow window's start
	slow  int   // windows
	clean int
	level Level // 0 until it is told
}

// again counts a slow window. What is judged without a history takes twice as
// many: a difference from others may be by nature. What is not certain yet is
// counted and not told.
func (s *streak) again(w *window, alone, certain bool) {
	suspect, confirm := w.cfg.SuspectWindows, w.cfg.ConfirmWindows
	if alone {
		suspect, confirm = 2*suspect, 2*confirm
	}
	if s.slow == 0 {
		s.since = w.start
	}
	s.slow++
	s.clean = 0
	if !certain {
		return
	}
	lasted := w.now - s.since
	if s.slow >= suspect && lasted >= int64(w.cfg.SlowSuspectAfter) {
		s.level = max(s.level, Suspected)
	}
	if s.slow >= confirm && lasted >= int64(w.cfg.SlowConfirmAfter) {
		s.level = Confirmed
	}
}

// normal counts a window that was not slow and reports whether it is over.
func (s *streak) normal(w *window) bool {
	s.clean++
	s.slow = max(0, s.slow-1)
	return s.level == 0 && (s.slow == 0 || s.clean > 1) || s.clean >= w.cfg.RecoverWindows
}
