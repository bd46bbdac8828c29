package verbs

import (
	"fmt"
	"math"
	"syscall"
)

// CompletionChannel tells through a descriptor when an armed queue has got a
// completion.
type CompletionChannel struct {
	h   handle
	ctx *Context
}

// NewCompletionChannel makes a channel; it serves any number of queues.
func (c *Context) NewCompletionChannel() (*CompletionChannel, error) {
	call := "make a completion channel on " + c.name
	if c.h == nil {
		return nil, closedError(call)
	}
	h, errno := createChannel(c.h)
	if errno != 0 {
		return nil, c.fail(errno, call, "")
	}
	c.children.Add(1)
	return &CompletionChannel{h: h, ctx: c}, nil
}

// FD is readable when Drain has events. It stays the channel's.
func (ch *CompletionChannel) FD() int {
	if ch.h == nil {
		return -1
	}
	return channelFD(ch.h)
}

// Drain takes and acknowledges all events, and tells how many there were. It
// does not block.
func (ch *CompletionChannel) Drain() (int, error) {
	call := "read a completion channel of " + ch.ctx.name
	if ch.h == nil {
		return 0, closedError(call)
	}
	n, errno := drainChannel(ch.h)
	return n, ch.ctx.fail(errno, call, "")
}

// Close fails with ErrBusy while queues use the channel.
func (ch *CompletionChannel) Close() error {
	call := "close a completion channel of " + ch.ctx.name
	if ch.h == nil {
		return closedError(call)
	}
	if errno := destroyChannel(ch.h); errno != 0 {
		return ch.ctx.fail(errno, call, "")
	}
	ch.h = nil
	ch.ctx.children.Add(-1)
	return nil
}

// Completion is a completed work request.
type Completion struct {
	ID        uint64 // of the work request
	Status    Status
	Opcode    Opcode // undefined unless Status is Success, as is all below but QP
	Bytes     uint32 // received
	Imm       uint32
	QP        uint32 // number
	VendorErr uint32
	HasImm    bool
}

// CQ is a completion queue.
type CQ struct {
	h     handle
	ctx   *Context
	depth int
	id    uint32
}

// NewCQ makes a queue of at least depth entries, which announces completions
// through ch when armed; ch may be nil.
func (c *Context) NewCQ(depth int, ch *CompletionChannel) (*CQ, error) {
	call := fmt.Sprintf("make a completion queue of %d entries on %s", depth, c.name)
	var chh handle
	if ch != nil {
		if chh = ch.h; chh == nil {
			return nil, closedError(call)
		}
	}
	if c.h == nil {
		return nil, closedError(call)
	}
	if depth < 1 || depth > math.MaxInt32 {
		return nil, c.fail(syscall.EINVAL, call, "")
	}
	q := &CQ{ctx: c}
	if errno := createCQ(c.h, q, depth, chh); errno != 0 {
		return nil, c.fail(errno, call, "")
	}
	c.children.Add(1)
	return q, nil
}

// Depth is how many entries the queue has: at least as many as asked for.
func (q *CQ) Depth() int { return q.depth }

// ID is the queue's number in its context, as events name it.
func (q *CQ) ID() uint32 { return q.id }

// Poll takes up to len(out) completions. It does not block or allocate.
func (q *CQ) Poll(out []Completion) (int, error) {
	if q.h == nil {
		return 0, closedError("poll a completion queue")
	}
	n := pollCQ(q.h, out)
	if n < 0 {
		return 0, q.ctx.fail(syscall.EIO, fmt.Sprintf("poll completion queue %d of %s", q.id, q.ctx.name), fmt.Sprintf("the provider answered %d", n))
	}
	return n, nil
}

// Arm asks for one event when the next completion is added. A completion that
// was added before raises none, so poll once more before sleeping.
func (q *CQ) Arm() error {
	if q.h == nil {
		return closedError("arm a completion queue")
	}
	if errno := armCQ(q.h); errno != 0 {
		return q.ctx.fail(errno, fmt.Sprintf("arm completion queue %d of %s", q.id, q.ctx.name), "")
	}
	return nil
}

// Close fails with ErrBusy while queue pairs use the queue.
func (q *CQ) Close() error {
	call := fmt.Sprintf("close completion queue %d of %s", q.id, q.ctx.name)
	if q.h == nil {
		return closedError(call)
	}
	if errno := destroyCQ(q.h); errno != 0 {
		return q.ctx.fail(errno, call, "")
	}
	q.h = nil
	q.ctx.children.Add(-1)
	return nil
}
