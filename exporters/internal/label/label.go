// Package label writes the pipeline's values the one way in which metrics and
// the status page show them.
package label

import (
	"encoding/hex"
	"strconv"

	"github.com/lockstep-ccl/lockstep/collector"
	"github.com/lockstep-ccl/lockstep/diagnosis"
	"github.com/lockstep-ccl/lockstep/exporters/names"
)

// ProcStates lists the process states in the order in which a reader wants them.
var ProcStates = []diagnosis.ProcState{
	diagnosis.ProcRunning, diagnosis.ProcStopped, diagnosis.ProcDisk,
	diagnosis.ProcGone, diagnosis.ProcExited, diagnosis.ProcUnknown,
}

// ProcState returns the value of names.LabelState for s.
func ProcState(s diagnosis.ProcState) string {
	switch s {
	case diagnosis.ProcRunning:
		return names.StateRunning
	case diagnosis.ProcStopped:
		return names.StateStopped
	case diagnosis.ProcDisk:
		return names.StateDiskSleep
	case diagnosis.ProcGone:
		return names.StateGone
	case diagnosis.ProcExited:
		return names.StateExited
	}
	return names.StateUnknown
}

// Rank returns a rank's number, "" when it does not apply (negative).
func Rank(r int32) string {
	if r < 0 {
		return ""
	}
	return strconv.Itoa(int(r))
}

// TraceID returns id in hexadecimal, "" when it is the zero id.
func TraceID(id [16]byte) string {
	if id == ([16]byte{}) {
		return ""
	}
	return hex.EncodeToString(id[:])
}

// Agent returns the value of names.LabelState for a.
func Agent(a collector.AgentStatus) string {
	switch {
	case a.Lost:
		return names.StateLost
	case a.Connected:
		return names.StateConnected
	}
	return names.StateDisconnected
}
