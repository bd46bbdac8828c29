package nics

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/lockstep-ccl/lockstep/collector"
	"github.com/lockstep-ccl/lockstep/collector/source"
)

// sysfs is a node with a GPU and a NIC behind one switch, a second NIC
// elsewhere, and one of two whose link is shut.
func sysfs(t *testing.T) string {
	t.Helper()
	root := t.TempDir()
	file := func(name, text string) {
		name = filepath.Join(root, name)
		if err := os.MkdirAll(filepath.Dir(name), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(name, []byte(text+"\n"), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	link := func(name, to string) {
		name = filepath.Join(root, name)
		if err := os.MkdirAll(filepath.Dir(name), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.Symlink(to, name); err != nil {
			t.Fatal(err)
		}
	}
	function := func(dir, vendor, class string) {
		link("bus/pci/devices/"+filepath.Base(dir), "../../../"+dir)
		file(dir+"/vendor", vendor)
		file(dir+"/class", class)
		file(dir+"/numa_node", "0")
	}
	function("devices/pci0000:15/0000:15:01.0/0000:16:00.0/0000:17:01.0/0000:1b:00.0", "0x10de", "0x030200")
	for i, dir := range []string{
		"devices/pci0000:15/0000:15:01.0/0000:16:00.0/0000:17:00.0/0000:18:00.0",
		"devices/pci0000:37/0000:37:01.0/0000:38:00.0",
		"devices/pci0000:48/0000:48:01.0/0000:49:00.0",
	} {
		n := string(rune('0' + i))
		function(dir, "0x15b3", "0x020000")
		ib := dir + "/infiniband/mlx5_" + n
		link("class/infiniband/mlx5_"+n, "../../"+ib)
		link(ib+"/device", "../../../"+filepath.Base(dir))
		file(ib+"/node_type", "1: CA")
		file(ib+"/hca_type", "MT4129")
		file(ib+"/fw_ver", "28.39.1002")
		file(ib+"/sys_image_guid", "a088:c203:00a"+n+":1000")
		file(ib+"/ports/1/link_layer", "Ethernet")
		file(ib+"/ports/1/rate", "400 Gb/sec (4X NDR)")
		file(ib+"/ports/1/state", map[bool]string{true: "4: ACTIVE", false: "1: DOWN"}[i < 2])
		file(ib+"/ports/1/phys_state", map[bool]string{true: "5: LinkUp", false: "3: Disabled"}[i < 2])
		file(ib+"/ports/1/gids/0", "0000:0000:0000:0000:0000:ffff:0a0"+n+":0001")
		file(ib+"/ports/1/gid_attrs/types/0", "RoCE v2")
		file(ib+"/ports/1/gid_attrs/ndevs/0", "ens"+n)
		file("class/net/ens"+n+"/ifindex", "1"+n)
		file("class/net/ens"+n+"/carrier", map[bool]string{true: "1", false: "0"}[i < 2])
		file(ib+"/ports/1/hw_counters/packet_seq_err", "3")
		file(ib+"/ports/1/hw_counters/out_of_sequence", map[bool]string{true: "4", false: "x"}[i < 2])
		file(ib+"/ports/1/hw_counters/rp_cnp_handled", "11")
	}
	return root
}

func run(t *testing.T, c Cmd) (string, error) {
	t.Helper()
	if c.Timeout == 0 {
		c.Timeout = time.Minute
	}
	var b bytes.Buffer
	err := c.Run(t.Context(), &b)
	return b.String(), err
}

func squeeze(text string) string {
	var lines []string
	for _, l := range strings.Split(strings.TrimSpace(text), "\n") {
		lines = append(lines, strings.Join(strings.Fields(l), " "))
	}
	return strings.Join(lines, "\n")
}

func TestTable(t *testing.T) {
	root := sysfs(t)
	got, err := run(t, Cmd{Sys: root})
	if err != nil {
		t.Fatal(err)
	}
	_, got, _ = strings.Cut(squeeze(got), "\n\n") // without the time it took
	want := `PORT STATE LINK RATE INTERFACE BUS CHIP FIRMWARE RETRANSMISSIONS CONGESTION ERRORS
mlx5_0:1 ACTIVE (LinkUp) Ethernet 400 Gb/s ens0 0000:18:00.0 MT4129 28.39.1002 7 11 -
mlx5_1:1 ACTIVE (LinkUp) Ethernet 400 Gb/s ens1 0000:38:00.0 MT4129 28.39.1002 7 11 -
mlx5_2:1 DOWN (Disabled) Ethernet 400 Gb/s ens2 DOWN 0000:49:00.0 MT4129 28.39.1002 3 11 -

RANK NEAR PRIMARY ADDRESS WHY BACKUP WHY
GPU 0000:1b:00.0 mlx5_0:1 10.0.0.1 on the PCIe switch of the GPU mlx5_1:1 on the NUMA node of the GPU

mlx5_2:1 is not used: it is down (link Disabled)
cannot read /sys/class/infiniband/mlx5_2/ports/1/hw_counters/out_of_sequence: "x" is no number`
	if got != want {
		t.Errorf("got\n%s\nwant\n%s", got, want)
	}

	// One NIC only: no backup.
	got, err = run(t, Cmd{Sys: root, HCA: "=mlx5_1"})
	want = "GPU 0000:1b:00.0 mlx5_1:1 10.1.0.1 on the NUMA node of the GPU none -\n\n" +
		`mlx5_0:1 is not used: it is not in the list "=mlx5_1"`
	if err != nil || !strings.Contains(squeeze(got), want) {
		t.Errorf("%v\n%s\nwant\n%s", err, got, want)
	}
	got, err = run(t, Cmd{Sys: root, HCA: "mlx4"})
	if err != nil || !strings.Contains(squeeze(got), "- none can be used") {
		t.Errorf("%v\n%s", err, got)
	}
	if _, err = run(t, Cmd{Sys: root, HCA: "mlx5_0:x"}); err == nil || !strings.Contains(err.Error(), `"x"`) {
		t.Error(err)
	}

	// Without the GPU ranks take turns.
	if err := os.Remove(filepath.Join(root, "bus/pci/devices/0000:1b:00.0")); err != nil {
		t.Fatal(err)
	}
	got, err = run(t, Cmd{Sys: root})
	want = `NUMA node 0, rank 0 of it mlx5_0:1 10.0.0.1 on the NUMA node of the rank, one of 2 as near mlx5_1:1 on the NUMA node of the rank
NUMA node 0, rank 1 of it mlx5_1:1 10.1.0.1 on the NUMA node of the rank, one of 2 as near mlx5_0:1 on the NUMA node of the rank`
	if err != nil || !strings.Contains(squeeze(got), want) {
		t.Errorf("%v\n%s\nwant\n%s", err, got, want)
	}
}

func TestJSON(t *testing.T) {
	text, err := run(t, Cmd{Sys: sysfs(t), JSON: true})
	if err != nil {
		t.Fatal(err)
	}
	var got struct {
		Ports   []map[string]any
		Choices []struct {
			GPU   string `json:"gpu_pci_bus_id"`
			Ports []struct{ Device, Why string }
		}
		Unusable []map[string]any
	}
	if err := json.Unmarshal([]byte(text), &got); err != nil {
		t.Fatal(err)
	}
	if len(got.Ports) != 3 || got.Ports[0]["rate_bytes_per_second"] != 50e9 || got.Ports[2]["state"] != "DOWN" || len(got.Choices) != 1 ||
		got.Choices[0].GPU != "0000:1b:00.0" || got.Choices[0].Ports[1].Device != "mlx5_1" || len(got.Unusable) != 1 {
		t.Error(text)
	}
	if _, ok := got.Ports[0]["received_bytes"]; ok {
		t.Error("what is not known is there")
	}
}

func TestInterfaces(t *testing.T) {
	for want, links := range map[string][]collector.NICLink{
		"-":                    nil,
		"ens1":                 {{NetDev: "ens1", Up: true}},
		"bond0 of e1, e2 DOWN": {{NetDev: "bond0", Up: true}, {NetDev: "e1", Up: true}, {NetDev: "e2"}},
	} {
		if got := interfaces(links); got != want {
			t.Errorf("%s, want %s", got, want)
		}
	}
}

func TestNoDriver(t *testing.T) {
	if _, err := run(t, Cmd{Sys: t.TempDir()}); !errors.Is(err, source.ErrNoData) || !strings.Contains(err.Error(), "no RDMA driver is loaded") {
		t.Error(err)
	}
}

type silent struct{}

func (silent) Update(*source.View) error { return nil }

func TestTimeout(t *testing.T) {
	ctx, cancel := context.WithCancelCause(t.Context())
	cancel(errors.New("takes longer"))
	if _, err := look(ctx, silent{}); err == nil || err.Error() != "takes longer" {
		t.Error(err)
	}
}
