// Package fabricsim is a flow-level simulator of jobs' traffic in a leaf-spine fabric:
// what hashing makes of ring all-reduces, and what the plan of package pathplan makes of
// the same.
//
// In go a topology and jobs; out come each job's bus bandwidth and the load of links.
// Switches hash 5-tuples as real ones do, each with a seed of its own; NICs have two ports
// behind one address; flows share links max-min, as DCQCN does in its steady state; a ring
// is as fast as its slowest flow. There are no packets, no queues and no time to converge:
// what is printed is the steady state between two changes.
package fabricsim
