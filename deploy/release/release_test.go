package main

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"encoding/json"
	"errors"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// TestArchive: the same files make the same archive, whatever their times and modes.
func TestArchive(t *testing.T) {
	t.Setenv("SOURCE_DATE_EPOCH", "1700000000")
	var made [2][]byte
	for i := range made {
		root := t.TempDir()
		inside := map[string]string{}
		for name, text := range map[string]string{"VERSION": "1.2.3\n", "lockstep": "program", "docs/a.md": "a"} {
			path := filepath.Join(root, filepath.FromSlash(strings.ReplaceAll(name, "/", "-")))
			if err := os.WriteFile(path, []byte(text), 0o600+os.FileMode(i)*0o44); err != nil {
				t.Fatal(err)
			}
			inside[name] = path
		}
		r, err := newRelease(root, root)
		if err != nil {
			t.Fatal(err)
		}
		if made[i], err = r.archive("lockstep_1.2.3", inside); err != nil {
			t.Fatal(err)
		}
	}
	if !bytes.Equal(made[0], made[1]) {
		t.Error("two archives of the same files differ")
	}
	z, err := gzip.NewReader(bytes.NewReader(made[0]))
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for r := tar.NewReader(z); ; {
		h, err := r.Next()
		if errors.Is(err, io.EOF) {
			break
		} else if err != nil {
			t.Fatal(err)
		}
		if h.ModTime.Unix() != 1700000000 || h.Uid != 0 || h.Uname != "" {
			t.Errorf("%s: %v, user %d %q", h.Name, h.ModTime, h.Uid, h.Uname)
		}
		if want := map[bool]int64{true: 0o755, false: 0o644}[strings.HasSuffix(h.Name, "/lockstep")]; h.Mode != want {
			t.Errorf("%s: mode %o", h.Name, h.Mode)
		}
		names = append(names, h.Name)
	}
	if got := strings.Join(names, " "); got != "lockstep_1.2.3/VERSION lockstep_1.2.3/docs/a.md lockstep_1.2.3/lockstep" {
		t.Errorf("it holds %s", got)
	}
}

// TestSBOM reads this test's own program.
func TestSBOM(t *testing.T) {
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	b, err := sbom(exe, "1.2.3")
	if err != nil {
		t.Fatal(err)
	}
	var got bom
	if err := json.Unmarshal(b, &got); err != nil {
		t.Fatal(err)
	}
	if got.Format != "CycloneDX" || got.Metadata.Component.Version != "v1.2.3" || len(got.Components) == 0 || got.Components[0].Name != "std" {
		t.Errorf("%s", b)
	}
	refs := map[string]bool{}
	for _, c := range got.Components {
		if refs[c.Ref] || c.PURL == "" || c.Version == "" {
			t.Errorf("component %+v", c)
		}
		refs[c.Ref] = true
	}
	for _, on := range got.Dependencies[0].On {
		if !refs[on] {
			t.Errorf("it depends on %s, which is no component", on)
		}
	}
	if _, err := sbom("release_test.go", "1"); err == nil {
		t.Error("a text file has an SBOM")
	}
}

// TestTwoBuilds is make test-release: the tree is built here and, copied, elsewhere, with
// a build cache of its own, and the files are the same.
func TestTwoBuilds(t *testing.T) {
	if os.Getenv("LOCKSTEP_TEST_RELEASE") == "" {
		t.Skip("make test-release builds everything twice")
	}
	t.Setenv("SOURCE_DATE_EPOCH", "1700000000")
	here, there := t.TempDir(), t.TempDir()
	build(t, "../..", here)
	copied := filepath.Join(t.TempDir(), "somewhere", "else")
	if err := os.MkdirAll(copied, 0o755); err != nil {
		t.Fatal(err)
	}
	sh(t, "../..", `git ls-files -z --cached --others --exclude-standard | xargs -0 cp -P --parents -t "$0"`, copied)
	t.Setenv("SOURCE_REVISION", revision(t))
	t.Setenv("GOCACHE", t.TempDir())
	build(t, copied, there)
	sums, err := os.ReadFile(filepath.Join(here, "SHA256SUMS"))
	if err != nil {
		t.Fatal(err)
	}
	again, err := os.ReadFile(filepath.Join(there, "SHA256SUMS"))
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(sums, again) {
		t.Errorf("two builds differ:\n%s\n%s", sums, again)
		sh(t, here, `for a in *.tar.gz; do for d in . "$0"; do tar -xzf "$d/$a" --to-command='echo "$(sha256sum) $TAR_FILENAME"' | sort -k3 >"$d/$a.files"; done; done`, there)
		cmd := exec.CommandContext(t.Context(), "sh", "-c", `for a in *.tar.gz; do diff "$a.files" "$0/$a.files"; done`, there)
		cmd.Dir = here
		differ, _ := cmd.Output() // 1: they do
		t.Errorf("these files:\n%s", differ)
	}
	sh(t, here, "sha256sum -c --quiet SHA256SUMS")
}

func revision(t *testing.T) string {
	out, err := exec.CommandContext(t.Context(), "git", "rev-parse", "HEAD").Output()
	if err != nil {
		t.Fatal(err)
	}
	return strings.TrimSpace(string(out))
}

func build(t *testing.T, root, out string) {
	t.Helper()
	root, err := filepath.Abs(root)
	if err != nil {
		t.Fatal(err)
	}
	if err := run(root, out, os.Getenv("LOCKSTEP_TEST_RELEASE_ONLY")); err != nil {
		t.Fatal(err)
	}
}

func sh(t *testing.T, dir, script string, args ...string) {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), "sh", append([]string{"-ec", script}, args...)...)
	cmd.Dir = dir
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%s: %v\n%s", script, err, out)
	}
}
