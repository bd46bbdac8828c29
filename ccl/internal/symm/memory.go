package symm

import (
	"context"
	"errors"
	"fmt"

	"github.com/lockstep-ccl/lockstep/ccl/internal/cuda"
	"golang.org/x/sys/unix"
)

// Memory is an allocation of each rank, all mapped by this one.
type Memory struct {
	Base   cuda.Ptr
	Stride uint64 // bytes from one rank's to the next
	Size   uint64 // bytes of each

	dev    *cuda.Device
	rank   int
	mapped []bool // by rank
}

// Alloc makes memory of at least so many bytes on each rank, zero once it
// returns, on all ranks. It is collective: every rank asks for the same size.
func (g *Group) Alloc(ctx context.Context, bytes uint64) (*Memory, error) {
	return g.alloc(ctx, bytes, true)
}

// Scratch is Alloc for memory whose content is undefined.
func (g *Group) Scratch(ctx context.Context, bytes uint64) (*Memory, error) {
	return g.alloc(ctx, bytes, false)
}

func (g *Group) alloc(ctx context.Context, bytes uint64, zero bool) (*Memory, error) {
	end, err := g.begin(ctx)
	if err != nil {
		return nil, err
	}
	defer end()
	d := g.cfg.Device
	size, err := roundUp(d, bytes)
	var own cuda.Handle
	if err == nil {
		if own, err = d.Create(size); err == nil {
			defer func() { _ = own.Release() }() // the mapping keeps it
		}
	}
	return g.share(ctx, own, size, err, zero)
}

// Share is Alloc for memory that the caller has: own, the whole of it, bytes
// long, whose content stays. own remains the caller's, and what it is mapped at;
// Own() is another address of the same memory, so that what a kernel writes to
// the one is seen at the other by kernels that begin after it has ended.
func (g *Group) Share(ctx context.Context, own cuda.Handle, bytes uint64) (*Memory, error) {
	end, err := g.begin(ctx)
	if err != nil {
		return nil, err
	}
	defer end()
	size, err := roundUp(g.cfg.Device, bytes)
	if err == nil && size != bytes {
		err = fmt.Errorf("%d bytes are no multiple of the GPU's granularity", bytes)
	}
	return g.share(ctx, own, bytes, err, false)
}

// share is a collective call of two rounds. failed is why this rank has nothing
// to offer; it takes part nevertheless, so that all ranks agree.
func (g *Group) share(ctx context.Context, own cuda.Handle, size uint64, failed error, zero bool) (*Memory, error) {
	fd := -1
	if failed == nil {
		fd, failed = own.Export()
	}
	offer := message{kind: kindOffer, bytes: size}
	if failed != nil {
		offer.failed, offer.text = true, failed.Error()
	}
	offers, err := g.round(ctx, offer, fd)
	if fd >= 0 {
		unix.Close(fd)
	}
	if err != nil {
		return nil, err
	}
	defer closeAll(offers)
	// Everyone has the same offers, and so the same verdict.
	if err := verdict(offers, failed, g.cfg.Rank); err != nil {
		return nil, fmt.Errorf("symmetric memory of %d bytes: %w", size, err)
	}
	for r, o := range offers {
		if o.bytes != offers[0].bytes {
			return nil, fmt.Errorf("symmetric memory: %w", &RankError{r, fmt.Errorf("asks for %d bytes, rank 0 for %d: all must ask for the same", o.bytes, offers[0].bytes)})
		}
	}

	m := &Memory{Stride: size, Size: size, dev: g.cfg.Device, rank: g.cfg.Rank, mapped: make([]bool, g.cfg.Size)}
	failed = m.mapAll(offers, own)
	if failed == nil && zero {
		var pending bool
		if pending, failed = clearMemory(ctx, g.cfg.Device, m.Own(), size); pending {
			m.Base, m.mapped = 0, nil // better lost than unmapped under the GPU's hands
		}
	}
	state := message{kind: kindMapped}
	if failed != nil {
		state.failed, state.text = true, failed.Error()
	}
	states, err := g.round(ctx, state, -1)
	if err == nil {
		closeAll(states)
		err = verdict(states, failed, g.cfg.Rank)
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("symmetric memory of %d bytes: %w", size, err), m.Close())
	}
	return m, nil
}

// verdict is the error of the first rank that failed; own is this rank's.
func verdict(ms []message, own error, rank int) error {
	for r, m := range ms {
		switch {
		case r == rank && own != nil:
			return &RankError{r, own}
		case m.failed:
			return &RankError{r, errors.New(m.text)}
		}
	}
	return nil
}

func (m *Memory) mapAll(offers []message, own cuda.Handle) error {
	var err error
	if m.Base, err = m.dev.Reserve(m.Stride*uint64(len(offers)), 0); err != nil {
		return err
	}
	for r, o := range offers {
		h := own
		if r != m.rank {
			if o.fd < 0 {
				return fmt.Errorf("rank %d sent no memory", r)
			}
			if h, err = m.dev.Import(o.fd); err != nil {
				return fmt.Errorf("memory of rank %d: %w", r, err)
			}
		}
		err = m.dev.Map(m.At(r), m.Size, h)
		if r != m.rank {
			err = errors.Join(err, h.Release())
		}
		if err != nil {
			return fmt.Errorf("memory of rank %d: %w", r, err)
		}
		m.mapped[r] = true
	}
	return nil
}

// At is where this rank sees rank's memory.
func (m *Memory) At(rank int) cuda.Ptr { return m.Base + cuda.Ptr(uint64(rank)*m.Stride) }

// Own is where this rank sees its own.
func (m *Memory) Own() cuda.Ptr { return m.At(m.rank) }

// Close takes all ranks' memory out of this rank's address space; each rank's is
// freed when the last that maps it has done so. This rank's GPU must have
// finished with it; peers may go on. A second Close does nothing.
func (m *Memory) Close() error {
	var errs []error
	for r, is := range m.mapped {
		if is {
			errs = append(errs, m.dev.Unmap(m.At(r), m.Size))
			m.mapped[r] = false
		}
	}
	if m.Base != 0 {
		errs = append(errs, m.dev.FreeReserved(m.Base, m.Stride*uint64(len(m.mapped))))
		m.Base = 0
	}
	return errors.Join(errs...)
}

// Allocation is memory of one GPU that can be shared later.
type Allocation struct {
	Ptr    cuda.Ptr
	Size   uint64 // rounded up to the GPU's granularity
	Handle cuda.Handle

	dev *cuda.Device
}

// Allocate makes memory of at least so many bytes, mapped for dev; its content
// is undefined.
func Allocate(dev *cuda.Device, bytes uint64) (_ *Allocation, err error) {
	a := &Allocation{dev: dev}
	if a.Size, err = roundUp(dev, bytes); err != nil {
		return nil, err
	}
	if a.Handle, err = dev.Create(a.Size); err != nil {
		return nil, err
	}
	if a.Ptr, err = dev.Reserve(a.Size, 0); err != nil {
		return nil, errors.Join(err, a.Handle.Release())
	}
	if err = dev.Map(a.Ptr, a.Size, a.Handle); err != nil {
		return nil, errors.Join(err, dev.FreeReserved(a.Ptr, a.Size), a.Handle.Release())
	}
	return a, nil
}

// Close frees the memory once nobody shares it any more. The GPU must have
// finished with it. A second Close does nothing.
func (a *Allocation) Close() error {
	if a.Ptr == 0 {
		return nil
	}
	p := a.Ptr
	a.Ptr = 0
	return errors.Join(a.dev.Unmap(p, a.Size), a.dev.FreeReserved(p, a.Size), a.Handle.Release())
}

func roundUp(d *cuda.Device, bytes uint64) (uint64, error) {
	g, err := d.Granularity()
	if err != nil {
		return bytes, err
	}
	if bytes == 0 || bytes > 1<<48 { // more than any address space; the sum below cannot wrap
		return bytes, fmt.Errorf("%d bytes cannot be allocated", bytes)
	}
	return (bytes + g - 1) / g * g, nil
}

// clearMemory answers pending when it gave up while the GPU was still at it.
func clearMemory(ctx context.Context, d *cuda.Device, p cuda.Ptr, n uint64) (pending bool, err error) {
	s, err := d.NewStream(0)
	if err != nil {
		return false, err
	}
	if err = s.Set8(p, 0, n); err == nil {
		err = s.Wait(ctx)
		pending = err != nil
	}
	return pending, errors.Join(err, s.Close())
}
