package agent

import (
	"testing"
	"time"

	"github.com/lockstep-ccl/lockstep/record"
)

// Who reads the wall clock may be made to wait meanwhile: such a reading does not count.
func TestRealOffset(t *testing.T) {
	is := time.Now().UnixNano() - record.Now()
	slow := 3
	offset := realOffset(func() time.Time {
		if slow == 0 {
			return time.Now()
		}
		slow--
		time.Sleep(100 * time.Millisecond)
		return time.Now().Add(time.Hour)
	})
	if off := time.Duration(offset - is); slow > 0 || off.Abs() > time.Minute {
		t.Errorf("%v beside what it is, %d slow readings left", off, slow)
	}
}
