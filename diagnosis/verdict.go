package diagnosis

import "github.com/lockstep-ccl/lockstep/record"

// Class is what broke step (C4D's four symptoms).
type Class uint8

const (
	Healthy Class = iota
	CommunicationHang
	NoncommunicationHang
	CommunicationSlow
	NoncommunicationSlow
	numClasses
)

// NumClasses is how many classes there are, Healthy among them.
const NumClasses = int(numClasses)

var classNames = [numClasses]string{"healthy", "communication_hang", "noncommunication_hang", "communication_slow", "noncommunication_slow"}

func (c Class) String() string {
	if c < numClasses {
		return classNames[c]
	}
	return "unknown"
}

// Classes lists the classes of faults.
func Classes() []Class {
	var all []Class
	for c := Healthy + 1; c < numClasses; c++ {
		all = append(all, c)
	}
	return all
}

// Level says what may be done about a verdict.
type Level uint8

const (
	Suspected Level = iota + 1 // warns
	Confirmed                  // may trigger an action
)

func (l Level) String() string {
	switch l {
	case Suspected:
		return "suspected"
	case Confirmed:
		return "confirmed"
	}
	return "none"
}

// CulpritKind is what a culprit is.
type CulpritKind uint8

const (
	CulpritRank       CulpritKind = iota + 1 // Rank
	CulpritConnection                        // Rank → Peer
	CulpritSource                            // a whole row of the delay matrix: everything Rank sends
	CulpritDest                              // a whole column: everything Rank receives
	CulpritNode                              // a block: Node
)

func (k CulpritKind) String() string {
	return [...]string{"none", "rank", "connection", "source", "destination", "node"}[min(int(k), 5)]
}

// Culprit is whom or what a verdict blames. Ranks are world ranks; -1 when it does not apply.
type Culprit struct {
	Kind   CulpritKind
	Rank   int32
	Peer   int32
	Node   string // of Rank
	Reason string // short and machine-readable: process_gone, process_stopped, disk_sleep, idle, computing, checkpoint, xid_79, stalled, network, ...
}

// Verdict is the engine's finding about one fault. The same fault keeps the
// same Key from pass to pass, so that a caller can open, update and close
// incidents without understanding them.
type Verdict struct {
	Key      string
	Class    Class
	Level    Level
	Culprits []Culprit // the surest first; never empty; at most 8
	Comm     uint64    // communicator that shows it best, by id
	CommName string
	Coll     record.CollKind
	Seq      uint64   // the collective in question there
	Since    int64    // estimated onset
	Victims  int      // ranks held up
	Why      []string // evidence in sentences, most telling first; at most 8
	// Chain is who waits for whom, from the rank that is the most ranks away down to the
	// first culprit, one wait each; nil where nobody waits in between. At most 8.
	Chain []string
	// Counter is what would have changed the verdict: what has to happen for it to be over or another.
	Counter string
	// Undetermined is what the evidence cannot tell of the culprits, "" when it tells
	// all: then that something is wrong is as sure as Level says and who is not, so
	// that nobody may be excluded for it.
	Undetermined string
}
