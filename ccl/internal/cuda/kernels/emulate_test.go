package kernels_test

import (
	"context"
	"os/exec"
	"path/filepath"
	"testing"
	"time"
)

// TestLL runs the LL and point-to-point kernels on the CPU: every collective,
// type and operator, odd counts and alignments, in and out of place.
func TestLL(t *testing.T) {
	clang(t)
	bin := filepath.Join(t.TempDir(), "ll")
	build := exec.Command("clang++-19", "-x", "c++", "-std=c++20", "-O1", "-fwrapv", "-ffp-contract=off",
		"-DLS_HOST", "-I.", "-pthread", "-o", bin, "testdata/ll.cpp")
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
	defer cancel()
	if out, err := exec.CommandContext(ctx, bin).CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
}
