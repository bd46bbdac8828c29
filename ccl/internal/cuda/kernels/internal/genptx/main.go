// Command genptx compiles the kernels to PTX with clang alone; no CUDA toolkit
// is needed.
//
//	go run ./internal/genptx -o ptx   (in ccl/internal/cuda/kernels)
package main

import (
	"bytes"
	"compress/gzip"
	"errors"
	"flag"
	"fmt"
	"log"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"sync"
)

// compiler is pinned: another version makes other PTX, and the committed files
// are compared with a fresh build.
const compiler = "clang-19"

// types is the C++ type of each element type, by record.DType's name.
var types = map[string]string{
	"int8": "signed char", "uint8": "unsigned char", "int32": "int", "uint32": "unsigned int",
	"int64": "long long", "uint64": "unsigned long long",
	"float16": "float16", "float32": "float", "float64": "double", "bfloat16": "bfloat16",
	"float8_e4m3": "float8e4m3", "float8_e5m2": "float8e5m2",
}

// arches are the devices built for, and the newest PTX that the oldest driver
// takes for each (535: 8.2).
var arches = []struct{ name, ptx string }{{"sm_80", "+ptx70"}, {"sm_90", "+ptx80"}}

type module struct{ name, arch, ptx, source, element string }

func main() {
	log.SetFlags(0)
	log.SetPrefix("genptx: ")
	out := flag.String("o", "ptx", "directory of the modules")
	flag.Parse()
	if _, err := exec.LookPath(compiler); err != nil {
		log.Fatalf("%v: install it (Debian: apt-get install clang-19)", err)
	}
	var modules []module
	for _, arch := range arches {
		modules = append(modules, module{"move", arch.name, arch.ptx, "move.cu", ""})
		for name, element := range types {
			modules = append(modules, module{"reduce_" + name, arch.name, arch.ptx, "reduce.cu", element})
		}
	}
	if err := build(modules, *out); err != nil {
		log.Fatal(err)
	}
}

func build(modules []module, dir string) error {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	work := make(chan module)
	errs := make([]error, len(modules))
	var wg sync.WaitGroup
	for w := range 2 {
		wg.Go(func() {
			for m := range work {
				errs[w] = errors.Join(errs[w], m.build(dir))
			}
		})
	}
	for _, m := range modules {
		work <- m
	}
	close(work)
	wg.Wait()
	return errors.Join(errs...)
}

func (m module) build(dir string) error {
	args := []string{
		"-x", "cuda", "--cuda-device-only", "-nocudainc", "-nocudalib", "--cuda-gpu-arch=" + m.arch,
		"--cuda-feature=" + m.ptx, "-std=c++20", "-O3", "-ffp-contract=off", "-Wall", "-Werror", "-S", "-o", "-",
	}
	if m.element != "" {
		args = append(args, "-DLS_TYPE="+m.element)
	}
	cmd := exec.Command(compiler, append(args, m.source)...)
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	ptx, err := cmd.Output()
	if err != nil {
		return fmt.Errorf("compile %s for %s: %w\n%s", m.name, m.arch, err, stderr.Bytes())
	}
	var packed bytes.Buffer
	z, err := gzip.NewWriterLevel(&packed, gzip.BestCompression)
	if err != nil {
		return err
	}
	if _, err := z.Write(squeeze(ptx)); err != nil {
		return err
	}
	if err := z.Close(); err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(dir, m.name+"."+m.arch+".ptx.gz"), packed.Bytes(), 0o644)
}

var comment = regexp.MustCompile(`(?m)[ \t]*//.*$|^[ \t]+`)

var blank = regexp.MustCompile(`\n{2,}`)

// squeeze drops comments, which name the compiler's build, and indentation.
func squeeze(ptx []byte) []byte {
	return blank.ReplaceAll(comment.ReplaceAll(ptx, nil), []byte("\n"))
}
