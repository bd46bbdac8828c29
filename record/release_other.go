//go:build !amd64 || race

package record

import "sync/atomic"

// release stores v after everything that was stored before.
func release(p *uint64, v uint64) { atomic.StoreUint64(p, v) }
