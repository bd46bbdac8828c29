package ccl

import (
	"fmt"
	"slices"
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

// checkNet reports what of Net and RDMA cannot be.
func (cfg *Config) checkNet() error {
	switch cfg.Net {
	case "", NetAuto, NetRDMA, NetTCP:
	default:
		return fmt.Errorf("network %q, want %s, %s or %s", cfg.Net, NetAuto, NetRDMA, NetTCP)
	}
	o := cfg.RDMA.options()
	if err := o.SetDefaults(); err != nil {
		return err
	}
	_, err := nic.ParseOverride(cfg.RDMA.HCA, cfg.RDMA.GID)
	return err
}

// rdma is what this rank brings of RDMA to its communicator.
func (c *Comm) rdma() transport.RDMA {
	r := transport.RDMA{Net: c.cfg.Net, Options: c.cfg.RDMA.options()}
	if len(c.place.Local) == c.size {
		r.Net = NetTCP // nobody is on another node
	}
	if r.Net == NetTCP {
		return r
	}
	if r.Ports, r.Why = c.nics(); r.Net != NetRDMA {
		r.Note = c.noteTCP
	}
	return r
}

// nics are the RDMA ports for this rank, best first.
func (c *Comm) nics() ([]nic.Port, error) {
	o, err := nic.ParseOverride(c.cfg.RDMA.HCA, c.cfg.RDMA.GID)
	if err != nil {
		return nil, err
	}
	t, err := nic.Host()
	if err != nil {
		return nil, err
	}
	near := nic.Near{NUMA: -1, LocalRank: slices.Index(c.place.Local, c.rank)}
	if c.cfg.Device != CPU {
		if near.GPU, err = busID(c.cfg.Device); err != nil {
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

// noteTCP says once in a process why TCP carries what RDMA could.
func (c *Comm) noteTCP(why error) {
	if c.proc.once("tcp") {
		c.cfg.logger().Info("TCP between nodes: RDMA cannot be used", "communicator", c.name, "reason", why)
	}
}
