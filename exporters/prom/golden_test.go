package prom_test

import (
	"bytes"
	"flag"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"

	"github.com/lockstep-ccl/lockstep/exporters/names"
	"github.com/lockstep-ccl/lockstep/exporters/prom"
	"github.com/lockstep-ccl/lockstep/record"
)

var update = flag.Bool("update", false, "rewrite golden files")

func TestAgentGolden(t *testing.T) {
	a, reg := newAgent(t, agentSnapshot(), prom.Options{})
	for i := range uint64(100) {
		a.Collective(allReduce(i, time.Duration(i+1)*50*time.Microsecond))
	}
	failed := allReduce(101, time.Second)
	failed.Result, failed.Kind = record.ResultPeerLost, record.AllGather
	a.Collective(failed)
	open := allReduce(102, 0)
	open.Ended = 0
	a.Collective(open)
	golden(t, reg, "agent.prom")
}

func TestMasterGolden(t *testing.T) {
	reg := prometheus.NewPedanticRegistry()
	reg.MustRegister(prom.NewMaster(masterSnapshot, prom.Options{}))
	golden(t, reg, "master.prom")
}

func TestPlannerGolden(t *testing.T) {
	reg := prometheus.NewPedanticRegistry()
	reg.MustRegister(prom.NewPlanner(fabric, prom.Options{}))
	golden(t, reg, "planner.prom")
	capped := prometheus.NewPedanticRegistry()
	capped.MustRegister(prom.NewPlanner(fabric, prom.Options{SeriesPerFamily: 1}))
	if n, err := testutil.GatherAndCount(capped, names.FabricLinkUp.Name); n != 1 || err != nil {
		t.Errorf("%d links are exported where one is allowed, %v", n, err)
	}
}

func TestSupervisorGolden(t *testing.T) {
	reg := prometheus.NewPedanticRegistry()
	reg.MustRegister(prom.NewSupervisor(supervision, prom.Options{}))
	golden(t, reg, "supervisor.prom")
	other := prometheus.NewPedanticRegistry()
	other.MustRegister(prom.NewSupervisor(func() prom.Supervision { return prom.Supervision{Job: "llama"} }, prom.Options{}))
	if n, err := testutil.GatherAndCount(other, names.CoordinatorRefused.Name, names.CoordinatorHosts.Name); n != 0 || err != nil {
		t.Errorf("a supervisor that does not coordinate tells of %d refusals and hosts, %v", n, err)
	}
}

// golden compares what reg exposes with testdata/name, and lints it as
// promtool does (and with promtool itself when it is installed).
func golden(t *testing.T, reg *prometheus.Registry, name string) {
	t.Helper()
	text := []byte(scrape(t, prom.Handler(reg, slog.New(slog.DiscardHandler)), nil))
	path := filepath.Join("testdata", name)
	if *update {
		if err := os.WriteFile(path, text, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(string(want), string(text)); diff != "" {
		t.Errorf("-%s +exposed (accept with -update):\n%s", path, diff)
	}
	problems, err := testutil.GatherAndLint(reg)
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range problems {
		t.Errorf("lint: %s: %s", p.Metric, p.Text)
	}
	if promtool, err := exec.LookPath("promtool"); err == nil {
		cmd := exec.Command(promtool, "check", "metrics")
		cmd.Stdin = bytes.NewReader(text)
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Errorf("promtool check metrics: %v\n%s", err, out)
		}
	}
}
