package diagnosis

// window is the stretch of work that one slow decision looks at. It spans whole
// steps where the program marks them; elsewhere it ends when every communicator
// in use has had its turn, so that windows are alike whatever the job's phase.
type window struct {
	start  int64
	length int64 // of the former window
	step   uint64
	passes int        // since its start
	sums   []rankSums // at its start
}

// restart begins a window at this pass.
func (w *window) restart(e *Engine) {
	p := &e.pass
	if w.start > 0 {
		w.length = p.now - w.start
	}
	w.start, w.step, w.passes = p.now, p.step, 0
	w.sums = append(w.sums[:0], e.sums...)
	for i := range e.comms {
		h := &e.comms[i]
		h.active = h.ops > h.ops0
		h.ops0, h.inside0 = h.ops, h.inside
	}
}

// void begins a window anew, without a decision on the one before.
func (w *window) void(e *Engine) {
	for i := range e.conns {
		e.conns[i].flights = 0
	}
	w.restart(e)
}

// due reports whether the window is complete. A change in the set of
// communicators (start, resize, restart) voids it and all baselines: the same
// ranks now do other work.
func (w *window) due(e *Engine) bool {
	p := &e.pass
	if e.changed || w.start == 0 || len(w.sums) != len(e.sums) {
		if e.changed {
			e.slowRanks, e.slowConns = e.slowRanks[:0], e.slowConns[:0]
			clear(e.conns)
			for i := range e.ranks {
				e.ranks[i].own = ownHistory{}
			}
			for i := range e.comms {
				e.comms[i].insideBase = baseline{}
			}
		}
		w.void(e)
		return false
	}
	elapsed := p.now - w.start
	if elapsed < int64(e.cfg.MinWindow) {
		return false
	}
	if p.step > 0 {
		return p.step >= w.step+e.cfg.WindowSteps
	}
	var ops, waiting uint64
	pipeline := false
	for i := range e.comms {
		h := &e.comms[i]
		pipeline = pipeline || (h.p2p && !h.former)
		n := uint64(len(p.ev.Comms[i].Members))
		done := h.ops - min(h.ops0, h.ops)
		ops += done
		if (done > 0 || h.active) && done < 2*n {
			waiting++
		}
	}
	patient := waiting == 0 || (w.length > 0 && elapsed > 4*w.length)
	enough := e.cfg.WindowOps
	if !pipeline {
		enough /= 4 // all ranks are in the same phase: a part of a step will do
	}
	return patient && ops >= enough*uint64(max(1, p.alive))
}

// baseline is a running mean of what is normal, of its first values at first
// and then of recent ones. Times err upwards (a hiccup, a pause), so one value
// can raise it by a little only, and lower it as much as it is worth.
type baseline struct {
	mean float64
	n    int32
}

const baselineMemory = 32

func (b *baseline) learn(v float64) {
	b.n = min(b.n+1, baselineMemory)
	if b.n > 1 {
		v = min(v, 1.5*b.mean)
	}
	b.mean += (v - b.mean) / float64(b.n)
}

func (e *Engine) known(b *baseline) bool { return int(b.n) >= e.cfg.BaselineWindows }

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
func (s *streak) again(e *Engine, alone, certain bool) {
	suspect, confirm := e.cfg.SuspectWindows, e.cfg.ConfirmWindows
	if alone {
		suspect, confirm = 2*suspect, 2*confirm
	}
	if s.slow == 0 {
		s.since = e.window.start
	}
	s.slow++
	s.clean = 0
	if !certain {
		return
	}
	lasted := e.pass.now - s.since
	if s.slow >= suspect && lasted >= int64(e.cfg.SlowSuspectAfter) {
		s.level = max(s.level, Suspected)
	}
	if s.slow >= confirm && lasted >= int64(e.cfg.SlowConfirmAfter) {
		s.level = Confirmed
	}
}

// normal counts a window that was not slow and reports whether it is over.
func (s *streak) normal(e *Engine) bool {
	s.clean++
	if s.level == 0 || s.clean >= e.cfg.RecoverWindows {
		return true
	}
	s.slow = max(0, s.slow-1)
	return false
}
