package nic

import (
	"fmt"
	"path"
	"strconv"
	"strings"
)

// Distance is how far a NIC is from a GPU or NUMA node, nearest first.
type Distance uint8

const (
	SameSwitch      Distance = iota // at most one PCIe switch in between (PIX)
	SameRootPort                    // several switches, none of them the CPU's (PXB)
	SameRootComplex                 // through the CPU, one host bridge (PHB)
	SameNUMA                        // another host bridge of the NUMA node (NODE)
	Unknown                         // not on PCIe, or the NUMA node is unknown
	Far                             // another NUMA node (SYS)
)

// String returns what the two share.
func (d Distance) String() string {
	switch d {
	case SameSwitch:
		return "PCIe switch"
	case SameRootPort:
		return "root port"
	case SameRootComplex:
		return "root complex"
	case SameNUMA:
		return "NUMA node"
	case Far:
		return "far"
	}
	return "unknown"
}

// pciPath is the path from the CPU to a PCIe function.
type pciPath struct {
	bridge    string   // the host bridge, "pci0000:15"
	functions []string // from the root port to the function itself, "0000:15:01.0" ...
}

// busID returns the function's own address, "" if this is no PCIe device.
func (p pciPath) busID() string {
	if len(p.functions) == 0 {
		return ""
	}
	return p.functions[len(p.functions)-1]
}

// slot returns the address without the function number. The functions of one card share it.
func (p pciPath) slot() string {
	s, _, _ := strings.Cut(p.busID(), ".")
	return s
}

// parsePCIPath returns the PCIe functions in a path below /sys/devices. It omits other elements, such as
// platform nodes and auxiliary devices.
func parsePCIPath(dir string) pciPath {
	var p pciPath
	for _, part := range strings.Split(path.Clean(dir), "/") {
		if id, ok := BusID(part); ok && p.bridge != "" {
			p.functions = append(p.functions, id)
		} else if isHostBridge(part) && p.bridge == "" {
			p.bridge = part
		}
	}
	if len(p.functions) == 0 {
		return pciPath{}
	}
	return p
}

// isHostBridge reports whether s is the name of a host bridge, such as "pci0000:15".
func isHostBridge(s string) bool {
	s, ok := strings.CutPrefix(s, "pci")
	domain, bus, colon := strings.Cut(s, ":")
	return ok && colon && isHex(domain, 4, 8) && isHex(bus, 2, 2)
}

func isHex(s string, least, most int) bool {
	_, err := strconv.ParseUint(s, 16, 32)
	return err == nil && len(s) >= least && len(s) <= most
}

// BusID converts a PCIe address to sysfs's form, "0000:1b:00.0". NVML writes the domain with 8 digits,
// CUDA and nvidia-smi in capitals. It returns false if s is no PCIe address.
func BusID(s string) (string, bool) {
	domain, rest, ok := strings.Cut(s, ":")
	bus, rest, ok2 := strings.Cut(rest, ":")
	device, function, ok3 := strings.Cut(rest, ".")
	if !ok || !ok2 || !ok3 || !isHex(domain, 4, 8) || !isHex(bus, 2, 2) || !isHex(device, 2, 2) || !isHex(function, 1, 1) {
		return "", false
	}
	n, _ := strconv.ParseUint(domain, 16, 32) // isHex has checked it
	return fmt.Sprintf("%04x:%s:%s.%s", n, strings.ToLower(bus), strings.ToLower(device), strings.ToLower(function)), true
}

// place is where a device is attached.
type place struct {
	pci  pciPath
	numa int // -1: unknown
}

// distance returns the distance between two places. A place without a PCIe path is a NUMA node.
func (p place) distance(q place) Distance {
	if p.pci.bridge != "" && p.pci.bridge == q.pci.bridge {
		a, b := p.pci.functions, q.pci.functions
		n := 0
		for n < len(a) && n < len(b) && a[n] == b[n] {
			n++
		}
		switch {
		case n == 0 && p.slotOnly() && p.pci.slot() == q.pci.slot():
			return SameSwitch // functions of one device of the root complex
		case n == 0:
			return SameRootComplex
		case len(a)-n <= 2 && len(b)-n <= 2: // the switch's downstream port, and the device
			return SameSwitch
		default:
			return SameRootPort
		}
	}
	switch {
	case p.numa < 0 || q.numa < 0:
		return Unknown
	case p.numa == q.numa:
		return SameNUMA
	}
	return Far
}

// slotOnly reports whether the device is attached directly to the host bridge.
func (p place) slotOnly() bool { return len(p.pci.functions) == 1 }
