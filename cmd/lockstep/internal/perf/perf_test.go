package perf

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/alecthomas/kong"

	"github.com/lockstep-ccl/lockstep/cmd/lockstep/internal/children"
)

// The test binary is also the program whose children are the ranks.
const mainEnv = "PERF_TEST_MAIN"

func TestMain(m *testing.M) {
	if os.Getenv(mainEnv) == "" {
		os.Exit(m.Run())
	}
	var c Cmd
	k := kong.Parse(&c)
	k.BindTo(context.Background(), (*context.Context)(nil))
	k.BindTo(os.Stdout, (*io.Writer)(nil))
	if err := k.Run(); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func run(t *testing.T, args ...string) (stdout string, err error) {
	t.Helper()
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(exe, args...)
	cmd.Env = append([]string{"LOCKSTEP_RUNTIME_DIR=" + t.TempDir(), mainEnv + "=1"}, os.Environ()...)
	var out, errs bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &errs
	if err := cmd.Run(); err != nil {
		return out.String(), fmt.Errorf("%w: %s", err, errs.String())
	}
	return out.String(), nil
}

// TestTable: every collective runs, over both transports, and nothing is wrong.
func TestTable(t *testing.T) {
	for _, nodes := range []int{1, 2} {
		args := []string{"-b", "1000", "-e", "64K", "-f", "8", "-n", "2", "-w", "1", "--ranks", "3", "--nodes", strconv.Itoa(nodes), "-r", "1", "-d", "half", "-o", "avg"}
		for _, c := range collectives {
			args = append(args, c.name)
		}
		out, err := run(t, args...)
		if err != nil {
			t.Fatal(err)
		}
		for _, c := range collectives {
			if !strings.Contains(out, "# "+c.name+": 3 ranks") {
				t.Errorf("no header of %s in:\n%s", c.name, out)
			}
		}
		lines := 0
		for line := range strings.Lines(out) {
			if strings.HasPrefix(line, "#") {
				continue
			}
			f := strings.Fields(line)
			if len(f) != 13 {
				t.Fatalf("%d columns, want nccl-tests' 13: %q", len(f), line)
			}
			lines++
			if inPlace := f[12]; f[8] != "0" || inPlace != "0" && inPlace != "N/A" {
				t.Errorf("wrong elements: %q", line)
			}
			if us, err := strconv.ParseFloat(f[5], 64); err != nil || us <= 0 {
				t.Errorf("time %q", f[5])
			}
		}
		if want := 3*(len(collectives)-1) + 1; lines != want {
			t.Errorf("%d lines, want %d:\n%s", lines, want, out)
		}
		if n := strings.Count(out, "# Avg bus bandwidth"); n != len(collectives) {
			t.Errorf("%d averages, want %d", n, len(collectives))
		}
	}
}

func TestJSON(t *testing.T) {
	out, err := run(t, "all_reduce_perf", "-b", "4K", "-e", "4K", "-n", "2", "-d", "all", "-o", "all", "--recorder", "both", "--json")
	if err != nil {
		t.Fatal(err)
	}
	n := 0
	for line := range strings.Lines(out) {
		var r Result
		if err := json.Unmarshal([]byte(line), &r); err != nil {
			t.Fatalf("%v: %q", err, line)
		}
		if n++; r.Coll != "allreduce" || r.Size != 4096 || r.Ranks != 2 || r.Recorder != "both" || r.OutOfPlace.Wrong != 0 || r.InPlace.Wrong != 0 || r.OutOfPlace.Plain <= 0 {
			t.Errorf("%q", line)
		}
	}
	if n != 50 {
		t.Errorf("%d lines, want 10 types × 5 operators", n)
	}
}

func TestBadArguments(t *testing.T) {
	for _, test := range []struct{ args, want string }{
		{"allreduze", "want one of allreduce, reduce,"},
		{"-d complex", "want int8,"},
		{"-o xor", "want sum,"},
		{"-b 8X", "want bytes, such as"},
		{"-b 1M -e 1K", "sizes from 1048576 to 1024"},
		{"-f 1", "-f 1"},
		{"--nodes 3", "2 ranks on 3 nodes"},
		{"--algo best", "want one of direct, ring"},
		{"broadcast -r 7 -n 1 -e 8", "ranks are 0 to 1"},
	} {
		out, err := run(t, strings.Fields(test.args)...)
		if err == nil || !strings.Contains(err.Error(), test.want) {
			t.Errorf("%s: want an error with %q, got %v\n%s", test.args, test.want, err, out)
		}
	}
}

// TestTimeout: ranks that are killed leave no recorders.
func TestTimeout(t *testing.T) {
	dir := t.TempDir()
	t.Setenv("LOCKSTEP_RUNTIME_DIR", dir)
	_, err := run(t, "-b", "64M", "-e", "64M", "-n", "1000000", "--timeout", "500ms")
	if err == nil || !strings.Contains(err.Error(), "not done within --timeout=500ms") {
		t.Errorf("got %v", err)
	}
	left, _ := filepath.Glob(filepath.Join(dir, "*"))
	left = slices.DeleteFunc(left, func(path string) bool {
		return strings.HasPrefix(filepath.Base(path), ".new-") // no recorder yet when its rank was killed: the next job's supervisor removes it
	})
	if len(left) > 0 {
		t.Errorf("left behind: %v", left)
	}
}

// TestDevice: --device decides, not what a job's environment says.
func TestDevice(t *testing.T) {
	t.Setenv("LOCKSTEP_DEVICE", "cuda")
	t.Setenv("LOCKSTEP_CUDA_LIBRARY", "/nowhere")
	if _, err := run(t, "-b", "8", "-e", "8", "-n", "1"); err != nil {
		t.Error(err)
	}
}

// TestLaunched: under a launcher, the nodes are those that the ranks are on.
func TestLaunched(t *testing.T) {
	env, meet, err := children.Env(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	defer meet.Close()
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	var out, errs bytes.Buffer
	var ranks [2]*exec.Cmd
	dir := t.TempDir()
	for r := range ranks {
		cmd := exec.Command(exe, "-b", "8", "-e", "8", "-n", "1", "--json")
		cmd.Env = append(append(os.Environ(), env...), mainEnv+"=1", "LOCKSTEP_RUNTIME_DIR="+dir, "LOCKSTEP_RECORDER=off", "LOCKSTEP_WORLD_SIZE=2",
			fmt.Sprintf("LOCKSTEP_RANK=%d", r), fmt.Sprintf("LOCKSTEP_NODE=n%d", r))
		if r == 0 {
			cmd.Stdout, cmd.Stderr = &out, &errs
		}
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		ranks[r] = cmd
	}
	for r, cmd := range ranks {
		if err := cmd.Wait(); err != nil {
			t.Fatalf("rank %d: %v: %s", r, err, errs.String())
		}
	}
	var r Result
	if err := json.Unmarshal(out.Bytes(), &r); err != nil || r.Nodes != 2 {
		t.Errorf("%v: %s", err, out.String())
	}
}

// TestVerdict: wrong elements are an error; those that were not checked are not.
func TestVerdict(t *testing.T) {
	p := newPrinter(io.Discard, &Cmd{}, 2)
	coll := collectives[0]
	p.line(coll, &Result{OutOfPlace: &Timing{Wrong: -1}, InPlace: &Timing{}})
	if err := p.verdict(); err != nil {
		t.Error(err)
	}
	p.line(coll, &Result{OutOfPlace: &Timing{Wrong: 3}, InPlace: &Timing{Wrong: 1}})
	if err := p.verdict(); err == nil || err.Error() != "4 elements came out wrong" {
		t.Errorf("got %v", err)
	}
}
