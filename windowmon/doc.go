// Package windowmon watches one direction of one connection through the work
// requests that its sender posts and their completions, and says in
// microseconds when it is slow, and why: ICCL's sliding-window monitor, with
// the causes that it lacks.
//
// In flow a post, a completion, a lack of credit, a sign of life of the
// progress thread, each with its CLOCK_MONOTONIC time. Out flow windows: at a
// change of state, at an anomaly, or once a period, and nothing otherwise.
//
// Beside windows, which never overlap, slides an estimate over the last requests, renewed at
// each completion: when it turns bad that is an event (Event), wherever windows begin and
// end. One is no state: that takes most of the last windows.
//
// On queue pairs (Config.Rare) it finds as well what is slow now and then only, by the time that it costs.
//
// A Monitor is a plain value, about 3 KiB, that its owner embeds. It
// allocates nothing, reads no clock, starts no goroutine, and takes no lock: it
// belongs to the one thread that drives the connection. It compares a
// connection with its own past only; comparing connections with each other is
// diagnosis' work, so one that has been slow from its first byte is not seen
// here.
package windowmon
