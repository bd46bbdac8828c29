package ras

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"syscall"
	"time"

	"github.com/lockstep-ccl/lockstep/collector"
	"github.com/lockstep-ccl/lockstep/collector/source"
)

// Options of a Source. Zero fields take the defaults.
type Options struct {
	Addr   string        // DefaultAddr
	After  time.Duration // for how long a rank has to be held up; 2 s
	Period time.Duration // between two questions; 5 s
	Bound  time.Duration // of one question; 10 s
	Log    *slog.Logger  // nil: slog.Default()
}

// keep is for how long an answer is of interest.
const keep = int64(time.Minute)

// askers is how many world ranks, from 0, have their nodes ask: with one the answer
// would be lost with its node, with all NCCL would be flooded.
const askers = 64

// Source asks RAS while a rank is held up. Update is for one goroutine; Close ends it.
type Source struct {
	o       Options
	cancel  context.CancelFunc
	ctx     context.Context
	running sync.WaitGroup
	answers chan outcome // capacity 1: of the one question under way
	asking  bool
	asked   int64
	last    *collector.RAS
	err     error
}

type outcome struct {
	at     int64
	answer *collector.RAS
	err    error
}

// New returns a source that asks nobody before it has to.
func New(o Options) *Source {
	o.Addr = cmp.Or(o.Addr, DefaultAddr)
	o.After, o.Period, o.Bound = cmp.Or(o.After, 2*time.Second), cmp.Or(o.Period, 5*time.Second), cmp.Or(o.Bound, 10*time.Second)
	o.Log = cmp.Or(o.Log, slog.Default())
	s := &Source{o: o, answers: make(chan outcome, 1)}
	s.ctx, s.cancel = context.WithCancel(context.Background())
	return s
}

// Close ends what is under way.
func (s *Source) Close() error {
	s.cancel()
	s.running.Wait()
	return nil
}

// Update implements source.Source.
func (s *Source) Update(v *source.View) error {
	select {
	case a := <-s.answers:
		s.take(a)
	default:
	}
	if s.last != nil && v.Now-s.last.At > keep {
		s.last = nil
	}
	if !s.asking && (s.asked == 0 || v.Now-s.asked >= s.o.Period.Nanoseconds()) && s.wanted(v) {
		s.asking, s.asked = true, v.Now
		at := v.Now
		s.running.Go(func() {
			ctx, cancel := context.WithTimeout(s.ctx, s.o.Bound)
			defer cancel()
			answer, err := Ask(ctx, s.o.Addr, s.o.Bound/2)
			s.answers <- outcome{at, answer, err}
		})
	}
	v.RAS = s.last
	switch {
	case s.err != nil:
		return s.err
	case s.last == nil:
		return source.ErrNoData
	}
	return nil
}

func (s *Source) take(a outcome) {
	s.asking = false
	switch {
	case a.err == nil:
		a.answer.At = a.at
		s.last, s.err = a.answer, nil
	case errors.Is(a.err, syscall.ECONNREFUSED):
		s.err = nil // no NCCL here, or RAS is off
	default:
		s.err = fmt.Errorf("NCCL's RAS: %w", a.err)
	}
}

// wanted reports whether this node is to ask now: a rank of it, of the first ones, has
// been inside an operation for long. The first of them asks first.
func (s *Source) wanted(v *source.View) bool {
	for _, p := range v.Processes {
		if p.Dead() || p.Superseded || p.Rank < 0 || p.Rank >= askers {
			continue
		}
		after := s.o.After.Nanoseconds() * (1 + int64(p.Rank)/8)
		for i := range p.Comms {
			if c := &p.Comms[i]; c.Open() && c.StartedAt > 0 && v.Now-c.StartedAt > after {
				return true
			}
			if c := &p.Comms[i]; c.Enqueued > c.Finished && c.EnqueuedAt > 0 && v.Now-c.EnqueuedAt > after {
				return true // of a GPU: who has started nothing waits for one that has not
			}
		}
	}
	return false
}
