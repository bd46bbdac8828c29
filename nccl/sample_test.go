package nccl_test

import (
	"fmt"
	"testing"
	"time"

	"github.com/lockstep-ccl/lockstep/record"
)

// timedOf is how many of a communicator's operations were timed, by the GPU all of them, and how long the calls took.
func timedOf(t *testing.T, ops map[uint64]*opRecords) (timed uint64, took time.Duration) {
	t.Helper()
	first, last := int64(0), int64(0)
	for _, o := range ops {
		if at := o.enqueue[0].Mono; first == 0 || at < first {
			first = at
		}
		last = max(last, o.enqueue[0].Mono)
		if o.end[0].Flags&record.FlagUnseen == 0 {
			timed++
			if o.end[0].Clock != record.ClockGPU {
				t.Errorf("an end without the GPU's time: %+v", o.end[0])
			}
		}
	}
	return timed, time.Duration(last - first)
}

// Of calls that come too close, one in about 32 is timed, or in 128, and all are recorded.
func TestSampling(t *testing.T) {
	for _, v := range versions[1:] {
		dir := t.TempDir()
		lines := play(t, plain, dir, nil, v, "tight")
		c := recorders(t, dir)[0]
		for _, want := range parse(t, lines) {
			check(t, c, want)
			s := c.comm(t, want.id)
			timed, took := timedOf(t, c.ops[s.Index])
			// What this machine's load makes slower may be timed more often, up to all of it.
			if most := want.numbered/16 + 300 + uint64(took)/200_000; timed > most || timed < want.numbered/256 {
				t.Errorf("v%s %s: %d of %d timed in %v, want at most %d", v, want.name, timed, want.numbered, took, most)
			}
			if c.header.OpsUnseen != 0 || s.Ops != want.numbered {
				t.Errorf("v%s %s: %d unseen, sums of %d operations", v, want.name, c.header.OpsUnseen, s.Ops)
			}
		}
	}
}

// Where a timed call takes its caller 20 µs, those of 4,000 calls a second that are timed take less than 1/100 of the time.
func TestSamplingByCost(t *testing.T) {
	dir := t.TempDir()
	lines := play(t, plain, dir, nil, "5", "waking")
	c := recorders(t, dir)[0]
	for _, want := range parse(t, lines) {
		check(t, c, want)
		s := c.comm(t, want.id)
		timed, took := timedOf(t, c.ops[s.Index])
		const saved, cost = 256, 20 * time.Microsecond
		if most := saved + uint64(took/100/cost); timed > most || timed < want.numbered/512 {
			t.Errorf("%d of %d timed in %v, want at most %d", timed, want.numbered, took, most)
		}
	}
}

// A collective that hangs among calls that are not timed is open, and nothing behind it is over.
func TestSampledHang(t *testing.T) {
	dir := t.TempDir()
	lines := play(t, plain, dir, nil, "5", "stuck")
	var before uint64
	for _, l := range lines {
		fmt.Sscanf(l, "stuck after %d", &before)
	}
	c := recorders(t, dir)[0]
	for _, want := range parse(t, lines) {
		check(t, c, want)
		if s := c.comm(t, want.id); s.Finished > before || before-s.Finished > 400 || s.Started > before+1 {
			t.Errorf("started %d, finished %d: the GPU stopped after %d", s.Started, s.Finished, before)
		}
	}
}
