package ccl_test

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/lockstep-ccl/lockstep/collector"
	"github.com/lockstep-ccl/lockstep/collector/agent"
	"github.com/lockstep-ccl/lockstep/collector/master"
	"github.com/lockstep-ccl/lockstep/diagnosis"
	"github.com/lockstep-ccl/lockstep/record"
)

// pipeline is what watches a job: an agent a host, and the job's master.
type pipeline struct {
	agents []*agent.Agent
	master *master.Master
}

// startPipeline watches a job whose ranks on host i keep their flight recorders in
// dirs[i], until the test ends.
func startPipeline(t *testing.T, job string, dirs []string, sources ...func() agent.NamedSource) *pipeline {
	t.Helper()
	log := slog.New(slog.NewTextHandler(io.Discard, nil))
	state := t.TempDir()
	m, err := master.New(master.Options{Job: job, Listen: "127.0.0.1:0", StateDir: state, Log: log})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { // what the verdicts were made of, once the master has written it all
		if out := os.Getenv("OUT"); out != "" && t.Failed() {
			if err := os.CopyFS(filepath.Join(out, filepath.Base(t.Name())), os.DirFS(state)); err != nil {
				t.Log(err)
			}
		}
	})
	p := &pipeline{master: m}
	run := func(f func(context.Context) error) {
		ctx, cancel := context.WithCancel(context.Background())
		done := make(chan error, 1)
		go func() { done <- f(ctx) }()
		t.Cleanup(func() {
			cancel()
			if err := <-done; err != nil {
				t.Error(err)
			}
		})
	}
	run(m.Run)
	for i, dir := range dirs {
		o := agent.Options{Node: fmt.Sprint("host ", string(rune('a'+i))), Dir: dir, Master: func(string) string { return m.Addr().String() }, Log: log}
		for _, s := range sources {
			o.Sources = append(o.Sources, s())
		}
		a, err := agent.New(o)
		if err != nil {
			t.Fatal(err)
		}
		run(a.Run)
		p.agents = append(p.agents, a)
	}
	return p
}

func (p *pipeline) await(t *testing.T, what string, ok func() bool) {
	t.Helper()
	p.awaitFor(t, 20*time.Second, what, ok)
}

func (p *pipeline) awaitFor(t *testing.T, d time.Duration, what string, ok func() bool) {
	t.Helper()
	for deadline := time.Now().Add(d); !ok(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Errorf("not in %v: %s; the master says: %s", d, what, p.verdicts())
			return
		}
	}
}

// incidents are all that there ever were, open ones first.
func (p *pipeline) incidents() []collector.Incident {
	if s := p.master.Snapshot(); s != nil {
		return s.Incidents
	}
	return nil
}

func (p *pipeline) verdicts() string {
	var all []string
	for _, i := range p.incidents() {
		all = append(all, sentence(i))
	}
	if len(all) == 0 {
		return "none"
	}
	return strings.Join(all, "; ")
}

// linkDown reports whether the master is sure of a connection without a path.
func (p *pipeline) linkDown() bool {
	for _, i := range p.incidents() {
		if i.Verdict.Class == diagnosis.CommunicationHang && i.Verdict.Culprits[0].Reason == "link_down" && !i.Confirmed.IsZero() {
			return true
		}
	}
	return false
}

// pathsDown reports whether each agent's metrics count a path that is down.
func (p *pipeline) pathsDown() bool {
	for _, a := range p.agents {
		broken := 0
		for _, j := range a.Snapshot().Jobs {
			for _, tr := range j.Transports {
				if tr.Transport == record.TransportRDMA {
					broken += tr.Broken
				}
			}
		}
		if broken == 0 {
			return false
		}
	}
	return true
}

// sentence is an incident in a table.
func sentence(i collector.Incident) string {
	v := i.Verdict
	var b strings.Builder
	fmt.Fprintf(&b, "%v,", v.Class)
	for _, c := range v.Culprits {
		fmt.Fprintf(&b, " %v %d", c.Kind, c.Rank)
		if c.Peer >= 0 {
			fmt.Fprintf(&b, "-%d", c.Peer)
		}
		fmt.Fprintf(&b, " (%s),", c.Reason)
	}
	since := time.Unix(0, v.Since)
	fmt.Fprintf(&b, " suspected after %.1f s", i.Opened.Sub(since).Seconds())
	if !i.Confirmed.IsZero() {
		fmt.Fprintf(&b, ", confirmed after %.1f s", i.Confirmed.Sub(since).Seconds())
	}
	return b.String()
}
