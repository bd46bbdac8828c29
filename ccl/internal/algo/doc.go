// Package algo turns a collective into a schedule: what one rank sends,
// receives, reduces and copies, in which order, and which step waits for which.
//
// In: a Call (collective, type, operator, count, root) and a Place (this rank,
// the number of ranks, the node of each). Out: a Schedule. It holds offsets and
// peers but no pointers. So all calls of one shape share a schedule, and tests
// run all ranks' schedules against each other without a transport.
//
// Model.Choose picks algorithm, protocol and block size by a cost model. Build
// writes the steps of a collective, Chain those of several in a row, and Messages
// those of point-to-point operations.
//
// A schedule reduces in a fixed order, so a result does not depend on timing.
// AllReduce gives the same bits on all ranks. A collective's schedules cannot
// deadlock, however little a connection buffers, because all ranks follow one
// global order of messages.
//
// Package engine runs schedules. This package moves no bytes and knows no
// transport.
package algo
