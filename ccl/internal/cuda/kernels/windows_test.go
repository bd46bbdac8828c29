package kernels_test

import (
	"os/exec"
	"path/filepath"
	"testing"
)

// TestWindows runs the kernels on windows, and ls_fold, on CPU threads: all
// ranks, in and out of place, aligned or not, and the bulk copies with stores
// that come as late as their waits allow.
func TestWindows(t *testing.T) {
	for _, elem := range []string{"int", "u8"} {
		if testing.Short() && elem != "int" {
			continue
		}
		t.Run(elem, func(t *testing.T) {
			program := filepath.Join(t.TempDir(), "windows")
			build := exec.Command(clang(t), "-x", "c++", "-std=c++20", "-O1", "-DLS_HOST", "-DLS_TYPE="+elem, "-I.",
				"testdata/windows.cpp", "-o", program, "-lstdc++", "-lm", "-pthread")
			if out, err := build.CombinedOutput(); err != nil {
				t.Fatalf("%v\n%s", err, out)
			}
			if out, err := exec.CommandContext(t.Context(), program).CombinedOutput(); err != nil {
				t.Fatalf("%v\n%s", err, out)
			}
		})
	}
}
