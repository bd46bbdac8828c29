package process

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net"
	"slices"
	"strings"
	"sync"
	"time"
)

// member is a host's part in the job: orders come in, reports go out.
type member struct {
	mu sync.Mutex
	follower
	attempt *attempt
	ranks   []RankStatus
	failed  string
	meet    map[string]string
	met     time.Time // when meet was made
	leaving bool
	final   bool // the next report is the last
	stuck   bool // processes outlived SIGKILL
}

// serve is a host's life: it obeys until the coordinator says that the job has ended.
func (s *Host) serve(ctx context.Context, dial func(context.Context) (net.Conn, error)) error {
	talking, hangUp := context.WithCancel(context.Background())
	defer hangUp()
	over := make(chan error, 1)
	talk := make(chan struct{})
	go func() {
		defer close(talk)
		over <- s.talk(talking, dial)
	}()
	err := s.obey(ctx, over)
	// The coordinator hears how this ended, when it can be heard.
	s.mu.Lock()
	s.final = true
	s.mu.Unlock()
	nudge(s.say)
	select {
	case <-talk:
	case <-time.After(time.Second):
	}
	hangUp()
	<-talk
	return err
}

// obey carries orders out until the job has ended, nobody gives any, or ctx ends.
func (s *Host) obey(ctx context.Context, over <-chan error) error {
	var end error
	for {
		s.mu.Lock()
		if ctx.Err() != nil && !s.leaving {
			s.leaving = true
		}
		if s.leaving || end != nil {
			s.want.Kind = orderWait // whatever was ordered
		}
		do, want, lease := s.next(time.Now()), s.want, s.until
		idle := do == doNothing && s.holds == 0
		s.mu.Unlock()
		switch do {
		case doStart:
			s.begin(want)
			continue
		case doStop, doKill:
			grace := want.Grace
			if do == doKill {
				grace = 0
				if !s.stuck {
					s.expired.Add(1)
				}
				s.o.Logger.Warn("the coordinator is not heard: this host's ranks are ended, since others may take their places", "job", s.o.Job, "node", s.h.Name)
			}
			if s.end(grace); !s.stuck {
				continue
			}
		}
		nudge(s.say) // what was done, or that nothing was to be
		switch {
		case idle && end != nil:
			return end
		case idle && s.leaving:
			return ctx.Err()
		case idle && want.Kind == orderDone:
			return nil
		case idle && want.Kind == orderFailed:
			return fmt.Errorf("run: %s", want.Why)
		}
		wait := time.Second
		if !idle {
			wait = max(time.Millisecond, min(wait, time.Until(lease)))
		}
		timer := time.NewTimer(wait)
		done := ctx.Done()
		if s.leaving {
			done = nil
		}
		select {
		case <-s.wake:
		case <-timer.C:
		case <-done:
		case end = <-over:
			over = nil
		}
		timer.Stop()
	}
}

// begin starts an attempt's ranks. That it began is on disk before: it is never begun twice.
func (s *Host) begin(o Order) {
	s.mu.Lock()
	s.last, s.failed, s.self.Last = o.Generation, "", o.Generation
	s.mu.Unlock()
	a, ranks, err := s.launch(o)
	s.mu.Lock()
	defer s.mu.Unlock()
	s.meet = nil
	if err != nil {
		s.failed = bound(err.Error())
		s.o.Logger.Error("cannot start this host's ranks", "job", s.o.Job, "attempt", o.Attempt, "err", err)
		return
	}
	s.attempt, s.holds, s.ranks = a, o.Generation, statuses(a, ranks)
	s.o.Logger.Info("job started", "job", s.o.Job, "attempt", o.Attempt, "node", s.h.Name, "ranks", fmt.Sprintf("%d-%d", ranks[0].rank, ranks[len(ranks)-1].rank))
	go s.follow(a)
}

func (s *Host) launch(o Order) (*attempt, []assignment, error) {
	if err := s.keep(); err != nil {
		return nil, nil, err
	}
	if err := s.dir.Replace("secret", []byte(o.Secret+"\n")); err != nil {
		return nil, nil, fmt.Errorf("run: secret: %w", err)
	}
	if s.o.BeforeStart != nil {
		s.o.BeforeStart(o.Attempt)
	}
	m := attemptSpec{n: o.Attempt, world: s.o.Ranks, token: o.Token, secret: s.secret(), rendezvous: env(o.Meet)}
	for i := range s.local {
		m.ranks = append(m.ranks, assignment{rank: o.Group*s.local + i, local: i, perNode: s.local, group: o.Group, slot: i, node: s.h.Name})
	}
	a, err := s.start(m)
	return a, m.ranks, err
}

// follow notes how an attempt's ranks end.
func (s *Host) follow(a *attempt) {
	for range a.ranks {
		x := <-a.exits
		state := exitedWell
		if x.err != nil {
			state = bound(x.err.Error())
		}
		s.mu.Lock()
		if s.attempt == a {
			for i := range s.ranks {
				if s.ranks[i].Rank == x.rank {
					s.ranks[i].State, s.ranks[i].Exit = "exited", state
				}
			}
		}
		s.mu.Unlock()
		s.o.Logger.Info("job rank_exited", "job", s.o.Job, "attempt", a.n, "rank", x.rank, "detail", state)
		nudge(s.say)
	}
}

// end ends the attempt's processes.
func (s *Host) end(grace time.Duration) {
	s.mu.Lock()
	a := s.attempt
	s.mu.Unlock()
	err := a.stop(grace)
	if !s.clear(context.Background(), s.secret()) && err == nil { // what left its group
		err = fmt.Errorf("run: processes that this host's ranks had started are still there %v after SIGKILL", killPatience)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.stuck = err != nil; s.stuck {
		s.failed = bound(err.Error())
		return // looked at again
	}
	s.attempt, s.holds, s.ranks, s.failed = nil, 0, nil, ""
}

// errSilent ends a host that has heard no coordinator for too long.
var errSilent = errors.New("the coordinator was not heard")

// talk keeps a connection to the coordinator until talking ends, or nothing can come of it.
func (s *Host) talk(talking context.Context, dial func(context.Context) (net.Conn, error)) error {
	heard, pause := time.Now(), 50*time.Millisecond
	for {
		c, err := dial(talking)
		if err == nil {
			stop := closeWhen(talking, c)
			var orders int
			orders, err = s.converse(c)
			stop()
			c.Close()
			if orders > 0 {
				heard, pause = time.Now(), 50*time.Millisecond
			}
		}
		var fatal *refusal
		switch {
		case talking.Err() != nil || s.finished():
			return nil //nolint:nilerr // it was to end
		case errors.As(err, &fatal):
			return fmt.Errorf("run: %w", fatal.err)
		case time.Since(heard) >= s.h.Join:
			return fmt.Errorf("run: %w for %v: %w", errSilent, s.h.Join, err)
		}
		s.o.Logger.Debug("no connection to the coordinator", "job", s.o.Job, "err", err)
		select {
		case <-time.After(pause):
			pause = min(2*pause, time.Second)
		case <-talking.Done():
			return nil
		}
	}
}

// refusal is an error that no further connection cures, unless it wraps errLater.
type refusal struct {
	err error
	why RefusalReason // to the coordinator, "" for none of its refusals
}

func (r *refusal) Error() string { return r.err.Error() }
func (r *refusal) Unwrap() error { return r.err }

// converse reports and takes orders over one connection until it ends.
func (s *Host) converse(c net.Conn) (orders int, err error) {
	s.mu.Lock()
	s.connected()
	s.mu.Unlock()
	wrote := make(chan struct{})
	hungUp := make(chan struct{})
	go func() {
		defer close(wrote)
		s.reports(c, hungUp)
	}()
	defer func() {
		close(hungUp)
		c.Close()
		<-wrote
	}()
	for {
		if err := c.SetReadDeadline(time.Now().Add(s.h.Lease)); err != nil {
			return orders, err
		}
		var o Order
		if err := readMessage(c, &o); err != nil {
			return orders, err
		}
		s.mu.Lock()
		err := s.receive(o)
		s.mu.Unlock()
		if err != nil {
			return orders, &refusal{err: err}
		}
		orders++
		nudge(s.wake)
	}
}

// reports sends a report at once, when there is something new, and often enough for the lease.
func (s *Host) reports(c net.Conn, hungUp <-chan struct{}) {
	beat := time.NewTicker(max(s.h.Lease/5, time.Millisecond))
	defer beat.Stop()
	var last Report
	for {
		final := s.finished()
		r := s.reported(&last)
		if r != nil {
			_ = c.SetWriteDeadline(time.Now().Add(s.h.Lease))
			if writeMessage(c, r) != nil {
				c.Close()
				return
			}
		}
		if final {
			c.Close()
			return
		}
		select {
		case <-s.say:
		case <-beat.C:
			last = Report{}
		case <-hungUp:
			return
		}
	}
}

func (s *Host) finished() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.final
}

// reported is the report of now, nil when it would say what the last one has said.
func (s *Host) reported(last *Report) *Report {
	s.mu.Lock()
	defer s.mu.Unlock()
	now := time.Now()
	if s.holds == 0 && (s.meet == nil || now.Sub(s.met) > 30*time.Second) {
		s.meet, s.met = s.meeting(), now
	}
	r := Report{
		Job: s.o.Job, Node: s.h.Name, Holder: s.self.Holder, Boot: s.boot, Local: s.local,
		Ranks: slices.Clone(s.ranks), Failed: s.failed, Leaving: s.leaving, Meet: s.meet,
	}
	if last.Protocol != 0 && last.Rev == s.rev && last.Run == s.run && last.Last == s.follower.last && last.Holds == s.holds && last.Failed == r.Failed &&
		last.Leaving == r.Leaving && slices.Equal(last.Ranks, r.Ranks) && maps.Equal(last.Meet, r.Meet) {
		return nil
	}
	s.report(now, &r)
	*last = r
	return &r
}

// meeting is where ranks may meet if rank 0 comes here.
func (s *Host) meeting() map[string]string {
	list, err := s.o.Rendezvous()
	if err != nil {
		s.o.Logger.Error("no place for ranks to meet on this host", "job", s.o.Job, "err", err)
		return nil
	}
	m := map[string]string{}
	for _, kv := range list {
		k, v, _ := strings.Cut(kv, "=")
		m[k] = v
	}
	if err := checkMeet(m); err != nil {
		s.o.Logger.Error("no place for ranks to meet on this host", "job", s.o.Job, "err", err)
		return nil
	}
	return m
}

var errNoCommand = errors.New("run: no command; write it after --, as in `lockstep run --ranks 8 -- python train.py`")
