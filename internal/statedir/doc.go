// Package statedir keeps what a process believes when it starts again: a directory that is
// its user's alone, used by one process at a time, and files in it that nobody else wrote.
//
// In: a path from a command line. Open follows no link of another user on the way, makes
// the directory when it is missing (mode 0700), refuses one that another user owns, or can
// write, or could replace (by owning or writing a directory above it), and locks it; the
// kernel drops the lock with the process, however it ends. ReadSecret reads tokens and keys
// that are elsewhere, and refuses those that others could have read.
//
// Out: a Dir, or an error that names the path, says what is wrong with it, and what to do.
// What the files mean is their owners' business.
package statedir
