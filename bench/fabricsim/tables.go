package fabricsim

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"time"

	"github.com/lockstep-ccl/lockstep/pathplan"
)

// Paper is C4P's testbed: 16 hosts of 8 NICs of 2 × 200 Gbit/s on 8 leaves, 1:1 (32 ports
// of 200 down, 8 of 800 up a leaf, as Trident4 has them). Hosts beyond 16 bring leaves of
// their own, 4 for every 8 hosts.
func Paper(hosts int) pathplan.Topology {
	return pathplan.Clos(pathplan.ClosShape{Hosts: hosts, NICs: 8, Groups: hosts / 8, LeafPairs: 2, Spines: 8,
		PortRate: 200e9, LinkRate: 800e9})
}

// OneJob is a ring through all hosts.
func OneJob(hosts, lanes int) []Job {
	j := Job{Tenant: "t", Name: "all", NICs: 8, Lanes: lanes}
	for h := range hosts {
		j.Hosts = append(j.Hosts, h)
	}
	return []Job{j}
}

// PairJobs are jobs of two hosts each that share no leaf: all of their traffic crosses
// spines, and all leaves.
func PairJobs(hosts, lanes int) (out []Job) {
	for i := range hosts / 2 {
		out = append(out, Job{Tenant: fmt.Sprintf("t%d", i%2), Name: fmt.Sprint("pair", i), NICs: 8, Lanes: lanes, Hosts: []int{i, i + hosts/2}})
	}
	return out
}

// ScatteredJobs fill a fabric with jobs of 2 to 32 hosts, anywhere.
func ScatteredJobs(hosts, lanes int, seed uint64) (out []Job) {
	r := rand.New(rand.NewPCG(seed, 1))
	order := r.Perm(hosts)
	for len(order) > 1 {
		n := min(2<<r.IntN(5), len(order))
		out = append(out, Job{Tenant: fmt.Sprintf("t%d", len(out)%4), Name: fmt.Sprint("job", len(out)), NICs: 8, Lanes: lanes, Hosts: slices.Clone(order[:n])})
		order = order[n:]
	}
	return out
}

// Row is what one set of jobs gets without and with a plan.
type Row struct {
	Hosts, Jobs, Connections int
	Lanes                    int
	Hashed, Planned          Summary       // of jobs, over all runs, Gbit/s a NIC
	HashedTotal, Total       float64       // mean over runs of the jobs' mean
	Even                     float64       // slowest job over fastest, worst run
	Plan, PlanMost           time.Duration // for all jobs, and for one
	Rebalance                time.Duration // until nothing is left to move, after all jobs have come
	Moves                    int           // that took
}

// Compare runs the same jobs with hashes of other seeds, without and with a plan. The plan
// is made job by job, and then rebalanced until it stays.
func Compare(t pathplan.Topology, jobs func(seed uint64) []Job, runs int) (row Row, err error) {
	var hashed, planned []float64
	row.Even = 1
	for seed := range uint64(runs) {
		list := jobs(seed)
		without, err := Start(New(t, seed), list, nil)
		if err != nil {
			return row, err
		}
		a, err := without.Rates()
		if err != nil {
			return row, err
		}
		p, err := pathplan.New(t, pathplan.Options{Steered: true})
		if err != nil {
			return row, err
		}
		with, err := Start(New(t, seed), list, p)
		if err != nil {
			return row, err
		}
		start := time.Now()
		with.Settle()
		row.Rebalance += time.Since(start) / time.Duration(runs)
		b, err := with.Rates()
		if err != nil {
			return row, err
		}
		hashed, planned = append(hashed, a...), append(planned, b...)
		s := Summarize(b)
		row.Even = min(row.Even, s.Least/s.Most)
		row.HashedTotal += Summarize(a).Mean / float64(runs) / Gbit
		row.Total += s.Mean / float64(runs) / Gbit
		row.Moves += with.Moves / runs
		for _, d := range with.Planning {
			row.Plan += d / time.Duration(runs)
			row.PlanMost = max(row.PlanMost, d)
		}
		row.Jobs, row.Connections = len(list), len(with.lanes)
	}
	row.Hashed, row.Planned = Summarize(hashed).gbit(), Summarize(planned).gbit()
	return row, nil
}

func (s Summary) gbit() Summary { return Summary{s.Least / Gbit, s.Mean / Gbit, s.Most / Gbit} }

// Settle rebalances until the planner has nothing more to move, at most a minute of its
// clock.
func (r *Run) Settle() {
	for range 60 {
		r.Now = r.Now.Add(time.Second)
		if r.Rebalance(1<<20) == 0 && r.Now.Sub(time.Unix(0, 0)) > 12*time.Second {
			return
		}
	}
}

// Point is a moment of a run in which a link dies.
type Point struct {
	At    time.Duration
	Mean  float64 // of jobs, Gbit/s a NIC
	Least float64
	Moves int // so far
}

// Timing of Failure: the link dies, is known to have died (by probes), and is back.
const (
	Dies   = 2 * time.Second
	Known  = time.Second
	Back   = 12 * time.Second
	Ends   = 30 * time.Second
	Tick   = 100 * time.Millisecond
	Budget = 32 // moves a Tick
)

// Failure runs jobs while the cable between a leaf and a spine dies and comes back, and
// returns what they get over time. Without a plan that follows (balance false), the lanes of
// the dead link stay where the switches' hashes put them.
func Failure(t pathplan.Topology, jobs []Job, seed uint64, cable pathplan.Link, balance bool) (out []Point, err error) {
	p, err := pathplan.New(t, pathplan.Options{Steered: true})
	if err != nil {
		return nil, err
	}
	f := New(t, seed)
	r, err := Start(f, jobs, p)
	if err != nil {
		return nil, err
	}
	set := func(down bool) {
		for _, l := range []pathplan.Link{cable, cable.Reverse()} {
			if e := p.SetLink(r.Now, l, pathplan.LinkState{Down: down}); e != nil {
				err = e
			}
		}
	}
	for at := time.Duration(0); at <= Ends; at += Tick {
		r.Now = time.Unix(0, 0).Add(at)
		switch at {
		case Dies:
			f.Cut(cable)
		case Dies + Known:
			set(true)
		case Back:
			f.Mend(cable)
		case Back + Known:
			set(false)
		}
		if balance {
			r.Rebalance(Budget)
		}
		rates, e := r.Rates()
		if e != nil || err != nil {
			return nil, errors.Join(e, err)
		}
		s := Summarize(rates).gbit()
		out = append(out, Point{at, s.Mean, s.Least, r.Moves})
	}
	return out, nil
}

// Mean is the mean over a span of time.
func Mean(points []Point, from, to time.Duration) (v float64) {
	n := 0
	for _, p := range points {
		if p.At >= from && p.At < to {
			v += p.Mean
			n++
		}
	}
	return v / float64(max(n, 1))
}
