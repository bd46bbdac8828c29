package kernels_test

import (
	"context"
	"os/exec"
	"path/filepath"
	"testing"
	"time"
)

// TestLL runs the LL kernels on the CPU: every collective, type and operator, odd
// counts and alignments, in and out of place.
func TestLL(t *testing.T) { emulate(t, "ll") }

// TestP2P runs the kernels that send and receive: by LL, straight into buffers,
// through staging, by bulk copies, all of them at once, several times each, and
// with nobody there.
func TestP2P(t *testing.T) { emulate(t, "p2p") }

// emulate runs a program of testdata.
func emulate(t *testing.T, name string) {
	t.Helper()
	clang(t)
	bin := filepath.Join(t.TempDir(), name)
	build := exec.Command("clang++-19", "-x", "c++", "-std=c++20", "-O1", "-fwrapv", "-ffp-contract=off",
		"-DLS_HOST", "-I.", "-pthread", "-o", bin, "testdata/"+name+".cpp")
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
	defer cancel()
	if out, err := exec.CommandContext(ctx, bin).CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
}
