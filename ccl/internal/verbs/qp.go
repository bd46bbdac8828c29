package verbs

import (
	"fmt"
	"math"
	"syscall"
)

// QPConfig is what a queue pair is made with.
type QPConfig struct {
	Send, Recv *CQ // may be one
	MaxSend    int // writes outstanding
	MaxRecv    int // receives outstanding
	MaxInline  int // bytes of an inline write; 0: none
}

// QP is a reliable-connected queue pair.
type QP struct {
	h    handle
	ctx  *Context
	num  uint32
	port int // 0 before Init
	caps QPConfig
}

// NewQP makes a queue pair in state RESET. A device that cannot have as much
// inline data, or as many requests, fails with EINVAL or ENOMEM.
func (p *PD) NewQP(cfg QPConfig) (*QP, error) {
	call := "make a queue pair on " + p.ctx.name
	if p.h == nil || cfg.Send.h == nil || cfg.Recv.h == nil {
		return nil, closedError(call)
	}
	q := &QP{ctx: p.ctx, caps: cfg}
	errno := syscall.EINVAL
	if least, most := min(cfg.MaxSend, cfg.MaxRecv, cfg.MaxInline), max(cfg.MaxSend, cfg.MaxRecv, cfg.MaxInline); least >= 0 && most <= math.MaxInt32 {
		errno = createQP(p.h, q)
	}
	if errno != 0 {
		return nil, p.ctx.fail(errno, call, fmt.Sprintf("%d writes, %d receives, %d bytes inline", cfg.MaxSend, cfg.MaxRecv, cfg.MaxInline))
	}
	p.ctx.children.Add(1)
	return q, nil
}

// Num is the queue pair's number.
func (q *QP) Num() uint32 { return q.num }

// Config is what was asked for, with the limits that the device granted: each
// at least as large.
func (q *QP) Config() QPConfig { return q.caps }

// String is "queue pair 17 of mlx5_0/1".
func (q *QP) String() string {
	if q.port == 0 {
		return fmt.Sprintf("queue pair %d of %s", q.num, q.ctx.name)
	}
	return fmt.Sprintf("queue pair %d of %s/%d", q.num, q.ctx.name, q.port)
}

// modified makes the result of a change of state.
func (q *QP) modified(errno syscall.Errno, to QPState, detail string) error {
	if errno == 0 {
		return nil
	}
	return q.ctx.fail(errno, fmt.Sprintf("modify %v to %v", q, to), detail)
}

func (q *QP) open(to QPState) error {
	if q.h == nil {
		return closedError(fmt.Sprintf("modify %v to %v", q, to))
	}
	return nil
}

// Init binds the queue pair to a port and says what the peer may do. Receives
// may be posted from here on.
func (q *QP) Init(port int, access Access) error {
	if err := q.open(StateInit); err != nil {
		return err
	}
	if port < 1 || port > 255 {
		return q.modified(syscall.EINVAL, StateInit, "ports count from 1")
	}
	before := q.port
	q.port = port
	err := q.modified(modifyInit(q.h, port, access), StateInit, fmt.Sprintf("access %#x", uint32(access)))
	if err != nil {
		q.port = before
	}
	return err
}

// Path is the way to the peer's queue pair.
type Path struct {
	QP           uint32 // the peer's number
	PSN          uint32 // that the peer sends first, 24 bits
	GID          GID    // the peer's; may be zero on InfiniBand within a subnet
	SGIDIndex    int    // own GID, by its place in the port's table
	LID          uint16 // the peer's, on InfiniBand
	MTU          MTU    // at most both ports' active MTU, and the same on both ends
	TrafficClass uint8
	FlowLabel    uint32 // 20 bits; RoCE v2 makes the UDP source port of it (FlowLabel, SourcePort). 0: the device's choice
	HopLimit     uint8  // 0: 64
	ServiceLevel uint8
	RNRTimer     uint8 // code of how long a sender waits that found no receive; 0: 12, 0.64 ms
}

// RoCE v2's packets are UDP to port RoCEPort, from a source port of FirstSourcePort and above.
const (
	RoCEPort        = 4791
	FirstSourcePort = 0xc000

	maxFlowLabel = 1<<20 - 1
)

// FlowLabel is a label of which Linux makes a source port (rdma_flow_label_to_udp_sport);
// 0 for a port below FirstSourcePort, which no label makes. Devices whose drivers make their
// own port, as Soft-RoCE does of the queue pair's number, ignore the label.
func FlowLabel(port uint16) uint32 {
	switch low := uint32(port) & 0x3fff; {
	case port < FirstSourcePort:
		return 0
	case low == 0:
		return 1<<14 | 1 // a label of 0 is none
	default:
		return low
	}
}

// SourcePort is the port that Linux makes of a label; 0 for none, when it makes one of
// the two queue pairs' numbers.
func SourcePort(label uint32) uint16 {
	if label == 0 {
		return 0
	}
	return FirstSourcePort | uint16(label&0x3fff^label>>14&0x3f)
}

// ReadyToReceive connects: from here on the peer's writes arrive.
func (q *QP) ReadyToReceive(p Path) error {
	if err := q.open(StateRTR); err != nil {
		return err
	}
	if p.HopLimit == 0 {
		p.HopLimit = 64
	}
	if p.RNRTimer == 0 {
		p.RNRTimer = 12
	}
	errno := syscall.EINVAL
	if p.SGIDIndex >= 0 && p.SGIDIndex <= math.MaxUint8 && p.FlowLabel <= maxFlowLabel {
		errno = modifyRTR(q.h, q.port, &p)
	}
	return q.modified(errno, StateRTR,
		fmt.Sprintf("to queue pair %d, GID %v, LID %d, from GID index %d, MTU %v", p.QP, p.GID, p.LID, p.SGIDIndex, p.MTU))
}

// SendAttr is how a queue pair sends.
type SendAttr struct {
	PSN        uint32 // of the first packet, 24 bits
	Timeout    uint8  // for an acknowledgement: 4.096 µs × 2^Timeout; 0: for ever
	Retries    uint8  // after a timeout, at most 7
	RNRRetries uint8  // after finding no receive; 7: for ever
}

// ReadyToSend allows posting writes.
func (q *QP) ReadyToSend(a SendAttr) error {
	if err := q.open(StateRTS); err != nil {
		return err
	}
	return q.modified(modifyRTS(q.h, &a), StateRTS, fmt.Sprintf("timeout %d, retries %d and %d", a.Timeout, a.Retries, a.RNRRetries))
}

// SetError moves the queue pair to ERR: what arrives is dropped, and all that
// is posted, now or later, completes as Flushed.
func (q *QP) SetError() error {
	if err := q.open(StateError); err != nil {
		return err
	}
	return q.modified(modifyError(q.h), StateError, "")
}

// State asks the device.
func (q *QP) State() (QPState, error) {
	if q.h == nil {
		return 0, closedError(fmt.Sprintf("query %v", q))
	}
	s, errno := queryQP(q.h)
	if errno != 0 {
		return 0, q.ctx.fail(errno, fmt.Sprintf("query %v", q), "")
	}
	return s, nil
}

// Write is an RDMA write of one contiguous range.
type Write struct {
	ID         uint64 // the completion's
	Addr       uint64 // local
	RemoteAddr uint64
	LKey       uint32 // not looked at when Inline
	RKey       uint32
	Len        uint32 // 0 is allowed
	Imm        uint32
	WithImm    bool // consumes a receive of the peer, and completes it
	Signalled  bool // completes; one that fails always does
	Inline     bool // the bytes are copied while posting; at most MaxInline
}

// PostWrites posts in order, in one call into C, and tells how many were
// posted: with an error, those before the one that failed. It does not allocate.
// The bytes may not change until the write, or a later one of the queue pair,
// has completed.
func (q *QP) PostWrites(w []Write) (int, error) {
	if q.h == nil {
		return 0, closedError("post writes")
	}
	n, errno := postWrites(q.h, w)
	if errno != 0 {
		return n, q.postError(errno, "write", n, len(w))
	}
	return n, nil
}

// PostReceives posts n receives of no bytes, for writes with immediate, all of
// them with the same ID; it tells how many were posted. It does not allocate.
func (q *QP) PostReceives(id uint64, n int) (int, error) {
	if q.h == nil {
		return 0, closedError("post receives")
	}
	posted, errno := postReceives(q.h, id, n)
	if errno != 0 {
		return posted, q.postError(errno, "receive", posted, n)
	}
	return posted, nil
}

func (q *QP) postError(errno syscall.Errno, what string, n, of int) error {
	detail := ""
	if errno == syscall.ENOMEM {
		detail = "the queue is full"
	}
	return q.ctx.fail(errno, fmt.Sprintf("post %s %d of %d to %v", what, n+1, of, q), detail)
}

// Close destroys the queue pair; what is outstanding completes nowhere.
func (q *QP) Close() error {
	call := fmt.Sprintf("close %v", q)
	if q.h == nil {
		return closedError(call)
	}
	if errno := destroyQP(q.h); errno != 0 {
		return q.ctx.fail(errno, call, "")
	}
	q.h = nil
	q.ctx.children.Add(-1)
	return nil
}
