package plannercmd

import (
	"maps"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	"go.opentelemetry.io/otel/codes"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/sdk/trace/tracetest"

	"github.com/lockstep-ccl/lockstep/exporters/names"
	"github.com/lockstep-ccl/lockstep/exporters/prom"
	"github.com/lockstep-ccl/lockstep/pathplan"
	"github.com/lockstep-ccl/lockstep/pathplan/service"
)

var (
	up   = pathplan.Link{From: "leaf1", To: "spine2"}
	down = pathplan.Link{From: "spine2", To: "leaf5", Index: 1}
)

// TestMetrics: a link has one name in both directions, and rates are in bytes.
func TestMetrics(t *testing.T) {
	s := service.Snapshot{Denied: 2, Moves: map[pathplan.Reason]uint64{pathplan.Lossy: 7}, Links: []service.SeenLink{
		{LinkView: pathplan.LinkView{Link: up, Rate: 8000, Planned: 800, Lanes: 3}, Up: true, Measured: 400, Sent: 9, Lost: 1},
		{LinkView: pathplan.LinkView{Link: down, Rate: 8000, State: pathplan.LinkState{Down: true, Loss: 1}}},
	}}
	reg := prometheus.NewPedanticRegistry()
	reg.MustRegister(prom.NewPlanner(func() prom.Fabric { return metrics(s) }, prom.Options{}))
	want := `
# HELP lockstep_fabric_link_measured_bytes_per_second ` + names.FabricLinkMeasured.Help + `
# TYPE lockstep_fabric_link_measured_bytes_per_second gauge
lockstep_fabric_link_measured_bytes_per_second{direction="down",leaf="leaf5",link="1",spine="spine2"} 0
lockstep_fabric_link_measured_bytes_per_second{direction="up",leaf="leaf1",link="0",spine="spine2"} 50
# HELP lockstep_fabric_link_up ` + names.FabricLinkUp.Help + `
# TYPE lockstep_fabric_link_up gauge
lockstep_fabric_link_up{direction="down",leaf="leaf5",link="1",spine="spine2"} 0
lockstep_fabric_link_up{direction="up",leaf="leaf1",link="0",spine="spine2"} 1
# HELP lockstep_planner_moves_total ` + names.PlannerMoves.Help + `
# TYPE lockstep_planner_moves_total counter
lockstep_planner_moves_total{reason="congested"} 0
lockstep_planner_moves_total{reason="dead"} 0
lockstep_planner_moves_total{reason="lossy"} 7
lockstep_planner_moves_total{reason="returned"} 0
lockstep_planner_moves_total{reason="uneven"} 0
`
	if err := testutil.GatherAndCompare(reg, strings.NewReader(want), names.FabricLinkMeasured.Name, names.FabricLinkUp.Name, names.PlannerMoves.Name); err != nil {
		t.Error(err)
	}
}

// TestRefusalsAreKnown: the reasons are those of names.Refusals.
func TestRefusalsAreKnown(t *testing.T) {
	var want []string
	for _, r := range names.Refusals() {
		if r.Metric == names.PlannerRefused {
			want = append(want, r.Reasons...)
		}
	}
	slices.Sort(want)
	if got := slices.Sorted(maps.Keys(metrics(service.Snapshot{}).Refused)); !slices.Equal(got, want) {
		t.Errorf("%q, names.Refusals has %q", got, want)
	}
}

// TestDecisions: what the planner decides is spans, a bad link's from when it was found.
func TestDecisions(t *testing.T) {
	spans := tracetest.NewSpanRecorder()
	d := decisions{sdktrace.NewTracerProvider(sdktrace.WithSpanProcessor(spans)).Tracer("")}
	at := time.Unix(1000, 0)
	path := pathplan.Path{Up: up, Down: down}
	d.decided(service.Decision{At: at, Link: up, State: pathplan.LinkState{Down: true, Loss: 1}})
	d.decided(service.Decision{At: at, Took: time.Second, Moves: []pathplan.Move{{
		Assignment: pathplan.Assignment{Conn: pathplan.ConnID{Tenant: "a", Job: "a", Conn: "x"}, Lane: 1}, From: path, Reason: pathplan.Dead,
	}}})
	d.decided(service.Decision{At: at.Add(time.Minute), Link: up, Since: at})
	got := spans.Ended()
	if len(got) != 3 || got[0].Name() != "link is bad" || got[0].Status().Code != codes.Error || got[1].Name() != "planner rebalance" || !got[1].EndTime().Equal(at.Add(time.Second)) {
		t.Fatalf("%v", got)
	}
	events := got[1].Events()
	if len(events) != 1 {
		t.Fatalf("%v", events)
	}
	said := map[string]string{}
	for _, kv := range events[0].Attributes {
		said[string(kv.Key)] = kv.Value.String()
		if !slices.ContainsFunc(names.Attributes(), func(a names.Attribute) bool { return a.Key == string(kv.Key) }) {
			t.Errorf("attribute %s is not in the catalogue", kv.Key)
		}
	}
	if said[names.AttrPathFrom] != path.String() || said[names.AttrReason] != "dead" || said[names.AttrLane] != "1" || said[names.AttrJob] != "a" {
		t.Errorf("%v", said)
	}
	if s := got[2]; s.Name() != "link was bad" || !s.StartTime().Equal(at) || s.EndTime().Sub(at) != time.Minute || s.Status().Code == codes.Error {
		t.Errorf("%v from %v to %v", s.Name(), s.StartTime(), s.EndTime())
	}
}
