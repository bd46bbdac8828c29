package diagnosis_test

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/lockstep-ccl/lockstep/diagnosis"
	"github.com/lockstep-ccl/lockstep/record"
)

// gaveUp aborts a member's communicator for want of another member, as the library
// does: the operation it was in ends with it.
func gaveUp(c *diagnosis.Comm, member, lost int, age float64) {
	m := &c.Members[member]
	m.State, m.StateAt, m.Fault, m.FaultPeer = record.CommAborted, ago(age), record.ResultPeerLost, int32(lost)
	m.Started, m.Enqueued = m.Started+1, m.Enqueued+1
	m.Finished, m.FinishedAt = m.Started, ago(age)
}

// ended ends a rank's process without a word.
func (j *job) ended(rank int, age float64, exit diagnosis.Exit) {
	r := &j.ev.Ranks[rank]
	r.Proc, r.ProcAt, r.Exit = diagnosis.ProcGone, ago(age), exit
	if exit.By != diagnosis.ExitUnknown {
		r.Exit.At = ago(age)
	}
}

var (
	noWord   = diagnosis.Exit{}
	fatal    = diagnosis.Exit{By: diagnosis.ExitKernel, Code: 1}
	killed   = diagnosis.Exit{By: diagnosis.ExitKernel, Signal: 9}
	finished = diagnosis.Exit{By: diagnosis.ExitKernel}
	swept    = diagnosis.Exit{By: diagnosis.ExitSupervisor, Signal: 9, Asked: true}
)

func TestCausesOfDeath(t *testing.T) {
	for _, c := range []struct {
		name string
		job  func(j *job) // of 8 ranks on two nodes
		want string
		why  string
	}{
		{"the survivors give up naming it, and exit without closing anything, seen in one sweep", func(j *job) {
			w := j.comm("world", 0, 1, 2, 3, 4, 5, 6, 7)
			for i := range 8 {
				j.ended(i, 0.6, noWord)
				if i != 5 {
					gaveUp(w, i, 5, 0.7)
				}
			}
		}, "confirmed noncommunication_hang 5 process_gone", "rank 0 gave up world at"},
		{"chain: who follows a follower", func(j *job) {
			j.ev.Comms = make([]diagnosis.Comm, 0, 3)
			a, b, c := j.comm("dp0", 0, 1), j.comm("dp1", 1, 2), j.comm("dp2", 2, 4)
			gaveUp(a, 0, 1, 0.8)
			gaveUp(b, 0, 1, 0.9)
			gaveUp(c, 0, 1, 1.0)
			for r, age := range map[int]float64{0: 0.9, 1: 0.9, 2: 0.9, 4: 0.7} {
				j.ended(r, age, noWord) // the agent of the culprit's node looked last
			}
		}, "confirmed noncommunication_hang 4 process_gone", "rank 2 gave up dp2 at"},
		{"a survivor gives up one of its communicators and exits first", func(j *job) {
			j.ev.Comms = make([]diagnosis.Comm, 0, 2)
			a := j.comm("tp", 0, 1)
			j.comm("dp", 0, 4, 5)
			gaveUp(a, 0, 1, 0.8)
			j.ended(0, 0.8, noWord)
			j.ended(1, 0.7, noWord)
		}, "confirmed noncommunication_hang 1 process_gone", ""},
		{"the same, and nobody tells why it gave up", func(j *job) {
			j.ev.Comms = make([]diagnosis.Comm, 0, 2)
			a := j.comm("tp", 0, 1)
			j.comm("dp", 0, 4, 5)
			a.Members[0].State = record.CommAborted
			j.ended(0, 0.8, noWord)
			j.ended(1, 0.7, noWord)
		}, "confirmed noncommunication_hang 1 process_gone", ""},
		{"no word on communicators: one was killed, the others exit on an error", func(j *job) {
			j.comm("world", 0, 1, 2, 3, 4, 5, 6, 7)
			for i := range 5 {
				j.ended(i, 0.8, fatal)
			}
			j.ended(2, 0.8, killed)
		}, "confirmed noncommunication_hang 2 process_gone", "ended by signal 9"},
		{"all are gone: the one that was killed", func(j *job) {
			j.comm("world", 0, 1, 2, 3, 4, 5, 6, 7)
			for i := range 8 {
				j.ended(i, 0.8, fatal)
			}
			j.ended(2, 0.8, killed)
		}, "confirmed noncommunication_hang 2 process_gone", ""},
		{"all are gone: the one with a status of its own", func(j *job) {
			j.comm("world", 0, 1, 2, 3, 4, 5, 6, 7)
			for i := range 8 {
				j.ended(i, 0.8, fatal)
			}
			j.ended(6, 0.75, diagnosis.Exit{By: diagnosis.ExitSupervisor, Code: 3})
		}, "confirmed noncommunication_hang 6 process_gone", "with exit status 3"},
		{"a supervisor ends the rest", func(j *job) {
			j.comm("world", 0, 1, 2, 3, 4, 5, 6, 7)
			for i := range 8 {
				j.ended(i, 0.8, swept)
			}
			j.ended(3, 0.8, diagnosis.Exit{By: diagnosis.ExitSupervisor, Code: 1})
		}, "confirmed noncommunication_hang 3 process_gone", ""},
		{"a supervisor ends all", func(j *job) {
			w := j.comm("world", 0, 1, 2, 3, 4, 5, 6, 7)
			for i := range 8 {
				j.ended(i, 0.8, swept)
				if i > 2 {
					gaveUp(w, i, 2, 0.9)
				}
			}
		}, "", ""},
		{"a job is cancelled by a signal that all get, and some saw others go", func(j *job) {
			w := j.comm("world", 0, 1, 2, 3, 4, 5, 6, 7)
			for i := range 8 {
				j.ended(i, 0.8-float64(i)/100, diagnosis.Exit{By: diagnosis.ExitKernel, Signal: 15})
				if i > 2 {
					gaveUp(w, i, 0, 0.8)
				}
			}
		}, "", ""},
		{"exit 0 in the middle, nothing closed", func(j *job) {
			w := j.comm("world", 0, 1, 2, 3, 4, 5, 6, 7)
			for i := range 8 {
				j.ended(i, 0.6, fatal)
				if i != 1 {
					gaveUp(w, i, 1, 0.7)
				}
			}
			j.ended(1, 0.6, finished)
		}, "confirmed noncommunication_hang 1 process_gone", "with exit status 0"},
		{"exit 0 in the middle, in good order", func(j *job) {
			w := j.comm("world", 0, 1, 2, 3, 4, 5, 6, 7)
			for i := range 8 {
				j.ended(i, 0.6, fatal)
				if i != 1 {
					gaveUp(w, i, 1, 0.7)
				}
			}
			j.ended(1, 0.8, finished)
			j.ev.Ranks[1].Proc, w.Members[1].State = diagnosis.ProcExited, record.CommLeft
		}, "confirmed noncommunication_hang 1 process_exited", ""},
		{"the first rank to be done exits 0, closing nothing", func(j *job) {
			j.comm("world", 0, 1, 2, 3, 4, 5, 6, 7)
			j.ended(1, 0.8, finished)
		}, "", ""},
		{"two are killed at once", func(j *job) {
			w := j.comm("world", 0, 1, 2, 3, 4, 5, 6, 7)
			for i := range 8 {
				j.ended(i, 0.6, fatal)
				if i != 1 && i != 6 {
					gaveUp(w, i, 6, 0.7)
				}
			}
			j.ended(1, 0.7, killed)
			j.ended(6, 0.7, killed)
		}, "confirmed noncommunication_hang 1,6 process_gone", "2 ranks ended at about the same time"},
		{"others give up on one that is stopped, and exit", func(j *job) {
			w := j.comm("world", 0, 1, 2, 3, 4, 5, 6, 7)
			for i := range 7 {
				gaveUp(w, i, 7, 0.9)
				j.ended(i, 0.7, fatal)
			}
			j.ev.Ranks[7].Proc, j.ev.Ranks[7].ProcAt = diagnosis.ProcStopped, ago(32)
		}, "confirmed noncommunication_hang 7 process_stopped", "gave up world"},
		{"a program gives up by itself and exits 1", func(j *job) {
			w := j.comm("world", 0, 1, 2, 3, 4, 5, 6, 7)
			for i := range 8 {
				gaveUp(w, i, 3, 0.7)
				w.Members[i].Fault = record.ResultAborted
				j.ended(i, 0.6, fatal)
			}
			w.Members[3].FaultPeer = -1
		}, "confirmed noncommunication_hang 3 process_gone", ""},
		{"they have gone on without it", func(j *job) {
			w := j.comm("world", 0, 1, 2, 3)
			for i := range 3 {
				gaveUp(w, i, 3, 5)
			}
			j.ended(3, 5, killed)
			d := j.comm("world2", 0, 1, 2)
			for i := range d.Members {
				d.Members[i].FinishedAt = now
			}
		}, "", ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			j := newJob(8)
			c.job(j)
			checkVerdicts(t, j.verdicts(), c.want, c.why)
		})
	}
}

func checkVerdicts(t *testing.T, vs []diagnosis.Verdict, want, why string) {
	t.Helper()
	var got []string
	for i := range vs {
		got = append(got, describe(&vs[i]))
	}
	if s := strings.Join(got, "; "); s != want {
		t.Fatalf("got  %q\nwant %q\n%v", s, want, vs)
	}
	if why != "" && !strings.Contains(strings.Join(vs[0].Why, "\n"), why) {
		t.Fatalf("no %q in\n%s", why, strings.Join(vs[0].Why, "\n"))
	}
}

// TestCuts: ranks that lose each other and are both there have lost what is between
// them, whatever they do then.
func TestCuts(t *testing.T) {
	lose := func(c *diagnosis.Comm, a, b int, age float64) { gaveUp(c, a, b, age) }
	for _, c := range []struct {
		name string
		job  func(j *job)
		want string
		why  string
	}{
		{"both lost the other, the rest heard of it, all exit", func(j *job) {
			w := j.comm("world", 0, 1, 2, 3, 4, 5, 6, 7)
			for i := range 8 {
				lose(w, i, 5, 0.9)
				j.ended(i, 0.8, fatal)
			}
			lose(w, 2, 5, 1)
			lose(w, 5, 2, 0.95)
		}, "confirmed communication_hang 2>5 link_down", "and the other way round"},
		{"one lost the other, which hears that it is lost", func(j *job) {
			w := j.comm("world", 0, 1, 2, 3, 4, 5, 6, 7)
			for i := range 8 {
				lose(w, i, 5, 0.9)
				j.ended(i, 0.8, fatal)
			}
			lose(w, 2, 5, 1)
		}, "confirmed communication_hang 2>5 link_down", "rank 2 gave up world"},
		{"one lost another that lives on", func(j *job) {
			w := j.comm("world", 0, 1, 2, 3, 4, 5, 6, 7)
			lose(w, 2, 5, 3)
			j.ended(2, 2.9, fatal)
		}, "confirmed communication_hang 2>5 link_down", ""},
		{"neighbours know at first hand", func(j *job) {
			w := j.comm("world", 0, 1, 2, 3, 4, 5, 6, 7)
			for i := range 8 {
				lose(w, i, 5, 1)
			}
			lose(w, 2, 5, 1.01) // by another node's clock
			j.conn(w, 4, 5)
		}, "confirmed communication_hang 4>5 link_down", ""},
		{"the other is on a node that is not heard: too early to tell", func(j *job) {
			w := j.comm("world", 0, 1, 2, 3, 4, 5, 6, 7)
			for i := range 4 {
				lose(w, i, 4+i, 0.7)
				j.ended(i, 0.6, fatal)
			}
			j.ev.Nodes[1].LastSeen = ago(0.72)
		}, "", ""},
		{"the other is on a node that has just been lost", func(j *job) {
			w := j.comm("world", 0, 1, 2, 3, 4, 5, 6, 7)
			for i := range 4 {
				lose(w, i, 4+i, 2)
				j.ended(i, 1.9, fatal)
			}
			j.ev.Nodes[1].LastSeen, j.ev.Nodes[1].Lost = ago(3.2), true
		}, "suspected noncommunication_hang node1 node_lost", "its agent is lost"},
		{"the other is on a node that is lost", func(j *job) {
			w := j.comm("world", 0, 1, 2, 3, 4, 5, 6, 7)
			for i := range 4 {
				lose(w, i, 4+i, 3.7)
				j.ended(i, 3.6, fatal)
			}
			j.ev.Nodes[1].LastSeen, j.ev.Nodes[1].Lost = ago(5.2), true
		}, "confirmed noncommunication_hang node1 node_lost", ""},
		{"a node is cut off, and its last report came after the first of the others gave up", func(j *job) {
			w := j.comm("world", 0, 1, 2, 3, 4, 5, 6, 7)
			for i := range 4 {
				lose(w, i, 4+i, 1)
				j.ended(i, 0.95, noWord)
			}
			j.ev.Nodes[1].LastSeen = ago(0.97)
		}, "", ""},
		{"the same, later", func(j *job) {
			w := j.comm("world", 0, 1, 2, 3, 4, 5, 6, 7)
			for i := range 4 {
				lose(w, i, 4+i, 6)
				j.ended(i, 5.95, noWord)
			}
			j.ev.Nodes[1].LastSeen, j.ev.Nodes[1].Lost = ago(5.9), true
		}, "confirmed noncommunication_hang node1 node_lost", ""},
		{"without a word on why they gave up: a node that has not been heard since", func(j *job) {
			w := j.comm("world", 0, 1, 2, 3, 4, 5, 6, 7)
			for i := range 4 {
				lose(w, i, 4+i, 0.7)
				w.Members[i].Fault, w.Members[i].StateAt = record.ResultOK, 0
				j.ended(i, 0.65, fatal)
			}
			j.ev.Nodes[1].LastSeen = ago(2.2)
		}, "", ""},
		{"a dead process is one, though its end took a while", func(j *job) {
			w := j.comm("world", 0, 1, 2, 3, 4, 5, 6, 7)
			for i := range 8 {
				if i != 5 {
					lose(w, i, 5, 3)
					j.ended(i, 2.9, fatal)
				}
			}
			j.ended(5, 1, killed) // it wrote its core
		}, "confirmed noncommunication_hang 5 process_gone", ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			j := newJob(8)
			c.job(j)
			checkVerdicts(t, j.verdicts(), c.want, c.why)
		})
	}
}

// TestLinkSuspectedBeforeTheExits: a suspicion of a link is not lost to the exits that it leads to.
func TestLinkSuspectedBeforeTheExits(t *testing.T) {
	for _, exit := range []diagnosis.Exit{noWord, fatal} {
		j := newJob(8)
		c := j.comm("dp", 0, 1, 2, 3)
		j.allBut(c, 1.2)
		j.ring(c, 1.2)[1].Outstanding = 4096
		first := one(t, j.verdicts(), "suspected communication_hang 1>2 stalled")
		at := j.ev.Now
		for i := range c.Members {
			c.Members[i].State = record.CommAborted
		}
		j.pass(2 * time.Second)
		for i := range c.Members {
			j.ev.Ranks[i].Proc, j.ev.Ranks[i].ProcAt, j.ev.Ranks[i].Exit = diagnosis.ProcGone, at+19e8, exit
		}
		for range 5 {
			j.pass(300 * time.Millisecond)
		}
		last := one(t, j.pass(300*time.Millisecond), "confirmed communication_hang 1>2 stalled")
		if first.Key != last.Key {
			t.Errorf("key %q became %q", first.Key, last.Key)
		}
	}
}

// TestAnyFollowerIsLeftAlone lets a random rank of a random job die, with all the others
// naming whom they lost first, in the order in which they find out, and ending as programs do.
func TestAnyFollowerIsLeftAlone(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		const n = 8
		j := newJob(n)
		j.ev.Comms = make([]diagnosis.Comm, 0, 8)
		for ci := range rapid.IntRange(1, 5).Draw(t, "comms") {
			j.comm(fmt.Sprint("c", ci), rapid.SliceOfNDistinct(rapid.IntRange(0, n-1), 2, n, rapid.ID[int]).Draw(t, "members")...)
		}
		w := j.comm("world", 0, 1, 2, 3, 4, 5, 6, 7)
		culprit := rapid.IntRange(0, n-1).Draw(t, "culprit")
		told := rapid.Bool().Draw(t, "exits are told")
		exit := rapid.SampledFrom([]diagnosis.Exit{killed, finished, fatal, {By: diagnosis.ExitKernel, Code: 3}, {By: diagnosis.ExitKernel, Code: 2}}).Draw(t, "exit")
		if !told {
			exit = noWord
		}
		j.ended(culprit, 0.7, exit)
		lost := []int{culprit}
		order := rapid.Permutation([]int{0, 1, 2, 3, 4, 5, 6, 7}).Draw(t, "order")
		for k, r := range order {
			if r == culprit {
				continue
			}
			age := 0.69 - float64(k)/1000
			follows := fatal
			if !told {
				follows = noWord
			}
			if rapid.Bool().Draw(t, "exits") {
				j.ended(r, 0.7-rapid.Float64Range(0, 0.1).Draw(t, "seen"), follows)
			}
			for ci := range j.ev.Comms {
				c := &j.ev.Comms[ci]
				me := slices.IndexFunc(c.Members, func(m diagnosis.Member) bool { return m.World == int32(r) })
				if me < 0 {
					continue
				}
				for i, m := range c.Members {
					if slices.Contains(lost, int(m.World)) && (c == w || rapid.Bool().Draw(t, "notices")) {
						gaveUp(c, me, i, age)
						break
					}
				}
			}
			lost = append(lost, r)
		}
		vs := j.verdicts()
		if want := fmt.Sprintf("confirmed noncommunication_hang %d process_gone", culprit); len(vs) != 1 || describe(&vs[0]) != want {
			t.Fatalf("got %v, want %s", vs, want)
		}
	})
}
