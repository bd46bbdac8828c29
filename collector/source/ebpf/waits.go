package ebpf

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"

	"github.com/lockstep-ccl/lockstep/diagnosis"
	"github.com/lockstep-ccl/lockstep/record"
)

const (
	// waitsEvery is the time between two looks at what ranks wait for, ns.
	waitsEvery = int64(1e9)
	// resentFor is the time over which segments that were sent again add up, in looks.
	resentFor = 10
	// maxChildren bounds the children of a rank that are watched, maxTasks its threads whose
	// children are asked for.
	maxChildren, maxTasks = 256, 512
)

// Classes of threads and kinds of waits; waits.bpf.c has the same.
const (
	classOthers = iota
	classNCCL
	classChildren
	numClasses

	offRunnable = 0
	offSleep    = 1
	offDisk     = 2
)

// waits watches what the threads of ranks wait for.
type waits struct {
	proc  string
	objs  waitsObjects
	links []link.Link
	parts error // what is not seen
	at    int64
	ranks map[int]*waiter
	on    map[uint32]waitsWatched
	sent  map[waitsConnection]uint64 // segments sent again, as of the last look
}

// waiter is what is known of one rank.
type waiter struct {
	disk, runnable [numClasses]uint64 // ns ever
	resent         [resentFor]uint32  // ring of looks
	looks          int
	told           diagnosis.OffCPU
}

// watchWaits loads the programs and attaches those that this kernel lets it. One that
// sees nothing is an error.
func watchWaits(proc string) (*waits, error) {
	w := &waits{proc: proc, ranks: map[int]*waiter{}, on: map[uint32]waitsWatched{}, sent: map[waitsConnection]uint64{}}
	if err := loadWaitsObjects(&w.objs, nil); err != nil {
		return nil, fmt.Errorf("what ranks wait for: %w", why(err))
	}
	for _, p := range []struct {
		what string
		prog *ebpf.Program
	}{{"waits", w.objs.Switched}, {"wakeups", w.objs.Woken}, {"TCP segments sent again", w.objs.Retransmitted}} {
		l, err := link.AttachTracing(link.TracingOptions{Program: p.prog})
		if err != nil {
			w.parts = errors.Join(w.parts, fmt.Errorf("%s: %w", p.what, why(err)))
			continue
		}
		w.links = append(w.links, l)
	}
	if len(w.links) == 0 {
		return nil, errors.Join(w.parts, w.objs.Close())
	}
	return w, nil
}

func (w *waits) close() error { return errors.Join(closeAll(w.links), w.objs.Close()) }

// look looks at the given ranks' processes.
func (w *waits) look(pids []int, now int64) {
	if w.at != 0 && now-w.at < waitsEvery {
		return
	}
	took := now - w.at
	first := w.at == 0
	w.at = now
	w.watch(pids)
	current, asleep := w.away(now)
	resent := w.resentBy(pids)
	here := map[int]bool{}
	for _, pid := range pids {
		here[pid] = true
		r := w.ranks[pid]
		fresh := r == nil || first
		if r == nil {
			r = &waiter{}
			w.ranks[pid] = r
		}
		var disk, runnable [numClasses]float32
		for class := range numClasses {
			key := waitsSumKey{Rank: uint32(pid), Class: uint32(class)}
			var sum waitsSum
			_ = w.objs.Sums.Lookup(key, &sum) // none yet: nothing has waited
			d, q := sum.DiskNs+current[key].DiskNs, sum.RunnableNs+current[key].RunnableNs
			if !fresh && d >= r.disk[class] && q >= r.runnable[class] {
				disk[class] = min(float32(d-r.disk[class])/float32(took), 1)
				runnable[class] = min(float32(q-r.runnable[class])/float32(took), 1)
			}
			r.disk[class], r.runnable[class] = d, q
		}
		r.resent[r.looks%resentFor] = resent[pid]
		r.looks++
		r.told = diagnosis.OffCPU{
			Disk: min(disk[classOthers]+disk[classNCCL], 1), ChildDisk: disk[classChildren], NCCLStarved: runnable[classNCCL], ChildStarved: runnable[classChildren],
		}
		for _, n := range r.resent {
			r.told.Resent += n
		}
		if tid := asleep[pid]; tid != 0 && max(r.told.Disk, r.told.ChildDisk) > 0 {
			r.told.For = waitFor(w.proc, tid)
		}
	}
	for pid := range w.ranks {
		if !here[pid] {
			delete(w.ranks, pid)
		}
	}
}

// watch tells the programs which processes to look at: ranks and their children.
func (w *waits) watch(pids []int) {
	want := map[uint32]waitsWatched{}
	for _, pid := range pids {
		for _, child := range children(w.proc, pid) {
			want[uint32(child)] = waitsWatched{Rank: uint32(pid), Child: 1}
		}
	}
	for _, pid := range pids {
		want[uint32(pid)] = waitsWatched{Rank: uint32(pid)}
	}
	for pid := range w.on {
		if _, ok := want[pid]; !ok {
			_ = w.objs.Watching.Delete(pid) // it may not have been put for want of room
			delete(w.on, pid)
		}
	}
	for pid, x := range want {
		if old, ok := w.on[pid]; !ok || old != x {
			if w.objs.Watching.Put(pid, x) == nil {
				w.on[pid] = x
				w.already(pid, x)
			}
		}
	}
}

// already finds the threads that are in state D as a process begins to be watched: nobody
// will see them go there.
func (w *waits) already(pid uint32, x waitsWatched) {
	dir := filepath.Join(w.proc, strconv.Itoa(int(pid)), "task")
	tasks, err := os.Open(dir)
	if err != nil {
		return
	}
	defer tasks.Close()
	names, _ := tasks.Readdirnames(maxTasks)
	for _, name := range names {
		text, err := os.ReadFile(filepath.Join(dir, name, "stat"))
		tid, e := strconv.ParseUint(name, 10, 32)
		i := bytes.LastIndexByte(text, ')')
		if err != nil || e != nil || i < 0 || !bytes.HasPrefix(text[i:], []byte(") D")) {
			continue
		}
		a := waitsAway{At: uint64(record.Now()), Rank: x.Rank, Class: classOthers, Off: offDisk}
		if x.Child != 0 {
			a.Class = classChildren
		}
		_ = w.objs.ThreadsAway.Update(uint32(tid), a, ebpf.UpdateNoExist) // what the programs saw meanwhile is better
	}
}

// away adds up the waits that have not ended, and finds for each rank a thread in state D.
func (w *waits) away(now int64) (current map[waitsSumKey]waitsSum, asleep map[int]uint32) {
	current, asleep = map[waitsSumKey]waitsSum{}, map[int]uint32{}
	longest := map[int]uint64{}
	var tid uint32
	var a waitsAway
	each := w.objs.ThreadsAway.Iterate()
	for each.Next(&tid, &a) {
		if a.At == 0 || int64(a.At) > now || w.ranks[int(a.Rank)] == nil {
			continue
		}
		key := waitsSumKey{Rank: a.Rank, Class: uint32(a.Class)}
		sum := current[key]
		ns := uint64(now) - a.At
		switch {
		case a.Off == offRunnable:
			sum.RunnableNs += ns
		case a.Woken != 0:
			sum.RunnableNs += uint64(now) - min(a.Woken, uint64(now))
		case a.Off == offDisk:
			sum.DiskNs += ns
			if pid := int(a.Rank); ns > longest[pid] {
				longest[pid], asleep[pid] = ns, tid
			}
		}
		current[key] = sum
	}
	return current, asleep
}

// children lists a process's children.
func children(proc string, pid int) (all []int) {
	dir := filepath.Join(proc, strconv.Itoa(pid), "task")
	tasks, err := os.Open(dir)
	if err != nil {
		return nil
	}
	defer tasks.Close()
	names, _ := tasks.Readdirnames(maxTasks)
	for _, tid := range names {
		text, err := os.ReadFile(filepath.Join(dir, tid, "children")) // not every kernel has it
		if err != nil {
			continue
		}
		for _, f := range strings.Fields(string(text)) {
			if child, err := strconv.Atoi(f); err == nil && len(all) < maxChildren {
				all = append(all, child)
			}
		}
	}
	return all
}

// kernelFunctions begin the names of kernel functions in which threads wait in state D.
var kernelFunctions = []struct {
	prefix string
	what   diagnosis.WaitFor
}{
	{"nfs", diagnosis.WaitForNFS}, {"rpc_", diagnosis.WaitForNFS}, {"__rpc", diagnosis.WaitForNFS},
	{"ptlrpc", diagnosis.WaitForLustre}, {"cl_", diagnosis.WaitForLustre}, {"osc_", diagnosis.WaitForLustre}, {"ll_", diagnosis.WaitForLustre}, {"ldlm", diagnosis.WaitForLustre},
	{"fuse", diagnosis.WaitForFUSE}, {"request_wait_answer", diagnosis.WaitForFUSE}, {"__fuse", diagnosis.WaitForFUSE},
	{"ceph", diagnosis.WaitForCeph},
	{"nv_", diagnosis.WaitForGPUDriver}, {"nvidia", diagnosis.WaitForGPUDriver}, {"uvm_", diagnosis.WaitForGPUDriver}, {"rm_", diagnosis.WaitForGPUDriver}, {"os_acquire", diagnosis.WaitForGPUDriver}, {"_nv", diagnosis.WaitForGPUDriver},
	{"rwsem", diagnosis.WaitForLock}, {"__mutex", diagnosis.WaitForLock}, {"down_", diagnosis.WaitForLock},
	{"io_schedule", diagnosis.WaitForStorage}, {"folio_wait", diagnosis.WaitForStorage}, {"wait_on_page", diagnosis.WaitForStorage}, {"blk_", diagnosis.WaitForStorage},
	{"blkdev", diagnosis.WaitForStorage}, {"submit_bio", diagnosis.WaitForStorage}, {"jbd2", diagnosis.WaitForStorage}, {"xfs", diagnosis.WaitForStorage}, {"xlog", diagnosis.WaitForStorage},
	{"ext4", diagnosis.WaitForStorage}, {"btrfs", diagnosis.WaitForStorage}, {"balance_dirty", diagnosis.WaitForStorage}, {"wbt_", diagnosis.WaitForStorage}, {"rq_qos", diagnosis.WaitForStorage},
}

// waitFor says what a thread in state D waits for.
func waitFor(proc string, tid uint32) diagnosis.WaitFor {
	f, err := os.Open(filepath.Join(proc, strconv.Itoa(int(tid)), "wchan"))
	if err != nil {
		return diagnosis.WaitForUnknown
	}
	defer f.Close()
	name, _ := io.ReadAll(io.LimitReader(f, 128)) // what there is
	return waitForOf(string(name))
}

func waitForOf(function string) diagnosis.WaitFor {
	for _, k := range kernelFunctions {
		if strings.HasPrefix(function, k.prefix) {
			return k.what
		}
	}
	return diagnosis.WaitForUnknown
}
