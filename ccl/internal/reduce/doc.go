// Package reduce does the arithmetic of collectives: it combines, scales and
// converts arrays of elements that lie in raw bytes.
//
// In flow byte slices holding whole little-endian elements at any alignment;
// out flows one byte slice of the same length. Nothing is allocated, nothing
// blocks, no goroutine is started, and no state is kept: every function is safe
// for concurrent use on slices that do not overlap.
//
// The same inputs give the same bits on every machine and on every code path
// (portable Go, AVX2, AVX-512), and Reduce is commutative bit for bit, so ranks
// that combine the same two values in a different order agree:
//   - integers wrap;
//   - floats round to nearest even; a NaN result is always the positive quiet
//     NaN without payload (0x7e00, 0x7fc0, 0x7fc00000, 0x7ff8000000000000);
//   - max and min return the number when one side is NaN, as NCCL and C's
//     fmax do, and order -0 below +0;
//   - float16 and bfloat16 are combined in float32 and rounded once.
//
// It knows nothing of ranks, algorithms or where the bytes came from.
package reduce
