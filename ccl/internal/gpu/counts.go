package gpu

import (
	"encoding/binary"
	"errors"
	"fmt"
	"unsafe"

	"github.com/lockstep-ccl/lockstep/ccl/internal/cuda"
)

// Streams of different ranks tell each other how far they are by counters in each other's
// heaps. A stream waits for its own rank's counter, and raises a peer's by a copy of four
// bytes, which a copy engine makes: drivers from CUDA 13.1 on refuse stream writes to another
// GPU's memory.
//
// The source of a copy must keep its value until the copy is made, which may be long after the
// call. So it is taken from a table of all values that there are, which is why a counter has 16
// bits. They are a word's upper ones, since streams compare words cyclically.
const (
	countShift = 16
	countsSize = 4 << (32 - countShift)
)

// counts is the table, in the device's memory. s is any stream.
func (d *device) counts(s *cuda.Stream) (cuda.Ptr, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.table != 0 {
		return d.table, nil
	}
	at, err := d.Alloc(countsSize)
	if err != nil {
		return 0, fmt.Errorf("table of counters: %w", err)
	}
	values := make([]byte, 0, countsSize)
	for k := range uint32(countsSize / 4) {
		values = binary.NativeEndian.AppendUint32(values, k<<countShift)
	}
	if err := errors.Join(s.CopyIn(at, unsafe.Pointer(unsafe.SliceData(values)), countsSize), s.Synchronize()); err != nil {
		return 0, errors.Join(fmt.Errorf("table of counters: %w", err), d.Free(at))
	}
	d.table = at
	return at, nil
}

// tell sets a counter of a peer to k once s has come so far.
func (c *Comm) tell(s *cuda.Stream, at cuda.Ptr, k uint32) error {
	return s.Copy(at, c.counts+cuda.Ptr(k<<countShift>>countShift)*4, 4)
}

// reached is the wait for a counter of this rank's to be k or more.
func reached(at cuda.Ptr, k uint32) cuda.MemOp { return cuda.WaitOp(at, k<<countShift) }

// passed raises a counter of this rank beyond what any stream waits for, where the last wait
// was for k.
func passed(at cuda.Ptr, k uint32) cuda.MemOp {
	return cuda.WriteOp(at, (k+1<<(30-countShift))<<countShift)
}
