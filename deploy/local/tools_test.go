package local

import (
	"bytes"
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
)

func TestParseVersion(t *testing.T) {
	for _, tc := range []struct {
		out  string
		want version
		ok   bool
	}{
		{"prometheus, version 3.15.0 (branch: HEAD, revision: abc)\n  build user: x", version{3, 15, 0}, true},
		{"alertmanager, version 0.27.0 (branch: , revision: unknown)", version{0, 27, 0}, true},
		{"prometheus, version 2.42.0+ds (branch: debian/sid, revision: 2.42.0+ds-5)", version{2, 42, 0}, true},
		{"prometheus, version 3.16.0-rc.1 (branch: HEAD)", version{3, 16, 0}, true},
		{"prometheus, version  (branch: , revision: unknown)", version{}, false}, // go install without -ldflags
		{"", version{}, false},
	} {
		got, err := parseVersion(tc.out)
		if (err == nil) != tc.ok || got != tc.want {
			t.Errorf("parseVersion(%q) = %v, %v; want %v, ok %v", tc.out, got, err, tc.want, tc.ok)
		}
	}
	if !(version{3, 8, 0}).less(version{3, 15, 0}) || (version{3, 8, 0}).less(version{3, 8, 0}) || (version{4, 0, 0}).less(version{3, 15, 0}) {
		t.Error("less does not order versions")
	}
}

// The version that a build is stamped with is the version that its module pins.
func TestPins(t *testing.T) {
	for file, want := range map[string]string{
		"modules/prometheus.mod":   "github.com/prometheus/prometheus v0.315.0 ",
		"modules/alertmanager.mod": "github.com/prometheus/alertmanager v0.31.1 ",
		"modules/jaeger.mod":       "github.com/jaegertracing/jaeger v1.76.0 ",
	} {
		data, err := modules.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		if !strings.Contains(string(data), want) {
			t.Errorf("%s does not require %q: tools.go stamps and looks for another version", file, want)
		}
	}
	if promModule.built != (version{3, 15, 0}) || amModule.built != (version{0, 31, 1}) || jaegerModule.built != (version{1, 76, 0}) {
		t.Error("tools.go and the modules disagree")
	}
}

// script writes an executable shell script.
func script(t *testing.T, dir, name, body string) string {
	t.Helper()
	path := filepath.Join(dir, name)
	if err := os.WriteFile(path, []byte("#!/bin/sh\n"+body+"\n"), 0o700); err != nil {
		t.Fatal(err)
	}
	return path
}

// bare gives the test a PATH with only the folder returned and the shell's
// own tools, and an empty cache.
func bare(t *testing.T) (bin, cache string) {
	bin, cache = t.TempDir(), t.TempDir()
	t.Setenv("PATH", bin+":/usr/bin:/bin")
	t.Setenv("XDG_CACHE_HOME", cache)
	t.Setenv(ToolsDirEnv, "")
	return bin, cache
}

// fakeGo stands for the go command: it logs that it ran and writes its -o file.
const fakeGo = `echo run >>"$COUNT"
echo "go: downloading example.org/a v1.0.0" >&2
sleep 0.3
while [ "$1" != -o ]; do shift; done
echo built >"$2"`

func TestFind(t *testing.T) {
	ctx := context.Background()

	t.Run("unknown", func(t *testing.T) {
		if _, err := Find(ctx, "grafana", nil); !errors.Is(err, ErrUnknownTool) {
			t.Errorf("err = %v, want ErrUnknownTool", err)
		}
	})
	t.Run("given folder", func(t *testing.T) {
		bare(t)
		dir := t.TempDir()
		want := script(t, dir, "prometheus", "exit 1")
		t.Setenv(ToolsDirEnv, dir)
		if got, err := Find(ctx, "prometheus", nil); err != nil || got != want {
			t.Errorf("Find = %q, %v; want %q", got, err, want)
		}
		if _, err := Find(ctx, "amtool", nil); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("err = %v, want it to name the missing file", err)
		}
	})
	t.Run("recent in PATH", func(t *testing.T) {
		bin, _ := bare(t)
		want := script(t, bin, "prometheus", `echo "prometheus, version 3.8.0 (branch: HEAD)"`)
		if got, err := Find(ctx, "prometheus", nil); err != nil || got != want {
			t.Errorf("Find = %q, %v; want %q", got, err, want)
		}
	})
	t.Run("old in PATH, built once", func(t *testing.T) {
		bin, cache := bare(t)
		script(t, bin, "alertmanager", `echo "alertmanager, version 0.25.0 (branch: HEAD)"`)
		script(t, bin, "go", fakeGo)
		count := filepath.Join(cache, "count")
		t.Setenv("COUNT", count)
		var wg sync.WaitGroup
		var progress [3]bytes.Buffer
		for i := range progress {
			wg.Go(func() {
				got, err := Find(ctx, "alertmanager", &progress[i])
				if err != nil || !strings.HasPrefix(got, cache) {
					t.Errorf("Find = %q, %v; want a file under %s", got, err, cache)
				}
			})
		}
		wg.Wait()
		if runs, _ := os.ReadFile(count); string(runs) != "run\n" {
			t.Errorf("go ran %d times, want once", strings.Count(string(runs), "run"))
		}
		all := progress[0].String() + progress[1].String() + progress[2].String()
		if !strings.Contains(all, "building alertmanager 0.31.1: from source") {
			t.Errorf("progress says nothing of the build: %q", all)
		}
	})
	t.Run("build fails", func(t *testing.T) {
		bin, _ := bare(t)
		script(t, bin, "go", `echo "example.org/a: no space left on device" >&2; exit 1`)
		_, err := Find(ctx, "promtool", nil)
		if err == nil || !strings.Contains(err.Error(), "no space left on device") {
			t.Errorf("err = %v, want it to quote the build", err)
		}
	})
	t.Run("no go", func(t *testing.T) {
		bin, _ := bare(t)
		t.Setenv("PATH", bin)
		_, err := Find(ctx, "promtool", nil)
		if err == nil || !strings.Contains(err.Error(), "install Go") {
			t.Errorf("err = %v, want it to say what to install", err)
		}
	})
	t.Run("cancelled", func(t *testing.T) {
		bin, _ := bare(t)
		script(t, bin, "go", `sleep 600`)
		ctx, cancel := context.WithCancel(ctx)
		cancel()
		if _, err := Find(ctx, "promtool", nil); !errors.Is(err, context.Canceled) {
			t.Errorf("err = %v, want context.Canceled", err)
		}
	})
}
