// Command fabricsim prints what hashing and what the plan make of ring all-reduces in a
// simulated fabric: the tables of C4P's paper at its own size, and how gain and planning
// time grow.
//
//	fabricsim [-runs 20] [-short]
package main

import (
	"flag"
	"fmt"
	"os"
	"time"

	"github.com/lockstep-ccl/lockstep/bench/fabricsim"
	"github.com/lockstep-ccl/lockstep/pathplan"
)

func main() {
	runs := flag.Int("runs", 20, "runs of each, with other hashes")
	short := flag.Bool("short", false, "small sizes only: seconds")
	flag.Parse()
	sizes := []int{16, 64, 256, 1024, 4096}
	if *short {
		*runs, sizes = min(*runs, 3), sizes[:3]
	}
	for _, table := range []func() error{
		func() error {
			return compare("One job of 16 hosts", *runs, func(lanes int) []fabricsim.Job { return fabricsim.OneJob(16, lanes) })
		},
		func() error {
			return compare("Eight jobs of 2 hosts", *runs, func(lanes int) []fabricsim.Job { return fabricsim.PairJobs(16, lanes) })
		},
		func() error { return failure(*runs) },
		func() error { return growth(sizes) },
	} {
		if err := table(); err != nil {
			fmt.Fprintln(os.Stderr, "fabricsim:", err)
			os.Exit(1)
		}
	}
}

func compare(title string, runs int, jobs func(lanes int) []fabricsim.Job) error {
	fmt.Printf("\n%s, %d runs, bus bandwidth in Gbit/s a NIC (of 360)\n", title, runs)
	fmt.Println("| lanes | hashed: worst, mean, best job | planned: worst, mean, best | gain | slowest/fastest |")
	fmt.Println("| ---: | ---: | ---: | ---: | ---: |")
	for _, lanes := range []int{2, 4, 8, 16} {
		row, err := fabricsim.Compare(fabricsim.Paper(16), func(uint64) []fabricsim.Job { return jobs(lanes) }, runs)
		if err != nil {
			return err
		}
		fmt.Printf("| %d | %.1f, %.1f, %.1f | %.1f, %.1f, %.1f | %+.1f %% | %.3f |\n", lanes, row.Hashed.Least, row.Hashed.Mean, row.Hashed.Most,
			row.Planned.Least, row.Planned.Mean, row.Planned.Most, 100*(row.Total/row.HashedTotal-1), row.Even)
	}
	return nil
}

// cable is the one that dies.
var cable = pathplan.Link{From: "leaf0", To: "spine3"}

func failure(runs int) error {
	fmt.Printf("\nEight jobs, one of leaf0's 8 uplinks dies, %d runs, mean job in Gbit/s a NIC (ideal 315)\n", runs)
	fmt.Println("| lanes | before | static | balanced | slowest job | share of ideal | even within | moves | after the return | within |")
	fmt.Println("| ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |")
	for _, lanes := range []int{2, 4, 8, 16} {
		var before, static, balanced, least, after float64
		var within, back time.Duration
		moves := 0
		for seed := range uint64(runs) {
			jobs := fabricsim.PairJobs(16, lanes)
			a, err := fabricsim.Failure(fabricsim.Paper(16), jobs, seed, cable, false)
			if err != nil {
				return err
			}
			b, err := fabricsim.Failure(fabricsim.Paper(16), jobs, seed, cable, true)
			if err != nil {
				return err
			}
			n := float64(runs)
			before += fabricsim.Mean(b, 0, fabricsim.Dies) / n
			static += fabricsim.Mean(a, fabricsim.Dies, fabricsim.Back) / n
			balanced += fabricsim.Mean(b, fabricsim.Dies+3*time.Second, fabricsim.Back) / n
			after += fabricsim.Mean(b, fabricsim.Ends-time.Second, fabricsim.Ends) / n
			within = max(within, reaches(b, fabricsim.Dies, fabricsim.Back, 0.97*315))
			back = max(back, reaches(b, fabricsim.Back, fabricsim.Ends, 0.97*360))
			last := b[int(fabricsim.Back/fabricsim.Tick)-1]
			least += last.Least / n
			moves = max(moves, last.Moves)
		}
		fmt.Printf("| %d | %.1f | %.1f | %.1f | %.1f | %.3f | %s | %d | %.1f | %s |\n", lanes, before, static, balanced, least, balanced/315, within, moves, after, back)
	}
	return nil
}

// reaches is how long after from the jobs' mean has what is wanted, and keeps it.
func reaches(points []fabricsim.Point, from, to time.Duration, want float64) time.Duration {
	var last time.Duration
	for _, p := range points {
		if p.At >= from && p.At < to && p.Mean < want {
			last = p.At + fabricsim.Tick - from
		}
	}
	return last
}

func growth(sizes []int) error {
	fmt.Println("\nJobs of 2 to 32 hosts anywhere in a fabric that they fill, 2 lanes, one run; times of one core")
	fmt.Println("| hosts | NICs | jobs | hashed: worst, mean | planned: worst, mean | gain | plan, all jobs | longest job | rebalance | moves |")
	fmt.Println("| ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |")
	for _, hosts := range sizes {
		row, err := fabricsim.Compare(fabricsim.Paper(hosts), func(seed uint64) []fabricsim.Job { return fabricsim.ScatteredJobs(hosts, 2, seed) }, 1)
		if err != nil {
			return err
		}
		fmt.Printf("| %d | %d | %d | %.1f, %.1f | %.1f, %.1f | %+.1f %% | %s | %s | %s | %d |\n", hosts, hosts*8, row.Jobs, row.Hashed.Least, row.Hashed.Mean,
			row.Planned.Least, row.Planned.Mean, 100*(row.Total/row.HashedTotal-1), round(row.Plan), round(row.PlanMost), round(row.Rebalance), row.Moves)
	}
	return nil
}

func round(d time.Duration) time.Duration { return d.Round(10 * time.Microsecond) }
