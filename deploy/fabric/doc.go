// Package fabric is a leaf-spine fabric of network namespaces on one machine: real TCP, real
// ECMP by hash, real queues. `make test-fabric` measures C4P on it; it is for tests and
// needs root.
//
// In: a [Shape]. Out: namespaces that processes are started in, the fabric's description for
// a planner, links to cut, heal and make lossy. Hosts have two ports, left and right, and
// one address that is behind both, as bonded ports have: so the source port of a connection
// chooses the port that it leaves by, the spine, and the port that it comes in by.
//
// A switch hashes addresses, protocol and ports (fib_multipath_hash_policy 3) with a seed of
// its own. A management network beside the fabric, with one address a host, carries what
// goes to a planner.
package fabric
