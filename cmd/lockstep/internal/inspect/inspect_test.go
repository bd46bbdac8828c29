package inspect

import (
	"bytes"
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/alecthomas/kong"

	"github.com/lockstep-ccl/lockstep/record"
)

var update = flag.Bool("update", false, "rewrite the golden files")

const (
	ms  = int64(time.Millisecond)
	sec = int64(time.Second)
)

// job writes the recorders of three ranks: rank 0 waits in an AllReduce for
// rank 1, which died in a Recv of another communicator, and rank 2 left.
func job(t *testing.T, dir string) []*process {
	t.Helper()
	var ps []*process
	for rank := range int32(3) {
		w, err := record.Create(record.Options{Dir: dir, RingSlots: 64, ConnSlots: 4, CommSlots: 4, Identity: record.Identity{
			Job: "llm", Node: []string{"n0", "n0", "n1"}[rank], Rank: rank, WorldSize: 3, LocalRank: rank % 2, Attempt: 1,
		}})
		if err != nil {
			t.Fatal(err)
		}
		dp, _ := w.AddComm(record.CommEntry{ID: 0xd0, Name: "dp", Rank: 2 - rank, Size: 3, State: record.CommJoined})
		run := func(c *record.Comm, seq uint64, coll record.CollKind, bytes uint64, root int32, at, wait, took int64) {
			index := c.Index()
			c.Enqueued(seq, at-2*ms, coll, bytes)
			w.Append(&record.Record{Mono: at - 2*ms, Kind: record.KindEnqueue, Comm: index, Seq: seq, Coll: coll, DType: record.BFloat16, Root: root, Bytes: bytes})
			c.Started(seq, at)
			w.Append(&record.Record{Mono: at, Kind: record.KindStart, Comm: index, Seq: seq, Coll: coll, Algo: record.AlgoRing, Proto: record.ProtoSimple, Stamp: at})
			if took == 0 {
				return
			}
			w.Append(&record.Record{Mono: at + took, Kind: record.KindPhase, Comm: index, Seq: seq, Code: uint8(record.PhaseWait), Peer: 0, Dur: wait})
			w.Append(&record.Record{Mono: at + took, Kind: record.KindPhase, Comm: index, Seq: seq, Code: uint8(record.PhaseTransfer), Peer: -1, Dur: took - wait})
			w.Append(&record.Record{Mono: at + took, Kind: record.KindEnd, Comm: index, Seq: seq, Coll: coll, Stamp: at + took})
			c.Finished(seq, at+took)
		}
		w.Append(&record.Record{Mono: sec, Kind: record.KindMark, Code: uint8(record.MarkStep), Value: 41})
		for seq := uint64(1); seq <= 3; seq++ {
			run(dp, seq, record.AllReduce, 64<<20, -1, int64(seq)*sec, 3*ms, 40*ms)
		}
		switch rank {
		case 0:
			run(dp, 4, record.AllReduce, 64<<20, -1, 4*sec, 0, 0)
			dp.Enqueued(6, 4*sec, record.AllReduce, 1)
			for peer := range int32(2) {
				c, _ := w.AddConn(record.ConnEntry{Comm: dp.Index(), Peer: peer, Transport: record.TransportTCP, Name: "tcp 127.0.0.1:4000->127.0.0.1:5000"})
				c.Posted(4<<20, 4*sec)
				c.Completed(4<<20, 4*sec+ms)
				if peer == 1 {
					c.Posted(9<<20, 4*sec+2*ms)
					c.TxBlocked(4*sec + 3*ms)
					c.RxWaiting(4*sec + ms)
					c.Received(3<<20, 3*sec+40*ms)
					c.Window(1, record.CauseReceiverNotReady, 4*sec)
				}
			}
			w.Append(&record.Record{Mono: 4 * sec, Kind: record.KindEnqueue, Comm: dp.Index(), Seq: 5, Coll: record.Broadcast, DType: record.Float32, Root: 2, Bytes: 1000})
		case 1:
			pp, _ := w.AddComm(record.CommEntry{ID: 0xbb, Name: "pp", Rank: 0, Size: 2, State: record.CommJoined})
			run(pp, 1, record.Send, 1<<10, 1, 3*sec+500*ms, ms, 2*ms)
			for path, state := range []record.LinkState{record.LinkDown, record.LinkSwitched} {
				k, _ := w.AddConn(record.ConnEntry{Comm: dp.Index(), Peer: 2, Transport: record.TransportRDMA, Channel: uint16(path), ID: uint64(17 + path), PeerID: uint32(40 + path), Rail: path + 1, Address: [16]byte{10: 0xff, 11: 0xff, 12: 10, 15: byte(path + 7)}, Name: fmt.Sprintf("mlx5_%d/1->mlx5_%d/1", path, path)})
				k.Link(state, 2*sec)
				k.Switched(uint64(path), uint64(path)<<16)
				w.Append(&record.Record{Mono: 2 * sec, Kind: record.KindLink, Comm: dp.Index(), Conn: k.Index(), Peer: 2, Code: uint8(state)})
				if path == 1 {
					w.Append(&record.Record{Mono: 2*sec + 2*ms, Kind: record.KindWindow, Comm: dp.Index(), Conn: k.Index(), Peer: 2, Code: uint8(record.CauseNetwork), Flags: record.FlagAnomaly,
						Bytes: 1 << 20, WRs: 8, Back: 3, First: 2*sec + ms, Last: 2*sec + 2*ms - 500})
					k.Window(1<<30, record.CauseNetwork, 2*sec+2*ms)
					k.Windows(9)
					k.Slow(1)
					k.Latency(120_500)
					for n := range int64(6) {
						h := record.Window{First: 2*sec + ms - (3-n)*20_000, Last: 2*sec + ms - (2-n)*20_000, Bytes: 1 << 20, WRs: 8, Backlog: 3, Latency: 12_000}
						if n > 3 {
							h.Cause, h.State, h.Anomaly, h.Latency = record.CauseNetwork, record.CauseNetwork, true, 120_000
						} else if n == 3 {
							h.Cause, h.Overlaps = record.CauseNetwork, true
						}
						k.Log(&h)
					}
				}
			}
			run(pp, 2, record.Recv, 1<<10, 1, 3*sec+600*ms, 0, 0)
			w.Append(&record.Record{Mono: 3*sec + 700*ms, Kind: record.KindMark, Flags: record.FlagBegin, Code: uint8(record.MarkCheckpoint), Value: 41})
		case 2:
			dp.SetState(record.CommLeft)
			w.AddComm(record.CommEntry{ID: 0xee, Name: "ep", Size: 1, State: record.CommJoining})
			w.Close()
		}
		p, err := load(w.Path())
		if err != nil {
			t.Fatal(err)
		}
		if want := []string{running, running, closed}[rank]; p.state != want {
			t.Errorf("rank %d: state %s, want %s", rank, p.state, want)
		}
		// What differs from run to run.
		p.path = "/dev/shm/lockstep/" + []string{"a", "b", "c"}[rank] + ".rec"
		p.header.PID = 4700 + rank
		p.header.Created = time.Date(2026, 3, 4, 5, 6, 7, 0, time.UTC)
		p.header.Anchor = record.Anchor{Real: p.header.Created.UnixNano()}
		p.at = 10 * sec
		if rank == 1 {
			p.state, p.at = died, 4*sec
		}
		ps = append(ps, p)
	}
	return ps
}

func TestGolden(t *testing.T) {
	utc(t)
	ps := job(t, t.TempDir())
	worlds := worldRanks(ps)
	var reports []*Process
	for _, p := range ps {
		reports = append(reports, p.report(worlds, time.Second, 3))
	}
	render := func(c Cmd, single bool, ps ...*Process) []byte {
		var b bytes.Buffer
		c.Path = "/dev/shm/lockstep"
		if err := c.text(&b, ps, single); err != nil {
			t.Fatal(err)
		}
		return b.Bytes()
	}
	stopped := *reports[0]
	stopped.Kernel, stopped.Comms = "stopped by a signal", nil
	var windows bytes.Buffer
	for i := range ps {
		r := *reports[i]
		r.Connections = ps[i].connections(worlds)
		(&Cmd{Last: 10}).windows(&windows, []*Process{&r})
	}
	asJSON, err := json.MarshalIndent(reports, "", "  ")
	if err != nil {
		t.Fatal(err)
	}
	for name, got := range map[string][]byte{
		"directory.txt": render(Cmd{}, false, reports...),
		"healthy.txt":   render(Cmd{}, false, reports[2]),
		"all.txt":       render(Cmd{All: true}, false, reports...),
		"file.txt":      render(Cmd{}, true, reports[1]),
		"stopped.txt":   render(Cmd{}, false, &stopped),
		"windows.txt":   windows.Bytes(),
		"all.json":      append(asJSON, '\n'),
	} {
		golden(t, name, got)
	}
}

func golden(t *testing.T, name string, got []byte) {
	t.Helper()
	path := filepath.Join("testdata", name)
	if *update {
		if err := os.WriteFile(path, got, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(got, want) {
		t.Errorf("%s differs (go test -update rewrites it):\n%s", path, got)
	}
}

// TestGPU reads a process whose GPU stamps its operations, and is inside of one
// that a CUDA graph replayed.
func TestGPU(t *testing.T) {
	utc(t)
	w, err := record.Create(record.Options{Dir: t.TempDir(), RingSlots: 4, StampSlots: 64, Identity: record.Identity{Job: "llm", Node: "n0", WorldSize: 2}})
	if err != nil {
		t.Fatal(err)
	}
	dev, _ := w.AddDevice(record.DeviceEntry{UUID: [16]byte{0xab, 15: 0xcd}, Ordinal: 2, Name: "NVIDIA H200"}, record.DeviceAnchor{GPU: sec, Mono: sec, Err: 2800})
	tp, _ := w.AddComm(record.CommEntry{ID: 0xaa, Name: "tp", Size: 2, State: record.CommJoined, Stamps: 16, Copies: 16, Device: dev.Index()})
	w.AddComm(record.CommEntry{ID: 0xbb, Name: "no room", Size: 2, State: record.CommLeft, Stamps: 64})
	small, _ := w.AddDesc(record.Desc{Coll: record.AllReduce, DType: record.BFloat16, Algo: record.AlgoDirect, Proto: record.ProtoLL, SMs: 8, Root: -1, Bytes: 16 << 10, Flags: record.DescCaptured})
	large, _ := w.AddDesc(record.Desc{Coll: record.AllGather, DType: record.Float8E4M3, Algo: record.AlgoCopyEngine, Root: -1, Bytes: 1 << 30})
	off, n := tp.StampRange()
	store := func(at int, words ...uint64) {
		for i, v := range words {
			binary.LittleEndian.PutUint64(w.Memory()[at+8*i:], v)
		}
	}
	at := func(seq int) int { return off + seq%n*record.StampEntrySize }
	store(at(1), 1<<16|uint64(small), uint64(sec), uint64(4000)<<8|1, uint64(sec)+20_000)
	word, id, _ := tp.CopyQueued(1, large, sec+ms)
	store(word, id)
	tp.CopyDone(1, sec+2*ms, 3000, 1, sec+5*ms)
	store(at(2), 2<<16|uint64(small), uint64(sec+6*ms))

	w.Append(&record.Record{Mono: sec + 6*ms, Kind: record.KindEnqueue, Comm: tp.Index(), Seq: 1, Coll: record.Barrier, Root: -1})
	w.Append(&record.Record{Mono: sec + 6*ms, Kind: record.KindStart, Comm: tp.Index(), Seq: 1, Coll: record.Barrier, Algo: record.AlgoDoubling, Proto: record.ProtoLL})
	w.Append(&record.Record{Mono: sec + 7*ms, Kind: record.KindEnd, Comm: tp.Index(), Seq: 1, Coll: record.Barrier})
	tp.Enqueued(1, sec+6*ms, record.Barrier, 0)
	tp.Started(1, sec+6*ms)
	tp.Finished(1, sec+7*ms)

	p, err := load(w.Path())
	if err != nil {
		t.Fatal(err)
	}
	p.path, p.header.PID, p.header.Created, p.at = "/dev/shm/lockstep/g.rec", 4711, time.Date(2026, 3, 4, 5, 6, 7, 0, time.UTC), 3*sec
	r := p.report(worldRanks([]*process{p}), time.Second, 10)
	if in := r.Comms[0].In; in == nil || !in.Replay || in.SMs != 8 || in.Seq != 3 || !r.Comms[0].Stuck {
		t.Errorf("in %+v", in)
	}
	var b bytes.Buffer
	if err := (&Cmd{}).text(&b, []*Process{r}, true); err != nil {
		t.Fatal(err)
	}
	golden(t, "gpu.txt", b.Bytes())
}

func utc(t *testing.T) {
	local := time.Local
	time.Local = time.UTC
	t.Cleanup(func() { time.Local = local })
}

// The command as it is called, on recorders of this very process.
func TestRun(t *testing.T) {
	dir := t.TempDir()
	node := filepath.Join(dir, "n1")
	job(t, dir)
	job(t, node)
	run := func(args ...string) (string, error) {
		t.Helper()
		var c Cmd
		k, err := kong.New(&c, kong.Vars{"runtime_dir": dir})
		if err != nil {
			t.Fatal(err)
		}
		if _, err := k.Parse(args); err != nil {
			return "", err
		}
		var out strings.Builder
		err = c.Run(context.Background(), &out)
		return out.String(), err
	}

	text, err := run()
	if err != nil || !strings.HasPrefix(text, "6 recorders in "+dir) || strings.Count(text, "STUCK IN AllReduce #4") != 2 {
		t.Errorf("%v\n%s", err, text)
	}
	text, err = run("--json", "--rank", "1", node)
	var ps []Process
	if err != nil || json.Unmarshal([]byte(text), &ps) != nil || len(ps) != 1 || ps[0].Rank != 1 || len(ps[0].Comms) != 2 {
		t.Errorf("%v\n%s", err, text)
	}
	files, err := record.List(dir)
	if err != nil || len(files) != 3 {
		t.Fatal(files, err)
	}
	if text, err = run(files[2], "-n", "1"); err != nil || !strings.HasPrefix(text, "rank 2 of 3") || strings.Contains(text, "#2 ") {
		t.Errorf("%v\n%s", err, text)
	}

	// One bad file is told, and hides no other.
	bad := filepath.Join(dir, "bad.rec")
	if err := os.WriteFile(bad, []byte("LOCKSTEP but not much of it"), 0o600); err != nil {
		t.Fatal(err)
	}
	text, err = run()
	if !errors.Is(err, record.ErrTruncated) || !strings.Contains(err.Error(), bad) || !strings.HasPrefix(text, "6 recorders") {
		t.Errorf("%v\n%s", err, text)
	}
	for _, tt := range []struct {
		args []string
		want string
	}{
		{[]string{t.TempDir()}, "is a job running here"},
		{[]string{filepath.Join(dir, "none")}, "no such file"},
		{[]string{node, "--rank=9"}, "is of rank [9]"},
	} {
		if _, err := run(tt.args...); err == nil || !strings.Contains(err.Error(), tt.want) {
			t.Errorf("%q: got %v, want %q", tt.args, err, tt.want)
		}
	}
}

func TestKernelState(t *testing.T) {
	cmd := exec.Command("sleep", "60")
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	defer cmd.Wait()
	defer cmd.Process.Kill()
	pid := int32(cmd.Process.Pid)
	if got := kernelState(pid); got != "" && got != "in uninterruptible sleep" { // while it is being started
		t.Errorf("sleeping: %q", got)
	}
	cmd.Process.Signal(syscall.SIGSTOP)
	for deadline := time.Now().Add(time.Minute); kernelState(pid) != "stopped by a signal"; time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("stopped: %q", kernelState(pid))
		}
	}
	if got := kernelState(-1); got != "" {
		t.Errorf("no process: %q", got)
	}
}

// FuzzRun inspects any bytes: an error or a text, never a crash, and never a
// control character for the terminal. Use -fuzzminimizetime 10x.
func FuzzRun(f *testing.F) {
	w, err := record.Create(record.Options{Dir: f.TempDir(), RingSlots: 16, CommSlots: 2, ConnSlots: 2})
	if err != nil {
		f.Fatal(err)
	}
	comm, _ := w.AddComm(record.CommEntry{Name: "dp", ID: 1, Size: 2})
	conn, _ := w.AddConn(record.ConnEntry{Name: "tcp", Peer: 1})
	comm.Enqueued(2, 1, record.AllReduce, 1)
	comm.Started(2, 1)
	conn.RxWaiting(1)
	conn.Posted(1, 1)
	for kind := record.KindNone; kind <= record.KindWhole; kind++ {
		w.Append(&record.Record{Kind: kind, Seq: uint64(kind), Mono: int64(kind)})
	}
	gpu, err := record.Create(record.Options{Dir: f.TempDir(), RingSlots: 4, CommSlots: 1, ConnSlots: 1, StampSlots: 4})
	if err != nil {
		f.Fatal(err)
	}
	gpu.AddDevice(record.DeviceEntry{Name: "gpu"}, record.DeviceAnchor{})
	stamped, _ := gpu.AddComm(record.CommEntry{Name: "tp", Stamps: 4})
	off, _ := stamped.StampRange()
	gpu.Memory()[off+record.StampEntrySize+2] = 1
	for _, path := range []string{w.Path(), gpu.Path()} {
		seed, err := os.ReadFile(path)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(seed)
	}
	path := filepath.Join(f.TempDir(), "fuzz.rec")
	f.Fuzz(func(t *testing.T, b []byte) {
		if err := os.WriteFile(path, b, 0o600); err != nil {
			t.Fatal(err)
		}
		for _, c := range []Cmd{{Path: path, Last: 10}, {Path: filepath.Dir(path), JSON: true}} {
			var out strings.Builder
			if err := c.Run(context.Background(), &out); err != nil && out.Len() > 0 {
				t.Fatal(err)
			}
			if i := strings.IndexFunc(out.String(), func(r rune) bool { return r < ' ' && r != '\n' || r == 0x7f }); i >= 0 {
				t.Fatalf("control character in %q", out.String()[max(0, i-20):])
			}
		}
	})
}
