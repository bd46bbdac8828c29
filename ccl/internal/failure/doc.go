// Package failure says why a communicator is over, in one vocabulary for its callers,
// its records and the other ranks.
//
// In flow the errors of the control plane and of the engine. Out flow *Error, which names
// rank, communicator, operation and whom to blame and wraps one of the sentinels; a record's
// result; and the bytes by which a rank tells the others. Package ccl has Error and the
// sentinels under its own name.
//
// It ends nothing: the executor does.
package failure
