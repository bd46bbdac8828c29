package remediation

import (
	"context"
	"errors"
	"time"
)

// Action is one decision, handed to an Actuator.
type Action struct {
	ID       string // the same on every repeat
	Job      string
	Incident string
	Kind     ActionKind
	Rank     int    // to blame; the one to exclude when Kind says so; -1 none
	Node     string // of the culprit, by the master's word; "" when it names none
	Cause    string // the verdict's reason: node_lost, process_gone, ...
	Unit     string // that the breakers allow to be taken out, "" when none is
	Attempt  *int   // the attempt that the incident is about: no other may be ended; nil when not known
	// Opened is when the incident was, by its master's clock, and Made what the inventory said when it was
	// decided: what has begun since is another attempt, where nothing counts them. Zero: not known.
	Opened, Made time.Time
	Reason       string // for logs and the job's own record: class and culprit
	// ActWithoutProof is for who fences by itself: whether to go on when there is no proof
	// that nothing of the old attempt does.
	ActWithoutProof bool
}

// Inventory is what an actuator knows of a job's units: slots of a node, nodes
// of a cluster; whatever an exclusion takes out.
type Inventory struct {
	Units int
	// Unit names the unit that a rank runs on now, "" when unknown.
	Unit func(rank int) string
	// UnitOn, when set, is asked instead: it also takes the node that the master names, "" for none.
	UnitOn func(rank int, node string) string
	// Made is when the youngest part of what runs was made, by the actuator's clock; zero where attempts are counted.
	Made time.Time
}

func (i *Inventory) unit(rank int, node string) string {
	if i.UnitOn != nil {
		return i.UnitOn(rank, node)
	}
	return i.Unit(rank)
}

// Answer is what became of an action.
type Answer struct {
	// At is when the job ran again, by the actuator's word, which may be long
	// before the answer to a repeat. Zero: nothing had to be done, the attempt
	// that the action is about was over.
	At     time.Time
	Detail string
}

// Actuator carries out actions. Act is called again with the same ID when the
// remediator was killed or the last call failed: an actuator must recognise an
// action that it has already done and answer as it did then. It must return
// when ctx ends. ErrGone ends the retries; from Inventory it says that the job is
// none of this actuator's.
type Actuator interface {
	Name() string
	Inventory(ctx context.Context, job string) (Inventory, error)
	Act(ctx context.Context, a Action) (Answer, error)
}

// What callers branch on.
var (
	// ErrGone says that the job is not there any more: nothing to do.
	ErrGone = errors.New("job is gone")
	// ErrAway says that whom the actuator needs (an API server, a controller) does not answer
	// now, or that a job is between two attempts. That is no failure of the action: it is tried
	// for as long as its alert is not stale.
	ErrAway = errors.New("no answer")
)
