package nccl_test

import (
	"slices"
	"testing"
)

// An API group whose end is never told holds up neither the calls behind it nor, when its communicator has gone or it was long
// ago, the groups of others.
func TestEndlessGroups(t *testing.T) {
	hasty := flavour{name: "hasty", flags: []string{"-DFORGOTTEN=1000000"}}
	for _, v := range versions[1:] {
		for _, how := range []struct {
			f   flavour
			env string
		}{{plain, "GOES=1"}, {hasty, "STAYS=1"}} {
			dir := t.TempDir()
			lines := play(t, how.f, dir, []string{"LOCKSTEP_NCCL_EVENTS=net", how.env}, v, "endless")
			c := recorders(t, dir)[0]
			for _, want := range parse(t, lines) {
				check(t, c, want)
				if s := c.comm(t, want.id); s.Finished != want.numbered {
					t.Errorf("v%s %s: finished %d of %d", v, how.env, s.Finished, want.numbered)
				}
			}
			if !slices.Contains(lines, "without 0") || c.header.EventsLost > 3000-1023 {
				t.Errorf("v%s %s: groups are still refused: %q, %d events lost", v, how.env, lines, c.header.EventsLost)
			}
		}
	}
}

// A stop that is told twice is no other channel's: an operation takes until the last of them has stopped.
func TestStopsToldTwice(t *testing.T) {
	for _, v := range versions {
		dir := t.TempDir()
		lines := play(t, plain, dir, []string{"LOCKSTEP_NCCL_EVENTS=net"}, v, "twice")
		c := recorders(t, dir)[0]
		for _, want := range parse(t, lines) {
			check(t, c, want)
			for seq, o := range c.ops[c.comm(t, want.id).Index] {
				channels := uint16(4)
				if seq%4 == 0 {
					channels = 8
				}
				if dur := o.end[0].Stamp - o.start[0].Stamp; dur != 7000 || o.start[0].Chan != channels {
					t.Errorf("v%s: operation %d of %d channels took %d ns, want 7000", v, seq, o.start[0].Chan, dur)
				}
			}
		}
	}
}

// What is told of an operation that is over, at any moment, changes none that has its slot.
func TestStopsToldLate(t *testing.T) {
	dir := t.TempDir()
	lines := play(t, plain, dir, []string{"LOCKSTEP_NCCL_EVENTS=net"}, "5", "stale")
	c := recorders(t, dir)[0]
	for _, want := range parse(t, lines) {
		s := c.comm(t, want.id)
		if s.Ops+c.header.OpsLost != want.numbered || s.Finished != want.numbered || c.header.OpsUnseen != 0 || s.TransferNs != 100*s.Ops {
			t.Errorf("%d operations, %d lost, %d unseen of %d took %d ns, want 100 each", s.Ops, c.header.OpsLost, c.header.OpsUnseen, want.numbered, s.TransferNs)
		}
	}
}
