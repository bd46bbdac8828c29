package rdma

import (
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/fstest"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/lockstep-ccl/lockstep/collector"
	"github.com/lockstep-ccl/lockstep/collector/source"
)

func TestValues(t *testing.T) {
	m := newMachine(t)
	m.roce("mlx5_0", "0000:18:00.0", "ens1np0", 4)
	m.rxe("rxe0", "veth0", 7)
	r := start(t, m, nil)
	if err := r.probe(); err != nil {
		t.Fatal(err)
	}
	if n := r.v.NICs; n.ProbeNs <= 0 || n.ProbedAt != 6e9 || n.UnresponsiveAt != 0 {
		t.Errorf("%+v", n)
	}
	want := []collector.NICPort{
		{
			Device: "mlx5_0", Port: 1, Layer: "Ethernet", BusID: "0000:18:00.0", Model: "MT4129", Firmware: "28.39.1002",
			State: "ACTIVE", PhysicalState: "LinkUp", Up: true, Links: []collector.NICLink{{NetDev: "ens1np0", Up: true}},
			Rate: f(50e9), ReceivedBytes: f(4000), TransmittedBytes: f(8000), ReceivedPackets: f(10), TransmittedPackets: f(20), TransmitWaits: f(30),
			Retransmissions: []collector.NICCounter{{Name: "local_ack_timeout_err", Value: 1}, {Name: "out_of_sequence", Value: 7}, {Name: "packet_seq_err", Value: 3}},
			Congestion:      []collector.NICCounter{{Name: "np_cnp_sent", Value: 12}, {Name: "rp_cnp_handled", Value: 11}},
			Errors:          []collector.NICCounter{{Name: "link_downed", Value: 1}, {Name: "rx_icrc_encapsulated"}, {Name: "symbol_error"}},
		},
		{
			Device: "rxe0", Port: 1, Layer: "Ethernet", State: "ACTIVE", PhysicalState: "LinkUp", Up: true, Links: []collector.NICLink{{NetDev: "veth0", Up: true}},
			Rate: f(0.3125e9), ReceivedPackets: f(90), TransmittedPackets: f(100),
			Retransmissions: []collector.NICCounter{
				{Name: "completer_retry_err", Value: 5}, {Name: "duplicate_request", Value: 1}, {Name: "out_of_seq_request", Value: 2},
				{Name: "rcvd_rnr_err", Value: 3}, {Name: "rcvd_seq_err", Value: 4}, {Name: "send_rnr_err"},
			},
			Errors: []collector.NICCounter{{Name: "link_downed"}, {Name: "retry_exceeded_err", Value: 6}},
		},
	}
	if diff := cmp.Diff(want, r.v.NICs.Ports); diff != "" {
		t.Error(diff)
	}
}

// A file that cannot be read, or is no number, costs its own value only, and is counted each time.
func TestUnreadable(t *testing.T) {
	m := newMachine(t)
	m.roce("mlx5_0", "0000:18:00.0", "ens1np0", 4)
	ports := "class/infiniband/mlx5_0/ports/1/"
	m.write(ports+"hw_counters/packet_seq_err", "garbage")
	m.write(ports+"hw_counters/np_cnp_sent", "-1")
	m.write(ports+"rate", "fast")
	sys := &bad{FS: os.DirFS(m.dir), fails: map[string]error{
		ports + "hw_counters/out_of_sequence": unix.EINVAL,
		ports + "counters":                    unix.EIO,
		ports + "hw_counters/rp_cnp_handled":  fs.ErrNotExist, // between listing and reading
	}}
	r := start(t, m, sys)
	for i := range 2 {
		if err := r.probe(); err != nil {
			t.Fatal(err)
		}
		p := r.port("mlx5_0")
		want := []string{
			`/sys/class/infiniband/mlx5_0/ports/1/rate: "fast" is no rate`,
			`/sys/class/infiniband/mlx5_0/ports/1/hw_counters/np_cnp_sent: "-1" is no number`,
			`/sys/class/infiniband/mlx5_0/ports/1/hw_counters/out_of_sequence: invalid argument`,
			`/sys/class/infiniband/mlx5_0/ports/1/hw_counters/packet_seq_err: "garbage" is no number`,
			`/sys/class/infiniband/mlx5_0/ports/1/counters: input/output error`,
		}
		if diff := cmp.Diff(want, p.Failed); diff != "" || p.ReadErrors != uint64(5*(i+1)) {
			t.Errorf("%d read errors\n%s", p.ReadErrors, diff)
		}
		left := []collector.NICCounter{{Name: "local_ack_timeout_err", Value: 1}}
		if diff := cmp.Diff(left, p.Retransmissions); diff != "" || !p.Up || p.Rate != nil || p.ReceivedBytes != nil || p.Congestion != nil {
			t.Errorf("%+v\n%s", p, diff)
		}
	}
}

// A state that cannot be read is not down.
func TestUnreadableState(t *testing.T) {
	m := newMachine(t)
	m.roce("mlx5_0", "0000:18:00.0", "ens1np0", 4)
	r := start(t, m, nil)
	r.probe()
	m.state("mlx5_0", "", "5: LinkUp")
	r.probe()
	if p := r.port("mlx5_0"); p.Flaps != 0 || p.DownAt != 0 || p.State != "" || p.ReadErrors != 1 {
		t.Errorf("%+v", p)
	}
	m.state("mlx5_0", "4: ACTIVE", "5: LinkUp")
	r.probe()
	if p := r.port("mlx5_0"); p.Flaps != 0 || !p.Up || len(p.Failed) != 0 {
		t.Errorf("%+v", p)
	}
}

func TestHungRead(t *testing.T) {
	m := newMachine(t)
	m.roce("mlx5_0", "0000:18:00.0", "ens1np0", 4)
	sys := &bad{FS: os.DirFS(m.dir)}
	r := start(t, m, sys)
	r.probe()
	file := "class/infiniband/mlx5_0/ports/1/hw_counters/out_of_sequence"
	release := sys.block(file)
	if err := r.pass(5 * time.Second); err != nil {
		t.Fatal(err)
	}
	for deadline := time.Now().Add(20 * time.Second); r.probes.Call() != "/sys/"+file; time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatal("the probe did not get there:", r.probes.Call())
		}
	}
	if err := r.pass(9 * time.Second); err != nil || r.v.NICs.UnresponsiveAt != 0 {
		t.Fatalf("within the bound: %v", err)
	}
	for range 3 { // no second probe meanwhile
		err := r.pass(time.Minute)
		if err == nil || !strings.Contains(err.Error(), "reading /sys/"+file+" has not returned") {
			t.Fatal(err)
		}
		if n := r.v.NICs; n.UnresponsiveAt != 11e9 || n.Hangs != "/sys/"+file || len(n.Ports) != 1 {
			t.Fatalf("%+v", n)
		}
	}
	release()
	for r.node.UnresponsiveAt != 0 {
		_ = r.pass(0)
		time.Sleep(time.Millisecond)
	}
	if err := r.landed(); err != nil || r.v.NICs.UnresponsiveAt != 0 || r.v.NICs.Hangs != "" {
		t.Fatalf("%v %+v", err, r.v.NICs)
	}
	if !r.log.has("a NIC's driver answers again") {
		t.Error(r.log.lines)
	}
}

func TestCloseWhileAReadHangs(t *testing.T) {
	m := newMachine(t)
	m.roce("mlx5_0", "0000:18:00.0", "ens1np0", 4)
	sys := &bad{FS: os.DirFS(m.dir)}
	release := sys.block("class/infiniband/mlx5_0/fw_ver")
	s := newSource(Options{Sys: sys, Log: slog.New(&logs{})}, &air{})
	if err := s.Update(&source.View{Now: 1}); err != nil {
		t.Fatal(err)
	}
	err := s.Close()
	release()
	if again := s.Close(); again != nil {
		t.Error(again)
	}
	if err == nil || !strings.Contains(err.Error(), "does not return") {
		t.Error(err)
	}
}

// A port whose state changes between two probes, and does not change back.
func TestPortDown(t *testing.T) {
	m := newMachine(t)
	m.write("class/infiniband/mlx5_0/ports/1/link_layer", "InfiniBand") // no interface
	m.state("mlx5_0", "4: ACTIVE", "5: LinkUp")
	m.write("class/infiniband/mlx5_1/ports/1/link_layer", "InfiniBand")
	m.state("mlx5_1", "1: DOWN", "2: Polling") // never up
	r := start(t, m, nil)
	r.probe()
	if p := r.port("mlx5_1"); p.Up || p.DownAt != 0 || p.Flaps != 0 || p.State != "DOWN" || p.PhysicalState != "Polling" {
		t.Errorf("%+v", p)
	}
	m.state("mlx5_0", "1: DOWN", "2: Polling")
	r.probe()
	at := r.v.Now
	r.probe()
	if p := r.port("mlx5_0"); p.Up || p.DownAt != at || p.FlapAt != at || p.Flaps != 1 {
		t.Errorf("down at %d: %+v", at, p)
	}
	m.state("mlx5_0", "4: ACTIVE", "5: LinkUp")
	r.probe()
	if p := r.port("mlx5_0"); !p.Up || p.DownAt != 0 || p.FlapAt != at || p.Flaps != 1 {
		t.Errorf("%+v", p)
	}
	if !r.log.has("a NIC's port has changed device=mlx5_0 port=1 state=DOWN physical_state=Polling") {
		t.Error(r.log.lines)
	}
}

// What no probe saw the kernel has counted; what it also announced counts once.
func TestFlaps(t *testing.T) {
	m := newMachine(t)
	m.roce("mlx5_0", "0000:18:00.0", "ens1np0", 4)
	r := start(t, m, nil)
	r.probe()
	if p := r.port("mlx5_0"); p.Flaps != 0 {
		t.Fatalf("what was before is no flap: %+v", p)
	}
	m.netdev("ens1np0", 4, true, 4) // went down twice, and no one said so
	r.probe()
	if p := r.port("mlx5_0"); p.Flaps != 2 || p.FlapAt != r.v.Now || !p.Up || p.DownAt != 0 {
		t.Errorf("%+v", p)
	}
	r.hear(seenLink{name: "ens1np0", index: 4, up: false, downs: count(5)})
	if p := r.port("mlx5_0"); p.Flaps != 3 || p.Links[0].Up || p.FlapAt != r.v.Now {
		t.Errorf("%+v", p)
	}
	m.netdev("ens1np0", 4, true, 5)
	r.hear(seenLink{name: "ens1np0", index: 4, up: true, downs: count(5)})
	r.probe()
	r.hear(seenLink{name: "ens1np0", index: 4, up: false, downs: count(4)}) // overtaken by the probe
	if p := r.port("mlx5_0"); p.Flaps != 3 || !p.Links[0].Up {
		t.Errorf("%+v", p)
	}
	r.hear(seenLink{name: "eth0", index: 2, up: false, downs: count(9)}) // somebody else's
	m.netdev("ens1np0", 14, true, 1)                                     // made anew, as after a reset of the NIC
	r.probe()
	if p := r.port("mlx5_0"); p.Flaps != 3 || len(p.Links) != 1 {
		t.Errorf("%+v", p)
	}
	if !r.log.has("a NIC's link has lost its carrier device=mlx5_0 port=1 netdev=ens1np0") {
		t.Error(r.log.lines)
	}
}

// A port's count does not go back when its interface gets another name.
func TestFlapsOfARenamedInterface(t *testing.T) {
	m := newMachine(t)
	m.roce("mlx5_0", "0000:18:00.0", "ens1np0", 4)
	r := start(t, m, nil)
	r.probe()
	m.netdev("ens1np0", 4, true, 5)
	r.probe()
	if p := r.port("mlx5_0"); p.Flaps != 3 {
		t.Fatalf("%+v", p)
	}
	m.remove("class/net/ens1np0")
	m.netdev("rail0", 4, true, 5)
	m.write("class/infiniband/mlx5_0/ports/1/gid_attrs/ndevs/0", "rail0\n")
	r.probe()
	if p := r.port("mlx5_0"); p.Flaps != 3 || len(p.Links) != 1 || p.Links[0].NetDev != "rail0" {
		t.Errorf("renamed: %+v", p)
	}
	m.netdev("rail0", 4, true, 6)
	r.probe()
	if p := r.port("mlx5_0"); p.Flaps != 4 {
		t.Errorf("after another flap: %+v", p)
	}
}

// Without the kernel's count, announcements are what there is.
func TestFlapsOfOldKernels(t *testing.T) {
	m := newMachine(t)
	m.roce("mlx5_0", "0000:18:00.0", "ens1np0", 4)
	m.remove("class/net/ens1np0/carrier_down_count")
	r := start(t, m, nil)
	r.probe()
	for range 2 {
		r.hear(seenLink{name: "ens1np0", index: 4, up: false})
		r.hear(seenLink{name: "ens1np0", index: 4, up: true})
	}
	if p := r.port("mlx5_0"); p.Flaps != 2 || !p.Links[0].Up {
		t.Errorf("%+v", p)
	}
}

// A change that is announced is looked at soon, however long the period.
func TestAnnouncementHurriesProbe(t *testing.T) {
	m := newMachine(t)
	m.roce("mlx5_0", "0000:18:00.0", "ens1np0", 4)
	r := start(t, m, nil)
	r.probe()
	m.state("mlx5_0", "1: DOWN", "3: Disabled")
	r.pass(time.Second)
	if r.probes.Busy() {
		t.Fatal("a probe that nobody asked for")
	}
	r.hear(seenLink{name: "ens1np0", index: 4, up: false, downs: count(3)})
	r.landed()
	if p := r.port("mlx5_0"); p.Up || p.Flaps != 1 || p.PhysicalState != "Disabled" {
		t.Errorf("%+v", p)
	}
}

func TestAnnouncementsLost(t *testing.T) {
	m := newMachine(t)
	m.roce("mlx5_0", "0000:18:00.0", "ens1np0", 4)
	r := start(t, m, nil)
	r.probe()
	m.netdev("ens1np0", 4, true, 3)
	r.air.errs <- unix.ENOBUFS
	r.air.errs <- unix.ENOBUFS // the first has been counted
	r.pass(time.Second)
	r.landed()
	if p := r.port("mlx5_0"); r.v.NICs.EventsLost < 1 || p.Flaps != 1 {
		t.Errorf("%+v", r.v.NICs)
	}
}

// Nobody announces: probes go on.
func TestDeaf(t *testing.T) {
	m := newMachine(t)
	m.roce("mlx5_0", "0000:18:00.0", "ens1np0", 4)
	r := start(t, m, nil)
	r.air.opened = unix.EPERM
	r.probe()
	m.netdev("ens1np0", 4, true, 3)
	r.probe()
	if p := r.port("mlx5_0"); p.Flaps != 1 || !r.log.has("changes of links are seen by probes only") {
		t.Errorf("%+v %v", p, r.log.lines)
	}
}

// The members of a bond flap while the bond does not.
func TestBond(t *testing.T) {
	m := newMachine(t)
	m.roce("mlx5_bond_0", "0000:18:00.0", "bond0", 9)
	m.write("class/net/bond0/bonding/slaves", "ens1f0np0 ens1f1np1")
	m.netdev("ens1f0np0", 4, true, 1)
	m.netdev("ens1f1np1", 5, true, 1)
	r := start(t, m, nil)
	r.probe()
	r.hear(seenLink{name: "ens1f1np1", index: 5, up: false, downs: count(2)})
	p := r.port("mlx5_bond_0")
	want := []collector.NICLink{{NetDev: "bond0", Up: true}, {NetDev: "ens1f0np0", Up: true}, {NetDev: "ens1f1np1", Flaps: 1}}
	if diff := cmp.Diff(want, p.Links); diff != "" || p.Flaps != 0 || !p.Up {
		t.Errorf("%+v\n%s", p, diff)
	}
}

// A device that vanishes is gone, not forgotten; it may come back.
func TestDeviceGone(t *testing.T) {
	m := newMachine(t)
	m.roce("mlx5_0", "0000:18:00.0", "ens1np0", 4)
	m.roce("mlx5_10", "0000:ce:00.0", "ens10np0", 6)
	m.roce("mlx5_9", "0000:c0:00.0", "ens9np0", 5)
	r := start(t, m, nil)
	r.probe()
	dir := filepath.Join(m.dir, "class/infiniband")
	if err := os.Rename(filepath.Join(dir, "mlx5_9"), filepath.Join(m.dir, "away")); err != nil {
		t.Fatal(err)
	}
	if err := r.probe(); err != nil {
		t.Fatal(err)
	}
	at := r.v.Now
	r.probe()
	want := collector.NICPort{
		Device: "mlx5_9", Port: 1, Layer: "Ethernet", BusID: "0000:c0:00.0", Model: "MT4129", Firmware: "28.39.1002",
		Gone: true, DownAt: at, Flaps: 1, FlapAt: at, Links: []collector.NICLink{{NetDev: "ens9np0"}},
	}
	if diff := cmp.Diff(want, r.port("mlx5_9")); diff != "" {
		t.Error(diff)
	}
	if got := r.v.NICs.Ports; len(got) != 3 || got[1].Device != "mlx5_9" || got[2].Device != "mlx5_10" || !got[2].Up {
		t.Errorf("%+v", got)
	}
	if !r.log.has("a NIC is gone device=mlx5_9 port=1") {
		t.Error(r.log.lines)
	}
	if err := os.Rename(filepath.Join(m.dir, "away"), filepath.Join(dir, "mlx5_9")); err != nil {
		t.Fatal(err)
	}
	r.probe()
	if p := r.port("mlx5_9"); !p.Up || p.Gone || p.DownAt != 0 || p.Flaps != 1 {
		t.Errorf("%+v", p)
	}
	// The last one goes, and its driver with it.
	m.remove("class/infiniband")
	if err := r.probe(); err != nil || !r.port("mlx5_0").Gone {
		t.Errorf("%v %+v", err, r.v.NICs)
	}
}

func TestNothingToSee(t *testing.T) {
	m := newMachine(t)
	r := start(t, m, nil)
	if err := r.probe(); !errors.Is(err, source.ErrNoData) || !strings.Contains(err.Error(), "no RDMA driver is loaded") || r.v.NICs != nil {
		t.Fatalf("%v %+v", err, r.v.NICs)
	}
	if err := os.MkdirAll(filepath.Join(m.dir, "class/infiniband"), 0o755); err != nil {
		t.Fatal(err)
	}
	if r.pass(30 * time.Second); r.probes.Busy() {
		t.Fatal("it looks again every minute")
	}
	r.pass(31 * time.Second)
	if err := r.landed(); !errors.Is(err, source.ErrNoData) || !strings.Contains(err.Error(), "no RDMA device in") {
		t.Fatal(err)
	}
	m.rxe("rxe0", "veth0", 7)
	r.pass(61 * time.Second)
	if err := r.landed(); err != nil || !r.port("rxe0").Up {
		t.Fatal(err)
	}
}

// A name in a file leads to no other place, and what is not of this namespace is not there.
func TestHostileNames(t *testing.T) {
	for _, name := range []string{"../../secret", "/etc/passwd", ".", "..", "", "other-namespace", "a\nb"} {
		m := newMachine(t)
		m.roce("mlx5_0", "0000:18:00.0", "ens1np0", 4)
		m.write("class/infiniband/mlx5_0/ports/1/gid_attrs/ndevs/0", name)
		m.write("secret/ifindex", "1")
		r := start(t, m, nil)
		if err := r.probe(); err != nil {
			t.Errorf("%q: %v", name, err)
		}
		if p := r.port("mlx5_0"); len(p.Links) != 0 || !p.Up {
			t.Errorf("%q: %+v", name, p)
		}
	}
}

// IPoIB's interface is the function's.
func TestInterfaceByFunction(t *testing.T) {
	m := newMachine(t)
	m.roce("mlx5_0", "0000:18:00.0", "ibp24s0", 4)
	m.remove("class/infiniband/mlx5_0/ports/1/gid_attrs/ndevs/0")
	m.write("devices/pci0000:15/0000:18:00.0/net/ibp24s0/dev_port", "0")
	m.write("class/net/ibp24s0/dev_port", "0")
	r := start(t, m, nil)
	r.probe()
	if p := r.port("mlx5_0"); len(p.Links) != 1 || p.Links[0].NetDev != "ibp24s0" {
		t.Errorf("%+v", p)
	}
}

func BenchmarkProbe(b *testing.B) {
	m := newMachine(b)
	for i := range 10 {
		m.roce(fmt.Sprintf("mlx5_%d", i), fmt.Sprintf("0000:%02x:00.0", 0x10+i), fmt.Sprintf("ens%dnp0", i), i+2)
	}
	for b.Loop() {
		p := probe{sys: os.DirFS(m.dir), at: func(string) {}}
		if err := p.run(); err != nil || len(p.ports) != 10 {
			b.Fatal(err, len(p.ports))
		}
	}
}

// FuzzProbe: whatever the files hold, nothing panics, and what is told is of the device that is there.
func FuzzProbe(f *testing.F) {
	f.Add("4: ACTIVE", "400 Gb/sec (4X NDR)", "7", "ens1", "3", "e1 e2")
	f.Add("", "NaN Gb/sec", "N/A (no PMA)", "../x", "-1", "bond0 bond0 .. /")
	f.Fuzz(func(t *testing.T, state, rate, counter, netdev, downs, slaves string) {
		file := func(s string) *fstest.MapFile { return &fstest.MapFile{Data: []byte(s)} }
		const port, link = "class/infiniband/mlx5_0/ports/1/", "class/net/ens1/"
		p := probe{at: func(string) {}, sys: fstest.MapFS{
			port + "state": file(state), port + "phys_state": file(state), port + "rate": file(rate), port + "link_layer": file("Ethernet"),
			port + "hw_counters/packet_seq_err": file(counter), port + "counters/port_rcv_data": file(counter),
			port + "gid_attrs/ndevs/0": file(netdev), link + "ifindex": file(counter), link + "carrier": file(counter),
			link + "carrier_down_count": file(downs), link + "bonding/slaves": file(slaves),
		}}
		if err := p.run(); err != nil || len(p.ports) != 1 || p.ports[0].Device != "mlx5_0" {
			t.Fatal(err, p.ports)
		}
		seen := p.ports[0]
		if len(seen.Failed) > maxFailed || len(seen.links) > maxLinks || len(seen.State) > 32 || seen.Rate != nil && !(*seen.Rate >= 0) {
			t.Errorf("%+v", seen)
		}
		for _, l := range seen.links {
			if l.name != "ens1" {
				t.Errorf("an interface that is not there: %q", l.name)
			}
		}
	})
}
