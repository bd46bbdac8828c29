package preflightcmd

import (
	"bytes"
	"errors"
	"fmt"
	"math"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/lockstep-ccl/lockstep/preflight"
)

// report is that of ranks on nodes, of which rank 4 sends slowly.
func report(nodes, per int) *preflight.Report {
	n := nodes * per
	r := &preflight.Report{Verdict: preflight.VerdictBad, BadEdges: n - 1, Bad: []string{"n1"}, TypicalTogether: 3e9}
	r.Findings = []preflight.Finding{{Kind: "source", Text: "everything that rank 4 (n1) sends"}}
	for src := range n {
		r.Ranks = append(r.Ranks, preflight.Rank{Node: fmt.Sprintf("n%d", src/per), Memory: 20e9 + float64(src), Compute: 8e9})
		bandwidth, latency, faults := make([]preflight.Value, n), make([]preflight.Value, n), make([]preflight.Fault, n)
		for dst := range n {
			bandwidth[dst], latency[dst] = 20e9+preflight.Value(src), 30e-6
			if src == 4 {
				bandwidth[dst], faults[dst] = 5e9, preflight.LowBandwidth
			}
			if src == dst {
				bandwidth[dst], latency[dst], faults[dst] = preflight.Value(math.NaN()), preflight.Value(math.NaN()), 0
			}
		}
		r.Bandwidth, r.Latency, r.Faults = append(r.Bandwidth, bandwidth), append(r.Latency, latency), append(r.Faults, faults)
	}
	for _, kind := range []string{r.Kind(0, 1), r.Kind(0, n-1)} {
		r.Typical = append(r.Typical, preflight.Typical{Kind: kind, Edges: n, Bandwidth: 20e9, Latency: 30e-6})
	}
	return r
}

func TestPicture(t *testing.T) {
	for _, per := range []int{3, 40} {
		r := report(8, per)
		var out bytes.Buffer
		if err := show(r, &out, true); err != nil {
			t.Fatal(err)
		}
		text := out.String()
		for line := range strings.Lines(text) {
			if want := 8*per - 1; strings.HasPrefix(line, "     4 ") && per == 3 && strings.Count(line, "!") != want {
				t.Errorf("row 4 has %d marks, want %d: %s", strings.Count(line, "!"), want, line)
			}
		}
		for _, want := range []string{
			"slowest edges:\n  rank 4 → rank 0: 5.00 GB/s, 30.0 µs (25 % of what is typical)", "BAD\x1b[0m everything that rank 4 (n1) sends", "memory copies of ",
			fmt.Sprintf("\nBAD: %d ranks on 8 nodes; within a node 20.00 GB/s, 30.0 µs; between nodes", 8*per), "; all at once 3.00 GB/s a rank; ",
		} {
			if !strings.Contains(text, want) {
				t.Errorf("no %q in:\n%s", want, text)
			}
		}
		// Pairs have series of their own as long as they are few.
		if err := textfile(r, filepath.Join(t.TempDir(), "p.prom")); err != nil {
			t.Fatal(err)
		}
	}
}

// TestUnmeasured: where ranks did not meet there is a report all the same, and it can be shown.
func TestUnmeasured(t *testing.T) {
	var out bytes.Buffer
	r := preflight.Unmeasured(3, time.Now(), errors.New("time is up"))
	if err := show(r, &out, false); err != nil || !strings.Contains(out.String(), "INCOMPLETE: 3 ranks") {
		t.Errorf("%v\n%s", err, &out)
	}
	if err := textfile(r, filepath.Join(t.TempDir(), "p.prom")); err != nil {
		t.Fatal(err)
	}
}
