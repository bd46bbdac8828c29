// Package record is the flight recorder: one memory-mapped file per process
// that says what the process's collectives did, and goes on saying it after
// the process is dead.
//
// In flow a rank's own words: fixed 64-byte records appended to a ring by any
// number of threads (Writer.Append: wait-free, no lock, no system call, no
// allocation), and the live words of each communicator (Comm) and connection
// (Conn), which stay right when the ring has overwritten itself. The C header
// c/lockstep_record.h is the same writer for programs without a Go runtime.
// A GPU writes its own words: start and end of each operation, by its own clock,
// into slots of the file (Comm.StampRange), whatever the process is doing.
//
// Out flow, to a reader that maps the file read-only and never touches the
// writer: the records in order of ticket, the GPU's operations with their times
// mapped to the host's clock, an exact count of those of both that it could not
// have, and a status of each communicator and connection. A file is foreign
// bytes to its reader: whatever is in it gives an error, never a crash.
//
// Beside a recorder may lie an End: how the process ended, by the word of whoever reaped it.
//
// The package interprets nothing, starts no goroutine and removes no file. Slots
// of a table go to another owner some time after a communicator was closed; one
// that finds none is counted and goes unrecorded. Linux only.
package record

//go:generate go run ./internal/genheader -o c/lockstep_record.h
