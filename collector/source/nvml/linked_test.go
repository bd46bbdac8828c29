//go:build cgo

package nvml

import (
	"encoding/json"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/lockstep-ccl/lockstep/collector"
	"github.com/lockstep-ccl/lockstep/collector/source"
	"github.com/lockstep-ccl/lockstep/diagnosis"
	"github.com/lockstep-ccl/lockstep/record"
)

// linked is this binary as a process that opens a library once, prints what a
// source sees through it, and ends.
func linked(path string) {
	bound := 30 * time.Second // a call that takes long on a busy machine does not hang
	if os.Getenv("LOCKSTEP_TEST_NVML_HANGS") != "" {
		bound = 2 * time.Second
	}
	s := newSource(Options{Bound: bound, Log: slog.New(slog.DiscardHandler)}, &library{nvml: nvml.New(nvml.WithLibraryPath(path))})
	v := source.View{}
	for deadline := time.Now().Add(30 * time.Second); time.Now().Before(deadline); time.Sleep(time.Millisecond) {
		v.Now = record.Now()
		err := s.Update(&v)
		if n := v.GPUs; n != nil && (err != nil || slices.ContainsFunc(n.GPUs, func(g collector.GPU) bool { return len(g.Xids) > 0 })) {
			break
		}
	}
	closing := s.Close()
	json.NewEncoder(os.Stdout).Encode(v.GPUs)
	fmt.Println(closing)
	os.Exit(0)
}

// through builds the library of testdata and returns what a source sees through it, and how it closed.
func through(t *testing.T, flags ...string) (collector.GPUs, string) {
	t.Helper()
	lib := filepath.Join(t.TempDir(), "libnvidia-ml.so.1")
	args := append([]string{"-w", "-shared", "-fPIC", "-o", lib, "testdata/libnvidia-ml.c"}, flags...)
	if out, err := exec.CommandContext(t.Context(), "gcc", args...).CombinedOutput(); err != nil {
		t.Fatalf("gcc: %v\n%s", err, out)
	}
	cmd := exec.CommandContext(t.Context(), os.Args[0])
	cmd.Env = append(os.Environ(), "LOCKSTEP_TEST_NVML="+lib)
	if slices.Contains(flags, "-DHANG") {
		cmd.Env = append(cmd.Env, "LOCKSTEP_TEST_NVML_HANGS=1")
	}
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	var n collector.GPUs
	dec := json.NewDecoder(strings.NewReader(string(out)))
	if err := dec.Decode(&n); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	return n, strings.TrimSpace(string(out)[dec.InputOffset():])
}

func TestThroughTheLinker(t *testing.T) {
	for _, c := range []struct {
		name  string
		flags []string
		rows  bool
	}{{"current", nil, true}, {"old", []string{"-DOLD"}, false}} {
		t.Run(c.name, func(t *testing.T) {
			n, closed := through(t, c.flags...)
			if n.DriverVersion != "580.1" || len(n.GPUs) != 2 || closed != "<nil>" {
				t.Fatalf("%+v, closed: %s", n, closed)
			}
			g := &n.GPUs[1]
			if g.UUID != uuidOf(1) || g.Model != "NVIDIA H200" || g.BusID != "00000000:18:00.0" || len(g.Failed) > 0 || !slices.Equal(g.PIDs, []int32{100, 101, 102}) {
				t.Errorf("%+v", g)
			}
			is(t, "power", g.Power, 650.5)
			is(t, "SM clock", g.SMClock, 1.98e9)
			is(t, "utilization", g.Utilization, 0.98)
			is(t, "memory", g.MemoryTotal, 100)
			is(t, "memory used", g.MemoryUsed, 10)
			is(t, "ECC", g.Uncorrected.Aggregate, 11)
			absent(t, "memory temperature", g.MemoryTemperature)
			if c.rows {
				is(t, "rows", g.RowsCorrected, 2)
				is(t, "pending", g.RemapPending, 1)
			} else {
				absent(t, "rows", g.RowsCorrected)
			}
			if g.Throttle == nil || *g.Throttle != diagnosis.ThrottlePowerBrake|diagnosis.ThrottlePowerCap {
				t.Errorf("throttle %v", g.Throttle)
			}
			if len(g.Links) != 18 || !g.Links[16].Up || g.Links[17].Up {
				t.Fatalf("links: %+v", g.Links)
			}
			is(t, "replays of link 3", g.Links[3].Replays, 3161)
			is(t, "recoveries of link 3", g.Links[3].Recoveries, 3162)
			is(t, "CRC of link 3", g.Links[3].CRC, 3163)
			if len(g.Xids) != 1 || g.Xids[0].Code != 79 || len(n.GPUs[0].Xids) != 0 {
				t.Errorf("Xids: %+v, GPU 0: %+v", g.Xids, n.GPUs[0].Xids)
			}
		})
	}
}

// A C call that never returns: the source says so, and ends without it.
func TestHungInTheLibrary(t *testing.T) {
	n, closed := through(t, "-DHANG")
	if n.Hangs != "GetNvLinkState of GPU 1" || !strings.Contains(closed, n.Hangs) {
		t.Errorf("hangs in %q, closed: %s", n.Hangs, closed)
	}
}
