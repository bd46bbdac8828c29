package preflightcmd

import (
	"fmt"
	"slices"
	"strconv"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/lockstep-ccl/lockstep/exporters/names"
	"github.com/lockstep-ccl/lockstep/preflight"
)

// Bounds of what is exported: of more ranks there are no series of pairs, of many
// more none of ranks.
const (
	maxPairRanks = 32
	maxRanks     = 4096
)

// textfile writes the report for a textfile collector, at once and readable by
// all: what collects it is another user.
func textfile(r *preflight.Report, path string) error {
	reg := prometheus.NewRegistry()
	gauge := func(m *names.Metric) *prometheus.GaugeVec {
		v := prometheus.NewGaugeVec(prometheus.GaugeOpts{Name: m.Name, Help: m.Help}, m.Labels)
		reg.MustRegister(v)
		return v
	}
	set := func(m *names.Metric, v float64) { gauge(m).WithLabelValues().Set(v) }
	truth := func(yes bool) float64 {
		if yes {
			return 1
		}
		return 0
	}
	set(names.PreflightGood, truth(r.Verdict == preflight.VerdictGood))
	set(names.PreflightEnd, float64(r.Began.UnixMilli())/1e3+r.Seconds)
	set(names.PreflightDuration, r.Seconds)
	set(names.PreflightRanks, float64(len(r.Ranks)))
	set(names.PreflightBadEdges, float64(r.BadEdges))
	node := gauge(names.PreflightNodeGood)
	for _, name := range slices.Concat(r.Good, r.Bad) {
		node.WithLabelValues(name).Set(truth(slices.Contains(r.Good, name)))
	}
	n := len(r.Ranks)
	if n <= maxPairRanks {
		bandwidth, latency := gauge(names.PreflightBandwidth), gauge(names.PreflightLatency)
		for src := range n {
			for dst := range n {
				from, to := strconv.Itoa(src), strconv.Itoa(dst)
				if v := float64(r.Bandwidth[src][dst]); v >= 0 { // not of NaN
					bandwidth.WithLabelValues(from, to).Set(v)
				}
				if v := float64(r.Latency[src][dst]); v >= 0 {
					latency.WithLabelValues(from, to).Set(v)
				}
			}
		}
	}
	if n <= maxRanks {
		bandwidth, latency := gauge(names.PreflightRankBandwidth), gauge(names.PreflightRankLatency)
		memory, compute := gauge(names.PreflightRankMemory), gauge(names.PreflightRankCompute)
		for i, rank := range r.Ranks {
			put := func(g *prometheus.GaugeVec, v float64) {
				if v > 0 {
					g.WithLabelValues(strconv.Itoa(i), rank.Node).Set(v)
				}
			}
			put(bandwidth, medianOf(i, r.Bandwidth))
			put(latency, medianOf(i, r.Latency))
			put(memory, rank.Memory)
			put(compute, rank.Compute)
		}
	}
	if err := prometheus.WriteToTextfile(path, reg); err != nil {
		return fmt.Errorf("write %s: %w", path, err)
	}
	return nil
}

// medianOf is the median of a rank's row and column, 0 when both are empty.
func medianOf(rank int, m [][]preflight.Value) float64 {
	var v []float64
	for i := range m {
		for _, x := range []preflight.Value{m[rank][i], m[i][rank]} {
			if x >= 0 { // not of NaN
				v = append(v, float64(x))
			}
		}
	}
	if len(v) == 0 {
		return 0
	}
	slices.Sort(v)
	return v[len(v)/2]
}
