package dashboards

import (
	"fmt"
	"strings"

	"github.com/lockstep-ccl/lockstep/exporters/names"
)

// Matchers of the variables.
const (
	inJob    = `training_job=~"$training_job"`
	inComm   = `communicator=~"$communicator"`
	inColl   = `collective=~"$collective"`
	onNode   = `instance=~"$node"`
	interval = `$__rate_interval`
)

// of selects a metric's series.
func of(m *names.Metric, matchers ...string) string { return series(m.Name, matchers) }

func series(name string, matchers []string) string {
	if len(matchers) == 0 {
		return name
	}
	return name + "{" + strings.Join(matchers, ", ") + "}"
}

// rate is a counter's or histogram's growth a second.
func rate(m *names.Metric, matchers ...string) string { return rated(m.Name, matchers) }

func rated(name string, matchers []string) string {
	return "rate(" + series(name, matchers) + "[" + interval + "])"
}

// sum, highest and lowest fold expr by labels ("" folds it into one).
func sum(by, expr string) string     { return fold("sum", by, expr) }
func highest(by, expr string) string { return fold("max", by, expr) }
func lowest(by, expr string) string  { return fold("min", by, expr) }

func fold(op, by, expr string) string {
	if by == "" {
		return op + "(" + expr + ")"
	}
	return op + " by (" + by + ") (" + expr + ")"
}

// quantile is a histogram's quantile, from its native form where that is
// scraped, else from its classic one.
func quantile(q float64, m *names.Metric, by string, matchers ...string) string {
	le := strings.TrimPrefix(by+", le", ", ")
	return fmt.Sprintf("histogram_quantile(%g, %s) or histogram_quantile(%g, %s)",
		q, sum(by, rate(m, matchers...)), q, sum(le, rated(m.Name+"_bucket", matchers)))
}

// spent is the seconds a second that a histogram's observations add up to.
func spent(m *names.Metric, by string, matchers ...string) string {
	return fmt.Sprintf("(%s or %s)",
		sum(by, "histogram_sum("+rate(m, matchers...)+")"), sum(by, rated(m.Name+"_sum", matchers)))
}

// often is the observations a second.
func often(m *names.Metric, by string, matchers ...string) string {
	return fmt.Sprintf("(%s or %s)",
		sum(by, "histogram_count("+rate(m, matchers...)+")"), sum(by, rated(m.Name+"_count", matchers)))
}

// average is the mean observation.
func average(m *names.Metric, by string, matchers ...string) string {
	return spent(m, by, matchers...) + " / " + often(m, by, matchers...)
}

// waitShare is the share of the time inside collectives that is waiting. A scrape reads one of the two
// before the other, so that for a moment there may be more waiting than time.
func waitShare(by string, matchers ...string) string {
	return "clamp_max(" + spent(names.CollectiveWait, by, matchers...) + " / " + spent(names.CollectiveDuration, by, matchers...) + ", 1)"
}
