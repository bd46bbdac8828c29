package nic

import (
	"cmp"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"path"
	"slices"
	"strconv"
	"strings"
)

// State is a port's logical state, numbered as in verbs.
type State uint8

const (
	StateUnknown State = iota
	StateDown
	StateInit
	StateArmed
	StateActive
	StateActiveDefer
)

func (s State) String() string {
	names := [...]string{"unknown", "down", "init", "armed", "active", "active_defer"}
	if int(s) >= len(names) {
		return names[0]
	}
	return names[s]
}

// Layer is the link layer of a port.
type Layer uint8

const (
	LayerUnknown Layer = iota
	InfiniBand
	Ethernet // RoCE
)

func (l Layer) String() string {
	switch l {
	case InfiniBand:
		return "InfiniBand"
	case Ethernet:
		return "Ethernet"
	}
	return "unknown"
}

// Port is one port of an RDMA device. Only Select fills in GID and the fields after it.
type Port struct {
	Device    string
	Num       int // from 1
	State     State
	PhysState string // as the kernel writes it: "LinkUp", "Polling", "Disabled", ...
	Layer     Layer
	Rate      uint64 // bit/s, 0: unknown
	LID       uint16 // InfiniBand's local address, 0 on Ethernet
	NetDev    string // its interface, "" if there is none or it is in another network namespace
	Slaves    []string
	MTU       int // of the interface, in bytes; the path's is known to verbs
	GIDs      []GID

	GIDIndex int
	GID      [16]byte
	Addr     netip.Addr   // of GID, IPv4 unmapped; not valid for an InfiniBand GID
	Subnet   netip.Prefix // of Addr; not valid if unknown
	Distance Distance
	Data     bool   // Distance is that of a Direct NIC's data function
	Why      string // the reason for its place in the order
}

// Name returns the device and port, such as "mlx5_0:1".
func (p *Port) Name() string { return p.Device + ":" + strconv.Itoa(p.Num) }

// GID is one entry of a port's table.
type GID struct {
	Index  int
	Raw    [16]byte
	RoCE   int        // version, 0 for InfiniBand
	Addr   netip.Addr // of RoCE v2: the interface's address, IPv4 unmapped
	NetDev string
	Subnet netip.Prefix // by SetSubnets
}

// port reads one port.
func (r reader) port(d *Device, num int) Port {
	dir := path.Join(classRDMA, d.Name, "ports", strconv.Itoa(num))
	p := Port{Device: d.Name, Num: num, GIDIndex: -1}
	p.State = parseState(r.text(dir, "state"))
	_, p.PhysState, _ = strings.Cut(r.text(dir, "phys_state"), ": ")
	switch r.text(dir, "link_layer") {
	case "InfiniBand":
		p.Layer = InfiniBand
	case "Ethernet":
		p.Layer = Ethernet
	}
	p.Rate = parseRate(r.text(dir, "rate"))
	if lid, err := strconv.ParseUint(r.text(dir, "lid"), 0, 16); err == nil {
		p.LID = uint16(lid)
	}
	p.GIDs = r.gids(dir)
	p.NetDev = r.netdev(d, &p)
	if safeName(p.NetDev) {
		p.MTU = r.number(0, classNet, p.NetDev, "mtu")
		p.Slaves = strings.Fields(r.text(classNet, p.NetDev, "bonding", "slaves"))
	}
	return p
}

// parseState parses "4: ACTIVE".
func parseState(s string) State {
	number, _, _ := strings.Cut(s, ":")
	n, err := strconv.ParseUint(number, 10, 8)
	if err != nil || n > uint64(StateActiveDefer) {
		return StateUnknown
	}
	return State(n)
}

// parseRate parses "400 Gb/sec (4X NDR)" and "2.5 Gb/sec (1X SDR)".
func parseRate(s string) uint64 {
	number, unit, _ := strings.Cut(s, " ")
	g, err := strconv.ParseFloat(number, 64)
	if err != nil || !strings.HasPrefix(unit, "Gb/sec") || !(g >= 0 && g < 1e6) {
		return 0
	}
	return uint64(g * 1e9)
}

// gids reads the entries that are in use.
func (r reader) gids(dir string) []GID {
	var out []GID
	for _, name := range r.names(dir, "gids") {
		index, err := strconv.Atoi(name)
		if err != nil || index < 0 || len(out) == maxGIDs {
			continue
		}
		if g, ok := r.gid(dir, index); ok {
			out = append(out, g)
		}
	}
	slices.SortFunc(out, func(a, b GID) int { return cmp.Compare(a.Index, b.Index) })
	return out
}

// gid reads an entry. It returns false if the entry is empty or unreadable. Reading an attribute of an
// empty entry fails with EINVAL. So does any attribute but the type on InfiniBand.
func (r reader) gid(dir string, index int) (GID, bool) {
	i := strconv.Itoa(index)
	text := strings.ReplaceAll(r.text(dir, "gids", i), ":", "")
	g := GID{Index: index}
	if len(text) != 32 {
		return g, false
	}
	if _, err := hex.Decode(g.Raw[:], []byte(text)); err != nil || [8]byte(g.Raw[8:]) == [8]byte{} {
		return g, false // an empty InfiniBand entry has the subnet's prefix
	}
	switch r.text(dir, "gid_attrs", "types", i) {
	case "RoCE v2":
		g.RoCE = 2
		g.Addr = netip.AddrFrom16(g.Raw).Unmap()
	case "IB/RoCE v1":
		g.RoCE = 1
	}
	if name := r.text(dir, "gid_attrs", "ndevs", i); safeName(name) {
		g.NetDev = name
	}
	return g, true
}

// netdev returns the interface of a port. It is that of its first GID (a bond's, if there is a bond), or
// else the function's interface with the port's number.
func (r reader) netdev(d *Device, p *Port) string {
	for _, g := range p.GIDs {
		if g.NetDev != "" {
			return g.NetDev
		}
	}
	names := r.names(classRDMA, d.Name, "device", "net")
	for _, name := range names {
		// IPoIB has the port in dev_id on old kernels, and in dev_port since 3.15.
		if r.number(0, classNet, name, "dev_port") == p.Num-1 {
			return name
		}
	}
	return ""
}

// pick chooses an entry of a port's table. On InfiniBand that is the first one. On Ethernet it is a RoCE
// v2 entry, within the user's prefix if there is one. It prefers IPv4 to IPv6 and that to link-local
// addresses, and the port's own interface to those on top of it. It never uses a fixed index, because
// indices change when addresses are added and removed.
func (p *Port) pick(prefix netip.Prefix) (*GID, error) {
	var best *GID
	var rank int
	for i := range p.GIDs {
		g := &p.GIDs[i]
		n := 0
		switch {
		case p.Layer == InfiniBand:
			if prefix.IsValid() && !prefix.Contains(netip.AddrFrom16(g.Raw)) {
				continue
			}
			n = 1
		case g.RoCE != 2:
			continue
		case prefix.IsValid() && !prefix.Contains(g.Addr.WithZone("")):
			continue
		case g.Addr.Is4():
			n = 5
		case !g.Addr.IsLinkLocalUnicast():
			n = 3
		default:
			n = 1
		}
		if g.NetDev == p.NetDev {
			n++
		}
		if n > rank {
			best, rank = g, n
		}
	}
	switch {
	case best != nil:
		return best, nil
	case prefix.IsValid():
		return nil, fmt.Errorf("has no GID in %s", prefix)
	case p.Layer == Ethernet:
		return nil, errors.New("has no RoCE v2 GID: its interface is down, has no address, or is in another network namespace")
	}
	return nil, errors.New("has no GID")
}

// Resolve looks up the index of the port's GID again. It may have changed, for example after the port
// was down. It fails if the table no longer has the address.
func (p *Port) Resolve(sys fs.FS) error {
	dir := path.Join(classRDMA, p.Device, "ports", strconv.Itoa(p.Num))
	for _, g := range (reader{sys}).gids(dir) {
		if g.Raw == p.GID && (p.Layer == InfiniBand || g.RoCE == 2) {
			p.GIDIndex = g.Index
			return nil
		}
	}
	return fmt.Errorf("port %s has GID %s no more", p.Name(), p.Address())
}

// Address returns the port's GID as text, as an IP address if it is one.
func (p *Port) Address() string {
	if p.Addr.IsValid() {
		return p.Addr.String()
	}
	return netip.AddrFrom16(p.GID).String()
}
