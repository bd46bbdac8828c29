package diagnosis_test

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/lockstep-ccl/lockstep/diagnosis"
	"github.com/lockstep-ccl/lockstep/record"
)

const now = int64(1e18)

// job is evidence written by hand. Ages are in seconds before now.
type job struct {
	ev     diagnosis.Evidence
	engine *diagnosis.Engine
}

func ago(seconds float64) int64 { return now - int64(seconds*1e9) }

// newJob has ranks 0 … n-1, four a node, all idle and alive; every member of a
// communicator has finished a hundred operations, the last of them 10 s ago.
func newJob(n int) *job {
	j := &job{engine: diagnosis.New(diagnosis.Config{})}
	j.ev.Job, j.ev.Now = "job", now
	for r := range n {
		if r%4 == 0 {
			j.ev.Nodes = append(j.ev.Nodes, diagnosis.Node{Name: fmt.Sprintf("node%d", r/4), LastSeen: now})
		}
		j.ev.Ranks = append(j.ev.Ranks, diagnosis.Rank{Node: int32(r / 4), PID: int32(100 + r), Proc: diagnosis.ProcRunning})
	}
	return j
}

func (j *job) comm(name string, ranks ...int) *diagnosis.Comm {
	c := diagnosis.Comm{ID: uint64(len(j.ev.Comms) + 1), Name: name}
	for _, r := range ranks {
		c.Members = append(c.Members, diagnosis.Member{
			World: int32(r), State: record.CommJoined, Coll: record.AllReduce, Peer: -1, Enqueued: 100, Started: 100, Finished: 100,
			EnqueuedAt: ago(10.002), StartedAt: ago(10.002), FinishedAt: ago(10.001), Ops: 100, OwnNs: 1e9,
		})
	}
	j.ev.Comms = append(j.ev.Comms, c)
	return &j.ev.Comms[len(j.ev.Comms)-1]
}

// enter puts a member into an operation, straight from the one before.
func (j *job) enter(c *diagnosis.Comm, member int, k record.CollKind, age float64) *diagnosis.Member {
	m := &c.Members[member]
	m.Coll, m.FinishedAt = k, max(m.FinishedAt, ago(age+0.001))
	m.Enqueued, m.Started = m.Enqueued+1, m.Started+1
	m.EnqueuedAt, m.StartedAt = ago(age), ago(age)
	return m
}

// pair is a member's Send or Recv with a peer.
func (j *job) pair(c *diagnosis.Comm, member int, k record.CollKind, peer int, age float64) {
	j.enter(c, member, k, age).Peer = int32(peer)
}

func (j *job) conn(c *diagnosis.Comm, src, dst int) *diagnosis.Conn {
	at := slices.IndexFunc(j.ev.Comms, func(x diagnosis.Comm) bool { return x.ID == c.ID })
	j.ev.Conns = append(j.ev.Conns, diagnosis.Conn{Comm: int32(at), Src: int32(src), Dst: int32(dst), Transport: record.TransportTCP, LastPost: ago(10), LastCompletion: ago(10)})
	return &j.ev.Conns[len(j.ev.Conns)-1]
}

// idleSince moves a member's last operation back.
func idleSince(c *diagnosis.Comm, member int, age float64) {
	m := &c.Members[member]
	m.EnqueuedAt, m.StartedAt, m.FinishedAt = ago(age), ago(age), ago(age)
}

// verdicts runs enough passes for a finding to settle.
func (j *job) verdicts() []diagnosis.Verdict {
	j.engine.Diagnose(&j.ev)
	j.pass(300 * time.Millisecond)
	return j.engine.Diagnose(&j.ev)
}

// pass lets time go on, with everything that is still going on a little older.
func (j *job) pass(d time.Duration) []diagnosis.Verdict {
	j.ev.Now += int64(d)
	for i := range j.ev.Nodes {
		if n := &j.ev.Nodes[i]; !n.Lost {
			n.LastSeen += int64(d)
		}
	}
	return j.engine.Diagnose(&j.ev)
}

// everyone enters c but the given members.
func (j *job) allBut(c *diagnosis.Comm, age float64, missing ...int) {
	for i := range c.Members {
		if !slices.Contains(missing, i) {
			j.enter(c, i, record.AllReduce, age)
		}
	}
}

// ring of connections whose receivers wait, nothing outstanding.
func (j *job) ring(c *diagnosis.Comm, age float64) []*diagnosis.Conn {
	n := len(c.Members)
	first := len(j.ev.Conns)
	for i := range n {
		j.conn(c, i, (i+1)%n).RxWaitingSince = ago(age)
	}
	var ring []*diagnosis.Conn
	for i := range n {
		ring = append(ring, &j.ev.Conns[first+i])
	}
	return ring
}

func TestRules(t *testing.T) {
	for _, c := range []struct {
		name string
		job  func(j *job) // of 8 ranks
		want string       // "level class culprits reason", "" for nothing; several separated by "; "
		why  string       // a part of the first verdict's sentences
	}{
		{"quiet", func(j *job) { j.comm("dp", 0, 1, 2, 3) }, "", ""},
		{"everyone is in for a moment", func(j *job) { j.allBut(j.comm("dp", 0, 1, 2, 3), 0.3, 2) }, "", ""},

		{"idle rank", func(j *job) { j.allBut(j.comm("dp", 0, 1, 2, 3), 3, 2) },
			"confirmed noncommunication_hang 2 idle", "rank 2 has not entered AllReduce #101 on dp for 3.3 s; 3 members wait there, 3 ranks are held up in all"},
		{"idle rank, suspected first", func(j *job) { j.allBut(j.comm("dp", 0, 1, 2, 3), 1.1, 2) }, "suspected noncommunication_hang 2 idle", "uses 0.00 cores and does no I/O"},
		{"idle rank that was active a moment ago", func(j *job) {
			c := j.comm("dp", 0, 1, 2, 3)
			j.allBut(c, 3, 2)
			c.Members[2].FinishedAt = ago(0.2)
		}, "", ""},
		{"all ranks of one node are idle, and no others", func(j *job) {
			j.allBut(j.comm("world", 0, 1, 2, 3, 4, 5, 6, 7), 3, 4, 5, 6, 7)
			j.comm("dp", 0, 1)
			j.ev.Ranks = append(j.ev.Ranks, diagnosis.Rank{Node: 0, Proc: diagnosis.ProcRunning})
			j.enter(j.comm("x", 8, 0), 0, record.AllReduce, 0.1)
		}, "confirmed noncommunication_hang node1 idle", ""},
		{"a rank that is short of CPU", func(j *job) {
			j.allBut(j.comm("dp", 0, 1, 2, 3), 5, 2)
			j.ev.Ranks[2].Starved, j.ev.Ranks[2].Throttled, j.ev.Ranks[2].CPU = 0.1, 0.9, 0.08
		}, "suspected noncommunication_hang 2 cpu_starved", "for 90 % its cgroup's quota holds it back"},
		{"two idle ranks are one fault", func(j *job) { j.allBut(j.comm("dp", 0, 1, 2, 3), 3, 1, 2) }, "confirmed noncommunication_hang 1,2 idle", ""},
		{"young communicator", func(j *job) {
			c := j.comm("dp", 0, 1, 2, 3)
			for i := range c.Members {
				c.Members[i].Enqueued, c.Members[i].Started, c.Members[i].Finished = 2, 2, 2
			}
			j.allBut(c, 9, 2)
		}, "", ""},

		{"stopped rank", func(j *job) {
			j.allBut(j.comm("dp", 0, 1, 2, 3), 3, 2)
			j.ev.Ranks[2].Proc, j.ev.Ranks[2].ProcAt = diagnosis.ProcStopped, ago(2.5)
		}, "confirmed noncommunication_hang 2 process_stopped", "is stopped (state T)"},
		{"stopped inside an operation, its neighbours' connections stall", func(j *job) {
			c := j.comm("dp", 0, 1, 2, 3)
			j.allBut(c, 3)
			ring := j.ring(c, 3)
			ring[1].Outstanding = 4096 // into rank 2, whose waiting word is stale
			j.ev.Ranks[2].Proc, j.ev.Ranks[2].ProcAt = diagnosis.ProcStopped, ago(2.8)
		}, "confirmed noncommunication_hang 2 process_stopped", "has entered AllReduce #101 on dp and not come out"},
		{"stopped rank that nobody waits for", func(j *job) {
			j.comm("dp", 0, 1, 2, 3)
			j.ev.Ranks[2].Proc, j.ev.Ranks[2].ProcAt = diagnosis.ProcStopped, ago(5)
		}, "", ""},
		{"uninterruptible sleep", func(j *job) {
			j.allBut(j.comm("dp", 0, 1, 2, 3), 3, 2)
			j.ev.Ranks[2].Proc, j.ev.Ranks[2].ProcAt = diagnosis.ProcDisk, ago(2.9)
		}, "suspected noncommunication_hang 2 disk_sleep", "is confirmed as a hang after 10.0 s"},
		{"uninterruptible sleep that does not end", func(j *job) {
			c := j.comm("dp", 0, 1, 2, 3)
			j.allBut(c, 11, 2)
			idleSince(c, 2, 12)
			j.ev.Ranks[2].Proc, j.ev.Ranks[2].ProcAt = diagnosis.ProcDisk, ago(11)
		}, "confirmed noncommunication_hang 2 disk_sleep", ""},
		{"uninterruptible sleep for the driver of a GPU", func(j *job) {
			j.allBut(j.comm("dp", 0, 1, 2, 3), 3, 2)
			j.ev.Ranks[2].Proc, j.ev.Ranks[2].ProcAt = diagnosis.ProcDisk, ago(2.9)
			j.ev.Ranks[2].OffCPU = diagnosis.OffCPU{Disk: 1, For: diagnosis.WaitForGPUDriver}
		}, "confirmed noncommunication_hang 2 disk_sleep", ""},
		{"uninterruptible sleep in a checkpoint", func(j *job) {
			j.allBut(j.comm("dp", 0, 1, 2, 3), 9, 2)
			j.ev.Ranks[2].Proc, j.ev.Ranks[2].ProcAt = diagnosis.ProcDisk, ago(8)
			j.ev.Ranks[2].Mark, j.ev.Ranks[2].MarkAt = record.MarkCheckpoint, ago(9)
		}, "suspected noncommunication_hang 2 checkpoint", ""},
		{"uninterruptible sleep of a rank that writes", func(j *job) {
			j.allBut(j.comm("dp", 0, 1, 2, 3), 9, 2)
			j.ev.Ranks[2].Proc, j.ev.Ranks[2].ProcAt, j.ev.Ranks[2].IO = diagnosis.ProcDisk, ago(8), true
		}, "suspected noncommunication_hang 2 io", "is in uninterruptible sleep (state D) since"},
		{"uninterruptible sleep in the driver of a GPU that does not answer", func(j *job) {
			j.allBut(j.comm("dp", 0, 1, 2, 3), 9, 2)
			j.ev.Ranks[2].Proc, j.ev.Ranks[2].ProcAt, j.ev.Ranks[2].IO = diagnosis.ProcDisk, ago(8), true
			j.ev.Ranks[2].GPU = diagnosis.GPU{Seen: true, UnresponsiveAt: ago(8)}
		}, "confirmed noncommunication_hang 2 disk_sleep", ""},
		{"a thread that writes sleeps, the rank itself waits for another", func(j *job) {
			j.allBut(j.comm("dp", 0, 1, 2, 3), 9, 2)
			j.ev.Ranks[1].Proc, j.ev.Ranks[1].ProcAt, j.ev.Ranks[1].IO = diagnosis.ProcDisk, ago(8), true
		}, "confirmed noncommunication_hang 2 idle", ""},
		{"Xid", func(j *job) {
			j.allBut(j.comm("dp", 0, 1, 2, 3), 3, 2)
			j.ev.Ranks[2].Xid = 79
		}, "confirmed noncommunication_hang 2 xid_79", ""},
		{"Xid inside an operation that all have entered, connections stall for it", func(j *job) {
			c := j.comm("dp", 0, 1, 2, 3)
			j.allBut(c, 3)
			j.ring(c, 3)[1].Outstanding = 4096
			j.ev.Ranks[2].Xid, j.ev.Ranks[2].GPU = 79, diagnosis.GPU{Seen: true, XidAt: ago(2.9), LostAt: ago(2.9)}
			j.ev.Ranks[1].Xid, j.ev.Ranks[1].GPU = 74, diagnosis.GPU{Seen: true, XidAt: ago(2.95)}
		}, "confirmed noncommunication_hang 2 xid_79", "fallen off the bus"},
		{"Xid that its rank has outlived is no reason inside an operation", func(j *job) {
			c := j.comm("dp", 0, 1, 2, 3)
			j.allBut(c, 3)
			j.ring(c, 3)[1].Outstanding = 4096
			j.ev.Ranks[2].Xid, j.ev.Ranks[2].GPU = 79, diagnosis.GPU{Seen: true, XidAt: ago(60)}
		}, "confirmed communication_hang 1>2 stalled", ""},
		{"old Xid of a rank that waits itself", func(j *job) {
			j.allBut(j.comm("dp", 0, 1, 2, 3), 3, 2)
			j.ev.Ranks[1].Xid = 79
		}, "confirmed noncommunication_hang 2 idle", ""},

		{"computing rank has time", func(j *job) {
			j.allBut(j.comm("dp", 0, 1, 2, 3), 9, 2)
			j.ev.Ranks[2].CPU = 0.9
		}, "suspected noncommunication_hang 2 computing", "is confirmed as a hang after 30.0 s"},
		{"computing rank, long after", func(j *job) {
			c := j.comm("dp", 0, 1, 2, 3)
			j.allBut(c, 31, 2)
			idleSince(c, 2, 32)
			j.ev.Ranks[2].CPU = 0.9
		}, "confirmed noncommunication_hang 2 computing", ""},
		{"computing rank of a job that pauses for long", func(j *job) {
			c := j.comm("dp", 0, 1, 2, 3)
			j.allBut(c, 31, 2)
			idleSince(c, 2, 32)
			c.Members[0].MaxOwnNs = 20e9
			j.ev.Ranks[2].CPU = 0.9
		}, "suspected noncommunication_hang 2 computing", ""},
		{"idle for no longer than those who wait were", func(j *job) {
			c := j.comm("dp", 0, 1, 2, 3)
			j.allBut(c, 4, 2)
			for i := range c.Members {
				c.Members[i].FinishedAt = ago(10)
			}
		}, "suspected noncommunication_hang 2 idle", ""},
		{"computing for no longer than those who wait did", func(j *job) {
			c := j.comm("dp", 0, 1, 2, 3)
			j.allBut(c, 35, 2)
			idleSince(c, 2, 95)
			for i := range c.Members {
				c.Members[i].FinishedAt = ago(95)
				j.ev.Ranks[i].CPU = 0.9
			}
		}, "suspected noncommunication_hang 2 computing", ""},
		{"one rank writes", func(j *job) {
			c := j.comm("dp", 0, 1, 2, 3)
			j.allBut(c, 100, 2)
			idleSince(c, 2, 101)
			j.ev.Ranks[2].IO = true
		}, "suspected noncommunication_hang 2 io", ""},
		{"one rank checkpoints", func(j *job) {
			c := j.comm("dp", 0, 1, 2, 3)
			j.allBut(c, 100, 2)
			idleSince(c, 2, 101)
			j.ev.Ranks[2].Mark, j.ev.Ranks[2].MarkAt = record.MarkCheckpoint, ago(100)
		}, "suspected noncommunication_hang 2 checkpoint", "is in its own checkpoint"},
		{"idle while another checkpoints: it may wait for that", func(j *job) {
			j.allBut(j.comm("dp", 0, 1, 2, 3), 9, 2)
			j.ev.Ranks[3].Mark, j.ev.Ranks[3].MarkAt = record.MarkCheckpoint, ago(9)
		}, "suspected noncommunication_hang 2 idle", ""},
		{"most of the job pauses", func(j *job) { j.allBut(j.comm("dp", 0, 1, 2, 3, 4, 5, 6, 7), 9, 0, 1, 2, 3, 4) }, "", ""},
		{"nobody can see the process", func(j *job) {
			j.allBut(j.comm("dp", 0, 1, 2, 3), 3, 2)
			j.ev.Ranks[2].Proc = diagnosis.ProcUnknown
		}, "suspected noncommunication_hang 2 unknown", ""},

		{"blame follows through communicators", func(j *job) {
			j.allBut(j.comm("dp", 0, 1, 2, 3), 3, 3)
			j.allBut(j.comm("tp", 3, 4), 3, 1)
			c := j.comm("pp", 4, 5)
			j.pair(c, 0, record.Recv, 1, 3)
		}, "confirmed noncommunication_hang 5 idle", "has not come to the other end of rank 4's Recv on pp"},
		{"a chain through a rank that only just began to wait", func(j *job) {
			j.allBut(j.comm("dp", 0, 1, 2, 3), 3, 3)
			j.allBut(j.comm("tp", 3, 4), 0.1, 1)
		}, "confirmed noncommunication_hang 4 idle", ""},
		{"deadlock by order", func(j *job) {
			j.allBut(j.comm("a", 0, 1), 3, 1)
			j.allBut(j.comm("b", 0, 1), 3, 0)
			j.allBut(j.comm("c", 2, 1), 3, 1)
		}, "confirmed noncommunication_hang 0,1 deadlock", "wait for each other"},
		{"two receives that wait for each other", func(j *job) {
			c := j.comm("pp", 0, 1)
			j.pair(c, 0, record.Recv, 1, 3)
			j.pair(c, 1, record.Recv, 0, 3)
		}, "confirmed noncommunication_hang 0,1 deadlock", ""},
		{"broadcast waits for its root only", func(j *job) {
			c := j.comm("dp", 0, 1, 2, 3)
			for _, i := range []int{2, 3} {
				j.enter(c, i, record.Broadcast, 11).Peer = 0
			}
			idleSince(c, 0, 12)
		}, "confirmed noncommunication_hang 0 idle", ""},
		{"idle rank 0: it may do what one rank does for all", func(j *job) {
			c := j.comm("dp", 0, 1, 2, 3)
			j.allBut(c, 9, 0)
			idleSince(c, 0, 9.5)
		}, "suspected noncommunication_hang 0 idle", "is confirmed as a hang after 10.0 s"},
		{"ranks of two nodes are idle: the program sent them there", func(j *job) {
			c := j.comm("dp", 1, 2, 3, 4, 5, 6)
			j.allBut(c, 9, 0, 3)
			idleSince(c, 0, 9.5)
			idleSince(c, 3, 9.5)
		}, "suspected noncommunication_hang 1,4 idle", "is confirmed as a hang after 10.0 s"},
		{"collective on a communicator of sends", func(j *job) {
			c := j.comm("pp", 0, 1, 2, 3)
			c.Members[0].Enqueued, c.Members[0].Started, c.Members[0].Finished = 140, 140, 140
			c.Members[2].Coll = record.Send
			for _, i := range []int{0, 1, 3} {
				j.enter(c, i, record.Barrier, 3)
			}
		}, "confirmed noncommunication_hang 2 idle", ""},
		{"a rank of a former attempt is nobody", func(j *job) {
			j.allBut(j.comm("dp", 0, 1, 2, 3), 3, 2)
			for i := range j.ev.Ranks {
				j.ev.Ranks[i].Attempt = 1
			}
			j.ev.Ranks[2].Attempt, j.ev.Ranks[2].Proc = 0, diagnosis.ProcGone
		}, "", ""},

		{"stalled connection in a ring", func(j *job) {
			c := j.comm("dp", 0, 1, 2, 3)
			j.allBut(c, 3)
			ring := j.ring(c, 3)
			ring[1].Outstanding, ring[1].TxBlockedSince = 4096, ago(2.9)
		}, "confirmed communication_hang 1>2 stalled", "4096 bytes posted and not taken, its receiver has waited for 3.3 s"},
		{"stalled connection holds up others", func(j *job) {
			c := j.comm("dp", 0, 1, 2, 3)
			j.allBut(c, 3)
			j.ring(c, 3)[1].Outstanding = 4096
			j.allBut(j.comm("tp", 2, 5), 2.5, 0)
		}, "confirmed communication_hang 1>2 stalled", "5 ranks are held up"},
		{"a credit that never comes", func(j *job) {
			c := j.comm("dp", 0, 1)
			j.allBut(c, 3)
			ring := j.ring(c, 3)
			ring[0].TxBlockedSince = ago(3)
			ring[1].RxWaitingSince = 0
		}, "confirmed communication_hang 0>1 stalled", "the sender has had no credit"},
		{"bytes that come, slowly", func(j *job) {
			c := j.comm("dp", 0, 1, 2, 3)
			j.allBut(c, 20)
			ring := j.ring(c, 0.1)
			ring[1].Outstanding, ring[1].LastCompletion = 4096, ago(0.1)
		}, "", ""},
		{"all that one rank sends is stalled", func(j *job) {
			c := j.comm("dp", 0, 1, 2, 3)
			j.allBut(c, 3)
			for _, d := range []int{1, 2, 3} {
				k := j.conn(c, 0, d)
				k.Outstanding, k.RxWaitingSince = 4096, ago(3)
			}
		}, "confirmed communication_hang source 0 stalled", ""},
		{"the sender has left the operation", func(j *job) {
			c := j.comm("dp", 0, 1)
			j.allBut(c, 3)
			c.Members[0].Finished, c.Members[0].FinishedAt = 101, ago(3)
			j.conn(c, 0, 1).RxWaitingSince = ago(3)
			j.allBut(j.comm("world", 0, 1), 3, 1)
		}, "confirmed communication_hang 0>1 stalled", ""},
		{"a member inside sends nothing", func(j *job) {
			c := j.comm("dp", 0, 1, 2)
			j.allBut(c, 3)
			j.conn(c, 0, 1).RxWaitingSince = ago(3)
			j.conn(c, 1, 2).RxWaitingSince = ago(3)
		}, "confirmed communication_hang 0>1 stalled", "has sent nothing"},
		{"send and receive are both in", func(j *job) {
			c := j.comm("pp", 0, 1)
			j.pair(c, 0, record.Send, 1, 3)
			j.pair(c, 1, record.Recv, 0, 3)
		}, "confirmed communication_hang 0>1 stalled", ""},
		{"what was sent does not come, and the sender has gone on", func(j *job) {
			c := j.comm("pp", 0, 1)
			j.pair(c, 1, record.Recv, 0, 3)
			j.pair(c, 0, record.Recv, 1, 3)
			k := j.conn(c, 0, 1)
			k.Outstanding, k.RxWaitingSince = 4096, ago(3)
		}, "confirmed communication_hang 0>1 stalled", ""},
		{"what was sent before is not what is waited for", func(j *job) {
			c := j.comm("pp", 0, 1, 2)
			j.pair(c, 1, record.Recv, 0, 11)
			j.pair(c, 2, record.Recv, 1, 11)
			for i := range c.Members {
				idleSince(c, i, 12)
			}
			k := j.conn(c, 0, 1)
			k.Outstanding, k.RxWaitingSince, k.LastPost = 64, ago(11), ago(13)
		}, "confirmed noncommunication_hang 0 idle", ""},
		{"a group tells its peers by connections only", func(j *job) {
			c := j.comm("ep", 0, 1, 2)
			j.enter(c, 0, record.Group, 3)
			j.enter(c, 1, record.Group, 3)
			j.conn(c, 2, 0).RxWaitingSince = ago(3)
			j.conn(c, 0, 1).RxWaitingSince = ago(3)
		}, "confirmed noncommunication_hang 2 idle", ""},
		{"a group, and no connection tells anything: GPU ranks", func(j *job) {
			c := j.comm("pp", 0, 1, 2, 3)
			for _, i := range []int{0, 1, 2} {
				j.enter(c, i, record.Group, 3)
			}
		}, "confirmed noncommunication_hang 3 idle", "rank 3 has not entered Group"},
		{"a group that waits for who waits elsewhere, without connections", func(j *job) {
			j.ev.Comms = make([]diagnosis.Comm, 0, 2)
			c := j.comm("pp", 0, 1, 2, 3)
			for _, i := range []int{0, 1, 2} {
				j.enter(c, i, record.Group, 3)
			}
			j.allBut(j.comm("dp", 3, 4), 3, 1)
		}, "confirmed noncommunication_hang 4 idle", ""},
		{"a group with a dead rank in it, without connections", func(j *job) {
			c := j.comm("pp", 0, 1, 2, 3)
			for i := range c.Members {
				j.enter(c, i, record.Group, 3)
			}
			j.ev.Ranks[2].Proc, j.ev.Ranks[2].ProcAt = diagnosis.ProcStopped, ago(2.9)
		}, "confirmed noncommunication_hang 2 process_stopped", ""},
		{"all are in groups, without connections", func(j *job) {
			c := j.comm("pp", 0, 1)
			j.enter(c, 0, record.Group, 9)
			j.enter(c, 1, record.Group, 9)
		}, "suspected communication_hang 0,1 stalled", "no connection of pp reports"},
		{"queued behind, without connections", func(j *job) {
			c := j.comm("pp", 0, 1, 2)
			j.pair(c, 0, record.Send, 1, 3)
			c.Members[0].Enqueued++
			j.pair(c, 1, record.Recv, 2, 3)
		}, "confirmed noncommunication_hang 2 idle", ""},
		{"queued behind: the word on the last call is not on this one", func(j *job) {
			c := j.comm("pp", 0, 1, 2)
			j.pair(c, 0, record.Send, 1, 3)
			c.Members[0].Enqueued++
			j.conn(c, 2, 0).RxWaitingSince = ago(3)
			j.enter(c, 1, record.Recv, 3).Peer = 2
		}, "confirmed noncommunication_hang 2 idle", ""},
		{"everyone is in and no connection says more", func(j *job) { j.allBut(j.comm("dp", 0, 1), 9) },
			"suspected communication_hang 0,1 stalled", "no connection of dp reports"},

		{"the last has only just come, and no connection says more", func(j *job) {
			c := j.comm("dp", 0, 1)
			j.enter(c, 0, record.AllReduce, 9)
			j.enter(c, 1, record.AllReduce, 0.2)
		}, "", ""},
		{"one calls another operation", func(j *job) {
			c := j.comm("dp", 0, 1, 2, 3)
			j.allBut(c, 3)
			for i := range c.Members {
				c.Members[i].Bytes = 4096
			}
			c.Members[2].Coll, c.Members[2].Peer = record.Broadcast, 0
		}, "confirmed noncommunication_hang 2 mismatch", "#101 on dp is AllReduce of 4096 bytes for rank 0, 1, 3\n#101 on dp is Broadcast of 4096 bytes with root 0 for rank 2"},
		{"one calls with another size, and connections stall for it", func(j *job) {
			c := j.comm("dp", 0, 1, 2, 3)
			j.allBut(c, 3)
			for _, k := range j.ring(c, 3) {
				k.Outstanding, k.LastPost = 100, ago(3)
			}
			c.Members[1].Bytes = 8
		}, "confirmed noncommunication_hang 1 mismatch", "#101 on dp is AllReduce of 8 bytes for rank 1"},
		{"two against two", func(j *job) {
			c := j.comm("dp", 0, 1, 2, 3)
			j.allBut(c, 3)
			c.Members[1].Coll, c.Members[3].Coll = record.AllGather, record.AllGather
		}, "confirmed noncommunication_hang 0,1,2,3 mismatch", ""},
		{"calls that are only queued further", func(j *job) {
			c := j.comm("dp", 0, 1)
			j.allBut(c, 3)
			c.Members[1].Enqueued, c.Members[1].Coll = 103, record.Broadcast
		}, "suspected communication_hang 0,1 stalled", ""},
		{"killed rank", func(j *job) {
			j.comm("dp", 0, 1, 2, 3)
			j.ev.Ranks[2].Proc, j.ev.Ranks[2].ProcAt = diagnosis.ProcGone, ago(0.6)
		}, "confirmed noncommunication_hang 2 process_gone", "never closed its recorder"},
		{"killed just now", func(j *job) {
			j.comm("dp", 0, 1, 2, 3)
			j.ev.Ranks[2].Proc, j.ev.Ranks[2].ProcAt = diagnosis.ProcGone, ago(-0.2)
		}, "", ""},
		{"survivors abort and die at the same moment", func(j *job) {
			c := j.comm("dp", 0, 1, 2, 3)
			for i := range c.Members {
				c.Members[i].State = record.CommAborted
				j.ev.Ranks[i].Proc, j.ev.Ranks[i].ProcAt = diagnosis.ProcGone, ago(1)
			}
			c.Members[2].State = record.CommJoined
		}, "confirmed noncommunication_hang 2 process_gone", ""},
		{"survivors die later", func(j *job) {
			c := j.comm("dp", 0, 1, 2, 3, 4, 5)
			for i, at := range []float64{0, 1.5, 3, 1} {
				if at > 0 {
					j.ev.Ranks[i].Proc, j.ev.Ranks[i].ProcAt = diagnosis.ProcGone, ago(at)
				}
			}
			c.Members[0].State = record.CommAborted
		}, "confirmed noncommunication_hang 2 process_gone", "not to blame"},
		{"the whole job is killed", func(j *job) {
			j.comm("dp", 0, 1, 2, 3, 4, 5, 6, 7)
			for i := range j.ev.Ranks {
				j.ev.Ranks[i].Proc, j.ev.Ranks[i].ProcAt = diagnosis.ProcGone, ago(2)
			}
		}, "", ""},
		{"a node's ranks die together", func(j *job) {
			j.comm("dp", 0, 1, 2, 3, 4, 5, 6, 7)
			for i := range 4 {
				j.ev.Ranks[i].Proc, j.ev.Ranks[i].ProcAt = diagnosis.ProcGone, ago(2)
			}
		}, "confirmed noncommunication_hang node0 process_gone", ""},
		{"killed after it had left", func(j *job) {
			j.comm("dp", 0, 1, 2, 3).Members[2].State = record.CommLeft
			j.comm("dp2", 0, 1, 3)
			j.ev.Ranks[2].Proc, j.ev.Ranks[2].ProcAt = diagnosis.ProcGone, ago(5)
		}, "", ""},
		{"survivors have shrunk and go on", func(j *job) {
			c := j.comm("dp", 0, 1, 2, 3)
			for _, i := range []int{0, 1, 3} {
				c.Members[i].State = record.CommAborted
			}
			d := j.comm("dp2", 0, 1, 3)
			for i := range d.Members {
				d.Members[i].FinishedAt = now
			}
			j.ev.Ranks[2].Proc, j.ev.Ranks[2].ProcAt = diagnosis.ProcGone, ago(5)
		}, "", ""},
		{"survivors have aborted and sleep, others wait for them", func(j *job) {
			c := j.comm("tp", 1, 2)
			c.Members[0].State = record.CommAborted
			j.allBut(j.comm("dp", 0, 1), 2, 1)
			j.ev.Ranks[2].Proc, j.ev.Ranks[2].ProcAt = diagnosis.ProcGone, ago(3)
		}, "confirmed noncommunication_hang 2 process_gone", ""},
		{"a finished job", func(j *job) {
			c := j.comm("dp", 0, 1, 2, 3)
			for i := range j.ev.Ranks {
				j.ev.Ranks[i].Proc, j.ev.Ranks[i].ProcAt = diagnosis.ProcExited, ago(3)
			}
			j.allBut(c, 3, 2)
		}, "", ""},
		{"a rank is done before the others", func(j *job) {
			c := j.comm("dp", 0, 1, 2, 3)
			c.Members[2].State = record.CommLeft
			j.allBut(c, 3, 2)
			j.ev.Ranks[2].Proc, j.ev.Ranks[2].ProcAt = diagnosis.ProcExited, ago(2.9)
		}, "confirmed noncommunication_hang 2 process_exited", ""},

		{"a lost agent is no hang", func(j *job) {
			j.comm("dp", 0, 1, 4, 5)
			j.ev.Nodes[1].Lost, j.ev.Nodes[1].LastSeen = true, ago(20)
		}, "", ""},
		{"a lost node that others wait for", func(j *job) {
			c := j.comm("dp", 0, 1, 4, 5)
			j.enter(c, 0, record.AllReduce, 11)
			j.enter(c, 1, record.AllReduce, 11)
			idleSince(c, 2, 12)
			idleSince(c, 3, 12)
			j.ev.Nodes[1].Lost, j.ev.Nodes[1].LastSeen = true, ago(11)
		}, "confirmed noncommunication_hang node1 node_lost", ""},
		{"a lost agent, and its rank was in a checkpoint", func(j *job) {
			c := j.comm("dp", 0, 1, 4, 5)
			for _, i := range []int{0, 1, 3} {
				j.enter(c, i, record.AllReduce, 15)
			}
			idleSince(c, 2, 16)
			j.ev.Ranks[4].Mark, j.ev.Ranks[4].MarkAt = record.MarkCheckpoint, ago(15)
			j.ev.Nodes[1].Lost, j.ev.Nodes[1].LastSeen = true, ago(14)
		}, "suspected noncommunication_hang node1 node_lost", ""},
		{"a lost node explains nothing that another rank explains", func(j *job) {
			c := j.comm("dp", 0, 1, 2, 4, 5)
			j.enter(c, 0, record.AllReduce, 11)
			j.enter(c, 1, record.AllReduce, 11)
			j.ev.Nodes[1].Lost, j.ev.Nodes[1].LastSeen = true, ago(11)
		}, "confirmed noncommunication_hang 2 idle", ""},
		{"a report that is late ages nobody", func(j *job) {
			c := j.comm("dp", 0, 1, 4, 5)
			j.allBut(c, 0.9, 3)
			j.ev.Nodes[0].LastSeen, j.ev.Nodes[1].LastSeen = ago(0.7), ago(0.7)
			j.ev.Now = ago(-0.1)
			j.ev.Nodes[0].LastSeen -= 3e8 // verdicts adds that
			j.ev.Nodes[1].LastSeen -= 3e8
		}, "", ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			j := newJob(8)
			c.job(j)
			var got []string
			vs := j.verdicts()
			for i := range vs {
				got = append(got, describe(&vs[i]))
			}
			if s := strings.Join(got, "; "); s != c.want {
				t.Fatalf("got  %q\nwant %q\n%v", s, c.want, vs)
			}
			if c.why != "" && !strings.Contains(strings.Join(vs[0].Why, "\n"), c.why) {
				t.Fatalf("no %q in\n%s", c.why, strings.Join(vs[0].Why, "\n"))
			}
		})
	}
}

// TestExplanations: a verdict tells the waits down to the culprit, and what would have changed it.
func TestExplanations(t *testing.T) {
	j := newJob(8)
	j.ev.Comms = make([]diagnosis.Comm, 0, 3)
	j.allBut(j.comm("dp", 0, 1, 2, 3), 3, 3)
	j.allBut(j.comm("tp", 3, 4), 3, 1)
	j.pair(j.comm("pp", 4, 5), 0, record.Recv, 1, 3)
	v := one(t, j.verdicts(), "confirmed noncommunication_hang 5 idle")
	if got := strings.Join(v.Chain, "\n"); !strings.HasSuffix(got, " waits in AllReduce #101 on dp for rank 3\nrank 3 waits in AllReduce #101 on tp for rank 4\nrank 4 waits in Recv #101 on pp for rank 5") {
		t.Errorf("chain:\n%s", got)
	}
	if want := "rank 5 entering Recv #101 on pp, or waiting for another"; v.Counter != want {
		t.Errorf("counter %q, want %q", v.Counter, want)
	}
}

// TestCulpritsKeepTheirOrder: who is told first stays first while the same ranks are told.
func TestCulpritsKeepTheirOrder(t *testing.T) {
	j := newJob(8)
	c := j.comm("dp", 0, 1, 2, 3, 4, 5)
	j.allBut(c, 3, 1, 2)
	idleSince(c, 1, 9)
	idleSince(c, 2, 8)
	j.verdicts()
	for k := range 10 {
		c.Members[1+k%2].FinishedAt -= 1e9 // another seems to be the first
		if v := one(t, j.pass(100*time.Millisecond), "confirmed noncommunication_hang 1,2 idle"); v.Culprits[0].Rank != 1 {
			t.Fatalf("%+v", v.Culprits)
		}
	}
}

func describe(v *diagnosis.Verdict) string {
	var who []string
	for _, k := range v.Culprits {
		switch k.Kind {
		case diagnosis.CulpritRank:
			who = append(who, fmt.Sprint(k.Rank))
		case diagnosis.CulpritConnection:
			who = append(who, fmt.Sprintf("%d>%d", k.Rank, k.Peer))
		case diagnosis.CulpritNode:
			who = append(who, k.Node)
		default:
			who = append(who, fmt.Sprintf("%s %d", k.Kind, k.Rank))
		}
		if k.Kind == diagnosis.CulpritNode {
			break // its ranks follow
		}
	}
	slices.Sort(who)
	return fmt.Sprintf("%s %s %s %s", v.Level, v.Class, strings.Join(who, ","), v.Culprits[0].Reason)
}
