package proc

import (
	"github.com/lockstep-ccl/lockstep/collector/source"
	"github.com/lockstep-ccl/lockstep/diagnosis"
)

// apply turns what was seen into the process's state.
func (s *Source) apply(v *sight, now int64) error {
	p := v.p
	w := s.watched[p]
	if w == nil {
		v.life.let()
		return nil
	}
	s.keep(w, v)
	w.doubt = nil
	if v.absent || v.doubt {
		w.searched = now
	}
	if v.err != nil {
		if v.doubt {
			w.doubt = v.err
		}
		s.set(p, diagnosis.ProcUnknown, now)
		return v.err
	}
	if !v.absent {
		w.met, w.pid, p.HostPID = true, v.pid, int32(v.pid)
	}
	if v.state == diagnosis.ProcGone {
		s.ended(v, w, now)
	} else {
		s.running(v, w, now)
	}
	return nil
}

// ended is apply for a process that was not found, or whose first thread has ended.
func (s *Source) ended(v *sight, w *watch, now int64) {
	p := v.p
	if s.mayLive(p, w, now) {
		s.set(p, diagnosis.ProcUnknown, now)
		return
	}
	// A recorder may have grown between its last reading and the end. One that keeps
	// growing belongs to a process that this proc file system does not show.
	if p.Dead() && p.Appended > w.appended {
		if w.revived++; w.revived > 1 {
			w.foreign = true
			s.set(p, diagnosis.ProcUnknown, now)
			return
		}
	}
	p.CPU, p.IO = 0, false
	at := w.endedAt()
	if at == 0 && w.life != nil && !v.absent {
		// Its first thread has ended and others have not, which takes moments, or for
		// good when one of them is in uninterruptible sleep.
		if w.ending == 0 {
			w.ending = now
		}
		if now-w.ending < endWithin {
			return
		}
		at = w.ending
	}
	if !w.missed && (at == 0 || at > now) { // else the header was read after its end
		// Its header was read before it was looked for: whether it closed the recorder
		// last of all is known on the next pass.
		w.missed = true
		return
	}
	if at == 0 {
		at = now
	}
	w.appended = p.Appended
	s.set(p, gone(p), at)
}

// running is apply for a process that was seen.
func (s *Source) running(v *sight, w *watch, now int64) {
	p := v.p
	w.missed = false
	p.CPU, p.IO = w.rates(sample{now, v.use})
	if v.children != nil {
		next := sample{now, *v.children}
		w.cpu, w.io = since(w.children, next)
		w.children = next
	}
	if v.idle {
		p.CPU, p.IO = p.CPU+w.cpu, p.IO || w.io
	} else {
		w.children, w.cpu, w.io = sample{}, 0, false
	}
	state, asleep := v.state, map[int]bool{}
	for _, tid := range v.asleep {
		asleep[tid] = true
		if w.asleep[tid] && state == diagnosis.ProcRunning {
			state = diagnosis.ProcDisk
		}
	}
	w.asleep = asleep
	s.set(p, state, now)
}

// mayLive reports whether a process that was not found may live where this proc
// file system shows nothing: it was never there, and its recorder has been anchored lately.
func (s *Source) mayLive(p *source.Process, w *watch, now int64) bool {
	if w.met || s.all || p.Closed || p.Anchor.Mono == 0 {
		return false
	}
	if w.anchor == 0 {
		w.anchor = p.Anchor.Mono
	}
	w.foreign = p.Anchor.Mono > w.anchor // it does live, and there is nothing to be seen of it
	return w.foreign || now-p.Anchor.Mono < silent
}

// gone is the state of a process that is no more.
func gone(p *source.Process) diagnosis.ProcState {
	if p.Closed {
		return diagnosis.ProcExited
	}
	return diagnosis.ProcGone
}

func (s *Source) set(p *source.Process, state diagnosis.ProcState, now int64) {
	if p.State != state || p.StateAt == 0 {
		p.State, p.StateAt = state, now
	}
}

// rates adds a sample and returns the share of a core and whether bytes moved
// since the oldest one kept.
func (w *watch) rates(s sample) (cpu float32, io bool) {
	oldest := w.ring[0]
	if w.n >= samples {
		oldest = w.ring[w.n%samples]
	}
	w.ring[w.n%samples] = s
	w.n++
	return since(oldest, s)
}

// since returns the share of a core and whether bytes moved between two samples.
func since(old, s sample) (cpu float32, io bool) {
	if s.at <= old.at || old.at == 0 || s.ticks < old.ticks {
		return 0, false
	}
	return float32(float64(s.ticks-old.ticks) / userHz / (float64(s.at-old.at) / 1e9)), s.bytes != old.bytes
}

// idle reports whether the process has used next to no CPU over all samples.
func (w *watch) idle() bool {
	if w.n < samples {
		return false
	}
	newest, oldest := w.ring[(w.n-1)%samples], w.ring[w.n%samples]
	return newest.at > oldest.at && float64(newest.ticks-oldest.ticks)/userHz < idleShare*float64(newest.at-oldest.at)/1e9
}
