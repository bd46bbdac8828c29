// Package buildinfo says which build this is.
package buildinfo

import (
	"cmp"
	"fmt"
	"runtime"
	"runtime/debug"
	"sync"
)

// version and revision are set by the linker (see the Makefile); a build by
// `go install` has them from the module instead.
var version, revision string

var read = sync.OnceValues(func() (v, rev string) {
	v, rev = version, revision
	if bi, ok := debug.ReadBuildInfo(); ok && v == "" {
		v = bi.Main.Version
		for _, s := range bi.Settings {
			if s.Key == "vcs.revision" && rev == "" {
				rev = s.Value
			}
		}
	}
	return v, rev
})

// Version returns the version, Revision the commit; "" when unknown.
func Version() string  { v, _ := read(); return v }
func Revision() string { _, r := read(); return r }

// String is what --version prints.
func String() string {
	return fmt.Sprintf("lockstep %s (revision %.12s, %s, %s/%s)", cmp.Or(Version(), "unknown"), cmp.Or(Revision(), "unknown"), runtime.Version(), runtime.GOOS, runtime.GOARCH)
}
