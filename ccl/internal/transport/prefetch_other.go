//go:build !amd64

package transport

import "unsafe"

func prefetch(unsafe.Pointer) {}
