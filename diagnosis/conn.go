package diagnosis

import (
	"encoding/binary"
	"fmt"
	"net/netip"
	"strings"

	"github.com/lockstep-ccl/lockstep/record"
)

// Address is a GID, or an IP address as one (IPv4-mapped); the zero value is none.
type Address struct{ High, Low uint64 }

// ParseAddress reads what String says; none of what is no address.
func ParseAddress(s string) Address {
	a, err := netip.ParseAddr(s)
	if err != nil {
		return Address{}
	}
	b := a.As16()
	return Address{binary.BigEndian.Uint64(b[:]), binary.BigEndian.Uint64(b[8:])}
}

// String is the address in words, "" for none.
func (a Address) String() string {
	var b [16]byte
	binary.BigEndian.PutUint64(b[:], a.High)
	binary.BigEndian.PutUint64(b[8:], a.Low)
	return record.AddressText(b)
}

// NIC is the device of the source's port and the port's number; "" where the connection has none.
func (c *Conn) NIC() (device string, port int) {
	if !c.Transport.QueuePair() {
		return "", 0
	}
	return record.NICOf(c.Name)
}

// String tells a connection from all others: transport, both ends' ports or addresses, and for
// RDMA both queue pairs, the rail and the port's GID.
func (c *Conn) String() string {
	name := strings.TrimPrefix(c.Name, c.Transport.String()+" ")
	s := strings.TrimSpace(fmt.Sprintf("%s %s", c.Transport, name))
	if c.QueuePair == 0 {
		return s
	}
	s += fmt.Sprintf(" qp %d", c.QueuePair)
	if c.PeerQueuePair != 0 {
		s += fmt.Sprintf("->%d", c.PeerQueuePair)
	}
	if c.Rail > 0 {
		s += fmt.Sprintf(" rail %d", c.Rail)
	}
	if gid := c.Address.String(); gid != "" {
		s += " gid " + gid
	}
	return s
}
