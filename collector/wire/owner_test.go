package wire

import (
	"errors"
	"net"
	"net/netip"
	"os"
	"strings"
	"testing"
)

// The kernel prints user 0 for sockets that no process holds: that is not root.
func TestASocketWithoutAnOwnerIsNotRoots(t *testing.T) {
	local, remote := netip.MustParseAddrPort("127.0.0.1:1"), netip.MustParseAddrPort("127.0.0.1:2")
	for row, want := range map[string]error{
		"0: 0100007F:0001 0100007F:0002 01 0:0 00:0 0 0 0 77 1": nil,
		"0: 0100007F:0001 0100007F:0002 01 0:0 00:0 0 0 0 0 1":  errNobody, // not accepted
		"0: 0100007F:0001 0100007F:0002 04 0:0 00:0 0 0 0 0 1":  errNobody, // FIN_WAIT1
		"0: 0100007F:0001 0100007F:0002 06 0:0 03:0 0 0 0 0 3":  errNobody, // TIME_WAIT
	} {
		_, found, err := ownerIn(strings.NewReader("heading\n"+row+"\n"), local, remote)
		if !errors.Is(err, want) || found != (want == nil) {
			t.Errorf("%s: found %v, %v, want %v", row, found, err, want)
		}
	}
}

// TestOwners: both ways of asking the kernel say the same of a socket, and that one that was not accepted, has
// gone, or never was is nobody's.
func TestOwners(t *testing.T) {
	for _, at := range []string{"127.0.0.1:0", "[::1]:0", ":0"} {
		ln, err := net.Listen("tcp", at)
		if err != nil {
			continue // no IPv6
		}
		defer ln.Close()
		to := ln.Addr().(*net.TCPAddr)
		if to.IP.IsUnspecified() {
			to.IP = net.IPv4(127, 0, 0, 1) // a socket of IPv6 with an address of IPv4
		}
		c, err := net.DialTCP("tcp", nil, to)
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		here, there, err := addrPorts(c.LocalAddr(), c.RemoteAddr())
		if err != nil {
			t.Fatal(err)
		}
		ask := func(what string, local, remote netip.AddrPort, want error) {
			t.Helper()
			uid, err := diagOwner(local, remote)
			if errors.Is(err, errNoDiag) && diagnosed.Load() {
				t.Errorf("%s, %s: %v", at, what, err)
			} else if errors.Is(err, errNoDiag) {
				t.Skip("this kernel has no sock_diag")
			}
			if !errors.Is(err, want) || want == nil && (err != nil || uid != os.Geteuid()) {
				t.Errorf("%s, %s: user %d, %v", at, what, uid, err)
			}
			if was, err := procOwner(local, remote); (err == nil) != (want == nil) || want == nil && was != uid {
				t.Errorf("%s, %s: by /proc: user %d, %v", at, what, was, err)
			}
		}
		ask("the dialler's", here, there, nil)
		ask("not accepted", there, here, errNobody)
		s, err := ln.Accept()
		if err != nil {
			t.Fatal(err)
		}
		ask("accepted", there, here, nil)
		ask("no such port", netip.AddrPortFrom(here.Addr(), 1), there, errNobody)
		ask("only a listener", there, netip.AddrPortFrom(here.Addr(), 1), errNobody)
		s.Close()
		ask("closed", there, here, errNobody)
	}
}

// FuzzDiagAnswer: whatever is said, nothing is read beyond it.
func FuzzDiagAnswer(f *testing.F) {
	local, remote := netip.MustParseAddrPort("127.0.0.1:1"), netip.MustParseAddrPort("127.0.0.1:2")
	f.Add(make([]byte, 16+diagReply))
	f.Add(diagRequest(local, remote))
	f.Fuzz(func(t *testing.T, b []byte) { _, _ = diagAnswer(b, local, remote) })
}

// BenchmarkOwner is what a look at a socket's owner costs among 8,000 connections.
func BenchmarkOwner(b *testing.B) {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		b.Fatal(err)
	}
	defer ln.Close()
	var c net.Conn
	for range 8000 {
		if c, err = net.Dial("tcp", ln.Addr().String()); err != nil {
			b.Fatal(err)
		}
		defer c.Close()
		s, err := ln.Accept()
		if err != nil {
			b.Fatal(err)
		}
		defer s.Close()
	}
	here, there, err := addrPorts(c.LocalAddr(), c.RemoteAddr())
	if err != nil {
		b.Fatal(err)
	}
	for name, owner := range map[string]func(local, remote netip.AddrPort) (int, error){"diag": diagOwner, "proc": procOwner} {
		b.Run(name, func(b *testing.B) {
			for b.Loop() {
				if _, err := owner(here, there); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}
