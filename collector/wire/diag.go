package wire

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"sync/atomic"

	"golang.org/x/sys/unix"
)

// The kernel tells one socket's owner over netlink (sock_diag(7)). Its tables in /proc are read where it does not:
// they have a line for each socket of the host, so a flood makes each reading of them dear.

const (
	diagReply = 72 // struct inet_diag_msg
	diagID    = 48 // struct inet_diag_sockid
)

// diagnosed says that the kernel has answered once: then a socket that it does not find is none.
var diagnosed atomic.Bool

// errNoDiag: the kernel does not tell, by this way.
var errNoDiag = errors.New("no sock_diag")

// diagOwner is the user of the socket with these ends.
func diagOwner(local, remote netip.AddrPort) (uid int, err error) {
	s, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.NETLINK_SOCK_DIAG)
	if err != nil {
		return 0, errNoDiag
	}
	defer unix.Close(s)
	if err := unix.SetsockoptTimeval(s, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &unix.Timeval{Sec: 1}); err != nil {
		return 0, errNoDiag
	}
	if err := unix.Sendto(s, diagRequest(local, remote), 0, &unix.SockaddrNetlink{Family: unix.AF_NETLINK}); err != nil {
		return 0, errNoDiag
	}
	b := make([]byte, 4096)
	n, from, err := unix.Recvfrom(s, b, 0)
	for errors.Is(err, unix.EINTR) {
		n, from, err = unix.Recvfrom(s, b, 0)
	}
	if kernel, ok := from.(*unix.SockaddrNetlink); err != nil || !ok || kernel.Pid != 0 {
		return 0, errNoDiag
	}
	return diagAnswer(b[:n], local, remote)
}

// diagRequest asks for one socket: struct nlmsghdr, struct inet_diag_req_v2.
func diagRequest(local, remote netip.AddrPort) []byte {
	family := byte(unix.AF_INET)
	if local.Addr().Is6() {
		family = unix.AF_INET6
	}
	h := binary.NativeEndian
	b := h.AppendUint32(nil, 16+8+diagID)
	b = h.AppendUint16(b, unix.SOCK_DIAG_BY_FAMILY)
	b = h.AppendUint16(b, unix.NLM_F_REQUEST)
	b = append(b, make([]byte, 8)...) // sequence, sender
	b = append(b, family, unix.IPPROTO_TCP, 0, 0)
	b = h.AppendUint32(b, 1<<32-1) // in whatever state
	b = binary.BigEndian.AppendUint16(b, local.Port())
	b = binary.BigEndian.AppendUint16(b, remote.Port())
	for _, a := range []netip.Addr{local.Addr(), remote.Addr()} {
		var words [16]byte
		copy(words[:], a.AsSlice())
		b = append(b, words[:]...)
	}
	b = h.AppendUint32(b, 0)          // whatever interface
	return h.AppendUint64(b, 1<<64-1) // no cookie
}

// diagAnswer reads what the kernel says of the socket.
func diagAnswer(b []byte, local, remote netip.AddrPort) (uid int, err error) {
	h := binary.NativeEndian
	if len(b) < 20 {
		return 0, errNoDiag
	}
	if h.Uint16(b[4:]) != unix.SOCK_DIAG_BY_FAMILY || len(b) < 16+diagReply {
		if h.Uint16(b[4:]) == unix.NLMSG_ERROR && unix.Errno(-int32(h.Uint32(b[16:]))) == unix.ENOENT && diagnosed.Load() {
			return 0, errNobody
		}
		return 0, errNoDiag
	}
	diagnosed.Store(true)
	m := b[16:]
	end := func(port, addr int) netip.AddrPort {
		n := 4
		if m[0] == unix.AF_INET6 {
			n = 16
		}
		a, _ := netip.AddrFromSlice(m[addr : addr+n])
		return netip.AddrPortFrom(a.Unmap(), binary.BigEndian.Uint16(m[port:]))
	}
	const established = 1
	if m[1] != established || h.Uint32(m[68:]) == 0 || end(4, 8) != local || end(6, 24) != remote { // its listener, say
		return 0, errNobody
	}
	uid = int(h.Uint32(m[64:]))
	if uid < 0 {
		return 0, fmt.Errorf("user %d", uid)
	}
	return uid, nil
}
