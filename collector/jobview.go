package collector

import (
	"strings"
	"time"

	"github.com/lockstep-ccl/lockstep/diagnosis"
	"github.com/lockstep-ccl/lockstep/record"
)

// JobView is where each rank of a job is now, made when somebody looks. Ranks are world
// ranks unless a field says otherwise.
type JobView struct {
	At    time.Time
	Ranks []RankView // by world rank
	Comms []CommView // those with somebody who waits first; at most MaxViewComms
	More  int        // communicators beyond them
}

// Bounds of a JobView.
const (
	MaxViewComms = 1024
	MaxWaitsFor  = 4 // ranks that are named of those that a rank waits for
)

// RankView is one rank: its process, and the operation that has kept it the longest.
type RankView struct {
	Node   string
	PID    int32
	Proc   diagnosis.ProcState
	ProcAt time.Time // since when, zero when not known
	Seen   bool      // an agent that is heard tells of it
	// Starting: it has made no communicator so far; WaitsIn is what its first thread waits in then.
	Starting bool
	WaitsIn  diagnosis.WaitIn
	Step     uint64
	Mark     record.MarkCode // that its program has open, 0 when none
	MarkAt   time.Time
	Xid      uint32 // its GPU's gravest, 0 when none
	// In is the operation that has kept it for longest, nil when it is in none; Last is when
	// it left its last one, zero when it was in none.
	In   *Stay
	Last time.Time
}

// Stay is an operation that a rank is in.
type Stay struct {
	Comm     string // name
	CommRank int    // in the communicator
	Coll     record.CollKind
	Seq      uint64
	Bytes    uint64
	Since    time.Time
	// WaitsFor are ranks that it waits for, at most MaxWaitsFor of Waited; -1 is one that
	// nobody has reported. Entered says that these have entered too, and do not deliver.
	WaitsFor []int32
	Waited   int
	Entered  bool
}

// CommView is one communicator.
type CommView struct {
	ID      uint64
	Name    string
	World   []int32 // by rank in the communicator; -1 is one that nobody has reported
	Open    int     // members that are in an operation
	Oldest  time.Time
	Least   uint64 // operations that the member has finished which is the farthest behind, and ahead
	Most    uint64
	Left    int
	Aborted int
	// P2P says that it carries sends and receives, so that Least and Most may differ in health.
	P2P bool
}

// Note is what somebody else than the master did about an incident, by their word.
type Note struct {
	At   time.Time
	Kind string // one of NoteKinds
	Text string
}

// Done is what an action's note says of one that was carried out, after its name.
const Done = "done"

// Restarting reports whether an incident's notes say that a restart of its job has been decided
// on, and has not come to nothing.
func Restarting(notes []Note) bool {
	var last Note
	for _, n := range notes {
		if (n.Kind == NoteDecision || n.Kind == NoteAction) && !n.At.Before(last.At) {
			last = n
		}
	}
	what, how, _ := strings.Cut(last.Text, " ")
	if what = strings.TrimSuffix(what, ","); what != "restart" && what != "restart_excluding" {
		return false
	}
	return last.Kind == NoteDecision || how == Done || strings.HasPrefix(how, Done+":")
}

// NoteKinds are what notes may be of, in the order in which they come about.
var NoteKinds = []string{NoteAlert, NoteWebhook, NoteDecision, NoteAction, NoteRunning}

// Values of Note.Kind.
const (
	NoteAlert    = "alert"    // Prometheus said that it is firing
	NoteWebhook  = "webhook"  // the remediator has it in its journal
	NoteDecision = "decision" // it decided to act
	NoteAction   = "action"   // the action ended, in Text how
	NoteRunning  = "running"  // the job ran again
)

// MaxNotes bounds Incident.Notes.
const MaxNotes = 16
