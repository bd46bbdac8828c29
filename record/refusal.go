package record

import "sync/atomic"

// Refusal is why a process's listener turned a connection away.
type Refusal uint8

const (
	RefusedSilent   Refusal = iota // it did not say in time what was due
	RefusedGarbage                 // it spoke something else
	RefusedUnproved                // it did not know the secret
	RefusedReplayed                // it said what another connection had said
	RefusedCrowded                 // it was pushed out by later ones
	NumRefusals
)

var refusalNames = [NumRefusals]string{"silent", "garbage", "unproved", "replayed", "crowded"}

func (r Refusal) String() string {
	if r < NumRefusals {
		return refusalNames[r]
	}
	return "unknown"
}

// Refused says how many connections the process's listeners have turned away so far, by
// Refusal. A nil Writer does nothing.
func (w *Writer) Refused(n [NumRefusals]uint64) {
	if w == nil {
		return
	}
	for i := range n {
		atomic.StoreUint64(&w.hdr.refused[i], n[i])
	}
}
