package verbstest

import (
	"time"

	"github.com/lockstep-ccl/lockstep/ccl/internal/verbs"
)

// SetPort takes a port down or up: nothing leaves or reaches it while it is
// down. event says whether the device tells, with PORT_ERR or PORT_ACTIVE.
func (f *Fabric) SetPort(device string, port int, up, event bool) {
	index, _ := f.port(device, port)
	control("fake_port_up", uintptr(index), flag(up))
	f.mu.Lock()
	f.down[index] = !up
	f.writePort(f.device(device), port)
	f.mu.Unlock()
	if !event {
		return
	}
	e := verbs.Event{Type: verbs.EventPortError, Port: port}
	if up {
		e.Type = verbs.EventPortActive
	}
	f.Raise(device, e)
}

// SetGIDs replaces a port's GID table. It raises no event; queue pairs that are
// connected stay so.
func (f *Fabric) SetGIDs(device string, port int, table []verbs.GIDEntry) {
	index, _ := f.port(device, port)
	f.mu.Lock()
	defer f.mu.Unlock()
	f.setGIDs(index, table)
	f.writePort(f.device(device), port)
}

const tableSize = 16 // as in fake.h

func (f *Fabric) setGIDs(index int, table []verbs.GIDEntry) {
	var full [tableSize]verbs.GIDEntry
	for _, e := range table {
		full[e.Index] = e
	}
	for i, e := range full {
		setGID(index, i, e)
	}
	f.tables[index] = table
}

// Raise raises an asynchronous event in every context of a device, whether or
// not there is cause for it; one of a queue pair goes to the context it is of,
// and is dropped when there is no such queue pair.
func (f *Fabric) Raise(device string, e verbs.Event) {
	d := uintptr(f.device(device))
	if e.QP != 0 {
		control("fake_raise_qp", d, uintptr(e.Type), uintptr(e.QP))
		return
	}
	control("fake_raise", d, uintptr(e.Type), uintptr(e.Port))
}

// Remove takes a device away, with DEVICE_FATAL. What is posted never
// completes, completion queues give what they had, destroying works, and
// everything else fails with EIO. Restore brings it back, to be opened again.
// For a device that goes without a word, as one of Soft-RoCE does, take its
// ports down without an event.
func (f *Fabric) Remove(device string) { f.setRemoved(device, true) }

// Restore undoes Remove.
func (f *Fabric) Restore(device string) { f.setRemoved(device, false) }

func (f *Fabric) setRemoved(device string, removed bool) {
	d := f.device(device)
	control("fake_remove", uintptr(d), flag(removed))
	f.mu.Lock()
	defer f.mu.Unlock()
	f.writeDevice(d, removed)
}

// FailSends makes every write that a port has yet to send fail with a status,
// as some devices do when the link is down; Success ends it.
func (f *Fabric) FailSends(device string, port int, s verbs.Status) {
	index, _ := f.port(device, port)
	control("fake_fail_sends", uintptr(index), uintptr(s))
}

// ExpireRetries lets the retries of all senders that wait for an
// acknowledgement run out now, and tells how many senders there were.
func (f *Fabric) ExpireRetries() int { return control("fake_expire") }

// Stall keeps every call of a function of the library's from returning, as a kernel
// does that waits for what never comes, until release; those that post and poll are
// none of them. One function at a time.
func (f *Fabric) Stall(call string) (release func()) {
	withString("fake_stall", call)
	return func() { withString("fake_stall", "") }
}

// Stalled is how many calls do not return.
func (f *Fabric) Stalled() int { return control("fake_stalled") }

// Link is one direction between two ports.
type Link struct {
	from, to uintptr
}

// Link gives the direction from one port to another; a connection uses both.
func (f *Fabric) Link(from string, fromPort int, to string, toPort int) Link {
	a, _ := f.port(from, fromPort)
	b, _ := f.port(to, toPort)
	return Link{uintptr(a), uintptr(b)}
}

// Drop loses everything, acknowledgements of the other direction's writes
// included, until it is called with false.
func (l Link) Drop(on bool) { control("fake_drop", l.from, l.to, flag(on), 0) }

// DropNext loses the next n writes.
func (l Link) DropNext(n int) { control("fake_drop", l.from, l.to, 0, uintptr(n)) }

// TearNext loses the last packets of the next n writes: the first half of the
// bytes is written, and nothing else happens.
func (l Link) TearNext(n int) { control("fake_tear", l.from, l.to, uintptr(n)) }

// LoseAcks loses only the acknowledgements that go this way, so that the other
// direction's writes are done, and counted by their receiver, but seem lost.
func (l Link) LoseAcks(on bool) { control("fake_lose_acks", l.from, l.to, flag(on)) }

// Delay makes everything take that much longer; 0 ends it.
func (l Link) Delay(d time.Duration) { control("fake_delay", l.from, l.to, uintptr(d)) }

// Freeze holds what is in flight, and what follows, until Release or Discard.
// Senders retry meanwhile.
func (l Link) Freeze() { control("fake_freeze", l.from, l.to) }

// Release lets the network deliver what it held, and tells how much it was: the
// sender may be in error or gone by now. It has arrived when Release returns.
func (l Link) Release() int { return control("fake_release", l.from, l.to, 1) }

// Discard ends a freeze, and loses what was held.
func (l Link) Discard() int { return control("fake_release", l.from, l.to, 0) }

// InFlight counts the messages held or delayed.
func (l Link) InFlight() int { return control("fake_in_flight", l.from, l.to) }

// DropFrom loses what queue pairs send whose flow labels make this UDP source port, as a
// network does in which the way of that port is dead.
func (f *Fabric) DropFrom(port uint16, on bool) {
	control("fake_drop_from", uintptr(port), flag(on))
}

// Heal ends the faults of all links, whose messages in flight are lost, and
// those of Fail and FailSends. Ports and devices stay as they are.
func (f *Fabric) Heal() { control("fake_heal") }

func flag(b bool) uintptr {
	if b {
		return 1
	}
	return 0
}
