package main

import (
	"fmt"
	"runtime"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/lockstep-ccl/lockstep/diagnosis"
	"github.com/lockstep-ccl/lockstep/diagnosis/jobsim"
)

// plan is a scenario to play.
type plan struct {
	set   jobsim.Set
	row   string
	seed  uint64
	ranks int
	cost  bool // measured as well
}

// result is how it went; err when it could not be made.
type result struct {
	plan
	*jobsim.Outcome
	costs []float64 // by truth, where that was asked for
	err   error
}

// cpuNow is the CPU time of this thread, ns: others on the machine do not count.
func cpuNow() int64 {
	var t unix.Timespec
	if unix.ClockGettime(unix.CLOCK_THREAD_CPUTIME_ID, &t) != nil {
		return 0
	}
	return t.Nano()
}

// play plays plans, some at a time; results are in the plans' order. What kept has is not played
// again, and it gets the others; nil: nothing is kept.
func play(plans []plan, parallel int, kept *store) []result {
	results := make([]result, len(plans))
	next := make(chan int)
	var wg sync.WaitGroup
	for range max(1, parallel) {
		wg.Go(func() {
			runtime.LockOSThread() // cpuNow is a thread's
			defer runtime.UnlockOSThread()
			for i := range next {
				results[i] = playOne(plans[i])
				if kept != nil {
					kept.add(&results[i])
				}
			}
		})
	}
	for i := range plans {
		if kept != nil {
			if r, ok := kept.have[plans[i]]; ok {
				results[i] = r
				continue
			}
		}
		next <- i
	}
	close(next)
	wg.Wait()
	return results
}

func playOne(p plan) result {
	s, err := jobsim.Make(p.set, p.row, p.seed, p.ranks)
	if err != nil {
		return result{plan: p, err: err}
	}
	o, err := jobsim.Play(s, diagnosis.New(diagnosis.Config{}).Diagnose, cpuNow, nil)
	x := result{plan: p, Outcome: o, err: err}
	for i := 0; p.cost && x.err == nil && i < len(s.Truths); i++ {
		c := 0.0
		if slow(s.Truths[i].Classes[0]) {
			c, x.err = jobsim.Cost(s, i)
		}
		x.costs = append(x.costs, c)
	}
	return x
}

// one plays one scenario and prints what happens.
func one(set jobsim.Set, row string, seed uint64, ranks int, verbose bool) error {
	s, err := jobsim.Make(set, row, seed, ranks)
	if err != nil {
		return err
	}
	fmt.Println(line(s))
	told := map[string]string{}
	felt := make([]bool, len(s.Config.Faults))
	watch := func(j *jobsim.Job, verdicts []diagnosis.Verdict) {
		for i := range felt {
			if on := j.Onset(i); on > 0 && !felt[i] {
				felt[i] = true
				fmt.Printf("%8.2fs step %-4d FAULT %v, felt since %.2fs\n", j.Now().Seconds(), j.Steps(), &s.Config.Faults[i], float64(on-jobsim.Start)/1e9)
			}
		}
		now := map[string]string{}
		for i := range verdicts {
			v := &verdicts[i]
			now[v.Key] = fmt.Sprintf("%-9s %s", v.Level, said(v))
			if told[v.Key] == now[v.Key] {
				continue
			}
			fmt.Printf("%8.2fs step %-4d %s\n", j.Now().Seconds(), j.Steps(), now[v.Key])
			if verbose {
				for _, w := range v.Why {
					fmt.Printf("%24s%s\n", "", w)
				}
			}
		}
		for k, v := range told {
			if now[k] == "" {
				fmt.Printf("%8.2fs step %-4d over      %s\n", j.Now().Seconds(), j.Steps(), v)
			}
		}
		told = now
	}
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	begin := time.Now()
	o, err := jobsim.Play(s, diagnosis.New(diagnosis.Config{}).Diagnose, cpuNow, watch)
	if err != nil {
		return err
	}
	fmt.Printf("%8.2fs step %-4d end; %d passes of %.2f ms, the longest %.2f ms; %.1f s\n", o.Ran.Seconds(), o.Steps, o.Passes,
		float64(o.PassNs)/float64(o.Passes)/1e6, float64(o.PassMax)/1e6, time.Since(begin).Seconds())
	for i := range o.Found {
		fmt.Printf("truth %d: %s\n", i+1, verdictOn(o, i))
	}
	return nil
}

// said is a verdict in one line.
func said(v *diagnosis.Verdict) string {
	s := v.Class.String()
	for i := range v.Culprits {
		c := &v.Culprits[i]
		switch {
		case i == 4:
			return s + fmt.Sprintf(" and %d more", len(v.Culprits)-i)
		case i > 0:
			s += ","
		}
		switch c.Kind {
		case diagnosis.CulpritNode:
			s += " node " + c.Node
		case diagnosis.CulpritConnection:
			s += fmt.Sprintf(" %d>%d", c.Rank, c.Peer)
		case diagnosis.CulpritRank:
			s += fmt.Sprintf(" rank %d", c.Rank)
		default:
			s += fmt.Sprintf(" %v %d", c.Kind, c.Rank)
		}
		s += " " + c.Reason
	}
	return s
}
