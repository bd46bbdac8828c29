// Package bootstrap brings the ranks of a communicator together (Join) and runs
// its control plane (Control).
//
// In: an ID (the address where rank 0 listens, and a random token), a shared
// secret, and each rank's description of itself (Info). Ranks may start in any
// order. Both ends of a connection prove that they know the secret, and never
// send it. When time runs out, the error names the missing ranks.
//
// Out: a Control. The control plane is a star: every rank has a session with
// rank 0, the hub. It gathers small blobs, forwards aborts and tells every
// survivor which rank died. A session outlives its connection: when a connection
// breaks, the session continues over another one and loses no frame.
//
// A rank is dead when nothing listens at its address any more, or when its host
// is silent for longer than Config.Outage. A stopped process is alive: its kernel
// still answers.
//
// Regroup joins some of the members into a new communicator. All members know
// each other's addresses since Join, so Regroup works without the old hub.
//
// The package authenticates peers and does not encrypt. It carries no bulk data.
// It reports a lost rank; the communicator decides what follows.
package bootstrap
