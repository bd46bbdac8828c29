package inspect

import (
	"fmt"
	"slices"
	"time"

	"github.com/lockstep-ccl/lockstep/record"
)

// Process is what one recorder says, ready to be shown. Ages are in seconds
// before At; a field that is not known is absent.
type Process struct {
	Recorder  string    `json:"recorder"`
	Job       string    `json:"job"`
	Node      string    `json:"node"`
	Rank      int32     `json:"rank"`
	WorldSize int32     `json:"world_size"`
	LocalRank int32     `json:"local_rank"`
	Attempt   uint32    `json:"attempt"`
	PID       int32     `json:"pid"`
	State     string    `json:"state"`            // running, closed (left in good order) or died
	Kernel    string    `json:"kernel,omitempty"` // what keeps a running process from running: stopped, or uninterruptible sleep
	Created   time.Time `json:"created"`
	At        time.Time `json:"at"` // now, or the last sign of life
	Step      uint64    `json:"step,omitempty"`
	Mark      string    `json:"mark,omitempty"` // open span of the program's own
	MarkAge   seconds   `json:"mark_age_seconds,omitempty"`

	Appended     uint64 `json:"records_appended"`
	Unreadable   uint64 `json:"records_unreadable"` // overwritten or dropped
	Dropped      uint64 `json:"records_dropped"`    // of them given up by the writer
	CommOverflow uint64 `json:"communicators_unrecorded,omitempty"`
	ConnOverflow uint64 `json:"connections_unrecorded,omitempty"`
	Unstamped    uint64 `json:"communicators_unstamped,omitempty"` // their operations on a GPU go unrecorded

	Comms []*Comm `json:"communicators"`
	// Connections are all of them, with what was recorded of each; only when they are asked for.
	Connections []Connection `json:"connections,omitempty"`
}

// Comm is one communicator of a process.
type Comm struct {
	Name  string `json:"name"`
	ID    string `json:"id"`
	Rank  int32  `json:"rank"`
	Size  int32  `json:"size"`
	State string `json:"state"`
	GPU   *GPU   `json:"gpu,omitempty"` // whose clock stamps its operations

	Enqueued    uint64  `json:"last_enqueued"`
	Started     uint64  `json:"last_started"`
	Finished    uint64  `json:"last_finished"`
	FinishedAge seconds `json:"finished_age_seconds,omitempty"`

	// In is the operation that the process is, or was at its end, inside of.
	In    *Op    `json:"in,omitempty"`
	Stuck bool   `json:"stuck"`
	Links []Link `json:"connections"` // those with something outstanding, or waited for
	Last  []Op   `json:"last_operations"`
}

// GPU is a device of the process.
type GPU struct {
	Ordinal  int32   `json:"ordinal"`
	Name     string  `json:"name"`
	UUID     string  `json:"uuid"`
	ClockErr seconds `json:"clock_error_seconds"` // bound on the error of the times shown here
}

// Op is one operation.
type Op struct {
	Seq        uint64  `json:"seq"`
	Collective string  `json:"collective"`
	Bytes      uint64  `json:"bytes"`
	DType      string  `json:"datatype,omitempty"`
	RedOp      string  `json:"operator,omitempty"`
	Root       *int32  `json:"root,omitempty"` // root, or peer of a Send or Recv
	Algo       string  `json:"algorithm,omitempty"`
	Proto      string  `json:"protocol,omitempty"`
	SMs        uint16  `json:"sms,omitempty"`         // of a GPU
	Replay     bool    `json:"replay,omitempty"`      // by a CUDA graph
	OnHost     bool    `json:"on_host,omitempty"`     // of a communicator whose others a GPU stamps: with a sequence of its own
	Age        seconds `json:"age_seconds,omitempty"` // since it started, or was enqueued when it did not start
	Queued     seconds `json:"queued_seconds,omitempty"`
	Wait       seconds `json:"wait_seconds,omitempty"`
	WaitedFor  *int32  `json:"waited_for,omitempty"` // the last peer to enter
	Transfer   seconds `json:"transfer_seconds,omitempty"`
	Took       seconds `json:"took_seconds,omitempty"`
	Result     string  `json:"result"` // or queued, running, unknown
}

// Link is a connection that something is outstanding on, or whose path broke or took over from another.
type Link struct {
	Peer        int32   `json:"peer"`
	World       *int32  `json:"peer_world_rank,omitempty"`
	Name        string  `json:"name"`
	Transport   string  `json:"transport"`
	Outstanding uint64  `json:"outstanding_bytes,omitempty"`
	SentAge     seconds `json:"last_post_age_seconds,omitempty"`
	TakenAge    seconds `json:"last_completion_age_seconds,omitempty"`
	TxBlocked   seconds `json:"no_credit_seconds,omitempty"`
	RxWaiting   seconds `json:"waiting_for_peer_seconds,omitempty"`
	ReceivedAge seconds `json:"last_received_age_seconds,omitempty"`
	Cause       string  `json:"last_window_cause,omitempty"`
	State       string  `json:"state,omitempty"` // down or switched
	StateAge    seconds `json:"state_seconds,omitempty"`
	Resent      uint64  `json:"resent_bytes,omitempty"`
}

// seconds is a length of time; 0 is none.
type seconds float64

func (p *process) age(t int64) seconds {
	if t == 0 {
		return 0
	}
	return since(t, p.at)
}

func since(from, to int64) seconds {
	if from == 0 || to <= from {
		return 0
	}
	return seconds(float64(to-from) / 1e9)
}

// sane keeps a corrupt file's time within what can be written down.
func sane(t time.Time) time.Time {
	if y := t.UTC().Year(); y < 1970 || y > 9998 {
		return time.Time{}
	}
	return t
}

func (p *process) report(world func(comm uint64, rank int32) (int32, bool), stuck time.Duration, last int) *Process {
	h := p.header
	r := &Process{
		Recorder: p.path, Job: h.Job, Node: h.Node, Rank: h.Rank, WorldSize: h.WorldSize, LocalRank: h.LocalRank, Attempt: h.Attempt,
		PID: h.PID, State: p.state, Kernel: p.kernel, Created: sane(h.Created), At: sane(h.ToReal(p.at)), Step: p.step,
		Appended: h.Appended, Unreadable: p.lost, Dropped: h.DroppedByWriter, CommOverflow: h.CommOverflow, ConnOverflow: h.ConnOverflow, Unstamped: h.StampOverflow,
		Comms: []*Comm{},
	}
	for _, code := range []record.MarkCode{record.MarkCheckpoint, record.MarkEvaluation, record.MarkCompile} {
		if m, open := p.marks[code]; open {
			r.Mark, r.MarkAge = code.String(), p.age(m.Mono)
		}
	}
	for i := range p.comms {
		s := &p.comms[i]
		c := &Comm{
			Name: s.Name, ID: fmt.Sprintf("%016x", s.ID), Rank: s.Rank, Size: s.Size, State: s.State.String(),
			Enqueued: s.Enqueued, Started: s.Started, Finished: s.Finished, FinishedAge: p.age(s.FinishedAt),
			Links: []Link{}, Last: []Op{},
		}
		h := p.ops[s.Index]
		if s.Stamps+s.Copies > 0 && int(s.Device) < len(p.gpus) {
			c.GPU = newGPU(&p.gpus[s.Device], h)
		}
		if s.Open() && s.State != record.CommLeft {
			op := p.open(s, h)
			c.In = &op
			c.Stuck = p.state == died || p.state == running && op.Age >= seconds(stuck.Seconds())
		}
		if h != nil {
			// Threads of one process append side by side: sequence is the order.
			slices.SortFunc(h.order, func(a, b *operation) int {
				if a.seq < b.seq {
					return -1
				}
				return 1
			})
			for _, o := range h.order[len(h.order)-min(len(h.order), last):] {
				c.Last = append(c.Last, p.op(o, s))
			}
		}
		for k := range p.conns {
			if k := &p.conns[k]; k.Comm == s.Index {
				if l, busy := p.link(k, c.In != nil); busy {
					if w, known := world(s.ID, k.Peer); known {
						l.World = &w
					}
					c.Links = append(c.Links, l)
				}
			}
		}
		slices.SortStableFunc(c.Links, func(a, b Link) int { return int(a.Peer) - int(b.Peer) })
		r.Comms = append(r.Comms, c)
	}
	return r
}

func newGPU(d *record.DeviceStatus, h *history) *GPU {
	u := d.UUID
	g := &GPU{Ordinal: d.Ordinal, Name: d.Name, UUID: fmt.Sprintf("GPU-%x-%x-%x-%x-%x", u[:4], u[4:6], u[6:8], u[8:10], u[10:])}
	worst := d.Anchor.Err
	if h != nil {
		for _, o := range h.order {
			worst = max(worst, o.clockErr)
		}
	}
	g.ClockErr = seconds(float64(worst) / 1e9)
	return g
}

// open is the operation that a communicator is inside of; its live words know
// that when its records are gone.
func (p *process) open(s *record.CommStatus, h *history) Op {
	if h != nil {
		if o := h.bySeq[s.Started]; o != nil && !p.stamped[s.Index] {
			if !o.started { // a start is recorded only when the operation lasts
				o.start.Mono, o.started = s.StartedAt, true
			}
			return p.op(o, s)
		}
		for _, o := range slices.Backward(h.order) {
			if p.stamped[s.Index] && o.started && !o.ended {
				return p.op(o, s)
			}
		}
	}
	op := Op{Seq: s.Started, Collective: "unknown", Age: p.age(s.StartedAt), Result: "running"}
	if s.Enqueued == s.Started {
		op.Collective, op.Bytes = s.Coll.String(), s.Bytes
	}
	return op
}

func (p *process) op(o *operation, s *record.CommStatus) Op {
	coll := max(o.enqueue.Coll, o.start.Coll, o.end.Coll)
	op := Op{
		Seq: o.seq, OnHost: o.host, Collective: coll.String(), Bytes: o.enqueue.Bytes,
		Wait: seconds(float64(o.wait) / 1e9), Transfer: seconds(float64(o.transfer) / 1e9),
	}
	if o.enqueued {
		if coll.HasData() {
			op.DType = o.enqueue.DType.String()
		}
		if coll.Reduces() {
			op.RedOp = o.enqueue.Op.String()
		}
		if o.enqueue.Root >= 0 {
			op.Root = &o.enqueue.Root
		}
		op.Age = p.age(o.enqueue.Mono)
	}
	if o.started {
		if o.start.Algo != record.AlgoNone {
			op.Algo, op.Proto = o.start.Algo.String(), o.start.Proto.String()
		}
		op.Age, op.Queued = p.age(o.start.Mono), since(o.enqueue.Mono, o.start.Mono)
		if o.start.Clock == record.ClockGPU {
			op.SMs, op.Replay = o.start.Chan, o.start.Flags&record.FlagReplay != 0
		}
	}
	if o.host {
		op.Seq &^= onHost
	}
	if o.waitedFor >= 0 && o.wait > 0 {
		op.WaitedFor = &o.waitedFor
	}
	switch {
	case o.ended:
		op.Result, op.Took = record.Result(o.end.Code).String(), since(o.start.Mono, o.end.Mono)
	case o.seq <= s.Finished && !p.stamped[s.Index]: // which adds up two counts
		op.Result = "unknown" // its end was overwritten or dropped
	case o.started:
		op.Result = "running"
	default:
		op.Result = "queued"
	}
	return op
}

func (p *process) link(k *record.ConnStatus, inside bool) (l Link, busy bool) {
	l = Link{
		Peer: k.Peer, Name: k.Name, Transport: k.Transport.String(), Outstanding: k.Outstanding(),
		TxBlocked: p.age(k.TxBlockedSince), RxWaiting: p.age(k.RxWaitingSince), ReceivedAge: p.age(k.ReceivedAt),
	}
	if l.Outstanding > 0 {
		l.SentAge, l.TakenAge = p.age(k.PostedAt), p.age(k.CompletedAt)
	}
	if k.WindowCause != record.CauseNone {
		l.Cause = k.WindowCause.String()
	}
	odd := k.Link > record.LinkUp
	if odd {
		l.State, l.StateAge, l.Resent = k.Link.String(), p.age(k.LinkAt), k.Resent
	}
	// Outside an operation nobody looks whether the last bytes were taken.
	return l, odd || l.Outstanding > 0 && inside || k.TxBlockedSince != 0 || k.RxWaitingSince != 0
}
