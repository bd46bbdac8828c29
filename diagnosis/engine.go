package diagnosis

// Engine turns successive Evidence of one job into verdicts. It is not safe
// for concurrent use; a master has one for each job.
//
// A pass goes one way: the view takes in the evidence, the detectors look at
// the view, and the tracker makes incidents of what they found.
type Engine struct {
	view      view
	window    window
	tracker   tracker
	links     *links
	aborts    *aborts
	detectors []detector
}

// detector finds one kind of fault. Each owns what it has learnt, and sees of
// the job what the view tells.
type detector interface {
	// find appends what this pass shows to what detectors before it have found.
	find(found []finding) []finding
	// forget drops all that was learnt: the job has started anew, or its ranks
	// do other work now.
	forget()
}

// New returns an Engine; zero fields of cfg take their defaults.
func New(cfg Config) *Engine {
	e := &Engine{view: view{cfg: cfg.withDefaults(), pauses: pauses{log: pauseLog{}}}}
	v := &e.view
	e.window.view, e.tracker.view = v, v
	v.open = &e.tracker
	e.aborts = &aborts{view: v}
	e.links = &links{view: v, aborts: e.aborts}
	drags := &drags{window: &e.window}
	moved := &transfers{window: &e.window, drags: drags}
	stragglers := &stragglers{window: &e.window, drags: drags}
	late := &arrivals{window: &e.window, drags: drags}
	slow := &slowLinks{window: &e.window, stragglers: stragglers, drags: drags, arrivals: late, transfers: moved}
	sends := &pairs{window: &e.window, drags: drags}
	losses := &losses{view: v, aborts: e.aborts}
	// What comes first explains what comes later: detectors ask what was found before them.
	e.detectors = []detector{
		e.links,
		losses,
		&mismatches{view: v},
		&deaths{view: v, aborts: e.aborts, losses: losses},
		&hangs{view: v},
		&forming{view: v},
		&starts{view: v},
		stragglers,
		drags,
		late,
		&heldBack{view: v, drags: drags},
		slow,
		sends,
		&moves{window: &e.window, links: slow, late: late, pairs: sends, transfers: moved},
		moved,
		&throughputs{window: &e.window, drags: drags},
	}
	return e
}

// Diagnose judges the job by the evidence so far. The result is the caller's,
// worst first, at most MaxVerdicts long, nil when nothing is wrong. ev is only
// read, and not kept.
func (e *Engine) Diagnose(ev *Evidence) []Verdict {
	v := &e.view
	defer func() { v.ev = nil }()
	anew, paused := v.take(ev)
	if anew {
		e.forget()
	}
	if paused {
		// Ages across the gap are void, and so is the window: nothing is found,
		// and what was found stays as it is.
		e.window.void()
		return e.tracker.standing()
	}
	e.links.scan()
	e.aborts.follow()
	if v.finished() && len(e.links.dead) == 0 && len(e.aborts.ends) == 0 && len(e.aborts.cuts) == 0 {
		e.forget()
		return nil
	}
	if e.window.advance() {
		for _, d := range e.detectors {
			d.forget()
		}
	}
	var found []finding
	for _, d := range e.detectors {
		found = d.find(found)
	}
	for i := range found {
		v.pathsAndNICs(&found[i])
		v.secondOpinion(&found[i])
	}
	e.window.next()
	return e.tracker.track(found)
}

// forget drops every open finding and what detectors have learnt.
func (e *Engine) forget() {
	e.tracker.forget()
	e.window.forget()
	for _, d := range e.detectors {
		d.forget()
	}
}
