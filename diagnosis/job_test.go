package diagnosis_test

import (
	"fmt"
	"slices"
	"strings"
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
