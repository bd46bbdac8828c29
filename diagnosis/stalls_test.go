package diagnosis_test

import (
	"slices"
	"strings"
	"testing"

	"github.com/lockstep-ccl/lockstep/diagnosis"
	"github.com/lockstep-ccl/lockstep/record"
)

// TestWhatHasJustBegunDoesNotStall has ranks wait for the last one, which comes in the end: what they are in moves
// from then on, and those who have waited for them elsewhere have nobody to blame. What does not move since they were
// all in is a stall as before.
func TestWhatHasJustBegunDoesNotStall(t *testing.T) {
	// Ranks 0, 1 and 2 are in an AllReduce, the last since a moment ago, and rank 3 waits for what rank 1 sends next.
	behind := func(j *job, last float64) (tp *diagnosis.Comm) {
		j.ev.Comms = make([]diagnosis.Comm, 0, 2)
		tp = j.comm("tp", 0, 1, 2)
		j.allBut(tp, 3, 0)
		j.enter(tp, 0, record.AllReduce, last)
		j.pair(j.comm("pp", 1, 3), 1, record.Recv, 0, 3)
		return tp
	}
	// Rank 4 waits for what rank 0 sends in an operation that rank 1 has left.
	sent := func(j *job, post float64) {
		c := j.comm("ep", 0, 1, 4)
		for i := range c.Members {
			j.enter(c, i, record.AlltoAllv, 3)
		}
		c.Members[1].Finished, c.Members[1].FinishedAt = 101, ago(0.1)
		k := j.conn(c, 0, 2)
		k.RxWaitingSince, k.Outstanding, k.LastPost = ago(3), 4096, ago(post)
		j.ev.Nodes[1].LastSeen = ago(0.1)
	}
	for _, w := range []struct {
		name string
		job  func(j *job) // of 8 ranks
		want string
		why  string
	}{
		{"the last has just come", func(j *job) { j.conn(behind(j, 0.1), 2, 0).RxWaitingSince = ago(0.1) }, "", ""},
		{"the last came long ago", func(j *job) { j.conn(behind(j, 3), 2, 0).RxWaitingSince = ago(3) },
			"confirmed communication_hang 1,2>0 stalled", "all members have entered AllReduce #101 on tp"},
		{"the others have left what a late report has a rank in", func(j *job) {
			tp := behind(j, 0.1)
			for _, i := range []int{0, 2} {
				tp.Members[i].Finished, tp.Members[i].FinishedAt = 101, ago(0.05)
			}
			j.conn(tp, 1, 0).Outstanding = 4096
		}, "", ""},
		{"bytes that were posted after the receiver's last report", func(j *job) { sent(j, -0.25) }, "", ""},
		{"bytes that were posted long before it", func(j *job) { sent(j, 2.9) }, "confirmed communication_hang 0>4 stalled", "4096 bytes posted and not taken"},
	} {
		t.Run(w.name, func(t *testing.T) {
			j := newJob(8)
			w.job(j)
			var got, why []string
			for _, v := range j.verdicts() {
				got = append(got, describe(&v))
				why = append(why, v.Why...)
			}
			if strings.Join(got, "; ") != w.want || w.why != "" && !slices.ContainsFunc(why, func(s string) bool { return strings.Contains(s, w.why) }) {
				t.Errorf("got %q, want %q\n%s", got, w.want, strings.Join(why, "\n"))
			}
		})
	}
}
