package fabric_test

import (
	"cmp"
	"context"
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/lockstep-ccl/lockstep/deploy/fabric"
	"github.com/lockstep-ccl/lockstep/record"
)

// A flow is what one rank sends to another, over all its lanes. It stalls while bytes are under way and its
// receiver consumes none, in order. That has the time in it in which the receiver waits for others: a ring's
// flows stall one after the other, so the longest stall is an upper bound of what the network did.

const (
	stallLook  = 5 * time.Millisecond
	stallLeast = 50 * time.Millisecond // shorter ones are not told
	stallsMost = 10_000                // of a rank
)

// stall is one that is over.
type stall struct {
	from, to  int
	at, lasts float64 // seconds; at since the epoch
	rtt       float64 // as the sender's kernel had it before
}

// watchStalls follows a rank's recorder until ctx ends, and then tells of its flows' stalls, a line each.
func watchStalls(ctx context.Context, w *record.Writer, rank int) (done func(), err error) {
	r, err := record.Open(w.Path())
	if err != nil {
		return nil, err
	}
	type flow struct {
		completed uint64
		since     time.Time // zero while nothing is under way
		rtt       int64
	}
	var found []stall
	var wg sync.WaitGroup
	ctx, cancel := context.WithCancel(ctx)
	wg.Go(func() {
		flows := map[int32]*flow{}
		var conns []record.ConnStatus
		for tick := time.NewTicker(stallLook); ; {
			select {
			case <-ctx.Done():
				tick.Stop()
				return
			case <-tick.C:
			}
			now := time.Now()
			conns = r.Conns(conns[:0])
			for _, c := range conns {
				f := flows[c.Peer]
				if f == nil {
					f = &flow{}
					flows[c.Peer] = f
				}
				moved, owes := c.Completed != f.completed, c.Posted > c.Completed
				if !f.since.IsZero() && (moved || !owes) {
					if d := now.Sub(f.since); d >= stallLeast && len(found) < stallsMost {
						found = append(found, stall{rank, int(c.Peer), float64(f.since.UnixNano()) / 1e9, d.Seconds(), float64(f.rtt) / 1e9})
					}
					f.since = time.Time{}
				}
				if owes && f.since.IsZero() {
					f.since, f.rtt = now, c.RTT
				}
				f.completed = c.Completed
			}
		}
	})
	return func() {
		cancel()
		wg.Wait()
		r.Close()
		for _, s := range found {
			fmt.Println("stall", s.from, s.to, s.at, s.lasts, s.rtt)
		}
	}, nil
}

// recorder makes a rank's recorder.
func (r *role) recorder() (*record.Writer, error) {
	return record.Create(record.Options{Dir: os.Getenv("LOCKSTEP_RUNTIME_DIR"), Identity: record.Identity{Job: r.Job, Rank: int32(r.Rank), WorldSize: int32(r.Size)}})
}

// parseStall reads a line of watchStalls.
func parseStall(line string) (s stall, ok bool) {
	n, err := fmt.Sscanf(line, "stall %d %d %g %g %g", &s.from, &s.to, &s.at, &s.lasts, &s.rtt)
	return s, n == 5 && err == nil
}

// longestStall is the longest of those that touch a time, in seconds since the job was started, and how many last for 0.2 s or more.
func (j *job) longestStall(from, to float64) string {
	if number("STALLS", 0) == 0 {
		return "not watched (FABRIC_TEST_STALLS=1)"
	}
	at := float64(j.began.UnixNano()) / 1e9
	var in []stall
	many := 0
	for _, s := range j.stalls {
		if s.at+s.lasts >= at+from && s.at <= at+to {
			in = append(in, s)
			if s.lasts >= 0.2 {
				many++
			}
		}
	}
	if len(in) == 0 {
		return fmt.Sprintf("none of %v or more", stallLeast)
	}
	s := slices.MaxFunc(in, func(a, b stall) int { return cmp.Compare(a.lasts, b.lasts) })
	return fmt.Sprintf("%.0f ms (rank %d to %d at %.2f s, RTT %.0f ms; %d of 200 ms or more)", 1e3*s.lasts, s.from, s.to, s.at-at, 1e3*s.rtt, many)
}

// asks is an event that logs the kernels' timeouts.
func (b *bed) asks(at float64) event {
	return event{at, func() error {
		if rto := b.timeouts(); len(rto) > 0 {
			b.t.Logf("TCP's retransmission timeouts after %v s: %v ms at least, %v in the middle, %v at most, of %d", at, rto[0], rto[len(rto)/2], rto[len(rto)-1], len(rto))
		}
		return nil
	}}
}

// timeouts is what the hosts' kernels have as TCP's retransmission timeout for connections with bytes under way, ms, ascending.
func (b *bed) timeouts() (rto []float64) {
	for h := range b.up.Hosts {
		out, err := fabric.Command(b.up.Host(h), "ss", "-tinH").Output()
		if err != nil {
			continue
		}
		for _, line := range strings.Split(string(out), "\n") {
			if _, after, ok := strings.Cut(line, " rto:"); ok && strings.Contains(line, " unacked:") {
				if v, err := strconv.ParseFloat(strings.Fields(after)[0], 64); err == nil {
					rto = append(rto, v)
				}
			}
		}
	}
	slices.Sort(rto)
	return rto
}
