package main

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"os"
	"runtime"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
)

// wire joins network namespaces: each has a TUN device, whose packets go through here, and
// are dropped, delayed and slowed by rules. That needs neither netem nor classifiers in the
// kernel, and says exactly what was done to whose packets. Both ends are the kernel's own TCP.
type wire struct {
	ports   []*port
	byAddr  map[netip.Addr]*port
	rules   atomic.Pointer[ruleset]
	mu      sync.Mutex
	traffic map[[2]int]uint64      // bytes by ports
	queues  map[[2]int]chan packet // of what is delayed
	depart  map[[2]int]time.Time   // when a slowed path is free
	done    chan struct{}
	dropped atomic.Uint64
	readers sync.WaitGroup
}

// port is one namespace's.
type port struct {
	index int
	node  int // -1: the hub, which is on none
	addr  netip.Addr
	netns *os.File
	tun   *os.File
}

// rule is what is done to packets. The zero rule is nothing.
type rule struct {
	drop  float64
	delay time.Duration
	rate  float64 // bytes/s
}

// ruleset has the rules of paths between ports, and of all that leaves or enters a node.
type ruleset struct {
	path map[[2]int]rule
	node map[int]rule
}

type packet struct {
	due  time.Time
	data []byte
	to   *port
}

const (
	mtu        = 1500
	queueLimit = 4096 // packets
	queueTime  = 300 * time.Millisecond
)

func newWire() *wire {
	w := &wire{byAddr: map[netip.Addr]*port{}, traffic: map[[2]int]uint64{}, queues: map[[2]int]chan packet{}, depart: map[[2]int]time.Time{}, done: make(chan struct{})}
	w.rules.Store(&ruleset{})
	return w
}

// add makes a namespace of a node with the next address.
func (w *wire) add(node int) (*port, error) {
	i := len(w.ports)
	p := &port{index: i, node: node, addr: netip.AddrFrom4([4]byte{10, 77, 0, byte(i + 1)})}
	err := onFreshThread(func() error {
		if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
			return fmt.Errorf("new network namespace: %w", err)
		}
		var err error
		if p.netns, err = os.Open(fmt.Sprintf("/proc/self/task/%d/ns/net", unix.Gettid())); err != nil {
			return err
		}
		if p.tun, err = openTUN(p.addr); err != nil {
			return err
		}
		return linkUp("lo")
	})
	if err != nil {
		return nil, err
	}
	w.ports, w.byAddr[p.addr] = append(w.ports, p), p
	return p, nil
}

// start forwards packets; no ports may be added any more.
func (w *wire) start() {
	for _, p := range w.ports {
		w.readers.Go(func() { w.read(p) })
	}
}

// stop ends it. Namespaces end with their last process.
func (w *wire) stop() {
	close(w.done)
	for _, p := range w.ports {
		p.tun.Close()
		p.netns.Close()
	}
	w.readers.Wait()
}

// set replaces the rules.
func (w *wire) set(change func(*ruleset)) {
	rs := &ruleset{path: map[[2]int]rule{}, node: map[int]rule{}}
	change(rs)
	w.rules.Store(rs)
}

// bytes returns what each path has carried.
func (w *wire) bytes() map[[2]int]uint64 {
	w.mu.Lock()
	defer w.mu.Unlock()
	m := make(map[[2]int]uint64, len(w.traffic))
	for k, v := range w.traffic {
		m[k] = v
	}
	return m
}

func (w *wire) read(from *port) {
	buf := make([]byte, 65536)
	for {
		n, err := from.tun.Read(buf)
		if err != nil {
			return // closed
		}
		if n < 20 || buf[0]>>4 != 4 {
			continue
		}
		to := w.byAddr[netip.AddrFrom4([4]byte(buf[16:20]))]
		if to == nil {
			continue
		}
		w.forward(from, to, buf[:n])
	}
}

func (w *wire) forward(from, to *port, data []byte) {
	key := [2]int{from.index, to.index}
	rs := w.rules.Load()
	r, slowed := rs.path[key], key
	if from.node != to.node {
		for _, node := range []int{from.node, to.node} {
			n, ok := rs.node[node]
			if !ok {
				continue
			}
			r.drop, r.delay = max(r.drop, n.drop), r.delay+n.delay
			if n.rate > 0 && (r.rate == 0 || n.rate < r.rate) {
				r.rate, slowed = n.rate, [2]int{-1, node*2 + btoi(node == from.node)}
			}
		}
	}
	w.mu.Lock()
	w.traffic[key] += uint64(len(data))
	if r.drop > 0 && (r.drop >= 1 || rand.Float64() < r.drop) {
		w.mu.Unlock()
		return
	}
	q := w.queues[key]
	if q == nil && r.delay == 0 && r.rate == 0 {
		w.mu.Unlock()
		_, _ = to.tun.Write(data) // a full or closed device drops, as networks do
		return
	}
	defer w.mu.Unlock()
	if q == nil {
		q = make(chan packet, queueLimit)
		w.queues[key] = q
		w.readers.Go(func() { w.deliver(q) })
	}
	due := time.Now()
	if r.rate > 0 {
		free := w.depart[slowed]
		if free.Before(due) {
			free = due
		}
		if free.Sub(due) > queueTime {
			w.dropped.Add(1)
			return
		}
		due = free.Add(time.Duration(float64(len(data)) / r.rate * 1e9))
		w.depart[slowed] = due
	}
	select {
	case q <- packet{due.Add(r.delay), append([]byte(nil), data...), to}:
	default:
		w.dropped.Add(1)
	}
}

// deliver hands over a path's packets in order, each when it is due.
func (w *wire) deliver(q chan packet) {
	for {
		select {
		case p := <-q:
			if d := time.Until(p.due); d > 0 {
				time.Sleep(d)
			}
			_, _ = p.to.tun.Write(p.data)
		case <-w.done:
			return
		}
	}
}

func btoi(b bool) int {
	if b {
		return 1
	}
	return 0
}

// onFreshThread runs fn on a thread that ends with it, whatever it did to itself.
func onFreshThread(fn func() error) error {
	err := make(chan error, 1)
	go func() {
		runtime.LockOSThread() // never unlocked
		err <- fn()
	}()
	return <-err
}

// openTUN makes a TUN device in the thread's namespace, with an address of 10.77.0.0/24.
func openTUN(addr netip.Addr) (*os.File, error) {
	fd, err := unix.Open("/dev/net/tun", unix.O_RDWR|unix.O_CLOEXEC|unix.O_NONBLOCK, 0)
	if err != nil {
		return nil, fmt.Errorf("open /dev/net/tun: %w", err)
	}
	ifr, err := unix.NewIfreq("zoo0")
	if err != nil {
		return nil, err
	}
	ifr.SetUint16(unix.IFF_TUN | unix.IFF_NO_PI)
	if err := unix.IoctlIfreq(fd, unix.TUNSETIFF, ifr); err != nil {
		unix.Close(fd)
		return nil, fmt.Errorf("make a TUN device: %w", err)
	}
	s, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		unix.Close(fd)
		return nil, err
	}
	defer unix.Close(s)
	a := addr.As4()
	err = errors.Join(
		setAddr(s, unix.SIOCSIFADDR, a),
		setAddr(s, unix.SIOCSIFNETMASK, [4]byte{255, 255, 255, 0}),
		linkUp("zoo0"))
	if err != nil {
		unix.Close(fd)
		return nil, fmt.Errorf("configure a TUN device: %w", err)
	}
	return os.NewFile(uintptr(fd), "zoo0"), nil
}

func setAddr(s int, req uint, a [4]byte) error {
	ifr, err := unix.NewIfreq("zoo0")
	if err != nil {
		return err
	}
	if err := ifr.SetInet4Addr(a[:]); err != nil {
		return err
	}
	return unix.IoctlIfreq(s, req, ifr)
}

// linkUp and linkDown set an interface of the thread's namespace.
func linkUp(name string) error   { return setLink(name, unix.IFF_UP|unix.IFF_RUNNING) }
func linkDown(name string) error { return setLink(name, 0) }

func setLink(name string, flags uint16) error {
	s, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(s)
	ifr, err := unix.NewIfreq(name)
	if err != nil {
		return err
	}
	ifr.SetUint16(flags)
	return unix.IoctlIfreq(s, unix.SIOCSIFFLAGS, ifr)
}

// within runs fn in the port's namespace.
func (p *port) within(fn func() error) error {
	return onFreshThread(func() error {
		if err := unix.Setns(int(p.netns.Fd()), unix.CLONE_NEWNET); err != nil {
			return fmt.Errorf("enter the network namespace of %s: %w", p.addr, err)
		}
		return fn()
	})
}

// path is by which another process finds the namespace while this one lives.
func (p *port) path() string { return fmt.Sprintf("/proc/%d/fd/%d", os.Getpid(), p.netns.Fd()) }
