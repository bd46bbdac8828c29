package collector_test

import (
	"testing"

	"github.com/lockstep-ccl/lockstep/collector"
	"github.com/lockstep-ccl/lockstep/diagnosis"
)

// TestEveryClassHasRoom: incidents of every class are counted in MasterSnapshot.
func TestEveryClassHasRoom(t *testing.T) {
	unknown := diagnosis.Class(255).String()
	for c := range 255 {
		if name := diagnosis.Class(c).String(); name != unknown && c >= collector.MaxClasses {
			t.Errorf("%s is class %d, and collector.MaxClasses is %d", name, c, collector.MaxClasses)
		}
	}
}
