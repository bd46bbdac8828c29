package proxy

import (
	"errors"
	"fmt"
	"slices"

	"github.com/lockstep-ccl/lockstep/ccl/internal/cuda"
	"github.com/lockstep-ccl/lockstep/ccl/internal/engine"
	"github.com/lockstep-ccl/lockstep/ccl/internal/nic"
	"github.com/lockstep-ccl/lockstep/ccl/internal/rdma"
	"github.com/lockstep-ccl/lockstep/record"
)

// Direct says whether NICs read what this rank sends to other nodes from the GPU's memory. Ranks may
// differ in it.
type Direct string

const (
	// DirectAuto uses it if all NICs that this rank sends over are below the GPU's own PCIe
	// switch or root port, and they and their backups can register the memory. Otherwise
	// Config.Note gets the reason.
	DirectAuto Direct = "auto"
	// DirectOff is the default until the other values have been proven on hardware.
	DirectOff Direct = "off"
	// DirectRequire uses it at any distance. If it is not possible, New fails.
	DirectRequire Direct = "require"
)

// Check returns an error if d is none of the values.
func (d Direct) Check() error {
	switch d {
	case "", DirectAuto, DirectOff, DirectRequire:
		return nil
	}
	return fmt.Errorf("%q, want %s, %s or %s", string(d), DirectAuto, DirectOff, DirectRequire)
}

// direct holds bounce buffers in the GPU's memory, beside the pinned ones. They hold this rank's
// contribution to a chunk if only NICs read it. What this rank receives or forwards is in pinned
// memory. Peers see no difference.
type direct struct {
	mem    *cuda.Exported
	region *rdma.Region
}

// openDirect allocates these buffers, if the configuration asks for them and the hardware supports
// them.
func (n *Proxy) openDirect() error {
	if n.cfg.Direct == "" || n.cfg.Direct == DirectOff {
		return nil
	}
	err := n.tryDirect()
	if err != nil {
		err = errors.Join(err, n.direct.close())
		n.direct = direct{}
	}
	n.cfg.Note(err)
	if err == nil {
		for i := range bounces {
			n.parts = append(n.parts, engine.Part{Buf: n.direct.region.Bytes()[i*n.bounceSize:][:n.bounceSize], DType: record.Uint8, Opaque: true})
		}
		n.parts = append(n.parts, engine.Part{Buf: n.direct.region.Bytes(), DType: record.Uint8, Opaque: true})
	} else if n.cfg.Direct == DirectRequire {
		return fmt.Errorf("GPUDirect is required: %w", err)
	}
	return nil
}

// tryDirect returns why the buffers cannot be used, or nil.
func (n *Proxy) tryDirect() (err error) {
	d := &n.direct
	if n.cfg.Reads {
		return errors.New("injected faults hold bytes back, for which the CPU has to read them")
	}
	var far []int
	for r := range n.cfg.Size {
		if !slices.Contains(n.place.Local, r) {
			far = append(far, r)
		}
	}
	ports, backups, err := n.mesh.Rails(far)
	if err != nil {
		return err
	}
	for i := range ports {
		switch p := &ports[i]; {
		case n.cfg.Direct == DirectRequire:
		case p.Data:
			return fmt.Errorf("%s moves data by a function of its own, which the GPU's memory is not registered with", p.Name())
		case p.Distance > nic.SameRootPort: // reads through a root complex are slow
			return fmt.Errorf("%s is %s", p.Name(), p.Why)
		}
	}
	size := bounces * n.bounceSize
	if d.mem, err = n.dev.AllocExported(uint64(size)); err != nil {
		return err
	}
	if d.region, err = rdma.RegisterDMABuf(d.mem.FD, size); err != nil {
		return err
	}
	return n.mesh.Need(d.region, slices.Concat(ports, backups))
}

// has reports whether there are such buffers.
func (d *direct) has() bool { return d.region != nil }

func (d *direct) close() error {
	if d.region != nil {
		if err := d.region.Close(); err != nil {
			return err // a NIC may still read the memory, so it is not freed
		}
	}
	if d.mem != nil {
		return d.mem.Close()
	}
	return nil
}

// directAt returns the address of bounce buffer i in the GPU's memory.
func (n *Proxy) directAt(i int) cuda.Ptr { return n.direct.mem.Ptr + cuda.Ptr(i*n.bounceSize) }

// Indices of Op.Parts: each pinned bounce buffer, all of them as one part for messages, and the same
// in the GPU's memory.
const (
	partBounce    = 0
	partAll       = bounces
	partDirect    = bounces + 1
	partDirectAll = 2*bounces + 1
)
