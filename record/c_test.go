package record_test

import (
	"bufio"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/lockstep-ccl/lockstep/record"
)

// buildC compiles the C test program against the generated header.
func buildC(tb testing.TB, flags ...string) string {
	tb.Helper()
	cc, err := exec.LookPath("cc")
	if err != nil {
		tb.Skip("no C compiler: cc is not in PATH")
	}
	bin := filepath.Join(tb.TempDir(), "producers")
	args := append([]string{"-std=c11", "-O2", "-Wall", "-Wextra", "-Werror", "-Ic", "-o", bin, "c/testdata/producers.c", "-lpthread"}, flags...)
	out, err := exec.Command(cc, args...).CombinedOutput()
	if err != nil {
		tb.Fatalf("cc: %v\n%s", err, out)
	}
	return bin
}

func TestHeaderIsCPlusPlus(t *testing.T) {
	cxx, err := exec.LookPath("c++")
	if err != nil {
		t.Skip("no C++ compiler: c++ is not in PATH")
	}
	cmd := exec.Command(cxx, "-std=c++14", "-Wall", "-Wextra", "-Werror", "-fsyntax-only", "-x", "c++", "-Ic", "-")
	cmd.Stdin = strings.NewReader("#include \"lockstep_record.h\"\nint main() { return 0; }\n")
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("c++: %v\n%s", err, out)
	}
}

// A directory's name may end in slashes, behind which a symbolic link is refused as ever.
func TestCDir(t *testing.T) {
	bin, dir := buildC(t), t.TempDir()
	out, err := exec.Command(bin, dir+"//", "1", "1").Output()
	if path := strings.TrimSpace(string(out)); err != nil || filepath.Dir(path) != dir || path != filepath.Clean(path) {
		t.Errorf("in %s//: %q, %v", dir, path, err)
	}
	link := filepath.Join(t.TempDir(), "link")
	if err := os.Symlink(dir, link); err != nil {
		t.Fatal(err)
	}
	if out, err := exec.Command(bin, link+"/", "1", "1").Output(); err == nil {
		t.Errorf("behind a link: %q", out)
	}
}

// Threads of a C program append while Go reads, and every record is accounted for.
func TestCProducers(t *testing.T) {
	const threads, records = 4, 50_000
	cmd := exec.Command(buildC(t), t.TempDir(), strconv.Itoa(threads), strconv.Itoa(records))
	stdin, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	path, err := bufio.NewReader(stdout).ReadString('\n')
	if err != nil {
		t.Fatal(err)
	}
	r := open(t, strings.TrimSpace(path))
	if !r.Alive() {
		t.Error("the running program is not alive")
	}
	if _, err := stdin.Write([]byte("\n")); err != nil {
		t.Fatal(err)
	}

	want := []record.Record{
		{Kind: record.KindEnqueue, Coll: record.AllReduce, DType: record.BFloat16, Op: record.Avg, Root: -1, Bytes: 1 << 40, Stream: 5},
		{Kind: record.KindStart, Coll: record.AllReduce, Algo: record.AlgoRing, Proto: record.ProtoSimple, Clock: record.ClockGPU, Chan: 16, Stamp: 200, Slot: 4},
		{Kind: record.KindPhase, Code: uint8(record.PhaseTransfer), Index: 1, Peer: 6, Stamp: 300, Dur: 50},
		{Kind: record.KindEnd, Coll: record.AllReduce, Code: uint8(record.ResultPeerLost), Stamp: 400},
		{Kind: record.KindWindow, Peer: 2, Conn: 8, Code: uint8(record.CauseNetwork), Bytes: 4096, WRs: 8, Back: 3, First: 1000, Last: 5000},
		{Kind: record.KindLink, Peer: 2, Conn: 8, Code: uint8(record.LinkDown)},
		{Kind: record.KindComm, Code: uint8(record.CommAborted), Result: record.ResultPeerLost, Peer: 3, Value: 0xabcdef},
		{Kind: record.KindWhole, Coll: record.Reduce, DType: record.Float8E5M2, Op: record.Avg, Algo: record.AlgoTree, Proto: record.ProtoSimple, Code: uint8(record.ResultOK), Root: 2, Peer: 3, Bytes: 1 << 33, Stream: 8, Dur: 90, Wait: 40},
	}
	for i := range want {
		want[i].Ticket, want[i].Mono, want[i].Flags, want[i].Comm, want[i].Thread, want[i].Seq = uint64(i), 100, record.FlagInPlace, 3, 7, 9
	}
	var marks uint64
	buf := make([]record.Record, 256)
	read := func() (n int) {
		n = r.Next(buf)
		for _, got := range buf[:n] {
			if got.Ticket < uint64(len(want)) {
				if got != want[got.Ticket] {
					t.Errorf("got  %+v\nwant %+v", got, want[got.Ticket])
				}
				continue
			}
			marks++
			if got.Value != got.Seq*2654435761+uint64(got.Thread) || got.Mono != int64(got.Seq) || got.Kind != record.KindMark {
				t.Fatalf("torn record %+v", got)
			}
		}
		return n
	}
	deadline := time.Now().Add(time.Minute)
	for !r.Header().Closed {
		if read() == 0 && time.Now().After(deadline) {
			t.Fatal("the program does not end")
		}
	}
	for read() > 0 {
	}
	if err := cmd.Wait(); err != nil {
		t.Fatal(err)
	}
	if r.Alive() {
		t.Error("the program that has ended is alive")
	}

	h := r.Header()
	const appended = threads*records + 8
	if h.Appended != appended {
		t.Errorf("appended %d, want %d", h.Appended, appended)
	}
	if sum := r.Read() + r.Lost() + uint64(r.Pending()); sum != appended {
		t.Errorf("read %d + lost %d + pending %d = %d, want %d", r.Read(), r.Lost(), r.Pending(), sum, appended)
	}
	if marks == 0 {
		t.Error("no mark was read")
	}
	if id := (record.Identity{Job: "c job", Node: "n0", Rank: 1, WorldSize: 4, LocalRank: 1, Attempt: 2}); h.Identity != id {
		t.Errorf("identity %+v, want %+v", h.Identity, id)
	}
	if d := time.Since(h.ToReal(record.Now())); d.Abs() > time.Minute {
		t.Errorf("anchor is off by %v", d)
	}

	comms, conns := r.Comms(nil), r.Conns(nil)
	wantComm := record.CommStatus{
		CommEntry: record.CommEntry{ID: 0xabcdef, Name: "dp", Rank: 1, Size: 4, Parent: 0x123, State: record.CommAborted},
		Fault:     record.ResultMismatch, FaultPeer: 2,
		Enqueued: 12, EnqueuedAt: 1200, Coll: record.ReduceScatter, Bytes: 4096, Started: 11, StartedAt: 1100, Finished: 10, FinishedAt: 1000,
		Ops: 2, TotalBytes: 128, OwnNs: 6, WaitNs: 7, TransferNs: 8, MaxOwnNs: 5,
	}
	if len(comms) == 1 {
		if at := comms[0].StateAt; at < h.Anchor.Mono-int64(time.Hour) || at > record.Now() || at == 0 {
			t.Errorf("aborted at %d", at)
		}
		comms[0].StateAt = 0
	}
	if len(comms) != 1 || comms[0] != wantComm {
		t.Errorf("comms %+v\nwant  %+v", comms, wantComm)
	}
	wantConn := record.ConnStatus{
		ConnEntry: record.ConnEntry{Peer: 3, Transport: record.TransportRDMA, Channel: 2, ID: 78, Name: "mlx5_0:77"},
		Posted:    900, PostedAt: 90, Completed: 800, CompletedAt: 80, TxBlockedSince: 85, Received: 700, ReceivedAt: 70, RxWaitingSince: 75,
		WindowBps: 1000000, WindowCause: record.CauseReceiverNotReady, WindowAt: 88, SlowWindows: 4, Windows: 9, LatencyNs: 123,
		Link: record.LinkSwitched, LinkAt: 91, Switches: 2, Resent: 4096,
	}
	if len(conns) != 1 || conns[0] != wantConn {
		t.Errorf("conns %+v\nwant  %+v", conns, wantConn)
	}
}

// Signals that come while a recorder is made do not keep it from being made.
func TestCRecorderAmongSignals(t *testing.T) {
	out, err := exec.Command(buildC(t, "-DINTERRUPTED"), t.TempDir(), "bench", "1").CombinedOutput()
	if err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	path, _, _ := strings.Cut(string(out), "\n")
	if h := open(t, path).Header(); h.Appended == 0 || !h.Closed {
		t.Errorf("%+v", h)
	}
}

func BenchmarkAppendC(b *testing.B) {
	bin := buildC(b)
	b.ResetTimer()
	out, err := exec.Command(bin, b.TempDir(), "bench", strconv.Itoa(max(b.N, 1_000_000))).Output()
	if err != nil {
		b.Fatal(err)
	}
	lines := strings.Fields(string(out))
	ns, err := strconv.ParseFloat(lines[len(lines)-1], 64)
	if err != nil {
		b.Fatal(err)
	}
	b.ReportMetric(ns, "ns/op") // in the program itself: without its start
}
