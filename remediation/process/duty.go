package process

import (
	"errors"
	"fmt"
	"time"
)

// duty is what a host's supervisor knows of its orders: pure, with the time from the caller.
// It says what is to be done next, and by when the processes must have ended though nobody
// says so.
type duty struct {
	run   string // that it belongs to; "" until the first order
	last  uint64 // generation of the last attempt begun
	holds uint64 // of the one whose processes may be there

	want  Order // the last order
	rev   uint64
	seq   uint64
	sent  []stamp   // reports that are not answered
	until time.Time // the lease's end
}

type stamp struct {
	seq uint64
	at  time.Time
}

// task is what is to be done.
type task int

const (
	doNothing task = iota
	doStart        // want's attempt
	doStop         // politely
	doKill         // at once: the lease has ended
)

// errAnotherRun: the coordinator has begun anew, and does not know of this one.
var errAnotherRun = errors.New("the coordinator has begun another run of the job, so this one is over")

// connected begins a connection: reports are counted anew.
func (p *duty) connected() { p.seq, p.sent = 0, nil }

// report fills in what the duty knows.
func (p *duty) report(now time.Time, r *Report) {
	p.seq++
	if len(p.sent) < 1024 { // a coordinator that answers nothing is none
		p.sent = append(p.sent, stamp{p.seq, now})
	}
	r.Protocol, r.Seq, r.Run, r.Rev, r.Last, r.Holds = protocol, p.seq, p.run, p.rev, p.last, p.holds
}

// receive takes an order. One that is older than what was obeyed comes from a coordinator that
// was replaced: it changes nothing and prolongs no lease.
func (p *duty) receive(o Order) error {
	if err := o.check(); err != nil {
		return err
	}
	switch {
	case o.Kind == orderRefuse:
		return fmt.Errorf("the coordinator refuses this host: %s", bound(o.Why))
	case p.run != "" && o.Run != p.run:
		return errAnotherRun
	case o.Rev < p.want.Rev:
		return fmt.Errorf("an order of revision %d after one of %d: from a coordinator that has lost its state", o.Rev, p.want.Rev)
	}
	p.run, p.want = o.Run, o
	for len(p.sent) > 0 && p.sent[0].seq <= o.Seq {
		if end := p.sent[0].at.Add(o.Lease); end.After(p.until) {
			p.until = end
		}
		p.sent = p.sent[1:]
	}
	return nil
}

// next says what is to be done now. Nothing: the order has been carried out, and the next
// report says so.
func (p *duty) next(now time.Time) task {
	if p.holds != 0 && !now.Before(p.until) {
		return doKill
	}
	run := p.want.Kind == orderRun
	switch {
	case p.holds != 0 && (!run || p.want.Generation != p.holds):
		return doStop
	case run && p.holds == 0 && p.want.Generation > p.last && now.Before(p.until):
		return doStart
	}
	p.rev = p.want.Rev
	return doNothing
}
