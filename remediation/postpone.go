package remediation

import "time"

// late is an entry whose turn is put off, since somebody who must be asked does not answer. It
// is not on disk: the next process asks at once.
type late struct {
	times int
	until time.Time
}

// postpone gives the job free for its other entries, and asks again later; not when the alert is stale by then.
func (r *Remediator) postpone(e *Entry) (times int, again bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	l := r.late[e.Seq]
	l.times++
	delay := min(r.o.Retry<<min(l.times-1, 8), maxDelay*r.o.Retry)
	if !r.current(r.o.Now().Add(delay), e) {
		return l.times, false
	}
	l.until = time.Now().Add(delay)
	r.late[e.Seq] = l
	return l.times, true
}

func (r *Remediator) due(seq uint64) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return !time.Now().Before(r.late[seq].until)
}

// postponed is how often an entry has been put off.
func (r *Remediator) postponed(seq uint64) int {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.late[seq].times
}

func (r *Remediator) forget(seq uint64) {
	r.mu.Lock()
	defer r.mu.Unlock()
	delete(r.late, seq)
}
