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
