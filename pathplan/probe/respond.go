package probe

import (
	"context"
	"crypto/hmac"
	"crypto/rand"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
)

// A probe from end to end is a UDP packet to a Responder, which counts what came from each
// source port and answers with its counts of all ports of the session. So one answer, over
// whatever path back, tells what became of the probes on all paths there: loss is known of
// each direction by itself.
//
//	0 magic  8 session  16 nonce of the responder's  24 sequence  28 ports  32 pairs of port (2), count (4)
//
// A first packet has no nonce and gets one back: whoever forges a source address cannot
// make a responder count, nor send more bytes than it was sent.
const (
	magic    = "LKSTEPp1"
	head     = 32
	pair     = 6
	maxPorts = 64
	// Size is how long probes and answers are: like data that matters, below any MTU.
	Size = head + pair*maxPorts

	// Port is where responders listen: RoCEv2's, so that probes hash as its data does.
	Port = 4791

	lowDelay = 0x10

	sessions     = 1024 // that a responder keeps
	sessionIdle  = time.Minute
	answersBurst = 256
	answersRate  = 20000 // a second
)

// Responder answers probes. It keeps a bounded number of sessions; the idlest goes.
type Responder struct {
	conn     *net.UDPConn
	secret   [16]byte
	sessions map[session]*counts

	Dropped atomic.Uint64 // packets that are no probe, or too many
}

type session struct {
	from netip.Addr
	id   uint64
}

type counts struct {
	last  time.Time
	ports [maxPorts]struct {
		port  uint16
		count uint32
	}
	n int
}

// Listen opens a responder.
func Listen(addr netip.AddrPort) (*Responder, error) {
	conn, err := net.ListenUDP("udp4", net.UDPAddrFromAddrPort(addr))
	if err != nil {
		return nil, fmt.Errorf("path probes: listen at %s: %w", addr, err)
	}
	r := &Responder{conn: conn, sessions: map[session]*counts{}}
	_, _ = rand.Read(r.secret[:])
	return r, nil
}

// Addr is where it listens.
func (r *Responder) Addr() netip.AddrPort { return r.conn.LocalAddr().(*net.UDPAddr).AddrPort() }

// Run answers until ctx ends.
func (r *Responder) Run(ctx context.Context) error {
	defer context.AfterFunc(ctx, func() { r.conn.Close() })()
	defer r.conn.Close()
	var b [Size + 1]byte
	tokens, at := float64(answersBurst), time.Now()
	for {
		n, from, err := r.conn.ReadFromUDPAddrPort(b[:])
		if ctx.Err() != nil {
			return nil
		}
		if err != nil {
			if errors.Is(err, net.ErrClosed) {
				return err
			}
			continue // an ICMP error of an earlier answer
		}
		now := time.Now()
		tokens, at = min(answersBurst, tokens+now.Sub(at).Seconds()*answersRate), now
		if tokens < 1 || !r.take(b[:n], from, now) {
			r.Dropped.Add(1)
			continue
		}
		tokens--
		_, _ = r.conn.WriteToUDPAddrPort(b[:n], from)
	}
}

// take counts a probe and makes the answer of it, in place; false for what is none.
func (r *Responder) take(b []byte, from netip.AddrPort, now time.Time) bool {
	if len(b) != Size || string(b[:8]) != magic {
		return false
	}
	key := session{from.Addr().Unmap(), binary.LittleEndian.Uint64(b[8:])}
	nonce := r.nonce(key)
	known := binary.LittleEndian.Uint64(b[16:]) == nonce
	binary.LittleEndian.PutUint64(b[16:], nonce)
	binary.LittleEndian.PutUint32(b[28:], 0)
	clear(b[head:])
	if !known {
		return true
	}
	c := r.sessions[key]
	if c == nil {
		if len(r.sessions) >= sessions {
			r.evict(now)
		}
		c = &counts{}
		r.sessions[key] = c
	}
	c.last = now
	c.add(from.Port())
	binary.LittleEndian.PutUint32(b[28:], uint32(c.n))
	for i, p := range c.ports[:c.n] {
		binary.LittleEndian.PutUint16(b[head+pair*i:], p.port)
		binary.LittleEndian.PutUint32(b[head+pair*i+2:], p.count)
	}
	return true
}

func (c *counts) add(port uint16) {
	for i := range c.n {
		if c.ports[i].port == port {
			c.ports[i].count++
			return
		}
	}
	if c.n < maxPorts {
		c.ports[c.n].port, c.ports[c.n].count = port, 1
		c.n++
	}
}

// nonce is a session's, which only who receives at its address learns.
func (r *Responder) nonce(k session) uint64 {
	h := hmac.New(sha256.New, r.secret[:])
	a := k.from.As16()
	h.Write(a[:])
	h.Write(binary.LittleEndian.AppendUint64(nil, k.id))
	return binary.LittleEndian.Uint64(h.Sum(nil)) | 1
}

// evict forgets the idle sessions, or the idlest.
func (r *Responder) evict(now time.Time) {
	var oldest session
	var at time.Time
	for k, c := range r.sessions {
		if now.Sub(c.last) > sessionIdle {
			delete(r.sessions, k)
		} else if at.IsZero() || c.last.Before(at) {
			oldest, at = k, c.last
		}
	}
	if len(r.sessions) >= sessions {
		delete(r.sessions, oldest)
	}
}

// PingOptions say what to probe. Src, Dst and Ports are required.
type PingOptions struct {
	Src   netip.Addr
	Dst   netip.AddrPort // a Responder's
	Ports []uint16       // at most 64
	Count int            // probes from each port, 20
	Rate  int            // probes a second over all ports, 1000
	// Timeout of the last answers, 1 s: a host that is short of CPU loses nothing. Where
	// answers come, and none has told anything new for less than half of it, what is missing
	// is lost.
	Timeout time.Duration
	// TOS is the probes' class. In that of bulk data they would take a full queue for a bad
	// link; the default is IPTOS_LOWDELAY.
	TOS int
}

// Ping is what became of the probes from one source port. Answered: something came from the
// responder since, so that Lost is known; else neither the path there nor one back works.
type Ping struct {
	Port       uint16
	Sent, Lost int
	Answered   bool
	RTT        time.Duration // the least of its answers, 0 for none
}

// PingPorts probes from end to end, from each of the ports in turn.
func PingPorts(ctx context.Context, o PingOptions) ([]Ping, error) {
	if o.Count == 0 {
		o.Count = 20
	}
	if o.Rate == 0 {
		o.Rate = 1000
	}
	if o.Timeout == 0 {
		o.Timeout = time.Second
	}
	if o.TOS == 0 {
		o.TOS = lowDelay
	}
	if len(o.Ports) == 0 || len(o.Ports) > maxPorts || !o.Src.Is4() || !o.Dst.Addr().Is4() || o.Count < 1 || o.Rate < 1 {
		return nil, fmt.Errorf("probe %s from %s: %d ports, %d probes: want IPv4 and 1 to %d ports", o.Dst, o.Src, len(o.Ports), o.Count, maxPorts)
	}
	p := &pinger{o: o, pings: make([]Ping, len(o.Ports)), sent: make([][]time.Time, len(o.Ports))}
	defer p.close()
	var id [8]byte
	_, _ = rand.Read(id[:])
	p.id = binary.LittleEndian.Uint64(id[:])
	return p.run(ctx)
}

type pinger struct {
	o     PingOptions
	id    uint64
	nonce uint64 // 0 until the responder has told
	fds   []int
	polls []unix.PollFd
	pings []Ping
	sent  [][]time.Time // by port and sequence
	seen  []uint32      // counts at the responder, by port
	news  int           // how often one grew
}

func (p *pinger) close() {
	for _, fd := range p.fds {
		if fd >= 0 {
			unix.Close(fd)
		}
	}
}

func (p *pinger) run(ctx context.Context) ([]Ping, error) {
	for i, port := range p.o.Ports {
		p.pings[i].Port = port
		fd, err := p.open(port)
		p.fds = append(p.fds, fd)
		p.polls = append(p.polls, unix.PollFd{Fd: int32(fd), Events: unix.POLLIN})
		if err != nil {
			continue // taken: it sends nothing
		}
	}
	p.seen = make([]uint32, len(p.fds))
	pace := time.Second / time.Duration(p.o.Rate)
	// The nonce first, over any path.
	for try := 0; try < 3 && p.nonce == 0; try++ {
		for i := range p.fds {
			p.send(i, false)
			p.listen(ctx, pace)
		}
		for end := time.Now().Add(p.o.Timeout); p.nonce == 0 && time.Now().Before(end) && ctx.Err() == nil; {
			p.listen(ctx, 5*time.Millisecond)
		}
	}
	if p.nonce == 0 {
		for i := range p.pings {
			if p.fds[i] >= 0 {
				p.pings[i].Sent, p.pings[i].Lost = 3, 3
			}
		}
		return p.pings, ctx.Err()
	}
	began := time.Now()
	for k := range p.o.Count {
		for i := range p.fds {
			p.send(i, true)
			p.listen(ctx, time.Until(began.Add(time.Duration(k*len(p.fds)+i+1)*pace)))
		}
	}
	// Looks are counted, not time: who is short of CPU looks less often.
	const look = 5 * time.Millisecond
	for end, quiet := time.Now().Add(p.o.Timeout), time.Duration(0); time.Now().Before(end) && ctx.Err() == nil && p.missing() && quiet < p.o.Timeout*2/5; {
		before := p.news
		if p.listen(ctx, look); p.news > before {
			quiet = 0
		} else {
			quiet += look
		}
	}
	for i := range p.pings {
		g := &p.pings[i]
		g.Answered = true
		g.Lost = max(0, g.Sent-int(p.seen[i]))
	}
	return p.pings, ctx.Err()
}

func (p *pinger) missing() bool {
	for i := range p.pings {
		if int(p.seen[i]) < p.pings[i].Sent {
			return true
		}
	}
	return false
}

func (p *pinger) open(port uint16) (int, error) {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return -1, err
	}
	err = errors.Join(
		unix.SetsockoptInt(fd, unix.IPPROTO_IP, unix.IP_TOS, p.o.TOS),
		unix.Bind(fd, &unix.SockaddrInet4{Port: int(port), Addr: p.o.Src.As4()}),
		unix.Connect(fd, &unix.SockaddrInet4{Port: int(p.o.Dst.Port()), Addr: p.o.Dst.Addr().As4()}))
	if err != nil {
		unix.Close(fd)
		return -1, err
	}
	return fd, nil
}

func (p *pinger) send(i int, counted bool) {
	if p.fds[i] < 0 {
		return
	}
	var b [Size]byte
	copy(b[:], magic)
	binary.LittleEndian.PutUint64(b[8:], p.id)
	if counted {
		binary.LittleEndian.PutUint64(b[16:], p.nonce)
		binary.LittleEndian.PutUint32(b[24:], uint32(len(p.sent[i])))
		p.sent[i] = append(p.sent[i], time.Now())
		p.pings[i].Sent++
	}
	_, _ = unix.Write(p.fds[i], b[:])
}

// listen takes in answers for as long as d.
func (p *pinger) listen(ctx context.Context, d time.Duration) {
	for end := time.Now().Add(d); ctx.Err() == nil; {
		left := time.Until(end)
		if left < 0 {
			return
		}
		ts := unix.NsecToTimespec(int64(left))
		n, err := unix.Ppoll(p.polls, &ts, nil)
		if n == 0 || err != nil && !errors.Is(err, unix.EINTR) {
			return
		}
		for i, q := range p.polls {
			if q.Revents != 0 {
				p.hear(i)
			}
		}
	}
}

func (p *pinger) hear(i int) {
	var b [Size + 1]byte
	if n, err := unix.Read(p.fds[i], b[:]); err == nil {
		p.take(i, b[:n])
	}
}

// take takes an answer in.
func (p *pinger) take(i int, b []byte) {
	if len(b) != Size || string(b[:8]) != magic || binary.LittleEndian.Uint64(b[8:]) != p.id {
		return
	}
	if p.nonce = binary.LittleEndian.Uint64(b[16:]); p.nonce == 0 {
		return
	}
	ports := binary.LittleEndian.Uint32(b[28:])
	if ports > maxPorts {
		return
	}
	if seq := binary.LittleEndian.Uint32(b[24:]); ports > 0 && int(seq) < len(p.sent[i]) {
		if rtt := time.Since(p.sent[i][seq]); p.pings[i].RTT == 0 || rtt < p.pings[i].RTT {
			p.pings[i].RTT = rtt
		}
	}
	for k := range int(ports) {
		port, count := binary.LittleEndian.Uint16(b[head+pair*k:]), binary.LittleEndian.Uint32(b[head+pair*k+2:])
		for j := range p.pings {
			if p.pings[j].Port == port {
				if now := min(count, uint32(p.pings[j].Sent)); now > p.seen[j] {
					p.seen[j] = now
					p.news++
				}
			}
		}
	}
}
