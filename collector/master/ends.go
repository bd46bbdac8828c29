package master

import (
	"math"

	"github.com/lockstep-ccl/lockstep/collector/wire"
	"github.com/lockstep-ccl/lockstep/diagnosis"
	"github.com/lockstep-ccl/lockstep/record"
)

// This file merges what is told of how processes and communicators end, and of what
// ranks that are held up have called. As everywhere, an unknown value is its type's zero.

// share bounds a share from outside.
func share(x float32) float32 {
	return float32(min(finite(float64(x)), 1))
}

// maxSignal is the last of Linux's, maxCode the largest exit status.
const maxSignal, maxCode = 64, 255

func exitOf(w *wire.Exit, clock *clockMap, now int64) diagnosis.Exit {
	if w == nil || w.By == 0 || w.By > uint32(diagnosis.ExitKernel) || w.Code < 0 || w.Code > maxCode || w.Signal < 0 || w.Signal > maxSignal {
		return diagnosis.Exit{} // nobody has said how
	}
	return diagnosis.Exit{By: diagnosis.ExitSource(w.By), Code: w.Code, Signal: w.Signal, At: clock.real(w.MonoAtNs, now), Asked: w.Asked}
}

// faultOf is why a member was aborted, as diagnosis.Member has it. An abort that its own
// program wanted names nobody and is no fault.
func faultOf(w *wire.Member) (why record.Result, peer int32) {
	if record.CommState(w.State) != record.CommAborted || !record.Result(min(w.Fault, math.MaxUint8)).Known() {
		return record.ResultOK, -1
	}
	why, peer = record.Result(w.Fault), w.FaultPeer
	if peer < 0 || peer >= w.Size || why == record.ResultOK {
		peer = -1
	}
	if why == record.ResultAborted && peer < 0 {
		why = record.ResultOK
	}
	return why, peer
}

// mergeCalls keeps the calls of a stall's first report for as long as the stall lasts.
func (s *state) mergeCalls(p *process, r *diagnosis.Rank, w *wire.Rank, clock *clockMap, now int64) {
	if w.Stall != p.stall || len(w.Calls) > 0 {
		s.calls -= len(r.Calls)
		r.Calls = nil
	}
	p.stall = w.Stall
	calls := w.Calls[max(0, len(w.Calls)-diagnosis.MaxCalls):]
	if w.Stall == 0 || len(calls) == 0 {
		return
	}
	if s.calls+len(calls) > s.limits.Calls {
		s.overflow++
		return
	}
	s.calls += len(calls)
	r.Calls = make([]diagnosis.Call, 0, len(calls))
	for _, c := range calls {
		call := diagnosis.Call{Comm: c.GetCommId(), Seq: c.GetSeq(), Peer: max(c.GetPeer(), -1), Bytes: c.GetBytes(), At: clock.real(c.GetMonoAtNs(), now)}
		if kind := record.CollKind(min(c.GetColl(), math.MaxUint8)); kind.Known() {
			call.Coll = kind
		}
		r.Calls = append(r.Calls, call)
	}
}
