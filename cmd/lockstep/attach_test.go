package main

import (
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/rogpeppe/go-internal/testscript"

	"github.com/lockstep-ccl/lockstep/cmd/lockstep/internal/presence"
)

// TestAttach runs lockstep attach, and the README's program under it. Beside the other
// scripts' commands, these have:
//
//	readme FILE [PATTERN]   builds the README's Go program; lines that match the pattern are left out
//	web VAR PATTERN         sets it to the address of the pages of the process with this presence file
//	gone PATTERN            waits until that process has ended
func TestAttach(t *testing.T) {
	p := scripts("testdata/attach")
	p.Cmds["readme"] = readme
	p.Cmds["gone"] = gone
	p.Cmds["web"] = web
	testscript.Run(t, p)
}

var program = regexp.MustCompile("(?s)```go\n(func train.*?)```")

func readme(ts *testscript.TestScript, _ bool, args []string) {
	text, err := os.ReadFile("../../README.md")
	ts.Check(err)
	code := program.FindSubmatch(text)
	if code == nil {
		ts.Fatalf("README.md has no Go program")
	}
	var lines []string
	for line := range strings.Lines(string(code[1])) {
		if len(args) > 1 && regexp.MustCompile(args[1]).MatchString(line) {
			continue
		}
		lines = append(lines, line)
	}
	dir, err := os.MkdirTemp(ts.Getenv("WORK"), "readme")
	ts.Check(err)
	source := filepath.Join(dir, "main.go")
	ts.Check(os.WriteFile(source, []byte(`package main

import (
	"context"
	"log"

	"github.com/lockstep-ccl/lockstep/ccl"
	"github.com/lockstep-ccl/lockstep/marks"
)

func main() {
	if err := train(context.Background(), make([]float32, 1024)); err != nil {
		log.Fatal(err)
	}
}

`+strings.Join(lines, "")), 0o600))
	out, err := exec.Command("go", "build", "-o", ts.MkAbs(args[0]), source).CombinedOutput()
	if err != nil {
		ts.Fatalf("the README's program: %v\n%s", err, out)
	}
}

func present(ts *testscript.TestScript, pattern string) (info presence.Info) {
	files, err := filepath.Glob(ts.MkAbs(pattern))
	ts.Check(err)
	if len(files) != 1 {
		ts.Fatalf("%s matches %q, want one file", pattern, files)
	}
	b, err := os.ReadFile(files[0])
	ts.Check(err)
	ts.Check(json.Unmarshal(b, &info))
	return info
}

func web(ts *testscript.TestScript, _ bool, args []string) {
	ts.Setenv(args[0], present(ts, args[1]).Web)
}

func gone(ts *testscript.TestScript, _ bool, args []string) {
	pid := present(ts, args[0]).PID
	until(ts, func() error {
		if stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid)); err == nil && !strings.Contains(string(stat), ") Z ") {
			return fmt.Errorf("process %d lives", pid)
		}
		return nil
	})
}
