package transport

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"syscall"
	"time"
	"unsafe"

	"github.com/lockstep-ccl/lockstep/record"
	"golang.org/x/sys/unix"
)

// A segment is the memory file that the members of one communicator on one node
// share. It is unlinked as soon as all have mapped it, so that no way of dying
// leaks it, and sparse: what is not used is not there.
//
//	page 0         magic, members, ring size
//	per member     line 0: doorbell, line 1: entry board
//	per pair i→j   see pipe
type segment struct {
	file      *os.File
	mem       []byte
	n, me     int // members on this node, my position among them
	ring      int
	doorbells []*doorbell // by position; a rank sleeps on its own
	wakeFDs   []int       // by position: FIFO to wake one that sleeps in epoll, -1 when none
}

const (
	page        = 4096
	lineSize    = 64
	lineSlots   = 64 // of a pipe's line ring
	pipeControl = 2 * page
	segMagic    = 0x31474553504b434c // "LCKPSEG1"
	segPrefix   = "ccl-"
)

func segmentSize(n, ring int) int64 { return pairsAt(n) + int64(n*n)*int64(pipeControl+ring) }
func pairsAt(n int) int64           { return page + (int64(n)*2*lineSize+page-1)/page*page }

func newNonce() (n [16]byte) {
	rand.Read(n[:]) // never fails
	return n
}

// shareMemory creates or maps the segment of this node's members, together with
// them. Every rank of the communicator takes part in the exchanges.
func (m *Mesh) shareMemory(ctx context.Context, group []int) (*segment, error) {
	if m.cfg.Size == 1 {
		return nil, nil
	}
	lead := group[0]
	base := filepath.Join(m.cfg.Dir, fmt.Sprintf("%s%016x-%s", segPrefix, m.cfg.ID, hex.EncodeToString(m.infos[lead].Nonce[:8])))
	s := &segment{n: len(group), me: m.local[m.cfg.Rank], ring: m.cfg.Ring}
	fifos := len(group) < m.cfg.Size // somebody may have to sleep in epoll
	var err error
	if s.n > 1 {
		if m.cfg.Rank == lead {
			sweep(m.cfg.Dir)
			err = s.create(base + ".shm")
			defer os.Remove(base + ".shm")
		}
		if fifos && err == nil {
			name := fifoName(base, s.me)
			err = os.NewSyscallError("mkfifo", unix.Mkfifo(name, 0o600))
			defer os.Remove(name)
		}
	}
	// Nobody maps before it is there, nobody goes on before all have mapped.
	if err := m.agree(ctx, err); err != nil {
		s.close()
		return nil, err
	}
	if s.n > 1 {
		if m.cfg.Rank != lead {
			s.file, err = os.OpenFile(base+".shm", os.O_RDWR|unix.O_NOFOLLOW, 0)
		}
		if err == nil {
			err = s.mapFile()
		}
		for i := 0; i < s.n && fifos && err == nil; i++ {
			s.wakeFDs[i], err = unix.Open(fifoName(base, i), unix.O_RDWR|unix.O_NONBLOCK|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
		}
	}
	if err := m.agree(ctx, err); err != nil {
		s.close()
		return nil, err
	}
	if s.n == 1 {
		return nil, nil
	}
	return s, nil
}

func fifoName(base string, i int) string { return fmt.Sprintf("%s.%d.bell", base, i) }

// agree exchanges errors: all ranks go on or none does.
func (m *Mesh) agree(ctx context.Context, mine error) error {
	var b []byte
	if mine != nil {
		b = []byte(mine.Error())
	}
	blobs, err := m.cfg.Exchange(ctx, b)
	if mine != nil {
		return mine
	}
	if err != nil {
		return err
	}
	for r, b := range blobs {
		if len(b) > 0 {
			return fmt.Errorf("rank %d: %s", r, b)
		}
	}
	return nil
}

// sweep removes what members that died while opening a mesh have left. A file
// in use is there for milliseconds, but a slow starter deserves patience.
func sweep(dir string) {
	names, _ := filepath.Glob(filepath.Join(dir, segPrefix+"*"))
	for _, name := range names {
		if fi, err := os.Lstat(name); err == nil && time.Since(fi.ModTime()) > time.Hour && (strings.HasSuffix(name, ".shm") || strings.HasSuffix(name, ".bell")) {
			os.Remove(name)
		}
	}
}

func (s *segment) create(name string) error {
	var err error
	if s.file, err = os.OpenFile(name, os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o600); err != nil {
		return err
	}
	if err := s.file.Truncate(segmentSize(s.n, s.ring)); err != nil {
		return err
	}
	return s.reserve(0, pairsAt(s.n))
}

// reserve makes the file's pages exist, since a full file system is an error
// here and SIGBUS at first touch.
func (s *segment) reserve(off, n int64) error {
	err := unix.Fallocate(int(s.file.Fd()), 0, off, n)
	switch {
	case errors.Is(err, unix.EOPNOTSUPP), err == nil:
		return nil
	case errors.Is(err, unix.ENOSPC):
		return fmt.Errorf("shared memory: no room for %d KiB beside %s: free some, or set LOCKSTEP_RUNTIME_DIR to another directory in memory: %w", n>>10, s.file.Name(), err)
	}
	return fmt.Errorf("shared memory: reserve %d bytes: %w", n, err)
}

func (s *segment) mapFile() error {
	size := segmentSize(s.n, s.ring)
	fi, err := s.file.Stat()
	if err != nil {
		return err
	}
	if st, ok := fi.Sys().(*syscall.Stat_t); !ok || int(st.Uid) != os.Geteuid() {
		return fmt.Errorf("shared memory: %s is another user's", s.file.Name())
	}
	if fi.Size() != size {
		return fmt.Errorf("shared memory: %s has %d bytes, want %d", s.file.Name(), fi.Size(), size)
	}
	if s.mem, err = syscall.Mmap(int(s.file.Fd()), 0, int(size), syscall.PROT_READ|syscall.PROT_WRITE, syscall.MAP_SHARED); err != nil {
		return fmt.Errorf("shared memory: map %d bytes: %w", size, err)
	}
	magic := (*atomic.Uint64)(unsafe.Pointer(&s.mem[0]))
	if s.me == 0 {
		magic.Store(segMagic)
	}
	s.wakeFDs = make([]int, s.n)
	for i := range s.n {
		s.wakeFDs[i] = -1
		s.doorbells = append(s.doorbells, (*doorbell)(unsafe.Pointer(&s.mem[page+i*2*lineSize])))
	}
	return nil
}

func (s *segment) close() {
	if s.mem != nil {
		_ = syscall.Munmap(s.mem)
	}
	if s.file != nil {
		s.file.Close()
	}
	for _, fd := range s.wakeFDs {
		if fd >= 0 {
			unix.Close(fd)
		}
	}
}

// pipe is one ordered pair's part of the segment: control words, each in the
// cache line of the one side that writes it, 64 lines, and the ring.
type pipe struct {
	head     *atomic.Uint64 // sender: stream position behind the last byte sent
	tail     *atomic.Uint64 // receiver: stream position of the next byte to consume
	lineTail *atomic.Uint64 // receiver: lines consumed
	flags    *atomic.Uint32 // rarely written: pipeBlocked, pipeDropped
	lines    unsafe.Pointer
	ring     []byte
	mask     uint64
}

const (
	pipeBlocked = 1 << iota // the sender waits for credit: wake it
	pipeDropped             // an injected fault has cut the pair's connection
)

// line is one low-latency message. The flag is the line's number from 1 and is
// stored last, so a line is complete when its flag says so.
type line struct {
	payload [LinePayload]byte
	tag     uint32
	n       uint32
	flag    atomic.Uint64
}

func (s *segment) pipeAt(from, to int) int64 {
	return pairsAt(s.n) + int64(from*s.n+to)*int64(pipeControl+s.ring)
}

func (s *segment) pipe(from, to int) pipe {
	at := s.pipeAt(from, to)
	word := func(i int64) unsafe.Pointer { return unsafe.Pointer(&s.mem[at+i*lineSize]) }
	return pipe{
		head: (*atomic.Uint64)(word(0)), tail: (*atomic.Uint64)(word(1)), lineTail: (*atomic.Uint64)(word(2)), flags: (*atomic.Uint32)(word(3)),
		lines: unsafe.Pointer(&s.mem[at+page]),
		ring:  s.mem[at+pipeControl:][:s.ring:s.ring],
		mask:  uint64(s.ring - 1),
	}
}

func (p *pipe) line(i uint64) *line {
	return (*line)(unsafe.Add(p.lines, (i%lineSlots)*lineSize))
}

// link opens this rank's link to a local peer. The pages that both sides touch
// are reserved by both, those that only a sender fills by the sender.
func (s *segment) link(m *Mesh, peer int) (pipeline, error) {
	to := m.local[peer]
	if err := s.reserve(s.pipeAt(s.me, to), int64(pipeControl+s.ring)); err != nil {
		return nil, err
	}
	if err := s.reserve(s.pipeAt(to, s.me), pipeControl); err != nil {
		return nil, err
	}
	l := &shmLink{m: m, peer: peer, tx: s.pipe(s.me, to), rx: s.pipe(to, s.me), doorbell: s.doorbells[to], wakeFD: s.wakeFDs[to]}
	l.meter.open(m, record.ConnEntry{Peer: int32(peer), Transport: l.Kind(), Name: fmt.Sprintf("shm %d->%d", m.cfg.Rank, peer)})
	l.gate = m.newGate(l, peer)
	return l, nil
}

// entryBoard is one word per local member: when it entered which collective.
type entryBoard struct {
	words []*atomic.Uint64 // by rank, nil for ranks of other nodes
	mine  *atomic.Uint64
	last  int64 // reference to extend 48-bit times by
}

const boardBits = 48

func (s *segment) board(m *Mesh) *entryBoard {
	b := &entryBoard{words: make([]*atomic.Uint64, m.cfg.Size)}
	for r, i := range m.local {
		if i >= 0 {
			b.words[r] = (*atomic.Uint64)(unsafe.Pointer(&s.mem[page+i*2*lineSize+lineSize]))
		}
	}
	b.mine = b.words[m.cfg.Rank]
	return b
}

// A word is the sequence's low 16 bits over the time's low 48 (78 hours of ns).
func (b *entryBoard) Enter(seq uint64, mono int64) {
	b.last = mono
	b.mine.Store(seq<<boardBits | uint64(mono)&(1<<boardBits-1))
}

func (b *entryBoard) Entered(member int, seq uint64) int64 {
	w := b.words[member]
	if w == nil {
		return 0
	}
	v := w.Load()
	if v == 0 || v>>boardBits != seq&0xffff {
		return 0
	}
	// The time nearest to my own entry that has these low bits.
	d := int64(v<<(64-boardBits)-uint64(b.last)<<(64-boardBits)) >> (64 - boardBits)
	return b.last + d
}
