// Command budgets measures what DESIGN.md's budgets promise and needs no GPU.
// It prints one line each,
//
//	NAME value unit budget ratio ok|OVER
//
// where ratio is value ÷ budget, and exits with 1 when one is over. Times are
// the best of several rounds: on a shared machine everything that disturbs a
// measurement makes it longer. The figures of incidents (fault → verdict,
// → job running again) come from lockstep demo.
package main

import (
	"context"
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"testing"
)

// row is one line of the table.
type row struct {
	name   string
	value  float64
	unit   string
	budget float64
}

// binary is the program under measurement, "" to build it from the root module.
var binary string

// lockstep returns the program under measurement; one that it builds lies in dir.
func lockstep(ctx context.Context, dir string) (string, error) {
	if binary != "" {
		return filepath.Abs(binary)
	}
	root, err := rootModule()
	if err != nil {
		return "", err
	}
	built := filepath.Join(dir, "lockstep")
	cmd := exec.CommandContext(ctx, "go", "build", "-C", root, "-o", built, "./cmd/lockstep")
	if out, err := cmd.CombinedOutput(); err != nil {
		return "", fmt.Errorf("%v: %w: %s", cmd, err, out)
	}
	return built, nil
}

// measurement yields the rows of one budget.
type measurement struct {
	name string
	run  func() ([]row, error)
}

var measurements = []measurement{
	{"record_append", recordAppend},
	{"record_append_c", recordAppendC},
	{"nccl_plugin", ncclCall},
	{"windowmon", windowMonitor},
	{"rdma_monitor", monitorAtLineRate},
	{"recorder_overhead", recorderOverhead},
	{"otlp_span", otlpSpan},
	{"agent", func() ([]row, error) { return agentLoad("agent", 1) }},
	{"agent_parts", func() ([]row, error) { return agentLoad("agent_parts", 5) }},
	{"diagnosis", diagnosisPass},
	{"plan", plan},
	{"recording", recording},
}

func main() {
	if r := os.Getenv(rankEnv); r != "" {
		me, err := strconv.Atoi(r)
		if err == nil {
			err = rank(context.Background(), me)
		}
		if err != nil {
			fmt.Fprintf(os.Stderr, "budgets: rank %s: %v\n", r, err)
			os.Exit(1)
		}
		return
	}
	testing.Init()
	flag.StringVar(&binary, "lockstep", "", "the lockstep binary to measure (default: build one)")
	run := flag.String("run", "", "measure only the budgets whose name matches this regular expression")
	flag.Parse()
	over, err := table(os.Stdout, *run)
	if err != nil {
		fmt.Fprintln(os.Stderr, "budgets:", err)
		os.Exit(2)
	}
	if over {
		os.Exit(1)
	}
}

// table measures and prints, and reports whether any budget is exceeded. A
// measurement that fails does not keep the others from running.
func table(w io.Writer, pattern string) (over bool, err error) {
	match, err := regexp.Compile(pattern)
	if err != nil {
		return false, fmt.Errorf("-run: %w", err)
	}
	for _, m := range measurements {
		if !match.MatchString(m.name) {
			continue
		}
		rows, e := m.run()
		if e != nil {
			fmt.Fprintf(os.Stderr, "budgets: %s: %v\n", m.name, e)
			err = fmt.Errorf("not everything could be measured")
			continue
		}
		for _, r := range rows {
			fmt.Fprintln(w, r)
			over = over || r.value > r.budget
		}
	}
	return over, err
}

func (r row) String() string {
	ratio, verdict := "-", "ok" // nothing is a fraction of a budget of zero
	if r.budget != 0 {
		ratio = fmt.Sprintf("%.2f", r.value/r.budget)
	}
	if r.value > r.budget {
		verdict = "OVER"
	}
	return fmt.Sprintf("%-36s %10.4g %-8s %8.4g %6s %s", r.name, r.value, r.unit, r.budget, ratio, verdict)
}

// rounds is how often a time is measured; the best counts.
const rounds = 5

// fastest runs a benchmark several times and returns its best time per
// operation in nanoseconds, and its allocations per operation.
func fastest(f func(b *testing.B)) (ns float64, allocs int64, err error) {
	for i := range rounds {
		r := testing.Benchmark(f)
		if r.N == 0 {
			return 0, 0, fmt.Errorf("the benchmark failed")
		}
		if t := float64(r.T.Nanoseconds()) / float64(r.N); i == 0 || t < ns {
			ns = t
		}
		allocs = max(allocs, r.AllocsPerOp())
	}
	return ns, allocs, nil
}
