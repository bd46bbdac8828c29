package gpu

import (
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync/atomic"
	"unsafe"

	"golang.org/x/sys/unix"
)

// A mailbox is host memory that the ranks of one node share. A receiver writes there where the
// bytes of a send shall go. Each ordered pair has a ring of descriptors, which the receiver
// writes and the sender reads. The file is unlinked as soon as all have mapped it.
type mailbox struct {
	mem  []byte
	size int
}

// descriptors is how many receives of one pair may be called ahead of their sends.
const descriptors = 1024

// descriptor is one receive. number is stored last, and belongs to the receive that
// the sender looks for.
type descriptor struct {
	number uint64 // live
	where  uint64 // offset in the window
	bytes  uint64
	window uint32 // 1 + id of the window, 0: not in one, use staging
	_      [4]byte
	taken  uint64 // live: the number of the receive that the sender has read
	_      [24]byte
}

func mailboxSize(n int) int { return n * n * descriptors * int(unsafe.Sizeof(descriptor{})) }

func newMailbox(ctx context.Context, cfg Config) (*mailbox, error) {
	m := &mailbox{size: cfg.Size}
	path := ""
	var first error
	if cfg.Rank == 0 {
		f, err := os.CreateTemp(cfg.Dir, ".gpu-mail-*") // O_EXCL, 0600
		if err == nil {
			path = f.Name()
			defer os.Remove(path)
			err = unix.Fallocate(int(f.Fd()), 0, 0, int64(mailboxSize(cfg.Size)))
			err = errors.Join(err, f.Close())
		}
		first = err
	}
	// Rank 0 tells the others the file's name, or nothing when it failed to make it. Then each
	// says whether it has mapped the file.
	say := []byte(filepath.Base(path))
	if first != nil {
		say = nil
	}
	names, err := cfg.Exchange(ctx, say)
	if err != nil {
		return nil, errors.Join(first, err)
	}
	var mine error
	switch name := string(names[0]); {
	case first != nil:
		mine = first
	case name == "" || name != filepath.Base(name):
		mine = fmt.Errorf("rank 0 made none")
	default:
		mine = m.open(filepath.Join(cfg.Dir, name))
	}
	state := []byte{0}
	if mine != nil {
		state = []byte(hex.EncodeToString([]byte(mine.Error())))
	}
	states, err := cfg.Exchange(ctx, state)
	if err = errors.Join(mine, err); err != nil {
		return nil, errors.Join(err, m.close())
	}
	for r, s := range states {
		if len(s) != 1 {
			why, _ := hex.DecodeString(string(s))
			return nil, errors.Join(fmt.Errorf("rank %d could not map it: %s", r, why), m.close())
		}
	}
	return m, nil
}

func (m *mailbox) open(path string) error {
	f, err := os.OpenFile(path, os.O_RDWR|unix.O_NOFOLLOW, 0)
	if err != nil {
		return err
	}
	defer f.Close()
	fi, err := f.Stat()
	if err != nil {
		return err
	}
	if want := int64(mailboxSize(m.size)); fi.Size() != want {
		return fmt.Errorf("%s has %d bytes, want %d", path, fi.Size(), want)
	}
	m.mem, err = unix.Mmap(int(f.Fd()), 0, mailboxSize(m.size), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	return os.NewSyscallError("mmap", err)
}

func (m *mailbox) close() error {
	if m == nil || m.mem == nil {
		return nil
	}
	mem := m.mem
	m.mem = nil
	return unix.Munmap(mem)
}

func (m *mailbox) at(from, to int, number uint64) *descriptor {
	i := (from*m.size+to)*descriptors + int(number%descriptors)
	return (*descriptor)(unsafe.Pointer(&m.mem[uintptr(i)*unsafe.Sizeof(descriptor{})]))
}

// post says where receive number of the pair from → to wants its bytes.
func (m *mailbox) post(from, to int, number uint64, window uint32, where, bytes uint64) {
	l := m.at(from, to, number)
	l.window, l.where, l.bytes = window, where, bytes
	atomic.StoreUint64(&l.number, number)
}

// read is the descriptor of a receive, false while it has not been called.
func (m *mailbox) read(from, to int, number uint64) (descriptor, bool) {
	l := m.at(from, to, number)
	if atomic.LoadUint64(&l.number) != number {
		return descriptor{}, false
	}
	a := descriptor{number: number, where: l.where, bytes: l.bytes, window: l.window}
	atomic.StoreUint64(&l.taken, number)
	return a, true
}

// taken reports whether the sender has read the descriptor of a receive, so that another may
// take its place.
func (m *mailbox) taken(from, to int, number uint64) bool {
	return atomic.LoadUint64(&m.at(from, to, number).taken) >= number
}
