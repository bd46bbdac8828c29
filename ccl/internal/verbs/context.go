package verbs

import (
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync/atomic"
	"syscall"
)

// Context is an opened device.
type Context struct {
	h        handle
	name     string
	children atomic.Int32
}

// Name is the device's kernel name.
func (c *Context) Name() string { return c.name }

// Close fails with ErrBusy while anything made from the context is open.
func (c *Context) Close() error {
	if c.h == nil {
		return closedError("close " + c.name)
	}
	if n := c.children.Load(); n != 0 {
		return &Error{Call: "close " + c.name, Device: c.name, Errno: syscall.EBUSY, Detail: fmt.Sprintf("%d of its objects are open", n)}
	}
	h := c.h
	c.h = nil
	return c.fail(closeDevice(h), "close "+c.name, "")
}

// fail is nil for errno 0.
func (c *Context) fail(errno syscall.Errno, call, detail string) error {
	if errno == 0 {
		return nil
	}
	return &Error{Call: call, Device: c.name, Errno: errno, Detail: detail}
}

// DeviceAttr are properties of a device.
type DeviceAttr struct {
	GUID       uint64
	Firmware   string
	VendorID   uint32
	PartID     uint32
	Ports      int
	MaxQP      int
	MaxQPWR    int // work requests outstanding in a queue
	MaxSGE     int
	MaxCQ      int
	MaxCQE     int // entries of a completion queue
	MaxMR      int
	MaxMRBytes uint64
}

// Attr asks the device.
func (c *Context) Attr() (DeviceAttr, error) {
	if c.h == nil {
		return DeviceAttr{}, closedError("query " + c.name)
	}
	var a DeviceAttr
	errno := queryDevice(c.h, &a)
	return a, c.fail(errno, "query "+c.name, "")
}

// PortAttr are properties of a port.
type PortAttr struct {
	State     PortState
	Physical  PhysicalState
	LinkLayer LinkLayer
	MaxMTU    MTU
	ActiveMTU MTU
	LID       uint16  // 0 on Ethernet
	Width     int     // lanes; 0 when unknown
	Speed     float64 // Gbit/s of a lane; 0 when unknown
	GIDs      int     // size of the GID table
	MaxBytes  uint32  // of a message
}

// lanes decodes active_width.
func lanes(width uint8) int {
	return map[uint8]int{1: 1, 2: 4, 4: 8, 8: 12, 16: 2}[width]
}

// laneRate decodes active_speed: SDR, DDR, QDR, FDR10, FDR, EDR, HDR, NDR, XDR.
func laneRate(speed uint32) float64 {
	return map[uint32]float64{1: 2.5, 2: 5, 4: 10, 8: 10, 16: 14, 32: 25, 64: 50, 128: 100, 256: 200}[speed]
}

// Rate is the port's speed in Gbit/s.
func (a PortAttr) Rate() float64 { return a.Speed * float64(a.Width) }

// Port asks for a port's state; ports count from 1.
func (c *Context) Port(port int) (PortAttr, error) {
	call := fmt.Sprintf("query port %s/%d", c.name, port)
	if c.h == nil {
		return PortAttr{}, closedError(call)
	}
	if port < 1 || port > 255 {
		return PortAttr{}, c.fail(syscall.EINVAL, call, "ports count from 1")
	}
	var a PortAttr
	errno := queryPort(c.h, port, &a)
	return a, c.fail(errno, call, "")
}

// GID is a port's address. On RoCE it is an IPv6 address, or a mapped IPv4 one.
type GID [16]byte

// Addr is the address, IPv4 where the GID is of one.
func (g GID) Addr() netip.Addr { return netip.AddrFrom16(g).Unmap() }

// String is "fe80::1" or "::ffff:192.0.2.1".
func (g GID) String() string { return netip.AddrFrom16(g).String() }

// GIDEntry is an entry of a port's GID table.
type GIDEntry struct {
	Index  int
	GID    GID
	Type   GIDType
	Netdev string // the interface behind it; empty on InfiniBand and when unknown
}

// GIDs lists a port's GID table without its empty entries, in order.
func (c *Context) GIDs(port int) ([]GIDEntry, error) {
	call := fmt.Sprintf("query GID table of %s/%d", c.name, port)
	if c.h == nil {
		return nil, closedError(call)
	}
	a, err := c.Port(port)
	if err != nil {
		return nil, err
	}
	entries, ifindex, errno := queryGIDTable(c.h, port)
	if errno == syscall.EOPNOTSUPP {
		// A library before 2020 (rdma-core 31): one by one, the type from sysfs.
		entries, errno = nil, 0
		for i := 0; i < a.GIDs && errno == 0; i++ {
			e := GIDEntry{Index: i}
			if errno = queryGID(c.h, port, i, &e.GID); errno == 0 && e.GID != (GID{}) {
				e.Type = c.gidType(port, i, a.LinkLayer)
				entries = append(entries, e)
			}
		}
	}
	if errno != 0 {
		return nil, c.fail(errno, call, "")
	}
	for i := range entries {
		e := &entries[i]
		if e.Netdev = c.gidAttr(port, "ndevs", e.Index); e.Netdev == "" && i < len(ifindex) && ifindex[i] > 0 {
			if nic, err := net.InterfaceByIndex(ifindex[i]); err == nil {
				e.Netdev = nic.Name
			}
		}
	}
	return entries, nil
}

// gidAttr reads a file below gid_attrs; the kernel answers EINVAL for an entry
// without a network interface.
func (c *Context) gidAttr(port int, what string, index int) string {
	b, err := os.ReadFile(filepath.Join(sysfs(), "class/infiniband", c.name, "ports", strconv.Itoa(port), "gid_attrs", what, strconv.Itoa(index)))
	if err != nil {
		return ""
	}
	return strings.TrimSpace(string(b))
}

func (c *Context) gidType(port, index int, l LinkLayer) GIDType {
	switch {
	case l != LinkEthernet:
		return GIDInfiniBand
	case c.gidAttr(port, "types", index) == "RoCE v2":
		return GIDRoCEv2
	}
	return GIDRoCEv1 // sysfs says "IB/RoCE v1"
}

// Event is an asynchronous event.
type Event struct {
	Type EventType
	Port int    // of a port's event, else 0
	QP   uint32 // number, of a queue pair's event, else 0
	CQ   uint32 // CQ.ID, of a completion queue's event, else 0
}

func (e Event) String() string {
	switch {
	case e.Port != 0:
		return fmt.Sprintf("%v of port %d", e.Type, e.Port)
	case e.QP != 0:
		return fmt.Sprintf("%v of queue pair %d", e.Type, e.QP)
	case e.Type == EventCQError:
		return fmt.Sprintf("%v of completion queue %d", e.Type, e.CQ)
	}
	return e.Type.String()
}

// AsyncFD is readable when NextEvent has an event. It stays the context's; a
// goroutine that sleeps on it in Go's poller does so on a duplicate.
func (c *Context) AsyncFD() int {
	if c.h == nil {
		return -1
	}
	return asyncFD(c.h)
}

// NextEvent takes an asynchronous event, which is acknowledged at once; ok is
// false when there is none. It does not block.
func (c *Context) NextEvent() (e Event, ok bool, err error) {
	if c.h == nil {
		return Event{}, false, closedError("read an event of " + c.name)
	}
	switch errno := nextEvent(c.h, &e); errno {
	case 0:
		return e, true, nil
	case syscall.EAGAIN, syscall.EINTR:
		return Event{}, false, nil
	default:
		return Event{}, false, c.fail(errno, "read an event of "+c.name, "")
	}
}
