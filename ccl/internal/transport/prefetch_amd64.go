package transport

import "unsafe"

// prefetch starts to bring p's cache line here.
//
//go:noescape
func prefetch(p unsafe.Pointer)
