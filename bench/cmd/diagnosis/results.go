package main

import (
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"encoding/gob"
	"errors"
	"fmt"
	"io"
	"os"
	"sync"

	"github.com/lockstep-ccl/lockstep/diagnosis/jobsim"
)

// store keeps results in a file, as they come, so that a run of hours may end at any moment
// and be taken up again. It holds those of one build: a line that names it, then records, each
// its length (32 bit, little endian) and a gob.
type store struct {
	mu   sync.Mutex
	file *os.File
	have map[plan]result
	err  error // of a write
}

// stored is a result in the file.
type stored struct {
	Set     jobsim.Set
	Row     string
	Seed    uint64
	Ranks   int
	Outcome *jobsim.Outcome
	Costs   []float64
	Cost    bool // they were measured
	Err     string
}

const maxStored = 64 << 20

// openStore opens a file of results, or makes it. What was cut off at its end is played again.
func openStore(path string) (*store, error) {
	head, err := build()
	if err != nil {
		return nil, err
	}
	s := &store{have: map[plan]result{}}
	if s.file, err = os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o600); err != nil {
		return nil, err
	}
	whole, err := s.read(head)
	if err == nil {
		err = s.file.Truncate(whole)
	}
	if err == nil {
		_, err = s.file.Seek(whole, io.SeekStart)
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("results in %s: %w", path, err), s.file.Close())
	}
	return s, nil
}

// build names this program.
var build = sync.OnceValues(func() (string, error) {
	f, err := os.Open("/proc/self/exe")
	if err != nil {
		return "", err
	}
	defer f.Close()
	h := sha256.New()
	_, err = io.Copy(h, f)
	return fmt.Sprintf("lockstep diagnosis results 1 %x\n", h.Sum(nil)), err
})

// read takes what the file has, and returns how long that is. An empty file gets its first line.
func (s *store) read(head string) (whole int64, err error) {
	first := make([]byte, len(head))
	switch n, err := io.ReadFull(s.file, first); {
	case n == 0 && errors.Is(err, io.EOF):
		n, err := s.file.WriteString(head)
		return int64(n), err
	case err != nil || string(first) != head:
		return 0, errors.New("they are another build's, or no results: remove the file, or use the program that wrote it")
	}
	whole = int64(len(head))
	for {
		var size [4]byte
		if _, err := io.ReadFull(s.file, size[:]); err != nil {
			return whole, cutOff(err)
		}
		n := binary.LittleEndian.Uint32(size[:])
		if n > maxStored {
			return 0, fmt.Errorf("a record of %d bytes at offset %d", n, whole)
		}
		b := make([]byte, n)
		if _, err := io.ReadFull(s.file, b); err != nil {
			return whole, cutOff(err)
		}
		var x stored
		if err := gob.NewDecoder(bytes.NewReader(b)).Decode(&x); err != nil {
			return 0, fmt.Errorf("the record at offset %d: %w", whole, err)
		}
		r := result{plan: plan{x.Set, x.Row, x.Seed, x.Ranks, x.Cost}, Outcome: x.Outcome, costs: x.Costs}
		if x.Err != "" {
			r.err = errors.New(x.Err)
		}
		s.have[r.plan] = r
		whole += int64(len(size)) + int64(n)
	}
}

func cutOff(err error) error {
	if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
		return nil
	}
	return err
}

// add writes a result; the first error is kept.
func (s *store) add(r *result) {
	x := stored{Set: r.set, Row: r.row, Seed: r.seed, Ranks: r.ranks, Outcome: r.Outcome, Costs: r.costs, Cost: r.cost}
	if r.err != nil {
		x.Err = r.err.Error()
	}
	var b bytes.Buffer
	b.Write(make([]byte, 4))
	err := gob.NewEncoder(&b).Encode(x)
	binary.LittleEndian.PutUint32(b.Bytes(), uint32(b.Len()-4))
	s.mu.Lock()
	defer s.mu.Unlock()
	if err == nil && s.err == nil {
		_, err = s.file.Write(b.Bytes())
	}
	s.err = errors.Join(s.err, err)
}

// close reports what could not be written.
func (s *store) close() error { return errors.Join(s.err, s.file.Close()) }
