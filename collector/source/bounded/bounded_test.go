package bounded

import (
	"log/slog"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// wait looks until f is true.
func wait(t *testing.T, f func() bool) {
	t.Helper()
	for end := time.Now().Add(time.Minute); !f(); time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatal("nothing came")
		}
	}
}

// TestProber: one probe at a time, when it is due; one that hangs is told of with its call and
// stays the only one; its answer counts when it comes at last.
func TestProber(t *testing.T) {
	var log strings.Builder
	asked, let := make(chan struct{}, 10), make(chan int)
	p := New(Options{Period: 100, Bound: 1000, What: "the driver", Log: slog.New(slog.NewTextHandler(&log, nil))}, func() int {
		asked <- struct{}{}
		return <-let
	})
	p.At("first")
	p.Ask(50)
	<-asked
	if _, _, ok := p.Take(); ok {
		t.Error("an answer before there is one")
	}
	if at, call := p.Hangs(1049); at != 0 || call != "" {
		t.Errorf("hangs since %d in %q within its bound", at, call)
	}
	p.Ask(5000)
	if at, call := p.Hangs(5000); at != 50 || call != "first" {
		t.Errorf("hangs since %d in %q", at, call)
	}
	p.At("second")
	if _, call := p.Hangs(5001); call != "first" || len(asked) != 0 {
		t.Errorf("hangs in %q; %d more probes", call, len(asked))
	}
	let <- 7
	var got int
	var began int64
	wait(t, func() bool {
		v, b, ok := p.Take()
		if ok {
			got, began = v, b
		}
		return ok
	})
	if at, _ := p.Hangs(5002); got != 7 || began != 50 || at != 0 {
		t.Errorf("answer %d of %d; hangs since %d", got, began, at)
	}
	if n := strings.Count(log.String(), "the driver does not answer"); n != 1 || !strings.Contains(log.String(), "the driver answers again") {
		t.Errorf("said:\n%s", &log)
	}
	p.Next(9000)
	p.Ask(8999)
	p.Soon(8500)
	if len(asked) != 0 {
		t.Error("a probe before it is due")
	}
	p.Ask(8500)
	<-asked
	let <- 8
	wait(t, func() bool { _, _, ok := p.Take(); return ok })
	ended := false
	if err := p.Close(func() { ended = true }); err != nil || !ended {
		t.Errorf("close: %v, ended %v", err, ended)
	}
	if p.Ask(1e9); len(asked) != 0 {
		t.Error("a probe after Close")
	}
}

// TestCloseLeavesWhatHangs: Close comes back, says in which call the probe is, and what was to end
// ends when the call returns.
func TestCloseLeavesWhatHangs(t *testing.T) {
	let, ended := make(chan int), make(chan struct{})
	p := New(Options{Period: 1, Bound: 1, What: "the driver", Log: slog.New(slog.DiscardHandler)}, func() int { return <-let })
	p.Ask(1)
	p.At("a call")
	if err := p.Close(func() { close(ended) }); err == nil || !strings.Contains(err.Error(), "a call") {
		t.Errorf("close: %v", err)
	}
	let <- 1
	<-ended
}
