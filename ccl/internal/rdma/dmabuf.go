package rdma

import (
	"errors"
	"fmt"
	"slices"
	"unsafe"

	"github.com/lockstep-ccl/lockstep/ccl/internal/nic"
	"golang.org/x/sys/unix"
)

// dmaBuffer is a GPU's memory. Work requests name it by addresses that are reserved in
// this process, where nothing can be read: who takes the bytes of such a region for the
// CPU's ends with a fault, and not with other bytes than the NIC's.
type dmaBuffer struct {
	fd       int
	reserved []byte
}

// dmaAlign is what the addresses are a multiple of: that of a GPU's large pages, or a NIC
// could not translate by such pages.
const dmaAlign = 2 << 20

// RegisterDMABuf makes the first n bytes of a DMA buffer a region, until Close; fd stays
// the caller's. What of it SendKept is given never goes any other way than from where it
// lies, so Worker.Need has to find that it can.
func RegisterDMABuf(fd, n int) (*Region, error) {
	if n <= 0 {
		return nil, errors.New("register no memory")
	}
	b := &dmaBuffer{}
	var err error
	if b.fd, err = unix.FcntlInt(uintptr(fd), unix.F_DUPFD_CLOEXEC, 0); err != nil {
		return nil, fmt.Errorf("register %d bytes of the DMA buffer %d: %w", n, fd, err)
	}
	if b.reserved, err = unix.Mmap(-1, 0, n+dmaAlign, unix.PROT_NONE, unix.MAP_PRIVATE|unix.MAP_ANON|unix.MAP_NORESERVE); err != nil {
		unix.Close(b.fd)
		return nil, fmt.Errorf("reserve %d bytes of addresses: %w", n+dmaAlign, err)
	}
	skip := -uintptr(unsafe.Pointer(unsafe.SliceData(b.reserved))) & (dmaAlign - 1)
	r, err := enlist(b.reserved[skip:][:n:n], b)
	if err != nil {
		return nil, errors.Join(err, b.close())
	}
	return r, nil
}

// Bytes stands for the bytes of a DMA buffer's region. They can be cut and given to
// SendKept, not read.
func (r *Region) Bytes() []byte {
	b := r.buffer.reserved
	return b[r.addr-uint64(uintptr(unsafe.Pointer(unsafe.SliceData(b)))):][: r.end-r.addr : r.end-r.addr]
}

func (b *dmaBuffer) close() error {
	if b == nil {
		return nil
	}
	return errors.Join(unix.Munmap(b.reserved), unix.Close(b.fd))
}

// Need registers a DMA buffer's region with the devices of ports, and has connections use
// no path from now on whose device has not got it: what lies there cannot be copied. It is
// for before the first bytes. With an error, which says of which device, nobody needs it.
func (w *Worker) Need(r *Region, ports []nic.Port) error {
	var devs []*device
	w.mu.Lock()
	for i := range ports {
		n, err := w.nic(ports[i].Device)
		if err != nil {
			w.mu.Unlock()
			return err
		}
		devs = append(devs, n.dev)
	}
	w.needs = append(w.needs, r)
	w.mu.Unlock()
	for _, d := range devs {
		if err := r.needed(d); err != nil {
			w.mu.Lock()
			w.needs = slices.DeleteFunc(w.needs, func(o *Region) bool { return o == r })
			w.mu.Unlock()
			return err
		}
	}
	return nil
}

// lacks is why a device cannot send what connections need to send from it.
func (w *Worker) lacks(d *device) error {
	for _, r := range w.needs {
		if err := r.needed(d); err != nil {
			d.lacking.Do(func() { w.opt.Log.Warn("RDMA: no path uses a device any more", "device", d.name, "err", err) })
			return err
		}
	}
	return nil
}

// needed registers the region with a device, unless it is over.
func (r *Region) needed(d *device) error {
	r.mu.Lock()
	over := r.over
	r.mu.Unlock()
	if over {
		return nil
	}
	if _, err := r.key(d); err != nil {
		return fmt.Errorf("%s refuses the GPU's memory: %w", d.name, err)
	}
	return nil
}
