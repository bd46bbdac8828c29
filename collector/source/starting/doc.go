// Package starting is the source of ranks that have made no communicator yet. NCCL loads the
// profiler plugin with the first communicator, so until then a rank has no recorder, and one
// that sleeps, is stopped or dies while the job starts would be seen by nobody.
//
// A rank is expected when its environment says so: lockstep attach has set its job, its
// runtime directory and the plugin, and a launcher its rank. The source finds such processes
// in /proc and keeps an entry in the view for each, with what its first thread waits in,
// until the rank has a recorder of its own. It writes nothing, and makes no file: the other
// sources and the agent take an entry for any other process.
//
// In: /proc, and the view of the recorder source before it. Out: entries and two fields of
// source.Process (Starting, WaitsIn).
//
// Whose word an entry is: the kernel's, for a process of the user whose job it is (docs/design/trust.md).
package starting
