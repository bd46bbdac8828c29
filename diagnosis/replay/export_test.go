package replay

import "github.com/lockstep-ccl/lockstep/diagnosis"

// Drain writes what waits, in the caller's goroutine.
func (r *Recorder) Drain() {
	var pace pacing
	for {
		select {
		case it := <-r.queue:
			r.write(it, &pace)
		default:
			return
		}
	}
}

// Close is what Run does at its end.
func (r *Recorder) Close() { r.writer.close() }

// Frame frames a payload as it is: what a hostile writer can do.
func Frame(kind byte, payload []byte) []byte {
	f := append([]byte(magic), version, kind, codecStored, 0)
	f = append(f, make([]byte, headerSize-len(f))...)
	f = append(f, payload...)
	finish(f, len(payload))
	return f
}

// Copy is what Record takes of the evidence.
type Copy struct{ s state }

// NewCopy returns an empty one.
func NewCopy() *Copy { return &Copy{} }

// From copies.
func (c *Copy) From(ev *diagnosis.Evidence) { c.s.copyFrom(ev) }
