package replay

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/lockstep-ccl/lockstep/diagnosis"
	pb "github.com/lockstep-ccl/lockstep/diagnosis/replay/internal/evidencepb"
)

// Pass is one recorded pass of an engine.
type Pass struct {
	Header   *Header // of its segment
	Number   uint64  // in its run, from 1
	Key      bool    // its segment begins with it
	Evidence *diagnosis.Evidence
	Told     []diagnosis.Verdict // what the engine said then; Why is as of when the rest last changed
	Marks    []Mark              // since the pass before
}

// Mark is what the master did beside its passes.
type Mark struct {
	Kind     MarkKind
	At       int64 // unix ns
	Incident string
	Key      string // of its verdict
	Onset    int64  // its verdict's Since, unix ns; 0 when not known
}

// MarkKind is what a Mark tells.
type MarkKind uint8

const (
	MarkOpened MarkKind = iota + 1 // an incident
	MarkConfirmed
	MarkClosed
)

func (k MarkKind) String() string {
	switch k {
	case MarkOpened:
		return "opened"
	case MarkConfirmed:
		return "confirmed"
	case MarkClosed:
		return "closed"
	}
	return "unknown"
}

// ErrNoRecording is the error of a file that does not begin as a recording does.
var ErrNoRecording = errors.New("not a recording of evidence")

// Damage is what a Reader could not read.
type Damage struct {
	Places int   `json:"places"` // where frames were torn or damaged
	Bytes  int64 `json:"bytes"`  // left out: up to the next segment, or the end
}

// maxPlaces is how much damage is skipped before a file is given up.
const maxPlaces = 256

// Reader reads a recording. It is not safe for concurrent use.
type Reader struct {
	file   io.ReadSeeker
	buf    *bufio.Reader
	at     int64 // offset of buf
	unpack *unpacker
	limits Limits

	header *Header
	dec    decoder
	told   []diagnosis.Verdict
	marks  []Mark
	damage Damage
	pass   Pass
	ev     diagnosis.Evidence
}

// NewReader returns a Reader of what begins at the file's current offset.
func NewReader(file io.ReadSeeker, l Limits) (*Reader, error) {
	at, err := file.Seek(0, io.SeekCurrent)
	if err != nil {
		return nil, fmt.Errorf("read a recording: %w", err)
	}
	u, err := newUnpacker()
	if err != nil {
		return nil, err
	}
	r := &Reader{file: file, buf: bufio.NewReaderSize(file, 1<<16), at: at, unpack: u, limits: l.withDefaults()}
	kind, raw, n, err := u.next(r.buf)
	switch {
	case errors.Is(err, io.EOF), errors.Is(err, errDamaged), err == nil && kind != kindHeader:
		return nil, ErrNoRecording
	case err != nil:
		return nil, err
	}
	r.at += n
	return r, r.begin(raw)
}

// Header returns the header of the segment that was read last.
func (r *Reader) Header() *Header { return r.header }

// Damage returns what was left out so far.
func (r *Reader) Damage() Damage { return r.damage }

// Next returns the next pass, which is valid until the call after it, or io.EOF.
// Damage is skipped; an error is final.
func (r *Reader) Next() (*Pass, error) {
	for {
		kind, raw, n, err := r.unpack.next(r.buf)
		switch {
		case errors.Is(err, io.EOF):
			return nil, io.EOF
		case errors.Is(err, errDamaged):
			if err := r.resync(); err != nil {
				return nil, err
			}
			continue
		case err != nil:
			return nil, fmt.Errorf("read a recording: %w", err)
		}
		done, err := r.take(kind, raw)
		if err != nil {
			return nil, fmt.Errorf("read a recording: frame at byte %d: %w", r.at, err)
		}
		r.at += n
		if done {
			return &r.pass, nil
		}
	}
}

// take takes in one frame; done is true when a pass is complete.
func (r *Reader) take(kind frameKind, raw []byte) (done bool, err error) {
	switch kind {
	case kindHeader:
		return false, r.begin(raw)
	case kindVerdicts:
		var m pb.Verdicts
		if err := proto.Unmarshal(raw, &m); err != nil {
			return false, err
		}
		r.told = make([]diagnosis.Verdict, 0, len(m.Verdicts))
		for _, v := range m.Verdicts {
			r.told = append(r.told, verdictOf(v))
		}
	case kindMark:
		var m pb.Mark
		if err := proto.Unmarshal(raw, &m); err != nil {
			return false, err
		}
		if len(r.marks) < maxMarks {
			r.marks = append(r.marks, Mark{MarkKind(m.Kind), m.At, m.Incident, m.Key, m.Onset})
		}
	case kindPart:
		p := &r.dec.part
		proto.Reset(p)
		if err := proto.Unmarshal(raw, p); err != nil {
			return false, err
		}
		if done, err = r.dec.take(p, &r.limits); !done || err != nil {
			return false, err
		}
		r.dec.state.view(&r.ev)
		r.pass = Pass{Header: r.header, Number: p.Pass, Key: r.dec.key, Evidence: &r.ev, Told: r.told, Marks: r.marks}
		r.marks = nil
		return true, nil
	}
	return false, nil
}

// maxMarks bounds the marks between two passes.
const maxMarks = 1024

// begin takes in a header.
func (r *Reader) begin(raw []byte) error {
	var m pb.Header
	if err := proto.Unmarshal(raw, &m); err != nil {
		return err
	}
	h := &Header{
		Job: m.Job, Run: m.Run, Segment: m.Segment, Created: time.Unix(0, m.Created), Started: time.Unix(0, m.Started),
		Program: m.Program, Interval: time.Duration(m.Interval),
	}
	h.Unknown = applySettings(&h.Config, m.Config)
	r.header, r.told, r.marks = h, nil, nil
	r.dec.ready, r.dec.partial = false, false
	return nil
}

// resync skips damage up to the next header.
func (r *Reader) resync() error {
	from := r.at
	r.told, r.marks, r.dec.ready = nil, nil, false
	for {
		if r.damage.Places++; r.damage.Places > maxPlaces {
			return fmt.Errorf("read a recording: damaged in more than %d places, at last at byte %d", maxPlaces, r.at)
		}
		at, err := r.find(r.at + 1)
		if errors.Is(err, io.EOF) {
			r.damage.Bytes += at - from
			r.at = at
			return nil // the next read says so, too
		}
		if err != nil {
			return fmt.Errorf("read a recording: %w", err)
		}
		if err := r.seek(at); err != nil {
			return err
		}
		kind, raw, n, err := r.unpack.next(r.buf)
		if err == nil && kind == kindHeader {
			r.damage.Bytes += at - from
			r.at = at + n
			return r.begin(raw)
		}
		if err != nil && !errors.Is(err, errDamaged) && !errors.Is(err, io.EOF) && !errors.Is(err, ErrVersion) {
			return fmt.Errorf("read a recording: %w", err)
		}
		r.at = at
	}
}

func (r *Reader) seek(to int64) error {
	if _, err := r.file.Seek(to, io.SeekStart); err != nil {
		return fmt.Errorf("read a recording: %w", err)
	}
	r.buf.Reset(r.file)
	r.at = to
	return nil
}

// find returns the offset of what looks like a header, at or after from; with io.EOF, that of the end.
func (r *Reader) find(from int64) (int64, error) {
	if err := r.seek(from); err != nil {
		return 0, err
	}
	for at := from; ; at++ {
		b, err := r.buf.Peek(6)
		if err != nil {
			n := len(b)
			_, _ = r.buf.Discard(n)
			return at + int64(n), err
		}
		if string(b[:4]) == magic && frameKind(b[5]) == kindHeader {
			return at, nil
		}
		_, _ = r.buf.Discard(1)
	}
}

// decoder turns parts into states.
type decoder struct {
	state   state
	part    pb.Part
	rows    []int32
	number  uint64
	ready   bool // state is that of the pass before
	partial bool // parts of a pass have been taken
	key     bool // that pass is a key frame
}

// take applies one part; done is true when the state is that of its pass.
func (d *decoder) take(p *pb.Part, l *Limits) (done bool, err error) {
	if s := p.Shape; s != nil {
		if !p.Key && !d.ready {
			return false, errors.New("a change of nothing")
		}
		d.ready, d.partial, d.key, d.number = false, true, p.Key, p.Pass
		if err := d.reshape(p, l); err != nil {
			return false, err
		}
	} else if !d.partial || p.Pass != d.number {
		return false, errors.New("a part of no pass")
	}
	st := &d.state
	st.now, st.paused = p.Now, p.Paused
	for _, f := range []func() ([]int32, error){
		func() ([]int32, error) { return nodeTable.decode(p, st, d.rows) },
		func() ([]int32, error) { return rankTable.decode(p, st, d.rows) },
		func() ([]int32, error) { return d.rows, decodeCalls(p.Calls, st, p.Now) },
		func() ([]int32, error) { return commTable.decode(p, st, d.rows) },
		func() ([]int32, error) { return memberTable.decode(p, st, d.rows) },
		func() ([]int32, error) { return connTable.decode(p, st, d.rows) },
		func() ([]int32, error) { return arrivalTable.decode(p, st, d.rows) },
		func() ([]int32, error) { return startTable.decode(p, st, d.rows) },
		func() ([]int32, error) { return endTable.decode(p, st, d.rows) },
	} {
		if d.rows, err = f(); err != nil {
			d.partial = false
			return false, err
		}
	}
	if !p.Last {
		return false, nil
	}
	d.partial = false
	if err := st.valid(); err != nil {
		return false, err
	}
	d.ready = true
	return true, nil
}

// reshape makes the tables as long as the pass has them.
func (d *decoder) reshape(p *pb.Part, l *Limits) error {
	s := p.Shape
	to := shape{int(s.Nodes), int(s.Ranks), int(s.Comms), int(s.Members), int(s.Conns), int(s.Arrivals), int(s.Starts), int(s.Ends)}
	if err := l.check(to); err != nil {
		return err
	}
	d.state.job = p.Job
	if p.Key {
		d.state.reset()
	} else {
		if s.Moved {
			if len(s.CommsFrom) != to.comms {
				return errShape
			}
			if err := d.state.move(s.CommsFrom); err != nil {
				return err
			}
		}
		if err := d.state.drop(int(s.ArrivalsDropped)); err != nil {
			return err
		}
	}
	d.state.resize(to)
	return nil
}
