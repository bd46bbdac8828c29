package main

import (
	"os"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/prometheus/promql/parser"

	"github.com/lockstep-ccl/lockstep/exporters/names"
)

func TestReferenceIsNotStale(t *testing.T) {
	committed, err := os.ReadFile("../../../../docs/metrics.md")
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(string(committed), Reference()); diff != "" {
		t.Errorf("docs/metrics.md is stale, run go generate ./exporters/names (-committed +generated):\n%s", diff)
	}
}

func TestExampleQueriesParse(t *testing.T) {
	defined := map[string]bool{}
	for _, m := range names.Metrics() {
		defined[m.Name] = true
	}
	p := parser.NewParser(parser.Options{})
	for m, query := range examples {
		expr, err := p.ParseExpr(query)
		if err != nil {
			t.Errorf("example of %s: %v", m, err)
			continue
		}
		parser.Inspect(expr, func(n parser.Node, _ []parser.Node) error {
			if v, ok := n.(*parser.VectorSelector); ok && !defined[v.Name] {
				t.Errorf("example of %s names %q, which is not a metric", m, v.Name)
			}
			return nil
		})
	}
}
