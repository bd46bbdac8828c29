package probe

import (
	"cmp"
	"net/netip"
	"slices"

	"github.com/lockstep-ccl/lockstep/pathplan"
)

// Names tells which link a switch's interface ends, by its address: the link that a packet
// came over when the switch answers with the address of the interface it came in by. Where
// a switch answers with one address for all, From is "": then the hop before it is whence.
type Names map[netip.Addr]pathplan.Link

// Path is the path that a trace's hops tell of: FirstHop 2 and LastHop 3, or 1 to 3. ok is
// false when one is missing, or has no name.
func (n Names) Path(hops Hops) (p pathplan.Path, ok bool) {
	from := ""
	if len(hops) == 3 {
		from, hops = n[hops[0]].To, hops[1:]
	}
	if len(hops) != 2 {
		return p, false
	}
	up, ok1 := n[hops[0]]
	down, ok2 := n[hops[1]]
	if up.From == "" {
		up.From = from
	}
	if down.From == "" {
		down.From = up.To
	}
	ok = ok1 && ok2 && up.From != "" && down.From == up.To
	return pathplan.Path{Up: up, Down: down}, ok
}

// Sort puts source ports where their hops lead. unknown is how many hops' path has no name.
func (n Names) Sort(ports []uint16, hops []Hops) (paths []pathplan.PathPorts, unknown int) {
	at := map[pathplan.Path]int{}
	for i, h := range hops {
		p, ok := n.Path(h)
		if !ok {
			unknown++
			continue
		}
		k, known := at[p]
		if !known {
			k = len(paths)
			at[p] = k
			paths = append(paths, pathplan.PathPorts{Path: p})
		}
		paths[k].Ports = append(paths[k].Ports, ports[i])
	}
	slices.SortFunc(paths, func(a, b pathplan.PathPorts) int { return cmp.Compare(a.Path.String(), b.Path.String()) })
	return paths, unknown
}
