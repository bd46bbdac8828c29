package replay

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"time"

	"github.com/lockstep-ccl/lockstep/diagnosis"
)

// PlayOptions say how a recording is judged again.
type PlayOptions struct {
	// Config, when not nil, changes the configuration that the recording engine had.
	Config func(*diagnosis.Config)
	// From and To (unix ns, 0: all) bound what is told and compared. The engine is
	// given all that comes before To.
	From, To int64
	// On, when not nil, is called with each event as it happens; the evidence is valid until it returns.
	On func(*Event, *diagnosis.Evidence)
	// Slack is how far apart two verdicts may begin and be the same (1 s), beyond
	// the longest gap between two recorded passes.
	Slack time.Duration
}

// EventKind is what happened to a verdict.
type EventKind uint8

const (
	Opened EventKind = iota + 1
	Changed
	Ended
)

func (k EventKind) String() string {
	switch k {
	case Opened:
		return "opened"
	case Changed:
		return "changed"
	case Ended:
		return "ended"
	}
	return "unknown"
}

// Event is a change in what the replaying engine says.
type Event struct {
	Kind    EventKind
	At      int64 // unix ns
	Verdict diagnosis.Verdict
	Was     *diagnosis.Verdict // before a change
	// Told is what the recording engine said of it at this pass, nil when nothing.
	Told *diagnosis.Verdict
}

// Same reports whether the recording engine said the same at this pass.
func (e *Event) Same() bool {
	if e.Kind == Ended {
		return e.Told == nil
	}
	return e.Told != nil && sameVerdict(e.Told, &e.Verdict)
}

// Episode is one verdict from when it was first told until it was gone.
type Episode struct {
	Verdict      diagnosis.Verdict // as last told
	Level        diagnosis.Level   // the highest
	From, To     int64             // unix ns; first and last pass that told it
	Confirmed    int64             // when it first was, 0 when never
	Before       bool              // it was told at the first pass already
	Open         bool              // it was told at the last pass
	Interruption int               // how often it was gone for less than the slack
}

// Difference is one thing on which the two engines do not agree.
type Difference struct {
	Recorded, Replayed *Episode // nil: that engine never said so
	What               string
}

// Result is what a replay has found.
type Result struct {
	Header      Header // of the first segment
	Runs        int    // how often the recording engine began anew, and 1
	Passes      int
	Missing     uint64        // passes that were made and not recorded, between the first and the last one
	First, Last int64         // unix ns, Now of the passes
	Longest     time.Duration // between two recorded passes of one run
	Damage      Damage
	Marks       []Mark
	// History is how long the recording engine had learnt before the first pass
	// recorded: what the replaying one lacks.
	History time.Duration

	Recorded, Replayed []Episode
	Differences        []Difference
	Identical          bool // at every single pass
}

// Same reports whether both engines found the same faults at the same time.
func (r *Result) Same() bool { return len(r.Differences) == 0 }

// maxEpisodes bounds what a Result keeps of a recording.
const maxEpisodes = 4096

// Play judges a recording again. With an error, the result is of what was read before it.
func Play(ctx context.Context, r *Reader, o PlayOptions) (*Result, error) {
	res := &Result{Header: *r.Header(), Identical: true}
	if o.Slack == 0 {
		o.Slack = time.Second
	}
	var engine *diagnosis.Engine
	var recorded, replayed tracker
	var run, number uint64
	var err error
	for {
		if err = ctx.Err(); err != nil {
			break
		}
		var p *Pass
		if p, err = r.Next(); err != nil {
			break
		}
		now := p.Evidence.Now
		if o.To != 0 && now > o.To {
			break
		}
		if engine == nil || p.Header.Run != run {
			if res.Runs++; res.Runs == 1 {
				res.First = now
				res.History = max(0, p.Header.since(now, p.Number))
			}
			config := p.Header.Config
			if o.Config != nil {
				o.Config(&config)
			}
			engine, run = diagnosis.New(config), p.Header.Run
		} else if p.Number <= number {
			err = fmt.Errorf("pass %d follows pass %d: these are recordings of several incidents, or in a wrong order", p.Number, number)
			break
		} else {
			res.Missing += p.Number - number - 1
			res.Longest = max(res.Longest, time.Duration(now-res.Last))
		}
		number, res.Last = p.Number, now
		res.Passes++
		for _, m := range p.Marks {
			if len(res.Marks) < maxMarks && m.At >= o.From {
				res.Marks = append(res.Marks, m)
			}
		}
		said := engine.Diagnose(p.Evidence)
		if now < o.From {
			continue
		}
		res.Identical = res.Identical && sameVerdicts(p.Told, said)
		replayed.pass(now, said, func(kind EventKind, v, was *diagnosis.Verdict) {
			if o.On != nil {
				o.On(&Event{Kind: kind, At: now, Verdict: *v, Was: was, Told: findVerdict(p.Told, v.Key)}, p.Evidence)
			}
		})
		recorded.pass(now, p.Told, nil)
	}
	if errors.Is(err, io.EOF) {
		err = nil
	}
	res.Damage = r.Damage()
	slack := int64(o.Slack) + 2*int64(res.Longest)
	res.Recorded, res.Replayed = recorded.finish(slack), replayed.finish(slack)
	res.Differences = compare(res.Recorded, res.Replayed, slack)
	if recorded.overflow || replayed.overflow {
		err = errors.Join(err, fmt.Errorf("more than %d verdicts: the comparison is of the first; narrow it down in time", maxEpisodes))
	}
	if res.Passes == 0 && err == nil {
		err = errors.New("the recording holds no pass")
	}
	return res, err
}

// since returns how long the run had been going on at a pass.
func (h *Header) since(now int64, number uint64) time.Duration {
	if number <= 1 {
		return 0
	}
	return time.Duration(now - h.Started.UnixNano())
}

func findVerdict(in []diagnosis.Verdict, key string) *diagnosis.Verdict {
	if i := slices.IndexFunc(in, func(v diagnosis.Verdict) bool { return v.Key == key }); i >= 0 {
		return &in[i]
	}
	return nil
}

// tracker turns the verdicts of successive passes into episodes.
type tracker struct {
	began    bool
	open     []Episode
	closed   []Episode
	overflow bool
}

func (t *tracker) pass(now int64, said []diagnosis.Verdict, on func(kind EventKind, v, was *diagnosis.Verdict)) {
	t.open = slices.DeleteFunc(t.open, func(e Episode) bool {
		if findVerdict(said, e.Verdict.Key) != nil {
			return false
		}
		if on != nil {
			on(Ended, &e.Verdict, nil)
		}
		t.close(e)
		return true
	})
	for i := range said {
		v := &said[i]
		k := slices.IndexFunc(t.open, func(e Episode) bool { return e.Verdict.Key == v.Key })
		if k < 0 {
			k = len(t.open)
			t.open = append(t.open, Episode{From: now, Before: !t.began})
			if on != nil {
				on(Opened, v, nil)
			}
		} else if was := t.open[k].Verdict; on != nil && !sameVerdict(&was, v) {
			on(Changed, v, &was)
		}
		e := &t.open[k]
		e.Verdict, e.To, e.Level = *v, now, max(e.Level, v.Level)
		if v.Level == diagnosis.Confirmed && e.Confirmed == 0 {
			e.Confirmed = now
		}
	}
	t.began = true
}

func (t *tracker) close(e Episode) {
	if len(t.closed) >= maxEpisodes {
		t.overflow = true
		return
	}
	t.closed = append(t.closed, e)
}

// finish returns all episodes by their beginning, those of one key joined that
// are no more than slack apart.
func (t *tracker) finish(slack int64) (out []Episode) {
	for _, e := range t.open {
		e.Open = true
		t.close(e)
	}
	slices.SortStableFunc(t.closed, func(a, b Episode) int { return int(min(1, max(-1, a.From-b.From))) })
	for _, e := range t.closed {
		k := slices.IndexFunc(out, func(o Episode) bool { return o.Verdict.Key == e.Verdict.Key && e.From-o.To <= slack })
		if k < 0 {
			out = append(out, e)
			continue
		}
		o := &out[k]
		o.Verdict, o.To, o.Open, o.Level = e.Verdict, e.To, e.Open, max(o.Level, e.Level)
		o.Interruption++
		if o.Confirmed == 0 {
			o.Confirmed = e.Confirmed
		}
	}
	return out
}

// compare pairs the episodes of two engines.
func compare(recorded, replayed []Episode, slack int64) (out []Difference) {
	used := make([]bool, len(replayed))
	pair := func(a *Episode, alike func(a, b *Episode) bool) int {
		for k := range replayed {
			if b := &replayed[k]; !used[k] && a.From <= b.To+slack && b.From <= a.To+slack && alike(a, b) {
				return k
			}
		}
		return -1
	}
	for i := range recorded {
		a := &recorded[i]
		k := pair(a, func(a, b *Episode) bool { return a.Verdict.Key == b.Verdict.Key })
		if k < 0 {
			k = pair(a, func(a, b *Episode) bool {
				return a.Verdict.Class == b.Verdict.Class && sameFirst(&a.Verdict, &b.Verdict)
			})
		}
		if k < 0 {
			out = append(out, Difference{Recorded: a, What: "only the recording has it"})
			continue
		}
		used[k] = true
		if what := differ(a, &replayed[k], slack); what != "" {
			out = append(out, Difference{a, &replayed[k], what})
		}
	}
	for k := range replayed {
		if !used[k] {
			out = append(out, Difference{Replayed: &replayed[k], What: "only the replay has it"})
		}
	}
	return out
}

func sameFirst(a, b *diagnosis.Verdict) bool {
	return len(a.Culprits) > 0 && len(b.Culprits) > 0 && sameCulprit(a.Culprits[0], b.Culprits[0])
}

func sameCulprit(a, b diagnosis.Culprit) bool {
	return a.Kind == b.Kind && a.Rank == b.Rank && a.Peer == b.Peer && a.Node == b.Node
}

// differ says on what two episodes of one fault do not agree, "" when they do.
func differ(a, b *Episode, slack int64) string {
	v, w := &a.Verdict, &b.Verdict
	apart := func(x, y int64) bool { return x-y > slack || y-x > slack }
	switch {
	case v.Class != w.Class:
		return fmt.Sprintf("class was %s, is %s", v.Class, w.Class)
	case a.Level != b.Level:
		return fmt.Sprintf("level was %s, is %s", a.Level, b.Level)
	case !slices.Equal(v.Culprits, w.Culprits):
		return fmt.Sprintf("culprits were %s, are %s", culpritsText(v.Culprits), culpritsText(w.Culprits))
	case !a.Before && apart(a.From, b.From):
		return "told " + lag(b.From-a.From)
	case !a.Before && apart(a.Confirmed, b.Confirmed):
		return "confirmed " + lag(b.Confirmed-a.Confirmed)
	case apart(a.To, b.To):
		return "gone " + lag(b.To-a.To)
	}
	return ""
}

func lag(ns int64) string {
	d := time.Duration(ns).Round(10 * time.Millisecond)
	if d < 0 {
		return (-d).String() + " earlier"
	}
	return d.String() + " later"
}

func culpritsText(cs []diagnosis.Culprit) (s string) {
	for i, c := range cs {
		if i > 0 {
			s += ", "
		}
		s += CulpritText(c) + " (" + c.Reason + ")"
	}
	return s
}

// CulpritText returns a culprit as a person would say it.
func CulpritText(c diagnosis.Culprit) string {
	switch c.Kind {
	case diagnosis.CulpritRank:
		return fmt.Sprintf("rank %d", c.Rank)
	case diagnosis.CulpritConnection:
		return fmt.Sprintf("rank %d → rank %d", c.Rank, c.Peer)
	case diagnosis.CulpritSource:
		return fmt.Sprintf("rank %d → all", c.Rank)
	case diagnosis.CulpritDest:
		return fmt.Sprintf("all → rank %d", c.Rank)
	case diagnosis.CulpritNode:
		return "node " + c.Node
	}
	return "unknown"
}
