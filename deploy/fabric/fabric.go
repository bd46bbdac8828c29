package fabric

import (
	"bytes"
	"errors"
	"fmt"
	"hash/fnv"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/lockstep-ccl/lockstep/pathplan"
	"github.com/lockstep-ccl/lockstep/pathplan/service"
)

// Shape describes a fabric. Hosts are cut into pods of equal size; each pod has a left and a
// right leaf, and every leaf a link to every spine.
type Shape struct {
	Name                string // begins the namespaces' names; must be this test's own
	Pods, Spines, Hosts int    // hosts in all
	Rate                int    // Mbit/s of every link, a host's too
}

// Up is a fabric that stands.
type Up struct{ Shape }

// New sets a fabric up. Down takes it away, and New itself what it has done when it fails.
func New(s Shape) (_ *Up, err error) {
	if s.Pods < 1 || s.Spines < 1 || s.Spines > 32 || s.Hosts < s.Pods || s.Hosts%s.Pods != 0 || s.Hosts > 128 || s.Pods > 32 || s.Rate < 1 || s.Name == "" {
		return nil, fmt.Errorf("fabric: %+v cannot be", s)
	}
	u := &Up{s}
	defer func() {
		if err != nil {
			err = errors.Join(err, u.Down())
		}
	}()
	for _, step := range []func() error{u.spaces, u.cables, u.addresses, u.shape} {
		if err := step(); err != nil {
			return nil, fmt.Errorf("fabric %s: %w", s.Name, err)
		}
	}
	return u, nil
}

// Host names the namespace of host h.
func (u *Up) Host(h int) string  { return fmt.Sprintf("%s-h%d", u.Name, h) }
func (u *Up) leaf(l int) string  { return fmt.Sprintf("%s-l%d", u.Name, l) }
func (u *Up) spine(s int) string { return fmt.Sprintf("%s-s%d", u.Name, s) }

// Management is the namespace where a planner is.
func (u *Up) Management() string    { return u.Name + "-mg" }
func (u *Up) pod(h int) int         { return h * u.Pods / u.Hosts }
func (u *Up) leaves() int           { return 2 * u.Pods }
func (u *Up) Addr(h int) netip.Addr { return netip.AddrFrom4([4]byte{10, 3, byte(h), 1}) }

// PlannerAddr is the management network's, by which hosts reach a planner.
func (u *Up) PlannerAddr() netip.Addr { return netip.AddrFrom4([4]byte{10, 9, 0, 1}) }

// LeafName and SpineName are names in the fabric's description.
func LeafName(l int) string  { return fmt.Sprintf("leaf%d", l) }
func SpineName(s int) string { return fmt.Sprintf("spine%d", s) }

// Fabric describes the fabric to a planner.
func (u *Up) Fabric() service.Fabric {
	var f service.Fabric
	rate := int64(u.Rate) * 1e6
	for l := range u.leaves() {
		f.Leaves = append(f.Leaves, LeafName(l))
		for s := range u.Spines {
			up := pathplan.Link{From: LeafName(l), To: SpineName(s)}
			f.Links = append(f.Links, pathplan.LinkRate{Link: up, Rate: rate}, pathplan.LinkRate{Link: up.Reverse(), Rate: rate})
			f.Interfaces = append(f.Interfaces,
				service.Interface{Link: up, Addr: netip.AddrFrom4([4]byte{10, 200, byte(l), byte(4*s + 2)})},
				service.Interface{Link: up.Reverse(), Addr: netip.AddrFrom4([4]byte{10, 200, byte(l), byte(4*s + 1)})})
		}
	}
	for s := range u.Spines {
		f.Spines = append(f.Spines, SpineName(s))
	}
	for h := range u.Hosts {
		for side := range 2 {
			f.Ports = append(f.Ports, pathplan.HostPort{
				Port: pathplan.Port{NIC: pathplan.NIC{Host: NodeName(h), Name: "bond0"}, Side: pathplan.Side(side)},
				Leaf: LeafName(2*u.pod(h) + side), Rate: rate, Addr: u.Addr(h).String(),
			})
		}
	}
	return f
}

// NodeName is a host's name as a planner knows it.
func NodeName(h int) string { return fmt.Sprintf("host%d", h) }

func (u *Up) all() (names []string) {
	for h := range u.Hosts {
		names = append(names, u.Host(h))
	}
	for l := range u.leaves() {
		names = append(names, u.leaf(l))
	}
	for s := range u.Spines {
		names = append(names, u.spine(s))
	}
	return append(names, u.Management())
}

// batch runs ip or tc commands, in a namespace unless that is "".
func batch(tool, ns string, lines []string) error {
	args := []string{"-batch", "-"}
	if ns != "" {
		args = append([]string{"-n", ns}, args...)
	}
	cmd := exec.Command(tool, args...)
	cmd.Stdin = strings.NewReader(strings.Join(lines, "\n") + "\n")
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("%s in %s: %w: %.400s", tool, ns, err, bytes.TrimSpace(out))
	}
	return nil
}

// Enter calls f on a thread that is in a namespace; what f starts there is, too.
func Enter(ns string, f func() error) error {
	done := make(chan error, 1)
	go func() {
		runtime.LockOSThread() // and never unlocked: the thread ends with the goroutine
		fd, err := unix.Open(filepath.Join("/run/netns", ns), unix.O_RDONLY|unix.O_CLOEXEC, 0)
		if err == nil {
			err = unix.Setns(fd, unix.CLONE_NEWNET)
			unix.Close(fd)
		}
		if err != nil {
			done <- fmt.Errorf("enter namespace %s: %w", ns, err)
			return
		}
		done <- f()
	}()
	return <-done
}

func (u *Up) spaces() error {
	var lines []string
	for _, n := range u.all() {
		lines = append(lines, "netns add "+n)
	}
	if err := batch("ip", "", lines); err != nil {
		return err
	}
	for _, n := range u.all() {
		h := fnv.New32a()
		h.Write([]byte(strings.TrimPrefix(n, u.Name))) // the same paths each time
		err := Enter(n, func() error {
			var errs []error
			for _, kv := range [][2]string{
				{"ip_forward", "1"}, {"fib_multipath_hash_policy", "3"}, {"fib_multipath_hash_fields", "55"}, // addresses, protocol, ports
				{"fib_multipath_hash_seed", fmt.Sprint(h.Sum32()>>4 | 1)},
				{"icmp_ratelimit", "0"}, {"icmp_msgs_per_sec", "100000"}, {"icmp_msgs_burst", "10000"}, {"icmp_errors_use_inbound_ifaddr", "1"},
				{"conf/all/rp_filter", "0"}, {"conf/default/rp_filter", "0"}, {"conf/all/ignore_routes_with_linkdown", "1"}, {"conf/default/ignore_routes_with_linkdown", "1"},
			} {
				errs = append(errs, os.WriteFile("/proc/sys/net/ipv4/"+kv[0], []byte(kv[1]), 0))
			}
			// Whatever the machine's own default is, where that may be changed (tcp_allowed_congestion_control).
			_ = os.WriteFile("/proc/sys/net/ipv4/tcp_congestion_control", []byte("cubic"), 0)
			return errors.Join(errs...)
		})
		if err != nil {
			return fmt.Errorf("%s: %w", n, err)
		}
	}
	return nil
}

func (u *Up) cables() error {
	var lines []string
	for l := range u.leaves() {
		for s := range u.Spines {
			lines = append(lines, fmt.Sprintf("link add s%d netns %s mtu %d type veth peer name l%d netns %s mtu %[3]d", s, u.leaf(l), mtu, l, u.spine(s)))
		}
	}
	for h := range u.Hosts {
		for side := range 2 {
			lines = append(lines, fmt.Sprintf("link add eth%d netns %s mtu %d type veth peer name h%d netns %s mtu %[3]d", side, u.Host(h), mtu, h, u.leaf(2*u.pod(h)+side)))
		}
		lines = append(lines, fmt.Sprintf("link add mg0 netns %s type veth peer name h%d netns %s", u.Host(h), h, u.Management()))
	}
	return batch("ip", "", lines)
}

func (u *Up) addresses() error {
	for l := range u.leaves() {
		lines := []string{"link set lo up"}
		for s := range u.Spines {
			lines = append(lines, fmt.Sprintf("addr add 10.200.%d.%d/30 dev s%d", l, 4*s+1, s), fmt.Sprintf("link set s%d up", s))
		}
		for h := range u.Hosts {
			if u.pod(h) == l/2 {
				side := l % 2
				lines = append(lines, fmt.Sprintf("addr add 10.%d.%d.1/24 dev h%d", side+1, h, h), fmt.Sprintf("link set h%d up", h),
					fmt.Sprintf("route add 10.3.%d.1/32 via 10.%d.%d.2 dev h%d", h, side+1, h, h))
			}
		}
		if err := batch("ip", u.leaf(l), append(lines, "route replace default "+u.hops(l, -1))); err != nil {
			return err
		}
	}
	for s := range u.Spines {
		lines := []string{"link set lo up"}
		for l := range u.leaves() {
			lines = append(lines, fmt.Sprintf("addr add 10.200.%d.%d/30 dev l%d", l, 4*s+2, l), fmt.Sprintf("link set l%d up", l))
		}
		for h := range u.Hosts {
			lines = append(lines, fmt.Sprintf("route replace 10.3.%d.1/32 %s", h, u.down(s, u.pod(h), -1)))
		}
		for l := range u.leaves() { // so that spines' and leaves' answers find back to any host
			for h := range u.Hosts {
				if u.pod(h) == l/2 {
					lines = append(lines, fmt.Sprintf("route add 10.%d.%d.0/24 via 10.200.%d.%d dev l%d", l%2+1, h, l, 4*s+1, l))
				}
			}
		}
		if err := batch("ip", u.spine(s), lines); err != nil {
			return err
		}
	}
	mg := []string{"link set lo up", "link add br0 type bridge", "addr add 10.9.0.1/24 dev br0", "link set br0 up"}
	for h := range u.Hosts {
		mg = append(mg, fmt.Sprintf("link set h%d master br0", h), fmt.Sprintf("link set h%d up", h))
		lines := []string{"link set lo up", fmt.Sprintf("addr add 10.3.%d.1/32 dev lo", h), fmt.Sprintf("addr add 10.9.0.%d/24 dev mg0", h+2), "link set mg0 up"}
		for side := range 2 {
			lines = append(lines, fmt.Sprintf("addr add 10.%d.%d.2/24 dev eth%d", side+1, h, side), fmt.Sprintf("link set eth%d up", side))
		}
		lines = append(lines, fmt.Sprintf("route add default src 10.3.%d.1 nexthop via 10.1.%d.1 dev eth0 nexthop via 10.2.%d.1 dev eth1", h, h, h))
		if err := batch("ip", u.Host(h), lines); err != nil {
			return err
		}
	}
	return batch("ip", u.Management(), mg)
}

// hops is a leaf's way to other pods, over all spines but one.
func (u *Up) hops(l, but int) string {
	var b strings.Builder
	for s := range u.Spines {
		if s != but {
			fmt.Fprintf(&b, " nexthop via 10.200.%d.%d dev s%d", l, 4*s+2, s)
		}
	}
	return b.String()
}

// down is a spine's way to the hosts of a pod, over both leaves but one.
func (u *Up) down(s, pod, but int) string {
	var b strings.Builder
	for side := range 2 {
		if l := 2*pod + side; l != but {
			fmt.Fprintf(&b, " nexthop via 10.200.%d.%d dev l%d", l, 4*s+1, l)
		}
	}
	return b.String()
}

const (
	// queueMs is how long a link's queue gets, ms.
	queueMs = 100
	// A link that has been idle carries no more at once than a switch's does: some frames, which are as
	// large as the kernel forwards in one piece. (A token bucket of 64 KiB is 50 ms of a link of 10 Mbit/s.)
	frames  = 1
	burstMs = 8
	// Frames are as large as fabrics of training clusters have them. With 1,500 bytes each second one is
	// acknowledged, and what acknowledgements take of links that nobody planned for them limits a ring.
	mtu   = 9000
	frame = mtu + 14 // bytes, with Ethernet's header
)

// classesOf adds, or changes, an interface's classes for a rate in kbit/s: two, as switches have them, of which what
// asks for low delay goes first.
func classesOf(verb, dev string, rate int) string {
	burst := max(frames*frame, rate/8*burstMs)
	return fmt.Sprintf("class %[1]s dev %[2]s parent 1: classid 1:1 htb rate %[3]dkbit burst %[6]d cburst %[6]d\n"+
		"class %[1]s dev %[2]s parent 1:1 classid 1:10 htb rate %[4]dkbit ceil %[3]dkbit burst %[6]d cburst %[6]d prio 0 quantum 1600\n"+
		"class %[1]s dev %[2]s parent 1:1 classid 1:20 htb rate %[5]dkbit ceil %[3]dkbit burst %[6]d cburst %[6]d prio 1 quantum 20000",
		verb, dev, rate, rate/10, rate*9/10, burst)
}

// shape gives every link its rate.
func (u *Up) shape() error {
	// htb, since kernels without prio have it.
	classes := func(dev string) string {
		return fmt.Sprintf("qdisc add dev %[1]s root handle 1: htb default 20\n%[2]s\n"+
			"qdisc add dev %[1]s parent 1:10 bfifo limit 64kb\nqdisc add dev %[1]s parent 1:20 bfifo limit %[3]d\n"+
			"filter add dev %[1]s parent 1: protocol ip prio 1 u32 match ip tos 0x10 0x10 flowid 1:10", dev, classesOf("add", dev, 1000*u.Rate), queueMs*1000*u.Rate/8)
	}
	for l := range u.leaves() {
		var lines []string
		for s := range u.Spines {
			lines = append(lines, classes(fmt.Sprintf("s%d", s)))
		}
		for h := range u.Hosts {
			if u.pod(h) == l/2 {
				lines = append(lines, classes(fmt.Sprintf("h%d", h)))
			}
		}
		if err := batch("tc", u.leaf(l), lines); err != nil {
			return err
		}
	}
	for s := range u.Spines {
		var lines []string
		for l := range u.leaves() {
			lines = append(lines, classes(fmt.Sprintf("l%d", l)))
		}
		if err := batch("tc", u.spine(s), lines); err != nil {
			return err
		}
	}
	for h := range u.Hosts {
		var lines []string
		for side := range 2 {
			lines = append(lines, fmt.Sprintf("link set eth%d gso_max_segs %d", side, frames))
		}
		if err := batch("ip", u.Host(h), lines); err != nil {
			return err
		}
		if err := batch("tc", u.Host(h), []string{classes("eth0"), classes("eth1")}); err != nil {
			return err
		}
	}
	return nil
}

// Cut takes the cable between a leaf and a spine away, and then, as routing does, the routes
// of others over it: the far leaves', to the pod over that spine's remaining link.
func (u *Up) Cut(l, s int) error {
	return batch("ip", u.leaf(l), []string{fmt.Sprintf("link set s%d down", s)})
}

// Withdraw has routes follow a cut, as a routing protocol would: the spine reaches the pod
// over its other leaf.
func (u *Up) Withdraw(l, s int) error {
	var near, far []string
	near = append(near, "route replace default "+u.hops(l, s))
	for h := range u.Hosts {
		if u.pod(h) == l/2 {
			far = append(far, fmt.Sprintf("route replace 10.3.%d.1/32 %s", h, u.down(s, l/2, l)))
		}
	}
	return errors.Join(batch("ip", u.leaf(l), near), batch("ip", u.spine(s), far))
}

// Heal brings a cable back, and the routes over it.
func (u *Up) Heal(l, s int) error {
	near := []string{fmt.Sprintf("link set s%d up", s), "route replace default " + u.hops(l, -1)}
	var far []string
	for h := range u.Hosts {
		if u.pod(h) == l/2 {
			far = append(far, fmt.Sprintf("route replace 10.3.%d.1/32 %s", h, u.down(s, l/2, -1)))
		}
	}
	return errors.Join(batch("ip", u.leaf(l), near), batch("ip", u.spine(s), far))
}

// Silence has a link pass nothing without anybody being told: both ends stay up.
func (u *Up) Silence(l, s int) error {
	return errors.Join(
		batch("tc", u.leaf(l), []string{fmt.Sprintf("qdisc replace dev s%d root tbf rate 8bit burst 1 limit 1", s)}),
		batch("tc", u.spine(s), []string{fmt.Sprintf("qdisc replace dev l%d root tbf rate 8bit burst 1 limit 1", l)}))
}

// Down removes the fabric, and the processes in it.
func (u *Up) Down() error {
	var errs []error
	for _, n := range u.all() {
		if _, err := os.Stat(filepath.Join("/run/netns", n)); err != nil {
			continue
		}
		if out, err := exec.Command("ip", "netns", "del", n).CombinedOutput(); err != nil {
			errs = append(errs, fmt.Errorf("remove %s: %w: %.200s", n, err, out))
		}
	}
	return errors.Join(errs...)
}

// Command is a process in a namespace.
func Command(ns, name string, args ...string) *exec.Cmd {
	return exec.Command("nsenter", append([]string{"--net=" + filepath.Join("/run/netns", ns), name}, args...)...)
}
