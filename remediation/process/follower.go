package process

import (
	"errors"
	"fmt"
	"time"
)

// follower is a host's side of the coordinator's protocol: its last order, and its lease. It is pure:
// time comes from the caller. It says what is to be done next, and when the processes must have
// ended because the lease has.
type follower struct {
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
func (f *follower) connected() { f.seq, f.sent = 0, nil }

// report fills in the follower's state.
func (f *follower) report(now time.Time, r *Report) {
	f.seq++
	if len(f.sent) < 1024 { // a coordinator that answers nothing is none
		f.sent = append(f.sent, stamp{f.seq, now})
	}
	r.Protocol, r.Seq, r.Run, r.Rev, r.Last, r.Holds = protocol, f.seq, f.run, f.rev, f.last, f.holds
}

// receive takes an order. One that is older than what was obeyed comes from a coordinator that
// was replaced: it changes nothing and prolongs no lease.
func (f *follower) receive(o Order) error {
	if err := o.check(); err != nil {
		return err
	}
	switch {
	case o.Kind == orderRefuse:
		return fmt.Errorf("the coordinator refuses this host: %s", bound(o.Why))
	case f.run != "" && o.Run != f.run:
		return errAnotherRun
	case o.Rev < f.want.Rev:
		return fmt.Errorf("an order of revision %d after one of %d: from a coordinator that has lost its state", o.Rev, f.want.Rev)
	}
	f.run, f.want = o.Run, o
	for len(f.sent) > 0 && f.sent[0].seq <= o.Seq {
		if end := f.sent[0].at.Add(o.Lease); end.After(f.until) {
			f.until = end
		}
		f.sent = f.sent[1:]
	}
	return nil
}

// next says what is to be done now. Nothing: the order has been carried out, and the next
// report says so.
func (f *follower) next(now time.Time) task {
	if f.holds != 0 && !now.Before(f.until) {
		return doKill
	}
	run := f.want.Kind == orderRun
	switch {
	case f.holds != 0 && (!run || f.want.Generation != f.holds):
		return doStop
	case run && f.holds == 0 && f.want.Generation > f.last && now.Before(f.until):
		return doStart
	}
	f.rev = f.want.Rev
	return doNothing
}
