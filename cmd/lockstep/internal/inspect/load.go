package inspect

import (
	"bytes"
	"fmt"
	"os"

	"github.com/lockstep-ccl/lockstep/record"
)

// maxRecords bounds what is kept of one recorder's ring.
const maxRecords = 1 << 16

// process is everything that one recorder says, in its own clock.
type process struct {
	path    string
	header  record.Header
	state   string
	kernel  string // see Process.Kernel
	at      int64  // what ages are counted to
	lost    uint64
	comms   []record.CommStatus
	conns   []record.ConnStatus
	gpus    []record.DeviceStatus
	ops     map[uint16]*history // by communicator index
	since   map[uint16]uint64   // likewise: older records are of a former communicator
	stamped map[uint16]bool     // likewise: a GPU's operations have its numbers, and those on the host their own
	marks   map[record.MarkCode]record.Record
	step    uint64
	events  []record.Record   // windows and changes of paths
	history [][]record.Window // parallel to conns
}

const (
	running = "running"
	closed  = "closed"
	died    = "died"
)

// history is the operations of one communicator, oldest first.
type history struct {
	bySeq map[uint64]*operation
	order []*operation
}

// operation is one collective or point-to-point operation, folded from its
// records; a record that was overwritten leaves its fields zero.
type operation struct {
	seq                      uint64
	enqueue, start, end      record.Record
	enqueued, started, ended bool
	wait, transfer           int64
	waitedFor                int32
	clockErr                 int64 // of a GPU's stamps
	host                     bool  // of a communicator that a GPU stamps
}

// onHost is added to the sequence of operations on the host of a communicator
// that a GPU stamps, to tell them apart and list them last.
const onHost = 1 << 63

func load(path string) (*process, error) {
	r, err := record.Open(path)
	if err != nil {
		return nil, err
	}
	defer r.Close()
	p := &process{path: path, ops: map[uint16]*history{}, marks: map[record.MarkCode]record.Record{}}
	pid, alive := r.Process()
	r.SeekTail(maxRecords)
	p.since, p.stamped = map[uint16]uint64{}, map[uint16]bool{}
	for _, c := range r.Comms(nil) {
		p.since[c.Index], p.stamped[c.Index] = c.Since, c.Stamps+c.Copies > 0
	}
	var last int64 // sign of life
	buf := make([]record.Record, 256)
	for left := maxRecords; left > 0; {
		n := r.Next(buf)
		if n == 0 {
			break
		}
		left -= n
		for i := range buf[:n] {
			last = max(last, buf[i].Mono)
			if buf[i].Ticket >= p.since[buf[i].Comm] || buf[i].Kind == record.KindMark {
				p.fold(&buf[i])
			}
		}
	}
	stamps := make([]record.Stamp, 256)
	for left := maxRecords; left > 0; {
		n := r.Stamps(stamps)
		if n == 0 {
			break
		}
		left -= n
		for i := range stamps[:n] {
			last = max(last, stamps[i].End)
			p.foldStamp(&stamps[i])
		}
	}
	p.comms, p.conns, p.gpus = r.Comms(nil), r.Conns(nil), r.Devices(nil)
	for i := range p.conns {
		p.history = append(p.history, r.History(&p.conns[i], nil))
	}
	p.header = r.Header()
	_, lost, _ := r.StampCount()
	p.lost = lost + p.header.Appended - min(p.header.Appended, r.Read()+uint64(r.Pending()))
	if err := r.Err(); err != nil {
		return nil, err
	}
	switch {
	case p.header.Closed:
		p.state = closed
	case alive:
		p.state = running
		p.header.PID = int32(pid) // as an operator finds it, though the rank be in a container
		p.kernel = kernelState(p.header.PID)
	default:
		p.state = died
	}
	if p.state == running {
		p.at = record.Now()
		return p, nil
	}
	last = max(last, p.header.Anchor.Mono)
	for _, c := range p.comms {
		last = max(last, c.EnqueuedAt, c.StartedAt, c.FinishedAt)
	}
	for _, c := range p.conns {
		last = max(last, c.PostedAt, c.CompletedAt, c.ReceivedAt)
	}
	p.at = last
	return p, nil
}

// kernelState says what keeps a process from running, by field 3 of
// /proc/PID/stat; "" when nothing does.
func kernelState(pid int32) string {
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	_, fields, ok := bytes.Cut(stat[max(0, bytes.LastIndexByte(stat, ')')):], []byte(") ")) // the name may hold anything
	if err != nil || !ok || len(fields) == 0 {
		return ""
	}
	switch fields[0] {
	case 'T':
		return "stopped by a signal"
	case 't':
		return "stopped by a debugger"
	case 'D':
		return "in uninterruptible sleep"
	}
	return ""
}

func (p *process) fold(r *record.Record) {
	switch r.Kind {
	case record.KindWindow, record.KindLink:
		p.events = append(p.events, *r)
	case record.KindEnqueue:
		o := p.operation(r)
		o.enqueue, o.enqueued = *r, true
	case record.KindStart:
		o := p.operation(r)
		o.start, o.started = *r, true
	case record.KindPhase:
		o := p.operation(r)
		switch record.PhaseCode(r.Code) {
		case record.PhaseWait:
			o.wait += r.Dur
			o.waitedFor = r.Peer
		case record.PhaseTransfer:
			o.transfer += r.Dur
		}
	case record.KindEnd:
		o := p.operation(r)
		o.end, o.ended = *r, true
	case record.KindWhole:
		o := p.operation(r)
		o.start, o.end, o.started, o.ended = *r, *r, true, true
		o.start.Mono -= r.Dur
		if r.Flags&record.FlagStamped != 0 {
			o.start.Clock = record.ClockGPU
		}
		if !o.enqueued {
			o.enqueue, o.enqueued = o.start, true
		}
		o.wait, o.transfer, o.waitedFor = r.Wait, r.Dur-r.Wait, r.Peer
	case record.KindMark:
		code := record.MarkCode(r.Code)
		if code == record.MarkStep {
			p.step = r.Value
		}
		if r.Flags&record.FlagBegin != 0 {
			p.marks[code] = *r
		} else {
			delete(p.marks, code)
		}
	}
}

// foldStamp takes in an operation that a GPU stamped, as if it had been told in
// records. Nobody knows when it was enqueued.
func (p *process) foldStamp(s *record.Stamp) {
	o := p.numbered(s.Comm, s.Seq)
	o.enqueue = record.Record{Mono: s.Start, Coll: s.Coll, DType: s.DType, Op: s.Op, Root: s.Root, Bytes: s.Bytes}
	o.start = record.Record{Mono: s.Start, Algo: s.Algo, Proto: s.Proto, Chan: s.SMs, Clock: record.ClockGPU}
	if s.Replay() {
		o.start.Flags = record.FlagReplay
	}
	o.enqueued, o.started, o.clockErr = s.Coll != record.CollNone, true, s.Err
	if s.End != 0 {
		o.end, o.ended = record.Record{Mono: s.End}, true
		o.wait, o.transfer, o.waitedFor = s.Wait, s.End-s.Start-s.Wait, s.Peer
	}
}

// operation is the one that a record tells of.
func (p *process) operation(r *record.Record) *operation {
	if !p.stamped[r.Comm] {
		return p.numbered(r.Comm, r.Seq)
	}
	o := p.numbered(r.Comm, r.Seq|onHost)
	o.host = true
	return o
}

func (p *process) numbered(comm uint16, seq uint64) *operation {
	h := p.ops[comm]
	if h == nil {
		h = &history{bySeq: map[uint64]*operation{}}
		p.ops[comm] = h
	}
	o := h.bySeq[seq]
	if o == nil {
		o = &operation{seq: seq, waitedFor: -1}
		h.bySeq[seq] = o
		h.order = append(h.order, o)
	}
	return o
}

// worldRanks maps a communicator's id and rank to the rank in the job, as far
// as its members' recorders are here.
func worldRanks(ps []*process) func(comm uint64, rank int32) (int32, bool) {
	type member struct {
		comm uint64
		rank int32
	}
	worlds := map[member]int32{}
	for _, p := range ps {
		for _, c := range p.comms {
			worlds[member{c.ID, c.Rank}] = p.header.Rank
		}
	}
	return func(comm uint64, rank int32) (int32, bool) {
		w, ok := worlds[member{comm, rank}]
		return w, ok
	}
}
