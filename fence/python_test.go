package fence

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// python runs a program against the module of the same rules.
func python(t *testing.T, dir, tok, program string) string {
	t.Helper()
	py, err := exec.LookPath("python3")
	if err != nil {
		t.Skip("no python3")
	}
	module, err := filepath.Abs("../marks/python")
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(py, "-c", "import sys\nfrom lockstep import fence\ndir = sys.argv[1]\n"+program, dir)
	cmd.Env = append(os.Environ(), "PYTHONPATH="+module, "PYTHONDONTWRITEBYTECODE=1", Env+"="+tok)
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	return strings.TrimSpace(string(out))
}

const tries = `
def tried(f):
    try:
        f()
        print("done")
    except fence.Held as e:
        print("held by", e.holder.get("attempt"))
`

// TestPythonKeepsTheSameRules: attempts of either language hold those of the other off.
func TestPythonKeepsTheSameRules(t *testing.T) {
	dir := t.TempDir()
	old, now := token(6), token(7)
	if got := python(t, dir, old.String(), `
f = fence.open(dir)
with f.writing("step-1/rank0") as path:
    open(path, "w").write("weights")
f.publish_text("latest", "0")
f.publish_text("latest", "1")
import os
for v in "ab":
    at = f.stage("deep/dir")
    os.mkdir(at)
    open(at + "/" + v, "w").write(v)
    f.publish("deep/dir")
f.publish_text("gone", "")
f.remove("gone")
f.remove("gone")
try:
    f.publish_text("../x", "")
except ValueError:
    print("refused")
`); got != "refused" {
		t.Error(got)
	}
	if got := published(t, dir); len(got) != 3 || got["step-1/rank0"] != "weights" || got["latest"] != "1" || got["deep/dir/b"] != "b" {
		t.Fatalf("%v", got)
	}
	first := mustOpen(t, dir, old) // a rank in Go of the same attempt
	if err := first.WriteFile("latest", []byte("2")); err != nil {
		t.Fatal(err)
	}
	// Python's attempt 7 takes it from Go's 6, whose claims it can read.
	if got := python(t, dir, now.String(), `fence.open(dir).publish_text("latest", "3"); print("ok")`); got != "ok" {
		t.Error(got)
	}
	if err := first.WriteFile("latest", []byte("4")); !errors.Is(err, ErrHeld) {
		t.Error(err)
	}
	// Go's attempt 8 takes it from Python's 7, in the middle of its writing.
	later := token(8)
	got := python(t, dir, now.String(), tries+`
f = fence.open(dir)
def write():
    with f.writing("latest") as path:
        open(path, "w").write("5")
        import subprocess, os
        os.environ["LOCKSTEP_FENCE_TOKEN"] = "`+later.String()+`"
        print(fence.open(dir).attempt)
tried(write)
tried(f.check)
tried(lambda: f.publish_text("latest", "6"))
tried(lambda: f.remove("latest"))
tried(lambda: fence.Fence(dir, "`+now.String()+`"))
tried(lambda: fence.Fence(dir, "`+old.String()+`"))
`)
	if want := "8" + strings.Repeat("\nheld by 8", 6); got != want {
		t.Errorf("%q, want %q", got, want)
	}
	if got := published(t, dir)["latest"]; got != "3" {
		t.Errorf("latest is %q", got)
	}
	if f, err := Open(dir, later); err != nil || f.WriteFile("latest", []byte("7")) != nil {
		t.Error(err)
	}
	// Without a token it writes, and holds nobody off.
	if got := python(t, t.TempDir(), "", `fence.open(dir).publish_text("latest", "1"); print(open(dir + "/latest").read())`); got != "1" {
		t.Error(got)
	}
}
