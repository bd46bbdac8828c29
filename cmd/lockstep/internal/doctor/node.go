package doctor

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/lockstep-ccl/lockstep/collector/source"
	"github.com/lockstep-ccl/lockstep/collector/source/nvml"
	"github.com/lockstep-ccl/lockstep/record"
)

// node is where the checks look. Below a root that is not / there are files only, and
// whoever could be asked is absent.
type node struct {
	root       string
	runtimeDir string
	getenv     func(string) string
	clock      func() (unix.Timex, error)
	listen     func(addr string) error
	gpus       func(context.Context) (string, error)
	space      func(dir string) (free uint64, tmpfs bool, err error)
	executable string
}

func newNode(root, runtimeDir string, patience time.Duration) *node {
	n := &node{root: root, runtimeDir: runtimeDir, getenv: os.Getenv, listen: listen, space: space}
	n.executable, _ = os.Executable()
	n.clock = func() (t unix.Timex, err error) {
		_, err = unix.Adjtimex(&t)
		return t, err
	}
	n.gpus = func(ctx context.Context) (string, error) { return gpus(ctx, patience) }
	if root != "/" {
		n.getenv = func(string) string { return "" }
		n.executable = "/usr/bin/lockstep"
		n.gpus = func(context.Context) (string, error) { return "", errors.New("nobody is asked below another root") }
	}
	return n
}

// at is a path of the node as this process opens it.
func (n *node) at(path string) string { return filepath.Join(n.root, path) }

// read returns a file's text without its last newline, "" when it cannot be read.
func (n *node) read(path string) string {
	b, err := os.ReadFile(n.at(path))
	if err != nil {
		return ""
	}
	return strings.TrimSpace(string(b))
}

func (n *node) exists(path string) bool {
	_, err := os.Stat(n.at(path))
	return err == nil
}

// glob returns the paths on the node that match.
func (n *node) glob(pattern string) (all []string) {
	found, _ := filepath.Glob(n.at(pattern))
	for _, f := range found {
		rel, _ := filepath.Rel(n.root, f)
		all = append(all, "/"+rel)
	}
	return all
}

// library finds a shared library as the dynamic linker would, nearly.
func (n *node) library(name string) string {
	var dirs []string
	if path := n.getenv("LD_LIBRARY_PATH"); path != "" {
		dirs = filepath.SplitList(path)
	}
	for _, conf := range append([]string{"/etc/ld.so.conf"}, n.glob("/etc/ld.so.conf.d/*.conf")...) {
		for line := range strings.Lines(n.read(conf)) {
			if line = strings.TrimSpace(line); strings.HasPrefix(line, "/") {
				dirs = append(dirs, line)
			}
		}
	}
	dirs = append(dirs, "/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu", "/usr/lib64", "/lib64", "/usr/lib", "/lib", "/usr/local/lib")
	for _, d := range dirs {
		if p := filepath.Join(d, name); n.exists(p) {
			return p
		}
	}
	return ""
}

// field is a line's value in a file such as /proc/self/status.
func (n *node) field(path, key string) string {
	for line := range strings.Lines(n.read(path)) {
		if rest, ok := strings.CutPrefix(line, key); ok {
			return strings.TrimSpace(rest)
		}
	}
	return ""
}

func listen(addr string) error {
	l, err := net.Listen("tcp", addr)
	if err != nil {
		return err
	}
	return l.Close()
}

func space(dir string) (free uint64, tmpfs bool, err error) {
	var st unix.Statfs_t
	if err := unix.Statfs(dir, &st); err != nil {
		return 0, false, &fs.PathError{Op: "statfs", Path: dir, Err: err}
	}
	return st.Bavail * uint64(st.Bsize), st.Type == unix.TMPFS_MAGIC, nil
}

// gpus asks the driver as the agent does, and gives up on one that does not answer.
func gpus(ctx context.Context, patience time.Duration) (string, error) {
	s := nvml.New(nvml.Options{Bound: patience, Log: slog.New(slog.DiscardHandler)})
	defer s.Close()
	late := time.After(patience)
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	for {
		v := source.View{Now: record.Now()}
		switch err := s.Update(&v); {
		case err != nil:
			return "", err
		case v.GPUs != nil:
			lost := 0
			for i := range v.GPUs.GPUs {
				if v.GPUs.GPUs[i].Lost {
					lost++
				}
			}
			text := fmt.Sprintf("driver %s, %d GPUs", v.GPUs.DriverVersion, len(v.GPUs.GPUs))
			if lost > 0 {
				return text, fmt.Errorf("%s, %d of them lost: they do not answer their driver", text, lost)
			}
			return text, nil
		}
		select {
		case <-ctx.Done():
			return "", ctx.Err()
		case <-late:
			return "", fmt.Errorf("the driver has not answered within %v: it hangs", patience)
		case <-tick.C:
		}
	}
}
