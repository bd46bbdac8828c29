package diagnosis_test

import (
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/lockstep-ccl/lockstep/diagnosis"
	"github.com/lockstep-ccl/lockstep/record"
)

// startingJob plays a job of four ranks that have no communicator, a pass a second.
type startingJob struct {
	engine *diagnosis.Engine
	ev     diagnosis.Evidence
}

const startPatience = 10 // seconds

func newStartingJob() *startingJob {
	j := &startingJob{engine: diagnosis.New(diagnosis.Config{StartPatience: startPatience * time.Second})}
	j.ev = diagnosis.Evidence{Job: "job", Now: 1000e9, Nodes: []diagnosis.Node{{Name: "node"}}}
	for i := range 4 {
		j.ev.Ranks = append(j.ev.Ranks, diagnosis.Rank{PID: int32(100 + i), Proc: diagnosis.ProcRunning, ProcAt: j.ev.Now, Starting: true, WaitsIn: diagnosis.WaitInNetwork})
	}
	return j
}

// pass plays so many seconds; busy ranks use CPU in each.
func (j *startingJob) pass(seconds int, busy ...int) (v []diagnosis.Verdict) {
	for range seconds {
		j.ev.Now += 1e9
		j.ev.Nodes[0].LastSeen = j.ev.Now
		for i := range j.ev.Ranks {
			j.ev.Ranks[i].CPU = 0
		}
		for _, i := range busy {
			j.ev.Ranks[i].CPU = 0.9
		}
		v = j.engine.Diagnose(&j.ev)
	}
	return v
}

func (j *startingJob) set(rank int, change func(*diagnosis.Rank)) { change(&j.ev.Ranks[rank]) }

func (j *startingJob) stop(rank int) {
	j.set(rank, func(r *diagnosis.Rank) { r.Proc, r.ProcAt = diagnosis.ProcStopped, j.ev.Now })
}

func (j *startingJob) wants(t *testing.T, v []diagnosis.Verdict, level diagnosis.Level, rank int32, reason, why string) {
	t.Helper()
	if level == 0 {
		if len(v) > 0 {
			t.Fatalf("verdicts: %+v, want none", v)
		}
		return
	}
	if len(v) != 1 || v[0].Class != diagnosis.NoncommunicationHang || v[0].Level != level || len(v[0].Culprits) != 1 || v[0].Culprits[0].Rank != rank ||
		v[0].Culprits[0].Reason != reason || !strings.Contains(strings.Join(v[0].Why, "; "), why) {
		t.Fatalf("verdicts: %+v, want %v of rank %d, %s, for %q", v, level, rank, reason, why)
	}
}

// TestStartStopped: a stopped rank needs no comparison, whatever the others do.
func TestStartStopped(t *testing.T) {
	j := newStartingJob()
	j.stop(2)
	j.wants(t, j.pass(startPatience-1, 0, 1), 0, 0, "", "")
	j.wants(t, j.pass(3, 0, 1), diagnosis.Suspected, 2, "process_stopped", "state T")
	j.wants(t, j.pass(startPatience, 0, 1), diagnosis.Confirmed, 2, "process_stopped", "1 waits for somebody, 2 are at work")
	j.set(2, func(r *diagnosis.Rank) { r.Proc, r.ProcAt = diagnosis.ProcRunning, j.ev.Now })
	j.wants(t, j.pass(2), 0, 0, "", "") // it goes on: that is over
}

func TestStartInDiskSleep(t *testing.T) {
	j := newStartingJob()
	j.set(1, func(r *diagnosis.Rank) { r.IO = true })
	j.pass(2)
	j.set(1, func(r *diagnosis.Rank) { r.IO, r.Proc, r.ProcAt = false, diagnosis.ProcDisk, j.ev.Now })
	j.pass(2*startPatience + 2)
	j.wants(t, j.pass(1), diagnosis.Confirmed, 1, "disk_sleep", "state D")
}

// TestStartSleeps: a rank that sleeps while all others wait for somebody over the network, or
// ask the kernel for news of them, as NCCL's bootstrap does.
func TestStartSleeps(t *testing.T) {
	j := newStartingJob()
	j.set(3, func(r *diagnosis.Rank) { r.WaitsIn = diagnosis.WaitInSleep })
	j.set(0, func(r *diagnosis.Rank) { r.WaitsIn = diagnosis.WaitInPolling })
	j.wants(t, j.pass(startPatience, 0), 0, 0, "", "")
	j.wants(t, j.pass(2, 0), diagnosis.Suspected, 3, "idle", "waits in a sleep of its own")
	j.wants(t, j.pass(3*startPatience, 0), diagnosis.Suspected, 3, "idle", "3 wait for somebody")
	j.wants(t, j.pass(2*startPatience, 0), diagnosis.Confirmed, 3, "idle", "waits in a sleep of its own")
	j.wants(t, j.pass(2, 0, 3), 0, 0, "", "")
}

func TestStartEnded(t *testing.T) {
	for _, x := range []struct {
		exit   diagnosis.Exit
		reason string
	}{
		{diagnosis.Exit{}, "process_exited"},
		{diagnosis.Exit{By: diagnosis.ExitKernel}, "process_exited"},
		{diagnosis.Exit{By: diagnosis.ExitKernel, Signal: 9}, "process_gone"},
	} {
		j := newStartingJob()
		j.set(1, func(r *diagnosis.Rank) { r.Proc, r.ProcAt, r.Exit = diagnosis.ProcExited, j.ev.Now, x.exit })
		j.wants(t, j.pass(startPatience+2), diagnosis.Suspected, 1, x.reason, "before it made a communicator")
	}
}

// TestStartUnseen: all that are seen wait, and one was never seen.
func TestStartUnseen(t *testing.T) {
	j := newStartingJob()
	j.set(2, func(r *diagnosis.Rank) { *r = diagnosis.Rank{Node: -1} })
	j.wants(t, j.pass(2*startPatience-1), 0, 0, "", "")
	j.wants(t, j.pass(3*startPatience), diagnosis.Suspected, 2, "not_joined", "never been seen")
}

// TestStartInBootstrap: all wait, some of them in NCCL's bootstrap.
func TestStartInBootstrap(t *testing.T) {
	j := newStartingJob()
	for i := range 3 {
		j.set(i, func(r *diagnosis.Rank) { r.WaitsIn = diagnosis.WaitInPolling })
	}
	j.wants(t, j.pass(5*startPatience-1, 0, 1, 2), 0, 0, "", "")
	v := j.pass(3, 0, 1, 2)
	j.wants(t, v, diagnosis.Suspected, 3, "not_joined", "rank 3 (pid 103 on node) waits in the network")
	if v[0].Undetermined == "" {
		t.Error("it is said to be sure who is to blame")
	}
	j.wants(t, j.pass(5*startPatience+1, 0, 1, 2), diagnosis.Confirmed, 3, "not_joined", "4 wait for somebody")
}

// TestHealthyStarts: nobody is suspected, however long it takes.
func TestHealthyStarts(t *testing.T) {
	sleep := func(j *startingJob, ranks ...int) {
		for _, i := range ranks {
			j.set(i, func(r *diagnosis.Rank) { r.WaitsIn = diagnosis.WaitInSleep })
		}
	}
	for name, x := range map[string]struct {
		begin func(*startingJob)
		busy  []int
	}{
		"all import":                          {func(*startingJob) {}, []int{0, 1, 2, 3}},
		"all wait":                            {func(*startingJob) {}, nil},
		"one prepares data, others wait":      {func(*startingJob) {}, []int{0}},
		"others sleep until there is a file":  {func(j *startingJob) { sleep(j, 1, 2, 3) }, []int{0}},
		"one of them does, and one works":     {func(j *startingJob) { sleep(j, 3) }, []int{0}},
		"all sleep: no communicators in here": {func(j *startingJob) { sleep(j, 0, 1, 2, 3) }, nil},
		"most sleep":                          {func(j *startingJob) { sleep(j, 0, 1, 2) }, nil},
		"all are stopped": {func(j *startingJob) {
			for i := range 4 {
				j.stop(i)
			}
		}, nil},
		"nobody can tell": {func(j *startingJob) {
			sleep(j, 1)
			j.set(2, func(r *diagnosis.Rank) { r.WaitsIn = diagnosis.WaitInUnknown })
		}, nil},
		"it reads": {func(j *startingJob) {
			sleep(j, 1)
			j.set(1, func(r *diagnosis.Rank) { r.IO = true })
		}, nil},
		"it is in state D all the time, and reads": {func(j *startingJob) {
			j.set(1, func(r *diagnosis.Rank) { r.IO, r.Proc, r.ProcAt = true, diagnosis.ProcDisk, j.ev.Now })
		}, nil},
		"some are done, one works on": {func(j *startingJob) {
			for i := range 3 {
				j.set(i, func(r *diagnosis.Rank) { r.Proc, r.ProcAt = diagnosis.ProcExited, j.ev.Now })
			}
		}, []int{3}},
		"all are done": {func(j *startingJob) {
			for i := range 4 {
				j.set(i, func(r *diagnosis.Rank) { r.Proc, r.ProcAt = diagnosis.ProcExited, j.ev.Now })
			}
		}, nil},
		"its launcher has ended them": {func(j *startingJob) {
			j.set(1, func(r *diagnosis.Rank) {
				r.Proc, r.ProcAt, r.Exit = diagnosis.ProcExited, j.ev.Now, diagnosis.Exit{By: diagnosis.ExitKernel, Signal: 15, Asked: true}
			})
		}, nil},
	} {
		t.Run(name, func(t *testing.T) {
			j := newStartingJob()
			x.begin(j)
			for range 12 {
				j.wants(t, j.pass(startPatience, x.busy...), 0, 0, "", "")
			}
		})
	}
}

// TestStallsAtTheStart: a rank that sends nothing in its communicator's first operation may still be connecting. It is
// given longer than one that has sent before, also when both stall at once.
func TestStallsAtTheStart(t *testing.T) {
	for _, w := range []struct {
		age  float64
		old  bool // there is a communicator that has finished operations, and stalls, too
		want string
	}{
		{3, false, "suspected communication_hang source 0 stalled"},
		{11, false, "confirmed communication_hang source 0 stalled"},
		{3, true, "confirmed communication_hang source 4 stalled"},
		{11, true, "confirmed communication_hang source 0,source 4 stalled"},
	} {
		j := newJob(8)
		j.ev.Comms = make([]diagnosis.Comm, 0, 2)
		stall := func(c *diagnosis.Comm) {
			j.allBut(c, w.age)
			for i := 1; i < len(c.Members); i++ { // two wait for the first, so that no connection is blamed for it
				j.conn(c, 0, i).RxWaitingSince = ago(w.age)
			}
		}
		young := j.comm("pp", 0, 1, 2)
		for i := range young.Members {
			m := &young.Members[i]
			m.Enqueued, m.Started, m.Finished, m.FinishedAt, m.Ops, m.OwnNs = 0, 0, 0, 0, 0, 0
		}
		stall(young)
		if w.old {
			stall(j.comm("dp", 4, 5, 6))
		}
		var got []string
		for _, v := range j.verdicts() {
			got = append(got, describe(&v))
		}
		if !slices.Equal(got, []string{w.want}) {
			t.Errorf("after %v s, another beside it %v: %q, want %q", w.age, w.old, got, w.want)
		}
	}
}

// TestCoordinatorWithoutCommunicators: rank 3 never makes a communicator: it is a parameter server over RPC, whose first thread waits for
// its others (a lock). The others train for ten minutes, and then compute for more than a minute without collectives on
// their GPUs.
func TestCoordinatorWithoutCommunicators(t *testing.T) {
	e := diagnosis.New(diagnosis.Config{})
	ev := diagnosis.Evidence{Job: "job", Now: 1000e9, Nodes: []diagnosis.Node{{Name: "a"}}}
	for i := range 4 {
		ev.Ranks = append(ev.Ranks, diagnosis.Rank{PID: int32(100 + i), Proc: diagnosis.ProcRunning, ProcAt: ev.Now, CPU: 0.05})
	}
	ev.Ranks[3].Starting, ev.Ranks[3].WaitsIn, ev.Ranks[3].CPU = true, diagnosis.WaitInLock, 0.01
	c := diagnosis.Comm{ID: 7, Name: "world", Members: make([]diagnosis.Member, 3)}
	for i := range c.Members {
		c.Members[i] = diagnosis.Member{World: int32(i), State: record.CommJoined, Coll: record.AllReduce, Peer: -1, FaultPeer: -1}
	}
	ev.Comms = []diagnosis.Comm{c}
	for s := 0; s < 880; s++ {
		ev.Now += 1e9
		ev.Nodes[0].LastSeen = ev.Now
		if s < 600 {
			for i := range ev.Comms[0].Members {
				m := &ev.Comms[0].Members[i]
				m.Enqueued, m.Started, m.Finished, m.Ops = m.Enqueued+1, m.Started+1, m.Finished+1, m.Ops+1
				m.EnqueuedAt, m.StartedAt, m.FinishedAt = ev.Now-2e8, ev.Now-2e8, ev.Now-1e8
				m.OwnNs += 8e8
			}
		}
		for _, v := range e.Diagnose(&ev) {
			if v.Level == diagnosis.Confirmed {
				t.Fatalf("after %d s: %v %v %v", s, v.Class, v.Culprits, v.Why)
			}
		}
	}
}
