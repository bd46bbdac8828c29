// Package promcheck checks PromQL against the metrics that exporters/names
// defines: every metric must exist, every label must be one that the metric
// has, and rate is for counters. It is what makes a renamed metric or label a
// failing test of rules and dashboards instead of an empty panel.
//
// In: an expression. Out: an error that names what is wrong, and the labels
// that the result carries. It knows nothing of values.
package promcheck

import (
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/prometheus/common/model"
	"github.com/prometheus/prometheus/model/labels"
	"github.com/prometheus/prometheus/promql/parser"

	"github.com/lockstep-ccl/lockstep/exporters/names"
)

// Labels that Prometheus adds to every scraped series.
var scraped = []string{"job", "instance"}

// foreign metrics are Prometheus's own and those of client_golang's process
// collector, which every component serves.
var foreign = map[string][]string{
	"up":                            nil,
	"process_cpu_seconds_total":     nil,
	"process_resident_memory_bytes": nil,
	"ALERTS": slices.Concat([]string{"alertname", "alertstate", "severity"},
		names.IncidentInfo.Labels, names.NICPortUp.Labels, names.ConnBroken.Labels),
}

// Recorded is the result of a recording rule, which other expressions may name.
type Recorded struct {
	Name   string
	Labels []string
}

// Check parses an expression and returns every reason why it cannot be right.
func Check(query string, recorded ...Recorded) error {
	_, err := Labels(query, recorded...)
	return err
}

// Labels checks an expression like Check and returns, sorted, the labels that
// its result can carry.
func Labels(query string, recorded ...Recorded) ([]string, error) {
	expr, err := parser.NewParser(parser.Options{}).ParseExpr(query)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", query, err)
	}
	c := checker{recorded: recorded}
	out := c.visit(expr)
	if len(c.errs) > 0 {
		return nil, fmt.Errorf("%s: %w", query, errors.Join(c.errs...))
	}
	slices.Sort(out)
	return slices.Compact(out), nil
}

type checker struct {
	recorded []Recorded
	errs     []error
}

func (c *checker) errorf(format string, args ...any) {
	c.errs = append(c.errs, fmt.Errorf(format, args...))
}

// visit checks e and returns the labels that it can carry.
func (c *checker) visit(e parser.Expr) []string {
	switch e := e.(type) {
	case *parser.VectorSelector:
		return c.selector(e)
	case *parser.MatrixSelector:
		return c.visit(e.VectorSelector)
	case *parser.SubqueryExpr:
		return c.visit(e.Expr)
	case *parser.ParenExpr:
		return c.visit(e.Expr)
	case *parser.UnaryExpr:
		return c.visit(e.Expr)
	case *parser.StepInvariantExpr:
		return c.visit(e.Expr)
	case *parser.AggregateExpr:
		return c.aggregate(e)
	case *parser.BinaryExpr:
		return c.binary(e)
	case *parser.Call:
		return c.call(e)
	}
	return nil // literals
}

// lookup finds the metric of a series name, and the labels of its series.
func (c *checker) lookup(name string) (*names.Metric, []string, bool) {
	for _, r := range c.recorded {
		if r.Name == name {
			return nil, r.Labels, true
		}
	}
	if ls, ok := foreign[name]; ok {
		return nil, slices.Concat(ls, scraped), true
	}
	for _, m := range names.Metrics() {
		if m.Name == name {
			return m, slices.Concat(m.Labels, scraped), true
		}
		if m.Type != names.Histogram {
			continue
		}
		switch name {
		case m.Name + "_bucket":
			return m, slices.Concat(m.Labels, scraped, []string{labels.BucketLabel}), true
		case m.Name + "_sum", m.Name + "_count":
			return m, slices.Concat(m.Labels, scraped), true
		}
	}
	return nil, nil, false
}

func (c *checker) selector(v *parser.VectorSelector) []string {
	if v.Name == "" {
		c.errorf("%s names no metric", v)
		return nil
	}
	_, ls, ok := c.lookup(v.Name)
	if !ok {
		c.errorf("metric %s is not defined in exporters/names", v.Name)
		return nil
	}
	for _, m := range v.LabelMatchers {
		if m.Name != model.MetricNameLabel && !slices.Contains(ls, m.Name) {
			c.errorf("%s has no label %s", v.Name, m.Name)
		}
	}
	return ls
}

func (c *checker) need(what string, have, want []string) {
	for _, l := range want {
		if !slices.Contains(have, l) {
			c.errorf("%s: no label %s there, only %s", what, l, strings.Join(have, ", "))
		}
	}
}

func (c *checker) aggregate(e *parser.AggregateExpr) []string {
	in := c.visit(e.Expr)
	c.need(e.Op.String(), in, e.Grouping)
	switch {
	case e.Op == parser.TOPK || e.Op == parser.BOTTOMK || e.Op == parser.LIMITK:
		return in
	case e.Without:
		return without(in, e.Grouping)
	}
	return slices.Clone(e.Grouping)
}

func (c *checker) binary(e *parser.BinaryExpr) []string {
	left, right := c.visit(e.LHS), c.visit(e.RHS)
	if e.VectorMatching == nil { // a scalar on one side
		return slices.Concat(left, right)
	}
	m := e.VectorMatching
	if m.On {
		c.need(e.Op.String()+" on, left side", left, m.MatchingLabels)
		c.need(e.Op.String()+" on, right side", right, m.MatchingLabels)
	}
	switch {
	case e.Op == parser.LAND || e.Op == parser.LUNLESS:
		return left
	case e.Op == parser.LOR:
		return slices.Concat(left, right)
	case m.Card == parser.CardManyToOne:
		c.need("group_left", right, m.Include)
		return slices.Concat(left, m.Include)
	case m.Card == parser.CardOneToMany:
		c.need("group_right", left, m.Include)
		return slices.Concat(right, m.Include)
	case m.On:
		return slices.Clone(m.MatchingLabels)
	}
	return without(left, m.MatchingLabels)
}

// Functions that mean something for counters (and histograms) only, and for
// gauges only.
var (
	ofCounters = []string{"rate", "irate", "increase"}
	ofGauges   = []string{"delta", "idelta", "deriv", "predict_linear"}
)

func (c *checker) call(e *parser.Call) []string {
	var out []string
	for _, arg := range e.Args {
		out = append(out, c.visit(arg)...)
		matrix, ok := arg.(*parser.MatrixSelector)
		if !ok {
			continue
		}
		m, _, _ := c.lookup(matrix.VectorSelector.(*parser.VectorSelector).Name)
		if m == nil {
			continue
		}
		if slices.Contains(ofCounters, e.Func.Name) && m.Type == names.Gauge {
			c.errorf("%s of %s, a gauge", e.Func.Name, m)
		}
		if slices.Contains(ofGauges, e.Func.Name) && m.Type != names.Gauge {
			c.errorf("%s of %s, a %s", e.Func.Name, m, m.Type)
		}
	}
	switch e.Func.Name {
	case "histogram_quantile":
		return without(out, []string{labels.BucketLabel})
	case "label_replace", "label_join":
		if dst, ok := e.Args[1].(*parser.StringLiteral); ok {
			return append(out, dst.Val)
		}
	case "vector", "scalar", "time":
		return nil
	}
	return out
}

func without(ls, drop []string) []string {
	return slices.DeleteFunc(slices.Clone(ls), func(l string) bool { return slices.Contains(drop, l) })
}
