package diagnose

import (
	"fmt"
	"time"

	"github.com/lockstep-ccl/lockstep/diagnosis"
	"github.com/lockstep-ccl/lockstep/diagnosis/replay"
)

// Report is what --json writes. Offsets are seconds since the first pass recorded.
type Report struct {
	Replay  string    `json:"replay"`
	Job     string    `json:"job"`
	Program string    `json:"program"` // that recorded
	First   time.Time `json:"first"`
	Last    time.Time `json:"last"`
	Passes  int       `json:"passes"`
	Missing uint64    `json:"missing"` // passes made and not recorded, between the first and the last one
	Runs    int       `json:"runs"`    // of masters
	// LongestGap is between two passes recorded, HistoryMissing how long the master
	// had learnt before the first one, seconds.
	LongestGap      float64           `json:"longest_gap"`
	HistoryMissing  float64           `json:"history_missing"`
	Damage          replay.Damage     `json:"damage"`
	UnknownSettings []string          `json:"unknown_settings,omitempty"` // that the master had and this program does not
	Overrides       map[string]string `json:"overrides,omitempty"`

	Result      string       `json:"result"` // identical at each pass, same, or differs
	Events      []Event      `json:"events"`
	Differences []Difference `json:"differences,omitempty"`
	Error       string       `json:"error,omitempty"`
}

// Event is one line of the timeline: a verdict that opened, changed or ended, or what
// the master did.
type Event struct {
	Offset   float64   `json:"offset"`
	At       time.Time `json:"at"`
	Kind     string    `json:"kind"`               // opened, changed, ended; incident opened, incident confirmed, incident closed
	Verdict  *Verdict  `json:"verdict,omitempty"`  // as replayed
	Recorded string    `json:"recorded,omitempty"` // same, nothing, or what else was told at this pass
	Incident string    `json:"incident,omitempty"` // id, of what the master did
	Evidence *Excerpt  `json:"evidence,omitempty"`
}

// Verdict is diagnosis.Verdict in words.
type Verdict struct {
	Key          string    `json:"key"`
	Class        string    `json:"class"`
	Level        string    `json:"level"`
	Culprits     []Culprit `json:"culprits"`
	Communicator string    `json:"communicator"`
	Collective   string    `json:"collective"`
	Seq          uint64    `json:"seq"`
	Since        float64   `json:"since"` // offset of the estimated onset
	Victims      int       `json:"victims"`
	Why          []string  `json:"why"`
	Chain        []string  `json:"chain,omitempty"`        // who waits for whom, down to the first culprit
	Counter      string    `json:"counter,omitempty"`      // what would have changed the verdict
	Undetermined string    `json:"undetermined,omitempty"` // what the evidence cannot tell of the culprits
}

// Culprit is diagnosis.Culprit in words.
type Culprit struct {
	Text   string `json:"text"`
	Kind   string `json:"kind"`
	Rank   int32  `json:"rank"`
	Peer   int32  `json:"peer"`
	Node   string `json:"node"`
	Reason string `json:"reason"`
}

// Difference is one thing on which the master and this program do not agree.
type Difference struct {
	What     string   `json:"what"`
	Recorded *Verdict `json:"recorded,omitempty"`
	Replayed *Verdict `json:"replayed,omitempty"`
	From     float64  `json:"from"` // offsets, of the recorded one when there is one
	To       float64  `json:"to"`   // offsets, of the recorded one when there is one
}

func verdict(v *diagnosis.Verdict, first int64) *Verdict {
	out := &Verdict{
		Key: v.Key, Class: v.Class.String(), Level: v.Level.String(), Communicator: v.CommName, Collective: v.Coll.String(),
		Seq: v.Seq, Victims: v.Victims, Why: v.Why, Undetermined: v.Undetermined, Chain: v.Chain, Counter: v.Counter,
	}
	if v.Since != 0 {
		out.Since = offset(v.Since, first)
	}
	for _, c := range v.Culprits {
		out.Culprits = append(out.Culprits, Culprit{replay.CulpritText(c), c.Kind.String(), c.Rank, c.Peer, c.Node, c.Reason})
	}
	return out
}

func offset(at, first int64) float64 { return float64((at-first)/1e6) / 1e3 }

// maxEvents bounds the timeline.
const maxEvents = 10_000

// add takes in one event of the replay.
func (r *Report) add(e *replay.Event, ev *diagnosis.Evidence, first int64, explain bool) {
	if len(r.Events) >= maxEvents {
		return
	}
	out := Event{Offset: offset(e.At, first), At: time.Unix(0, e.At), Kind: e.Kind.String(), Verdict: verdict(&e.Verdict, first)}
	switch {
	case e.Same():
		out.Recorded = "same"
	case e.Told == nil:
		out.Recorded = "nothing"
	default:
		out.Recorded = told(e.Told)
	}
	if explain && e.Kind != replay.Ended {
		out.Evidence = excerpt(&e.Verdict, ev)
	}
	r.Events = append(r.Events, out)
}

// told is a recorded verdict on one line.
func told(v *diagnosis.Verdict) string {
	s := fmt.Sprintf("%s %s", v.Level, v.Class)
	for i, c := range v.Culprits {
		if i == 2 {
			return fmt.Sprintf("%s and %d more", s, len(v.Culprits)-2)
		}
		s += fmt.Sprintf(", %s (%s)", replay.CulpritText(c), c.Reason)
	}
	return s
}

// finish takes in the result.
func (r *Report) finish(res *replay.Result, first int64, overrides map[string]string) {
	h := &res.Header
	r.Job, r.Program, r.UnknownSettings, r.Overrides = h.Job, h.Program, h.Unknown, overrides
	r.First, r.Last = time.Unix(0, res.First), time.Unix(0, res.Last)
	r.Passes, r.Missing, r.Runs, r.Damage = res.Passes, res.Missing, res.Runs, res.Damage
	r.LongestGap, r.HistoryMissing = res.Longest.Seconds(), res.History.Seconds()
	switch {
	case !res.Same():
		r.Result = "differs"
	case res.Identical:
		r.Result = "identical"
	default:
		r.Result = "same"
	}
	for _, d := range res.Differences {
		out := Difference{What: d.What}
		for _, e := range []*replay.Episode{d.Replayed, d.Recorded} {
			if e != nil {
				out.From, out.To = offset(e.From, first), offset(e.To, first)
			}
		}
		if d.Recorded != nil {
			out.Recorded = verdict(&d.Recorded.Verdict, first)
			out.Recorded.Level = d.Recorded.Level.String()
		}
		if d.Replayed != nil {
			out.Replayed = verdict(&d.Replayed.Verdict, first)
			out.Replayed.Level = d.Replayed.Level.String()
		}
		r.Differences = append(r.Differences, out)
	}
	var all []Event
	for _, m := range res.Marks {
		mark := Event{Offset: offset(m.At, first), At: time.Unix(0, m.At), Kind: "incident " + m.Kind.String(), Incident: m.Incident}
		for len(r.Events) > 0 && !r.Events[0].At.After(mark.At) {
			all, r.Events = append(all, r.Events[0]), r.Events[1:]
		}
		all = append(all, mark)
	}
	r.Events = append(all, r.Events...)
}
