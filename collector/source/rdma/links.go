package rdma

import (
	"encoding/binary"
	"fmt"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"
)

// announcements tells of changes of interfaces.
type announcements interface {
	open() error
	// receive waits for some. After close it returns an error.
	receive() ([]seenLink, error)
	close()
}

// rtnetlink listens to the kernel, in the network namespace of the process.
type rtnetlink struct {
	conn *netlink.Conn
}

// receiveBuffer holds some thousand announcements: a node that starts
// many containers makes them by the hundred.
const receiveBuffer = 1 << 20

func (l *rtnetlink) open() error {
	conn, err := netlink.Dial(unix.NETLINK_ROUTE, &netlink.Config{Groups: unix.RTMGRP_LINK})
	if err != nil {
		return fmt.Errorf("listen for changes of links: %w", err)
	}
	if err := conn.SetReadBuffer(receiveBuffer); err != nil {
		conn.Close()
		return fmt.Errorf("listen for changes of links: buffer of %d bytes: %w", receiveBuffer, err)
	}
	l.conn = conn
	return nil
}

func (l *rtnetlink) receive() ([]seenLink, error) {
	messages, err := l.conn.Receive()
	if err != nil {
		return nil, err
	}
	var out []seenLink
	for _, m := range messages {
		if link, ok := parseLink(m); ok {
			out = append(out, link)
		}
	}
	return out, nil
}

func (l *rtnetlink) close() {
	if l.conn != nil {
		_ = l.conn.Close() // makes receive return
	}
}

// parseLink reads RTM_NEWLINK and RTM_DELLINK; false for others and for what is malformed.
func parseLink(m netlink.Message) (seenLink, bool) {
	var l seenLink
	if m.Header.Type != unix.RTM_NEWLINK && m.Header.Type != unix.RTM_DELLINK || len(m.Data) < unix.SizeofIfInfomsg {
		return l, false
	}
	// struct ifinfomsg: family, pad, type (2), index (4), flags (4), change (4)
	index, flags := binary.NativeEndian.Uint32(m.Data[4:]), binary.NativeEndian.Uint32(m.Data[8:])
	const up = unix.IFF_UP | unix.IFF_LOWER_UP
	l.index = int(int32(index))
	l.up = m.Header.Type == unix.RTM_NEWLINK && flags&up == up
	attrs, err := netlink.NewAttributeDecoder(m.Data[unix.SizeofIfInfomsg:])
	if err != nil {
		return l, false
	}
	for attrs.Next() {
		switch attrs.Type() {
		case unix.IFLA_IFNAME:
			l.name = attrs.String()
		case unix.IFLA_CARRIER_DOWN_COUNT:
			n := uint64(attrs.Uint32())
			l.downs = &n
		}
	}
	return l, attrs.Err() == nil && l.name != ""
}
