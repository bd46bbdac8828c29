package nccl_test

import (
	"encoding/binary"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/lockstep-ccl/lockstep/record"
)

var versions = []string{"4", "5", "6", "7"}

// told is a line of the driver: what a communicator has been made to do.
type told struct {
	id       uint64
	name     string
	numbered uint64
	what     string
}

func parse(t *testing.T, lines []string) (all []told) {
	t.Helper()
	for _, l := range lines {
		var c told
		if n, _ := fmt.Sscanf(l, "comm %x %s numbered=%d %s", &c.id, &c.name, &c.numbered, &c.what); n == 4 {
			all = append(all, c)
		}
	}
	return all
}

// check finds everything that was played in the recorder: each operation once, or counted.
func check(t *testing.T, c *content, want told) {
	t.Helper()
	s := c.comm(t, want.id)
	if s.Enqueued != want.numbered || s.Name != want.name {
		t.Errorf("%s: %d operations numbered, want %d (name %q)", want.name, s.Enqueued, want.numbered, s.Name)
	}
	var ended, open, unseen uint64
	for seq, o := range c.ops[s.Index] {
		if seq == 0 || seq > want.numbered {
			t.Errorf("%s: operation %d was never called", want.name, seq)
		}
		if len(o.enqueue) > 1 || len(o.start) > 1 || len(o.end) > 1 {
			t.Errorf("%s: operation %d is recorded more than once: %d, %d, %d", want.name, seq, len(o.enqueue), len(o.start), len(o.end))
		}
		if len(o.end) == 0 {
			open++
			continue
		}
		ended++
		if o.end[0].Flags&record.FlagUnseen != 0 {
			unseen++
		}
		if len(o.enqueue) == 0 {
			t.Errorf("%s: operation %d has an end and was not called", want.name, seq)
		}
		if strings.HasPrefix(want.what, "exact") {
			if len(o.start) != 1 || o.start[0].Clock != record.ClockGPU || o.end[0].Clock != record.ClockGPU || o.end[0].Stamp < o.start[0].Stamp {
				t.Errorf("%s: operation %d has no GPU times: %+v", want.name, seq, o)
			}
		}
	}
	if unseen != 0 && want.what != "unseen" && want.what != "mixed" && want.what != "sampled" && want.what != "late" && want.what != "hang" {
		t.Errorf("%s: of %d operations nobody saw the end", want.name, unseen)
	}
	lost := c.header.OpsLost
	if c.Lost() != 0 {
		t.Errorf("%s: %d records were lost", want.name, c.Lost())
	}
	switch want.what {
	case "hang":
		if s.Started <= s.Finished || s.Enqueued < s.Started {
			t.Errorf("%s: no operation is open: enqueued %d, started %d, finished %d", want.name, s.Enqueued, s.Started, s.Finished)
		}
		if open == 0 {
			t.Errorf("%s: the one that hangs is not recorded", want.name)
		}
	case "late": // and what was called on communicators that were gone is counted
		if ended != want.numbered || lost != 2 {
			t.Errorf("%s: %d recorded of %d, and %d lost", want.name, ended, want.numbered, lost)
		}
	case "unseen":
		if unseen != want.numbered {
			t.Errorf("%s: %d of %d ends unseen", want.name, unseen, want.numbered)
		}
		fallthrough
	default:
		if ended+lost != want.numbered {
			t.Errorf("%s: %d recorded + %d lost of %d", want.name, ended, lost, want.numbered)
		}
		if s.State == record.CommJoined && s.Finished != want.numbered {
			t.Errorf("%s: finished %d of %d", want.name, s.Finished, want.numbered)
		}
	}
}

// Everything that is played is found, by every version of the interface.
func TestEverythingIsAccountedFor(t *testing.T) {
	for _, v := range versions {
		for _, scene := range []string{"basic", "fused", "p2p", "graph", "symmetric", "lost", "crowd", "net", "hang", "late", "threads", "pipes"} {
			t.Run("v"+v+"/"+scene, func(t *testing.T) {
				t.Parallel()
				dir := t.TempDir()
				lines := play(t, plain, dir, []string{"LOCKSTEP_NCCL_EVENTS=net"}, v, scene)
				all := recorders(t, dir)
				if len(all) != 1 {
					t.Fatalf("%d recorders", len(all))
				}
				c := all[0]
				if c.header.Source != record.SourceNCCLPlugin || strconv.Itoa(int(c.header.SourceVersion)) != v || !c.header.Closed {
					t.Errorf("header %+v", c.header)
				}
				for _, want := range parse(t, lines) {
					if v == "4" && want.numbered == 0 {
						continue
					}
					check(t, c, want)
				}
			})
		}
	}
}

// What is recorded of a collective is what NCCL said of it.
func TestWords(t *testing.T) {
	dir := t.TempDir()
	play(t, plain, dir, []string{"LOCKSTEP_NCCL_EVENTS=all"}, "5", "basic")
	c := recorders(t, dir)[0]
	s := c.comm(t, 0x100)
	if s.Rank != 1 || s.Size != 4 {
		t.Errorf("rank %d of %d: the rank is init's, events of 2.28 say 0", s.Rank, s.Size)
	}
	kinds := []record.CollKind{record.AllReduce, record.AllGather, record.ReduceScatter, record.Broadcast, record.Reduce}
	for i := range uint64(20) {
		o := c.ops[s.Index][i+1]
		kind, bytes, root, op := kinds[i%5], (1000+i)*4, int32(-1), record.UnknownOp
		switch kind {
		case record.AllGather, record.ReduceScatter:
			bytes *= 4
		case record.Broadcast, record.Reduce:
			root = 0
		}
		if kind == record.AllGather || kind == record.Broadcast {
			op = record.Sum // there is none
		}
		e, b, end := o.enqueue[0], o.start[0], o.end[0]
		if e.Coll != kind || e.Bytes != bytes || e.Root != root || e.DType != record.Float32 || e.Op != op || e.Stream == 0 || e.Dur <= 0 {
			t.Errorf("%d: enqueue %+v", i+1, e)
		}
		if b.Algo != record.AlgoRing || b.Proto != record.ProtoSimple || b.Chan != uint16(1+i%8) {
			t.Errorf("%d: start %+v", i+1, b)
		}
		if dur := end.Stamp - b.Stamp; dur != int64(5000+100*i) {
			t.Errorf("%d: took %d ns by the GPU's clock, want %d", i+1, dur, 5000+100*i)
		}
		if e.Mono > b.Mono || b.Mono > end.Mono {
			t.Errorf("%d: enqueued at %d, start seen at %d, end at %d", i+1, e.Mono, b.Mono, end.Mono)
		}
	}
	if s.Ops != 20 || s.TransferNs == 0 || s.OwnNs == 0 {
		t.Errorf("sums: %+v", s)
	}
}

func TestGraphReplaysAreMarked(t *testing.T) {
	dir := t.TempDir()
	play(t, plain, dir, nil, "5", "graph")
	c := recorders(t, dir)[0]
	for seq, o := range c.ops[c.comm(t, 0x103).Index] {
		if len(o.start) != 1 || o.start[0].Flags&record.FlagReplay == 0 {
			t.Errorf("operation %d is no replay: %+v", seq, o.start)
		}
	}
}

func TestSendsAndReceives(t *testing.T) {
	for _, v := range versions {
		dir := t.TempDir()
		play(t, plain, dir, nil, v, "p2p")
		c := recorders(t, dir)[0]
		ops := c.ops[c.comm(t, 0x102).Index]
		if e := ops[1].enqueue[0]; e.Coll != record.Group || e.Bytes != 6*512 || e.Root != -1 {
			t.Errorf("v%s: a group: %+v", v, e)
		}
		if e := ops[2].enqueue[0]; e.Coll != record.Send || e.Bytes != 512 || e.Root != 0 {
			t.Errorf("v%s: a send: %+v", v, e)
		}
	}
}

// Transfers feed a connection for each peer, work requests one for each queue pair of each device.
func TestNetwork(t *testing.T) {
	const ops, others, total = 80, 20, 80 * 4 * 65536
	for _, v := range versions {
		dir := t.TempDir()
		play(t, plain, dir, []string{"LOCKSTEP_NCCL_EVENTS=all", "NCCL_IB_DISABLE=1"}, v, "net")
		c := recorders(t, dir)[0]
		if c.header.EventsForeign != ops+others || c.header.EventsLost != 0 {
			t.Errorf("v%s: %d events of other processes, want %d; %d lost", v, c.header.EventsForeign, ops, c.header.EventsLost)
		}
		var peers, pairs, elsewhere int
		channels := map[uint16]bool{}
		for _, k := range c.Conns(nil) {
			if k.Peer == 3 {
				if elsewhere++; k.ID != 0 && (k.ID != 77 || k.Channel != 1 || k.Windows < 2) || k.ID == 0 && k.Posted != others*4*65536 {
					t.Errorf("v%s: to the other peer: %+v", v, k)
				}
				continue
			}
			if channels[k.Channel] || k.Channel > 4 || (k.Channel == 0) != (k.ID == 0) {
				t.Errorf("v%s: %+v: nobody tells it from the others between these two ranks by its channel", v, k.ConnEntry)
			}
			channels[k.Channel] = true
			switch k.ID {
			case 0:
				peers++
				if k.Peer != 2 || k.Posted != total || k.Completed != total || k.Received != total || k.TxBlockedSince != 0 || k.RxWaitingSince != 0 || k.LatencyNs < 2000 || k.Windows == 0 || k.Transport != record.TransportTCP {
					t.Errorf("v%s: peer: %+v", v, k)
				}
			case 77, 78:
				pairs++
				if k.Peer != 2 || k.Windows < 2 || k.LatencyNs < 2000 || k.WindowBps == 0 || k.Transport != record.TransportRDMA || k.Posted != 0 {
					t.Errorf("v%s: queue pair: %+v", v, k)
				}
			}
		}
		if peers != 1 || pairs != 4 || elsewhere != 2 {
			t.Errorf("v%s: %d peers, %d queue pairs, %d connections to the other peer", v, peers, pairs, elsewhere)
		}
		waits := 0
		for _, r := range c.other {
			if r.Kind == record.KindPhase && record.PhaseCode(r.Code) == record.PhaseWait && r.Peer == 2 && r.Dur > 0 {
				waits++
			}
		}
		if waits != ops {
			t.Errorf("v%s: %d operations say how long they waited for whom, want %d", v, waits, ops)
		}
	}
}

// Threads that meet their first peers all at once lose nothing uncounted, and no peer is two connections.
func TestFirstPeers(t *testing.T) {
	for range 10 {
		dir := t.TempDir()
		var refused uint64
		lines := play(t, plain, dir, []string{"LOCKSTEP_NCCL_EVENTS=net"}, "5", "peers")
		for _, l := range lines {
			fmt.Sscanf(l, "refused %d", &refused)
		}
		c := recorders(t, dir)[0]
		for _, want := range parse(t, lines) {
			check(t, c, want)
		}
		if c.header.EventsLost+c.header.ConnOverflow != refused {
			t.Errorf("%d proxy operations of 1024 were refused, and %d events counted as lost, %d connections as without room", refused, c.header.EventsLost, c.header.ConnOverflow)
		}
		of := map[[2]int32]bool{}
		for _, k := range c.Conns(nil) {
			if of[[2]int32{int32(k.Comm), k.Peer}] {
				t.Errorf("peer %d of communicator %d is two connections", k.Peer, k.Comm)
			}
			of[[2]int32{int32(k.Comm), k.Peer}] = true
		}
		if len(of) < 512-int(refused) {
			t.Errorf("%d connections, and %d operations refused", len(of), refused)
		}
	}
}

// Thousands of communicators at once: those without room are counted, and so are their operations.
func TestManyCommunicators(t *testing.T) {
	dir := t.TempDir()
	lines := play(t, plain, dir, nil, "5", "many")
	c := recorders(t, dir)[0]
	var numbered, ended uint64
	for _, l := range lines {
		fmt.Sscanf(l, "total numbered=%d", &numbered)
	}
	for _, ops := range c.ops {
		for _, o := range ops {
			ended += uint64(len(o.end))
		}
	}
	if c.header.CommOverflow != 5000-4096 || numbered != 50 || ended+c.header.OpsLost != numbered {
		t.Errorf("%d communicators without room; %d recorded + %d lost of %d", c.header.CommOverflow, ended, c.header.OpsLost, numbered)
	}
}

// A child has a recorder of its own, and writes nothing into its parent's.
func TestFork(t *testing.T) {
	for _, scene := range []string{"forks", "clones"} {
		t.Run(scene, func(t *testing.T) { testFork(t, scene) })
	}
}

func testFork(t *testing.T, scene string) {
	t.Helper()
	dir := t.TempDir()
	lines := play(t, plain, dir, nil, "5", scene)
	var child, status int
	for _, l := range lines {
		fmt.Sscanf(l, "child %d status %d", &child, &status)
	}
	if status != 0 {
		t.Fatalf("the child ended with status %d", status)
	}
	all := recorders(t, dir)
	if len(all) != 2 {
		t.Fatalf("%d recorders, want the parent's and the child's", len(all))
	}
	for _, c := range all {
		if int(c.header.PID) == child {
			check(t, c, told{0x10d, "child", 1, "exact"})
		} else {
			check(t, c, told{0x10c, "parent", 2, "exact"})
		}
		if !c.header.Closed {
			t.Errorf("pid %d: not closed", c.header.PID)
		}
	}
}

// A plugin without a place for its recorder says so once, and NCCL goes on.
func TestNoRecorder(t *testing.T) {
	file := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	dir := filepath.Join(file, "dir") // neither it nor a directory beside it can be made
	for _, scene := range []string{"basic", "many", "forks"} {
		cmd := command(t, plain, dir, nil, "5", scene)
		var stderr strings.Builder
		cmd.Stderr = &stderr
		out, err := cmd.Output()
		if err != nil {
			t.Fatalf("%s: %v\n%s", scene, err, stderr.String())
		}
		if n := strings.Count(stderr.String(), "no flight recorder"); n != 1 || strings.Count(string(out), "log 2 no flight recorder") != 1 {
			t.Errorf("%s: said %d times: %s%s", scene, n, stderr.String(), out)
		}
	}
	dir = t.TempDir()
	for _, env := range []string{"LOCKSTEP_RECORDER=off", "LOCKSTEP_NCCL_EVENTS=off"} {
		if play(t, plain, dir, []string{env}, "5", "basic"); len(recorders(t, dir)) != 0 {
			t.Errorf("%s makes a recorder", env)
		}
	}
}

// A rank that is started again clears away what its former processes left long ago, and nothing else.
func TestSweep(t *testing.T) {
	dir := t.TempDir()
	play(t, plain, dir, nil, "5", "basic")
	paths, err := record.List(dir)
	if err != nil || len(paths) != 1 {
		t.Fatal(paths, err)
	}
	play(t, plain, dir, nil, "5", "basic")
	if paths, _ := record.List(dir); len(paths) != 2 {
		t.Fatalf("%d recorders: the last process's has been removed", len(paths))
	}
	anchoredBefore(t, paths[0], time.Hour)
	play(t, plain, dir, []string{"RANK=0", "WORLD_SIZE=4"}, "5", "basic") // another rank
	if _, err := os.Stat(paths[0]); err != nil {
		t.Error("another rank removes it")
	}
	play(t, plain, dir, nil, "5", "basic")
	if _, err := os.Stat(paths[0]); err == nil {
		t.Error("it is still there")
	}
	if _, err := os.Stat(record.ControlPath(paths[0])); err == nil {
		t.Error("its control file is still there")
	}
	if paths, _ := record.List(dir); len(paths) != 3 {
		t.Errorf("%d recorders, want 3", len(paths))
	}
}

// anchoredBefore has a recorder's process have anchored its clock so long ago for the last time.
func anchoredBefore(t *testing.T, path string, d time.Duration) {
	t.Helper()
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	old := binary.LittleEndian.AppendUint64(nil, uint64(time.Now().Add(-d).UnixNano()))
	for _, at := range []int64{464, 480} { // lockstep_header.anchors[].real
		if _, err := f.WriteAt(old, at); err != nil {
			t.Fatal(err)
		}
	}
}

// Jobs have names of their own as a rule, so that nobody comes back to remove what one has left: the next job does, after a day.
func TestSweepOtherJobs(t *testing.T) {
	dir := t.TempDir()
	play(t, plain, dir, []string{"LOCKSTEP_JOB=a"}, "5", "basic")
	paths, err := record.List(dir)
	if err != nil || len(paths) != 1 {
		t.Fatal(paths, err)
	}
	for _, x := range []struct {
		ago  time.Duration
		gone bool
	}{{23 * time.Hour, false}, {25 * time.Hour, true}} {
		anchoredBefore(t, paths[0], x.ago)
		play(t, plain, dir, []string{"LOCKSTEP_JOB=b"}, "5", "basic")
		if _, err := os.Stat(paths[0]); (err != nil) != x.gone {
			t.Errorf("%v after the other job's last anchor: %v", x.ago, err)
		}
	}
}

// A rank whose files may not be as large as a recorder goes without: the kernel's signal would end it.
func TestFileSizeLimit(t *testing.T) {
	var was syscall.Rlimit
	if err := syscall.Getrlimit(syscall.RLIMIT_FSIZE, &was); err != nil {
		t.Fatal(err)
	}
	play(t, plain, t.TempDir(), nil, "5", "basic") // builds what it runs
	if err := syscall.Setrlimit(syscall.RLIMIT_FSIZE, &syscall.Rlimit{Cur: 1 << 20, Max: was.Max}); err != nil {
		t.Fatal(err)
	}
	defer func() { _ = syscall.Setrlimit(syscall.RLIMIT_FSIZE, &was) }()
	dir := t.TempDir()
	play(t, plain, dir, nil, "5", "basic")
	if paths, _ := record.List(dir); len(paths) > 0 {
		t.Errorf("recorders %v", paths)
	}
}

// Slots of communicators that have gone, and of their connections, are used again, and
// nobody takes the words of the one before for those of the next.
func TestSlotsAreUsedAgain(t *testing.T) {
	quick := flavour{name: "quick", flags: []string{"-DGRACE_NS=1000000"}}
	dir := t.TempDir()
	var numbered, ended uint64
	for _, l := range play(t, quick, dir, nil, "5", "churn") {
		fmt.Sscanf(l, "total numbered=%d", &numbered)
	}
	c := recorders(t, dir)[0]
	for _, ops := range c.ops {
		for _, o := range ops {
			ended += uint64(len(o.end))
		}
	}
	if numbered != 6000 || ended+c.Lost()/3 < numbered || c.header.OpsLost != 0 || c.header.CommOverflow != 0 || c.header.ConnOverflow != 0 {
		t.Errorf("%d recorded, %d records overwritten of %d operations; %+v", ended, c.Lost(), numbered, c.header)
	}
	comms := map[uint16]record.CommStatus{}
	again := 0
	for _, s := range c.Comms(nil) {
		comms[s.Index] = s
		if s.Gen > 0 {
			again++
			if s.Since == 0 {
				t.Errorf("communicator %d of generation %d takes in the records of the one before", s.Index, s.Gen)
			}
		}
		if s.Enqueued != 1 || s.Finished != 1 || s.Ops != 1 || s.State != record.CommLeft {
			t.Errorf("%+v", s)
		}
	}
	if again == 0 || len(comms) > 1000 {
		t.Errorf("%d slots, %d used again", len(comms), again)
	}
	of := map[uint16]int{}
	for _, k := range c.Conns(nil) {
		if of[k.Comm]++; of[k.Comm] > 1 || k.Posted != 100 || k.Peer != 1+int32(comms[k.Comm].ID-0x20000)%200%3 {
			t.Errorf("communicator %x has the connection %+v", comms[k.Comm].ID, k)
		}
	}
}
