//go:build !race

package record

// release stores v after everything that was stored before: on this processor
// a plain store is that, and does not wait for those as atomic.StoreUint64 does.
//
//go:noescape
func release(p *uint64, v uint64)
