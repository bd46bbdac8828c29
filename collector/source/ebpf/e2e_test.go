package ebpf_test

import (
	"context"
	"errors"
	"log/slog"
	"strings"
	"testing"
	"time"

	"github.com/lockstep-ccl/lockstep/collector"
	"github.com/lockstep-ccl/lockstep/collector/agent"
	"github.com/lockstep-ccl/lockstep/collector/master"
	"github.com/lockstep-ccl/lockstep/collector/source/ebpf"
	"github.com/lockstep-ccl/lockstep/diagnosis"
)

// run runs a component until the test ends.
func run(t *testing.T, f func(context.Context) error) {
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- f(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
}

// Four ranks that keep no recorder train; one stops calling. The others go on as far as they
// get, as programs with a GPU do: their calls return. The verdict names the one.
func TestARankThatStopsCalling(t *testing.T) {
	const size, culprit = 4, 2
	j := newJob(t, size)
	ranks := make([]*rank, size)
	for i := range ranks {
		ranks[i] = j.start(i)
		ranks[i].do("hello")
	}
	log := slog.New(slog.DiscardHandler)
	s := ebpf.New(ebpf.Options{Dir: j.dir, Node: "node", Scan: 50 * time.Millisecond, Log: log})
	skipUnless(t, s.Update(&j.v))
	m, err := master.New(master.Options{Job: "standin", Listen: "127.0.0.1:0", Log: log})
	if err != nil {
		t.Fatal(err)
	}
	run(t, m.Run)
	a, err := agent.New(agent.Options{
		Node: "node", Dir: j.dir, Master: func(string) string { return m.Addr().String() }, Log: log,
		Sources: []agent.NamedSource{{Name: "ebpf", Source: s}},
	})
	if err != nil {
		t.Fatal(err)
	}
	run(t, func(ctx context.Context) error { return errors.Join(a.Run(ctx), s.Close()) })
	eventually(t, "probes", func() bool { p := a.Snapshot().Probes; return p != nil && p.Processes == size })
	for _, r := range ranks {
		r.do("init world")
	}
	for _, r := range ranks {
		r.do("train 2000")
	}
	eventually(t, "all ranks run", func() bool { return m.Snapshot().Ranks[diagnosis.ProcRunning] == size })
	eventually(t, "many operations", func() bool {
		jobs := a.Snapshot().Jobs
		return len(jobs) == 1 && len(jobs[0].Comms) == 1 && jobs[0].Comms[0].Finished > 1000
	})
	if i := m.Snapshot().Incidents; len(i) != 0 {
		t.Fatalf("a healthy job: %+v", i)
	}
	ranks[culprit].do("stop")
	var found collector.Incident
	eventually(t, "an incident is confirmed", func() bool {
		for _, i := range m.Snapshot().Incidents {
			if !i.Confirmed.IsZero() {
				found = i
				return true
			}
		}
		return false
	})
	v := found.Verdict
	if v.Class != diagnosis.NoncommunicationHang || len(v.Culprits) != 1 || v.Culprits[0].Rank != culprit {
		t.Errorf("verdict: %+v", v)
	}
	if !strings.Contains(strings.Join(v.Why, "\n"), "not entered AllReduce") {
		t.Errorf("why: %q", v.Why)
	}
}
