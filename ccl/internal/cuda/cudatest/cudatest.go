// Package cudatest puts a fake libcuda, and NVML, behind package cuda, for tests on
// machines without a GPU. The fake (libcuda/fake.c, compiled by gcc when a
// test binary starts) is a model in host memory: addresses are addresses,
// shareable handles are memfds that other processes can really import, a stream
// is a thread that runs its operations in order, waits and writes of words are
// real. It checks what a driver would crash on: contexts, unmapped or foreign
// memory, alignment. It knows no timing and no weak memory order.
//
// A kernel is a C function (libcuda/fake.h); "fake_add" and "fake_crash" are
// there, see PTX. Child processes that inherit the environment get the same fake.
package cudatest

import (
	"embed"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/lockstep-ccl/lockstep/ccl/internal/cuda"
)

//go:embed libcuda
var source embed.FS

// Env configures the fake in this process and in children: "gpus=4,fail=CALL:CODE:NTH,hang=CALL:MS:NTH". With
// "first=2" the driver sees GPUs from the third on, as CUDA_VISIBLE_DEVICES has it; NVML sees all 16.
const Env = "LOCKSTEP_FAKE_CUDA"

// Options say what the fake has.
type Options struct {
	GPUs    int      // 2 when 0, at most 16; -1: none
	Version int      // of the API; 12020 when 0
	Major   int      // of the compute capability; 9 when 0
	Kernels []string // C files with more kernels; they may include "fake.h"
	Faults  string   // from the start, as "fail=cuInit:999:1,hang=cuMemCreate:50:1"
}

// PTX is a module with the fake's own kernels: fake_add(dst, src *u32, n u32)
// adds n words, fake_crash() loses the context.
const PTX = ".version 8.0\n.target sm_80\n.entry fake_add(\n.entry fake_crash(\n"

// ErrUnavailable: there is no C compiler, or cgo is off.
var ErrUnavailable = errors.New("the fake libcuda needs cgo and gcc")

// Start compiles the fake and points package cuda at it; call it from TestMain,
// before the first cuda.Open, and stop at the end. In the child of a process
// that has called it, it takes the parent's.
func Start(o Options) (stop func(), err error) {
	if os.Getenv(Env) != "" {
		return func() {}, nil
	}
	gcc, err := exec.LookPath("gcc")
	if err != nil || !cgo {
		return func() {}, ErrUnavailable
	}
	dir, err := os.MkdirTemp("", "cudatest")
	if err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			os.RemoveAll(dir)
		}
	}()
	if err := os.CopyFS(dir, source); err != nil {
		return nil, err
	}
	src, lib := filepath.Join(dir, "libcuda"), filepath.Join(dir, "libcuda.so.1")
	args := append([]string{"-O1", "-g", "-shared", "-fPIC", "-pthread", "-I", src, "-o", lib, filepath.Join(src, "fake.c")}, o.Kernels...)
	if out, err := exec.Command(gcc, append(args, "-ldl")...).CombinedOutput(); err != nil {
		return nil, fmt.Errorf("compile the fake libcuda: %w\n%s", err, out)
	}
	if err := os.Symlink(filepath.Base(lib), filepath.Join(dir, "libnvidia-ml.so.1")); err != nil {
		return nil, err
	}
	gpus, version := o.GPUs, o.Version
	if gpus == 0 {
		gpus = 2
	}
	major := o.Major
	if major == 0 {
		major = 9
	}
	if version == 0 {
		version = cuda.MinVersion
	}
	err = errors.Join(os.Setenv(cuda.LibraryEnv, lib), os.Setenv(Env, fmt.Sprintf("gpus=%d,version=%d,major=%d,%s", max(gpus, 0), version, major, o.Faults)))
	return func() { os.RemoveAll(dir) }, err
}

// Device opens a fake GPU until the test ends, when injected faults are
// forgotten too. It skips the test where there is no fake.
func Device(tb testing.TB, ordinal int) *cuda.Device {
	tb.Helper()
	if os.Getenv(Env) == "" {
		tb.Skip(ErrUnavailable)
	}
	drv, err := cuda.Open()
	if err != nil {
		tb.Fatal(err)
	}
	d, err := drv.Device(ordinal)
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() {
		Heal()
		if err := d.Close(); err != nil {
			tb.Error(err)
		}
	})
	return d
}

// Fail makes the nth call from now of a function (named without version) fail
// with a CUresult; nth 0 is every call.
func Fail(call string, code, nth int) { fault(call, code, nth, 0) }

// RefuseFiles makes cuMemHostRegister take no mapping of a file, as drivers take none of
// a file on a disk, until Heal.
func RefuseFiles() { fault("cuMemHostRegister_file", 1, 0, 0) }

// Hang makes the nth call from now take so many milliseconds longer; nth 0 is
// every call.
func Hang(call string, ms, nth int) { fault(call, 0, nth, ms) }

// Separate makes two GPUs unable to reach each other's memory, as those of some
// machines are. It does not undo what is mapped.
func Separate(a, b int) { separate(a, b) }

// Unlink makes two GPUs reach each other by PCIe, where NVLink joined them. GPUs that only NVML
// sees have numbers too.
func Unlink(a, b int) { unlink(a, b) }

// SlowLink makes reads of rank to's memory by rank from, where kernels time them, take longer by
// so many microseconds; 0 undoes it. It is for Kernels of package kernelstest.
func SlowLink(from, to, us int) { slowLink(from, to, us) }

// Deny makes GPUs that are opened from now on lack what a CUdevice_attribute tells, one
// attribute at a time.
func Deny(attribute int) { deny(attribute) }

// Heal forgets all faults, separations and links that went, and brings lost contexts back.
func Heal() { fault("", 0, 0, 0) }
