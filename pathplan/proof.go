package pathplan

import (
	"cmp"
	"slices"
)

// Proof that a link is bad: with what a link lets through written as e^-x, the likelihood of
// what was seen is concave in the x of all links together. So there is one best explanation,
// and one best among those in which a certain link is well, and going uphill link by link
// finds them. How far apart they are is what speaks against the link, whatever else is bad.

// prove marks the suspects that are bad for sure, and adds links that are, and were not
// needed for the smallest explanation.
func (f *inference) prove(probes []Probe, out []Suspect) []Suspect {
	g := f
	g.anew()
	proven := map[Link]bool{}
	without := map[string]*inference{}
	for _, l := range g.candidates() {
		if g.against(l) < f.Proof || f.Word > 0 && !g.agreed(l, probes, without) {
			continue
		}
		link := g.links[l]
		proven[link] = true
		if i := slices.IndexFunc(out, func(s Suspect) bool { return s.Links[0] == link }); i >= 0 {
			out[i].Proven = true
			continue
		}
		if len(proven) < maxSuspects {
			out = append(out, Suspect{Links: []Link{link}, Loss: g.loss[l], Sent: int(g.sent[l]), Lost: int(g.sent[l] - g.ok[l]), Proven: true})
		}
	}
	for i := range out {
		s := &out[i]
		if s.Proven {
			s.Links = s.Links[:1]
		} else {
			slices.SortFunc(s.Links, compareLinks)
		}
	}
	slices.SortFunc(out, func(a, b Suspect) int {
		return cmp.Or(cmp.Compare(b.Loss, a.Loss), compareLinks(a.Links[0], b.Links[0]))
	})
	return out
}

// anew forgets what was fitted.
func (f *inference) anew() {
	clear(f.loss)
	f.bad = nil
	for i := range f.paths {
		f.paths[i].survive = 1 - f.Floor
	}
}

// candidates are the links that may be proven bad: setting one well costs that much before
// others are fitted to it, and no more after. It leaves all fitted.
func (f *inference) candidates() (out []int) {
	f.climb(-1)
	with := f.likelihood()
	for _, l := range f.bad {
		x := f.loss[l]
		if x <= f.Floor {
			continue
		}
		f.set(l, 0)
		if with-f.likelihood() >= f.Proof {
			out = append(out, l)
		}
		f.set(l, x)
	}
	return out
}

// climb fits all links that losses can be blamed on, but one, which is well.
func (f *inference) climb(well int) {
	f.bad = f.bad[:0]
	for l := range f.links {
		if len(f.on[l]) > 0 && l != well {
			f.bad = append(f.bad, l)
		}
	}
	if well >= 0 {
		f.set(well, 0)
	}
	const enough, most = 0.02, 200
	for last, i := f.likelihood(), 0; i < most; i++ {
		for _, l := range f.bad {
			if x, _ := f.fit(l); x != f.loss[l] {
				f.set(l, x)
			}
		}
		now := f.likelihood()
		if now-last < enough {
			return
		}
		last = now
	}
}

// against is how much likelier the best explanation is than the best in which link l is
// well. All are fitted before and after.
func (f *inference) against(l int) float64 {
	was := slices.Clone(f.loss)
	with := f.likelihood()
	f.climb(l)
	v := with - f.likelihood()
	for k, x := range was {
		if f.loss[k] != x {
			f.set(k, x)
		}
	}
	f.climb(-1)
	return v
}

// maxDoubted is how many hosts' words are left out in turn: of those that tell of most losses.
const maxDoubted = 4

// agreed reports whether a link is bad by others' word, whoever is left out.
func (f *inference) agreed(l int, probes []Probe, without map[string]*inference) bool {
	link := f.links[l]
	told := map[string]int{}
	for i := range probes {
		if p := &probes[i]; p.Lost > 0 && slices.Contains(p.Over, link) {
			for _, h := range p.Hosts {
				if h != "" {
					told[h] += p.Lost
				}
			}
		}
	}
	hosts := make([]string, 0, len(told))
	for h := range told {
		hosts = append(hosts, h)
	}
	slices.SortFunc(hosts, func(a, b string) int { return cmp.Or(cmp.Compare(told[b], told[a]), cmp.Compare(a, b)) })
	for _, h := range hosts[:min(len(hosts), maxDoubted)] {
		g := without[h]
		if g == nil {
			var rest []Probe
			for _, p := range probes {
				if !slices.Contains(p.Hosts[:], h) {
					rest = append(rest, p)
				}
			}
			g = newInference(rest, f.InferOptions)
			g.climb(-1)
			without[h] = g
		}
		i, known := slices.BinarySearchFunc(g.links, link, compareLinks)
		if !known || g.loss[i] <= g.Floor || g.against(i) < f.Word {
			return false
		}
	}
	return true
}
