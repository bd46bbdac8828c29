package nic

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/netip"
	"path"
	"slices"
	"strconv"
	"strings"
)

// Tree has a node's RDMA devices and PCIe devices at one moment. Its methods may be called concurrently,
// except for those that set something.
type Tree struct {
	Devices []Device // ordered by CompareNames
	GPUs    []GPU    // NVIDIA GPUs, in PCIe order

	pci map[string]place // by bus id
}

// GPU is one GPU.
type GPU struct {
	BusID string // "0000:1b:00.0"
	NUMA  int    // -1: unknown
}

// Device is one RDMA device.
type Device struct {
	Name       string
	Ports      []Port
	BusID      string // "" if it is not on PCIe, such as soft-RoCE over a virtual interface
	DataDirect string // bus id of a Direct NIC's data function, "" if there is none
	NUMA       int    // -1: unknown
	VirtualOf  string // bus id of the physical function, if this is a virtual one and this host has the physical one
	RC         bool   // it is a channel adapter (InfiniBand, RoCE), not iWARP or another device without RC queue pairs
	Firmware   string // "" if the driver does not say

	nic   string // equal for all devices of one card
	place place
	data  *place
}

// Read reads the tree below /sys. It fails only if there is no list of RDMA devices. The error is
// fs.ErrNotExist if no driver is loaded.
func Read(sys fs.FS) (*Tree, error) {
	r := reader{sys}
	entries, err := fs.ReadDir(sys, classRDMA)
	if err != nil {
		return nil, fmt.Errorf("look for RDMA devices in /sys/%s: %w", classRDMA, cause(err))
	}
	t := &Tree{pci: r.pci()}
	for id, p := range t.pci {
		if r.text(pciAll, id, "vendor") == vendorNVIDIA && isGPU(r.text(pciAll, id, "class")) {
			t.GPUs = append(t.GPUs, GPU{BusID: id, NUMA: p.numa})
		}
	}
	slices.SortFunc(t.GPUs, func(a, b GPU) int { return cmp.Compare(a.BusID, b.BusID) })
	for _, e := range entries {
		if len(t.Devices) == maxDevices {
			break
		}
		t.Devices = append(t.Devices, r.device(e.Name()))
	}
	slices.SortFunc(t.Devices, func(a, b Device) int { return natural(a.Name, b.Name) })
	r.dataDirect(t)
	return t, nil
}

const (
	classRDMA = "class/infiniband"
	classNet  = "class/net"
	pciAll    = "bus/pci/devices"

	vendorNVIDIA = "0x10de"
	vendorNIC    = "0x15b3" // Mellanox, now NVIDIA's NICs

	// Bounds on what is read of a malformed tree.
	maxDevices = 1024
	maxPorts   = 256
	maxGIDs    = 1024
	maxFile    = 32 << 10 // vital product data at its largest
)

// isGPU reports whether a PCI class is that of a VGA or 3D controller.
func isGPU(class string) bool {
	return strings.HasPrefix(class, "0x0300") || strings.HasPrefix(class, "0x0302")
}

// Port returns a device's port, or nil.
func (t *Tree) Port(device string, num int) *Port {
	for i := range t.Devices {
		if t.Devices[i].Name != device {
			continue
		}
		for k := range t.Devices[i].Ports {
			if t.Devices[i].Ports[k].Num == num {
				return &t.Devices[i].Ports[k]
			}
		}
	}
	return nil
}

// NUMANodes returns the NUMA nodes that have RDMA devices, in order. It returns -1 alone if no device's
// node is known.
func (t *Tree) NUMANodes() []int {
	var nodes []int
	for i := range t.Devices {
		if n := t.Devices[i].NUMA; n >= 0 && !slices.Contains(nodes, n) {
			nodes = append(nodes, n)
		}
	}
	if len(nodes) == 0 {
		return []int{-1}
	}
	slices.Sort(nodes)
	return nodes
}

// SetDataDirect sets the data function of a device. dir is its path below /sys, from
// mlx5dv_get_data_direct_sysfs_path. Only the driver knows it for sure. Without it the tree uses serial
// numbers, which only root can read.
func (t *Tree) SetDataDirect(device, dir string) {
	p := parsePCIPath(dir)
	for i := range t.Devices {
		if d := &t.Devices[i]; d.Name == device && p.busID() != "" {
			at, ok := t.pci[p.busID()]
			if !ok {
				at = place{pci: p, numa: d.place.numa}
			}
			d.data, d.DataDirect = &at, p.busID()
		}
	}
}

// SetSubnets sets the subnets of GIDs, for Rails. prefixes returns the addresses of an interface, which
// sysfs does not have.
func (t *Tree) SetSubnets(prefixes func(netdev string) []netip.Prefix) {
	for i := range t.Devices {
		for k := range t.Devices[i].Ports {
			p := &t.Devices[i].Ports[k]
			for g := range p.GIDs {
				id := &p.GIDs[g]
				if id.NetDev == "" || !id.Addr.IsValid() {
					continue
				}
				for _, prefix := range prefixes(id.NetDev) {
					if prefix.Addr().Unmap().WithZone("") == id.Addr {
						id.Subnet = prefix.Masked()
					}
				}
			}
		}
	}
}

// reader reads sysfs. It treats what it cannot read as missing.
type reader struct{ fs.FS }

// text returns a file's content without white space around it, "" if it cannot be read.
func (r reader) text(elem ...string) string {
	return strings.TrimSpace(r.raw(path.Join(elem...)))
}

// raw returns a file's content, at most maxFile bytes, "" if it cannot be read.
func (r reader) raw(name string) string {
	f, err := r.Open(name)
	if err != nil {
		return ""
	}
	defer f.Close()
	content, err := io.ReadAll(io.LimitReader(f, maxFile))
	if err != nil {
		return ""
	}
	return string(content)
}

// number returns the number in a file, def if there is none.
func (r reader) number(def int, elem ...string) int {
	n, err := strconv.Atoi(r.text(elem...))
	if err != nil {
		return def
	}
	return n
}

// names returns the entries of a directory, none if it cannot be read.
func (r reader) names(elem ...string) []string {
	entries, _ := fs.ReadDir(r.FS, path.Join(elem...))
	var names []string
	for _, e := range entries {
		names = append(names, e.Name())
	}
	return names
}

// follow returns the target of a symbolic link, "" if it is none. It does not follow links in the
// target.
func (r reader) follow(link string) string {
	target, err := fs.ReadLink(r.FS, link)
	if err != nil {
		return ""
	}
	dir := path.Join(path.Dir(link), target)
	if !fs.ValidPath(dir) {
		return ""
	}
	return dir
}

// pci returns the places of all PCIe functions, by bus id.
func (r reader) pci() map[string]place {
	all := map[string]place{}
	for _, name := range r.names(pciAll) {
		id, ok := BusID(name)
		if !ok || id != name {
			continue
		}
		all[id] = place{pci: parsePCIPath(r.follow(path.Join(pciAll, name))), numa: r.number(-1, pciAll, name, "numa_node")}
	}
	return all
}

// device reads one RDMA device.
func (r reader) device(name string) Device {
	dir := path.Join(classRDMA, name)
	d := Device{Name: name, NUMA: -1, place: place{numa: -1}, Firmware: r.text(dir, "fw_ver")}
	number, _, _ := strings.Cut(r.text(dir, "node_type"), ":")
	d.RC = number == "1"

	// class/infiniband/mlx5_0 -> ../../devices/pci0000:15/.../0000:18:00.0/infiniband/mlx5_0
	d.place = r.at(r.follow(dir), path.Join(dir, "device"))
	if parent := r.text(dir, "parent"); d.place.pci.bridge == "" && safeName(parent) {
		// Soft-RoCE is attached where its interface is.
		d.place = r.at(r.follow(path.Join(classNet, parent)), path.Join(classNet, parent, "device"))
	}
	d.BusID, d.NUMA = d.place.pci.busID(), d.place.numa
	slot := d.place.pci.slot()
	d.VirtualOf = r.physical(d.BusID)
	if d.VirtualOf != "" {
		slot, _, _ = strings.Cut(d.VirtualOf, ".")
	}
	// The functions and slots of one card have the same system image GUID.
	d.nic = r.text(dir, "sys_image_guid")
	if strings.Trim(d.nic, "0:") == "" {
		d.nic = cmp.Or(slot, name)
	}

	for _, number := range r.names(dir, "ports") {
		n, err := strconv.Atoi(number)
		if err != nil || n < 1 || n > maxPorts || len(d.Ports) == maxPorts {
			continue
		}
		d.Ports = append(d.Ports, r.port(&d, n))
	}
	slices.SortFunc(d.Ports, func(a, b Port) int { return cmp.Compare(a.Num, b.Num) })
	return d
}

// physical returns the bus id of a virtual function's physical function, "" if busID is no virtual
// function.
func (r reader) physical(busID string) string {
	if busID == "" {
		return ""
	}
	target, err := fs.ReadLink(r.FS, path.Join(pciAll, busID, "physfn"))
	if err != nil {
		return ""
	}
	id, ok := BusID(path.Base(target))
	if !ok {
		return ""
	}
	return id
}

// at returns the place of a device. dir is its directory, and link a link to it if dir is no PCIe path.
func (r reader) at(dir, link string) place {
	p := parsePCIPath(dir)
	if p.bridge == "" {
		p = parsePCIPath(r.follow(link))
	}
	at := place{pci: p, numa: -1}
	if id := p.busID(); id != "" {
		at.numa = r.number(-1, pciAll, id, "numa_node")
	}
	if at.numa < 0 {
		at.numa = r.number(-1, link, "numa_node")
	}
	return at
}

// safeName reports whether a name from a file is one path element.
func safeName(s string) bool {
	return s != "" && s != "." && fs.ValidPath(s) && !strings.ContainsAny(s, "/\n")
}

// cause returns err without the path that fs adds.
func cause(err error) error {
	var p *fs.PathError
	if errors.As(err, &p) {
		return p.Err
	}
	return err
}

// CompareNames compares names of devices with their numbers as numbers: mlx5_2 is before mlx5_10.
func CompareNames(a, b string) int { return natural(a, b) }

// natural is CompareNames.
func natural(a, b string) int {
	for a != "" && b != "" {
		x, y := digits(a), digits(b)
		if x > 0 && y > 0 {
			m, n := strings.TrimLeft(a[:x], "0"), strings.TrimLeft(b[:y], "0")
			if c := cmp.Or(cmp.Compare(len(m), len(n)), cmp.Compare(m, n)); c != 0 {
				return c
			}
			a, b = a[x:], b[y:]
			continue
		}
		if c := cmp.Compare(a[0], b[0]); c != 0 {
			return c
		}
		a, b = a[1:], b[1:]
	}
	return cmp.Compare(len(a), len(b))
}

// digits returns how many digits s begins with.
func digits(s string) int {
	n := 0
	for n < len(s) && s[n] >= '0' && s[n] <= '9' {
		n++
	}
	return n
}
