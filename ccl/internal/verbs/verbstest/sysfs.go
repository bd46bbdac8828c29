package verbstest

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/lockstep-ccl/lockstep/ccl/internal/verbs"
)

// Sysfs is the root of a tree like /sys: class/infiniband with ports, GIDs and
// counters, class/net, and the devices' PCIe functions. State and GIDs follow
// the fabric; counters stay 0 unless a test writes them.
func (f *Fabric) Sysfs() string { return f.dir }

// tree writes files and keeps the first error.
type tree struct {
	root string
	err  error
}

func (t *tree) file(content string, path ...string) {
	p := filepath.Join(append([]string{t.root}, path...)...)
	t.err = errors.Join(t.err, os.MkdirAll(filepath.Dir(p), 0o755))
	// As in sysfs, a reader sees all of the old content or all of the new.
	next := p + ".next"
	t.err = errors.Join(t.err, os.WriteFile(next, []byte(content+"\n"), 0o644), os.Rename(next, p))
}

func (t *tree) link(target string, path ...string) {
	p := filepath.Join(append([]string{t.root}, path...)...)
	t.err = errors.Join(t.err, os.MkdirAll(filepath.Dir(p), 0o755))
	if rel, err := filepath.Rel(filepath.Dir(p), filepath.Join(t.root, target)); err == nil {
		t.err = errors.Join(t.err, os.Symlink(rel, p))
	}
}

func (f *Fabric) writeSysfs() error {
	t := &tree{root: f.dir}
	t.err = os.MkdirAll(filepath.Join(f.dir, "class/infiniband"), 0o755)
	for i, d := range f.devices {
		domain, _, _ := strings.Cut(d.BusID, ".")
		bridge := fmt.Sprintf("devices/pci%s:%02x", d.BusID[:4], 0x10+0x10*i)
		pci := filepath.Join(bridge, domain[:5]+fmt.Sprintf("%02x:01.0", 0x10+0x10*i), d.BusID)
		for name, content := range map[string]string{"numa_node": strconv.Itoa(d.NUMA), "vendor": "0x15b3", "class": "0x020000"} {
			t.file(content, pci, name)
		}
		t.link(pci, "bus/pci/devices", d.BusID)
		if d.GPU != "" {
			gpu := filepath.Join(filepath.Dir(pci), d.GPU)
			for name, content := range map[string]string{"numa_node": strconv.Itoa(d.NUMA), "vendor": "0x10de", "class": "0x030200"} {
				t.file(content, gpu, name)
			}
			t.link(gpu, "bus/pci/devices", d.GPU)
		}
		dir := filepath.Join(pci, "infiniband", d.Name)
		for name, content := range map[string]string{
			"node_type": "1: CA", "fw_ver": "1.2.3", "node_guid": words(binary.BigEndian.AppendUint64(nil, guid(i))),
			"sys_image_guid": words(binary.BigEndian.AppendUint64(nil, guid(i))),
		} {
			t.file(content, dir, name)
		}
		t.link(pci, dir, "device")
		for n, p := range d.Ports {
			port := filepath.Join(dir, "ports", strconv.Itoa(n+1))
			layer, lid := "Ethernet", 0
			if p.InfiniBand {
				layer, lid = "InfiniBand", lidOf(i*portsPerDevice+n)
			} else {
				t.file("4200", pci, "net", p.Netdev, "mtu")
				t.file(strconv.Itoa(n), pci, "net", p.Netdev, "dev_port")
				t.link(pci, pci, "net", p.Netdev, "device")
				t.link(filepath.Join(pci, "net", p.Netdev), "class/net", p.Netdev)
			}
			t.file(layer, port, "link_layer")
			t.file(fmt.Sprintf("%#x", lid), port, "lid")
			t.file("800 Gb/sec (4X XDR)", port, "rate")
			for _, c := range []string{"counters/port_rcv_errors", "counters/link_downed", "counters/port_xmit_wait", "hw_counters/out_of_sequence",
				"hw_counters/packet_seq_err", "hw_counters/local_ack_timeout_err", "hw_counters/rnr_nak_retry_err"} {
				t.file("0", port, c)
			}
		}
		if t.err == nil {
			f.writeDevice(i, false)
			for n := range d.Ports {
				f.writePort(i, n+1)
			}
		}
	}
	return t.err
}

// place is where a device's directory is.
func (f *Fabric) place(device int) (link, target string) {
	d := f.devices[device]
	matches, _ := filepath.Glob(filepath.Join(f.dir, "devices/pci*/*", d.BusID, "infiniband", d.Name))
	if len(matches) != 1 {
		panic("verbstest: the tree of " + d.Name + " is gone")
	}
	rel, _ := filepath.Rel(f.dir, matches[0])
	return filepath.Join("class/infiniband", d.Name), rel
}

func (f *Fabric) writeDevice(device int, removed bool) {
	link, target := f.place(device)
	t := &tree{root: f.dir}
	if err := os.Remove(filepath.Join(f.dir, link)); err != nil && !os.IsNotExist(err) {
		t.err = err
	}
	if !removed {
		t.link(target, link)
	}
	f.wrote(t)
}

func (f *Fabric) writePort(device, port int) {
	_, dir := f.place(device)
	dir = filepath.Join(dir, "ports", strconv.Itoa(port))
	index := device*portsPerDevice + port - 1
	t := &tree{root: f.dir}
	state, physical := "4: ACTIVE", "5: LinkUp"
	if f.down[index] {
		state, physical = "1: DOWN", "3: Disabled"
	}
	t.file(state, dir, "state")
	t.file(physical, dir, "phys_state")
	netdev := f.devices[device].Ports[port-1].Netdev
	if netdev != "" {
		t.file(map[bool]string{false: "up", true: "down"}[f.down[index]], "class/net", netdev, "operstate")
	}
	table := map[int]verbs.GIDEntry{}
	for _, e := range f.tables[index] {
		table[e.Index] = e
	}
	for i := range tableSize {
		e := table[i]
		n := strconv.Itoa(i)
		t.file(words(e.GID[:]), dir, "gids", n)
		if e.GID == (verbs.GID{}) {
			// The kernel has the files, and fails to read them.
			t.err = errors.Join(t.err, os.RemoveAll(filepath.Join(f.dir, dir, "gid_attrs/types", n)), os.RemoveAll(filepath.Join(f.dir, dir, "gid_attrs/ndevs", n)))
			continue
		}
		t.file(map[verbs.GIDType]string{verbs.GIDRoCEv2: "RoCE v2"}[e.Type]+map[bool]string{true: "IB/RoCE v1"}[e.Type != verbs.GIDRoCEv2], dir, "gid_attrs/types", n)
		if e.Netdev != "" {
			t.file(e.Netdev, dir, "gid_attrs/ndevs", n)
		}
	}
	f.wrote(t)
}

// words is "fe80:0000:0000:0000:…".
func words(b []byte) string {
	var s []string
	for i := 0; i < len(b); i += 2 {
		s = append(s, fmt.Sprintf("%02x%02x", b[i], b[i+1]))
	}
	return strings.Join(s, ":")
}

func (f *Fabric) wrote(t *tree) {
	if t.err != nil {
		f.tb.Errorf("verbstest: sysfs: %v", t.err)
	}
}
