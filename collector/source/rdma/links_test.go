package rdma

import (
	"encoding/binary"
	"errors"
	"log/slog"
	"net"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"
)

// namespace moves the test into a network namespace of its own, with a pair of
// virtual interfaces: what happens to veth1 the link of veth0 feels.
func namespace(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("a network namespace takes root")
	}
	if _, err := exec.LookPath("ip"); err != nil {
		t.Skip("there is no ip(8)")
	}
	runtime.LockOSThread() // and never unlocked: the thread ends with the test
	if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
		if errors.Is(err, unix.EPERM) {
			t.Skip("no network namespace may be made here:", err)
		}
		t.Fatal(err)
	}
	ip(t, "link add veth0 type veth peer name veth1")
	ip(t, "link set veth0 up")
	ip(t, "link set veth1 up")
}

func ip(t *testing.T, args string) {
	t.Helper()
	if out, err := exec.Command("ip", strings.Fields(args)...).CombinedOutput(); err != nil {
		t.Fatalf("ip %s: %v\n%s", args, err, out)
	}
}

// A link that is down for ten milliseconds, between two probes, is seen by
// the kernel's announcements.
func TestShortFlap(t *testing.T) {
	namespace(t)
	veth, err := net.InterfaceByName("veth0")
	if err != nil {
		t.Fatal(err)
	}
	m := newMachine(t)
	m.rxe("rxe0", "veth0", veth.Index)
	m.remove("class/net/veth0/carrier_down_count")
	r := start(t, m, nil)
	r.Source = newSource(Options{Sys: os.DirFS(m.dir), Log: slog.New(r.log)}, &rtnetlink{})
	defer r.Source.Close()
	if err := r.probe(); err != nil {
		t.Fatal(err)
	}
	if !r.listening || r.log.has("by probes only") {
		t.Fatal(r.log.lines)
	}
	// The directory that stands for /sys does not have the kernel's count: the
	// first announcement brings it.
	ip(t, "link set veth0 alias first")
	r.until(t, func() bool { return r.known[portID{"rxe0", 1}].links[0].downs != nil })

	ip(t, "link set veth1 down")
	time.Sleep(10 * time.Millisecond)
	ip(t, "link set veth1 up")
	r.until(t, func() bool { p := r.port("rxe0"); return p.Flaps == 1 && p.Links[0].Up && p.FlapAt > 0 })
}

// until passes until something holds; the probes of that time see nothing, since their directory does not change.
func (r *rig) until(t *testing.T, ok func() bool) {
	t.Helper()
	for deadline := time.Now().Add(20 * time.Second); !ok(); time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("%+v\n%v", r.v.NICs, r.log.lines)
		}
		_ = r.pass(time.Microsecond)
	}
}

// Closing wakes whoever waits for announcements.
func TestCloseWhileListening(t *testing.T) {
	m := newMachine(t)
	m.rxe("rxe0", "veth0", 7)
	s := New(Options{Sys: os.DirFS(m.dir), Log: slog.New(&logs{})})
	r := &rig{Source: s, t: t, m: m, log: &logs{}}
	r.v.Now = 1e9
	if err := r.probe(); err != nil {
		t.Fatal(err)
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
}

func message(kind uint16, index, flags uint32, attrs ...netlink.Attribute) netlink.Message {
	data := make([]byte, unix.SizeofIfInfomsg)
	binary.NativeEndian.PutUint32(data[4:], index)
	binary.NativeEndian.PutUint32(data[8:], flags)
	b, err := netlink.MarshalAttributes(attrs)
	if err != nil {
		panic(err)
	}
	return netlink.Message{Header: netlink.Header{Type: netlink.HeaderType(kind)}, Data: append(data, b...)}
}

func TestParseLink(t *testing.T) {
	name := netlink.Attribute{Type: unix.IFLA_IFNAME, Data: []byte("eth0\x00")}
	three := netlink.Attribute{Type: unix.IFLA_CARRIER_DOWN_COUNT, Data: binary.NativeEndian.AppendUint32(nil, 3)}
	const up = unix.IFF_UP | unix.IFF_LOWER_UP | unix.IFF_RUNNING
	l, ok := parseLink(message(unix.RTM_NEWLINK, 4, up, name, three))
	if !ok || l.name != "eth0" || l.index != 4 || !l.up || l.downs == nil || *l.downs != 3 {
		t.Errorf("%+v %t", l, ok)
	}
	if l, ok := parseLink(message(unix.RTM_NEWLINK, 4, unix.IFF_UP, name)); !ok || l.up || l.downs != nil {
		t.Errorf("without a carrier: %+v %t", l, ok)
	}
	if l, ok := parseLink(message(unix.RTM_DELLINK, 4, up, name)); !ok || l.up {
		t.Errorf("deleted: %+v %t", l, ok)
	}
	for what, m := range map[string]netlink.Message{
		"an address":     message(unix.RTM_NEWADDR, 4, up, name),
		"no name":        message(unix.RTM_NEWLINK, 4, up, three),
		"a short one":    {Header: netlink.Header{Type: unix.RTM_NEWLINK}, Data: make([]byte, 8)},
		"a short count":  message(unix.RTM_NEWLINK, 4, up, name, netlink.Attribute{Type: unix.IFLA_CARRIER_DOWN_COUNT, Data: []byte{1}}),
		"half attribute": {Header: netlink.Header{Type: unix.RTM_NEWLINK}, Data: append(make([]byte, unix.SizeofIfInfomsg), 99, 0, 3)},
	} {
		if l, ok := parseLink(m); ok {
			t.Errorf("%s: %+v", what, l)
		}
	}
}

func FuzzParseLink(f *testing.F) {
	f.Add(uint16(unix.RTM_NEWLINK), message(unix.RTM_NEWLINK, 4, unix.IFF_UP, netlink.Attribute{Type: unix.IFLA_IFNAME, Data: []byte("eth0\x00")}).Data)
	f.Fuzz(func(t *testing.T, kind uint16, data []byte) {
		l, ok := parseLink(netlink.Message{Header: netlink.Header{Type: netlink.HeaderType(kind)}, Data: data})
		if ok && l.name == "" {
			t.Errorf("%+v", l)
		}
	})
}
