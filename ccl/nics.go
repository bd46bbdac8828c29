package ccl

import (
	"errors"
	"io/fs"

	"github.com/lockstep-ccl/lockstep/ccl/internal/nic"
)

// NICChoice is what a rank at one place of a node would use.
type NICChoice struct {
	GPU   string    `json:"gpu_pci_bus_id,omitempty"` // "" for a rank without one
	NUMA  int       `json:"numa_node"`                // -1: unknown
	Local int       `json:"local_rank"`               // of a rank without a GPU; more of them begin anew
	Ports []NICPort `json:"ports"`                    // the primary, the backup, and what else could be used
}

// NICPort is a port, and why it has its place or cannot be used.
type NICPort struct {
	Device  string `json:"device"`
	Port    int    `json:"port"`
	Address string `json:"address,omitempty"` // IP address, or the GID on InfiniBand
	Why     string `json:"why"`
}

// NICs tells which RDMA ports the ranks of a node would use, and which ones
// nobody can. sys is what is mounted at /sys; hcas and gid are LOCKSTEP_RDMA_HCA and
// LOCKSTEP_RDMA_GID. No port at all that can be used is no error.
func NICs(sys fs.FS, hcas, gid string) (choices []NICChoice, unusable []NICPort, err error) {
	override, err := nic.ParseOverride(hcas, gid)
	if err != nil {
		return nil, nil, err
	}
	tree, err := nic.Read(sys)
	if err != nil {
		return nil, nil, err
	}
	for i := range tree.Devices {
		for k := range tree.Devices[i].Ports {
			p := &tree.Devices[i].Ports[k]
			if err := tree.Usable(p, override); err != nil {
				unusable = append(unusable, NICPort{Device: p.Device, Port: p.Num, Why: err.Error()})
			}
		}
	}
	choose := func(c NICChoice) (NICChoice, error) {
		ports, err := tree.Select(nic.Near{GPU: c.GPU, NUMA: c.NUMA, LocalRank: c.Local}, override)
		for i := range ports {
			p := &ports[i]
			c.Ports = append(c.Ports, NICPort{Device: p.Device, Port: p.Num, Address: p.Address(), Why: p.Why})
		}
		return c, err
	}
	for _, g := range tree.GPUs {
		c, err := choose(NICChoice{GPU: g.BusID, NUMA: g.NUMA})
		if err != nil {
			return nil, unusable, unlessNone(err)
		}
		choices = append(choices, c)
	}
	if len(tree.GPUs) > 0 {
		return choices, unusable, nil
	}
	for _, numa := range tree.NUMANodes() {
		first := len(choices)
		for local := 0; ; local++ {
			c, err := choose(NICChoice{NUMA: numa, Local: local})
			if err != nil {
				return nil, unusable, unlessNone(err)
			}
			if local > 0 && c.Ports[0] == choices[first].Ports[0] {
				break // the turns begin anew
			}
			choices = append(choices, c)
		}
	}
	return choices, unusable, nil
}

// unlessNone passes over that there is no port.
func unlessNone(err error) error {
	if errors.Is(err, nic.ErrNoPort) {
		return nil
	}
	return err
}
