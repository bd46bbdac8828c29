package wire

import (
	"bufio"
	"context"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"strconv"
	"strings"
	"sync"

	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/peer"
)

// Loopback returns the credentials of either end without certificates: a server
// lets in processes of its own user and of root on this host, and a client believes
// such a server only, by the kernel's word on who owns the other end of a connection.
// Others on the host could otherwise report, or answer, what they like.
func Loopback() credentials.TransportCredentials {
	return loopback{insecure.NewCredentials()}
}

// loopback is plain text after a look at who is there.
type loopback struct {
	credentials.TransportCredentials
}

// owned is what is known of a peer by its socket's owner.
type owned struct {
	credentials.AuthInfo
	check func() error
}

func (l loopback) ServerHandshake(c net.Conn) (net.Conn, credentials.AuthInfo, error) {
	check := func() error { return sameUser(c.LocalAddr(), c.RemoteAddr()) }
	if err := check(); err != nil {
		return nil, nil, err
	}
	conn, info, err := l.TransportCredentials.ServerHandshake(c)
	return conn, owned{info, check}, err
}

// ClientHandshake returns a connection from which nothing can be read before the
// other end's owner is known. gRPC sends no call before it has read the server's preface.
func (l loopback) ClientHandshake(ctx context.Context, authority string, c net.Conn) (net.Conn, credentials.AuthInfo, error) {
	here, there, err := addrPorts(c.LocalAddr(), c.RemoteAddr())
	if err != nil {
		return nil, nil, err
	}
	if there.Addr().IsLoopback() || there.Addr() == here.Addr() {
		c = &suspicious{Conn: c}
	}
	return l.TransportCredentials.ClientHandshake(ctx, authority, c)
}

// suspicious looks at the other end's owner when the first bytes come from it: a
// connection that nobody has accepted yet has none.
type suspicious struct {
	net.Conn
	once sync.Once
	err  error
}

func (s *suspicious) Read(b []byte) (int, error) {
	n, err := s.Conn.Read(b)
	if n > 0 {
		s.once.Do(func() { s.err = sameUser(s.LocalAddr(), s.RemoteAddr()) })
		if s.err != nil {
			return 0, s.err
		}
	}
	return n, err
}

// PeerPresent returns an error when the peer of an RPC was let in as the owner of
// its socket, and has that socket no more.
func PeerPresent(ctx context.Context) error {
	if p, ok := peer.FromContext(ctx); ok {
		if o, ok := p.AuthInfo.(owned); ok {
			return o.check()
		}
	}
	return nil
}

func (l loopback) Clone() credentials.TransportCredentials {
	return loopback{l.TransportCredentials.Clone()}
}

func sameUser(local, remote net.Addr) error {
	here, there, err := addrPorts(local, remote)
	if err != nil {
		return err
	}
	if !there.Addr().IsLoopback() && there.Addr() != here.Addr() {
		return fmt.Errorf("connection with %s: not of this host, and there are no certificates", remote)
	}
	uid, err := owner(there, here)
	switch {
	case err != nil:
		return fmt.Errorf("connection with %s: %w", remote, err)
	case uid != 0 && uid != os.Geteuid():
		return fmt.Errorf("connection with %s: of user %d, and without certificates only root and user %d are believed", remote, uid, os.Geteuid())
	}
	return nil
}

func addrPorts(local, remote net.Addr) (here, there netip.AddrPort, err error) {
	l, okLocal := local.(*net.TCPAddr)
	r, okRemote := remote.(*net.TCPAddr)
	if !okLocal || !okRemote {
		return here, there, fmt.Errorf("connection with %s: not TCP", remote)
	}
	unmap := func(a netip.AddrPort) netip.AddrPort { return netip.AddrPortFrom(a.Addr().Unmap(), a.Port()) }
	return unmap(l.AddrPort()), unmap(r.AddrPort()), nil
}

// maxSockets bounds how much of the kernel's table of sockets is read.
const maxSockets = 64 << 20

// owner returns the user of the socket with these ends, as the kernel tells it.
func owner(local, remote netip.AddrPort) (uid int, err error) {
	if uid, err := diagOwner(local, remote); !errors.Is(err, errNoDiag) {
		return uid, err
	}
	return procOwner(local, remote)
}

// procOwner is owner by the kernel's tables of TCP sockets (proc(5), /proc/net/tcp).
func procOwner(local, remote netip.AddrPort) (uid int, err error) {
	for _, table := range []string{"/proc/self/net/tcp", "/proc/self/net/tcp6"} {
		f, err := os.Open(table)
		if errors.Is(err, os.ErrNotExist) {
			continue // a kernel without IPv6
		}
		if err != nil {
			return 0, fmt.Errorf("whose it is: %w", err)
		}
		uid, found, err := ownerIn(io.LimitReader(f, maxSockets), local, remote)
		f.Close()
		if err != nil {
			return 0, fmt.Errorf("whose it is: %s: %w", table, err)
		}
		if found {
			return uid, nil
		}
	}
	return 0, errors.New("the kernel's tables do not say whose it is")
}

// established is TCP_ESTABLISHED in the kernel's tables.
const established = "01"

// errNobody: the kernel prints user 0 for a socket whose process has closed it, or
// that no process has accepted. Such a socket is nobody's, not root's.
var errNobody = errors.New("no process holds the other end any more: whose it was cannot be told")

func ownerIn(table io.Reader, local, remote netip.AddrPort) (uid int, found bool, err error) {
	lines := bufio.NewScanner(table)
	lines.Scan() // the heading
	for lines.Scan() {
		f := strings.Fields(lines.Text())
		if len(f) < 10 {
			continue
		}
		l, errLocal := kernelAddr(f[1])
		r, errRemote := kernelAddr(f[2])
		if errLocal != nil || errRemote != nil || l != local || r != remote {
			continue
		}
		if f[3] != established || f[9] == "0" {
			return 0, false, errNobody
		}
		uid, err := strconv.Atoi(f[7])
		return uid, err == nil, err
	}
	return 0, false, lines.Err()
}

// kernelAddr reads an address as the kernel prints it: words of 32 bits in the
// host's byte order, in hexadecimal, a colon and the port.
func kernelAddr(s string) (netip.AddrPort, error) {
	addr, port, _ := strings.Cut(s, ":")
	words, err := hex.DecodeString(addr)
	if err != nil {
		return netip.AddrPort{}, err
	}
	for i := 0; i+4 <= len(words); i += 4 {
		binary.BigEndian.PutUint32(words[i:], binary.NativeEndian.Uint32(words[i:]))
	}
	ip, ok := netip.AddrFromSlice(words)
	n, err := strconv.ParseUint(port, 16, 16)
	if err != nil || !ok {
		return netip.AddrPort{}, fmt.Errorf("no address: %q", s)
	}
	return netip.AddrPortFrom(ip.Unmap(), uint16(n)), nil
}
