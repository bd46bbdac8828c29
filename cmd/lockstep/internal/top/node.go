package top

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"slices"
	"time"

	"github.com/lockstep-ccl/lockstep/collector"
	"github.com/lockstep-ccl/lockstep/diagnosis"
	"github.com/lockstep-ccl/lockstep/exporters/web"
	"github.com/lockstep-ccl/lockstep/record"
)

// Bounds of what recorders may say: they are other users'.
const (
	maxRecorders = 4096
	maxSize      = 1 << 17 // of a world, of a communicator
	maxMembers   = 1 << 20 // of all communicators of a job
	endedFor     = time.Minute
)

// recorders reads the ranks of this node.
func (c *Cmd) recorders(ctx context.Context) ([]View, error) {
	paths, err := find(c.RuntimeDir)
	if err != nil {
		return nil, err
	}
	jobs := map[string]*nodeJob{}
	var bad []error
	for _, path := range paths[:min(len(paths), maxRecorders)] {
		if err := ctx.Err(); err != nil {
			return nil, err
		}
		switch err := c.read(path, jobs); {
		case err == nil, errors.Is(err, os.ErrNotExist):
		default:
			bad = append(bad, err)
		}
	}
	out := []View{}
	for name, j := range jobs {
		out = append(out, j.view(name, c.RuntimeDir))
	}
	slices.SortFunc(out, func(a, b View) int { return cmp.Compare(a.Job, b.Job) })
	if len(out) == 0 {
		if len(bad) > 0 {
			return nil, errors.Join(bad...)
		}
		return nil, fmt.Errorf("no live ranks in %s: is a job running here, with this LOCKSTEP_RUNTIME_DIR?", c.RuntimeDir)
	}
	return out, nil
}

// find lists the recorders below a runtime directory: its own, all users' beside it, and those
// of logical nodes on one machine.
func find(dir string) (paths []string, err error) {
	seen := map[string]bool{}
	add := func(d string) error {
		list, err := record.List(d)
		for _, p := range list {
			if !seen[p] {
				seen[p] = true
				paths = append(paths, p)
			}
		}
		return err
	}
	places, _ := record.Places(dir)
	for _, p := range places {
		_ = add(p.Path) // another user's, as a rule
	}
	if err := add(dir); err != nil && len(places) == 0 {
		return nil, err
	}
	entries, _ := os.ReadDir(dir)
	for _, e := range entries {
		if e.IsDir() {
			_ = add(filepath.Join(dir, e.Name()))
		}
	}
	return paths, nil
}

// nodeJob is what this node's recorders say of a job, as evidence.
type nodeJob struct {
	ev      diagnosis.Evidence
	seen    map[int]bool
	created map[int]time.Time
	nodes   map[string]int32
	comms   map[uint64]int32
	members int
	attempt uint32
	world   int32
	parts   []part // of the newest process of each rank
}

// part is one process's communicators and connections.
type part struct {
	rank  int
	comms []record.CommStatus
	conns []record.ConnStatus
}

// read takes one recorder into its job.
func (c *Cmd) read(path string, jobs map[string]*nodeJob) error {
	r, err := record.Open(path)
	if err != nil {
		return err
	}
	defer r.Close()
	h := r.Header()
	if c.Job != "" && h.Job != c.Job || h.Rank < 0 || h.Rank >= maxSize || h.WorldSize > maxSize || h.MarksOnly() {
		return nil
	}
	pid, alive := r.Process()
	comms, conns := r.Comms(nil), r.Conns(nil)
	if err := r.Err(); err != nil {
		return err
	}
	last := h.Anchor.Mono
	for i := range comms {
		last = max(last, comms[i].StateAt, comms[i].FinishedAt, comms[i].StartedAt)
	}
	if !alive && record.Now()-last > int64(endedFor) {
		return nil // of a job that is over
	}
	j := jobs[h.Job]
	if j == nil {
		j = &nodeJob{seen: map[int]bool{}, created: map[int]time.Time{}, nodes: map[string]int32{}, comms: map[uint64]int32{}}
		j.ev.Now = record.Now()
		jobs[h.Job] = j
	}
	rank := int(h.Rank)
	if h.Attempt < j.attempt || j.seen[rank] && h.Attempt == j.attempt && h.Created.Before(j.created[rank]) {
		return nil
	}
	if h.Attempt > j.attempt {
		*j = nodeJob{seen: map[int]bool{}, created: map[int]time.Time{}, nodes: j.nodes, comms: map[uint64]int32{}, ev: diagnosis.Evidence{Now: j.ev.Now, Nodes: j.ev.Nodes}, attempt: h.Attempt}
	}
	for len(j.ev.Ranks) <= rank {
		j.ev.Ranks = append(j.ev.Ranks, diagnosis.Rank{Node: -1})
	}
	node, known := j.nodes[h.Node]
	if !known {
		node = int32(len(j.ev.Nodes))
		j.nodes[h.Node] = node
		j.ev.Nodes = append(j.ev.Nodes, diagnosis.Node{Name: h.Node})
	}
	j.world = max(j.world, h.WorldSize)
	j.seen[rank], j.created[rank] = true, h.Created
	j.ev.Ranks[rank] = diagnosis.Rank{Node: node, PID: int32(pid), Attempt: h.Attempt, Proc: procState(pid, alive, h.Closed), ProcAt: ended(alive, last)}
	j.parts = slices.DeleteFunc(j.parts, func(p part) bool { return p.rank == rank })
	j.parts = append(j.parts, part{rank, comms, conns})
	return nil
}

func ended(alive bool, last int64) int64 {
	if alive {
		return 0
	}
	return last
}

// procState is what keeps a process from running.
func procState(pid int, alive, closed bool) diagnosis.ProcState {
	switch {
	case closed:
		return diagnosis.ProcExited
	case !alive:
		return diagnosis.ProcGone
	}
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	_, fields, ok := bytes.Cut(stat[max(0, bytes.LastIndexByte(stat, ')')):], []byte(") ")) // the name may hold anything
	if err != nil || !ok || len(fields) == 0 {
		return diagnosis.ProcRunning
	}
	switch fields[0] {
	case 'T', 't':
		return diagnosis.ProcStopped
	case 'D':
		return diagnosis.ProcDisk
	}
	return diagnosis.ProcRunning
}

// view makes a job of what its parts say.
func (j *nodeJob) view(name, dir string) View {
	for i := range j.parts {
		j.take(&j.parts[i])
	}
	v := collector.View(&j.ev, func(rank int) bool { return j.seen[rank] })
	out := View{Job: name, Where: dir, At: time.Now(), Attempt: j.attempt, WorldSize: int(j.world), Open: []web.Incident{}}
	for _, s := range web.Stand(v, nil) {
		if !j.seen[s.Rank] {
			continue
		}
		if known := slices.DeleteFunc(slices.Clone(s.WaitsFor), func(w int32) bool { return w < 0 }); !s.Delivers && len(known) < len(s.WaitsFor) {
			s.WaitsFor, s.Waited = known, len(known) // whether those of other nodes have entered is not known here
		}
		out.Ranks = append(out.Ranks, s)
	}
	return out
}

// take merges one process's communicators and connections.
func (j *nodeJob) take(p *part) {
	index := map[uint16]int32{}
	for i := range p.comms {
		c := &p.comms[i]
		if c.Size <= 0 || c.Size > maxSize || c.Rank < 0 || c.Rank >= c.Size {
			continue
		}
		at, known := j.comms[c.ID]
		if !known {
			if j.members += int(c.Size); j.members > maxMembers {
				return
			}
			at = int32(len(j.ev.Comms))
			j.comms[c.ID] = at
			members := make([]diagnosis.Member, c.Size)
			for k := range members {
				members[k] = diagnosis.Member{World: -1, Peer: -1, FaultPeer: -1, Started: math.MaxUint64} // on another node, and not known
			}
			j.ev.Comms = append(j.ev.Comms, diagnosis.Comm{ID: c.ID, Name: c.Name, Members: members})
		}
		if int(c.Size) != len(j.ev.Comms[at].Members) {
			continue
		}
		index[c.Index] = at
		j.ev.Comms[at].Members[c.Rank] = diagnosis.Member{
			World: int32(p.rank), State: c.State, StateAt: c.StateAt, Coll: c.Coll, Peer: -1, Bytes: c.Bytes,
			Enqueued: c.Enqueued, Started: c.Started, Finished: c.Finished,
			EnqueuedAt: c.EnqueuedAt, StartedAt: c.StartedAt, FinishedAt: c.FinishedAt,
		}
	}
	for i := range p.conns {
		c := &p.conns[i]
		at, ok := index[c.Comm]
		if !ok || c.Peer < 0 || int(c.Peer) >= len(j.ev.Comms[at].Members) {
			continue
		}
		own := slices.IndexFunc(j.ev.Comms[at].Members, func(m diagnosis.Member) bool { return m.World == int32(p.rank) })
		if c.RxWaitingSince > 0 {
			j.ev.Conns = append(j.ev.Conns, diagnosis.Conn{Comm: at, Src: c.Peer, Dst: int32(own), RxWaitingSince: c.RxWaitingSince})
		}
		if c.TxBlockedSince > 0 {
			j.ev.Conns = append(j.ev.Conns, diagnosis.Conn{Comm: at, Src: int32(own), Dst: c.Peer, TxBlockedSince: c.TxBlockedSince})
		}
	}
}
