// Package ports finds addresses for processes that are about to be started.
package ports

import (
	"errors"
	"fmt"
	"net"

	"golang.org/x/sys/unix"
)

// Held are TCP addresses that nobody finds free, and that whoever knows them can listen on:
// a listener that is closed again gives its port to whoever asks for any next.
type Held struct {
	Addrs   []string
	sockets []int
}

// Hold finds n addresses of a host of this machine. Processes that set SO_REUSEADDR, as Go's
// do, can listen on them until Close and after it.
func Hold(host string, n int) (*Held, error) {
	at, err := net.ResolveTCPAddr("tcp", net.JoinHostPort(host, "0"))
	if err != nil {
		return nil, fmt.Errorf("find free ports: %w", err)
	}
	h := &Held{}
	for range n {
		if err := h.hold(at); err != nil {
			return nil, errors.Join(fmt.Errorf("find a free port of %s: %w", host, err), h.Close())
		}
	}
	return h, nil
}

// hold binds a socket that never listens. With SO_REUSEADDR on both sides a listener may have
// the same address, and the kernel offers it to nobody who takes any.
func (h *Held) hold(at *net.TCPAddr) error {
	var to unix.Sockaddr = &unix.SockaddrInet4{}
	family := unix.AF_INET
	if ip := at.IP.To4(); ip != nil {
		to = &unix.SockaddrInet4{Addr: [4]byte(ip)}
	} else if ip := at.IP.To16(); ip != nil {
		six := &unix.SockaddrInet6{Addr: [16]byte(ip)}
		if at.Zone != "" {
			link, err := net.InterfaceByName(at.Zone)
			if err != nil {
				return err
			}
			six.ZoneId = uint32(link.Index)
		}
		family, to = unix.AF_INET6, six
	}
	s, err := unix.Socket(family, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return err
	}
	h.sockets = append(h.sockets, s)
	if err := unix.SetsockoptInt(s, unix.SOL_SOCKET, unix.SO_REUSEADDR, 1); err != nil {
		return err
	}
	if err := unix.Bind(s, to); err != nil {
		return err
	}
	got, err := unix.Getsockname(s)
	if err != nil {
		return err
	}
	is := *at
	switch a := got.(type) {
	case *unix.SockaddrInet4:
		is.Port = a.Port
	case *unix.SockaddrInet6:
		is.Port = a.Port
	}
	h.Addrs = append(h.Addrs, is.String())
	return nil
}

// Close gives the addresses up. It may be called again, and of nil.
func (h *Held) Close() error {
	if h == nil {
		return nil
	}
	var err error
	for _, s := range h.sockets {
		err = errors.Join(err, unix.Close(s))
	}
	h.sockets = nil
	return err
}
