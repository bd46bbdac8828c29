package pathplan

import (
	"math"
	"slices"
)

// Probe is what became of the probes over one path, or of one lane's packets.
type Probe struct {
	// Over are the links that a packet, and its answer where one is needed, had to cross:
	// hosts' access links too, where a prober wants those blamed rather than a leaf's.
	Over []Link
	Sent int
	Lost int
	// Hosts are those whose word this is: who sent, and who counted what came. "" is nobody
	// whose word could be doubted.
	Hosts [2]string
}

// Suspect is a link that is bad, or, while the probes do not prove that, may be.
type Suspect struct {
	// Links are the link, and, where it is not proven bad, those that would explain as much
	// in its place, in order of name.
	Links []Link
	Loss  float64 // most likely share of packets lost, 1: dead
	Sent  int     // probes over Links[0]
	Lost  int
	// Proven: whatever other links lose, what was seen is e^Proof times less likely with
	// this one well; and e^Word times by what any one host leaves unsaid, see Probe.Hosts.
	Proven bool
}

// InferOptions say what counts as bad. Zero values are the defaults.
type InferOptions struct {
	Floor float64 // loss that is taken for noise; 0.0005
	Odds  float64 // how much likelier the losses must be with a suspect bad than well, as a natural logarithm; 12
	Proof float64 // the same, of what is proven; 12
	Word  float64 // the same, with any one host's word left out; 0: nobody's word is doubted
}

// maxSuspects bounds how many links one Infer names: a fabric with more has another kind of
// trouble than bad links.
const maxSuspects = 64

// Infer returns the smallest set of bad links that explains which probes were lost and
// which were not, worst first. A link that loses every packet and one that loses 1 % are
// found alike: each link has a share that it loses, a path loses what its links do, and a
// link is suspect when what was seen is e^Odds times likelier so than without it. The order
// of probes does not matter. Whether a suspect is to be blamed is another question, which
// Proven answers: the smallest set need not be the true one.
func Infer(probes []Probe, o InferOptions) []Suspect {
	f := explain(probes, o, maxSuspects)
	if f == nil {
		return nil
	}
	return f.prove(probes, f.suspects())
}

// explain finds the smallest set of bad links, most of them at most; nil where nothing was lost.
func explain(probes []Probe, o InferOptions, most int) *inference {
	if !(o.Floor > 0) || o.Floor >= 0.5 {
		o.Floor = 0.0005
	}
	if !(o.Odds > 0) {
		o.Odds = 12
	}
	if !(o.Proof > 0) {
		o.Proof = 12
	}
	if !slices.ContainsFunc(probes, func(p Probe) bool { return p.Lost > 0 && p.Sent > 0 }) {
		return nil
	}
	f := newInference(probes, o)
	for len(f.bad) < most {
		if !f.add() {
			break
		}
		f.refine()
	}
	return f
}

// probed are the probes that crossed the same links, where some were lost. What was not
// lost is a number a link: it says no more.
type probed struct {
	over    []int
	lost    float64
	survive float64 // how likely a probe survives the path's bad links, and noise
}

type inference struct {
	InferOptions
	links []Link
	paths []probed
	on    [][]int   // a link's paths
	sent  []float64 // over each link
	ok    []float64 // of these, not lost
	loss  []float64 // of each link, 0 for those not in bad
	spent []bool    // links that were bad and then needless: not tried again, so that there is an end
	bad   []int

	survive []float64 // memory of fit
}

func newInference(probes []Probe, o InferOptions) *inference {
	f := &inference{InferOptions: o}
	ids := map[Link]int{}
	for i := range probes {
		for _, l := range probes[i].Over {
			if _, ok := ids[l]; !ok {
				ids[l] = 0
				f.links = append(f.links, l)
			}
		}
	}
	slices.SortFunc(f.links, compareLinks)
	for i, l := range f.links {
		ids[l] = i
	}
	n := len(f.links)
	f.on, f.sent, f.ok, f.loss, f.spent = make([][]int, n), make([]float64, n), make([]float64, n), make([]float64, n), make([]bool, n)
	for i := range probes {
		f.count(&probes[i], ids)
	}
	f.merge()
	for i := range f.paths {
		for _, l := range f.paths[i].over {
			f.on[l] = append(f.on[l], i)
		}
	}
	return f
}

// count takes in what became of some probes.
func (f *inference) count(pr *Probe, ids map[Link]int) {
	if pr.Sent <= 0 {
		return
	}
	over := make([]int, 0, len(pr.Over))
	for _, l := range pr.Over {
		over = append(over, ids[l])
	}
	slices.Sort(over)
	over = slices.Compact(over)
	lost := min(max(pr.Lost, 0), pr.Sent)
	for _, l := range over {
		f.sent[l] += float64(pr.Sent)
		f.ok[l] += float64(pr.Sent - lost)
	}
	if lost > 0 {
		f.paths = append(f.paths, probed{over: over, lost: float64(lost), survive: 1 - f.Floor})
	}
}

// merge makes one of paths that crossed the same links.
func (f *inference) merge() {
	slices.SortFunc(f.paths, func(a, b probed) int { return slices.Compare(a.over, b.over) })
	out := f.paths[:0]
	for _, p := range f.paths {
		if n := len(out); n > 0 && slices.Equal(out[n-1].over, p.over) {
			out[n-1].lost += p.lost
		} else {
			out = append(out, p)
		}
	}
	f.paths = out
}

// without is how likely a probe survives a path if link l lost nothing.
func (f *inference) without(path *probed, l int) float64 {
	if f.loss[l] == 0 {
		return path.survive
	}
	q := 1 - f.Floor
	for _, k := range path.over {
		if k != l {
			q *= 1 - f.loss[k]
		}
	}
	return q
}

// set changes what a link loses.
func (f *inference) set(l int, loss float64) {
	for _, i := range f.on[l] {
		f.paths[i].survive = f.without(&f.paths[i], l) * (1 - loss)
	}
	f.loss[l] = loss
}

// likely is the logarithm of how likely it is that something happens n times.
func likely(n, chance float64) float64 {
	if n == 0 {
		return 0
	}
	return n * math.Log(max(chance, 1e-12))
}

// fit finds what link l most likely loses, the others being what they are, and how much
// likelier that makes what was seen than if it lost nothing. The likelihood is concave in
// the loss: its slope has one zero.
func (f *inference) fit(l int) (loss, gain float64) {
	survive := f.survive[:0]
	for _, i := range f.on[l] {
		survive = append(survive, f.without(&f.paths[i], l))
	}
	f.survive = survive
	slope := func(x float64) float64 {
		v := -f.ok[l] / (1 - x)
		for k, i := range f.on[l] {
			s := survive[k]
			v += f.paths[i].lost * s / max(1-s*(1-x), 1e-12)
		}
		return v
	}
	switch {
	case len(survive) == 0 || slope(0) <= 0:
		return 0, 0
	case f.ok[l] == 0:
		loss = 1
	default:
		low, high := 0.0, 1.0
		for range 30 {
			if mid := (low + high) / 2; slope(mid) > 0 {
				low = mid
			} else {
				high = mid
			}
		}
		loss = low
	}
	gain = likely(f.ok[l], 1-loss)
	for k, i := range f.on[l] {
		s := survive[k]
		gain += likely(f.paths[i].lost, 1-s*(1-loss)) - likely(f.paths[i].lost, 1-s)
	}
	return loss, gain
}

// add takes the link that explains most of what is not explained, if it explains enough.
func (f *inference) add() bool {
	best, most, loss := -1, f.Odds, 0.0
	for l := range f.links {
		if f.loss[l] > 0 || f.spent[l] {
			continue
		}
		if x, gain := f.fit(l); gain > most+1e-9 && x > f.Floor {
			best, most, loss = l, gain, x
		}
	}
	if best < 0 {
		return false
	}
	f.bad = append(f.bad, best)
	f.set(best, loss)
	return true
}

// refine fits all bad links to each other, and drops those that the others make needless.
func (f *inference) refine() {
	for {
		f.settle()
		least, weakest := f.Odds, -1
		for i, l := range f.bad {
			if cost := f.needed(l); cost < least {
				least, weakest = cost, i
			}
		}
		if weakest < 0 {
			return
		}
		f.set(f.bad[weakest], 0)
		f.spent[f.bad[weakest]] = true
		f.bad = slices.Delete(f.bad, weakest, weakest+1)
	}
}

// settle fits each bad link in turn until they no longer change.
func (f *inference) settle() {
	for range 20 {
		change := 0.0
		for _, l := range f.bad {
			x, _ := f.fit(l)
			x = max(x, 1e-9) // stays one of them
			change = max(change, math.Abs(x-f.loss[l]))
			f.set(l, x)
		}
		if change < 1e-4 {
			return
		}
	}
}

// needed is how much less likely what was seen would be were a bad link well, and the other
// bad ones fitted to that.
func (f *inference) needed(l int) float64 {
	was, bad := slices.Clone(f.loss), f.bad
	with := f.likelihood()
	f.set(l, 0)
	f.bad = slices.DeleteFunc(slices.Clone(bad), func(k int) bool { return k == l })
	f.settle()
	cost := with - f.likelihood()
	f.bad = bad
	for _, k := range bad {
		f.set(k, was[k])
	}
	return cost
}

// likelihood is that of all that was seen, up to a constant.
func (f *inference) likelihood() (v float64) {
	for _, l := range f.bad {
		v += likely(f.ok[l], 1-f.loss[l])
	}
	for i := range f.paths {
		v += likely(f.paths[i].lost, 1-f.paths[i].survive)
	}
	return v
}

// alike is how much worse another link may explain what was seen and still not be told
// apart.
const alike = 3

// suspects names bad links, each before those that would explain as much in its place.
func (f *inference) suspects() []Suspect {
	var out []Suspect
	for _, l := range f.bad {
		s := Suspect{Links: []Link{f.links[l]}, Loss: f.loss[l], Sent: int(f.sent[l]), Lost: int(f.sent[l] - f.ok[l])}
		x := f.loss[l]
		with := f.likelihood()
		f.set(l, 0)
		without := f.likelihood()
		for _, k := range f.neighbours(l) {
			if loss, gain := f.fit(k); loss > f.Floor && without+gain > with-alike {
				s.Links = append(s.Links, f.links[k])
			}
		}
		f.set(l, x)
		out = append(out, s)
	}
	return out
}

// neighbours are the links that are not bad and share a path with one that is.
func (f *inference) neighbours(l int) []int {
	var out []int
	for _, i := range f.on[l] {
		for _, k := range f.paths[i].over {
			if k != l && f.loss[k] == 0 {
				out = append(out, k)
			}
		}
	}
	slices.Sort(out)
	return slices.Compact(out)
}
