package jobsim_test

import (
	"fmt"
	"testing"
	"time"

	"github.com/lockstep-ccl/lockstep/diagnosis"
	"github.com/lockstep-ccl/lockstep/diagnosis/jobsim"
	"github.com/lockstep-ccl/lockstep/record"
)

// watcher checks successive evidence of one job against what holds of all evidence.
type watcher struct {
	t       *testing.T
	members map[string]diagnosis.Member
	failed  bool
}

func (w *watcher) errorf(format string, args ...any) {
	if !w.failed { // one is enough
		w.failed = true
		w.t.Errorf(format, args...)
	}
}

func (w *watcher) look(ev *diagnosis.Evidence) {
	for i := range ev.Ranks {
		r := &ev.Ranks[i]
		if r.Node >= 0 && int(r.Node) >= len(ev.Nodes) {
			w.errorf("rank %d is on node %d of %d", i, r.Node, len(ev.Nodes))
		}
		for _, at := range []int64{r.ProcAt, r.MarkAt, r.Exit.At, r.GPU.XidAt, r.GPU.LostAt, r.GPU.ThrottledAt} {
			w.notAfter(ev, r.Node, at, "rank", i)
		}
		if len(r.Calls) > diagnosis.MaxCalls {
			w.errorf("rank %d: %d calls", i, len(r.Calls))
		}
	}
	for c := range ev.Comms {
		x := &ev.Comms[c]
		for i := range x.Members {
			m := &x.Members[i]
			if m.World < 0 {
				continue
			}
			node := ev.Ranks[m.World].Node
			for _, at := range []int64{m.StateAt, m.EnqueuedAt, m.StartedAt, m.FinishedAt} {
				w.notAfter(ev, node, at, x.Name, i)
			}
			if m.Finished > m.Started || m.Started > m.Enqueued || m.Started > m.Finished+1 {
				w.errorf("%s member %d: enqueued %d, started %d, finished %d", x.Name, i, m.Enqueued, m.Started, m.Finished)
			}
			if m.Finished > 0 && m.Finished == m.Started && m.FinishedAt < m.StartedAt {
				w.errorf("%s member %d: started at %d, finished at %d", x.Name, i, m.StartedAt, m.FinishedAt)
			}
			key := fmt.Sprintf("%d/%d", x.ID, i)
			was := w.members[key]
			if m.Enqueued < was.Enqueued || m.Started < was.Started || m.Finished < was.Finished || m.Ops < was.Ops || m.OwnNs < was.OwnNs || m.WaitNs < was.WaitNs || m.TransferNs < was.TransferNs || m.MaxOwnNs < was.MaxOwnNs {
				w.errorf("%s member %d went back: %+v, then %+v", x.Name, i, was, *m)
			}
			w.members[key] = *m
		}
	}
	for i := range ev.Conns {
		k := &ev.Conns[i]
		if k.Comm < 0 || int(k.Comm) >= len(ev.Comms) || int(k.Src) >= len(ev.Comms[k.Comm].Members) || int(k.Dst) >= len(ev.Comms[k.Comm].Members) {
			w.errorf("connection %d: %+v", i, *k)
			continue
		}
		for _, at := range []int64{k.LastPost, k.LastCompletion, k.TxBlockedSince, k.LastWindowAt, k.LinkAt} {
			w.notAfter(ev, ev.Ranks[ev.Comms[k.Comm].Members[k.Src].World].Node, at, "connection", i)
		}
		if k.Transport == record.TransportNVLink {
			w.errorf("connection %d: somebody tells of NVLink", i)
		}
	}
	for i := range ev.Arrivals {
		a := &ev.Arrivals[i]
		if int(a.Comm) >= len(ev.Comms) || len(a.Start) != len(ev.Comms[a.Comm].Members) {
			w.errorf("arrival %d: %d members", i, len(a.Start))
			continue
		}
		// Nobody leaves before the last one has entered, as exactly as clocks are mapped.
		last, first := int64(0), int64(0)
		for m := range a.Start {
			last = max(last, a.Start[m])
			if a.End[m] > 0 && (first == 0 || a.End[m] < first) {
				first = a.End[m]
			}
		}
		if slack := 2 * ev.Nodes[0].MapError; first > 0 && first < last-slack {
			w.errorf("%s #%d: somebody left %v before the last one entered", ev.Comms[a.Comm].Name, a.Seq, time.Duration(last-first))
		}
	}
}

// notAfter: a report tells nothing of the time after it.
func (w *watcher) notAfter(ev *diagnosis.Evidence, node int32, at int64, what string, i int) {
	switch {
	case at == 0:
	case at > ev.Now:
		w.errorf("%s %d: %v after now", what, i, time.Duration(at-ev.Now))
	case node >= 0 && ev.Nodes[node].LastSeen > 0 && at > ev.Nodes[node].LastSeen:
		w.errorf("%s %d: %v after the report of its node", what, i, time.Duration(at-ev.Nodes[node].LastSeen))
	}
}

func TestEvidence(t *testing.T) {
	for _, set := range []jobsim.Set{jobsim.Tuning, jobsim.Reporting} {
		for i, name := range jobsim.Rows() {
			t.Run(set.String()+"/"+name, func(t *testing.T) {
				s, err := jobsim.Make(set, name, uint64(100+i), 16)
				if err != nil {
					t.Skip(err)
				}
				j, err := jobsim.New(s.Config)
				if err != nil {
					t.Fatal(err)
				}
				w := watcher{t: t, members: map[string]diagnosis.Member{}}
				for j.Now() < min(s.Length, 40*time.Second) && !w.failed {
					j.Advance(100 * time.Millisecond)
					w.look(j.Evidence())
				}
			})
		}
	}
}

// A rank that does not go on holds up all that work with it, and nothing else ends the job.
func TestFaultsAreFelt(t *testing.T) {
	for _, kind := range []jobsim.FaultKind{jobsim.Die, jobsim.HangIdle, jobsim.HangStop, jobsim.GPULost, jobsim.PairCut, jobsim.OppositeOrder, jobsim.Mismatch} {
		t.Run(kind.String(), func(t *testing.T) {
			c := jobsim.Config{Tensor: 2, Data: 4, Seed: 5, World: true, Cluster: jobsim.Cluster{RanksPerNode: 2, GPU: true}, Dying: jobsim.Dying{Reaction: jobsim.Linger},
				Faults: []jobsim.Fault{{Kind: kind, Rank: 2, Peer: 4, Signal: 9, At: 6 * time.Second}}}
			j, err := jobsim.New(c)
			if err != nil {
				t.Fatal(err)
			}
			j.Advance(6 * time.Second)
			if j.Steps() < 10 {
				t.Fatalf("%d steps before the fault", j.Steps())
			}
			j.Advance(4 * time.Second)
			stopped := j.Steps()
			j.Advance(10 * time.Second)
			if j.Steps() != stopped {
				t.Errorf("the job went from step %d to %d", stopped, j.Steps())
			}
			if j.Onset(0) == 0 {
				t.Error("the fault has no onset")
			}
		})
	}
}

// An outage costs its time, and the job goes on.
func TestOutageEnds(t *testing.T) {
	c := jobsim.Config{Data: 4, Seed: 6, Cluster: jobsim.Cluster{RanksPerNode: 2},
		Faults: []jobsim.Fault{{Kind: jobsim.PairCut, Rank: 1, Peer: 2, At: 6 * time.Second, Until: 9 * time.Second}}}
	j, err := jobsim.New(c)
	if err != nil {
		t.Fatal(err)
	}
	j.Advance(7 * time.Second)
	held := j.Steps()
	j.Advance(time.Second)
	if j.Steps() != held {
		t.Errorf("step %d during the outage, after %d", j.Steps(), held)
	}
	j.Advance(7 * time.Second)
	if j.Steps() < held+10 {
		t.Errorf("step %d six seconds after the outage, %d in it", j.Steps(), held)
	}
	outages := uint64(0)
	for _, k := range j.Evidence().Conns {
		outages += k.Outages
	}
	if outages == 0 {
		t.Error("no connection tells of the outage")
	}
}
