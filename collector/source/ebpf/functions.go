package ebpf

import "github.com/lockstep-ccl/lockstep/record"

// none is an argument that a function does not have.
const none = 15

// function is one of NCCL's that is probed: by what, with which cookie.
type function struct {
	name          string
	enter, leave  string // programs; "" for none
	kind          record.CollKind
	comm          uint64 // which argument it is, from 0; so are the following
	count         uint64
	dtype         uint64
	op, peer      uint64
	stream        uint64
	pointToPoint  bool
	cookieOfOther uint64 // of a function that is no collective
}

func collective(name string, kind record.CollKind, comm, count, dtype, op, peer, stream uint64) function {
	return function{name: name, enter: callsProgCallEnter, leave: callsProgCallReturn, kind: kind, comm: comm, count: count, dtype: dtype, op: op, peer: peer, stream: stream}
}

func between(name string, kind record.CollKind) function {
	f := collective(name, kind, 4, 1, 2, none, 3, 5)
	f.pointToPoint = true
	return f
}

func other(name, enter, leave string, cookie uint64) function {
	return function{name: name, enter: enter, leave: leave, cookieOfOther: cookie}
}

// Cookies of functions that are no collectives; calls.bpf.c has the same.
const (
	cookieInitRank     = 1
	cookieInitScalable = 2

	stateJoining = 1
	stateJoined  = 2
	stateLeft    = 3
	stateAborted = 4
)

// functions are NCCL's as of 2.30 (nccl.h); RCCL has the same.
var functions = []function{
	collective("ncclAllReduce", record.AllReduce, 5, 2, 3, 4, none, 6),
	collective("ncclReduce", record.Reduce, 6, 2, 3, 4, 5, 7),
	collective("ncclBroadcast", record.Broadcast, 5, 2, 3, none, 4, 6),
	collective("ncclBcast", record.Broadcast, 4, 1, 2, none, 3, 5),
	collective("ncclAllGather", record.AllGather, 4, 2, 3, none, none, 5),
	collective("ncclReduceScatter", record.ReduceScatter, 5, 2, 3, 4, none, 6),
	collective("ncclAlltoAll", record.AlltoAll, 4, 2, 3, none, none, 5),
	collective("ncclGather", record.Gather, 5, 2, 3, none, 4, 6),
	collective("ncclScatter", record.Scatter, 5, 2, 3, none, 4, 6),
	between("ncclSend", record.Send),
	between("ncclRecv", record.Recv),
	other("ncclGroupStart", callsProgGroupStart, "", 0),
	other("ncclGroupEnd", callsProgGroupEnd, callsProgGroupEndReturn, 0),
	other("ncclGroupSimulateEnd", callsProgGroupEnd, callsProgGroupEndReturn, 0),
	other("ncclCommInitRank", callsProgInitEnter, callsProgInitReturn, cookieInitRank),
	other("ncclCommInitRankConfig", callsProgInitEnter, callsProgInitReturn, cookieInitRank),
	other("ncclCommInitRankScalable", callsProgInitEnter, callsProgInitReturn, cookieInitScalable),
	other("ncclCommSplit", callsProgSplitEnter, callsProgInitReturn, 0),
	other("ncclCommShrink", callsProgShrinkEnter, callsProgInitReturn, 0),
	other("ncclCommInitAll", callsProgInitAllEnter, callsProgInitReturn, 0),
	other("ncclCommDestroy", callsProgLeaveEnter, "", stateLeft),
	other("ncclCommAbort", callsProgLeaveEnter, "", stateAborted),
}

// marker is a function that every library of this kind has.
const marker = "ncclCommInitRank"

// cookie is what its probes are given; calls.bpf.c takes it apart.
func (f *function) cookie() uint64 {
	if f.kind == record.CollNone {
		return f.cookieOfOther
	}
	c := uint64(f.kind) | f.comm<<8 | f.count<<12 | f.dtype<<16 | f.op<<20 | f.peer<<24 | f.stream<<28
	if f.pointToPoint {
		c |= 1 << 32
	}
	return c
}
