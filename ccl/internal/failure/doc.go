// Package failure says why a communicator has ended, in the same terms for callers, records and
// other ranks.
//
// In: errors of the control plane and of the engine. Out: an *Error, which names the rank, the
// communicator, the operation and the peer to blame, and wraps one of the sentinels; the result for a
// record; and the bytes by which a rank tells the others. Package ccl exports Error and the sentinels.
//
// The package does not end communicators. The executor does.
package failure
