package replay

import (
	"fmt"
	"io"
	"slices"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/lockstep-ccl/lockstep/diagnosis"
	pb "github.com/lockstep-ccl/lockstep/diagnosis/replay/internal/evidencepb"
)

// Header says whose evidence a segment holds.
type Header struct {
	Job      string
	Run      uint64 // random, drawn when the recording engine was made
	Segment  uint64 // from 1 in each run
	Created  time.Time
	Started  time.Time     // when the run began
	Program  string        // version of the program that records
	Interval time.Duration // intended between two passes
	Config   diagnosis.Config
	// Unknown are settings of Config that this program does not have.
	Unknown []string
}

// Writer writes a recording. It is not safe for concurrent use.
type Writer struct {
	w      io.Writer
	pack   *packer
	enc    encoder
	cur    *state
	told   []diagnosis.Verdict
	key    bool // the next pass is a key frame
	number uint64
}

// NewWriter returns a Writer of a recording of one segment or more.
func NewWriter(w io.Writer, h Header) (*Writer, error) {
	p, err := newPacker()
	if err != nil {
		return nil, err
	}
	wr := &Writer{pack: p, cur: &state{}}
	return wr, wr.Segment(w, h)
}

// Segment begins another segment, on w.
func (w *Writer) Segment(to io.Writer, h Header) error {
	w.w, w.key = to, true
	config, err := settings(&h.Config)
	if err != nil {
		return err
	}
	return w.emit(kindHeader, &pb.Header{
		Job: h.Job, Run: h.Run, Segment: h.Segment, Created: h.Created.UnixNano(), Started: h.Started.UnixNano(),
		Program: h.Program, Interval: int64(h.Interval), Config: config,
	})
}

// Write writes one pass: the evidence that an engine was given and what it
// said to it. Numbers ascend; those left out tell of passes that are not recorded.
func (w *Writer) Write(number uint64, ev *diagnosis.Evidence, told []diagnosis.Verdict) error {
	w.cur.copyFrom(ev)
	cur, err := w.write(number, w.cur, told)
	w.cur = cur
	return err
}

// write takes cur over and returns a state that the caller may have for it.
func (w *Writer) write(number uint64, cur *state, told []diagnosis.Verdict) (*state, error) {
	if w.key || !sameVerdicts(w.told, told) {
		m := &pb.Verdicts{Pass: number}
		for i := range told {
			m.Verdicts = append(m.Verdicts, verdictMessage(&told[i]))
		}
		if err := w.emit(kindVerdicts, m); err != nil {
			return cur, err
		}
		w.told = slices.Clone(told)
	}
	old, err := w.enc.encode(number, cur, w.key, func(p *pb.Part) error { return w.emit(kindPart, p) })
	w.key = err != nil // what a reader has is not known then
	w.number = number
	return old, err
}

// Mark writes what happened beside the passes.
func (w *Writer) Mark(m Mark) error {
	return w.emit(kindMark, &pb.Mark{Kind: pb.Mark_Kind(m.Kind), At: m.At, Incident: m.Incident, Key: m.Key, Onset: m.Onset})
}

func (w *Writer) emit(kind frameKind, m proto.Message) error {
	frame, err := w.pack.pack(kind, m)
	if err != nil {
		return err
	}
	if _, err := w.w.Write(frame); err != nil {
		return fmt.Errorf("write a recording: %w", err)
	}
	return nil
}

// partRows bounds the rows of one part: its size stays below maxRaw.
const partRows = 1 << 15

// encoder turns states into parts.
type encoder struct {
	old  *state
	emit func(*pb.Part) error
	part pb.Part
	room int
	rows []int32

	shape    pb.Shape
	nodes    pb.Nodes
	ranks    pb.Ranks
	calls    pb.Calls
	comms    pb.Comms
	members  pb.Members
	conns    pb.Conns
	arrivals pb.Arrivals
	starts   pb.Times
	ends     pb.Times
}

// encode emits the parts of one pass, and returns the state of the pass before.
func (e *encoder) encode(number uint64, cur *state, key bool, emit func(*pb.Part) error) (*state, error) {
	if e.old == nil {
		e.old = &state{}
	}
	old := e.old
	p := &e.part
	e.emit, e.room = emit, partRows
	e.clear()
	p.Pass, p.Now, p.Paused, p.Key, p.Last, p.Job = number, cur.now, cur.paused, key, false, cur.job
	to := cur.shape()
	e.shape.Nodes, e.shape.Ranks, e.shape.Comms, e.shape.Members = uint32(to.nodes), uint32(to.ranks), uint32(to.comms), uint32(to.members)
	e.shape.Conns, e.shape.Arrivals, e.shape.Starts, e.shape.Ends = uint32(to.conns), uint32(to.arrivals), uint32(to.starts), uint32(to.ends)
	e.shape.Moved, e.shape.CommsFrom, e.shape.ArrivalsDropped = false, nil, 0
	p.Shape = &e.shape
	if key {
		old.reset()
	} else {
		if from, ok := moved(old.comms, cur.comms); ok {
			e.shape.Moved, e.shape.CommsFrom = true, from
			if err := old.move(from); err != nil {
				return cur, err
			}
		}
		n := dropped(old.arrivals, cur.arrivals)
		e.shape.ArrivalsDropped = uint32(n)
		if err := old.drop(n); err != nil {
			return cur, err
		}
	}
	old.resize(to)
	err := emitTable(e, &nodeTable, &e.nodes, old, cur)
	if err == nil {
		err = emitTable(e, &rankTable, &e.ranks, old, cur)
	}
	if err == nil {
		err = e.emitCalls(old, cur)
	}
	if err == nil {
		err = emitTable(e, &commTable, &e.comms, old, cur)
	}
	if err == nil {
		err = emitTable(e, &memberTable, &e.members, old, cur)
	}
	if err == nil {
		err = emitTable(e, &connTable, &e.conns, old, cur)
	}
	if err == nil {
		err = emitTable(e, &arrivalTable, &e.arrivals, old, cur)
	}
	if err == nil {
		err = emitTable(e, &startTable, &e.starts, old, cur)
	}
	if err == nil {
		err = emitTable(e, &endTable, &e.ends, old, cur)
	}
	if err == nil {
		err = e.flush(true)
	}
	if err != nil {
		return cur, err
	}
	e.old = cur
	return old, nil
}

func emitTable[T, M any](e *encoder, t *table[T, M], msg *M, old, cur *state) error {
	a, b := t.of(old), t.of(cur)
	rows := e.rows[:0]
	for i := range b {
		if !t.changed(&a[i], &b[i]) {
			continue
		}
		if rows = append(rows, int32(i)); len(rows) < e.room {
			continue
		}
		t.encode(msg, rows, a, b, cur.now)
		t.put(&e.part, msg)
		if err := e.flush(false); err != nil {
			return err
		}
		rows = rows[:0]
	}
	if e.rows = rows; len(rows) > 0 {
		t.encode(msg, rows, a, b, cur.now)
		t.put(&e.part, msg)
		e.room -= len(rows)
	}
	return nil
}

func (e *encoder) emitCalls(old, cur *state) error {
	rows := e.rows[:0]
	for i := range cur.ranks {
		n := len(cur.ranks[i].Calls)
		if n == 0 && len(old.ranks[i].Calls) == 0 || slices.Equal(old.ranks[i].Calls, cur.ranks[i].Calls) {
			continue
		}
		rows = append(rows, int32(i))
		if e.room -= max(n, 1); e.room > 0 {
			continue
		}
		encodeCalls(&e.calls, rows, cur.ranks, cur.now)
		e.part.Calls = &e.calls
		if err := e.flush(false); err != nil {
			return err
		}
		rows = rows[:0]
	}
	if e.rows = rows; len(rows) > 0 {
		encodeCalls(&e.calls, rows, cur.ranks, cur.now)
		e.part.Calls = &e.calls
	}
	return nil
}

// flush emits what has been gathered.
func (e *encoder) flush(last bool) error {
	e.part.Last = last
	err := e.emit(&e.part)
	e.clear()
	e.part.Shape, e.part.Job, e.room = nil, "", partRows
	return err
}

func (e *encoder) clear() {
	p := &e.part
	p.Nodes, p.Ranks, p.Calls, p.Comms, p.Members, p.Conns, p.Arrivals, p.Starts, p.Ends = nil, nil, nil, nil, nil, nil, nil, nil, nil
}
