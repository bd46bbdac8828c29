package preflightcmd

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/alecthomas/kong"
	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"
	"go.uber.org/goleak"

	"github.com/lockstep-ccl/lockstep/ccl/ccltest"
	"github.com/lockstep-ccl/lockstep/preflight"
)

// The test binary is also the program whose children are the ranks. faultEnv
// holds a fault, as fmt.Sscan reads it: what, communicator's ranks ("1-2"), source and
// destination (0 or 1 there).
const (
	mainEnv  = "PREFLIGHT_TEST_MAIN"
	faultEnv = "PREFLIGHT_TEST_FAULT"
)

func TestMain(m *testing.M) {
	if os.Getenv(mainEnv) == "" {
		goleak.VerifyTestMain(m)
	}
	var c Cmd
	k := kong.Parse(&c, kong.Exit(func(int) { os.Exit(2) }))
	k.BindTo(context.Background(), (*context.Context)(nil))
	k.BindTo(os.Stdout, (*io.Writer)(nil))
	for fault := range strings.SplitSeq(os.Getenv(faultEnv), ",") {
		inject(&c, fault)
	}
	err := k.Run()
	if bad := (*BadError)(nil); errors.As(err, &bad) {
		fmt.Fprintln(os.Stderr, bad)
		os.Exit(preflight.StatusBad)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

// stopper ends or stops its process in the midst of measuring.
type stopper struct {
	*ccltest.Injector
	asked  atomic.Int64
	signal syscall.Signal
}

func (s *stopper) Version() uint64 {
	if s.asked.Add(1) == 100 { // it is asked on each operation, and a pair has more of them
		syscall.Kill(os.Getpid(), s.signal)
	}
	return s.Injector.Version()
}

func inject(c *Cmd, fault string) {
	var what, ranks string
	var src, dst int
	if fault == "" {
		return
	}
	if _, err := fmt.Sscan(fault, &what, &ranks, &src, &dst); err != nil {
		panic(err)
	}
	in, _ := c.faults.(*ccltest.Injector)
	if in == nil {
		in = ccltest.New()
		c.faults = in
	}
	comm := "preflight " + ranks
	switch what {
	case "throttle":
		in.Throttle(comm, src, dst, 8e4)
	case "delay":
		in.Delay(comm, src, dst, 100*time.Millisecond)
	case "stall":
		in.Stall(comm, src, dst)
	case "stop", "kill": // the rank src of the job
		signal := map[string]syscall.Signal{"stop": syscall.SIGSTOP, "kill": syscall.SIGKILL}[what]
		if os.Getenv("LOCKSTEP_RANK") == fmt.Sprint(src) {
			c.faults = &stopper{Injector: in, signal: signal}
		}
	default:
		panic(fault)
	}
}

// check runs preflight with a tolerance that noise of a shared machine is far from, and time-outs that
// only what never answers exceeds.
func check(t *testing.T, status int, fault string, args ...string) (*preflight.Report, string) {
	t.Helper()
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(t.TempDir(), "report.json")
	args = append([]string{"--tolerance", "1000", "--time", "10ms", "--trips", "20", "--size", "1M", "--pair-timeout", "1m", "--json", file}, args...)
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, exe, args...)
	cmd.Env = append(os.Environ(), mainEnv+"=1", faultEnv+"="+fault, "LOCKSTEP_RUNTIME_DIR="+t.TempDir())
	var out, errs bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &errs
	err = cmd.Run()
	if got := cmd.ProcessState.ExitCode(); got != status {
		t.Fatalf("%v: exit status %d, want %d: %v\n%s%s", args, got, status, err, out.String(), errs.String())
	}
	b, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	r := &preflight.Report{}
	if err := json.Unmarshal(b, r); err != nil {
		t.Fatal(err)
	}
	return r, out.String()
}

// only fails the test unless there is one finding, of this kind and text.
func only(t *testing.T, r *preflight.Report, kind, text string, why ...string) {
	t.Helper()
	if len(r.Findings) != 1 || r.Findings[0].Kind != kind || !strings.Contains(r.Findings[0].Text, text) || !slices.Equal(r.Findings[0].Why, why) {
		t.Fatalf("want one finding, a %s with %q because of %v; got %+v", kind, text, why, r.Findings)
	}
}

func TestHealthyRanksAreGood(t *testing.T) {
	dir := t.TempDir()
	for _, nodes := range []string{"1", "2"} {
		prom, good := filepath.Join(dir, nodes+".prom"), filepath.Join(dir, nodes+".good")
		r, out := check(t, 0, "", "-n", "5", "--nodes", nodes, "--together", "--prom", prom, "--good", good)
		if r.Verdict != "good" || len(r.Findings) != 0 || len(r.Bad) != 0 || !strings.Contains(out, "\nGOOD: 5 ranks on "+nodes) {
			t.Errorf("%s nodes: %+v\n%s", nodes, r, out)
		}
		for src := range 5 {
			if r.Ranks[src].Memory <= 0 || r.Ranks[src].Compute <= 0 || r.Ranks[src].Together <= 0 {
				t.Errorf("rank %d: %+v", src, r.Ranks[src])
			}
			for dst := range 5 {
				if src != dst && (r.Bandwidth[src][dst] <= 0 || r.Latency[src][dst] <= 0 || r.LatencyP99[src][dst] < r.Latency[src][dst]) {
					t.Errorf("%d → %d: %v, %v, %v", src, dst, r.Bandwidth[src][dst], r.Latency[src][dst], r.LatencyP99[src][dst])
				}
			}
		}
		list, err := os.ReadFile(good)
		if err != nil || strings.Join(r.Good, "\n")+"\n" != string(list) || fmt.Sprint(len(r.Good)) != nodes {
			t.Errorf("good nodes %q, %v; want %q", list, err, r.Good)
		}
		f, err := os.Open(prom)
		if err != nil {
			t.Fatal(err)
		}
		parser := expfmt.NewTextParser(model.UTF8Validation)
		families, err := parser.TextToMetricFamilies(f)
		f.Close()
		if err != nil {
			t.Fatal(err)
		}
		if n := len(families["lockstep_preflight_bandwidth_bytes_per_second"].GetMetric()); n != 20 {
			t.Errorf("bandwidth of %d pairs, want 20", n)
		}
		if v := families["lockstep_preflight_good"].GetMetric()[0].GetGauge().GetValue(); v != 1 {
			t.Errorf("lockstep_preflight_good is %v", v)
		}
	}
}

func TestThrottledEdgeIsNamed(t *testing.T) {
	for _, nodes := range []string{"1", "4"} {
		// Messages grow until one takes 25 ms: less would measure how long a busy machine's scheduler takes.
		r, out := check(t, preflight.StatusBad, "throttle 1-2 1 0", "-n", "4", "--nodes", nodes, "--tolerance", "300", "--time", "200ms", "--size", "16M")
		for i, f := range r.Findings { // a throttle keeps small messages, too, and on a busy machine for long
			r.Findings[i].Why = slices.DeleteFunc(f.Why, func(why string) bool { return why == "latency" })
		}
		only(t, r, "connection", "rank 2 (", "bandwidth")
		if f := r.Findings[0]; *f.Source != 2 || *f.Destination != 1 || r.BadEdges != 1 {
			t.Errorf("%+v", r.Findings)
		}
		if !strings.Contains(out, "BAD rank 2") || !strings.Contains(out, "!") {
			t.Error(out)
		}
		if nodes == "4" && len(r.Good) != 2 {
			t.Errorf("good nodes %q; want those of ranks 0 and 3", r.Good)
		}
	}
}

func TestLateEdgeIsNamed(t *testing.T) {
	r, _ := check(t, preflight.StatusBad, "delay 0-3 0 1", "-n", "4", "--trips", "5", "--tolerance", "1000000", "--max-latency", "40ms")
	only(t, r, "connection", "rank 0 (", "latency")
	if f := r.Findings[0]; !f.BothWays || *f.Source+*f.Destination != 3 || *f.Source**f.Destination != 0 {
		t.Errorf("want ranks 0 and 3 both ways, got %+v", f)
	}
}

func TestBlockedEdgeIsNamedAndNotWaitedFor(t *testing.T) {
	for _, nodes := range []string{"1", "3"} {
		r, out := check(t, preflight.StatusBad, "stall 0-2 0 1", "-n", "3", "--nodes", nodes, "--trips", "1", "--pair-timeout", "4s")
		only(t, r, "connection", "rank 0 (", "blocked")
		if f := r.Findings[0]; *f.Source != 0 || *f.Destination != 2 {
			t.Errorf("%+v", r.Findings)
		}
		if r.Bandwidth[1][2] <= 0 || r.Bandwidth[2][1] <= 0 || r.Bandwidth[0][1] <= 0 {
			t.Errorf("other pairs were not measured: %v", r.Bandwidth)
		}
		if !strings.Contains(out, "X!") {
			t.Error(out)
		}
	}
}

func TestStoppedRankIsNamed(t *testing.T) {
	r, out := check(t, preflight.StatusBad, "stop - 2 0", "-n", "4", "--pair-timeout", "3s")
	only(t, r, "rank", "rank 2 (", "gone")
	if r.Error == "" || !strings.Contains(out, "does not answer") || !strings.Contains(out, "incomplete") {
		t.Errorf("%+v\n%s", r, out)
	}
}

func TestDeadRankIsNamed(t *testing.T) {
	r, out := check(t, preflight.StatusBad, "kill - 2 0", "-n", "4")
	only(t, r, "rank", "rank 2 (", "gone")
	if !strings.Contains(out, "process is gone") {
		t.Error(out)
	}
}

func TestThresholds(t *testing.T) {
	r, _ := check(t, preflight.StatusBad, "", "-n", "2", "--min-bandwidth", "100000")
	if only(t, r, "connection", "↔", "bandwidth"); r.BadEdges != 2 || len(r.Bad) != 1 {
		t.Errorf("%+v", r)
	}
}

func TestOneRank(t *testing.T) {
	if r, out := check(t, 0, "", "-n", "1"); r.Verdict != "good" || r.Ranks[0].Memory <= 0 {
		t.Error(out)
	}
}

// TestDevice: --device decides, not what a job's environment says.
func TestDevice(t *testing.T) {
	t.Setenv("LOCKSTEP_DEVICE", "cuda")
	t.Setenv("LOCKSTEP_CUDA_LIBRARY", "/nowhere")
	check(t, 0, "", "-n", "2")
}

// When time is up there is a report of what was measured, and no good node.
func TestTimeIsUp(t *testing.T) {
	good := filepath.Join(t.TempDir(), "good")
	r, out := check(t, 1, "", "-n", "4", "--time", "400ms", "--timeout", "1500ms", "--good", good)
	if r.Verdict != "incomplete" || !strings.Contains(r.Error, "not done within --timeout=1.5s") || len(r.Good) != 0 {
		t.Errorf("%+v\n%s", r, out)
	}
	if b, err := os.ReadFile(good); err != nil || len(b) != 0 {
		t.Errorf("good nodes %q, %v", b, err)
	}
}
