package kernels_test

import (
	"bytes"
	"compress/gzip"
	"crypto/sha256"
	"encoding/binary"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/lockstep-ccl/lockstep/ccl/internal/cuda/kernels"
	"github.com/lockstep-ccl/lockstep/record"
)

// clang is the compiler of the kernels, or skips the test.
func clang(t *testing.T) string {
	t.Helper()
	path, err := exec.LookPath("clang-19")
	if err != nil {
		t.Skipf("kernels cannot be compiled: %v (Debian: apt-get install clang-19)", err)
	}
	return path
}

func TestStructsAgree(t *testing.T) {
	var src strings.Builder
	src.WriteString("#include \"abi.h\"\n#include <stddef.h>\n")
	for _, a := range kernels.Layout() {
		fmt.Fprintf(&src, "static_assert(%s == %d, \"\");\n", a.Expr, a.Value)
	}
	cmd := exec.Command(clang(t), "-x", "c++", "-std=c++20", "-Wno-invalid-offsetof", "-fsyntax-only", "-I.", "-nostdinc++", "-")
	cmd.Stdin = strings.NewReader(src.String())
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("abi.go and abi.h differ: %v\n%s", err, out)
	}
}

var entries = regexp.MustCompile(`\.entry (\w+)\(`)

func TestModules(t *testing.T) {
	names := []string{"move"}
	for dt := record.DType(0); dt.Size() != 0; dt++ {
		names = append(names, "reduce_"+dt.String())
	}
	for _, name := range names {
		for _, major := range []int{8, 9, 12} {
			t.Run(fmt.Sprintf("%s/%d.0", name, major), func(t *testing.T) {
				ptx := kernels.Module(name, major, 0)
				if len(ptx) == 0 || ptx[len(ptx)-1] != 0 {
					t.Fatalf("%d bytes, or not ended by a zero", len(ptx))
				}
				want := slices.Clone(kernels.MoveKernels)
				instructions := []string{"%globaltimer", "ld.volatile.global.v4.u32", "st.volatile.global.v4.u32", "st.volatile.global.v2.u64", "ld.acquire.sys.global.u32", "st.release.sys.global.u32"}
				if name == "move" && major >= 9 {
					want = append(want, kernels.BulkMoveKernels...)
				}
				if name != "move" {
					want = slices.Clone(kernels.ReduceKernels)
					if !strings.Contains(name, "float16") && !strings.Contains(name, "float8") { // bfloat16, too
						want = append(want, kernels.RingKernels...)
					}
					instructions = append(instructions, "ld.global.v4.u32")
					if major >= 9 {
						want = append(want, kernels.BulkKernels...)
					}
				}
				var got []string
				for _, m := range entries.FindAllSubmatch(ptx, -1) {
					got = append(got, string(m[1]))
				}
				slices.Sort(want)
				slices.Sort(got)
				if !slices.Equal(got, want) {
					t.Errorf("kernels %q, want %q", got, want)
				}
				for _, i := range instructions {
					if !bytes.Contains(ptx, []byte(i)) {
						t.Errorf("no %s", i)
					}
				}
				if bytes.Contains(ptx, []byte(".local")) {
					t.Error("it uses local memory: something indexes registers, or copies its parameter")
				}
			})
		}
	}
	if kernels.Module("move", 7, 5) != nil || kernels.Module("none", 9, 0) != nil {
		t.Error("modules for what is not supported")
	}
}

// TestPeerModules: modules that stamp by peer have kernels of the others, those of collectives
// at least, and as little local memory.
func TestPeerModules(t *testing.T) {
	for _, name := range []string{"move", "reduce_float16", "reduce_bfloat16", "reduce_float32"} {
		for _, major := range []int{8, 9} {
			ptx, all := kernels.Module(kernels.ByPeer(name), major, 0), kernels.Module(name, major, 0)
			if ptx == nil {
				t.Errorf("%s has none for %d.0", name, major)
				continue
			}
			n := 0
			for _, m := range entries.FindAllSubmatch(ptx, -1) {
				if n++; !bytes.Contains(all, m[0]) {
					t.Errorf("%s has no %s, the one that stamps by peer has", name, m[1])
				}
			}
			if n < 10 || bytes.Contains(ptx, []byte(".local")) {
				t.Errorf("%s for %d.0: %d kernels, local memory %v", name, major, n, bytes.Contains(ptx, []byte(".local")))
			}
		}
	}
	if kernels.Module(kernels.ByPeer("reduce_int8"), 9, 0) != nil {
		t.Error("reduce_int8 stamps by peer: add it to this test")
	}
}

func TestPTXIsFresh(t *testing.T) {
	clang(t)
	if testing.Short() {
		t.Skip("compiles every module")
	}
	dir := t.TempDir()
	if out, err := exec.Command("go", "run", "./internal/genptx", "-o", dir).CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	fresh, err := filepath.Glob(filepath.Join(dir, "*.ptx.gz"))
	if err != nil {
		t.Fatal(err)
	}
	committed, err := filepath.Glob("ptx/*.ptx.gz")
	if err != nil {
		t.Fatal(err)
	}
	if len(fresh) != len(committed) {
		t.Errorf("%d modules, %d committed", len(fresh), len(committed))
	}
	for _, f := range fresh {
		if !bytes.Equal(unpack(t, f), unpack(t, filepath.Join("ptx", filepath.Base(f)))) {
			t.Errorf("%s is stale: run go generate", filepath.Base(f))
		}
	}
}

// TestCubins: every module of sm_90 comes assembled as well, of the PTX that is there, with
// all of its kernels.
func TestCubins(t *testing.T) {
	modules, err := filepath.Glob("ptx/*.sm_90.ptx.gz")
	if err != nil || len(modules) == 0 {
		t.Fatal(modules, err)
	}
	for _, file := range modules {
		name, _, _ := strings.Cut(filepath.Base(file), ".")
		cubin := kernels.Cubin(name, 9, 0)
		if cubin == nil {
			t.Errorf("%s has no cubin: run go generate where ptxas of CUDA 12.4 is (Debian: nvidia-cuda-toolkit)", name)
			continue
		}
		if of := fmt.Sprintf("%x", sha256.Sum256(unpack(t, file))); !strings.HasSuffix(comment(t, strings.Replace(file, ".ptx.", ".cubin.", 1)), of) {
			t.Errorf("%s's cubin is of other PTX: run go generate where ptxas of CUDA 12.4 is (Debian: nvidia-cuda-toolkit)", name)
		}
		const cuda = 190 // EM_CUDA
		if !bytes.HasPrefix(cubin, []byte("\x7fELF")) || binary.LittleEndian.Uint16(cubin[18:]) != cuda {
			t.Errorf("%s's cubin is none", name)
		}
		for _, m := range entries.FindAllSubmatch(unpack(t, file), -1) {
			if !bytes.Contains(cubin, []byte(".text."+string(m[1])+"\x00")) {
				t.Errorf("%s's cubin has no %s", name, m[1])
			}
		}
	}
	if kernels.Cubin("move", 10, 0) != nil || kernels.Cubin("none", 9, 0) != nil {
		t.Error("cubins for what they were not made for")
	}
}

// comment is what a compressed file says of itself.
func comment(t *testing.T, file string) string {
	t.Helper()
	f, err := os.Open(file)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	z, err := gzip.NewReader(f)
	if err != nil {
		t.Fatal(err)
	}
	return z.Comment
}

func unpack(t *testing.T, file string) []byte {
	t.Helper()
	f, err := os.Open(file)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	z, err := gzip.NewReader(f)
	if err != nil {
		t.Fatal(err)
	}
	b, err := io.ReadAll(z)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func TestLLCapacity(t *testing.T) {
	for _, c := range []struct {
		coll          record.CollKind
		twoShot       bool
		ranks, blocks int
		want          uint64
	}{
		{record.AllReduce, false, 8, 32, 256 << 10},
		{record.AllReduce, true, 8, 32, 2 << 20},
		{record.AllReduce, true, 2, 1, 16 << 10},
		{record.Broadcast, true, 4, 32, 768 << 10},
		{record.AllGather, false, 8, 4, 32 << 10},
		{record.ReduceScatter, false, 2, 1, 8 << 10},
	} {
		if got := kernels.LLCapacity(c.coll, c.twoShot, c.ranks, c.blocks); got != c.want {
			t.Errorf("%v two-shot %v, %d ranks, %d blocks: %d, want %d", c.coll, c.twoShot, c.ranks, c.blocks, got, c.want)
		}
	}
	for _, c := range []struct {
		ranks, blocks int
		want          uint64
	}{{2, 32, 2304 << 10}, {3, 32, 1152 << 10}, {4, 1, 36 << 10}, {8, 32, 576 << 10}} {
		if got := kernels.LL12Capacity(c.ranks, c.blocks); got != c.want {
			t.Errorf("12 bytes a line, %d ranks, %d blocks: %d, want %d", c.ranks, c.blocks, got, c.want)
		}
	}
}
