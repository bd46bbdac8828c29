package fabricsim

import "container/heap"

// Flow is one lane's traffic: the links that it crosses, and the part of its job's rate
// (bit/s a NIC) that it carries.
type Flow struct {
	Job   int
	Links []int32
	Share float64
}

// Rates gives each job the rate that its slowest flow allows. All flows of a job are held
// to its rate (a ring waits for its slowest edge); the bandwidth that they leave goes to
// other jobs: all rates grow together, and where a link is full, those of the jobs on it
// stop (max-min, by progressive filling). Flows of equal shares get equal rates of a link
// that limits them, as DCQCN's do.
func Rates(jobs int, flows []Flow, capacity []float64) []float64 {
	rates := make([]float64, jobs)
	on := make([][]int32, len(capacity)) // flows by link
	of := make([][]int32, jobs)
	rise := make([]float64, len(capacity)) // bit/s that a link fills by, for each of the rate
	fixed := make([]float64, len(capacity))
	for i := range flows {
		f := &flows[i]
		of[f.Job] = append(of[f.Job], int32(i))
		for _, l := range f.Links {
			on[l] = append(on[l], int32(i))
			rise[l] += f.Share
		}
	}
	q := make(fullest, 0, len(capacity))
	for l := range capacity {
		if rise[l] > 0 {
			q = append(q, filling{int32(l), capacity[l] / rise[l]})
		}
	}
	heap.Init(&q)
	stopped := make([]bool, jobs)
	for len(q) > 0 {
		top := heap.Pop(&q).(filling)
		l := top.link
		if rise[l] < 1e-9 {
			continue
		}
		if at := max(0, capacity[l]-fixed[l]) / rise[l]; at > top.at*(1+1e-12) {
			heap.Push(&q, filling{l, at}) // jobs have stopped since: it fills later
			continue
		}
		for _, f := range on[l] {
			j := flows[f].Job
			if stopped[j] {
				continue
			}
			stopped[j], rates[j] = true, top.at
			for _, g := range of[j] {
				for _, k := range flows[g].Links {
					rise[k] -= flows[g].Share
					fixed[k] += flows[g].Share * top.at
				}
			}
		}
	}
	return rates
}

// filling is a link and the rate of jobs at which it is full.
type filling struct {
	link int32
	at   float64
}

type fullest []filling

func (q fullest) Len() int { return len(q) }
func (q fullest) Less(i, j int) bool {
	return q[i].at < q[j].at || q[i].at == q[j].at && q[i].link < q[j].link
}
func (q fullest) Swap(i, j int) { q[i], q[j] = q[j], q[i] }
func (q *fullest) Push(x any)   { *q = append(*q, x.(filling)) }
func (q *fullest) Pop() any {
	old := *q
	x := old[len(old)-1]
	*q = old[:len(old)-1]
	return x
}
