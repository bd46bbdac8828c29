// Package kernelstest gives the fake CUDA driver (package cudatest) the real
// kernels, compiled for the CPU: what the GPU datapath does can then be tested,
// slowly, where there is no GPU. Reductions are of float32 only, and the kernels
// for compute capability 9.0 are not among them.
package kernelstest

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
)

// ErrUnavailable: there is no clang-19.
var ErrUnavailable = errors.New("kernels for the fake CUDA driver need clang-19")

// Build compiles the kernels into dir and returns what cudatest.Options.Kernels
// takes.
func Build(dir string) ([]string, error) {
	clang, err := exec.LookPath("clang-19")
	if err != nil {
		return nil, ErrUnavailable
	}
	_, here, _, _ := runtime.Caller(0)
	src := filepath.Dir(filepath.Dir(here))
	object := filepath.Join(dir, "kernels.o")
	build := exec.Command(clang, "-x", "c++", "-std=c++20", "-O1", "-fPIC", "-DLS_HOST", "-I", src, "-c", filepath.Join(src, "testdata", "fake.cpp"), "-o", object)
	build.Stderr = os.Stderr
	if err := build.Run(); err != nil {
		return nil, fmt.Errorf("compile kernels for the fake CUDA driver: %w", err)
	}
	return []string{object, "-lstdc++", "-lm"}, nil
}
