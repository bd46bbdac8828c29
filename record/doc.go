// Package record is the flight recorder: one memory-mapped file per process
// that says what the process's collectives did, and goes on saying it after
// the process is dead.
//
// In flow a rank's own words: fixed 64-byte records appended to a ring by any
// number of threads (Writer.Append: wait-free, no lock, no system call, no
// allocation), and the live words of each communicator (Comm) and connection
// (Conn), which stay right when the ring has overwritten itself. The C header
// c/lockstep_record.h is the same writer for programs without a Go runtime.
//
// Out flow, to a reader that maps the file read-only and never touches the
// writer: the records in order of ticket, an exact count of those it could not
// have, and a status of each communicator and connection. A file is foreign
// bytes to its reader: whatever is in it gives an error, never a crash.
//
// The package interprets nothing, starts no goroutine, removes no file, and
// does not reuse table slots: a communicator or connection that finds its
// table full is counted and goes unrecorded. Linux only.
package record

//go:generate go run ./internal/genheader -o c/lockstep_record.h
