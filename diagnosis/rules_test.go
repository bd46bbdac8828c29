package diagnosis_test

import (
	"strings"
	"testing"

	"github.com/lockstep-ccl/lockstep/diagnosis"
	"github.com/lockstep-ccl/lockstep/record"
)

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
