package dashboards

import (
	"context"
	"errors"
	"fmt"
	"math"
	"net/http"
	"strings"
	"time"

	"github.com/prometheus/client_golang/api"
	promapi "github.com/prometheus/client_golang/api/prometheus/v1"
	"github.com/prometheus/common/model"
)

// Vars stand in for what Grafana fills in. A selector that is empty selects all.
type Vars struct {
	Job          string
	Communicator string
	Collective   string
	Node         string // instance of an agent
	GPUs, NICs   bool   // there are some: Check asks for them, too
	Fabric       bool   // there is a planner: likewise
	Hosts        bool   // there is a job of several machines whose supervisors have pages: likewise

	// Range is how far back a panel looks; default 5 min. A panel that showed
	// something at any time in it is not empty: an incident may be over.
	Range time.Duration
	// RateInterval is Grafana's $__rate_interval, at least four scrape
	// intervals; default 1 min.
	RateInterval time.Duration
}

func (v *Vars) setDefaults() {
	for _, s := range []*string{&v.Job, &v.Communicator, &v.Collective, &v.Node} {
		if *s == "" {
			*s = ".*"
		}
	}
	if v.Range == 0 {
		v.Range = 5 * time.Minute
	}
	if v.RateInterval == 0 {
		v.RateInterval = time.Minute
	}
}

// Fill replaces Grafana's variables in an expression.
func (v Vars) Fill(expr string) string {
	v.setDefaults()
	return strings.NewReplacer(
		"$training_job", v.Job,
		"$communicator", v.Communicator,
		"$collective", v.Collective,
		"$node", v.Node,
		"$__rate_interval", model.Duration(v.RateInterval).String(),
		"$__interval", model.Duration(v.RateInterval).String(),
	).Replace(expr)
}

// maxPoints bounds the points of a query over Vars.Range.
const maxPoints = 300

// Check runs the query of every panel against the Prometheus at url, asked by the given client
// (nil: one without a password), over v.Range until now, and returns an error that names each one that fails or
// returns no number.
func Check(ctx context.Context, url string, by *http.Client, v Vars) error {
	v.setDefaults()
	client, err := api.NewClient(api.Config{Address: url, Client: by})
	if err != nil {
		return fmt.Errorf("check dashboards: %w", err)
	}
	prom := promapi.NewAPI(client)
	now := time.Now()
	span := promapi.Range{Start: now.Add(-v.Range), End: now, Step: max(v.Range/maxPoints, 100*time.Millisecond)}
	var errs []error
	for _, q := range Queries() {
		planner := strings.Contains(q.Expr, "lockstep_fabric_") || strings.Contains(q.Expr, "lockstep_planner_")
		hosts := strings.Contains(q.Expr, "lockstep_coordinator_") || strings.Contains(q.Expr, "lockstep_supervisor_")
		if strings.Contains(q.Expr, "lockstep_gpu_") && !v.GPUs || strings.Contains(q.Expr, "lockstep_nic_") && !v.NICs || planner && !v.Fabric ||
			hosts && !v.Hosts {
			continue
		}
		result, _, _, err := prom.QueryRange(ctx, v.Fill(q.Expr), span)
		switch {
		case ctx.Err() != nil:
			return fmt.Errorf("check dashboards: %w", context.Cause(ctx))
		case err != nil:
			errs = append(errs, fmt.Errorf("%s, panel %q: query fails: %w: %s", q.Dashboard, q.Panel, err, q.Expr))
		case empty(result):
			errs = append(errs, fmt.Errorf("%s, panel %q: no data: %s", q.Dashboard, q.Panel, q.Expr))
		}
	}
	return errors.Join(errs...)
}

// Red returns an error that names each panel that is red now: of a healthy job, none is.
func Red(ctx context.Context, url string, by *http.Client, v Vars) error {
	v.setDefaults()
	client, err := api.NewClient(api.Config{Address: url, Client: by})
	if err != nil {
		return fmt.Errorf("look at dashboards: %w", err)
	}
	prom := promapi.NewAPI(client)
	var errs []error
	for _, b := range boards() {
		for _, r := range b.rows {
			for i := range r.panels {
				p := &r.panels[i]
				for _, t := range p.targets {
					result, _, _, err := prom.Query(ctx, v.Fill(t.expr), time.Now())
					if ctx.Err() != nil {
						return fmt.Errorf("look at dashboards: %w", context.Cause(ctx))
					}
					if err != nil {
						errs = append(errs, fmt.Errorf("%s, panel %q: query fails: %w: %s", b.uid, p.title, err, t.expr))
						continue
					}
					samples, _ := result.(model.Vector)
					for _, s := range samples {
						if x := float64(s.Value); s.Histogram == nil && p.color(x) == bad {
							errs = append(errs, fmt.Errorf("%s, panel %q: %v is red: %v", b.uid, p.title, x, s.Metric))
						}
					}
				}
			}
		}
	}
	return errors.Join(errs...)
}

// color is that of a value in a panel.
func (p *panel) color(x float64) string {
	for _, v := range p.values {
		if v.value == model.SampleValue(x).String() {
			return v.color
		}
	}
	c := good
	for _, s := range p.steps {
		if x >= s.from {
			c = s.color
		}
	}
	return c
}

func empty(result model.Value) bool {
	m, ok := result.(model.Matrix)
	if !ok {
		return true
	}
	for _, s := range m {
		if len(s.Histograms) > 0 {
			return false
		}
		for _, p := range s.Values {
			if !math.IsNaN(float64(p.Value)) {
				return false
			}
		}
	}
	return true
}
