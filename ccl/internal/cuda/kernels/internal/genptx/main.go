// Command genptx compiles the kernels to PTX with clang alone; no CUDA toolkit
// is needed.
//
//	go run ./internal/genptx -o ptx   (in ccl/internal/cuda/kernels)
//
// Where there is a ptxas (in PATH, or -ptxas), it makes cubins of the PTX as well. Each
// names the PTX that it was made from; where there is no ptxas those of other PTX are
// removed, and the driver compiles the PTX instead, which takes seconds.
package main

import (
	"bytes"
	"compress/gzip"
	"crypto/sha256"
	"errors"
	"flag"
	"fmt"
	"log"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"sync"
)

// compiler is pinned: another version makes other PTX, and the committed files
// are compared with a fresh build.
const compiler = "clang-19"

// assembler is pinned by the first digits of its release: drivers take cubins of the
// releases of CUDA up to their own, and 12.4 is the oldest that a distribution has
// (Debian's nvidia-cuda-toolkit, of which no other file is needed).
const assembler = "V12.4."

// types is the C++ type of each element type, by record.DType's name.
var types = map[string]string{
	"int8": "signed char", "uint8": "unsigned char", "int32": "int", "uint32": "unsigned int",
	"int64": "long long", "uint64": "unsigned long long",
	"float16": "float16", "float32": "float", "float64": "double", "bfloat16": "bfloat16",
	"float8_e4m3": "float8e4m3", "float8_e5m2": "float8e5m2",
}

// widened are the types that are accumulated in another one: rings, which pass sums on from
// rank to rank, have no kernels of these.
var widened = map[string]bool{"float16": true, "bfloat16": true, "float8e4m3": true, "float8e5m2": true}

// stampedByPeer are the modules of which there is another one that stamps by peer:
// what trains.
var stampedByPeer = map[string]bool{"move": true, "reduce_float16": true, "reduce_bfloat16": true, "reduce_float32": true}

// arches are the devices built for, and the newest PTX that the oldest driver
// takes for each (535: 8.2).
var arches = []struct {
	name, ptx string
	cubin     bool
}{{"sm_80", "+ptx70", false}, {"sm_90", "+ptx80", true}}

type module struct {
	name, arch, ptx, source, element string
	cubin, peers                     bool
}

func main() {
	log.SetFlags(0)
	log.SetPrefix("genptx: ")
	out := flag.String("o", "ptx", "directory of the modules")
	ptxas := flag.String("ptxas", "ptxas", "the assembler")
	only := flag.String("only", "", "modules to build, by a regular expression; the others stay as they are")
	flag.Parse()
	if _, err := exec.LookPath(compiler); err != nil {
		log.Fatalf("%v: install it (Debian: apt-get install clang-19)", err)
	}
	path, err := findAssembler(*ptxas)
	if err != nil {
		log.Print(err)
	}
	wanted, err := regexp.Compile("^(" + *only + ")$")
	if err != nil {
		log.Fatal(err)
	}
	var modules []module
	for _, arch := range arches {
		modules = append(modules, module{"move", arch.name, arch.ptx, "move.cu", "", arch.cubin, false})
		for name, element := range types {
			modules = append(modules, module{"reduce_" + name, arch.name, arch.ptx, "reduce.cu", element, arch.cubin, false})
		}
		for _, m := range modules {
			if m.arch == arch.name && stampedByPeer[m.name] {
				m.name, m.peers = m.name+"_peers", true
				modules = append(modules, m)
			}
		}
	}
	if *only != "" {
		modules = slices.DeleteFunc(modules, func(m module) bool { return !wanted.MatchString(m.name) })
	}
	if len(modules) == 0 {
		log.Fatalf("no module is named %q", *only)
	}
	if err := build(modules, *out, path); err != nil {
		log.Fatal(err)
	}
}

func build(modules []module, dir, ptxas string) error {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	work := make(chan module)
	errs := make([]error, len(modules))
	var wg sync.WaitGroup
	for w := range 2 {
		wg.Go(func() {
			for m := range work {
				errs[w] = errors.Join(errs[w], m.build(dir, ptxas))
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

func (m module) build(dir, ptxas string) error {
	args := []string{
		"-x", "cuda", "--cuda-device-only", "-nocudainc", "-nocudalib", "--cuda-gpu-arch=" + m.arch,
		"--cuda-feature=" + m.ptx, "-std=c++20", "-O3", "-ffp-contract=off", "-Wall", "-Werror", "-S", "-o", "-",
	}
	if m.element != "" {
		args = append(args, "-DLS_TYPE="+m.element)
	}
	if widened[m.element] {
		args = append(args, "-DLS_WIDENED")
	}
	if m.peers {
		args = append(args, "-DLS_PEERS")
	}
	cmd := exec.Command(compiler, append(args, m.source)...)
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	ptx, err := cmd.Output()
	if err != nil {
		return fmt.Errorf("compile %s for %s: %w\n%s", m.name, m.arch, err, stderr.Bytes())
	}
	ptx = squeeze(ptx)
	base := filepath.Join(dir, m.name+"."+m.arch)
	if err := pack(base+".ptx.gz", ptx, ""); err != nil || !m.cubin {
		return err
	}
	return assemble(ptxas, base+".cubin.gz", m.arch, ptx)
}

// findAssembler is the path of the ptxas of the release that is wanted, or "".
func findAssembler(name string) (string, error) {
	path, err := exec.LookPath(name)
	if err != nil {
		return "", fmt.Errorf("%w: cubins stay as they are, or go where their PTX has changed", err)
	}
	out, err := exec.Command(path, "--version").Output()
	if err != nil {
		return "", fmt.Errorf("%s --version: %w", path, err)
	}
	if !bytes.Contains(out, []byte(assembler)) {
		return "", fmt.Errorf("%s is not %s but %s", path, assembler, bytes.TrimSpace(out))
	}
	return path, nil
}

// assemble makes the cubin of ptx, unless it is there.
func assemble(ptxas, file, arch string, ptx []byte) error {
	of := fmt.Sprintf("ptxas %s of %x", assembler, sha256.Sum256(ptx))
	if is, err := origin(file); err == nil && is == of {
		return nil
	}
	if ptxas == "" {
		if err := os.Remove(file); err != nil && !errors.Is(err, os.ErrNotExist) {
			return err
		}
		return nil
	}
	dir, err := os.MkdirTemp("", "genptx")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	in, out := filepath.Join(dir, "in.ptx"), filepath.Join(dir, "out.cubin")
	if err := os.WriteFile(in, ptx, 0o644); err != nil {
		return err
	}
	if text, err := exec.Command(ptxas, "-arch="+arch, in, "-o", out).CombinedOutput(); err != nil {
		return fmt.Errorf("assemble %s: %w\n%s", file, err, text)
	}
	cubin, err := os.ReadFile(out)
	if err != nil {
		return err
	}
	return pack(file, cubin, of)
}

// pack writes a compressed file, with where it is from.
func pack(file string, b []byte, of string) error {
	var packed bytes.Buffer
	z, err := gzip.NewWriterLevel(&packed, gzip.BestCompression)
	if err != nil {
		return err
	}
	z.Comment = of
	if _, err := z.Write(b); err != nil {
		return err
	}
	if err := z.Close(); err != nil {
		return err
	}
	return os.WriteFile(file, packed.Bytes(), 0o644)
}

// origin is what a file of pack is from.
func origin(file string) (string, error) {
	f, err := os.Open(file)
	if err != nil {
		return "", err
	}
	defer f.Close()
	z, err := gzip.NewReader(f)
	if err != nil {
		return "", err
	}
	return z.Comment, nil
}

var comment = regexp.MustCompile(`(?m)[ \t]*//.*$|^[ \t]+`)

var blank = regexp.MustCompile(`\n{2,}`)

// squeeze drops comments, which name the compiler's build, and indentation.
func squeeze(ptx []byte) []byte {
	return blank.ReplaceAll(comment.ReplaceAll(ptx, nil), []byte("\n"))
}
