package nccl_test

import (
	"fmt"
	"slices"
	"strings"
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

// Each replay of a graph is recorded, or counted as lost, though its first call was captured while its kernel was not asked for: its
// later ones are told of, and where there is a network it is itself.
func TestCapturedBetweenSamples(t *testing.T) {
	const replays = 20
	for _, v := range versions[1:] {
		for _, env := range []string{"", "NET=1", "NET=1 ONE=1", "REST=1"} {
			dir := t.TempDir()
			lines := play(t, plain, dir, strings.Fields(env), v, "blind")
			untold := slices.Contains(lines, "untold 1") // elsewhere, or on a slow machine, kernels were asked for
			c := recorders(t, dir)[0]
			for _, want := range parse(t, lines) {
				s := c.comm(t, want.id)
				var ended, lost uint64
				for _, o := range c.ops[s.Index] {
					ended += uint64(len(o.end))
				}
				if untold {
					lost = replays
				}
				if ended+lost != want.numbered || s.Enqueued != want.numbered || s.Finished != want.numbered {
					t.Errorf("v%s %s: %d recorded, %d lost, enqueued %d, finished %d of %d", v, env, ended, lost, s.Enqueued, s.Finished, want.numbered)
				}
				if untold {
					lost++ // and that it was captured so
				}
				if c.header.OpsLost != lost {
					t.Errorf("v%s %s: %d operations counted as lost, want %d", v, env, c.header.OpsLost, lost)
				}
			}
		}
	}
}
