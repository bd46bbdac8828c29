// Package fakegpu lets a test have GPU ranks on a machine without a GPU: a model
// of the CUDA driver in host memory, with the real kernels compiled for the CPU.
// Slow, since each CUDA thread is a CPU thread; reductions are of float32 only.
// Child processes that inherit the environment get the same GPUs. It is for tests.
package fakegpu

import (
	"errors"
	"fmt"
	"os"

	"github.com/lockstep-ccl/lockstep/ccl/internal/cuda"
	"github.com/lockstep-ccl/lockstep/ccl/internal/cuda/cudatest"
	"github.com/lockstep-ccl/lockstep/ccl/internal/cuda/kernels/kernelstest"
)

// ErrUnavailable: there is no gcc, no clang-19, or no cgo.
var ErrUnavailable = errors.New("no fake GPUs")

// Environment are the variables by which children find the GPUs that Start made.
func Environment() []string { return []string{cuda.LibraryEnv, cudatest.Env} }

// Start puts n fake GPUs behind package ccl, for this process and its children;
// call it from TestMain, before anything looks for GPUs, and stop at the end.
func Start(n int) (stop func(), err error) {
	dir, err := os.MkdirTemp("", "fakegpu")
	if err != nil {
		return nil, err
	}
	defer os.RemoveAll(dir) // the objects are linked by then
	objects, err := kernelstest.Build(dir)
	if err == nil {
		stop, err = cudatest.Start(cudatest.Options{GPUs: n, Major: 8, Kernels: objects})
	}
	if errors.Is(err, kernelstest.ErrUnavailable) || errors.Is(err, cudatest.ErrUnavailable) {
		err = fmt.Errorf("%w: %w", ErrUnavailable, err)
	}
	return stop, err
}
