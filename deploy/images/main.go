package main

import (
	"archive/tar"
	"bytes"
	"cmp"
	"compress/gzip"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"time"
)

func main() {
	from := flag.String("from", "dist", "directory with the archives of a release")
	out := flag.String("o", "dist", "directory to write to")
	name := flag.String("name", "lockstep", "name of the images, such as registry.example.com/lockstep")
	libc := flag.String("libc", "", "Debian's package libc6 (.deb), for the image with cgo; without it that is not made")
	flag.Parse()
	if err := run(*from, *out, *name, *libc); err != nil {
		fmt.Fprintln(os.Stderr, "images:", err)
		os.Exit(1)
	}
}

// run packs the release in from.
func run(from, out, name, libc string) error {
	archives, err := filepath.Glob(filepath.Join(from, "lockstep_*_linux_*.tar.gz"))
	if err != nil {
		return err
	}
	var static, gpu []platform
	var version string
	for _, path := range archives {
		r, err := readRelease(path)
		if err != nil {
			return fmt.Errorf("%s: %w", path, err)
		}
		if v := cmp.Or(version, r.version); v != r.version {
			return fmt.Errorf("%s: there is an archive of version %s beside it: keep one release in %s", path, v, from)
		}
		version = r.version
		arch, cgo := strings.CutSuffix(r.target, "-cgo")
		switch {
		case !cgo:
			static = append(static, platform{arch, r.at, rootFS(r, nil)})
		case libc != "":
			library, err := libraryFiles(libc)
			if err != nil {
				return err
			}
			gpu = append(gpu, platform{arch, r.at, rootFS(r, library)})
		}
	}
	if len(static) == 0 {
		return fmt.Errorf("%s holds no lockstep_VERSION_linux_ARCH.tar.gz: make release first", from)
	}
	l := newLayout()
	if err := l.add(name+":"+tag(version), static); err != nil {
		return err
	}
	if len(gpu) > 0 {
		if err := l.add(name+":"+tag(version)+"-gpu", gpu); err != nil {
			return err
		}
	} else if libc != "" {
		return fmt.Errorf("%s holds no archive with cgo of %s: make release without -only", from, runtime.GOARCH)
	}
	file := filepath.Join(out, "lockstep_"+version+"_images.tar")
	if err := l.write(file, static[0].at); err != nil {
		return err
	}
	list := l.list()
	if err := os.WriteFile(filepath.Join(out, "IMAGES"), []byte(list), 0o644); err != nil {
		return err
	}
	fmt.Print(file, "\n", list)
	return nil
}

// tag is a version as a tag may be spelt.
func tag(version string) string { return strings.ReplaceAll(version, "+", "-") }

// release is what is read of an archive.
type release struct {
	version, target string
	at              time.Time // of the commit, as the archive has it
	program, plugin []byte
}

func readRelease(path string) (release, error) {
	var r release
	parts := strings.SplitN(strings.TrimSuffix(filepath.Base(path), ".tar.gz"), "_", 4)
	if len(parts) != 4 {
		return r, errors.New("its name is not lockstep_VERSION_linux_TARGET.tar.gz")
	}
	r.version, r.target = parts[1], parts[3]
	f, err := os.Open(path)
	if err != nil {
		return r, err
	}
	defer f.Close()
	z, err := gzip.NewReader(f)
	if err != nil {
		return r, err
	}
	for t := tar.NewReader(z); ; {
		h, err := t.Next()
		if errors.Is(err, io.EOF) {
			break
		} else if err != nil {
			return r, err
		}
		var to *[]byte
		switch base := filepath.Base(h.Name); {
		case base == "lockstep" && h.Typeflag == tar.TypeReg:
			to = &r.program
		case base == plugin:
			to = &r.plugin
		default:
			continue
		}
		r.at = h.ModTime.UTC()
		if *to, err = io.ReadAll(t); err != nil {
			return r, err
		}
	}
	if len(r.program) == 0 {
		return r, errors.New("it holds no program lockstep")
	}
	return r, nil
}

const (
	plugin = "libnccl-profiler-lockstep.so"
	// nobody runs what needs no right of root's; the charts say so too.
	nobody = 65532
)

// file is one of an image.
type file struct {
	name, link string // without a leading slash; link of a symbolic link
	dir        bool
	mode       int64
	user       int
	data       []byte
}

// rootFS is all that an image has.
func rootFS(r release, library []file) []file {
	files := []file{
		{name: "etc/passwd", mode: 0o644, data: fmt.Appendf(nil, "root:x:0:0:root:/:/sbin/nologin\nlockstep:x:%d:%[1]d:Lockstep:/var/lib/lockstep:/sbin/nologin\n", nobody)},
		{name: "etc/group", mode: 0o644, data: fmt.Appendf(nil, "root:x:0:\nlockstep:x:%d:\n", nobody)},
		{name: "tmp", dir: true, mode: 0o1777},
		{name: "usr/bin/lockstep", mode: 0o755, data: r.program},
		// State where no volume is mounted: it ends with the container.
		{name: "var/lib/lockstep", dir: true, mode: 0o700, user: nobody},
	}
	if len(r.plugin) > 0 {
		files = append(files, file{name: "usr/bin/" + plugin, mode: 0o755, data: r.plugin})
	}
	return withParents(append(files, library...))
}

// withParents adds the directories above, and sorts by name, so that each comes after its directory.
func withParents(files []file) []file {
	have := map[string]bool{".": true}
	for _, f := range files {
		have[f.name] = true
	}
	for _, f := range slices.Clone(files) {
		for d := filepath.Dir(f.name); !have[d]; d = filepath.Dir(d) {
			have[d] = true
			files = append(files, file{name: d, dir: true, mode: 0o755})
		}
	}
	slices.SortFunc(files, func(a, b file) int { return strings.Compare(a.name, b.name) })
	return files
}

// ofLibrary is what libraries of the driver ask for, beside the loader.
var ofLibrary = []string{"libc.so.6", "libm.so.6", "libdl.so.2", "libpthread.so.0", "librt.so.1", "libresolv.so.2", "libnss_dns.so.2", "libnss_files.so.2"}

// libraryFiles takes the C library out of Debian's package.
func libraryFiles(deb string) ([]file, error) {
	var complaint bytes.Buffer
	cmd := exec.Command("dpkg-deb", "--fsys-tarfile", deb)
	cmd.Stderr = &complaint
	data, err := cmd.Output()
	if err != nil {
		return nil, fmt.Errorf("dpkg-deb %s: %w: %s", deb, err, bytes.TrimSpace(complaint.Bytes()))
	}
	files, err := libraryIn(bytes.NewReader(data))
	if err != nil {
		return nil, fmt.Errorf("%s: %w", deb, err)
	}
	return files, nil
}

func libraryIn(fs io.Reader) ([]file, error) {
	var files []file
	missing := map[string]bool{"the loader": true}
	for _, n := range ofLibrary {
		missing[n] = true
	}
	merged := false // /lib is a link to /usr/lib
	for t := tar.NewReader(fs); ; {
		h, err := t.Next()
		if errors.Is(err, io.EOF) {
			break
		} else if err != nil {
			return nil, err
		}
		name := strings.TrimPrefix(h.Name, "./")
		base := filepath.Base(name)
		loader := strings.HasPrefix(base, "ld-linux")
		if !loader && !slices.Contains(ofLibrary, base) && name != "usr/share/doc/libc6/copyright" {
			continue
		}
		f := file{name: name, mode: h.Mode, link: h.Linkname}
		switch h.Typeflag {
		case tar.TypeReg:
			f.link = ""
			if f.data, err = io.ReadAll(t); err != nil {
				return nil, err
			}
		case tar.TypeSymlink:
		default:
			continue
		}
		if loader {
			base = "the loader"
		}
		delete(missing, base)
		merged = merged || strings.HasPrefix(name, "usr/lib")
		files = append(files, f)
	}
	if len(missing) > 0 {
		var names []string
		for n := range missing {
			names = append(names, n)
		}
		slices.Sort(names)
		return nil, fmt.Errorf("it is no package of the C library: it lacks %s", strings.Join(names, ", "))
	}
	if merged {
		for _, d := range []string{"lib", "lib64"} {
			files = append(files, file{name: d, link: "usr/" + d, mode: 0o777})
		}
	}
	return files, nil
}
