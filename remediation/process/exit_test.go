package process

import (
	"fmt"
	"syscall"
	"testing"
	"time"
)

// TestExits: how each rank ended is told before anything is done about it, and which of them
// the supervisor itself had told to end.
func TestExits(t *testing.T) {
	for _, c := range []struct {
		name string
		what string         // that the ranks do
		kill syscall.Signal // sent by somebody else to rank 1
		one  Exit           // rank 1's
		rest Exit           // of those that are ended because of it
	}{
		{name: "kill -9", what: "sleep", kill: syscall.SIGKILL, one: Exit{Signal: syscall.SIGKILL}, rest: Exit{Signal: syscall.SIGTERM, Asked: true}},
		{name: "exit 7", what: "fail", one: Exit{Code: 7}, rest: Exit{Signal: syscall.SIGTERM, Asked: true}},
		{name: "exit 3", what: "exit-3", one: Exit{Code: 3}, rest: Exit{Signal: syscall.SIGTERM, Asked: true}},
		{name: "panic", what: "panic", one: Exit{Code: 2}, rest: Exit{Signal: syscall.SIGTERM, Asked: true}},
		{name: "exit 0", what: "ok", one: Exit{}, rest: Exit{}},
		{name: "deaf to SIGTERM", what: "deaf-7", one: Exit{Code: 7}, rest: Exit{Signal: syscall.SIGKILL, Asked: true}},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			exits := make(chan Exit, 10)
			j := begin(t, c.what, func(o *Options) {
				o.OnExit = func(e Exit) { exits <- e }
				if c.rest.Signal == syscall.SIGTERM {
					o.Grace = time.Minute // they may wait for a CPU to act on it
				}
			})
			j.wait("started")
			before := time.Now()
			if c.kill != 0 {
				if err := syscall.Kill(j.Status().Ranks[1].PID, c.kill); err != nil {
					t.Fatal(err)
				}
			}
			for range 4 {
				var e Exit
				select {
				case e = <-exits:
				case <-time.After(time.Minute):
					t.Fatal("not all ranks' ends are told of")
				}
				want := c.rest
				if e.Rank == 1 {
					want = c.one
				}
				if e.PID != j.Status().Ranks[e.Rank].PID || e.Node != fmt.Sprint("node", e.Rank/2) || e.Attempt != 0 || e.Started.After(e.At) || e.At.Sub(before) > time.Hour {
					t.Errorf("rank %d: %+v", e.Rank, e)
				}
				if e.Code != want.Code || e.Signal != want.Signal || e.Asked != want.Asked {
					t.Errorf("rank %d: status %d, %v, asked %v; want %d, %v, asked %v", e.Rank, e.Code, e.Signal, e.Asked, want.Code, want.Signal, want.Asked)
				}
			}
		})
	}
}
