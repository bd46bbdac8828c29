package pathplan

import (
	"cmp"
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
}

// Suspect is a link that is bad. Where several links explain the same losses, they are all
// in Links, in order of name: it is one of them, and the probes cannot tell which.
type Suspect struct {
	Links []Link
	Loss  float64 // most likely share of packets lost, 1: dead
	Sent  int     // probes over Links[0]
	Lost  int
}

// InferOptions say what counts as bad. Zero values are the defaults.
type InferOptions struct {
	Floor float64 // loss that is taken for noise; 0.0005
	Odds  float64 // how much likelier the losses must be with the link bad than well, as a natural logarithm; 12
}

// maxSuspects bounds how many links one Infer names: a fabric with more has another kind of
// trouble than bad links.
const maxSuspects = 64

// Infer returns the smallest set of bad links that explains which probes were lost and
// which were not, worst first. A link that loses every packet and one that loses 1 % are
// found alike: each link has a share that it loses, a path loses what its links do, and a
// link is bad when what was seen is e^Odds times likelier so than without it. The order of
// probes does not matter.
func Infer(probes []Probe, o InferOptions) []Suspect {
	if !(o.Floor > 0) || o.Floor >= 0.5 {
		o.Floor = 0.0005
	}
	if !(o.Odds > 0) {
		o.Odds = 12
	}
	f := newInference(probes, o)
	for len(f.bad) < maxSuspects {
		if !f.add() {
			break
		}
		f.refine()
	}
	return f.suspects()
}

// probed is a path's probes, all that crossed the same links together.
type probed struct {
	over     []int
	ok, lost float64
	survive  float64 // how likely a probe survives the path's bad links, and noise
}

type inference struct {
	InferOptions
	links []Link
	paths []probed
	on    [][]int   // a link's paths
	loss  []float64 // of each link, 0 for those not in bad
	spent []bool    // links that were bad and then needless: not tried again, so that there is an end
	bad   []int
}

func newInference(probes []Probe, o InferOptions) *inference {
	f := &inference{InferOptions: o}
	for i := range probes {
		f.links = append(f.links, probes[i].Over...)
	}
	slices.SortFunc(f.links, compareLinks)
	f.links = slices.Compact(f.links)
	merged := map[string]int{}
	for i := range probes {
		pr := &probes[i]
		lost := min(max(pr.Lost, 0), pr.Sent)
		if pr.Sent <= 0 || len(pr.Over) == 0 {
			continue
		}
		over := make([]int, 0, len(pr.Over))
		for _, l := range pr.Over {
			id, _ := slices.BinarySearchFunc(f.links, l, compareLinks)
			over = append(over, id)
		}
		slices.Sort(over)
		over = slices.Compact(over)
		key := make([]byte, 0, 4*len(over))
		for _, id := range over {
			key = append(key, byte(id), byte(id>>8), byte(id>>16), byte(id>>24))
		}
		k, ok := merged[string(key)]
		if !ok {
			k = len(f.paths)
			merged[string(key)] = k
			f.paths = append(f.paths, probed{over: over, survive: 1 - o.Floor})
		}
		f.paths[k].ok += float64(pr.Sent - lost)
		f.paths[k].lost += float64(lost)
	}
	slices.SortFunc(f.paths, func(a, b probed) int { return slices.Compare(a.over, b.over) })
	f.on = make([][]int, len(f.links))
	f.loss, f.spent = make([]float64, len(f.links)), make([]bool, len(f.links))
	for i := range f.paths {
		for _, l := range f.paths[i].over {
			f.on[l] = append(f.on[l], i)
		}
	}
	return f
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

// seen is the logarithm of how likely it is to see what a path has seen.
func (p *probed) seen(survive float64) float64 {
	v := 0.0
	if p.ok > 0 {
		v += p.ok * math.Log(max(survive, 1e-12))
	}
	if p.lost > 0 {
		v += p.lost * math.Log(max(1-survive, 1e-12))
	}
	return v
}

// fit finds what link l most likely loses, the others being what they are, and how much
// likelier that makes what was seen than if it lost nothing. The likelihood is concave in
// the loss: its slope has one zero.
func (f *inference) fit(l int) (loss, gain float64) {
	ok := 0.0
	var survive, lost []float64
	for _, i := range f.on[l] {
		p := &f.paths[i]
		ok += p.ok
		if p.lost > 0 {
			survive, lost = append(survive, f.without(p, l)), append(lost, p.lost)
		}
	}
	slope := func(x float64) float64 {
		v := -ok / (1 - x)
		for i, s := range survive {
			v += lost[i] * s / max(1-s*(1-x), 1e-12)
		}
		return v
	}
	switch {
	case len(lost) == 0 || slope(0) <= 0:
		return 0, 0
	case ok == 0:
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
	for _, i := range f.on[l] {
		p := &f.paths[i]
		s := f.without(p, l)
		gain += p.seen(s*(1-loss)) - p.seen(s)
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

func (f *inference) likelihood() (v float64) {
	for i := range f.paths {
		v += f.paths[i].seen(f.paths[i].survive)
	}
	return v
}

// alike is how much worse another link may explain what was seen and still not be told
// apart.
const alike = 3

// suspects names bad links, each with those that would explain as much in its place.
func (f *inference) suspects() []Suspect {
	var out []Suspect
	for _, l := range f.bad {
		s := Suspect{Links: []Link{f.links[l]}, Loss: f.loss[l]}
		for _, i := range f.on[l] {
			s.Sent += int(f.paths[i].ok + f.paths[i].lost)
			s.Lost += int(f.paths[i].lost)
		}
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
		slices.SortFunc(s.Links, compareLinks)
		out = append(out, s)
	}
	slices.SortFunc(out, func(a, b Suspect) int {
		return cmp.Or(cmp.Compare(b.Loss, a.Loss), compareLinks(a.Links[0], b.Links[0]))
	})
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
