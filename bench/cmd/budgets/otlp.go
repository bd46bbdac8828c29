package main

import (
	"bytes"
	"fmt"
	"os/exec"
	"strconv"
	"strings"
)

// otlpSpan reports the encoder's own benchmark: the encoder is not exported.
func otlpSpan() ([]row, error) {
	m, err := packageBenchmark("./exporters/otlp", "^BenchmarkSpan$/^fixed_layout$")
	if err != nil {
		return nil, err
	}
	return []row{
		{"otlp_span_encode", m["ns/span"], "ns", 500},
		{"otlp_span_encode_allocs", m["allocs/op"], "allocs", 0},
	}, nil
}

// packageBenchmark runs one benchmark of a package of the root module and
// returns each of its metrics by unit, the least of all rounds.
func packageBenchmark(pkg, pattern string) (map[string]float64, error) {
	root, err := rootModule()
	if err != nil {
		return nil, err
	}
	cmd := exec.Command("go", "test", "-run", "^$", "-bench", pattern, "-benchmem",
		"-benchtime", "200ms", "-count", strconv.Itoa(rounds), pkg)
	cmd.Dir = root
	out, err := cmd.CombinedOutput()
	if err != nil {
		return nil, fmt.Errorf("%v: %w: %s", cmd, err, bytes.TrimSpace(out))
	}
	least := map[string]float64{}
	for line := range strings.Lines(string(out)) {
		f := strings.Fields(line)
		if len(f) < 4 || !strings.HasPrefix(f[0], "Benchmark") {
			continue
		}
		for i := 2; i+1 < len(f); i += 2 { // name, iterations, then values with units
			v, err := strconv.ParseFloat(f[i], 64)
			if err != nil {
				return nil, fmt.Errorf("%v printed %q: %w", cmd, line, err)
			}
			if was, ok := least[f[i+1]]; !ok || v < was {
				least[f[i+1]] = v
			}
		}
	}
	if len(least) == 0 {
		return nil, fmt.Errorf("%v ran no benchmark", cmd)
	}
	return least, nil
}

// rootModule returns the directory of the module under measurement.
func rootModule() (string, error) {
	out, err := exec.Command("go", "list", "-m", "-f", "{{.Dir}}", "github.com/lockstep-ccl/lockstep").Output()
	if err != nil {
		return "", fmt.Errorf("go list -m (run this inside bench/): %w", err)
	}
	return strings.TrimSpace(string(out)), nil
}
