// Package bootstrap brings the ranks of a communicator together and keeps
// them informed about each other.
//
// In: an ID (where rank 0 listens, and a random token), a shared secret, and
// each rank's own small description of itself. Join survives slow starters,
// proves knowledge of the secret in both directions without sending it, and
// names whoever is missing when time runs out.
//
// Out: a Control, the communicator's control plane: a star around rank 0 that
// gathers small blobs, carries aborts, and tells every survivor which rank died.
// A rank is dead when its kernel reports the end of its process, or when its host
// is silent for longer than a bound. A stopped process is alive. A broken connection
// is replaced without losing a frame. Regroup makes a new star of some members around
// its new rank 0, from addresses that all learnt at Join: it needs neither the old
// rank 0 nor the old star to be alive.
//
// It authenticates peers; it does not encrypt. It carries no bulk data and
// decides nothing: what a lost rank means is the communicator's business.
package bootstrap
