package executor

// Put appends op to the queue and to the stream's order. If the queue is full it first runs
// operations. It fails if the communicator has failed or is closing. Put takes ownership of op's
// Messages and Vector, also if it fails.
func (x *Executor) Put(o *Order, op *Operation) error {
	q := &x.queue
	q.mu.Lock()
	for {
		if f := x.Failed(); f != nil {
			q.mu.Unlock()
			x.forget(op)
			return x.Error(op.Coll.String(), 0, f)
		}
		if q.tail.Load()-q.finished.Load() < queueLen-1 {
			break
		}
		half := q.tail.Load() - queueLen/2
		q.mu.Unlock()
		if err := x.drive(background, half); err != nil {
			x.forget(op)
			return err
		}
		q.mu.Lock()
	}
	seq := q.tail.Load() + 1
	slot := q.at(seq)
	*slot = *op
	slot.stream = o.id
	if op.Proxy != nil {
		op.Proxy.Numbered(seq)
	}
	after := o.note(q, seq)
	slot.after = after
	if op.Coll.Collective() {
		q.collective++
		slot.collective = q.collective
		slot.sign(&q.calls[q.collective%uint64(len(q.calls))])
	}
	x.Log.enqueue(slot, seq, q.finished.Load()+1 == seq && after.of == nil && op.Proxy == nil)
	q.tail.Store(seq)
	q.mu.Unlock()
	q.nudge(op.Bytes)
	return nil
}
