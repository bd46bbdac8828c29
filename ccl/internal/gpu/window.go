package gpu

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/lockstep-ccl/lockstep/ccl/internal/cuda"
	"github.com/lockstep-ccl/lockstep/ccl/internal/symm"
)

// Window is memory of every rank that every rank has mapped: what lies in it, at
// the same offset on all ranks, peers read and write in place.
type Window struct {
	c     *Comm
	user  cuda.Ptr
	size  uint64
	mem   *symm.Memory
	owner *symm.Allocation
	// theirs is where each rank has mapped this rank's memory.
	theirs [MaxRanks]cuda.Ptr
}

// Register makes an allocation of every rank a window; all ranks call it, with
// allocations of one size.
func (c *Comm) Register(ctx context.Context, a *symm.Allocation) (*Window, error) {
	mem, err := c.group.Share(ctx, a.Handle, a.Size)
	if err != nil {
		return nil, fmt.Errorf("register a window of %d bytes: %w", a.Size, err)
	}
	theirs, err := c.theirs(ctx, mem)
	if err != nil {
		return nil, errors.Join(fmt.Errorf("register a window of %d bytes: %w", a.Size, err), mem.Close())
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	w := &Window{c: c, user: a.Ptr, size: a.Size, mem: mem, owner: a, theirs: theirs}
	list := append(slices.Clone(c.registered()), w)
	c.windows.Store(&list)
	return w, nil
}

// registered is the windows there are.
func (c *Comm) registered() []*Window {
	if l := c.windows.Load(); l != nil {
		return *l
	}
	return nil
}

// Deregister ends a window. No operation may be using it; peers may still map
// it, so all ranks deregister before the memory is freed.
func (w *Window) Deregister() error {
	c := w.c
	c.mu.Lock()
	defer c.mu.Unlock()
	list := slices.Clone(c.registered())
	i := slices.Index(list, w)
	if i < 0 {
		return errors.New("deregister a window: not registered (any more)")
	}
	list = slices.Delete(list, i, i+1)
	c.windows.Store(&list)
	return w.mem.Close()
}

// find is the window that holds n bytes at p, and where in it they are.
func (c *Comm) find(p cuda.Ptr, n uint64) (w *Window, off uint64) {
	for _, w := range c.registered() {
		if p >= w.user && uint64(p-w.user)+n <= w.size {
			return w, uint64(p - w.user)
		}
	}
	return nil, 0
}

// at is where rank's memory of the window lies here.
func (w *Window) at(rank int, off uint64) cuda.Ptr {
	if rank == w.c.rank {
		return w.user + cuda.Ptr(off)
	}
	return w.mem.At(rank) + cuda.Ptr(off)
}
