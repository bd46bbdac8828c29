package local

import (
	"bufio"
	"cmp"
	"context"
	"crypto/sha256"
	"embed"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"
)

// A folder with a go.mod is a module of its own and cannot be embedded, hence
// the other names.
//
//go:embed modules
var modules embed.FS

// ToolsDirEnv names an environment variable: a folder whose programs are used
// as they are, whatever their version. It is for machines that can neither
// install nor build.
const ToolsDirEnv = "LOCKSTEP_TOOLS_DIR"

// ErrUnknownTool is returned by Find for a name that is not in Tools.
var ErrUnknownTool = errors.New("unknown tool")

type tool struct {
	module string // modules/<module>.mod
	pkg    string
	min    version // oldest from PATH
	built  version // what modules/ pins
	tags   string
	// stamp is the variable that holds the version, for the linker; "": the program has none.
	stamp string
}

const commonVersion = "github.com/prometheus/common/version.Version"

var (
	// 3.8 is the first with scrape_native_histograms, which the configuration needs.
	promModule = tool{"prometheus", "github.com/prometheus/prometheus/cmd/", version{3, 8, 0}, version{3, 15, 0}, "netgo,remove_all_sd", commonVersion}
	amModule   = tool{"alertmanager", "github.com/prometheus/alertmanager/cmd/", version{0, 27, 0}, version{0, 31, 1}, "netgo", commonVersion}
	// The second generation, which is an OpenTelemetry collector and is configured as one. Its program says 2.13.
	jaegerModule = tool{"jaeger", "github.com/jaegertracing/jaeger/cmd/", version{2, 0, 0}, version{1, 76, 0}, "netgo", ""}

	tools = map[string]tool{Prometheus: promModule, "promtool": promModule, Alertmanager: amModule, "amtool": amModule, Jaeger: jaegerModule}
)

// Tools lists the names that Find knows.
func Tools() []string { return []string{Prometheus, "promtool", Alertmanager, "amtool", Jaeger} }

// Find returns the path of a tool: from $LOCKSTEP_TOOLS_DIR, from PATH when it
// is recent enough, or built by the go command into the user's cache folder.
// The first build downloads modules and takes minutes; Find then writes a line
// to progress (which may be nil) every few seconds. Concurrent calls, also of
// other processes, build once. Cancelling ctx stops the build.
func Find(ctx context.Context, name string, progress io.Writer) (string, error) {
	t, ok := tools[name]
	if !ok {
		return "", fmt.Errorf("find %q: %w (have %s)", name, ErrUnknownTool, strings.Join(Tools(), ", "))
	}
	if dir := os.Getenv(ToolsDirEnv); dir != "" {
		path := filepath.Join(dir, name)
		if _, err := os.Stat(path); err != nil {
			return "", fmt.Errorf("find %s in $%s: %w", name, ToolsDirEnv, err)
		}
		return path, nil
	}
	if path, err := exec.LookPath(name); err == nil {
		if v, err := versionOf(ctx, path); err == nil && !v.less(t.min) {
			return path, nil
		}
	}
	path, err := t.build(ctx, name, progress)
	if err != nil {
		return "", fmt.Errorf("find %s: none of version %v or later in PATH, and building it failed: %w", name, t.min, err)
	}
	return path, nil
}

func (t tool) build(ctx context.Context, name string, progress io.Writer) (string, error) {
	mod, err := modules.ReadFile("modules/" + t.module + ".mod")
	if err != nil {
		return "", err
	}
	sum, err := modules.ReadFile("modules/" + t.module + ".sum")
	if err != nil {
		return "", err
	}
	cache, err := os.UserCacheDir()
	if err != nil {
		return "", err
	}
	key := sha256.Sum256(fmt.Appendf(nil, "%s\n%s\n%s %v %s/%s", mod, sum, t.tags, t.built, runtime.GOOS, runtime.GOARCH))
	dir := filepath.Join(cache, "lockstep", "tools", fmt.Sprintf("%s-%x", t.module, key[:6]))
	path := filepath.Join(dir, name)
	if _, err := os.Stat(path); err == nil {
		return path, nil
	}
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return "", err
	}
	unlock, err := lock(ctx, filepath.Join(dir, "lock"), progress)
	if err != nil {
		return "", err
	}
	defer unlock()
	if _, err := os.Stat(path); err == nil {
		return path, nil // built by the one we waited for
	}
	for file, data := range map[string][]byte{"go.mod": mod, "go.sum": sum} {
		if err := os.WriteFile(filepath.Join(dir, file), data, 0o600); err != nil {
			return "", err
		}
	}
	partial := path + ".partial"
	defer func() { _ = os.Remove(partial) }() // gone already when the build succeeded
	link := "-s -w"
	if t.stamp != "" {
		link += " -X " + t.stamp + "=" + t.built.String()
	}
	cmd := exec.CommandContext(ctx, "go", "build", "-v", "-mod=readonly", "-tags", t.tags, "-ldflags", link, "-o", partial, t.pkg+name)
	cmd.Dir = dir
	cmd.Env = append(os.Environ(), "GOWORK=off", "PWD="+dir)
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true} // the compilers die with the go command
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) }
	cmd.WaitDelay = 5 * time.Second
	report := newBuildReport(progress, fmt.Sprintf("%s %v", name, t.built))
	cmd.Stderr = report
	err = cmd.Run()
	report.stop()
	if err != nil {
		if ctx.Err() != nil {
			return "", ctx.Err()
		}
		if errors.Is(err, exec.ErrNotFound) {
			return "", fmt.Errorf("no go command in PATH: install Go, or %s, or set $%s", name, ToolsDirEnv)
		}
		return "", fmt.Errorf("go build in %s: %w\n%s", dir, err, report.tail())
	}
	if err := os.Rename(partial, path); err != nil {
		return "", err
	}
	return path, nil
}

// lock takes an exclusive lock on a file, which ends with the process at the latest.
func lock(ctx context.Context, path string, progress io.Writer) (unlock func(), err error) {
	f, err := os.OpenFile(path, os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, err
	}
	told := false
	for {
		err := syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB)
		if err == nil {
			return func() { f.Close() }, nil
		}
		if !errors.Is(err, syscall.EWOULDBLOCK) && !errors.Is(err, syscall.EINTR) {
			f.Close()
			return nil, fmt.Errorf("lock %s: %w", path, err)
		}
		if progress != nil && !told {
			told = true
			fmt.Fprintf(progress, "waiting for another process that builds in %s\n", filepath.Dir(path))
		}
		select {
		case <-ctx.Done():
			f.Close()
			return nil, ctx.Err()
		case <-time.After(200 * time.Millisecond):
		}
	}
}

// buildReport reads what go build -v says and turns it into a line every few
// seconds; it keeps the last lines for an error.
type buildReport struct {
	w    io.Writer
	pipe *io.PipeWriter
	done chan struct{}

	mu   sync.Mutex
	last []string
}

const (
	reportEvery = 5 * time.Second
	reportTail  = 20
)

func newBuildReport(w io.Writer, what string) *buildReport {
	r, pipe := io.Pipe()
	b := &buildReport{w: w, pipe: pipe, done: make(chan struct{})}
	go b.read(r, what)
	return b
}

func (b *buildReport) Write(p []byte) (int, error) { return b.pipe.Write(p) }

func (b *buildReport) read(r io.Reader, what string) {
	defer close(b.done)
	lines := make(chan string)
	go func() {
		defer close(lines)
		s := bufio.NewScanner(r)
		for s.Scan() {
			lines <- s.Text()
		}
		_, _ = io.Copy(io.Discard, r) // an overlong line ends the scan, not the build
	}()
	say := func(format string, args ...any) {
		if b.w != nil {
			fmt.Fprintf(b.w, "building %s: %s\n", what, fmt.Sprintf(format, args...))
		}
	}
	say("from source, once; later runs find it in the cache")
	start, packages, downloads := time.Now(), 0, 0
	tick := time.NewTicker(reportEvery)
	defer tick.Stop()
	for {
		select {
		case line, ok := <-lines:
			if !ok {
				say("ended after %s", time.Since(start).Round(time.Second))
				return
			}
			if strings.HasPrefix(line, "go: downloading") {
				downloads++
			} else {
				packages++
			}
			b.mu.Lock()
			b.last = append(b.last, line)
			b.last = b.last[max(0, len(b.last)-reportTail):]
			b.mu.Unlock()
		case <-tick.C:
			say("%s, %d modules downloaded, %d packages compiled", time.Since(start).Round(time.Second), downloads, packages)
		}
	}
}

func (b *buildReport) stop() {
	_ = b.pipe.Close()
	<-b.done
}

func (b *buildReport) tail() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return strings.Join(b.last, "\n")
}

type version [3]int

func (v version) String() string { return fmt.Sprintf("%d.%d.%d", v[0], v[1], v[2]) }

func (v version) less(o version) bool {
	return cmp.Or(cmp.Compare(v[0], o[0]), cmp.Compare(v[1], o[1]), cmp.Compare(v[2], o[2])) < 0
}

var versionLine = regexp.MustCompile(`, version v?(\d+)\.(\d+)\.(\d+)`)

// parseVersion reads the first line of --version, "prometheus, version 3.15.0 (branch: …".
func parseVersion(out string) (version, error) {
	m := versionLine.FindStringSubmatch(out)
	if m == nil {
		return version{}, fmt.Errorf("no version in %q", strings.SplitN(out, "\n", 2)[0])
	}
	var v version
	for i := range v {
		n, err := strconv.Atoi(m[i+1])
		if err != nil {
			return version{}, err
		}
		v[i] = n
	}
	return v, nil
}

func versionOf(ctx context.Context, path string) (version, error) {
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	cmd := exec.CommandContext(ctx, path, "--version")
	cmd.WaitDelay = time.Second
	out, err := cmd.CombinedOutput() // old ones print it to stderr
	if err != nil {
		return version{}, err
	}
	return parseVersion(string(out))
}
