package web

import (
	"cmp"
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/lockstep-ccl/lockstep/collector"
	"github.com/lockstep-ccl/lockstep/diagnosis"
	"github.com/lockstep-ccl/lockstep/exporters/internal/label"
	"github.com/lockstep-ccl/lockstep/record"
)

// heldFrom is the time in one operation, or out of all while others wait, from which on a
// rank is told apart from those that move.
const heldFrom = time.Second

// Values of Standing.State beside the states of processes.
const (
	StandingMoving   = "moving"   // in an operation or between two, as in health
	StandingHeld     = "held"     // in an operation for over a second
	StandingAwaited  = "awaited"  // in none, and others wait for it
	StandingStarting = "starting" // its process is there, and has made no communicator so far
	StandingUnseen   = "unseen"   // no agent tells of it now
)

// Standing is where one rank stands.
type Standing struct {
	Rank    int    `json:"rank"`
	State   string `json:"state"` // moving, held, awaited, starting, unseen, stopped, disk_sleep, gone, exited
	Culprit bool   `json:"culprit,omitempty"`
	Node    string `json:"node"`
	PID     int32  `json:"pid,omitempty"`
	Step    uint64 `json:"step"`
	Mark    string `json:"mark,omitempty"` // what its program says that it does
	Xid     uint32 `json:"xid,omitempty"`
	WaitsIn string `json:"waits_in,omitempty"` // what a rank that starts waits in; "" when it runs

	// The operation that it has been in for longest.
	Communicator string  `json:"communicator,omitempty"`
	CommRank     int     `json:"communicator_rank"` // -1 when it is in none
	Collective   string  `json:"collective,omitempty"`
	Sequence     uint64  `json:"sequence,omitempty"`
	WaitsFor     []int32 `json:"waits_for,omitempty"` // world ranks, the first few of Waited; -1 is one that nobody has reported
	Waited       int     `json:"waited,omitempty"`
	Delivers     bool    `json:"entered_too,omitempty"` // those have entered too, and do not deliver
	// Seconds is for how long it has been in what State says, 0 when not known.
	Seconds float64 `json:"seconds"`
}

// Situation is what ranks that stand alike have in common.
type Situation struct {
	State    string  `json:"state"`
	Culprit  bool    `json:"culprit,omitempty"`
	Ranks    int     `json:"ranks"`
	Who      string  `json:"who"`   // world ranks as ranges: 0-4, 7
	Where    string  `json:"where"` // in which collective of which communicator, or what ranks that start wait in; "" when in none
	Seconds  float64 `json:"seconds"`
	WaitsFor string  `json:"waits_for,omitempty"`
	ranks    []int
	order    int
}

// Communicator is one communicator.
type Communicator struct {
	Name    string  `json:"name"`
	ID      string  `json:"id"`
	Size    int     `json:"size"`
	World   string  `json:"world_ranks"` // in the order of its own ranks
	Open    int     `json:"open"`        // members that are in an operation
	Seconds float64 `json:"oldest_open_seconds"`
	Least   uint64  `json:"finished_least"` // operations that the member has finished which is farthest behind, and ahead
	Most    uint64  `json:"finished_most"`
	Left    int     `json:"left"`
	Aborted int     `json:"aborted"`
	told    bool    // worth a line by itself
}

const (
	maxSituations = 48
	maxCells      = 8192 // ranks in the strip; of a larger world those that move are left out
	maxCommRows   = 64
	maxRanges     = 24 // of ranks that are written out
)

// Stand says where each rank stands; open are the incidents whose culprits are marked.
func Stand(v *collector.JobView, open []Incident) []Standing {
	if v == nil {
		return nil
	}
	culprits, nodes := blamed(open)
	awaited := map[int32]bool{}
	held := false
	for i := range v.Ranks {
		in := v.Ranks[i].In
		if in == nil || v.At.Sub(in.Since) < heldFrom {
			continue
		}
		held = true
		if !in.Entered {
			for _, w := range in.WaitsFor {
				awaited[w] = true
			}
		}
	}
	out := make([]Standing, len(v.Ranks))
	for i := range v.Ranks {
		r, s := &v.Ranks[i], &out[i]
		*s = Standing{Rank: i, State: StandingMoving, Node: r.Node, PID: r.PID, Step: r.Step, Xid: r.Xid, CommRank: -1}
		s.Culprit = culprits[int32(i)] || nodes[r.Node]
		if r.Mark > record.MarkStep {
			s.Mark = r.Mark.String()
		}
		since := time.Time{}
		if r.In != nil {
			s.Communicator, s.CommRank, s.Collective, s.Sequence = r.In.Comm, r.In.CommRank, r.In.Coll.String(), r.In.Seq
			s.WaitsFor, s.Waited, s.Delivers = r.In.WaitsFor, r.In.Waited, r.In.Entered
			since = r.In.Since
		}
		switch {
		case !r.Seen:
			s.State, since = StandingUnseen, time.Time{}
		case r.Proc == diagnosis.ProcStopped, r.Proc == diagnosis.ProcDisk, r.Proc == diagnosis.ProcGone, r.Proc == diagnosis.ProcExited:
			s.State, since = label.ProcState(r.Proc), r.ProcAt
		case r.Starting:
			s.State, s.WaitsIn, since = StandingStarting, r.WaitsIn.String(), r.ProcAt
		case r.In != nil && v.At.Sub(since) >= heldFrom:
			s.State = StandingHeld
		case r.In == nil && held && (awaited[int32(i)] || s.Culprit):
			s.State, since = StandingAwaited, r.Last
		}
		if !since.IsZero() {
			s.Seconds = math.Max(0, v.At.Sub(since).Seconds())
		}
	}
	return out
}

// blamed are the ranks and nodes that open incidents blame.
func blamed(open []Incident) (ranks map[int32]bool, nodes map[string]bool) {
	ranks, nodes = map[int32]bool{}, map[string]bool{}
	for i := range open {
		for _, c := range open[i].Culprits {
			switch {
			case c.rank >= 0:
				ranks[c.rank] = true
				if c.peer >= 0 {
					ranks[c.peer] = true
				}
			case c.Node != "":
				nodes[c.Node] = true
			}
		}
	}
	return ranks, nodes
}

// order of states: what needs eyes first.
var stateOrder = []string{"gone", "stopped", "disk_sleep", StandingAwaited, StandingUnseen, StandingHeld, StandingStarting, "exited", StandingMoving}

// Fold folds ranks that stand alike, what needs eyes first. More is how many situations it leaves out.
func Fold(list []Standing) (out []Situation, more int) {
	type key struct {
		state, comm, coll, mark, waits, in string
		seq                                uint64
		culprit                            bool
	}
	at := map[key]int{}
	for i := range list {
		s := &list[i]
		k := key{state: s.State, culprit: s.Culprit}
		if s.State != StandingMoving && s.State != StandingUnseen {
			k.comm, k.coll, k.seq, k.mark = s.Communicator, s.Collective, s.Sequence, s.Mark
			k.waits, k.in = fmt.Sprint(s.WaitsFor, s.Waited, s.Delivers), s.WaitsIn
		}
		n, known := at[k]
		if !known {
			n = len(out)
			at[k] = n
			x := Situation{State: s.State, Culprit: s.Culprit, order: slices.Index(stateOrder, s.State)}
			if k.coll != "" {
				x.Where = fmt.Sprintf("%s #%d on %s", k.coll, k.seq, k.comm)
				x.WaitsFor = s.Whom()
			} else if k.mark != "" {
				x.Where = "its own " + k.mark
			} else {
				x.Where = k.in
			}
			out = append(out, x)
		}
		x := &out[n]
		x.ranks = append(x.ranks, s.Rank)
		x.Ranks++
		if s.State != StandingMoving {
			x.Seconds = math.Max(x.Seconds, s.Seconds)
		}
	}
	slices.SortStableFunc(out, func(a, b Situation) int {
		if a.Culprit != b.Culprit {
			if a.Culprit {
				return -1
			}
			return 1
		}
		return cmp.Or(cmp.Compare(a.order, b.order), cmp.Compare(b.Seconds, a.Seconds))
	})
	if len(out) > maxSituations {
		more = len(out) - maxSituations
		out = out[:maxSituations]
	}
	for i := range out {
		out[i].Who = ranges(out[i].ranks)
	}
	return out, more
}

// Whom says for whom a rank waits, "" for nobody.
func (r *Standing) Whom() string {
	if r.Waited == 0 {
		return ""
	}
	var b strings.Builder
	for i, w := range r.WaitsFor {
		if i > 0 {
			b.WriteString(", ")
		}
		if w < 0 {
			b.WriteString("a rank that nobody has reported")
			continue
		}
		fmt.Fprintf(&b, "rank %d", w)
	}
	if more := r.Waited - len(r.WaitsFor); more > 0 {
		fmt.Fprintf(&b, " and %d more", more)
	}
	if r.Delivers {
		b.WriteString(", which entered too")
	}
	return b.String()
}

// ranges writes ascending numbers as ranges: 0-4, 7.
func ranges(list []int) string {
	var b strings.Builder
	for i, n := 0, 0; i < len(list); n++ {
		j := i
		for j+1 < len(list) && list[j+1] == list[j]+1 {
			j++
		}
		if n > 0 {
			b.WriteString(", ")
		}
		if n == maxRanges {
			fmt.Fprintf(&b, "and %d more", len(list)-i)
			break
		}
		b.WriteString(strconv.Itoa(list[i]))
		if j > i {
			b.WriteString("-" + strconv.Itoa(list[j]))
		}
		i = j + 1
	}
	return b.String()
}

// communicators are those of the job, the ones with a story first.
func communicators(v *collector.JobView) (out []Communicator, more int) {
	out = []Communicator{}
	if v == nil {
		return out, 0
	}
	for i := range v.Comms {
		c := &v.Comms[i]
		x := Communicator{
			Name: c.Name, ID: fmt.Sprintf("%016x", c.ID), Size: len(c.World), World: worldOf(c.World),
			Open: c.Open, Least: c.Least, Most: c.Most, Left: c.Left, Aborted: c.Aborted,
		}
		if !c.Oldest.IsZero() {
			x.Seconds = math.Max(0, v.At.Sub(c.Oldest).Seconds())
		}
		x.told = x.Seconds >= heldFrom.Seconds() || x.Aborted > 0
		out = append(out, x)
	}
	return out, v.More
}

// worldOf writes the world ranks of a communicator's members in the order of its own ranks:
// ranges, or first, step and last, where they are regular.
func worldOf(world []int32) string {
	if len(world) > 2 {
		step := world[1] - world[0]
		regular := step > 1 && !slices.Contains(world, -1)
		for i := 2; i < len(world) && regular; i++ {
			regular = world[i]-world[i-1] == step
		}
		if regular && len(world) > 4 {
			return fmt.Sprintf("%d, %d, … %d", world[0], world[1], world[len(world)-1])
		}
	}
	var b strings.Builder
	for i, n := 0, 0; i < len(world); n++ {
		j := i
		for j+1 < len(world) && world[i] >= 0 && world[j+1] == world[j]+1 {
			j++
		}
		if n > 0 {
			b.WriteString(", ")
		}
		switch {
		case n == maxRanges:
			fmt.Fprintf(&b, "and %d more", len(world)-i)
			return b.String()
		case world[i] < 0:
			b.WriteString("?")
		case j == i:
			b.WriteString(strconv.Itoa(int(world[i])))
		default:
			fmt.Fprintf(&b, "%d-%d", world[i], world[j])
		}
		i = j + 1
	}
	return b.String()
}
