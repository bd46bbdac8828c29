package record_test

import (
	"testing"

	"github.com/lockstep-ccl/lockstep/record"
)

// TestTraits holds every kind's row against what follows from the others.
func TestTraits(t *testing.T) {
	last := record.CollNone
	for k := record.CollKind(0); k != 255; k++ {
		tr := k.Traits()
		if !k.Known() {
			if *tr != (record.Traits{}) {
				t.Errorf("%v has traits %+v", k, *tr)
			}
			continue
		}
		if k != last+1 {
			t.Errorf("%v comes after %v", k, last)
		}
		last = k
		if k.HasData() == (k == record.Barrier) {
			t.Errorf("%v has data: %v", k, k.HasData())
		}
		if k != record.Barrier && tr.Send == record.ShareNone && tr.Recv == record.ShareNone {
			t.Errorf("%v has no row", k)
		}
		if tr.PointToPoint == k.Collective() {
			t.Errorf("%v is point to point and a collective, or neither", k)
		}
		if tr.Synchronizes && (tr.Root != record.RootNone || tr.PointToPoint || tr.Varies()) {
			t.Errorf("%v cannot be a barrier of its members: %+v", k, *tr)
		}
		if tr.Reduces && (tr.PointToPoint || tr.Varies()) {
			t.Errorf("%v reduces what? %+v", k, *tr)
		}
		if got := tr.InPlace(3); got != 0 && tr.Shares(8) != 8 {
			t.Errorf("%v is in place at part %d of %d", k, got, tr.Shares(8))
		}
	}
	if last < record.Group {
		t.Errorf("no kind is known after %v", last)
	}
}
