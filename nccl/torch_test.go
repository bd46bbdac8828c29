package nccl_test

import (
	"debug/elf"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/lockstep-ccl/lockstep/record"
)

// The plugin that does nothing, which measure.py compares with, is one that NCCL loads.
func TestEmptyPlugin(t *testing.T) {
	cc, err := exec.LookPath("cc")
	if err != nil {
		t.Skip("no C compiler: cc is not in PATH")
	}
	so := filepath.Join(t.TempDir(), "libempty.so")
	if out, err := exec.Command(cc, "-O2", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-Iplugin", "torch/empty/plugin.c", "-o", so).CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	f, err := elf.Open(so)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	symbols, err := f.DynamicSymbols()
	if err != nil {
		t.Fatal(err)
	}
	for _, v := range versions {
		if !slices.ContainsFunc(symbols, func(s elf.Symbol) bool { return s.Name == "ncclProfiler_v"+v && s.Size == 48 }) {
			t.Errorf("no table of version %s", v)
		}
	}
}

// TestPythonNames: the Python reader has the names of all kinds.
func TestPythonNames(t *testing.T) {
	text, err := os.ReadFile("torch/recorder.py")
	if err != nil {
		t.Fatal(err)
	}
	want := `COLL = ["none"`
	for k := record.CollNone + 1; k.Known(); k++ {
		want += fmt.Sprintf(", %q", k)
	}
	if want += "]\n"; !strings.Contains(string(text), want) {
		t.Errorf("torch/recorder.py lacks %s", want)
	}
}

// The Python reader of the measurements on GPUs (nccl/torch) finds what the Go reader finds.
func TestPythonReader(t *testing.T) {
	python, err := exec.LookPath("python3")
	if err != nil {
		t.Skip("no python3 in PATH")
	}
	dir := t.TempDir()
	play(t, plain, dir, []string{"LOCKSTEP_NCCL_EVENTS=all", "NCCL_IB_DISABLE=1"}, "5", "net")
	paths, err := record.List(dir)
	if err != nil || len(paths) != 1 {
		t.Fatal(paths, err)
	}
	out, err := exec.Command(python, "-B", "torch/recorder.py", paths[0]).Output()
	if err != nil {
		t.Fatal(err)
	}
	var got struct {
		Counters map[string]uint64
		Comms    []struct {
			ID, Name                         string
			Rank, Size                       int32
			Enqueued, Started, Finished, Ops uint64
			TransferNs                       uint64 `json:"transfer_ns"`
		}
		Conns []struct {
			ID, Posted, Completed, Received, Windows uint64
			LatencyNs                                int64 `json:"latency_ns"`
			Peer                                     int32
			Name                                     string
		}
		Counts map[string]uint64
		NS     []int64
	}
	if err := json.Unmarshal(out, &got); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	c := read(t, paths[0])
	s := c.comm(t, 0x107)
	if len(got.Comms) != 1 || got.Comms[0].ID != "107" || got.Comms[0].Name != s.Name || got.Comms[0].Enqueued != s.Enqueued ||
		got.Comms[0].Finished != s.Finished || got.Comms[0].Ops != s.Ops || got.Comms[0].TransferNs != s.TransferNs || got.Comms[0].Rank != s.Rank {
		t.Errorf("%+v\nwant %+v", got.Comms, s)
	}
	if got.Counters["events_foreign"] != c.header.EventsForeign || got.Counters["appended"] != c.header.Appended || got.Counters["version"] != 5 || got.Counters["mask"] != c.header.EventMask {
		t.Errorf("%v\nwant %+v", got.Counters, c.header)
	}
	if got.Counts["ended"] != 100 || got.Counts["overwritten"] != 0 || len(got.NS) != 100 {
		t.Errorf("%v, %d durations", got.Counts, len(got.NS))
	}
	for seq, o := range c.ops[s.Index] {
		if want := o.end[0].Stamp - o.start[0].Stamp; int(seq) <= len(got.NS) && got.NS[seq-1] != want {
			t.Errorf("operation %d took %d ns, want %d", seq, got.NS[seq-1], want)
		}
	}
	conns := c.Conns(nil)
	if len(conns) != len(got.Conns) {
		t.Fatalf("%d connections, want %d", len(got.Conns), len(conns))
	}
	for i, k := range conns {
		if g := got.Conns[i]; g.ID != k.ID || g.Peer != k.Peer || g.Name != k.Name || g.Posted != k.Posted || g.Completed != k.Completed || g.Received != k.Received || g.Windows != k.Windows || g.LatencyNs != k.LatencyNs {
			t.Errorf("connection %+v\nwant %+v", g, k)
		}
	}
}
