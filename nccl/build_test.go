package nccl_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/lockstep-ccl/lockstep/record"
)

// flavour is one way to compile plugin and driver.
type flavour struct {
	name  string
	flags []string
	env   []string
}

var plain = flavour{name: "plain"}

type built struct {
	dir string
	err error
}

var (
	buildMu sync.Mutex
	builds  = map[string]built{}
)

func TestMain(m *testing.M) {
	code := m.Run()
	for _, b := range builds {
		os.RemoveAll(b.dir)
	}
	os.Exit(code)
}

// build compiles plugin and driver, once a flavour.
func build(tb testing.TB, f flavour) (plugin, driver string) {
	tb.Helper()
	cc, err := exec.LookPath("cc")
	if err != nil {
		tb.Skip("no C compiler: cc is not in PATH")
	}
	buildMu.Lock()
	defer buildMu.Unlock()
	b, ok := builds[f.name]
	if !ok {
		if b.dir, b.err = os.MkdirTemp("", "lockstep-nccl-"); b.err == nil {
			b.err = compile(cc, b.dir, f)
		}
		builds[f.name] = b
	}
	if b.err != nil {
		tb.Fatal(b.err)
	}
	return filepath.Join(b.dir, "plugin.so"), filepath.Join(b.dir, "driver")
}

func compile(cc, dir string, f flavour) error {
	common := append([]string{"-std=gnu11", "-O2", "-g", "-Wall", "-Wextra", "-Wshadow", "-Werror", "-I../record/c", "-I../marks/c"}, f.flags...)
	for _, c := range [][]string{
		{"plugin/*.c", "-fPIC", "-shared", "-fvisibility=hidden", "-Wl,-z,nodelete,-z,now", "-o", filepath.Join(dir, "plugin.so")},
		{"driver/*.c", "-o", filepath.Join(dir, "driver")},
	} {
		files, err := filepath.Glob(c[0])
		if err != nil {
			return err
		}
		args := append(append(append([]string{}, common...), c[1:]...), append(files, "-lpthread", "-ldl")...)
		if out, err := exec.Command(cc, args...).CombinedOutput(); err != nil {
			return fmt.Errorf("cc: %w\n%s", err, out)
		}
	}
	return nil
}

// command is the driver with an environment of its own: the one that runs the tests says nothing of ranks.
func command(tb testing.TB, f flavour, dir string, env []string, args ...string) *exec.Cmd {
	tb.Helper()
	plugin, driver := build(tb, f)
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Minute)
	tb.Cleanup(cancel)
	cmd := exec.CommandContext(ctx, driver, append([]string{plugin}, args...)...)
	cmd.Env = append(append([]string{"PATH=" + os.Getenv("PATH"), "LOCKSTEP_RUNTIME_DIR=" + dir}, f.env...), env...)
	return cmd
}

// play runs the driver to its end and returns what it printed.
func play(tb testing.TB, f flavour, dir string, env []string, args ...string) []string {
	tb.Helper()
	cmd := command(tb, f, dir, env, args...)
	out, err := cmd.Output()
	if err != nil {
		var exit *exec.ExitError
		if errors.As(err, &exit) {
			tb.Fatalf("driver %q: %v\n%s%s", args, err, out, exit.Stderr)
		}
		tb.Fatalf("driver %q: %v", args, err)
	}
	return strings.Split(strings.TrimSpace(string(out)), "\n")
}

// opRecords is what the recorder has of one operation.
type opRecords struct{ enqueue, start, end []record.Record }

// content is a recorder, read to its end.
type content struct {
	*record.Reader
	header record.Header
	ops    map[uint16]map[uint64]*opRecords // by index of the communicator, and sequence
	other  []record.Record
}

func read(tb testing.TB, path string) *content {
	tb.Helper()
	r, err := record.Open(path)
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() { r.Close() })
	c := &content{Reader: r, header: r.Header(), ops: map[uint16]map[uint64]*opRecords{}}
	buf := make([]record.Record, 1024)
	for n := r.Next(buf); n > 0; n = r.Next(buf) {
		for _, rec := range buf[:n] {
			var list *[]record.Record
			if c.ops[rec.Comm] == nil {
				c.ops[rec.Comm] = map[uint64]*opRecords{}
			}
			o := c.ops[rec.Comm][rec.Seq]
			if o == nil {
				o = &opRecords{}
			}
			switch rec.Kind {
			case record.KindEnqueue:
				list = &o.enqueue
			case record.KindStart:
				list = &o.start
			case record.KindEnd:
				list = &o.end
			default:
				c.other = append(c.other, rec)
				continue
			}
			*list = append(*list, rec)
			c.ops[rec.Comm][rec.Seq] = o
		}
	}
	if err := r.Err(); err != nil {
		tb.Fatal(err)
	}
	return c
}

// recorders of a directory, read.
func recorders(tb testing.TB, dir string) []*content {
	tb.Helper()
	paths, err := record.List(dir)
	if err != nil {
		tb.Fatal(err)
	}
	var all []*content
	for _, p := range paths {
		all = append(all, read(tb, p))
	}
	return all
}

func (c *content) comm(tb testing.TB, id uint64) record.CommStatus {
	tb.Helper()
	for _, s := range c.Comms(nil) {
		if s.ID == id {
			return s
		}
	}
	tb.Fatalf("no communicator %x in the recorder", id)
	return record.CommStatus{}
}
