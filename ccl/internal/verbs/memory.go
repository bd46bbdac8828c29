package verbs

import (
	"fmt"
	"syscall"
)

// PD is a protection domain: queue pairs reach the memory regions of theirs.
type PD struct {
	h   handle
	ctx *Context
}

// NewPD allocates a protection domain.
func (c *Context) NewPD() (*PD, error) {
	call := "allocate a protection domain on " + c.name
	if c.h == nil {
		return nil, closedError(call)
	}
	h, errno := allocPD(c.h)
	if errno != 0 {
		return nil, c.fail(errno, call, "")
	}
	c.children.Add(1)
	return &PD{h: h, ctx: c}, nil
}

// Close fails with ErrBusy while memory regions or queue pairs of it are open.
func (p *PD) Close() error {
	call := "close a protection domain of " + p.ctx.name
	if p.h == nil {
		return closedError(call)
	}
	if errno := deallocPD(p.h); errno != 0 {
		return p.ctx.fail(errno, call, "")
	}
	p.h = nil
	p.ctx.children.Add(-1)
	return nil
}

// MR is a memory region.
type MR struct {
	h          handle
	ctx        *Context
	Addr       uint64 // of its first byte, as work requests name it
	Len        uint64
	LKey, RKey uint32
}

// Register registers length bytes at addr. The memory is pinned until the
// region is closed, and must stay mapped.
func (p *PD) Register(addr uintptr, length int, access Access) (*MR, error) {
	call := fmt.Sprintf("register %d bytes at %#x with %s", length, addr, p.ctx.name)
	if p.h == nil {
		return nil, closedError(call)
	}
	if length <= 0 {
		return nil, p.ctx.fail(syscall.EINVAL, call, "nothing to register")
	}
	m := MR{ctx: p.ctx, Addr: uint64(addr), Len: uint64(length)}
	return p.region(&m, registerMR(p.h, &m, access), call)
}

// RegisterDMABuf registers length bytes from offset of a DMA buffer, a GPU's
// memory; work requests name its first byte iova. ErrNotSupported where the
// library (before 2021, rdma-core 34) or the kernel cannot.
func (p *PD) RegisterDMABuf(fd int, offset uint64, length int, iova uint64, access Access) (*MR, error) {
	call := fmt.Sprintf("register %d bytes of the DMA buffer %d with %s", length, fd, p.ctx.name)
	if p.h == nil {
		return nil, closedError(call)
	}
	if length <= 0 {
		return nil, p.ctx.fail(syscall.EINVAL, call, "nothing to register")
	}
	m := MR{ctx: p.ctx, Addr: iova, Len: uint64(length)}
	return p.region(&m, registerDMABuf(p.h, &m, fd, offset, access), call)
}

func (p *PD) region(m *MR, errno syscall.Errno, call string) (*MR, error) {
	if errno != 0 {
		detail := ""
		if errno == syscall.ENOMEM {
			detail = "is the limit of locked memory (ulimit -l) large enough?"
		}
		return nil, p.ctx.fail(errno, call, detail)
	}
	p.ctx.children.Add(1)
	return m, nil
}

// Close deregisters the memory.
func (m *MR) Close() error {
	call := fmt.Sprintf("deregister %d bytes at %#x from %s", m.Len, m.Addr, m.ctx.name)
	if m.h == nil {
		return closedError(call)
	}
	if errno := deregisterMR(m.h); errno != 0 {
		return m.ctx.fail(errno, call, "")
	}
	m.h = nil
	m.ctx.children.Add(-1)
	return nil
}
