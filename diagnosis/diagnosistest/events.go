package diagnosistest

import (
	"container/heap"
	"time"

	"github.com/lockstep-ccl/lockstep/record"
)

type event struct {
	at   int64
	seq  int
	rank int // -1: a node's report
	gen  int
	call func()
}

type eventHeap struct {
	list []event
	n    int
}

func (h *eventHeap) Len() int { return len(h.list) }

func (h *eventHeap) Less(i, j int) bool {
	a, b := h.list[i], h.list[j]
	return a.at < b.at || (a.at == b.at && a.seq < b.seq)
}

func (h *eventHeap) Swap(i, j int) { h.list[i], h.list[j] = h.list[j], h.list[i] }

func (h *eventHeap) Push(x any) { h.list = append(h.list, x.(event)) }

func (h *eventHeap) Pop() any {
	x := h.list[len(h.list)-1]
	h.list = h.list[:len(h.list)-1]
	return x
}

func (j *Job) at(t int64, r *rank, call func()) {
	e := event{at: t, seq: j.events.n, rank: -1, call: call}
	if r != nil {
		e.rank, e.gen = r.id, r.gen
	}
	j.events.n++
	heap.Push(&j.events, e)
}

// Advance runs the job for d of its own time.
func (j *Job) Advance(d time.Duration) {
	end := j.now + int64(d)
	for len(j.events.list) > 0 && j.events.list[0].at <= end {
		e := heap.Pop(&j.events).(event)
		j.now = max(j.now, e.at)
		if e.rank >= 0 && j.ranks[e.rank].gen != e.gen {
			continue
		}
		e.call()
	}
	j.now = end
}

// run lets a rank execute until something takes time.
func (j *Job) run(r *rank) {
	for !r.frozen && !r.done {
		if len(r.todo) == 0 {
			r.todo = j.program(r)
		}
		in := r.todo[0]
		r.todo = r.todo[1:]
		switch in.kind {
		case doCompute:
			j.compute(r, in)
			return
		case doColl:
			if c := in.comm(r); c != nil {
				j.enter(r, c, in.coll, -1)
				return
			}
		case doSend, doRecv:
			if c := in.comm(r); c != nil {
				k := record.Send
				if in.kind == doRecv {
					k = record.Recv
				}
				j.enter(r, c, k, in.peer)
				return
			}
		case doMark:
			r.mark, r.markAt = in.mark, j.now
		case doUnmark:
			r.mark, r.markAt = record.MarkNone, 0
		case doStep:
			r.step++
		case doLeave:
			j.leave(r)
			if r.done {
				return
			}
		case doJoin:
			j.join(r)
			return
		}
	}
}
