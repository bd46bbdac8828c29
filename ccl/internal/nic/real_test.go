package nic

import (
	"net/netip"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"testing"
)

// rails is how many links of two soft-RoCE devices the virtual machine of
// deploy/rdmavm has; elsewhere the test is passed over.
func rails(t *testing.T) int {
	n, err := strconv.Atoi(os.Getenv("LOCKSTEP_RDMAVM"))
	if err != nil {
		t.Skip("only in the virtual machine of deploy/rdmavm (make test-rdma)")
	}
	return n
}

func ip(t *testing.T, args string) {
	t.Helper()
	if out, err := exec.Command("ip", strings.Fields(args)...).CombinedOutput(); err != nil {
		t.Fatalf("ip %s: %v\n%s", args, err, out)
	}
}

// The kernel's own sysfs: two hosts' devices, whose ports pair up by rail.
func TestRealSelect(t *testing.T) {
	n := rails(t)
	tree, err := Host()
	if err != nil {
		t.Fatal(err)
	}
	if len(tree.Devices) != 2*n {
		t.Fatalf("%d devices on %d rails", len(tree.Devices), n)
	}
	sides := map[string][]Port{}
	for side, last := range map[string]int{"a": 1, "b": 2} {
		ports, err := tree.Select(Near{NUMA: -1}, override(t, "rx"+side, "192.0.2.0/24"))
		if err != nil || len(ports) != n {
			t.Fatalf("%d ports, %v", len(ports), err)
		}
		for i, p := range ports {
			want := netip.AddrFrom4([4]byte{192, 0, 2, byte(i*16 + last)})
			if p.Device != "rx"+side+strconv.Itoa(i) || p.NetDev != side+strconv.Itoa(i) || p.Addr != want || p.Subnet != netip.PrefixFrom(want, 28).Masked() ||
				p.MTU != 4200 || p.Rate == 0 || p.Distance != Unknown {
				t.Errorf("%+v, want address %s", p, want)
			}
		}
		sides[side] = ports
	}
	for i, pair := range Rails(sides["a"], append(sides["b"][1:], sides["b"][0]))[:n] {
		if pair.B != (pair.A+n-1)%n {
			t.Errorf("path %d: %+v crosses rails", i, pair)
		}
	}
}

// Addresses that go and come back get other entries of the table.
func TestRealResolve(t *testing.T) {
	rails(t)
	ip(t, "addr add 198.51.100.1/32 dev a0")
	ip(t, "addr add 198.51.100.2/32 dev a0")
	tree, err := Host()
	if err != nil {
		t.Fatal(err)
	}
	ports, err := tree.Select(Near{NUMA: -1}, override(t, "=rxa0", "198.51.100.2"))
	if err != nil {
		t.Fatal(err)
	}
	p, before := ports[0], ports[0].GIDIndex
	ip(t, "addr del 198.51.100.1/32 dev a0")
	ip(t, "addr del 198.51.100.2/32 dev a0")
	if err := p.Resolve(os.DirFS("/sys")); err == nil || !strings.Contains(err.Error(), "198.51.100.2") {
		t.Errorf("without the address: %v", err)
	}
	ip(t, "addr add 198.51.100.2/32 dev a0")
	defer ip(t, "addr del 198.51.100.2/32 dev a0")
	if err := p.Resolve(os.DirFS("/sys")); err != nil || p.GIDIndex == before {
		t.Errorf("entry %d, before %d: %v", p.GIDIndex, before, err)
	}
}
