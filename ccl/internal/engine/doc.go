// Package engine runs schedules: it moves the bytes of one communicator's
// operations over the links of a mesh, and reduces them on the way.
//
// In: a schedule (package algo), the caller's buffers and the call's
// signature. Out: bytes on links, results in the buffers, and errors. An
// Engine never blocks: Step does what can be done now and says whether
// anything moved, so whoever holds the communicator can carry on an operation
// that someone else began. Elements are reduced straight from the transport's
// memory.
//
// Each message carries the signature of the call it belongs to, so bytes of one
// call are never taken for another's: ranks that disagree get a MismatchError.
//
// It picks no algorithms, records nothing, and knows no streams.
package engine
