package ccl

import (
	"fmt"
	"time"

	"github.com/lockstep-ccl/lockstep/ccl/internal/cuda"
	"github.com/lockstep-ccl/lockstep/ccl/internal/nic"
	"github.com/lockstep-ccl/lockstep/ccl/internal/rdma"
	"github.com/lockstep-ccl/lockstep/ccl/internal/transport"
)

// Net is what carries bytes between nodes.
type Net = transport.Net

const (
	// NetAuto is RDMA where both ranks have a usable port on one network, else TCP;
	// why it is TCP is logged by one rank (log/slog), unless no machine has RDMA.
	NetAuto = transport.NetAuto
	// NetRDMA is RDMA or an error that says what was looked for, and where.
	NetRDMA = transport.NetRDMA
	NetTCP  = transport.NetTCP
)

// RDMAConfig tunes RDMA between nodes. Zero values are the defaults.
type RDMAConfig struct {
	// HCA says which ports may be used, in the syntax of NCCL_IB_HCA:
	// "=mlx5_0:1,mlx5_1", "^mlx5_3". By default the nearest, and the next as backup.
	HCA string
	// GID is the address, or the prefix of the address, of the GID to use.
	GID string
	// QueuePairs is how many queue pairs a connection sends over at once, 1 to 16; 1 by default.
	QueuePairs int
	// Timeout is how long a NIC waits for an acknowledgement, 4.096 µs × 2^Timeout; 14
	// (67 ms) by default. It retries Retries times, 1 to 6; 6 by default.
	Timeout, Retries           int
	TrafficClass, ServiceLevel int
	// FailbackAfter is how long a port has to be healthy before it is used again,
	// 10 s by default; it doubles with each relapse.
	FailbackAfter time.Duration
	// GiveUpAfter is how long a connection without any path looks for one, 10 s by default.
	GiveUpAfter time.Duration
}

func (c *RDMAConfig) options() rdma.Options {
	return rdma.Options{
		Lanes: c.QueuePairs, Timeout: c.Timeout, Retries: c.Retries, TrafficClass: c.TrafficClass, ServiceLevel: c.ServiceLevel,
		FailbackAfter: c.FailbackAfter, GiveUpAfter: c.GiveUpAfter,
	}
}

// checkNet reports what of Config.Net and Config.RDMA cannot be.
func checkNet(n Net, r *RDMAConfig) error {
	switch n {
	case "", NetAuto, NetRDMA, NetTCP:
	default:
		return fmt.Errorf("network %q, want %s, %s or %s", n, NetAuto, NetRDMA, NetTCP)
	}
	o := r.options()
	if err := o.SetDefaults(); err != nil {
		return err
	}
	_, err := nic.ParseOverride(r.HCA, r.GID)
	return err
}

// nics are the RDMA ports for the rank with that number on its node, best first.
func nics(r *RDMAConfig, on Device, local int) ([]nic.Port, error) {
	o, err := nic.ParseOverride(r.HCA, r.GID)
	if err != nil {
		return nil, err
	}
	t, err := nic.Host()
	if err != nil {
		return nil, err
	}
	near := nic.Near{NUMA: -1, LocalRank: local}
	if on != CPU {
		if near.GPU, err = busID(on); err != nil {
			return nil, err
		}
	}
	return t.Select(near, o)
}

// busID is where on PCIe a GPU is.
func busID(d Device) (string, error) {
	drv, err := cuda.Open()
	if err != nil {
		return "", err
	}
	dev, err := drv.Device(d.Ordinal())
	if err != nil {
		return "", err
	}
	defer dev.Close()
	return dev.PCIBus, nil
}
