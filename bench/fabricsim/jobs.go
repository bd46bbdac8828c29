package fabricsim

import (
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/lockstep-ccl/lockstep/pathplan"
)

// Job is a ring all-reduce: a ring for every NIC, through hosts in order.
type Job struct {
	Tenant, Name string
	Hosts        []int
	NICs         int
	Lanes        int // of a connection
}

// Requests are the connections of a job's rings.
func (j *Job) Requests() (out []pathplan.Request) {
	for i, h := range j.Hosts {
		next := j.Hosts[(i+1)%len(j.Hosts)]
		for n := range j.NICs {
			out = append(out, pathplan.Request{
				Conn:  pathplan.ConnID{Tenant: j.Tenant, Job: j.Name, Conn: fmt.Sprintf("%d>%d/%d", h, next, n)},
				Src:   pathplan.NIC{Host: fmt.Sprintf("host%d", h), Name: fmt.Sprintf("nic%d", n)},
				Dst:   pathplan.NIC{Host: fmt.Sprintf("host%d", next), Name: fmt.Sprintf("nic%d", n)},
				Lanes: j.Lanes,
			})
		}
	}
	return out
}

// Run is jobs on a fabric, with or without a plan.
type Run struct {
	*Fabric
	Jobs []Job
	// Planner is nil without a plan. Else Now is its clock.
	Planner  *pathplan.Planner
	Now      time.Time
	Planning []time.Duration // what each call of the planner for a job took
	Moves    int
	reqs     [][]pathplan.Request
	lanes    map[pathplan.ConnID][]pathplan.Assignment
}

// Start plans jobs one after the other, as they would come, or lets them hash.
func Start(f *Fabric, jobs []Job, p *pathplan.Planner) (*Run, error) {
	r := &Run{Fabric: f, Jobs: jobs, Planner: p, Now: time.Unix(0, 0), lanes: map[pathplan.ConnID][]pathplan.Assignment{}}
	for i := range jobs {
		reqs := jobs[i].Requests()
		r.reqs = append(r.reqs, reqs)
		if p == nil {
			continue
		}
		start := time.Now()
		out, err := p.Allocate(r.Now, reqs)
		r.Planning = append(r.Planning, time.Since(start))
		if err != nil {
			return nil, err
		}
		for _, a := range out {
			r.lanes[a.Conn] = append(r.lanes[a.Conn], a)
		}
	}
	return r, nil
}

// Rebalance lets the planner move lanes, at most so many, and returns how many it moved.
func (r *Run) Rebalance(most int) int {
	moves := r.Planner.Rebalance(r.Now, most)
	for _, m := range moves {
		r.lanes[m.Conn][m.Lane] = m.Assignment
	}
	r.Moves += len(moves)
	return len(moves)
}

// Rates returns each job's bus bandwidth, in bit/s a NIC.
func (r *Run) Rates() ([]float64, error) {
	flows, err := r.flows()
	if err != nil {
		return nil, err
	}
	return Rates(len(r.Jobs), flows, r.capacity), nil
}

// flows are all lanes where they are now. A planned lane whose link has gone hashes anew
// among those left, as its source port makes it.
func (r *Run) flows() ([]Flow, error) {
	var out []Flow
	var errs []error
	for j, reqs := range r.reqs {
		for i := range reqs {
			q := &reqs[i]
			for l := range q.Lanes {
				links, share, err := r.way(q, l, uint64(i*pathplan.MaxLanes+l))
				if err != nil {
					errs = append(errs, err)
					continue
				}
				out = append(out, Flow{Job: j, Links: links, Share: share})
			}
		}
	}
	return out, errors.Join(errs...)
}

// way is a lane's links and its share of its connection's bytes.
func (r *Run) way(q *pathplan.Request, l int, sourcePort uint64) ([]int32, float64, error) {
	lanes := r.lanes[q.Conn]
	if lanes == nil {
		links, err := r.Hashed(q.Src, q.Dst, sourcePort)
		return links, 1 / float64(q.Lanes), err
	}
	share := float64(lanes[l].Share) / pathplan.ShareUnit
	links, ok := r.Planned(q.Src, q.Dst, &lanes[l])
	if ok {
		return links, share, nil
	}
	links, err := r.hashedFrom(pathplan.Port{NIC: q.Src, Side: lanes[l].Side}, q.Dst, r.flow(q.Src, q.Dst, sourcePort))
	return links, share, err
}

// LinkLoads returns how full each link between switches is at the jobs' rates.
func (r *Run) LinkLoads() (map[pathplan.Link]float64, error) {
	flows, err := r.flows()
	if err != nil {
		return nil, err
	}
	rates := Rates(len(r.Jobs), flows, r.capacity)
	sum := make([]float64, len(r.capacity))
	for _, f := range flows {
		for _, l := range f.Links {
			sum[l] += rates[f.Job] * f.Share
		}
	}
	out := make(map[pathplan.Link]float64, len(r.links))
	for l, id := range r.links {
		out[l] = sum[id] / r.capacity[id]
	}
	return out, nil
}

// Summary is what jobs get.
type Summary struct{ Least, Mean, Most float64 }

// Summarize sums rates up.
func Summarize(rates []float64) (s Summary) {
	if len(rates) == 0 {
		return s
	}
	for _, r := range rates {
		s.Mean += r / float64(len(rates))
	}
	s.Least, s.Most = slices.Min(rates), slices.Max(rates)
	return s
}
