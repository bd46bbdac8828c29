package ebpf_test

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/lockstep-ccl/lockstep/collector"
	"github.com/lockstep-ccl/lockstep/collector/source"
	"github.com/lockstep-ccl/lockstep/collector/source/ebpf"
	"github.com/lockstep-ccl/lockstep/record"
)

// built is where the stand-in library and the rank program are.
var built struct {
	once sync.Once
	dir  string
	err  error
}

func TestMain(m *testing.M) {
	if os.Getenv("LOCKSTEP_TEST_AS") != "" {
		beUnprivileged()
	}
	code := m.Run()
	if err := goleak.Find(); err != nil && code == 0 {
		fmt.Fprintln(os.Stderr, err)
		code = 1
	}
	os.RemoveAll(built.dir)
	os.Exit(code)
}

// standIn builds the stand-in library and the program that calls it.
func standIn(t testing.TB) (dir string) {
	t.Helper()
	if _, err := exec.LookPath("cc"); err != nil {
		t.Skip("no C compiler: ", err)
	}
	built.once.Do(func() {
		if built.dir, built.err = os.MkdirTemp("", "standin"); built.err != nil {
			return
		}
		built.err = os.Chmod(built.dir, 0o755)
		for _, args := range [][]string{
			{"-O2", "-Wall", "-Wextra", "-Werror", "-fPIC", "-shared", "-Wl,-soname,libnccl.so.2", "-o", "libnccl.so.2", "testdata/nccl.c"},
			{"-O2", "-Wall", "-Wextra", "-Werror", "-pthread", "-o", "rank", "testdata/rank.c", "libnccl.so.2", "-Wl,-rpath,$ORIGIN"},
		} {
			for i, a := range args {
				if a == "libnccl.so.2" || a == "rank" {
					args[i] = filepath.Join(built.dir, a)
				}
			}
			if out, err := exec.Command("cc", args...).CombinedOutput(); err != nil {
				built.err = errors.Join(built.err, fmt.Errorf("cc %v: %w\n%s", args, err, out))
			}
		}
	})
	if built.err != nil {
		t.Fatal(built.err)
	}
	return built.dir
}

// job is stand-in ranks and the source that watches them.
type job struct {
	t    testing.TB
	dir  string // of the recorders
	file string // that ranks share
	size int
	env  []string // of ranks
	s    *ebpf.Source
	v    source.View
}

func newJob(t testing.TB, size int) *job {
	t.Helper()
	standIn(t)
	return &job{t: t, dir: t.TempDir(), file: filepath.Join(t.TempDir(), "steps"), size: size}
}

// watch starts the source; the test is skipped where this machine does not allow it.
func (j *job) watch(o ebpf.Options) {
	j.t.Helper()
	o.Dir, o.Node, o.Scan = j.dir, "here", 20*time.Millisecond
	j.s = ebpf.New(o)
	j.t.Cleanup(func() {
		if err := j.s.Close(); err != nil {
			j.t.Error(err)
		}
	})
	skipUnless(j.t, j.update())
}

func skipUnless(t testing.TB, err error) {
	t.Helper()
	if errors.Is(err, ebpf.ErrNotPermitted) || errors.Is(err, ebpf.ErrNotSupported) || errors.Is(err, ebpf.ErrNotHost) {
		t.Skip(err)
	}
}

func (j *job) update() error {
	j.v.Now = record.Now()
	return j.s.Update(&j.v)
}

// rank is one rank's process.
type rank struct {
	*exec.Cmd
	t   testing.TB
	in  io.Writer
	out *bufio.Reader
}

func (j *job) start(n int) *rank {
	j.t.Helper()
	return j.startAs(n, exec.Command(filepath.Join(standIn(j.t), "rank"), fmt.Sprint(n), fmt.Sprint(j.size), j.file))
}

func (j *job) startAs(n int, cmd *exec.Cmd) *rank {
	j.t.Helper()
	r := &rank{Cmd: cmd, t: j.t}
	r.Env = append([]string{fmt.Sprint("RANK=", n), fmt.Sprint("WORLD_SIZE=", j.size), "TORCHELASTIC_RUN_ID=standin"}, j.env...)
	r.Stderr = os.Stderr
	var err error
	if r.in, err = r.StdinPipe(); err != nil {
		j.t.Fatal(err)
	}
	out, err := r.StdoutPipe()
	if err != nil {
		j.t.Fatal(err)
	}
	r.out = bufio.NewReader(out)
	if err := r.Start(); err != nil {
		j.t.Fatal(err)
	}
	j.t.Cleanup(func() {
		_ = r.Process.Kill()
		_ = r.Wait()
	})
	return r
}

// do tells the rank what to do, and waits until it has been done.
func (r *rank) do(format string, args ...any) string {
	r.t.Helper()
	fmt.Fprintf(r.in, format+"\n", args...)
	line, err := r.out.ReadString('\n')
	if err != nil {
		r.t.Fatalf("%s: %v", fmt.Sprintf(format, args...), err)
	}
	return strings.TrimSpace(line)
}

// attached waits until the source knows of n processes.
func (j *job) attached(n int) {
	j.t.Helper()
	said := ""
	eventually(j.t, fmt.Sprint(n, " processes with probes"), func() bool {
		// A first look that takes its time, or a process of another test that has just ended, is not for good.
		if err := j.update(); err != nil && !errors.Is(err, source.ErrPartly) {
			if said != err.Error() {
				said = err.Error()
				j.t.Log(said)
			}
			return false
		}
		return j.v.Probes != nil && j.v.Probes.Processes >= n && j.v.Probes.Libraries > 0
	})
}

// reader waits for a rank's recorder.
func (j *job) reader(n int) *record.Reader {
	j.t.Helper()
	var found *record.Reader
	eventually(j.t, fmt.Sprint("the recorder of rank ", n), func() bool {
		_ = j.update()
		paths, err := record.List(j.dir)
		if err != nil {
			j.t.Fatal(err)
		}
		for _, path := range paths {
			r, err := record.Open(path)
			if err != nil {
				continue
			}
			if found == nil && r.Header().Rank == int32(n) {
				found = r
			} else {
				r.Close()
			}
		}
		return found != nil
	})
	j.t.Cleanup(func() { found.Close() })
	return found
}

// comm waits until a recorder's only communicator is as it should be.
func (j *job) comm(r *record.Reader, what string, ok func(c record.CommStatus) bool) (c record.CommStatus) {
	j.t.Helper()
	var all []record.CommStatus
	defer func() {
		if j.t.Failed() {
			j.t.Logf("%+v", all)
		}
	}()
	eventually(j.t, what, func() bool {
		_ = j.update()
		all = r.Comms(nil)
		if len(all) == 0 {
			return false
		}
		c = all[len(all)-1]
		return ok(c)
	})
	return c
}

// counted waits until so many calls are in what the source publishes: the recorders are a look ahead of it.
func (j *job) counted(calls uint64) *collector.Probes {
	j.t.Helper()
	eventually(j.t, fmt.Sprint(calls, " calls in the counters"), func() bool {
		_ = j.update()
		return j.v.Probes.Calls >= calls
	})
	return j.v.Probes
}

func eventually(t testing.TB, what string, ok func() bool) {
	t.Helper()
	for deadline := time.Now().Add(2 * time.Minute); time.Now().Before(deadline); time.Sleep(10 * time.Millisecond) {
		if ok() {
			return
		}
	}
	t.Errorf("not within two minutes: %s", what)
	t.FailNow()
}
