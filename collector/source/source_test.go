package source_test

import (
	"testing"
	"time"

	"github.com/lockstep-ccl/lockstep/collector/source"
)

func TestYounger(t *testing.T) {
	process := func(attempt uint32, created int64, start uint64) *source.Process {
		p := &source.Process{}
		p.Attempt, p.Created, p.StartTime = attempt, time.Unix(created, 0), start
		return p
	}
	rebooted := process(0, 200, 10)
	rebooted.BootID[0] = 1
	for name, c := range map[string]struct{ old, young *source.Process }{
		"the next attempt":                               {process(0, 100, 50), process(1, 200, 60)},
		"the same attempt, later":                        {process(0, 100, 50), process(0, 200, 60)},
		"the next attempt in the same process":           {process(0, 100, 50), process(1, 200, 50)},
		"a launcher that counts from 0 again":            {process(3, 100, 50), process(0, 200, 60)},
		"the same after a reboot":                        {process(3, 100, 50), rebooted},
		"the next attempt, after the clock was set back": {process(0, 200, 50), process(1, 100, 60)},
	} {
		if !c.young.Younger(c.old) || c.old.Younger(c.young) {
			t.Errorf("%s: younger %v, and the other way round %v", name, c.young.Younger(c.old), c.old.Younger(c.young))
		}
	}
	if p := process(1, 100, 50); p.Younger(p) {
		t.Error("a process is younger than itself")
	}
}
