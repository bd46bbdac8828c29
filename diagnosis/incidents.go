package diagnosis

import (
	"cmp"
	"fmt"
	"slices"
)

const (
	// MaxVerdicts bounds what one pass returns.
	MaxVerdicts = 5
	maxCulprits = 8
	maxWhy      = 8
)

// finding is what one pass says; an incident is a finding over time. The level
// of a finding says what its evidence is good for, that of an incident what has
// also stood for long enough.
type finding struct {
	Verdict
	hang bool
	// deadLink: what else stopped did so for want of a link.
	deadLink bool
	soft     bool  // a pause that may end by itself
	passing  bool  // it is over when it is not found any more: no operation need end
	ordered  bool  // its culprits' order says something, whatever was told before
	still    int64 // how long nothing has moved, ns
}

type incident struct {
	finding
	last  int64 // last pass that found it
	said  int64 // last pass whose words it has
	ready int64 // found good for Confirmed since, 0 when not
}

// tracker makes incidents of findings: an incident is a finding over time.
type tracker struct {
	*view
	incidents []incident
	past      []endedHang // a while ago at most
	links     []incident  // suspicions of links that ended moments ago
}

func (t *tracker) forget() {
	t.incidents, t.past, t.links = t.incidents[:0], t.past[:0], t.links[:0]
}

// linkMemory is for how long a link that was suspected explains that ranks give up and end.
const linkMemory = 5e9

// linkBefore returns what was found of a link, at a rank's end or moments before.
func (t *tracker) linkBefore(at int64) (finding, bool) {
	for _, list := range [...][]incident{t.incidents, t.links} {
		for i := range list {
			if x := &list[i]; x.ofLink() && x.Since < at && x.last >= at-linkMemory {
				f := x.finding
				f.Culprits, f.Why = slices.Clone(f.Culprits), slices.Clone(f.Why)
				return f, true
			}
		}
	}
	return finding{}, false
}

// ofLink reports whether a hang is blamed on what connects ranks.
func (f *finding) ofLink() bool {
	return f.Class == CommunicationHang && f.Culprits[0].Kind >= CulpritConnection && f.Culprits[0].Kind <= CulpritDest
}

func (f *finding) setComm(c *Comm) { f.Comm, f.CommName = c.ID, c.Name }

func (f *finding) blame(k Culprit) {
	if len(f.Culprits) < maxCulprits && !slices.Contains(f.Culprits, k) {
		f.Culprits = append(f.Culprits, k)
	}
}

func (f *finding) why(format string, args ...any) {
	if len(f.Why) < maxWhy {
		f.Why = append(f.Why, fmt.Sprintf(format, args...))
	}
}

// track merges the findings of a pass into the open incidents and returns them
// as verdicts.
func (t *tracker) track(found []finding) []Verdict {
	now := t.now
	slices.SortStableFunc(found, func(a, b finding) int {
		return cmp.Or(boolCompare(b.hang, a.hang), cmp.Compare(b.Level, a.Level), cmp.Compare(b.Victims, a.Victims))
	})
	for i := range found {
		f := &found[i]
		t.explain(f)
		at := slices.IndexFunc(t.incidents, func(x incident) bool {
			return sameFault(&x.finding, f) && (f.hang || !x.hang || t.stands(&x)) // slowness does not go on with a hang that is over
		})
		if at < 0 {
			f.Key = t.newKey(f)
			t.incidents = append(t.incidents, incident{finding: *f})
			at = len(t.incidents) - 1
			t.incidents[at].Level = Suspected
		} else if x := &t.incidents[at]; x.last == now || x.hang && !f.hang && t.stands(x) {
			continue // another finding, of this pass or of one before, is the better word on it
		}
		t.incidents[at].update(f, now, int64(t.cfg.Settle))
	}
	t.links = slices.DeleteFunc(t.links, func(x incident) bool { return now-x.last > linkMemory })
	t.incidents = slices.DeleteFunc(t.incidents, func(x incident) bool {
		over := x.last != now && !t.stands(&x)
		if over && x.hang {
			t.past = append(t.past, endedHang{x.Key, now})
			if x.ofLink() {
				t.links = append(t.links, x)
			}
			if x.soft {
				t.pauses.learn(x.Culprits[0].Reason, x.still)
			}
		}
		return over
	})
	return t.standing()
}

// update takes over a pass's finding when it is as sure as what is known. The
// class only sharpens: a slow incident becomes a hang, and a hang does not turn
// back while it stands. A confirmed incident stays so until it ends.
func (x *incident) update(f *finding, now, settle int64) {
	if f.Level < x.Level || x.deadLink && !f.deadLink && f.ofLink() && now-x.said <= linkMemory {
		x.last, x.still = now, max(x.still, f.still) // it goes on, but the former words were surer
		return
	}
	level := x.Level
	switch {
	case f.Level < Confirmed:
		x.ready = 0
	case x.ready == 0:
		x.ready = now
	}
	f.keepOrder(x.Culprits)
	since := f.Since
	if f.Class == x.Class {
		since = min(since, x.Since)
	}
	k, ready := x.Key, x.ready
	*x = incident{finding: *f, last: now, said: now, ready: ready}
	x.Key, x.Since, x.Level = k, since, level
	if ready != 0 && now-ready >= settle {
		x.Level = Confirmed
	}
}

// keepOrder puts those culprits first that were told before, in the order in which they
// were, unless fewer are left or their order says something: then more is known.
func (f *finding) keepOrder(before []Culprit) {
	if f.ordered || len(f.Culprits) < len(before) {
		return
	}
	rank := func(k Culprit) int {
		i := slices.IndexFunc(before, func(b Culprit) bool {
			return b.Kind == k.Kind && b.Rank == k.Rank && b.Peer == k.Peer && b.Node == k.Node
		})
		if i < 0 {
			return len(before)
		}
		return i
	}
	slices.SortStableFunc(f.Culprits, func(a, b Culprit) int { return cmp.Compare(rank(a), rank(b)) })
}

// stands reports whether an incident that this pass did not find goes on: for
// a moment always, and a confirmed hang until the job moves again, because
// survivors that abort and exit take the evidence with them.
func (t *tracker) stands(x *incident) bool {
	if t.now-x.last <= int64(t.cfg.HoldOff) {
		return true
	}
	return x.hang && x.Level == Confirmed && !x.passing && t.lastFinish < x.last
}

// consequence reports whether a confirmed hang explains what happened at a
// later time, and keeps it open if so.
func (t *tracker) consequence(at int64) bool {
	for i := range t.incidents {
		if x := &t.incidents[i]; x.hang && x.Level == Confirmed && x.Since < at {
			x.last = t.now
			return true
		}
	}
	return false
}

// wake reports whether a finding looks like what another, confirmed hang leaves
// behind: who has given up for it is idle, and others still wait for them.
func (t *tracker) wake(f *finding, since int64) bool {
	return slices.ContainsFunc(t.incidents, func(x incident) bool {
		return x.hang && x.Level == Confirmed && x.Since <= since+int64(t.cfg.SuspectAfter) && !sameFault(&x.finding, f) && t.stands(&x)
	})
}

// standing returns the open incidents as verdicts, worst first. While something
// hangs, only what was surely slow before is told beside it.
func (t *tracker) standing() []Verdict {
	if len(t.incidents) == 0 {
		return nil
	}
	slices.SortStableFunc(t.incidents, func(a, b incident) int {
		return cmp.Or(cmp.Compare(b.Level, a.Level), boolCompare(b.hang, a.hang), cmp.Compare(b.Victims, a.Victims), cmp.Compare(a.Key, b.Key))
	})
	hang := slices.ContainsFunc(t.incidents, func(x incident) bool { return x.hang })
	var verdicts []Verdict
	for i := range t.incidents {
		x := &t.incidents[i]
		if t.ev.Paused {
			x.last = t.now
		}
		if len(verdicts) == MaxVerdicts || (hang && !x.hang && x.Level < Confirmed) {
			continue
		}
		v := x.Verdict
		v.Culprits, v.Why, v.Chain = slices.Clone(v.Culprits), slices.Clone(v.Why), slices.Clone(v.Chain)
		verdicts = append(verdicts, v)
	}
	return verdicts
}

// sameFault reports whether two findings blame the same thing. Between slow
// findings a rank and a connection stay apart: a late rank and a slow link are
// different faults. A hang at either is the sharper word on both.
func sameFault(a, b *finding) bool {
	for i := range a.Culprits {
		for j := range b.Culprits {
			if touches(&a.Culprits[i], &b.Culprits[j], a.hang || b.hang) {
				return true
			}
		}
	}
	return false
}

func touches(a, b *Culprit, across bool) bool {
	if a.Kind == CulpritNode || b.Kind == CulpritNode {
		transport := func(k *Culprit) bool { return k.Reason == reasonNetwork }
		return a.Node == b.Node && a.Node != "" && (across || transport(a) == transport(b))
	}
	if a.Kind > b.Kind {
		a, b = b, a
	}
	switch {
	case a.Kind == CulpritConnection && b.Kind == CulpritConnection && (a.Reason == reasonLinkDown || b.Reason == reasonLinkDown) && a.Rank == b.Peer && a.Peer == b.Rank:
		return true // a path between two ranks breaks both ways
	case a.Kind == b.Kind:
		return a.Rank == b.Rank && a.Peer == b.Peer
	case a.Kind == CulpritRank:
		return across && (a.Rank == b.Rank || a.Rank == b.Peer)
	case a.Kind == CulpritConnection && b.Kind == CulpritSource:
		return a.Rank == b.Rank
	case a.Kind == CulpritConnection && b.Kind == CulpritDest:
		return a.Peer == b.Rank
	}
	return false
}

// endedHang is the key of a hang that is over, and since when. Slowness of the same
// culprit is another incident, and is not confirmed because the hang was: for as long
// as a caller may take it for the same one it goes by another key.
type endedHang struct {
	key string
	at  int64
}

const keptFor = 60e9

// newKey is a finding's key that no open incident has, nor a hang that ended just now.
func (t *tracker) newKey(f *finding) string {
	t.past = slices.DeleteFunc(t.past, func(x endedHang) bool { return t.now-x.at > keptFor })
	taken := func(name string) bool {
		return slices.ContainsFunc(t.incidents, func(x incident) bool { return x.Key == name }) ||
			!f.hang && slices.ContainsFunc(t.past, func(x endedHang) bool { return x.key == name })
	}
	first := key(f.Culprits[0])
	name := first
	for n := 2; taken(name); n++ {
		name = fmt.Sprintf("%s/%d", first, n)
	}
	return name
}

func key(k Culprit) string {
	switch k.Kind {
	case CulpritConnection:
		return fmt.Sprintf("%s/%d>%d", k.Kind, k.Rank, k.Peer)
	case CulpritNode:
		return fmt.Sprintf("%s/%s", k.Kind, k.Node)
	}
	return fmt.Sprintf("%s/%d", k.Kind, k.Rank)
}

func boolCompare(a, b bool) int {
	switch {
	case a == b:
		return 0
	case b:
		return -1
	}
	return 1
}
