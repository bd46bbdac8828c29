// Package algo turns a collective into a schedule: what one rank sends,
// receives, reduces and copies, in which order, and what waits for what.
//
// In: a Call (collective, type, operator, count, root) and a Place (this rank,
// how many there are, which node each is on). Out: a Schedule, a plain value
// that holds offsets and peers but no pointers, so that it can be cached for
// every call of the same shape, and checked without any transport by running
// all ranks' schedules against each other.
//
// Choose picks algorithm, protocol and block size by a cost model; Build writes
// the steps. Every schedule reduces in a fixed order, so a result does not
// depend on timing, and every AllReduce gives the same bits on all ranks.
// Schedules are free of deadlock for any amount of buffering in a connection:
// all ranks walk the same global order of messages.
//
// It moves no bytes and knows no transport; package engine runs schedules.
package algo
