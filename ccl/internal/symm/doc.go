// Package symm makes symmetric memory: an allocation of each GPU rank of a
// node, mapped by all of them, so that a kernel finds offset o of rank r's at
// Base + r × Stride + o.
//
// In: a device, the bootstrap's all-gather and key. Out: Memory. Each pair of
// ranks, in one process or two, holds a Unix socket; allocations travel over it
// as file descriptors (SCM_RIGHTS). A peer is let in when its process has our
// user and both sides have proved that they know the key.
//
// Alloc and Share are collective and agree on the outcome: when one rank fails,
// all return an error that names it, and the Group goes on. A rank that is gone,
// stalls past the context or breaks the protocol breaks the Group, since nobody
// knows what it has mapped.
//
// The package waits for no kernel, and knows neither heaps nor windows.
package symm
