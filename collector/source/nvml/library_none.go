//go:build !cgo

package nvml

import (
	"fmt"
	"time"

	"github.com/lockstep-ccl/lockstep/collector"
	"github.com/lockstep-ccl/lockstep/collector/source"
)

// none is the driver of a binary that cannot open libraries.
type none struct{}

func newLibrary() driver { return none{} }

func (none) open() error {
	return fmt.Errorf("%w: this binary was built without cgo, and cannot open libnvidia-ml.so.1 (CGO_ENABLED=1 and a C compiler are needed)", source.ErrNoData)
}

func (none) probe(func(int, string)) collector.GPUs { return collector.GPUs{} }

func (none) wait(time.Duration) (xid, error) { return xid{}, errNoEvents }

func (none) close() {}
