package rdma

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"math"
	"path"
	"slices"
	"strconv"
	"strings"

	"github.com/lockstep-ccl/lockstep/collector"
	"github.com/lockstep-ccl/lockstep/collector/source"
)

const (
	classRDMA = "class/infiniband"
	classNet  = "class/net"

	// Bounds on what is read of a tree that is not what it should be.
	maxDevices = 256
	maxPorts   = 256 // of a node
	maxLinks   = 16  // of a port
	maxFailed  = 16  // told by name, of a port
	maxFile    = 4096
)

// probe is one look at all ports. at is told of each file before it is read.
type probe struct {
	sys   fs.FS
	at    func(file string)
	ports []seenPort
}

// seenPort is a port as a probe found it.
type seenPort struct {
	collector.NICPort
	links  []seenLink
	failed int
}

// seenLink is an interface as a probe or an announcement found it.
type seenLink struct {
	name  string
	index int
	up    bool
	downs *uint64 // losses of carrier since there is the interface; nil before Linux 4.16
}

// run looks. The error is a source.ErrNoData when there is nothing to see.
func (r *probe) run() error {
	devices, err := r.names(classRDMA)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return fmt.Errorf("%w: no RDMA driver is loaded (there is no /sys/%s)", source.ErrNoData, classRDMA)
	case err != nil:
		return fmt.Errorf("list RDMA devices: %w", err)
	case len(devices) == 0:
		return fmt.Errorf("%w: no RDMA device in /sys/%s", source.ErrNoData, classRDMA)
	}
	for _, d := range devices[:min(len(devices), maxDevices)] {
		r.device(d)
	}
	return nil
}

func (r *probe) device(name string) {
	dir := path.Join(classRDMA, name)
	p := collector.NICPort{Device: name}
	p.Model, _ = r.text(path.Join(dir, "hca_type"))
	p.Firmware, _ = r.text(path.Join(dir, "fw_ver"))
	p.BusID = r.busID(dir)
	ports, err := r.names(path.Join(dir, "ports"))
	if err != nil {
		return // it went away meanwhile
	}
	for _, number := range ports {
		n, err := strconv.Atoi(number)
		if err == nil && n > 0 && len(r.ports) < maxPorts {
			p.Port = n
			r.ports = append(r.ports, r.port(p, path.Join(dir, "ports", number)))
		}
	}
}

// busID is the PCIe address of a device, "" when it is on no PCIe bus.
func (r *probe) busID(dir string) string {
	target, err := fs.ReadLink(r.sys, path.Join(dir, "device"))
	if err != nil {
		return ""
	}
	id := path.Base(target)
	if strings.Count(id, ":") != 2 {
		return ""
	}
	return id
}

func (r *probe) port(base collector.NICPort, dir string) seenPort {
	p := seenPort{NICPort: base}
	p.State = r.word(&p, path.Join(dir, "state"))
	p.PhysicalState = r.word(&p, path.Join(dir, "phys_state"))
	p.Up = p.State == "ACTIVE" || p.State == "ACTIVE_DEFER"
	p.Layer, _ = r.text(path.Join(dir, "link_layer"))
	if text, err := r.text(path.Join(dir, "rate")); err == nil {
		if bits, ok := parseRate(text); ok {
			bytes := bits / 8
			p.Rate = &bytes
		} else {
			p.fail(path.Join(dir, "rate"), fmt.Errorf("%.40q is no rate", text))
		}
	} else {
		p.fail(path.Join(dir, "rate"), err)
	}
	r.counters(&p, path.Join(dir, "hw_counters"))
	r.counters(&p, path.Join(dir, "counters"))
	for _, list := range []*[]collector.NICCounter{&p.Retransmissions, &p.Congestion, &p.Errors} {
		slices.SortFunc(*list, func(a, b collector.NICCounter) int { return strings.Compare(a.Name, b.Name) })
	}
	r.interfaces(&p, dir)
	return p
}

// word reads "4: ACTIVE".
func (r *probe) word(p *seenPort, file string) string {
	text, err := r.text(file)
	if err != nil {
		p.fail(file, err)
		return ""
	}
	_, word, ok := strings.Cut(text, ": ")
	if !ok || len(word) > 32 || strings.ContainsFunc(word, func(c rune) bool { return c <= ' ' || c > '~' }) {
		p.fail(file, fmt.Errorf("%.40q is no state", text))
		return ""
	}
	return word
}

// parseRate reads "400 Gb/sec (4X NDR)".
func parseRate(text string) (bits float64, ok bool) {
	number, unit, _ := strings.Cut(text, " ")
	g, err := strconv.ParseFloat(number, 64)
	if err != nil || !strings.HasPrefix(unit, "Gb/sec") || !(g >= 0 && g < 1e6) {
		return 0, false
	}
	return g * 1e9, true
}

// counters reads a directory of counters. It need not be there.
func (r *probe) counters(p *seenPort, dir string) {
	names, err := r.names(dir)
	if err != nil {
		if !errors.Is(err, fs.ErrNotExist) {
			p.fail(dir, err)
		}
		return
	}
	for _, name := range names {
		k := counters[name]
		if k == 0 || p.has(name) {
			continue
		}
		file := path.Join(dir, name)
		text, err := r.text(file)
		if err != nil {
			p.fail(file, err)
			continue
		}
		if strings.HasPrefix(text, "N/A") {
			continue // the device has none
		}
		n, err := strconv.ParseUint(text, 10, 64)
		if err != nil {
			p.fail(file, fmt.Errorf("%.40q is no number", text))
			continue
		}
		k.put(&p.NICPort, name, float64(n))
	}
}

// has reports whether the other directory had a counter, too.
func (p *seenPort) has(name string) bool {
	for _, list := range [][]collector.NICCounter{p.Retransmissions, p.Congestion, p.Errors} {
		if slices.ContainsFunc(list, func(c collector.NICCounter) bool { return c.Name == name }) {
			return true
		}
	}
	return false
}

// fail counts a read that failed. A file that is gone between listing and
// reading has not: its device is being removed.
func (p *seenPort) fail(file string, err error) {
	if errors.Is(err, fs.ErrNotExist) {
		return
	}
	p.failed++
	if len(p.Failed) < maxFailed {
		p.Failed = append(p.Failed, "/sys/"+file+": "+cause(err).Error())
	}
}

// interfaces finds the interface that a port belongs to, and the members of a bond.
func (r *probe) interfaces(p *seenPort, dir string) {
	name, err := r.text(path.Join(dir, "gid_attrs/ndevs/0"))
	if err != nil || !validName(name) {
		if name = r.byFunction(p); name == "" {
			return
		}
	}
	all := []string{name}
	if members, err := r.text(path.Join(classNet, name, "bonding/slaves")); err == nil {
		all = append(all, strings.Fields(members)...)
	}
	for _, name := range all[:min(len(all), maxLinks)] {
		if l, ok := r.link(name); ok {
			p.links = append(p.links, l)
		}
	}
}

// byFunction is the interface of the PCIe function with the port's number, as IPoIB's.
func (r *probe) byFunction(p *seenPort) string {
	names, _ := r.names(path.Join(classRDMA, p.Device, "device/net"))
	for _, name := range names {
		if n, err := r.number(path.Join(classNet, name, "dev_port")); err == nil && n == uint64(p.Port-1) {
			return name
		}
	}
	return ""
}

// link reads an interface; false when it is not in this network namespace.
func (r *probe) link(name string) (seenLink, bool) {
	l := seenLink{name: name}
	if !validName(name) {
		return l, false
	}
	index, err := r.number(path.Join(classNet, name, "ifindex"))
	if err != nil || index > math.MaxInt32 {
		return l, false
	}
	l.index = int(index)
	if n, err := r.number(path.Join(classNet, name, "carrier_down_count")); err == nil {
		l.downs = &n
	}
	carrier, err := r.number(path.Join(classNet, name, "carrier")) // EINVAL: it is shut
	l.up = err == nil && carrier == 1
	return l, true
}

// validName reports whether a name read from a file is one path element.
func validName(s string) bool {
	return s != "" && s != "." && fs.ValidPath(s) && !strings.Contains(s, "/")
}

func (r *probe) number(file string) (uint64, error) {
	text, err := r.text(file)
	if err != nil {
		return 0, err
	}
	return strconv.ParseUint(text, 10, 64)
}

func (r *probe) text(file string) (string, error) {
	r.at(file)
	f, err := r.sys.Open(file)
	if err != nil {
		return "", err
	}
	defer f.Close()
	content, err := io.ReadAll(io.LimitReader(f, maxFile))
	return strings.TrimSpace(string(content)), err
}

func (r *probe) names(dir string) ([]string, error) {
	r.at(dir)
	entries, err := fs.ReadDir(r.sys, dir)
	var names []string
	for _, e := range entries {
		names = append(names, e.Name())
	}
	if len(names) > 0 {
		err = nil // a part is better than nothing
	}
	return names, err
}

// cause is an error without the path that fs puts in.
func cause(err error) error {
	var p *fs.PathError
	if errors.As(err, &p) {
		return p.Err
	}
	return err
}
