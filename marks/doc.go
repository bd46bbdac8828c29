// Package marks is the program's own words: which step it is at, and that it now
// writes a checkpoint, evaluates, compiles or loads data. They make
// lockstep_job_step, and verdicts that know a pause from a hang. They need no
// communicator and no particular library; without any the verdicts still stand.
//
// Three forms of the same calls, one record each, without locks held for long or
// system calls: this package, c/lockstep.h (a header, for C and C++), and
// python/lockstep (pure Python, nothing to build). Of a ccl program, On writes into
// the process's own recorder. Any other process gets a small file of marks beside
// the recorder that its library has, if it has one; the node's agent joins the two.
//
// A mark never fails: where no file can be made the calls do nothing, and Open says
// why. A forked child's marks do nothing either, since it is not the rank.
package marks

//go:generate go run ./internal/genlayout -h ../record/c/lockstep_record.h -o python/lockstep/_layout.py
