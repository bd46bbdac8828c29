// Package ccl is Lockstep's collective communication library: communicators of
// ranks that reduce, spread and exchange buffers, with an API that NCCL's users
// know, and a flight recorder that tells what each rank was doing.
//
//	comm, err := ccl.Init(ctx, ccl.Config{ID: id, Rank: r, Size: n, Name: "dp"})
//	s := comm.NewStream()
//	err = comm.AllReduce(s, ccl.Of(grads), ccl.Of(grads), ccl.Sum)
//	err = s.Wait(ctx)
//
// In flow calls on a Stream; they return at once. Out flow results in the
// callers' buffers, and records. Operations of one communicator run in the
// order of the calls, whatever their streams; those of one stream run in order
// across communicators. Whoever waits does the work: Wait carries operations
// out in the caller's goroutine, and a background worker takes on what nobody
// waits for. No call allocates once its shape has been seen.
//
// Every failure that the library can know of ends in a *Error that names rank,
// communicator and operation, on every surviving rank: a lost peer, ranks that
// disagree on a call, an abort. After one the communicator is over; Shrink makes
// one of the survivors.
//
// Results are reproducible: reductions have a fixed order, and AllReduce gives
// the same bits on all ranks. 16-bit floats are added in float32 and rounded once
// for each stage of an algorithm (see docs/design/collectives.md).
//
// It decides nothing about the job: restarting, excluding and blaming is the
// pipeline's, which reads the records.
package ccl
