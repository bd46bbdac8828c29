package executor

import "context"

// Order keeps the order of a stream's operations, which may be on several communicators. One
// goroutine at a time may use it.
type Order struct {
	id   uint32
	uses []use // the last operation on each communicator since Wait, latest last
}

// NewOrder returns an Order for the stream with number id.
func NewOrder(id uint32) Order { return Order{id: id, uses: make([]use, 0, 8)} }

// ID returns the stream's number.
func (o *Order) ID() uint32 { return o.id }

// note records that the stream's last operation is seq of q. It returns the operation on another
// communicator that must end before seq begins, if any.
func (o *Order) note(q *queue, seq uint64) (after use) {
	n := len(o.uses)
	if n > 0 && o.uses[n-1].of == q {
		o.uses[n-1].seq = seq
		return use{}
	}
	if n > 0 && !o.uses[n-1].done() {
		after = o.uses[n-1]
	}
	for i := range o.uses {
		if o.uses[i].of == q {
			o.uses = append(o.uses[:i], o.uses[i+1:]...)
			break
		}
	}
	o.uses = append(o.uses, use{q, seq})
	return after
}

// Wait waits until every operation has ended, and returns the error of the first communicator where
// one failed. If ctx ends first, ended is false.
func (o *Order) Wait(ctx context.Context) (ended bool, failed error) {
	for _, u := range o.uses {
		if err := u.of.run.drive(ctx, u.seq); err != nil {
			if !u.done() {
				return false, err
			}
			if failed == nil {
				failed = err
			}
		}
	}
	o.uses = o.uses[:0]
	return true, failed
}

// Query reports whether every operation has ended. If so, err is what Wait would return.
func (o *Order) Query() (done bool, err error) {
	for _, u := range o.uses {
		if !u.done() {
			return false, nil
		}
		if err := u.of.outcome(u.seq); err != nil {
			return true, err
		}
	}
	return true, nil
}
