package main

import (
	"fmt"
	"runtime"
	"time"

	"github.com/lockstep-ccl/lockstep/bench/fabricsim"
	"github.com/lockstep-ccl/lockstep/pathplan"
)

// planHosts make 10,000 NICs.
const planHosts = 1248

// plan times the planner on one core in a fabric of 10,000 NICs that is in use: a job of
// 1,024 NICs that comes, and what follows the death of a link. The best of five rounds.
func plan() ([]row, error) {
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(1))
	whole, job, failure := time.Hour, time.Hour, time.Hour
	for seed := range uint64(5) {
		p, err := pathplan.New(fabricsim.Paper(planHosts), pathplan.Options{Steered: true})
		if err != nil {
			return nil, err
		}
		var reqs []pathplan.Request
		jobs := fabricsim.ScatteredJobs(planHosts, 2, seed)
		last := fabricsim.Job{Tenant: "t", Name: "last", NICs: 8, Lanes: 2}
		for _, j := range jobs {
			if len(last.Hosts)+len(j.Hosts) <= 128 {
				last.Hosts = append(last.Hosts, j.Hosts...)
				continue
			}
			reqs = append(reqs, j.Requests()...)
		}
		now := time.Unix(0, 0)
		for _, step := range []struct {
			reqs []pathplan.Request
			took *time.Duration
		}{{reqs, &whole}, {last.Requests(), &job}} {
			runtime.GC()
			start := time.Now()
			if _, err := p.Allocate(now, step.reqs); err != nil {
				return nil, err
			}
			*step.took = min(*step.took, time.Since(start))
		}
		for range 60 {
			now = now.Add(time.Second)
			p.Rebalance(now, 1<<20)
		}
		if err := p.SetLink(now, pathplan.Link{From: "leaf0", To: "spine3"}, pathplan.LinkState{Down: true}); err != nil {
			return nil, err
		}
		runtime.GC()
		start := time.Now()
		if len(p.Rebalance(now, 64)) == 0 {
			return nil, fmt.Errorf("a link died and nothing moved")
		}
		failure = min(failure, time.Since(start))
	}
	ms := func(d time.Duration) float64 { return d.Seconds() * 1e3 }
	return []row{
		{"plan_job_of_1024_nics", ms(job), "ms", 10},
		{"plan_all_of_10000_nics", ms(whole), "ms", 100},
		{"plan_link_death_10000_nics", ms(failure), "ms", 50},
	}, nil
}
