package nic

import (
	"errors"
	"io/fs"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"testing/fstest"

	"github.com/google/go-cmp/cmp"
)

func read(t testing.TB, sys fs.FS) *Tree {
	t.Helper()
	tree, err := Read(sys)
	if err != nil {
		t.Fatal(err)
	}
	return tree
}

func override(t *testing.T, hcas, gid string) Override {
	t.Helper()
	o, err := ParseOverride(hcas, gid)
	if err != nil {
		t.Fatal(err)
	}
	return o
}

func names(ports []Port) string {
	var out []string
	for i := range ports {
		out = append(out, strings.TrimSuffix(ports[i].Name(), ":1"))
	}
	return strings.Join(out, " ")
}

func TestSelect(t *testing.T) {
	for _, c := range []struct {
		tree string
		near Near
		hcas string
		want string // all ports in order; ":1" is left out
		why  string // of the first
	}{
		// Each GPU of a DGX has its own NIC, and the next one as its backup.
		{"dgx-h100", Near{GPU: "0000:1b:00.0"}, "", "mlx5_0 mlx5_3 mlx5_4 mlx5_5 mlx5_1 mlx5_6 mlx5_9 mlx5_10 mlx5_11 mlx5_2", "on the PCIe switch of the GPU"},
		{"dgx-h100", Near{GPU: "0000:52:00.0"}, "", "mlx5_4 mlx5_5 mlx5_0 mlx5_3 mlx5_1 mlx5_6 mlx5_9 mlx5_10 mlx5_11 mlx5_2", "on the PCIe switch of the GPU"},
		{"dgx-h100", Near{GPU: "0000:61:00.0"}, "", "mlx5_5 mlx5_0 mlx5_3 mlx5_4 mlx5_1 mlx5_6 mlx5_9 mlx5_10 mlx5_11 mlx5_2", "on the PCIe switch of the GPU"},
		{"dgx-h100", Near{GPU: "00000000:D1:00.0"}, "", "mlx5_10 mlx5_11 mlx5_6 mlx5_9 mlx5_0 mlx5_3 mlx5_4 mlx5_5 mlx5_1 mlx5_2", "on the PCIe switch of the GPU"},
		// Without a GPU: the fast NICs of the node, in turns.
		{"dgx-h100", Near{NUMA: 1, LocalRank: 5}, "^mlx5_1", "mlx5_9 mlx5_6 mlx5_0 mlx5_3 mlx5_4 mlx5_5 mlx5_2", "on the NUMA node of the rank, one of 2 as near"},
		{"dgx-h100", Near{NUMA: 0, LocalRank: 2}, "=mlx5_0,mlx5_1,mlx5_4:1", "mlx5_0 mlx5_4 mlx5_1", "on the NUMA node of the rank, one of 2 as near"},
		{"dgx-h100", Near{GPU: "0000:1b:00.0"}, "mlx5_1", "mlx5_1 mlx5_10 mlx5_11", "on the NUMA node of the GPU"},
		{"dgx-h100", Near{GPU: "0000:1b:00.0"}, "=mlx5_2", "mlx5_2", "on the NUMA node of the GPU"},
		{"dgx-h100", Near{GPU: "0000:ff:00.0"}, "=mlx5_0,mlx5_6", "mlx5_0 mlx5_6", "at an unknown distance from the GPU, one of 2 as near"},

		// Two GPUs, one card of two ports: a port for each, the other is the backup.
		{"dual-port", Near{GPU: "0000:3d:00.0"}, "", "mlx5_0 mlx5_1 mlx5_4 mlx5_2 mlx5_3", "on the PCIe switch of the GPU, one of 2 as near"},
		{"dual-port", Near{GPU: "0000:3e:00.0"}, "", "mlx5_1 mlx5_0 mlx5_4 mlx5_2 mlx5_3", "on the PCIe switch of the GPU, one of 2 as near"},
		{"dual-port", Near{GPU: "0000:b6:00.0"}, "", "mlx5_3 mlx5_2 mlx5_0 mlx5_1 mlx5_4", "on the PCIe switch of the GPU, one of 2 as near"},
		{"dual-port", Near{GPU: "0000:3e:00.0"}, "^=mlx5_1", "mlx5_0 mlx5_4 mlx5_2 mlx5_3", "on the PCIe switch of the GPU"},

		{"bonded", Near{GPU: "0000:1d:00.0"}, "", "mlx5_bond_0 mlx5_bond_1", "on the root complex of the GPU"},
		{"bonded", Near{GPU: "0000:cb:00.0"}, "", "mlx5_bond_0 mlx5_bond_1", "on another NUMA node than the GPU, one of 2 as near"},
		{"bonded", Near{NUMA: -1, LocalRank: 1}, "", "mlx5_bond_1 mlx5_bond_0", "at an unknown distance from the rank, one of 2 as near"},

		{"direct-nic", Near{GPU: "0008:03:00.0"}, "", "mlx5_0 mlx5_1", "on the PCIe switch of the GPU by its data function"},
		{"direct-nic", Near{GPU: "0009:03:00.0"}, "", "mlx5_1 mlx5_0", "on the PCIe switch of the GPU by its data function"},

		// GPUs of a VM that have the same NICs take turns; its slow Ethernet comes last.
		{"vm-vf", Near{GPU: "0001:00:00.0"}, "", "mlx5_0 mlx5_1 mlx5_2 mlx5_3 mlx5_4", "on the NUMA node of the GPU, one of 2 as near"},
		{"vm-vf", Near{GPU: "0002:00:00.0"}, "", "mlx5_1 mlx5_0 mlx5_2 mlx5_3 mlx5_4", "on the NUMA node of the GPU, one of 2 as near"},
		{"vm-vf", Near{GPU: "0004:00:00.0"}, "", "mlx5_3 mlx5_2 mlx5_0 mlx5_1 mlx5_4", "on the NUMA node of the GPU, one of 2 as near"},

		// A virtual function is no second path, but may be asked for in place of it.
		{"host-vf", Near{NUMA: 0}, "", "mlx5_0 mlx5_3", "on the NUMA node of the rank, one of 2 as near"},
		{"host-vf", Near{NUMA: 0}, "mlx5", "mlx5_0 mlx5_3", "on the NUMA node of the rank, one of 2 as near"},
		{"host-vf", Near{NUMA: 0}, "^mlx5_3", "mlx5_0", "on the NUMA node of the rank"},
		{"host-vf", Near{NUMA: 0}, "=mlx5_1", "mlx5_1", "on the NUMA node of the rank"},

		{"soft-roce", Near{NUMA: -1, LocalRank: 0}, "", "rxe0 rxe1", "at an unknown distance from the rank, one of 2 as near"},
		{"soft-roce", Near{NUMA: -1, LocalRank: 1}, "", "rxe1 rxe0", "at an unknown distance from the rank, one of 2 as near"},
	} {
		tree := read(t, load(t, c.tree))
		ports, err := tree.Select(c.near, override(t, c.hcas, ""))
		if err != nil {
			t.Errorf("%s %+v %s: %v", c.tree, c.near, c.hcas, err)
			continue
		}
		if got := names(ports); got != c.want || ports[0].Why != c.why {
			t.Errorf("%s %+v %s: %s, %q\nwant %s, %q", c.tree, c.near, c.hcas, got, ports[0].Why, c.want, c.why)
		}
	}
}

func TestSelectNone(t *testing.T) {
	tree := read(t, load(t, "dgx-h100"))
	_, err := tree.Select(Near{GPU: "0000:1b:00.0"}, override(t, "=mlx5_7,mlx5_8", ""))
	want := `no usable RDMA port: mlx5_0:1 is not in the list "=mlx5_7,mlx5_8"; `
	if !errors.Is(err, ErrNoPort) || !strings.HasPrefix(err.Error(), want) || !strings.Contains(err.Error(), "mlx5_7:1 is down (link Disabled)") {
		t.Errorf("%v\nwant %s...", err, want)
	}
	if _, err := tree.Select(Near{GPU: "1b"}, Override{}); err == nil || !strings.Contains(err.Error(), `"1b"`) {
		t.Errorf("a GPU that is none: %v", err)
	}
	_, err = read(t, load(t, "soft-roce")).Select(Near{NUMA: -1}, override(t, "^rxe0,rxe1", ""))
	for _, s := range []string{"rxe2:1 is down (link Disabled)", "siw0:1 is no InfiniBand or RoCE device"} {
		if err == nil || !strings.Contains(err.Error(), s) {
			t.Errorf("%v\nwant %s", err, s)
		}
	}
	_, err = read(t, fstest.MapFS{"class/infiniband": {Mode: fs.ModeDir}}).Select(Near{}, Override{})
	if !errors.Is(err, ErrNoPort) || !strings.Contains(err.Error(), "no RDMA device in /sys/class/infiniband") {
		t.Errorf("no device: %v", err)
	}
	if _, err := Read(fstest.MapFS{"class/net": {Mode: fs.ModeDir}}); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("no driver: %v", err)
	}
}

func TestRead(t *testing.T) {
	tree := read(t, load(t, "bonded"))
	d := tree.Devices[0]
	if d.Name != "mlx5_bond_0" || d.BusID != "0000:18:00.0" || d.NUMA != 0 || d.Firmware != "28.39.1002" || len(d.Ports) != 1 {
		t.Errorf("%+v", d)
	}
	p := d.Ports[0]
	if p.State != StateActive || p.PhysState != "LinkUp" || p.Layer != Ethernet || p.Rate != 200e9 ||
		p.NetDev != "bond0" || p.MTU != 9000 || !slices.Equal(p.Slaves, []string{"ens1f0np0", "ens1f1np1"}) || len(p.GIDs) != 6 {
		t.Errorf("%+v", p)
	}
	if g := p.GIDs[5]; g.Index != 5 || g.RoCE != 2 || g.NetDev != "bond0.99" || g.Addr != netip.MustParseAddr("10.99.0.5") {
		t.Errorf("%+v", g)
	}

	tree = read(t, load(t, "dgx-h100"))
	if len(tree.GPUs) != 8 || tree.GPUs[7] != (GPU{"0000:df:00.0", 1}) {
		t.Errorf("%+v", tree.GPUs)
	}
	if p := tree.Port("mlx5_11", 1); p == nil || p.LID != 0x47 || p.NetDev != "ibp220s0" || p.MTU != 4092 || p.Rate != 400e9 {
		t.Errorf("%+v", p)
	}
	if tree.Port("mlx5_11", 2) != nil || tree.Port("mlx5_12", 1) != nil {
		t.Error("a port that is not there")
	}

	tree = read(t, load(t, "soft-roce"))
	if d := tree.Devices[2]; d.BusID != "0000:00:03.0" || tree.Devices[0].BusID != "" || tree.Devices[3].RC {
		t.Errorf("%+v", tree.Devices)
	}

	tree = read(t, load(t, "host-vf"))
	if d := tree.Devices[1]; d.VirtualOf != "0000:81:00.0" || tree.Devices[0].VirtualOf != "" {
		t.Errorf("%+v", d)
	}
}

// A tree of files, as /sys is, reads as the one in memory does.
func TestReadFiles(t *testing.T) {
	near := Near{GPU: "0000:9d:00.0"}
	got, err := read(t, files(t, load(t, "dgx-h100"))).Select(near, Override{})
	want, err2 := read(t, load(t, "dgx-h100")).Select(near, Override{})
	if err != nil || err2 != nil {
		t.Fatal(err, err2)
	}
	if diff := cmp.Diff(want, got, cmp.Comparer(func(a, b netip.Addr) bool { return a == b }), cmp.Comparer(func(a, b netip.Prefix) bool { return a == b })); diff != "" {
		t.Error(diff)
	}
}

func TestDataDirectByDriver(t *testing.T) {
	sys := load(t, "direct-nic")
	for name := range sys {
		if strings.HasSuffix(name, "/vpd") {
			delete(sys, name) // only root may read it
		}
	}
	tree := read(t, sys)
	near := Near{GPU: "0009:03:00.0"}
	ports, err := tree.Select(near, Override{})
	if err != nil || ports[0].Name() != "mlx5_1:1" || ports[0].Distance != SameNUMA {
		t.Fatalf("%v %v", names(ports), err)
	}
	tree.SetDataDirect("mlx5_0", "/devices/pci0009:00/0009:00:00.0/0009:01:00.0/0009:02:01.0/0009:04:00.0")
	ports, err = tree.Select(near, Override{})
	if err != nil || ports[0].Name() != "mlx5_0:1" || ports[0].Distance != SameSwitch || !ports[0].Data || ports[1].Data || tree.Devices[0].DataDirect != "0009:04:00.0" {
		t.Fatalf("%v %v", names(ports), err)
	}
}

func TestDistance(t *testing.T) {
	at := func(dir string, numa int) place { return place{parsePCIPath(dir), numa} }
	gpu := at("devices/pci0000:15/0000:15:01.0/0000:16:00.0/0000:17:02.0/0000:1b:00.0", 0)
	for _, c := range []struct {
		dir  string
		numa int
		want Distance
	}{
		{"devices/pci0000:15/0000:15:01.0/0000:16:00.0/0000:17:00.0/0000:18:00.0", 0, SameSwitch},
		{"devices/pci0000:15/0000:15:01.0/0000:16:00.0/0000:17:00.0/0000:18:00.0/0000:19:00.0/0000:1a:00.0", 0, SameRootPort},
		{"devices/pci0000:15/0000:15:01.0/0000:16:00.0/0000:17:00.0/0000:18:00.0/mlx5_core.sf.4", 0, SameSwitch},
		{"devices/pci0000:15/0000:15:02.0/0000:20:00.0", 0, SameRootComplex},
		{"devices/pci0000:29/0000:29:01.0/0000:2a:00.0", 0, SameNUMA},
		{"devices/pci0000:a9/0000:a9:01.0/0000:aa:00.0", 1, Far},
		{"devices/pci0000:a9/0000:a9:01.0/0000:aa:00.0", -1, Unknown},
		{"devices/virtual/infiniband/rxe0", -1, Unknown},
		{"devices/pci10000:e0/10000:e0:06.0/10000:e1:00.0", 0, SameNUMA},
	} {
		if got := gpu.distance(at(c.dir, c.numa)); got != c.want {
			t.Errorf("%s: %v, want %v", c.dir, got, c.want)
		}
		if got := at(c.dir, c.numa).distance(gpu); got != c.want {
			t.Errorf("back from %s: %v, want %v", c.dir, got, c.want)
		}
	}
}

func TestBusID(t *testing.T) {
	for in, want := range map[string]string{
		"0000:1b:00.0": "0000:1b:00.0", "00000000:1B:00.0": "0000:1b:00.0", "00010000:E0:06.0": "10000:e0:06.0",
		"": "", "1b:00.0": "", "0000:1b:00": "", "0000:1b:00.10": "", "000:1b:00.0": "", "0000:+b:00.0": "", "mlx5_core.sf.4": "", "0000:1b:0_.0": "",
	} {
		if got, ok := BusID(in); got != want || ok != (want != "") {
			t.Errorf("%q: %q %t, want %q", in, got, ok, want)
		}
	}
}

func TestParseOverride(t *testing.T) {
	for _, c := range []struct {
		list    string
		use     string // of mlx5_0:1 mlx5_0:2 mlx5_1:1 mlx5_10:1 rxe0:1
		invalid string
	}{
		{"", "mlx5_0:1 mlx5_0:2 mlx5_1:1 mlx5_10:1 rxe0:1", ""},
		{"mlx5", "mlx5_0:1 mlx5_0:2 mlx5_1:1 mlx5_10:1", ""},
		{"mlx5_1", "mlx5_1:1 mlx5_10:1", ""},
		{"=mlx5_1", "mlx5_1:1", ""},
		{"=mlx5_0:1,mlx5_1", "mlx5_0:1 mlx5_1:1", ""},
		{"=mlx5_0:2, rxe0", "mlx5_0:2 rxe0:1", ""},
		{"^mlx5_1", "mlx5_0:1 mlx5_0:2 rxe0:1", ""},
		{"^=mlx5_1,mlx5_0:2", "mlx5_0:1 mlx5_10:1 rxe0:1", ""},
		{"mlx5_3", "", ""},
		{"^", "", "names no device"},
		{"=", "", "names no device"},
		{"mlx5_0,,mlx5_1", "", "names no device"},
		{"mlx5_0:", "", "is no number"},
		{"mlx5_0:0", "", "is no number"},
		{"mlx5_0:x", "", "is no number"},
		{"mlx5_0:1:1", "", "is no number"},
		{":1", "", "names no device"},
	} {
		o, err := ParseOverride(c.list, "")
		if c.invalid != "" {
			if err == nil || !strings.Contains(err.Error(), c.invalid) {
				t.Errorf("%q: %v, want %q", c.list, err, c.invalid)
			}
			continue
		}
		var use []string
		for _, p := range []Port{{Device: "mlx5_0", Num: 1}, {Device: "mlx5_0", Num: 2}, {Device: "mlx5_1", Num: 1}, {Device: "mlx5_10", Num: 1}, {Device: "rxe0", Num: 1}} {
			if o.allows(p.Device, p.Num) {
				use = append(use, p.Name())
			}
		}
		if got := strings.Join(use, " "); err != nil || got != c.use {
			t.Errorf("%q: %s %v, want %s", c.list, got, err, c.use)
		}
	}
	for _, bad := range []string{"10.1", "10.1.0.0/33", "eth0"} {
		if _, err := ParseOverride("", bad); err == nil || !strings.Contains(err.Error(), bad) {
			t.Errorf("GID %q: %v", bad, err)
		}
	}
}

func TestGID(t *testing.T) {
	for _, c := range []struct {
		tree, device, gid string
		want              string // index and address, or the error
	}{
		{"bonded", "mlx5_bond_0", "", "3 10.20.0.5"},
		{"bonded", "mlx5_bond_1", "", "3 10.20.1.5"},
		{"bonded", "mlx5_bond_0", "10.99.0.0/16", "5 10.99.0.5"},
		{"bonded", "mlx5_bond_0", "::ffff:10.99.0.5", "5 10.99.0.5"},
		{"bonded", "mlx5_bond_0", "fe80::/10", "1 fe80::ba3f:d2ff:fe00:a00"},
		{"bonded", "mlx5_bond_0", "10.98.0.0/16", "has no GID in 10.98.0.0/16"},
		{"dgx-h100", "mlx5_0", "", "0 fe80::a088:c203:a0:1000"},
		{"dgx-h100", "mlx5_0", "10.0.0.0/8", "has no GID in 10.0.0.0/8"},
		{"soft-roce", "rxe1", "", "1 10.77.1.2"},
	} {
		tree := read(t, load(t, c.tree))
		ports, err := tree.Select(Near{NUMA: -1}, override(t, "="+c.device, c.gid))
		got := ""
		if err == nil {
			got = strings.Join([]string{string(rune('0' + ports[0].GIDIndex)), ports[0].Address()}, " ")
		} else if _, text, ok := strings.Cut(err.Error(), c.device+":1 "); ok {
			got, _, _ = strings.Cut(text, ";")
		}
		if got != c.want {
			t.Errorf("%s %s %q: %s, want %s", c.tree, c.device, c.gid, got, c.want)
		}
	}
}

// Addresses that come and go move the others to other entries.
func TestResolve(t *testing.T) {
	sys := load(t, "bonded")
	ports, err := read(t, sys).Select(Near{NUMA: -1}, override(t, "=mlx5_bond_0", ""))
	if err != nil {
		t.Fatal(err)
	}
	p := ports[0]
	dir := "devices/pci0000:17/0000:17:00.0/0000:18:00.0/infiniband/mlx5_bond_0/ports/1/"
	for _, sub := range []string{"gids/", "gid_attrs/types/", "gid_attrs/ndevs/"} {
		sys[dir+sub+"2"], sys[dir+sub+"3"], sys[dir+sub+"4"], sys[dir+sub+"5"] = sys[dir+sub+"4"], sys[dir+sub+"5"], sys[dir+sub+"2"], sys[dir+sub+"3"]
	}
	if err := p.Resolve(sys); err != nil || p.GIDIndex != 5 || p.Addr.String() != "10.20.0.5" {
		t.Fatalf("%v: index %d, %s", err, p.GIDIndex, p.Addr)
	}
	// The RoCE v1 entry has the same bytes and is no substitute.
	sys[dir+"gids/5"] = &fstest.MapFile{Data: []byte("0000:0000:0000:0000:0000:0000:0000:0000\n")}
	if err := p.Resolve(sys); err == nil || err.Error() != "port mlx5_bond_0:1 has GID 10.20.0.5 no more" {
		t.Fatal(err)
	}
}

func TestRails(t *testing.T) {
	port := func(addr string) Port {
		p := netip.MustParsePrefix(addr)
		return Port{Layer: Ethernet, Addr: p.Addr(), Subnet: p.Masked()}
	}
	unknown := func(addr string) Port { return Port{Layer: Ethernet, Addr: netip.MustParseAddr(addr)} }
	ib := func(subnet byte) Port { return Port{Layer: InfiniBand, GID: [16]byte{0xfe, 0x80, 7: subnet}} }
	for name, c := range map[string]struct {
		a, b []Port
		want []Pair
	}{
		"same rails, same order":   {[]Port{port("10.1.0.1/16"), port("10.2.0.1/16")}, []Port{port("10.1.0.2/16"), port("10.2.0.2/16")}, []Pair{{0, 0}, {1, 1}, {0, 1}, {1, 0}}},
		"same rails, crossed":      {[]Port{port("10.1.0.1/16"), port("10.2.0.1/16")}, []Port{port("10.2.0.2/16"), port("10.1.0.2/16")}, []Pair{{0, 1}, {1, 0}, {0, 0}, {1, 1}}},
		"one rail in common":       {[]Port{port("10.1.0.1/16"), port("10.2.0.1/16")}, []Port{port("10.3.0.2/16"), port("10.1.0.2/16")}, []Pair{{0, 1}, {1, 0}, {0, 0}, {1, 1}}},
		"no rail in common":        {[]Port{port("10.1.0.0/31"), port("10.2.0.0/31")}, []Port{port("10.3.0.0/31"), port("10.4.0.0/31")}, []Pair{{0, 0}, {1, 1}, {0, 1}, {1, 0}}},
		"no subnet known":          {[]Port{unknown("10.1.0.1"), unknown("10.2.0.1")}, []Port{unknown("10.2.0.2"), unknown("10.1.0.2")}, []Pair{{0, 0}, {1, 1}, {0, 1}, {1, 0}}},
		"one port to two":          {[]Port{port("10.1.0.1/16")}, []Port{port("10.1.0.2/16"), port("10.2.0.2/16")}, []Pair{{0, 0}, {0, 1}}},
		"the same address masked":  {[]Port{port("10.1.0.1/16")}, []Port{port("10.1.0.2/24"), port("10.1.0.3/16")}, []Pair{{0, 1}, {0, 0}}},
		"InfiniBand, one subnet":   {[]Port{ib(0), ib(0)}, []Port{ib(0), ib(0)}, []Pair{{0, 0}, {1, 1}, {0, 1}, {1, 0}}},
		"InfiniBand, two subnets":  {[]Port{ib(1), ib(2)}, []Port{ib(2), ib(1)}, []Pair{{0, 1}, {1, 0}, {0, 0}, {1, 1}}},
		"InfiniBand to Ethernet":   {[]Port{ib(0)}, []Port{port("10.1.0.1/16")}, nil},
		"IPv4 to IPv6":             {[]Port{port("10.1.0.1/16")}, []Port{port("fd00::1/64")}, nil},
		"mixed, second fits first": {[]Port{ib(0), port("10.1.0.1/16")}, []Port{port("10.1.0.2/16")}, []Pair{{1, 0}}},
		"none":                     {nil, []Port{ib(0)}, nil},
	} {
		if diff := cmp.Diff(c.want, Rails(c.a, c.b)); diff != "" {
			t.Errorf("%s: %s", name, diff)
		}
	}
}

func TestSubnets(t *testing.T) {
	tree := read(t, load(t, "dual-port"))
	tree.SetSubnets(func(netdev string) []netip.Prefix {
		switch netdev {
		case "ens1f0np0":
			return []netip.Prefix{netip.MustParsePrefix("fe80::1/64"), netip.MustParsePrefix("10.1.0.10/16")}
		case "ens2f0np0":
			return []netip.Prefix{netip.MustParsePrefix("10.1.0.11/16")}
		}
		return nil
	})
	a, err := tree.Select(Near{GPU: "0000:3e:00.0"}, override(t, "mlx5_0,mlx5_1", ""))
	b, err2 := tree.Select(Near{GPU: "0000:b5:00.0"}, override(t, "mlx5_2,mlx5_3", ""))
	if err != nil || err2 != nil || names(a) != "mlx5_1 mlx5_0" || names(b) != "mlx5_2 mlx5_3" {
		t.Fatal(names(a), names(b), err, err2)
	}
	if got := Rails(a, b)[0]; got != (Pair{1, 0}) {
		t.Errorf("%+v: the ports of rail 10.1.0.0/16 belong together", got)
	}
}

func TestSerialNumber(t *testing.T) {
	vpd := func(s string) string { return serialNumber([]byte(s)) }
	for in, want := range map[string]string{
		"\x82\x04\x00CX-8\x90\x0c\x00PN\x02CXSN\x04M1\x002\x78": `"M1\x002"`,
		"\x90\x07\x00SN\x04M123\x78":                            `"M123"`,
		"\x90\x07\x00SN\x09M123\x78":                            "",
		"\x90\xff\xffSN\x04M123\x78":                            "",
		"\x82\x04":                                              "", "": "", "garbage": "",
	} {
		if got := vpd(in); got != want {
			t.Errorf("%q: %s, want %s", in, got, want)
		}
	}
}

func TestNatural(t *testing.T) {
	got := []string{"mlx5_10", "rxe0", "mlx5_2", "mlx5_02", "mlx5_bond_0", "mlx5_0", "mlx5_2a"}
	slices.SortStableFunc(got, natural)
	want := []string{"mlx5_0", "mlx5_2", "mlx5_02", "mlx5_2a", "mlx5_10", "mlx5_bond_0", "rxe0"}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
}

// FuzzRead: whatever sysfs holds, nothing panics, and what is selected is active
// and of the tree.
func FuzzRead(f *testing.F) {
	fixtures, err := filepath.Glob("testdata/*.sysfs")
	if err != nil || len(fixtures) == 0 {
		f.Fatal("no fixtures", err)
	}
	for _, file := range fixtures {
		text, err := os.ReadFile(file)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(string(text), "0000:1b:00.0", "=mlx5_0:1,mlx5_1", "10.0.0.0/8")
	}
	f.Add("class/infiniband/x -> ../../class/infiniband/x\nclass/infiniband/y ports=7", "0000:1b:00.0", "", "")
	f.Add("devices/pci0000:00/0000:00:01.0/infiniband/a node_type=1 parent=..\n  ports/1 state=4 link_layer=Ethernet rate=\"NaN Gb/sec\"\n  ports/1/gids 0=::", "0000:00:01.0", "a", "")
	f.Fuzz(func(t *testing.T, text, gpu, hcas, gid string) {
		tree, err := Read(withoutLoops(expand(text)))
		if err != nil {
			return
		}
		o, err := ParseOverride(hcas, gid)
		if err != nil {
			o = Override{}
		}
		for _, near := range []Near{{GPU: gpu}, {NUMA: -1, LocalRank: 3}} {
			ports, err := tree.Select(near, o)
			if (err == nil) != (len(ports) > 0) {
				t.Fatalf("%d ports and error %v", len(ports), err)
			}
			for i := range ports {
				p := tree.Port(ports[i].Device, ports[i].Num)
				if p == nil || p.State != StateActive || tree.Usable(p, o) != nil || ports[i].GIDIndex < 0 {
					t.Fatalf("selected %+v", ports[i])
				}
			}
			Rails(ports, ports)
		}
	})
}
