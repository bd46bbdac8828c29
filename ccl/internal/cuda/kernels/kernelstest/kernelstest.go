// Package kernelstest gives the fake CUDA driver (package cudatest) the real
// kernels, compiled for the CPU: what the GPU datapath does can then be tested,
// slowly, where there is no GPU. Reductions are of float32 only, and the kernels
// for compute capability 9.0 are not among them.
package kernelstest

import (
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
)

// ErrUnavailable: there is no clang-19.
var ErrUnavailable = errors.New("kernels for the fake CUDA driver need clang-19")

// Build compiles the kernels and returns what cudatest.Options.Kernels takes. The object is kept in the
// user's cache, by what it is made of, or in dir where there is none: compiling takes 15 s of a core.
func Build(dir string) ([]string, error) {
	clang, err := exec.LookPath("clang-19")
	if err != nil {
		return nil, ErrUnavailable
	}
	_, here, _, _ := runtime.Caller(0)
	src := filepath.Dir(filepath.Dir(here))
	flags := []string{"-x", "c++", "-std=c++20", "-O1", "-fPIC", "-DLS_HOST"}
	key, err := keyOf(src, clang, flags)
	if err != nil {
		return nil, fmt.Errorf("find out what the kernels for the fake CUDA driver are made of: %w", err)
	}
	object := filepath.Join(dir, "kernels.o")
	if cache, err := os.UserCacheDir(); err == nil {
		kept := filepath.Join(cache, "lockstep", "kernelstest")
		if err := os.MkdirAll(kept, 0o700); err == nil {
			object = filepath.Join(kept, key+".o")
		}
	}
	libraries := []string{object, "-lstdc++", "-lm"}
	if _, err := os.Stat(object); err == nil {
		return libraries, nil
	}
	partial := fmt.Sprintf("%s.%d", object, os.Getpid())
	defer os.Remove(partial)
	build := exec.Command(clang, append(flags, "-I", src, "-c", filepath.Join(src, "testdata", "fake.cpp"), "-o", partial)...)
	build.Stderr = os.Stderr
	if err := build.Run(); err != nil {
		return nil, fmt.Errorf("compile kernels for the fake CUDA driver: %w", err)
	}
	if err := os.Rename(partial, object); err != nil {
		return nil, fmt.Errorf("keep the kernels for the fake CUDA driver: %w", err)
	}
	return libraries, nil
}

// keyOf is a hash of the sources, the compiler and its flags.
func keyOf(src, clang string, flags []string) (string, error) {
	h := sha256.New()
	version, err := exec.Command(clang, "--version").Output()
	if err != nil {
		return "", fmt.Errorf("%s --version: %w", clang, err)
	}
	fmt.Fprintf(h, "%s%q %s\n", version, flags, runtime.GOARCH)
	err = filepath.WalkDir(src, func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() || !slices.Contains([]string{".h", ".cpp", ".cu", ".cuh", ".inc"}, filepath.Ext(path)) {
			return err
		}
		b, err := os.ReadFile(path)
		fmt.Fprintf(h, "%s %d\n", path[len(src):], len(b))
		h.Write(b)
		return err
	})
	return hex.EncodeToString(h.Sum(nil)[:8]), err
}
