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

// Direct says whether NICs read what GPU ranks send between nodes from the GPUs'
// memory. Each rank may have its own.
type Direct string

const (
	// DirectAuto uses it where every NIC that this rank sends over sits below the GPU's own
	// PCIe switch or root port, and all of them and their backups can register the memory.
	// Where it does not, the log says why.
	DirectAuto Direct = "auto"
	// DirectOff is the default until the other values have been proven on hardware.
	DirectOff Direct = "off"
	// DirectRequire: at any distance, or Init fails and says why.
	DirectRequire Direct = "require"
)

// Check reports a value that there is not.
func (d Direct) Check() error {
	switch d {
	case "", DirectAuto, DirectOff, DirectRequire:
		return nil
	}
	return fmt.Errorf("%q, want %s, %s or %s", string(d), DirectAuto, DirectOff, DirectRequire)
}

// direct is bounce buffers in the GPU's memory, beside the pinned ones. This rank's
// contribution to a chunk lies there where NICs alone read it. What it receives and passes on
// lies in pinned memory. Peers see no difference.
type direct struct {
	mem    *cuda.Exported
	region *rdma.Region
}

// openDirect makes these buffers where the configuration asks for them and the hardware can.
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
		case p.Distance > nic.SameRootPort: // through a processor's root complex it reads slowly
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

// has reports whether there are such bounce buffers.
func (d *direct) has() bool { return d.region != nil }

func (d *direct) close() error {
	if d.region != nil {
		if err := d.region.Close(); err != nil {
			return err // a NIC may still read the memory: it stays
		}
	}
	if d.mem != nil {
		return d.mem.Close()
	}
	return nil
}

// directAt is where bounce buffer i is in the GPU's memory.
func (n *Proxy) directAt(i int) cuda.Ptr { return n.direct.mem.Ptr + cuda.Ptr(i*n.bounceSize) }

// Indices of Op.Parts: the pinned bounce buffers, all of them as one for messages, and the same
// again in the GPU's memory.
const (
	partBounce    = 0
	partAll       = bounces
	partDirect    = bounces + 1
	partDirectAll = 2*bounces + 1
)
