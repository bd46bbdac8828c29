package pathplan

import (
	"fmt"
	"time"
)

// none is no link, no port, no path.
const none = int32(-1)

// Classes of links and of paths, best first.
const (
	well  = uint8(iota)
	lossy // to be left when there is another
	dead  // never used
)

// link is a directed link and what it carries.
type link struct {
	Link
	rate        int64
	leaf, spine int32
	up          bool
	next        int32 // the next parallel link, or none
	state       LinkState
	class       uint8
	planned     int64         // bit/s of lanes
	background  int64         // bit/s of others, smoothed
	measured    int64         // bit/s, -1: never
	derate      float64       // share of the rate that its lanes do not seem to get
	derated     time.Time     // when its lanes last said so
	blamed      time.Time     // and since when they have, again and again
	before      float64       // derate, until then
	forget      time.Duration // in which half of derate wears off
	freed       time.Time     // when all of it had
	inverse     float64       // 1 / (rate left)
	lanes       []*lane
	changed     time.Time // when lanes last came or went
	back        time.Time // when it was last well again
}

// with is the link's load, as a share of its rate, with more bit/s on it.
func (l *link) with(more int64) float64 { return float64(l.planned+l.background+more) * l.inverse }

func (l *link) load() float64 { return l.with(0) }

func (l *link) refresh() { l.inverse = 1 / (float64(l.rate) * (1 - l.derate)) }

// port is a NIC's port and the connections that start or end there.
type port struct {
	HostPort
	leaf  int32
	down  bool
	dirty bool
	conns [2][]*conn   // of the NIC, that leave, that arrive
	uses  [2][]tenancy // of the port
}

// tenancy is what a tenant's connections use of a port: weights times shares of bytes.
type tenancy struct {
	tenant string
	use    int64
}

// fabric is a compiled topology.
type fabric struct {
	leaves, spines []string
	links          []link
	ports          []port
	byLink         map[Link]int32
	byPort         map[Port]int32
	byNIC          map[NIC][2]int32
	byLeaf         map[string]int32
	up, down       []int32 // first link by leaf*len(spines)+spine
	access         map[Link]int32
}

// compile checks a topology and numbers what it names.
func compile(t *Topology) (*fabric, error) {
	if len(t.Leaves) == 0 || len(t.Leaves) > MaxLeaves || len(t.Spines) > MaxSpines ||
		len(t.Links) > MaxLinks || len(t.Ports) > MaxPorts {
		return nil, fmt.Errorf("topology of %d leaves, %d spines, %d links, %d ports: want 1 to %d, up to %d, %d, %d: %w",
			len(t.Leaves), len(t.Spines), len(t.Links), len(t.Ports), MaxLeaves, MaxSpines, MaxLinks, MaxPorts, ErrInvalid)
	}
	f := &fabric{leaves: t.Leaves, spines: t.Spines,
		byLink: make(map[Link]int32, len(t.Links)), byPort: make(map[Port]int32, len(t.Ports)),
		byNIC: map[NIC][2]int32{}, byLeaf: make(map[string]int32, len(t.Leaves)), access: map[Link]int32{}}
	bySpine := make(map[string]int32, len(t.Spines))
	for _, names := range []struct {
		what string
		list []string
		into map[string]int32
	}{{"leaf", t.Leaves, f.byLeaf}, {"spine", t.Spines, bySpine}} {
		for i, name := range names.list {
			if err := checkName(names.what, name); err != nil {
				return nil, err
			}
			_, leaf := f.byLeaf[name]
			if _, twice := names.into[name]; leaf || twice {
				return nil, fmt.Errorf("switch %q is there twice: %w", name, ErrInvalid)
			}
			names.into[name] = int32(i)
		}
	}
	if err := f.addLinks(t.Links, bySpine); err != nil {
		return nil, err
	}
	return f, f.addPorts(t.Ports)
}

func (f *fabric) addLinks(links []LinkRate, bySpine map[string]int32) error {
	f.up = make([]int32, len(f.leaves)*len(f.spines))
	f.down = make([]int32, len(f.up))
	for i := range f.up {
		f.up[i], f.down[i] = none, none
	}
	f.links = make([]link, 0, len(links))
	for _, l := range links {
		leaf, up := f.byLeaf[l.From]
		spine, ok := bySpine[l.To]
		table := f.up
		if !up {
			leaf, ok = f.byLeaf[l.To]
			var from bool
			spine, from = bySpine[l.From]
			ok, table = ok && from, f.down
		}
		if !ok {
			return fmt.Errorf("link %.300s: does not join a leaf and a spine of the topology: %w", l.Link, ErrInvalid)
		}
		if l.Rate <= 0 || l.Rate > MaxRate {
			return fmt.Errorf("link %s: %d bit/s: want 1 to %d: %w", l.Link, l.Rate, int64(MaxRate), ErrInvalid)
		}
		if _, twice := f.byLink[l.Link]; twice {
			return fmt.Errorf("link %s is there twice: %w", l.Link, ErrInvalid)
		}
		id, slot := int32(len(f.links)), &table[int(leaf)*len(f.spines)+int(spine)]
		f.byLink[l.Link] = id
		f.links = append(f.links, link{Link: l.Link, rate: l.Rate, leaf: leaf, spine: spine, up: up, next: *slot, measured: -1})
		f.links[id].refresh()
		*slot = id
	}
	return nil
}

func (f *fabric) addPorts(ports []HostPort) error {
	f.ports = make([]port, 0, len(ports))
	for _, h := range ports {
		if err := checkName("host", h.Host); err != nil {
			return err
		}
		if err := checkName("NIC of "+h.Host, h.Name); err != nil {
			return err
		}
		leaf, ok := f.byLeaf[h.Leaf]
		if !ok || h.Side > Right || h.Rate <= 0 || h.Rate > MaxRate || len(h.Addr) > MaxName {
			return fmt.Errorf("port %s on leaf %.40q at %d bit/s: no such leaf, side or rate: %w", h.Port, h.Leaf, h.Rate, ErrInvalid)
		}
		if _, twice := f.byPort[h.Port]; twice {
			return fmt.Errorf("port %s is there twice: %w", h.Port, ErrInvalid)
		}
		id := int32(len(f.ports))
		nic, ok := f.byNIC[h.NIC]
		if !ok {
			nic = [2]int32{none, none}
		}
		nic[h.Side] = id
		f.byNIC[h.NIC], f.byPort[h.Port] = nic, id
		f.access[Link{From: h.Port.String(), To: h.Leaf}] = id
		f.ports = append(f.ports, port{HostPort: h, leaf: leaf})
	}
	return nil
}

// uplinks and downlinks are the first link of a leaf with each spine.
func (f *fabric) uplinks(leaf int32) []int32 {
	n := len(f.spines)
	return f.up[int(leaf)*n : int(leaf+1)*n]
}

func (f *fabric) downlinks(leaf int32) []int32 {
	n := len(f.spines)
	return f.down[int(leaf)*n : int(leaf+1)*n]
}

// path names a pair of links.
func (f *fabric) path(up, down int32) Path {
	if up == none {
		return Path{}
	}
	return Path{Up: f.links[up].Link, Down: f.links[down].Link}
}

// pathOf finds the links of a path between two leaves.
func (f *fabric) pathOf(p Path, from, to int32) (up, down int32, ok bool) {
	up, ok1 := f.byLink[p.Up]
	down, ok2 := f.byLink[p.Down]
	if !ok1 || !ok2 {
		return none, none, false
	}
	u, d := &f.links[up], &f.links[down]
	return up, down, u.up && !d.up && u.spine == d.spine && u.leaf == from && d.leaf == to
}

// class is the worse of a path's links.
func (f *fabric) class(up, down int32) uint8 {
	if up == none {
		return well
	}
	return max(f.links[up].class, f.links[down].class)
}

// best is the least loaded of parallel links, by class first; none where all are dead.
func (f *fabric) best(first int32) int32 {
	best := none
	for id := first; id != none; id = f.links[id].next {
		l := &f.links[id]
		if l.class == dead {
			continue
		}
		if best == none || l.class < f.links[best].class ||
			l.class == f.links[best].class && l.load() < f.links[best].load() {
			best = id
		}
	}
	return best
}

// joined says whether some path that is not dead joins two leaves.
func (f *fabric) joined(from, to int32) bool {
	if from == to {
		return true
	}
	ups, downs := f.uplinks(from), f.downlinks(to)
	for s := range ups {
		if f.best(ups[s]) != none && f.best(downs[s]) != none {
			return true
		}
	}
	return false
}
