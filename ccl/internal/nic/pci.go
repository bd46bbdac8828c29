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
	Unknown                         // not on PCIe, or no NUMA node is told
	Far                             // another NUMA node (SYS)
)

// String is what the two have in common.
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

// pciPath is the way from the CPU to a PCIe function.
type pciPath struct {
	bridge    string   // the host bridge, "pci0000:15"
	functions []string // from the root port to the function itself, "0000:15:01.0" ...
}

// busID is the function's own address, "" when this is no PCIe device.
func (p pciPath) busID() string {
	if len(p.functions) == 0 {
		return ""
	}
	return p.functions[len(p.functions)-1]
}

// slot is the address without the function: what the functions of one card share.
func (p pciPath) slot() string {
	s, _, _ := strings.Cut(p.busID(), ".")
	return s
}

// parsePCIPath picks the PCIe functions out of a path below /sys/devices. What
// is no PCIe function (a platform's nodes above, an auxiliary device below) is left out.
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

// isHostBridge tells "pci0000:15" from "pci" and other names.
func isHostBridge(s string) bool {
	s, ok := strings.CutPrefix(s, "pci")
	domain, bus, colon := strings.Cut(s, ":")
	return ok && colon && isHex(domain, 4, 8) && isHex(bus, 2, 2)
}

func isHex(s string, least, most int) bool {
	_, err := strconv.ParseUint(s, 16, 32)
	return err == nil && len(s) >= least && len(s) <= most
}

// BusID brings a PCIe address into sysfs's form, "0000:1b:00.0". NVML writes the
// domain with 8 digits, CUDA and nvidia-smi in capitals. False: it is none.
func BusID(s string) (string, bool) {
	domain, rest, ok := strings.Cut(s, ":")
	bus, rest, ok2 := strings.Cut(rest, ":")
	device, function, ok3 := strings.Cut(rest, ".")
	if !ok || !ok2 || !ok3 || !isHex(domain, 4, 8) || !isHex(bus, 2, 2) || !isHex(device, 2, 2) || !isHex(function, 1, 1) {
		return "", false
	}
	n, _ := strconv.ParseUint(domain, 16, 32) // isHex has looked
	return fmt.Sprintf("%04x:%s:%s.%s", n, strings.ToLower(bus), strings.ToLower(device), strings.ToLower(function)), true
}

// place is where something is attached.
type place struct {
	pci  pciPath
	numa int // -1: unknown
}

// distance between two places; a place without a PCIe path is a NUMA node.
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

// slotOnly reports that nothing lies between the host bridge and the device.
func (p place) slotOnly() bool { return len(p.pci.functions) == 1 }
