package diagnosis_test

import (
	"strings"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/lockstep-ccl/lockstep/diagnosis"
	"github.com/lockstep-ccl/lockstep/record"
)

// calls writes a rank's last calls: communicators by their index, one call each.
func (j *job) calls(rank int, comms ...int) {
	seen := map[int]uint64{}
	for _, ci := range comms {
		seen[ci]++
		j.ev.Ranks[rank].Calls = append(j.ev.Ranks[rank].Calls, diagnosis.Call{
			Comm: j.ev.Comms[ci].ID, Seq: 99 + seen[ci], Coll: record.AllReduce, Peer: -1, Bytes: 4096,
		})
	}
}

// done lets members finish one more operation.
func done(c *diagnosis.Comm, members ...int) {
	for _, i := range members {
		m := &c.Members[i]
		m.Enqueued, m.Started, m.Finished = m.Enqueued+1, m.Started+1, m.Finished+1
	}
}

func TestOddOneOut(t *testing.T) {
	const told, untold = "", "which of these ranks"
	for _, c := range []struct {
		name, want, undetermined, why string
		job                           func(j *job)
	}{
		{"two communicators in opposite order: one against three", "confirmed noncommunication_hang 3 deadlock", told, "rank 3 has come to #100 on a and is in #101 on b", func(j *job) {
			a, b := j.comm("a", 0, 1, 2, 3), j.comm("b", 0, 1, 2, 3)
			j.allBut(a, 3, 3)
			j.allBut(b, 3, 0, 1, 2)
		}},
		{"one against one", "confirmed noncommunication_hang 0,1 deadlock", untold, "wait for each other", func(j *job) {
			a, b := j.comm("a", 0, 1), j.comm("b", 0, 1)
			j.allBut(a, 3, 1)
			j.allBut(b, 3, 0)
		}},
		{"two against two", "confirmed noncommunication_hang 0,1,2,3 deadlock", untold, "", func(j *job) {
			a, b := j.comm("a", 0, 1, 2, 3), j.comm("b", 0, 1, 2, 3)
			j.allBut(a, 3, 2, 3)
			j.allBut(b, 3, 0, 1)
		}},
		{"a pair, one of which skipped its collective: its peers in the other pair show which", "confirmed noncommunication_hang 3 deadlock", told, "rank 3 has come to #100 on tp1 and is in #101 on world", func(j *job) {
			w, p, q := j.comm("world", 0, 1, 2, 3), j.comm("tp0", 0, 1), j.comm("tp1", 2, 3)
			done(p, 0, 1)
			j.allBut(w, 3, 2)
			j.allBut(q, 3, 1)
		}},
		{"a pair, one of which took the opposite order: the other pair did it right", "confirmed noncommunication_hang 2 deadlock", told, "", func(j *job) {
			w, p, q := j.comm("world", 0, 1, 2, 3), j.comm("tp0", 0, 1), j.comm("tp1", 2, 3)
			done(p, 0, 1)
			j.allBut(w, 3, 3) // world before tp
			j.allBut(q, 3, 0)
		}},
		{"calls show it, where numbers do not", "confirmed noncommunication_hang 1 deadlock", told, "rank 1 called AllReduce #100 on b, then AllReduce #101 on b\nrank 0 called AllReduce #100 on b, then AllReduce #100 on a", func(j *job) {
			a, b := j.comm("a", 0, 1, 2, 3), j.comm("b", 0, 1, 2, 3)
			for i := range b.Members { // what the numbers say cannot be compared
				b.Members[i].Started += uint64(10 * i)
				b.Members[i].Finished += uint64(10 * i)
				b.Members[i].Enqueued += uint64(10 * i)
			}
			for i := range a.Members {
				b.Members[i].Started, b.Members[i].Finished, b.Members[i].Enqueued = 100, 100, 100
			}
			j.allBut(a, 3, 1)
			j.allBut(b, 3, 0, 2, 3)
			for _, r := range []int{0, 2, 3} {
				j.calls(r, 1, 0)
			}
			j.calls(1, 1, 1)
		}},
		{"a rank that only came less far is none", "confirmed noncommunication_hang 0,1 deadlock", untold, "", func(j *job) {
			a, b := j.comm("a", 0, 1), j.comm("b", 0, 1)
			j.allBut(a, 3, 1)
			j.allBut(b, 3, 0)
			j.calls(0, 1, 0)
			j.calls(1, 1)
		}},
		{"a mismatch that the library noticed, after which all exit", "confirmed noncommunication_hang 2 mismatch", told, "#101 on dp is Broadcast of 4096 bytes", func(j *job) {
			j.mismatch(record.Broadcast, 2)
		}},
		{"the same, two against two", "confirmed noncommunication_hang 1,2,4,5 mismatch", untold, "", func(j *job) {
			c := j.comm("dp", 1, 2, 4, 5)
			j.mismatchIn(c, record.Barrier, 1, 3)
		}},
		{"only the odd one sees the mismatch and exits, the others lose it, in other communicators too", "confirmed noncommunication_hang 2 mismatch", told, "#101 on even is AllReduce of 4096 bytes for rank 0, 4\n#101 on even is Broadcast of 4096 bytes with root 0 for rank 2", func(j *job) {
			even, row, world := j.comm("even", 0, 2, 4), j.comm("row", 0, 1, 2), j.comm("world", 0, 1, 2, 3, 4)
			gaveUp(even, 1, 0, 0.83)
			even.Members[1].Fault, even.Members[1].Coll, even.Members[1].Peer, even.Members[1].Bytes = record.ResultMismatch, record.Broadcast, 0, 4096
			for _, m := range []int{0, 2} {
				gaveUp(even, m, 1, 0.82)
				even.Members[m].Bytes = 4096
			}
			abandoned(row, 0.82, 2, 0, 1)
			abandoned(world, 0.81, 2, 0, 1, 3, 4)
			for r := range 5 {
				j.ended(r, 0.8, fatal)
			}
		}},
		{"one skipped a call: it and one neighbour see the mismatch, the others lose them", "confirmed noncommunication_hang 1 mismatch", told, "#101 on world is AlltoAllv of 0 bytes for rank 0, 2, 3, 4, 5\n#101 on world is AllReduce of 16384 bytes for rank 1", func(j *job) {
			w := j.comm("world", 0, 1, 2, 3, 4, 5)
			for i := range w.Members {
				gaveUp(w, i, 0, 0.8)
				w.Members[i].Coll, w.Members[i].Bytes = record.AlltoAllv, uint64(900+i)
				j.ended(i, 0.78, fatal)
			}
			w.Members[0].Fault, w.Members[0].FaultPeer = record.ResultMismatch, 1
			w.Members[1].Fault, w.Members[1].Coll, w.Members[1].Bytes = record.ResultMismatch, record.AllReduce, 16384
		}},
		{"one skipped a call beside sends and receives, where sequences are each rank's own", "confirmed noncommunication_hang 2 mismatch", told, "AllReduce of 16384 bytes for rank 0, 1, 3", func(j *job) {
			w := j.comm("world", 0, 1, 2, 3)
			j.pair(w, 3, record.Send, 0, 1) // as a pass saw it a moment before
			j.verdicts()
			for i := range w.Members {
				m := &w.Members[i]
				m.Enqueued += uint64(i)
				m.Finished, m.Started = m.Enqueued, m.Enqueued
				gaveUp(w, i, 2, -0.6)
				m.Fault, m.Coll, m.Peer, m.Bytes = record.ResultMismatch, record.AllReduce, -1, 16384
				j.ended(i, -0.62, fatal)
			}
			w.Members[2].FaultPeer, w.Members[2].Bytes = 0, 4
			for range 12 {
				j.pass(100 * time.Millisecond)
			}
		}},
		{"one called another, beside sends and receives, and the others are inside still", "confirmed noncommunication_hang 3 mismatch", told, "AllReduce of 16384 bytes for rank 0, 1, 2", func(j *job) {
			w := j.comm("world", 0, 1, 2, 3)
			j.pair(w, 3, record.Send, 0, 1)
			j.verdicts()
			for i := range w.Members {
				m := &w.Members[i]
				m.Enqueued += uint64(i)
				m.Coll, m.Peer, m.Bytes = record.AllReduce, -1, 16384
				m.Started, m.Finished, m.StartedAt = m.Enqueued, m.Enqueued-1, j.ev.Now-700e6
			}
			gaveUp(w, 3, 2, -0.6)
			w.Members[3].Fault, w.Members[3].Coll, w.Members[3].Peer, w.Members[3].Finished = record.ResultMismatch, record.Broadcast, 0, w.Members[3].Enqueued
			for range 12 {
				j.pass(100 * time.Millisecond)
			}
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			j := newJob(8)
			j.ev.Comms = make([]diagnosis.Comm, 0, 4)
			c.job(j)
			vs := j.verdicts()
			checkVerdicts(t, vs, c.want, c.why)
			if u := vs[0].Undetermined; (u == "") != (c.undetermined == told) || !strings.HasPrefix(u, c.undetermined) {
				t.Errorf("undetermined: %q", u)
			}
		})
	}
}

// TestStrangeCallComesFirst: one against one, the rank whose call nobody has made before is
// told first, and that nobody knows.
func TestStrangeCallComesFirst(t *testing.T) {
	j := newJob(4)
	w := j.comm("world", 0, 1, 2, 3)
	j.verdicts()
	gaveUp(w, 3, 2, -0.6)
	w.Members[3].Fault, w.Members[3].Coll, w.Members[3].Peer = record.ResultMismatch, record.Broadcast, 0
	j.pass(400 * time.Millisecond) // the other's report comes later
	gaveUp(w, 2, 3, -0.6)
	abandoned(w, -0.6, 3, 0, 1)
	for r := range 4 {
		j.ended(r, -0.62, fatal)
	}
	var vs []diagnosis.Verdict
	for range 15 {
		vs = j.pass(100 * time.Millisecond)
	}
	checkVerdicts(t, vs, "confirmed noncommunication_hang 2,3 mismatch", "no Broadcast was seen on world before, and AllReduce was")
	if v := &vs[0]; v.Culprits[0].Rank != 3 || v.Undetermined == "" || !strings.HasPrefix(v.Counter, "rank 3 calling AllReduce") {
		t.Fatalf("%+v", v)
	}
}

// abandoned lets members give up a communicator that they were not in an operation of.
func abandoned(c *diagnosis.Comm, age float64, lost int, members ...int) {
	for _, i := range members {
		m := &c.Members[i]
		m.State, m.StateAt, m.Fault, m.FaultPeer = record.CommAborted, ago(age), record.ResultPeerLost, int32(lost)
	}
}

// mismatch lets one rank of four call another operation, the library notice and all exit.
func (j *job) mismatch(k record.CollKind, odd int) {
	j.mismatchIn(j.comm("dp", 0, 1, 2, 3), k, odd)
}

func (j *job) mismatchIn(c *diagnosis.Comm, k record.CollKind, odd ...int) {
	for i := range c.Members {
		to := odd[0]
		if i == to {
			to = (i + 1) % len(c.Members)
		}
		gaveUp(c, i, to, 0.8)
		c.Members[i].Fault, c.Members[i].Bytes = record.ResultMismatch, 4096
		j.ended(int(c.Members[i].World), 0.7, fatal)
	}
	for _, i := range odd {
		c.Members[i].Coll = k
	}
}

// TestAnyOddOneIsTold: of ranks that repeat one program over shared communicators, one
// changes the order of two calls or leaves one out, anywhere, and whoever can goes on.
func TestAnyOddOneIsTold(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		n := rapid.IntRange(3, 8).Draw(t, "ranks")
		comms := rapid.IntRange(2, 4).Draw(t, "comms")
		step := rapid.SliceOfN(rapid.IntRange(0, comms-1), 3, 8).Draw(t, "step")
		at := rapid.IntRange(0, len(step)-2).Draw(t, "at")
		if step[at] == step[at+1] {
			return // the same call twice: nobody can tell, and nothing hangs
		}
		odd := rapid.IntRange(0, n-1).Draw(t, "odd")
		j := newJob(8)
		j.ev.Comms = make([]diagnosis.Comm, 0, comms)
		all := []int{0, 1, 2, 3, 4, 5, 6, 7}[:n]
		for ci := range comms {
			j.comm(string(rune('a'+ci)), all...)
		}
		programs := make([][]int, n)
		for r := range n {
			programs[r] = append([]int{}, step...)
			if r == odd {
				programs[r][at], programs[r][at+1] = step[at+1], step[at]
			}
			if rapid.Bool().Draw(t, "calls") || r == 0 {
				j.calls(r, programs[r][:min(at+1, len(step))]...)
			}
		}
		// All but the odd one wait in step[at], and it in step[at+1].
		for r := range n {
			for _, ci := range programs[r][:at] {
				done(&j.ev.Comms[ci], r)
			}
			j.enter(&j.ev.Comms[programs[r][at]], r, record.AllReduce, 3)
		}
		vs := j.verdicts()
		if len(vs) != 1 || len(vs[0].Culprits) != 1 || int(vs[0].Culprits[0].Rank) != odd || vs[0].Undetermined != "" {
			t.Fatalf("rank %d is the odd one out: %+v", odd, vs)
		}
	})
}
