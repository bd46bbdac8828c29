package prom_test

import (
	"fmt"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil"

	"github.com/lockstep-ccl/lockstep/collector"
	"github.com/lockstep-ccl/lockstep/exporters/names"
	"github.com/lockstep-ccl/lockstep/exporters/prom"
)

func TestSeriesCapCountsWhatItRefuses(t *testing.T) {
	s := agentSnapshot()
	s.Jobs[0].Comms = nil
	for i := range 10 {
		s.Jobs[0].Comms = append(s.Jobs[0].Comms, collector.AgentComm{Name: fmt.Sprint("left", i)}, collector.AgentComm{Name: fmt.Sprint("comm", i), Members: 1})
	}
	a, reg := newAgent(t, s, prom.Options{SeriesPerFamily: 6})
	for i := range uint64(10) {
		for range 3 {
			c := allReduce(1, time.Millisecond)
			c.CommID, c.Comm = i, fmt.Sprint("comm", i)
			a.Collective(c)
		}
	}
	for range 2 { // scraping again counts nothing again
		count := map[string]int{}
		overflow := map[string]float64{}
		families, err := reg.Gather()
		if err != nil {
			t.Fatal(err)
		}
		for _, f := range families {
			count[f.GetName()] = len(f.Metric)
			if f.GetName() == names.SeriesOverflow.Name {
				for _, m := range f.Metric {
					overflow[m.Label[0].GetValue()] = m.Counter.GetValue()
				}
			}
		}
		for _, m := range []*names.Metric{names.CommMembers, names.CollectiveDuration, names.Collectives, names.CollectiveBytes} {
			if count[m.Name] != 6 || overflow[m.Name] != 4 {
				t.Errorf("%s: %d series and %v refused, want 6 and 4", m, count[m.Name], overflow[m.Name])
			}
		}
	}
}

func TestSeriesOfAGoneJobExpireAndMakeRoom(t *testing.T) {
	now := time.Unix(1_700_000_000, 0)
	s := agentSnapshot()
	a, reg := newAgent(t, s, prom.Options{SeriesPerFamily: 6, IdleExpiry: time.Minute, Now: func() time.Time { return now }})
	s.Jobs[0].Comms = nil
	for i := range uint64(6) {
		c := allReduce(1, time.Millisecond)
		c.CommID, c.Comm = i, fmt.Sprint("comm", i)
		a.Collective(c)
		s.Jobs[0].Comms = append(s.Jobs[0].Comms, collector.AgentComm{Name: c.Comm, Members: 1})
	}
	next := allReduce(1, time.Millisecond)
	next.Job, next.Comm = "gpt", "dp"
	a.Collective(next)
	series := func() int {
		n, err := testutil.GatherAndCount(reg, names.CollectiveDuration.Name, names.Collectives.Name)
		if err != nil {
			t.Fatal(err)
		}
		return n
	}
	if n := series(); n != 12 {
		t.Fatalf("%d series, want 12", n)
	}
	now = now.Add(time.Hour)
	if n := series(); n != 12 {
		t.Errorf("%d series while the job hangs, want all 12", n)
	}
	s.Jobs[0].Comms[0].Members = 0
	now = now.Add(time.Hour)
	if n := series(); n != 10 {
		t.Errorf("%d series after a communicator was left, want 10", n)
	}
	c := allReduce(1, time.Millisecond)
	c.CommID, c.Comm = 6, "comm6"
	a.Collective(c)
	if n := series(); n != 12 {
		t.Errorf("%d series with a communicator in its place, want 12", n)
	}
	s.Jobs = nil
	now = now.Add(30 * time.Second)
	if n := series(); n != 12 {
		t.Errorf("%d series before the expiry, want 12", n)
	}
	now = now.Add(time.Minute)
	if n := series(); n != 0 {
		t.Errorf("%d series after the expiry, want 0", n)
	}
	a.Collective(next)
	if n := series(); n != 2 {
		t.Errorf("%d series of the next job, want 2", n)
	}
}
