package collector

import (
	"encoding/binary"

	"github.com/lockstep-ccl/lockstep/record"
)

// TraceID is the trace of one collective. Every rank derives the same id from
// what it knows already, so the spans of all ranks meet in one trace and
// sampling by id agrees on all ranks, with nothing exchanged.
//
// The derivation is part of the exported data: it is stable across versions
// and platforms, and traceid_test.go pins it. The zero id, which OTLP forbids, is never returned.
func TraceID(job string, commID uint64, kind record.CollKind, seq uint64) [16]byte {
	var id [16]byte
	binary.BigEndian.PutUint64(id[:8], chain(0xcbf29ce484222325, job, commID, kind, seq)|1)
	binary.BigEndian.PutUint64(id[8:], chain(golden, job, commID, kind, seq))
	return id
}

// chain is FNV-1a over the job's bytes from the given seed, then one mixing
// round for each of the numbers. Two seeds make the two halves independent.
func chain(seed uint64, job string, commID uint64, kind record.CollKind, seq uint64) uint64 {
	h := seed
	for i := range len(job) {
		h = (h ^ uint64(job[i])) * 0x100000001b3
	}
	h = mix(h + commID)
	h = mix(h + uint64(kind))
	return mix(h + seq)
}

// SpanID is the span of one rank (in the communicator) of the collective that
// trace names. It is stable like TraceID, and never zero.
func SpanID(trace [16]byte, rank int32) [8]byte {
	h := mix(binary.BigEndian.Uint64(trace[:8]) ^ binary.BigEndian.Uint64(trace[8:]) ^ mix(uint64(uint32(rank))+golden))
	if h == 0 {
		h = golden
	}
	var id [8]byte
	binary.BigEndian.PutUint64(id[:], h)
	return id
}

const golden = 0x9e3779b97f4a7c15

// mix is the finalizer of splitmix64: a bijection in which every input bit
// flips every output bit with probability one half.
func mix(x uint64) uint64 {
	x ^= x >> 30
	x *= 0xbf58476d1ce4e5b9
	x ^= x >> 27
	x *= 0x94d049bb133111eb
	return x ^ x>>31
}
