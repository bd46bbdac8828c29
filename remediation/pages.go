package remediation

import (
	"encoding/binary"
	"errors"
	"fmt"
	"hash/fnv"
	"io"
	"os"
	"time"

	"golang.org/x/sys/unix"
)

// This file reads the journal's pages as they lie on disk before bbolt maps them: a page
// that is torn or was overwritten makes bbolt panic, recurse for ever, or fault, where no
// error could be returned. The format is bbolt's (its page.go, meta.go, freelist).

const (
	pageHeader   = 16
	pageElement  = 16
	flagBranch   = 0x01
	flagLeaf     = 0x02
	flagFreelist = 0x10
	leafBucket   = 0x01 // of a leaf's element: the value is a bucket

	metaMagic   = 0xED0CDAED
	metaVersion = 2
	metaSize    = 64
	noFreelist  = ^uint64(0)

	maxJournal = 1 << 28 // bytes; a full one has a few MiB
	maxDepth   = 32      // of pages below one another
)

// errDamaged is the error of a journal that is not what this program wrote.
var errDamaged = errors.New("damaged")

func damaged(page uint64, format string, args ...any) error {
	return fmt.Errorf("%w: page %d: %s", errDamaged, page, fmt.Sprintf(format, args...))
}

// checkPages refuses a file that bbolt could not read to its end. One that is missing or empty is fine.
// It holds the file's lock while it reads, so that nobody writes meanwhile.
func checkPages(path string, patience time.Duration) error {
	f, err := os.Open(path)
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	defer f.Close() // and with it the lock
	for begin := time.Now(); ; time.Sleep(50 * time.Millisecond) {
		err := unix.Flock(int(f.Fd()), unix.LOCK_SH|unix.LOCK_NB)
		if err == nil {
			break
		}
		if !errors.Is(err, unix.EWOULDBLOCK) && !errors.Is(err, unix.EINTR) {
			return fmt.Errorf("lock: %w", err)
		}
		if time.Since(begin) > patience {
			return errInUse
		}
	}
	b, err := io.ReadAll(io.LimitReader(f, maxJournal+1))
	switch {
	case err != nil:
		return err
	case len(b) == 0:
		return nil
	case len(b) > maxJournal:
		return fmt.Errorf("%w: more than %d bytes", errDamaged, maxJournal)
	}
	return checkFile(b)
}

// pages is a file taken apart.
type pages struct {
	b    []byte
	size uint64 // of a page
	most uint64 // pages in use, free ones included
	used []bool // reached
}

func checkFile(b []byte) error {
	m, ok := lastMeta(b)
	if !ok {
		return fmt.Errorf("%w: neither of its two meta pages is whole", errDamaged)
	}
	p := &pages{b: b, size: uint64(m.pageSize), most: m.most}
	if p.most < 4 || p.most > uint64(len(b))/p.size {
		return fmt.Errorf("%w: %d pages of %d bytes are in use, and the file has %d bytes", errDamaged, p.most, p.size, len(b))
	}
	p.used = make([]bool, p.most)
	p.used[0], p.used[1] = true, true
	if err := p.tree(m.root, 0); err != nil {
		return err
	}
	return p.freelist(m.freelist)
}

type meta struct {
	pageSize                   uint32
	root, freelist, most, txid uint64
}

// lastMeta returns the meta page that bbolt would go by.
func lastMeta(b []byte) (last meta, ok bool) {
	try := func(at, size uint64) (found bool) {
		if at+pageHeader+metaSize > uint64(len(b)) {
			return false
		}
		m, good := metaAt(b[at+pageHeader:])
		if !good || size != 0 && uint64(m.pageSize) != size {
			return false
		}
		if !ok || m.txid > last.txid {
			last, ok = m, true
		}
		return true
	}
	if try(0, 0) {
		try(uint64(last.pageSize), uint64(last.pageSize))
		return last, ok
	}
	for size := uint64(1 << 10); size <= 1<<16 && !try(size, size); size <<= 1 {
	}
	return last, ok
}

func metaAt(b []byte) (m meta, ok bool) {
	u32, u64 := binary.NativeEndian.Uint32, binary.NativeEndian.Uint64
	sum := fnv.New64a()
	sum.Write(b[:metaSize-8])
	m = meta{pageSize: u32(b[8:]), root: u64(b[16:]), freelist: u64(b[32:]), most: u64(b[40:]), txid: u64(b[48:])}
	size := m.pageSize
	ok = u32(b) == metaMagic && u32(b[4:]) == metaVersion && u64(b[56:]) == sum.Sum64() && size >= 1<<10 && size <= 1<<16 && size&(size-1) == 0
	return m, ok
}

// page returns a page with its overflow, and marks it as used.
func (p *pages) page(id uint64) ([]byte, error) {
	if id < 2 || id >= p.most {
		return nil, damaged(id, "there are %d", p.most)
	}
	b := p.b[id*p.size:]
	over := uint64(binary.NativeEndian.Uint32(b[12:]))
	if got := binary.NativeEndian.Uint64(b); got != id {
		return nil, damaged(id, "it says that it is page %d", got)
	}
	if over >= p.most-id {
		return nil, damaged(id, "it goes on for %d pages, beyond the last", over)
	}
	for i := id; i <= id+over; i++ {
		if p.used[i] {
			return nil, damaged(i, "it is in two places")
		}
		p.used[i] = true
	}
	return b[:(1+over)*p.size], nil
}

// tree checks a bucket's pages from one of them down.
func (p *pages) tree(id uint64, depth int) error {
	b, err := p.page(id)
	if err != nil {
		return err
	}
	return p.elements(id, b, depth)
}

// elements checks a page's, inline or not.
func (p *pages) elements(id uint64, b []byte, depth int) error {
	flags, count := binary.NativeEndian.Uint16(b[8:]), int(binary.NativeEndian.Uint16(b[10:]))
	if depth > maxDepth {
		return damaged(id, "it is %d pages deep", depth)
	}
	if pageHeader+count*pageElement > len(b) {
		return damaged(id, "%d elements in %d bytes", count, len(b))
	}
	if flags != flagLeaf && (flags != flagBranch || count == 0) {
		return damaged(id, "flags %#x with %d elements", flags, count)
	}
	last := ""
	for i := range count {
		at := pageHeader + i*pageElement
		e := b[at:]
		u32 := func(i int) uint64 { return uint64(binary.NativeEndian.Uint32(e[i:])) }
		pos, key, value := u32(0), u32(4), uint64(0)
		if flags == flagLeaf {
			pos, key, value = u32(4), u32(8), u32(12)
		}
		if pos+key+value > uint64(len(b)-at) || pos < uint64((count-i)*pageElement) {
			return damaged(id, "element %d is outside of it", i)
		}
		k := string(e[pos : pos+key])
		if i > 0 && k <= last {
			return damaged(id, "element %d is out of order", i)
		}
		last = k
		switch {
		case flags == flagBranch:
			err := p.tree(binary.NativeEndian.Uint64(e[8:]), depth+1)
			if err != nil {
				return err
			}
		case u32(0)&^leafBucket != 0:
			return damaged(id, "element %d has flags %#x", i, u32(0))
		case u32(0) == leafBucket:
			if err := p.bucket(id, e[pos+key:pos+key+value], depth+1); err != nil {
				return err
			}
		}
	}
	return nil
}

// bucket checks what a bucket's value leads to.
func (p *pages) bucket(id uint64, v []byte, depth int) error {
	if len(v) < 16 {
		return damaged(id, "a bucket of %d bytes", len(v))
	}
	if root := binary.NativeEndian.Uint64(v); root != 0 {
		return p.tree(root, depth)
	}
	if v = v[16:]; len(v) < pageHeader || binary.NativeEndian.Uint16(v[8:]) != flagLeaf {
		return damaged(id, "an inline bucket that is no leaf")
	}
	return p.elements(id, v, depth)
}

// freelist checks that what is free is not in use.
func (p *pages) freelist(id uint64) error {
	if id == noFreelist {
		return nil
	}
	b, err := p.page(id)
	if err != nil {
		return err
	}
	if flags := binary.NativeEndian.Uint16(b[8:]); flags != flagFreelist {
		return damaged(id, "flags %#x, want the list of free pages", flags)
	}
	n, ids := uint64(binary.NativeEndian.Uint16(b[10:])), b[pageHeader:]
	if n == 0xFFFF {
		n, ids = binary.NativeEndian.Uint64(ids), ids[8:]
	}
	if n > uint64(len(ids))/8 {
		return damaged(id, "%d free pages in %d bytes", n, len(ids))
	}
	for i := range n {
		free := binary.NativeEndian.Uint64(ids[8*i:])
		if free < 2 || free >= p.most || p.used[free] {
			return damaged(id, "page %d is free and in use, or there is none", free)
		}
		p.used[free] = true
	}
	return nil
}
