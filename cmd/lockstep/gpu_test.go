package main

import (
	"errors"
	"os"
	"testing"

	"github.com/rogpeppe/go-internal/testscript"

	"github.com/lockstep-ccl/lockstep/ccl/ccltest/fakegpu"
)

// TestGPUScripts runs what needs GPUs, on fake ones.
func TestGPUScripts(t *testing.T) {
	for _, name := range fakegpu.Environment() {
		t.Setenv(name, "") // given back at the end
	}
	stop, err := fakegpu.Start(2)
	if errors.Is(err, fakegpu.ErrUnavailable) {
		t.Skip(err)
	}
	if err != nil {
		t.Fatal(err)
	}
	// Scripts run in parallel, after this function has returned.
	t.Cleanup(stop)
	testscript.Run(t, testscript.Params{
		Dir:                 "testdata/gpu",
		RequireUniqueNames:  true,
		RequireExplicitExec: true,
		Setup: func(e *testscript.Env) error {
			for _, name := range fakegpu.Environment() {
				e.Setenv(name, os.Getenv(name))
			}
			return nil
		},
	})
}
