package main

import (
	"archive/tar"
	"bytes"
	"cmp"
	"compress/gzip"
	"crypto/sha256"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"time"
)

const (
	program = "./cmd/lockstep"
	stamps  = "github.com/lockstep-ccl/lockstep/cmd/lockstep/internal/buildinfo"
	plugin  = "libnccl-profiler-lockstep.so"
)

// beside goes into each archive as it is.
var beside = []string{"README.md", "CHANGELOG.md", "SECURITY.md", "VERSION", "rules/lockstep.rules.yaml", "dashboards/json/*.json"}

type release struct {
	root, out         string
	version, revision string
	at                time.Time // of the commit
}

// target is one archive.
type target struct {
	arch string
	cgo  bool
}

func (t target) String() string {
	if t.cgo {
		return t.arch + "-cgo"
	}
	return t.arch
}

func main() {
	root := flag.String("root", ".", "the working tree")
	out := flag.String("o", "dist", "directory to write to")
	only := flag.String("only", "", "targets, such as amd64,arm64,amd64-cgo (default: both without cgo, and this machine's with it)")
	flag.Parse()
	if err := run(*root, *out, *only); err != nil {
		fmt.Fprintln(os.Stderr, "release:", err)
		os.Exit(1)
	}
}

func run(root, out, only string) error {
	r, err := newRelease(root, out)
	if err != nil {
		return err
	}
	targets := []target{{"amd64", false}, {"arm64", false}, {runtime.GOARCH, true}}
	if only != "" {
		targets = slices.DeleteFunc(targets, func(t target) bool { return !slices.Contains(strings.Split(only, ","), t.String()) })
	}
	if err := os.MkdirAll(out, 0o755); err != nil {
		return err
	}
	var sums bytes.Buffer
	for _, t := range targets {
		files, err := r.build(t)
		if err != nil {
			return fmt.Errorf("%s: %w", t, err)
		}
		for _, f := range files {
			data, err := os.ReadFile(f)
			if err != nil {
				return err
			}
			fmt.Fprintf(&sums, "%x  %s\n", sha256.Sum256(data), filepath.Base(f))
			fmt.Println(f)
		}
	}
	return os.WriteFile(filepath.Join(out, "SHA256SUMS"), sums.Bytes(), 0o644)
}

func newRelease(root, out string) (*release, error) {
	version, err := os.ReadFile(filepath.Join(root, "VERSION"))
	if err != nil {
		return nil, err
	}
	r := &release{root: root, out: out, version: strings.TrimSpace(string(version))}
	git := func(args ...string) string {
		b, _ := exec.Command("git", append([]string{"-C", root}, args...)...).Output() // no repository: an archive of the sources
		return strings.TrimSpace(string(b))
	}
	r.revision = cmp.Or(os.Getenv("SOURCE_REVISION"), git("rev-parse", "HEAD"))
	at := cmp.Or(os.Getenv("SOURCE_DATE_EPOCH"), git("log", "-1", "--format=%ct"), "0")
	seconds, err := strconv.ParseInt(at, 10, 64)
	if err != nil {
		return nil, fmt.Errorf("SOURCE_DATE_EPOCH: %w", err)
	}
	r.at = time.Unix(seconds, 0).UTC()
	return r, nil
}

// build makes the archive of a target and its SBOM.
func (r *release) build(t target) (files []string, err error) {
	dir, err := os.MkdirTemp("", "lockstep-release-")
	if err != nil {
		return nil, err
	}
	defer os.RemoveAll(dir)
	bin := filepath.Join(dir, "lockstep")
	link := fmt.Sprintf("-s -w -buildid= -X %s.version=%s -X %s.revision=%s", stamps, r.version, stamps, r.revision)
	env := append(os.Environ(), "GOOS=linux", "GOARCH="+t.arch, "GOFLAGS=-mod=readonly", "GOAMD64=v1", "GOARM64=v8.0", "CGO_ENABLED=0")
	if t.cgo {
		link += " -extldflags=-Wl,--build-id=none"
		env = append(env, "CGO_ENABLED=1", "CGO_CFLAGS=-O2 -Wno-deprecated-declarations")
	}
	cmd := exec.Command("go", "build", "-trimpath", "-buildvcs=false", "-ldflags", link, "-o", bin, program)
	cmd.Dir, cmd.Env = r.root, env
	if out, err := cmd.CombinedOutput(); err != nil {
		return nil, fmt.Errorf("%w\n%s", err, out)
	}
	name := fmt.Sprintf("lockstep_%s_linux_%s", r.version, t)
	inside := map[string]string{"lockstep": bin}
	if t.cgo {
		cmd := exec.Command("make", "-s", "bin/"+plugin)
		cmd.Dir = r.root
		if out, err := cmd.CombinedOutput(); err != nil {
			return nil, fmt.Errorf("%w\n%s", err, out)
		}
		inside[plugin] = filepath.Join(r.root, "bin", plugin)
	}
	for _, pattern := range beside {
		found, err := filepath.Glob(filepath.Join(r.root, pattern))
		if err != nil || len(found) == 0 {
			return nil, errors.Join(fmt.Errorf("%s: not there", pattern), err)
		}
		for _, f := range found {
			rel, err := filepath.Rel(r.root, f)
			if err != nil {
				return nil, err
			}
			inside[rel] = f
		}
	}
	archive, err := r.archive(name, inside)
	if err != nil {
		return nil, err
	}
	bom, err := sbom(bin, r.version)
	if err != nil {
		return nil, err
	}
	for suffix, data := range map[string][]byte{".tar.gz": archive, ".cdx.json": bom} {
		f := filepath.Join(r.out, name+suffix)
		if err := os.WriteFile(f, data, 0o644); err != nil {
			return nil, err
		}
		files = append(files, f)
	}
	slices.Sort(files)
	return files, nil
}

// archive packs files below a folder of this name.
func (r *release) archive(name string, inside map[string]string) ([]byte, error) {
	var out bytes.Buffer
	z, err := gzip.NewWriterLevel(&out, gzip.BestCompression)
	if err != nil {
		return nil, err
	}
	w := tar.NewWriter(z)
	var names []string
	for n := range inside {
		names = append(names, n)
	}
	slices.Sort(names)
	for _, n := range names {
		data, err := os.ReadFile(inside[n])
		if err != nil {
			return nil, err
		}
		mode := int64(0o644)
		if !strings.Contains(n, ".") && n != "VERSION" {
			mode = 0o755
		}
		h := &tar.Header{Typeflag: tar.TypeReg, Name: name + "/" + n, Mode: mode, Size: int64(len(data)), ModTime: r.at, Format: tar.FormatPAX}
		if err := w.WriteHeader(h); err != nil {
			return nil, err
		}
		if _, err := w.Write(data); err != nil {
			return nil, err
		}
	}
	if err := w.Close(); err != nil {
		return nil, err
	}
	if err := z.Close(); err != nil {
		return nil, err
	}
	return out.Bytes(), nil
}
