// Package replay records the evidence that an engine judged, and judges it again.
//
// In flow a job's Evidence and what was told of it, pass by pass (Writer, or
// Recorder, which keeps a bounded directory of segments and a file for each
// incident); out flow the same values in the same order (Reader), and what an
// engine of this program says to them (Play). It decides nothing: the verdicts
// are diagnosis's, and it never makes the one who records wait.
//
// A recording is a sequence of frames:
//
//	offset  bytes
//	0       4      "LSEV"
//	4       1      version of the format, 1
//	5       1      kind: header, part, verdicts or mark
//	6       1      codec: 0 stored, 1 zstd
//	7       1      0
//	8       4      length of the payload, little-endian
//	12      4      length of what it holds
//	16      4      CRC-32C of the 16 bytes before and the payload
//	20             payload: a message of evidence.proto
//
// A header frame begins a segment, and nothing in a segment refers to what came
// before: segments can be removed from the front, and recordings concatenated. A
// pass is its verdicts when they changed, then one or more parts: all of the
// evidence at first (a key frame), and what changed since the pass before from then on.
// What follows a torn or damaged frame up to the next header is left out and counted.
package replay
