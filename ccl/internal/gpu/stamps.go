package gpu

import (
	"errors"
	"sync"
	"time"

	"github.com/lockstep-ccl/lockstep/ccl/internal/cuda"
	"github.com/lockstep-ccl/lockstep/record"
)

// stamps gets a communicator's operations into the flight recorder. Kernels stamp themselves. A
// copy engine cannot: for its operations a stream stores that they have begun, and events,
// which carry the GPU's clock too, give the times afterwards.
type stamps struct {
	c    *Comm
	rec  *Recording // nil: not recorded
	live *record.Comm
	desc map[record.Desc]uint16

	seq    uint64 // of copy-engine operations
	marks  chan copyMark
	idle   chan [2]*cuda.Event // events to be used again
	stop   chan struct{}
	wg     sync.WaitGroup
	events []*cuda.Event
}

// copyMark is a copy-engine operation under way.
type copyMark struct {
	seq    uint64
	events [2]*cuda.Event // nil: not recorded
}

// marksMost bounds how many copy-engine operations are followed at once.
const marksMost = 128

func (t *stamps) init(c *Comm) error {
	t.c = c
	if c.cfg.Recording == nil || c.cfg.HostTells {
		return nil
	}
	t.rec = c.cfg.Recording
	t.live, t.desc = c.cfg.Live, map[record.Desc]uint16{}
	t.marks, t.idle = make(chan copyMark, marksMost), make(chan [2]*cuda.Event, marksMost)
	t.stop = make(chan struct{})
	t.wg.Add(1)
	go t.follow()
	return nil
}

func (t *stamps) close() error {
	if t.rec == nil {
		return nil
	}
	close(t.stop)
	t.wg.Wait()
	var errs []error
	for _, e := range t.events {
		errs = append(errs, e.Close())
	}
	t.rec = nil
	return errors.Join(errs...)
}

// kernelSlots is where kernels leave their stamps, for Args.
func (t *stamps) kernelSlots() (slots uint64, mask uint32) {
	if t.rec == nil {
		return 0, 0
	}
	off, n := t.live.StampRange()
	if n == 0 {
		return 0, 0
	}
	return uint64(t.rec.base) + uint64(off), uint32(n - 1)
}

// describe is the index of an operation's descriptor.
func (t *stamps) describe(op *Op, p plan) uint32 {
	if t.rec == nil {
		return 0
	}
	d := record.Desc{
		Coll: op.Coll, DType: op.DType, Op: op.RedOp, Algo: p.algo, Proto: proto(p.algo), SMs: uint16(p.blocks),
		Root: int32(op.Root), Stream: op.Stream, Bytes: op.Bytes,
	}
	if op.Captured {
		d.Flags |= record.DescCaptured
	}
	if op.InPlace {
		d.Flags |= record.DescInPlace
	}
	i, ok := t.desc[d]
	if !ok {
		i, _ = t.rec.writer.AddDesc(d) // a full table is counted there
		t.desc[d] = i
	}
	return uint32(i)
}

// begin stamps the begin of a copy-engine operation on s.
func (t *stamps) begin(s *cuda.Stream, op *Op) (copyMark, error) {
	if t.rec == nil {
		return copyMark{}, nil
	}
	// What is recorded as begun must also be recorded as ended, so an operation that cannot be
	// followed is not recorded at all.
	var m copyMark
	select {
	case m.events = <-t.idle:
	default:
		if len(t.events) == 2*marksMost {
			return copyMark{}, nil
		}
		for i := range m.events {
			e, err := t.c.dev.NewEvent(true)
			if err != nil {
				return copyMark{}, err
			}
			m.events[i] = e
			t.events = append(t.events, e)
		}
	}
	off, id, ok := t.live.CopyQueued(t.seq+1, uint16(t.describe(op, plan{algo: record.AlgoCopyEngine})), record.Now())
	if !ok {
		t.idle <- m.events
		return copyMark{}, nil
	}
	t.seq++
	m.seq = t.seq
	if err := s.Record(m.events[0]); err != nil {
		return m, err
	}
	return m, s.Batch([]cuda.MemOp{cuda.WriteOp64(t.rec.base+cuda.Ptr(off), id)})
}

// end stamps its end.
func (t *stamps) end(s *cuda.Stream, m copyMark) error {
	if m.events[1] == nil {
		return nil
	}
	if err := s.Record(m.events[1]); err != nil {
		return err
	}
	t.marks <- m // has room for all there are
	return nil
}

// follow tells the recorder the times of copy-engine operations that have ended.
func (t *stamps) follow() {
	defer t.wg.Done()
	for {
		var m copyMark
		select {
		case <-t.stop:
			return
		case m = <-t.marks:
		}
		for wait := 20 * time.Microsecond; ; wait = min(2*wait, time.Millisecond) {
			done, err := m.events[1].Query()
			if err != nil {
				break // the context is broken: nothing will ever end
			}
			if done {
				t.tell(m)
				break
			}
			select {
			case <-t.stop:
				return
			case <-time.After(wait):
			}
		}
		t.idle <- m.events // has room for all there are
	}
}

func (t *stamps) tell(m copyMark) {
	start, end := t.c.dev.clock.time(m.events[0]), t.c.dev.clock.time(m.events[1])
	t.live.CopyDone(m.seq, start, 0, -1, max(start, end))
}
