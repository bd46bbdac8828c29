package nic

import (
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"testing/fstest"
)

// load reads a tree from testdata. A line is a directory and its files, as
// name=value; an indented one is below the last that was not; "link -> target" is a
// symbolic link. The links that the kernel makes to every PCIe function, RDMA
// device and interface are made here, too.
func load(t testing.TB, name string) fstest.MapFS {
	t.Helper()
	text, err := os.ReadFile(filepath.Join("testdata", name+".sysfs"))
	if err != nil {
		t.Fatal(err)
	}
	return expand(string(text))
}

func expand(text string) fstest.MapFS {
	tree := fstest.MapFS{}
	base := ""
	for line := range strings.Lines(text) {
		line = strings.TrimRight(line, "\n")
		if line == "" || line[0] == '#' {
			continue
		}
		fields := split(line)
		if len(fields) == 0 {
			continue
		}
		dir := fields[0]
		if line[0] == ' ' {
			dir = path.Join(base, dir)
		} else {
			base = dir
		}
		if !fs.ValidPath(dir) {
			continue
		}
		if len(fields) == 3 && fields[1] == "->" {
			symlink(tree, dir, fields[2])
			continue
		}
		for _, f := range fields[1:] {
			if file, value, ok := strings.Cut(f, "="); ok && fs.ValidPath(path.Join(dir, file)) {
				tree[path.Join(dir, file)] = &fstest.MapFile{Data: []byte(value + "\n"), Mode: 0o444}
			}
		}
		parent, last := path.Dir(dir), path.Base(dir)
		switch path.Base(parent) {
		case "infiniband":
			symlink(tree, path.Join(classRDMA, last), "../../"+dir)
			if owner := path.Dir(parent); !strings.HasSuffix(owner, "virtual") {
				symlink(tree, path.Join(dir, "device"), "../../../"+path.Base(owner))
			}
		case "net":
			symlink(tree, path.Join(classNet, last), "../../"+dir)
		}
		if _, ok := BusID(last); ok {
			symlink(tree, path.Join(pciAll, last), "../../../"+dir)
		}
	}
	return tree
}

// files writes a tree to a directory, from which no link leads out. What the file
// system does not take is left out.
func files(t testing.TB, tree fstest.MapFS) fs.FS {
	t.Helper()
	root, err := os.OpenRoot(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { root.Close() })
	for name, f := range tree {
		root.MkdirAll(path.Dir(name), 0o755)
		if f.Mode&fs.ModeSymlink != 0 {
			root.Symlink(string(f.Data), name)
		} else {
			root.WriteFile(name, f.Data, 0o644)
		}
	}
	return root.FS()
}

// withoutLoops drops links that lead nowhere for ever: a kernel answers ELOOP, a
// MapFS overflows its stack.
func withoutLoops(tree fstest.MapFS) fstest.MapFS {
	for link, f := range tree {
		if f.Mode&fs.ModeSymlink == 0 {
			continue
		}
		name := link
		for hops := 0; name != ""; hops++ {
			if hops == 40 || len(name) > 4096 {
				delete(tree, link)
				break
			}
			name = hop(tree, name)
		}
	}
	return tree
}

// hop replaces the first link in a path, "" when there is none.
func hop(tree fstest.MapFS, name string) string {
	for i := range len(name) + 1 {
		if i < len(name) && name[i] != '/' {
			continue
		}
		if f := tree[name[:i]]; f != nil && f.Mode&fs.ModeSymlink != 0 {
			return path.Join(path.Dir(name[:i]), string(f.Data), name[i:])
		}
	}
	return ""
}

func symlink(tree fstest.MapFS, name, target string) {
	tree[name] = &fstest.MapFile{Data: []byte(target), Mode: fs.ModeSymlink}
}

// split is strings.Fields with Go's quotes.
func split(line string) []string {
	var out []string
	for line = strings.TrimLeft(line, " "); line != ""; line = strings.TrimLeft(line, " ") {
		end := strings.IndexByte(line, ' ')
		if end < 0 {
			end = len(line)
		}
		if q := strings.IndexByte(line[:end], '"'); q >= 0 {
			if quoted, err := strconv.QuotedPrefix(line[q:]); err == nil {
				value, _ := strconv.Unquote(quoted)
				out = append(out, line[:q]+value)
				line = line[q+len(quoted):]
				continue
			}
		}
		out = append(out, line[:end])
		line = line[end:]
	}
	return out
}
