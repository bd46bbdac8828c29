// Package fakenic lets a test have ranks with RDMA devices on a machine without any: a model of
// libibverbs in this process, whose ranks are goroutines of it. Node 0 has mlx5_0 and mlx5_1, node 1
// mlx5_2 and mlx5_3, a port each, the first of a node on one rail and the second on another. It is for tests.
package fakenic

import (
	"fmt"
	"testing"
	"time"

	"github.com/lockstep-ccl/lockstep/ccl"
	"github.com/lockstep-ccl/lockstep/ccl/internal/verbs/verbstest"
)

// Fabric is the devices and what is between them. A process has one at a time.
type Fabric struct {
	fabric *verbstest.Fabric
}

// New makes the devices until the test ends. It skips the test where there is no gcc or no cgo.
func New(tb testing.TB) *Fabric {
	tb.Helper()
	return &Fabric{verbstest.New(tb, verbstest.Options{})}
}

// Device is a node's device on a rail.
func Device(node, rail int) string { return fmt.Sprint("mlx5_", 2*node+rail) }

// Config gives a rank its node's devices, and nothing else to reach other nodes by.
func Config(cfg *ccl.Config, node int) {
	cfg.Net = ccl.NetRDMA
	cfg.RDMA.HCA = "=" + Device(node, 0) + "," + Device(node, 1)
}

// SetPort takes a device's port down or up, and the device tells.
func (f *Fabric) SetPort(device string, up bool) { f.fabric.SetPort(device, 1, up, true) }

// Delay makes all that two devices send each other take that much longer; 0 ends it.
func (f *Fabric) Delay(a, b string, d time.Duration) {
	f.fabric.Link(a, 1, b, 1).Delay(d)
	f.fabric.Link(b, 1, a, 1).Delay(d)
}

// Connected reports whether a device has such a queue pair, and it was connected.
func (f *Fabric) Connected(device string, queuePair uint32) bool {
	_, ok := f.fabric.FlowLabel(device, queuePair)
	return ok
}
