package ccl_test

import (
	"io/fs"
	"strings"
	"testing"
	"testing/fstest"

	"github.com/google/go-cmp/cmp"

	"github.com/lockstep-ccl/lockstep/ccl"
)

// node is a sysfs of two sockets, each with a NIC and, perhaps, a GPU behind one switch.
func node(gpus bool) fstest.MapFS {
	sys := fstest.MapFS{}
	file := func(name, text string) { sys[name] = &fstest.MapFile{Data: []byte(text + "\n")} }
	link := func(name, to string) { sys[name] = &fstest.MapFile{Data: []byte(to), Mode: fs.ModeSymlink} }
	for _, n := range []string{"0", "1"} {
		root := "devices/pci0000:" + n + "0/0000:" + n + "0:01.0/0000:" + n + "1:00.0/"
		dir, bus := root+"0000:"+n+"2:00.0/0000:"+n+"3:00.0", "0000:"+n+"3:00.0"
		link("bus/pci/devices/"+bus, "../../../"+dir)
		file(dir+"/numa_node", n)
		ib := dir + "/infiniband/mlx5_" + n
		link("class/infiniband/mlx5_"+n, "../../"+ib)
		link(ib+"/device", "../../../"+bus)
		file(ib+"/node_type", "1: CA")
		file(ib+"/sys_image_guid", "a088:c203:00a"+n+":1000")
		file(ib+"/ports/1/state", "4: ACTIVE")
		file(ib+"/ports/1/link_layer", "Ethernet")
		file(ib+"/ports/1/rate", "400 Gb/sec (4X NDR)")
		file(ib+"/ports/1/gids/0", "0000:0000:0000:0000:0000:ffff:0a0"+n+":0001")
		file(ib+"/ports/1/gid_attrs/types/0", "RoCE v2")
		file(ib+"/ports/2/state", "1: DOWN")
		file(ib+"/ports/2/phys_state", "3: Disabled")
		file(ib+"/ports/2/link_layer", "Ethernet")
		if gpus {
			dir, bus := root+"0000:"+n+"2:04.0/0000:"+n+"4:00.0", "0000:"+n+"4:00.0"
			link("bus/pci/devices/"+bus, "../../../"+dir)
			file(dir+"/numa_node", n)
			file(dir+"/vendor", "0x10de")
			file(dir+"/class", "0x030200")
		}
	}
	return sys
}

func TestNICs(t *testing.T) {
	port := func(n, why string) ccl.NICPort {
		return ccl.NICPort{Device: "mlx5_" + n, Port: 1, Address: "10." + n + ".0.1", Why: why}
	}
	choices, unusable, err := ccl.NICs(node(true), "", "")
	if err != nil {
		t.Fatal(err)
	}
	want := []ccl.NICChoice{
		{GPU: "0000:04:00.0", NUMA: 0, Ports: []ccl.NICPort{port("0", "on the PCIe switch of the GPU"), port("1", "on another NUMA node than the GPU")}},
		{GPU: "0000:14:00.0", NUMA: 1, Ports: []ccl.NICPort{port("1", "on the PCIe switch of the GPU"), port("0", "on another NUMA node than the GPU")}},
	}
	if diff := cmp.Diff(want, choices); diff != "" {
		t.Error(diff)
	}
	down := []ccl.NICPort{{Device: "mlx5_0", Port: 2, Why: "is down (link Disabled)"}, {Device: "mlx5_1", Port: 2, Why: "is down (link Disabled)"}}
	if diff := cmp.Diff(down, unusable); diff != "" {
		t.Error(diff)
	}

	choices, _, err = ccl.NICs(node(false), "", "")
	want = []ccl.NICChoice{
		{NUMA: 0, Ports: []ccl.NICPort{port("0", "on the NUMA node of the rank"), port("1", "on another NUMA node than the rank")}},
		{NUMA: 1, Ports: []ccl.NICPort{port("1", "on the NUMA node of the rank"), port("0", "on another NUMA node than the rank")}},
	}
	if diff := cmp.Diff(want, choices); diff != "" || err != nil {
		t.Error(err, diff)
	}

	choices, unusable, err = ccl.NICs(node(true), "=mlx5_7", "")
	if err != nil || len(choices) != 0 || len(unusable) != 4 || unusable[0].Why != `is not in the list "=mlx5_7"` {
		t.Errorf("%v %v %v", choices, unusable, err)
	}
	if _, _, err := ccl.NICs(node(true), "", "nowhere"); err == nil || !strings.Contains(err.Error(), "nowhere") {
		t.Error(err)
	}
	if _, _, err := ccl.NICs(fstest.MapFS{}, "", ""); err == nil || !strings.Contains(err.Error(), "/sys/class/infiniband") {
		t.Error(err)
	}
}
