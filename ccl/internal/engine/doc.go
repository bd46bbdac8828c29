// Package engine runs schedules: it moves the bytes of one communicator's
// operations over the links of a mesh, and reduces them on the way.
//
// In: a schedule (package algo), the caller's buffers and the call's signature.
// Out: bytes on links, results in the buffers, and errors (PeerError,
// MismatchError). The engine reduces straight from the transport's memory, so
// received elements are not copied first.
//
// An Engine never blocks. Step does what is possible now and says whether
// anything moved, so any goroutine can continue an operation that another began.
//
// Messages carry the signature of their call. If ranks disagree on a call, they
// get a MismatchError, and no rank takes the bytes of another call for its own.
//
// The engine picks no algorithms, writes no records and knows no streams.
package engine
