package marks

import (
	"fmt"
	"os"
	"sync"
	"sync/atomic"

	"github.com/lockstep-ccl/lockstep/launcher"
	"github.com/lockstep-ccl/lockstep/record"
)

// Marks writes one process's marks. Its methods are safe for concurrent use, and do
// nothing on nil.
type Marks struct {
	w        *record.Writer
	own      bool
	anchored atomic.Int64 // CLOCK_MONOTONIC ns
}

// On returns marks that go into a recorder, such as ccl.Config.Recorder; on a nil
// one they go nowhere. The recorder stays its owner's.
func On(w *record.Writer) *Marks { return &Marks{w: w} }

// Open makes a file of marks for this process, which its launcher's variables make a
// rank of a job (package launcher). It is for programs whose collectives are not ccl's.
// Where the launcher tells nothing the process is rank 0 of 1 of a job called "job".
// On an error, and with LOCKSTEP_RECORDER=off, the marks are nil, which can be used as well.
func Open() (*Marks, error) {
	if os.Getenv("LOCKSTEP_RECORDER") == "off" {
		return nil, nil
	}
	who, err := launcher.Detect(nil)
	if who.Rank < 0 { // no launcher: a program started by hand
		who.Rank, who.World = 0, 1
	}
	if err != nil {
		return nil, fmt.Errorf("open marks: %w", err)
	}
	if who.Job == "" {
		who.Job = "job"
	}
	w, err := record.Create(record.Options{MarksOnly: true, Identity: record.Identity{
		Job: who.Job, Node: who.Node, Rank: int32(who.Rank), WorldSize: int32(max(who.World, who.Rank+1)),
		LocalRank: int32(who.Local), Attempt: uint32(who.Attempt),
	}})
	if err != nil {
		return nil, fmt.Errorf("open marks: %w", err)
	}
	m := &Marks{w: w, own: true}
	m.anchored.Store(record.Now())
	return m, nil
}

// Close ends the file that Open made: the process says nothing more.
func (m *Marks) Close() error {
	if m == nil || !m.own {
		return nil
	}
	return m.w.Close()
}

// Step tells that the step of this number begins. Numbers grow, also over restarts.
func (m *Marks) Step(n uint64) { m.append(record.MarkStep, 0, n) }

// Checkpoint tells that the program writes or reads a checkpoint until end is called.
// While others wait for it, it is not taken to hang, unless it lasts far longer than
// such pauses have. end may be called more than once.
func (m *Marks) Checkpoint() (end func()) { return m.span(record.MarkCheckpoint) }

// Evaluation is the like for an evaluation.
func (m *Marks) Evaluation() (end func()) { return m.span(record.MarkEvaluation) }

// Compile is the like for a compilation.
func (m *Marks) Compile() (end func()) { return m.span(record.MarkCompile) }

// DataLoading tells that the program waits for its data loader. It excuses nothing: a
// loader that does not return is a fault, and the verdict says that it was in there.
func (m *Marks) DataLoading() (end func()) { return m.span(record.MarkDataLoading) }

func (m *Marks) span(code record.MarkCode) func() {
	m.append(code, record.FlagBegin, 0)
	return sync.OnceFunc(func() { m.append(code, 0, 0) })
}

// anchorEvery is how often a file of marks is anchored: the marks do it, since the
// package has no goroutine.
const anchorEvery = int64(5e9)

func (m *Marks) append(code record.MarkCode, flags uint8, value uint64) {
	if m == nil {
		return
	}
	now := record.Now()
	if last := m.anchored.Load(); m.own && now-last > anchorEvery && m.anchored.CompareAndSwap(last, now) {
		m.w.Anchor()
	}
	m.w.Append(&record.Record{Mono: now, Kind: record.KindMark, Comm: record.NoComm, Flags: flags, Code: uint8(code), Value: value})
}
