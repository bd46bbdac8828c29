package probe

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"time"

	"golang.org/x/sys/unix"
)

// Proto is what a probe is made of: switches hash it.
type Proto uint8

// TCP probes are connection attempts that end at a switch; UDP ones are packets.
const (
	TCP Proto = iota
	UDP
)

// MaxTTL bounds the hops that a trace asks for.
const MaxTTL = 8

// batch bounds the sockets that a trace has open.
const batch = 64

// TraceOptions say what to trace. Src, Dst and Ports are required.
type TraceOptions struct {
	Proto Proto
	Src   netip.Addr
	Dst   netip.AddrPort
	Ports []uint16 // source ports
	// FirstHop and LastHop are the hops asked for, 1 to MaxTTL; 2 and 3: the spine, and
	// the destination's leaf.
	FirstHop, LastHop int
	Rate              int           // probes a second, 2000
	Timeout           time.Duration // of one answer, 200 ms
	Tries             int           // for an answer, 2
}

// Hops are the addresses that answered, by hop from FirstHop; invalid where none did.
type Hops []netip.Addr

// Trace returns the hops of each source port, by its place in Ports. A port that is taken
// here has none. An error is the context's, or of options that cannot be.
func Trace(ctx context.Context, o TraceOptions) ([]Hops, error) {
	if o.FirstHop == 0 {
		o.FirstHop, o.LastHop = 2, 3
	}
	if o.Rate == 0 {
		o.Rate = 2000
	}
	if o.Timeout == 0 {
		o.Timeout = 200 * time.Millisecond
	}
	if o.Tries == 0 {
		o.Tries = 2
	}
	if !o.Src.Is4() || !o.Dst.Addr().Is4() || o.FirstHop < 1 || o.LastHop < o.FirstHop || o.LastHop > MaxTTL || o.Rate < 0 {
		return nil, fmt.Errorf("trace from %s to %s, hops %d to %d: want IPv4 and hops 1 to %d", o.Src, o.Dst, o.FirstHop, o.LastHop, MaxTTL)
	}
	hops := make([]Hops, len(o.Ports))
	for i := range hops {
		hops[i] = make(Hops, o.LastHop-o.FirstHop+1)
	}
	pace := time.Second / time.Duration(o.Rate)
	for ttl := o.FirstHop; ttl <= o.LastHop; ttl++ {
		for range o.Tries {
			var left []int
			for i := range hops {
				if !hops[i][ttl-o.FirstHop].IsValid() {
					left = append(left, i)
				}
			}
			for len(left) > 0 {
				n := min(len(left), batch)
				if err := o.round(ctx, ttl, left[:n], pace, hops); err != nil {
					return hops, err
				}
				left = left[n:]
			}
		}
	}
	return hops, nil
}

// round sends one probe for each port of a batch and takes in what answers.
func (o *TraceOptions) round(ctx context.Context, ttl int, which []int, pace time.Duration, hops []Hops) error {
	var polls []unix.PollFd
	var of []int
	defer func() {
		for _, p := range polls {
			shut(int(p.Fd), o.Proto)
		}
	}()
	began := time.Now()
	for k, i := range which {
		if d := time.Until(began.Add(time.Duration(k) * pace)); d > 0 {
			t := time.NewTimer(d)
			select {
			case <-ctx.Done():
				t.Stop()
				return ctx.Err()
			case <-t.C:
			}
		}
		fd, err := o.send(o.Ports[i], ttl)
		if err != nil {
			continue // the port is somebody else's
		}
		polls, of = append(polls, unix.PollFd{Fd: int32(fd)}), append(of, i)
	}
	open := len(polls)
	answered := make([]bool, open)
	for deadline := time.Now().Add(o.Timeout); open > 0; {
		left := time.Until(deadline)
		if left <= 0 || ctx.Err() != nil {
			break
		}
		list := make([]unix.PollFd, 0, open)
		var at []int
		for k, p := range polls {
			if !answered[k] {
				list, at = append(list, p), append(at, k)
			}
		}
		if n, err := unix.Poll(list, int(min(left, 20*time.Millisecond)/time.Millisecond)+1); n <= 0 {
			if err != nil && !errors.Is(err, unix.EINTR) {
				return fmt.Errorf("trace: poll: %w", err)
			}
			continue
		}
		for j, p := range list {
			if p.Revents == 0 {
				continue
			}
			k := at[j]
			answered[k] = true
			open--
			if from, ok := offender(int(p.Fd)); ok {
				hops[of[k]][ttl-o.FirstHop] = from
			}
		}
	}
	return ctx.Err()
}

// send opens a probe's socket and sends it.
func (o *TraceOptions) send(port uint16, ttl int) (fd int, err error) {
	kind := unix.SOCK_STREAM
	if o.Proto == UDP {
		kind = unix.SOCK_DGRAM
	}
	if fd, err = unix.Socket(unix.AF_INET, kind|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0); err != nil {
		return -1, err
	}
	defer func() {
		if err != nil {
			shut(fd, o.Proto)
		}
	}()
	err = errors.Join(
		unix.SetsockoptInt(fd, unix.IPPROTO_IP, unix.IP_RECVERR, 1),
		unix.SetsockoptInt(fd, unix.IPPROTO_IP, unix.IP_TOS, lowDelay),
		unix.SetsockoptInt(fd, unix.IPPROTO_IP, unix.IP_TTL, ttl))
	if o.Proto == TCP {
		err = errors.Join(err, unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_REUSEADDR, 1), unix.SetsockoptInt(fd, unix.IPPROTO_TCP, unix.TCP_SYNCNT, 1))
	}
	if err != nil {
		return fd, err
	}
	if err = unix.Bind(fd, &unix.SockaddrInet4{Port: int(port), Addr: o.Src.As4()}); err != nil {
		return fd, err
	}
	if err = unix.Connect(fd, &unix.SockaddrInet4{Port: int(o.Dst.Port()), Addr: o.Dst.Addr().As4()}); errors.Is(err, unix.EINPROGRESS) {
		err = nil
	}
	if err == nil && o.Proto == UDP {
		_, err = unix.Write(fd, []byte("lockstep path probe"))
	}
	return fd, err
}

// shut ends a probe's socket without a trace: its port is wanted.
func shut(fd int, p Proto) {
	if p == TCP {
		_ = unix.SetsockoptLinger(fd, unix.SOL_SOCKET, unix.SO_LINGER, &unix.Linger{Onoff: 1})
	}
	unix.Close(fd)
}

// offender is the switch at which a probe's TTL ran out, by the socket's error queue.
func offender(fd int) (netip.Addr, bool) {
	var buf, oob [512]byte
	_, n, _, _, err := unix.Recvmsg(fd, buf[:], oob[:], unix.MSG_ERRQUEUE)
	if err != nil {
		return netip.Addr{}, false
	}
	return parseOffender(oob[:n])
}

// parseOffender reads a sock_extended_err (linux/errqueue.h) and the address behind it.
func parseOffender(oob []byte) (netip.Addr, bool) {
	const timeExceeded, size = 11, 16
	msgs, err := unix.ParseSocketControlMessage(oob)
	if err != nil {
		return netip.Addr{}, false
	}
	for _, m := range msgs {
		d := m.Data
		if m.Header.Level != unix.IPPROTO_IP || m.Header.Type != unix.IP_RECVERR || len(d) < size+8 {
			continue
		}
		if d[4] == unix.SO_EE_ORIGIN_ICMP && d[5] == timeExceeded && binary.NativeEndian.Uint16(d[size:]) == unix.AF_INET {
			return netip.AddrFrom4([4]byte(d[size+4 : size+8])), true
		}
	}
	return netip.Addr{}, false
}
