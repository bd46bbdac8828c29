package ebpf

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"time"

	"github.com/lockstep-ccl/lockstep/record"
)

const (
	// settleFor is how long a process is watched before a recorder is kept for it: it may
	// be about to keep its own, ns.
	settleFor = int64(500e6)
	// joinFor is how long a communicator may be in the making before that is told, ns.
	joinFor = int64(1e9)
	// anchorEvery is the time between two anchors of a recorder's clock, ns.
	anchorEvery = int64(5e9)
	// maxEarly bounds the calls of a process that wait for its recorder.
	maxEarly = 1 << 10
	// maxRanks bounds the processes for which recorders are kept.
	maxRanks = 256
	// Slots of such a recorder: 640 KiB in all.
	ringSlots, commSlots, connSlots = 1 << 12, 256, 1
)

// rank is one process that calls NCCL.
type rank struct {
	pid    int
	first  int64 // when it was seen first
	id     record.Identity
	placed bool // its environment says which rank it is
	w      *record.Writer
	failed bool // its recorder could not be made
	own    bool // it keeps a recorder of its own
	comms  map[uint64]*comm
	byAddr map[uint64]*comm
	anchor int64
	missed time.Time          // since when there is no such process; zero while there is
	looked map[uint64]*looked // communicators whose memory was looked at, by address
	early  []callsCall        // recorded before there was a recorder, or its communicator in it; at most maxEarly
}

// comm is one communicator of it.
type comm struct {
	id       uint64
	created  uint64
	size     int32
	c        *record.Comm
	state    record.CommState
	called   uint64
	returned uint64
}

// entry is one communicator in the programs' map.
type entry struct {
	key callsCommKey
	callsComm
}

// joiningKey marks a communicator in the making; calls.bpf.c has the same.
const joiningKey = 1 << 63

// identified reports whether it is known which communicator this is, and which rank of it.
func (e *entry) identified() bool { return e.Id != 0 && e.Rank >= 0 && e.Rank < e.Size }

var stateOf = map[uint8]record.CommState{
	stateJoining: record.CommJoining, stateJoined: record.CommJoined, stateLeft: record.CommLeft, stateAborted: record.CommAborted,
}

// newRank begins to follow a process.
func (s *Source) newRank(pid int, now int64) *rank {
	r := &rank{pid: pid, first: now, comms: map[uint64]*comm{}, byAddr: map[uint64]*comm{}, looked: map[uint64]*looked{}}
	env := environ(s.o.Proc, pid)
	r.id, r.placed = identify(env)
	r.id.Node = s.o.Node
	if r.id.Job == "" {
		r.id.Job = s.o.Job
	}
	tgid := uint32(pid)
	if err := s.probes.calls.Processes.Put(tgid, uint32(1)); err != nil {
		s.trouble(fmt.Errorf("the end of process %d will not be heard of: %w", pid, err))
	}
	return r
}

// tell brings a process's recorder up to date with its communicators, and reports whether
// there is one.
func (s *Source) tell(r *rank, entries []*entry, now int64) bool {
	if r.own = s.others[r.pid]; r.own {
		r.discard()
		return false
	}
	if r.w == nil && !s.open(r, entries, now) {
		return false
	}
	if now-r.anchor >= anchorEvery {
		r.anchor = now
		r.w.Anchor()
	}
	for _, e := range entries {
		if e.identified() {
			r.tell(e, now)
		}
	}
	return true
}

// open makes the recorder of a process that has none.
func (s *Source) open(r *rank, entries []*entry, now int64) bool {
	if r.failed || now-r.first < settleFor || s.updated <= r.first {
		return false
	}
	for _, e := range entries {
		if !e.identified() || r.placed && r.id.Job != "" {
			continue
		}
		if !r.placed { // the communicator made first is the world's
			r.id.Rank, r.id.WorldSize, r.placed = e.Rank, e.Size, true
		}
		if r.id.Job == "" {
			r.id.Job = jobOf(e.Id)
		}
	}
	if !r.placed || r.id.Job == "" {
		return false
	}
	if s.recorders() >= maxRanks {
		s.trouble(fmt.Errorf("%d processes are watched, the limit: not process %d", maxRanks, r.pid))
		return false
	}
	w, err := record.Create(record.Options{
		Dir: s.o.Dir, Identity: r.id, Source: record.SourceNCCLProbes, PID: r.pid, RingSlots: ringSlots, CommSlots: commSlots, ConnSlots: connSlots,
	})
	if err != nil {
		r.failed = true
		s.trouble(fmt.Errorf("rank %d of job %s, process %d: %w", r.id.Rank, r.id.Job, r.pid, err))
		return false
	}
	r.w, r.anchor = w, now
	s.log.Info("a rank is watched by probes", "job", r.id.Job, "rank", r.id.Rank, "size", r.id.WorldSize, "pid", r.pid)
	return true
}

// tell takes in one communicator.
func (r *rank) tell(e *entry, now int64) {
	joining := e.key.Comm&joiningKey != 0
	if joining && now-int64(e.Created) < joinFor {
		return
	}
	c := r.comms[e.Id]
	if c == nil {
		k, ok := r.w.AddComm(record.CommEntry{
			ID: e.Id, Name: fmt.Sprintf("nccl-%08x", uint32(e.Id)), Rank: e.Rank, Size: e.Size, Parent: e.Parent, State: stateOf[e.State],
		})
		if !ok {
			return // counted
		}
		c = &comm{id: e.Id, created: e.Created, size: e.Size, c: k, state: stateOf[e.State]}
		r.comms[e.Id] = c
	}
	if joining {
		return
	}
	if old := r.byAddr[e.key.Comm]; old != nil && old != c && old.state != record.CommLeft && old.state != record.CommAborted {
		old.state = record.CommLeft // its memory is another one's: it was destroyed since the last look
		old.c.SetState(record.CommLeft)
		delete(r.comms, old.id)
	}
	r.byAddr[e.key.Comm] = c
	if e.Called > c.called {
		c.called = e.Called
		c.c.Enqueued(e.Called, int64(e.CalledAt), record.CollKind(e.Kind), c.bytes(record.CollKind(e.Kind), record.DType(e.Dtype), e.Count))
		c.c.Started(e.Called, int64(e.CalledAt))
	}
	if back := min(e.Returned, c.called); back > c.returned {
		c.returned = back
		c.c.Finished(back, int64(e.ReturnedAt))
	}
	if state := stateOf[e.State]; state != c.state {
		c.state = state
		if state == record.CommAborted {
			c.c.Aborted(record.ResultOK, -1)
		} else {
			c.c.SetState(state)
		}
	}
}

// bytes is the size of an operation by NCCL's convention: of all ranks' data where each has a part.
func (c *comm) bytes(kind record.CollKind, dtype record.DType, count uint64) uint64 {
	return count * uint64(dtype.Size()) * uint64(kind.Traits().Shares(int(max(c.size, 1))))
}

// record appends one call.
func (r *rank) record(k *callsCall) bool {
	c := r.byAddr[k.Comm]
	switch {
	case r.own:
		return true // it tells of itself
	case c != nil && c.created == k.Created:
	case len(r.early) < maxEarly && r.w == nil && !r.failed:
		r.early = append(r.early, *k)
		return true
	default:
		return false
	}
	kind, dtype := record.CollKind(k.Kind), record.DType(k.Dtype)
	rec := record.Record{
		Kind: record.KindEnqueue, Mono: int64(k.At), Comm: c.c.Index(), Thread: k.Tid, Seq: k.Seq, Coll: kind, DType: dtype,
		Op: record.RedOp(k.Op), Root: k.Peer, Bytes: c.bytes(kind, dtype, k.Count), Stream: uint32(k.Stream),
	}
	if k.InPlace != 0 {
		rec.Flags = record.FlagInPlace
	}
	r.w.Append(&rec)
	return true
}

// ended takes in that the process has ended. One that ended well left in good order.
func (r *rank) ended(code uint32) {
	if code == 0 {
		_ = r.w.Close() // a nil writer's does nothing, and others have nothing to say
	}
}

// discard takes back what was told in the process's name.
func (r *rank) discard() {
	if r.w != nil {
		_ = os.Remove(r.w.Path()) // it may be gone already
		r.w = nil
		clear(r.comms)
		clear(r.byAddr)
	}
	r.early = nil
}

// clean removes the recorders that a former agent has kept for processes that still
// live: nobody writes them any more.
func clean(dir string) error {
	paths, err := record.List(dir)
	if err != nil {
		return err
	}
	var errs []error
	for _, path := range paths {
		r, err := record.Open(path)
		if err != nil {
			continue // the recorder source tells of it
		}
		if r.Header().Source == record.SourceNCCLProbes && r.Alive() {
			errs = append(errs, os.Remove(path))
		}
		errs = append(errs, r.Close())
	}
	return errors.Join(errs...)
}

// exists reports whether a process is there, and no zombie.
func exists(proc string, pid int) bool {
	text, err := os.ReadFile(filepath.Join(proc, strconv.Itoa(pid), "statm"))
	return err == nil && len(text) > 1 && string(text[:2]) != "0 "
}
