package prom

import (
	"maps"
	"slices"
	"strconv"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/lockstep-ccl/lockstep/exporters/names"
)

// Fabric is what a planner knows at a moment.
type Fabric struct {
	Links   []FabricLink
	Moves   map[string]uint64 // lanes ever moved, by reason
	Refused map[string]uint64 // by reason
	Jobs    int               // that have a lease
	Streams int               // processes that are connected
	Probers int               // hosts
}

// FabricLink is a directed link between a leaf and a spine. Rates are bytes a second.
type FabricLink struct {
	Leaf, Spine             string
	Up                      bool // leaf to spine
	Index                   int  // among parallel ones
	Dead                    bool
	Loss                    float64
	Rate, Planned, Measured float64
	Lanes                   int
	Sent, Lost              uint64 // probes
	Segments, SegmentsLost  uint64 // of senders
	Suspected               bool   // by what senders lose
}

// Planner exports a fabric's planner. It is safe for concurrent scrapes.
type Planner struct {
	snapshot func() Fabric
	families *families
}

var _ prometheus.Collector = (*Planner)(nil)

// NewPlanner returns an exporter of what snapshot returns, which must return at once.
func NewPlanner(snapshot func() Fabric, opts Options) *Planner {
	opts = opts.withDefaults(4000)
	return &Planner{snapshot, newFamilies(names.Planner, opts.SeriesPerFamily)}
}

// Describe implements prometheus.Collector.
func (c *Planner) Describe(ch chan<- *prometheus.Desc) { c.families.Describe(ch) }

// Collect implements prometheus.Collector.
func (c *Planner) Collect(ch chan<- prometheus.Metric) {
	p := c.families.begin(ch)
	f := c.snapshot()
	for _, l := range f.Links {
		direction := "down"
		if l.Up {
			direction = "up"
		}
		for _, v := range []struct {
			metric *names.Metric
			value  float64
		}{
			{names.FabricLinkUp, boolean(!l.Dead)}, {names.FabricLinkLoss, l.Loss}, {names.FabricLinkRate, l.Rate},
			{names.FabricLinkPlanned, l.Planned}, {names.FabricLinkMeasured, l.Measured}, {names.FabricLinkLanes, float64(l.Lanes)},
			{names.FabricProbesSent, float64(l.Sent)}, {names.FabricProbesLost, float64(l.Lost)},
			{names.FabricSegmentsSent, float64(l.Segments)}, {names.FabricSegmentsLost, float64(l.SegmentsLost)}, {names.FabricSuspected, boolean(l.Suspected)},
		} {
			p.send(v.metric, v.value, l.Leaf, l.Spine, direction, strconv.Itoa(l.Index))
		}
	}
	for metric, counts := range map[*names.Metric]map[string]uint64{names.PlannerMoves: f.Moves, names.PlannerRefused: f.Refused} {
		for _, reason := range slices.Sorted(maps.Keys(counts)) {
			p.send(metric, float64(counts[reason]), reason)
		}
	}
	p.send(names.PlannerJobs, float64(f.Jobs))
	p.send(names.PlannerStreams, float64(f.Streams))
	p.send(names.PlannerProbers, float64(f.Probers))
	p.end()
}
