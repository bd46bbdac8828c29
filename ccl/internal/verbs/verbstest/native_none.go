//go:build !cgo

package verbstest

import "github.com/lockstep-ccl/lockstep/ccl/internal/verbs"

// Without cgo New skips, so that nothing below it is reached.
const cgo = false

func bind(string) error                         { return ErrUnavailable }
func control(string, ...uintptr) int            { return 0 }
func withString(string, string, ...uintptr) int { return 0 }
func setGID(_, _ int, _ verbs.GIDEntry)         {}
