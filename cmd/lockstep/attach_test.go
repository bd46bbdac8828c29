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
	"go.yaml.in/yaml/v3"

	"github.com/lockstep-ccl/lockstep/cmd/lockstep/internal/presence"
)

// TestAttach runs lockstep attach, and the README's program under it. Beside the other
// scripts' commands, these have:
//
//	readme FILE [PATTERN]   builds the README's Go program; lines that match the pattern are left out
//	web VAR PATTERN         sets it to the address of the pages of the process with this presence file
//	gone PATTERN            waits until that process has ended
//	pki DIR                 runs the lockstep pki commands of torchrun.md
//	page PAGE TEXT FILE     writes the script of docs/attach/PAGE that has the text
//	yaml PAGE               checks that each YAML of the page is some, and dry-runs its attach commands
func TestAttach(t *testing.T) {
	p := scripts("testdata/attach")
	setup := p.Setup
	p.Setup = func(e *testscript.Env) error {
		cache, err := os.UserCacheDir()
		if err != nil {
			return err
		}
		e.Setenv("XDG_CACHE_HOME", cache) // Prometheus and Alertmanager are there when another test has had them built
		return setup(e)
	}
	p.Cmds["readme"] = readme
	p.Cmds["gone"] = gone
	p.Cmds["web"] = web
	p.Cmds["pki"] = pkiOfPage
	p.Cmds["page"] = page
	p.Cmds["yaml"] = yamlOfPage
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
	files, err := filepath.Glob(ts.MkAbs(args[0]))
	ts.Check(err)
	if len(files) != 1 {
		ts.Fatalf("%s matches %q, want one file", args[0], files)
	}
	until(ts, func() error {
		b, err := os.ReadFile(files[0])
		if err != nil || len(b) == 0 { // it has left
			return err
		}
		var info presence.Info
		if err := json.Unmarshal(b, &info); err != nil {
			return err
		}
		if stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", info.PID)); err == nil && !strings.Contains(string(stat), ") Z ") {
			return fmt.Errorf("process %d lives", info.PID)
		}
		return nil
	})
}

func docs(ts *testscript.TestScript, name string) string {
	text, err := os.ReadFile(filepath.Join("../../docs/attach", name))
	ts.Check(err)
	return string(text)
}

func pkiOfPage(ts *testscript.TestScript, _ bool, args []string) {
	n := 0
	for line := range strings.Lines(docs(ts, "torchrun.md")) {
		if command, ok := strings.CutPrefix(strings.TrimSpace(line), "lockstep pki "); ok {
			ts.Check(ts.Exec("lockstep", append([]string{"pki"}, strings.Fields(command)...)...))
			n++
		}
	}
	if n == 0 || args[0] != "pki" {
		ts.Fatalf("usage: pki pki; torchrun.md has %d commands", n)
	}
}

var fenced = regexp.MustCompile("(?s)```(sh|yaml)\n(.*?)```")

func page(ts *testscript.TestScript, _ bool, args []string) {
	for _, m := range fenced.FindAllStringSubmatch(docs(ts, args[0]), -1) {
		if m[1] == "sh" && strings.Contains(m[2], args[1]) {
			ts.Check(os.WriteFile(ts.MkAbs(args[2]), []byte(m[2]), 0o600))
			return
		}
	}
	ts.Fatalf("%s has no script with %q", args[0], args[1])
}

func yamlOfPage(ts *testscript.TestScript, _ bool, args []string) {
	n := 0
	for _, m := range fenced.FindAllStringSubmatch(docs(ts, args[0]), -1) {
		if m[1] != "yaml" {
			continue
		}
		var object struct{ Kind string }
		ts.Check(yaml.Unmarshal([]byte(m[2]), &object))
		if object.Kind == "" {
			ts.Fatalf("%s: an object without a kind:\n%s", args[0], m[2])
		}
		var any map[string]any
		ts.Check(yaml.Unmarshal([]byte(m[2]), &any))
		for _, command := range attached(any) {
			ts.Check(ts.Exec("lockstep", append([]string{"attach", "--dry-run"}, command...)...))
			n++
		}
	}
	if n < 2 {
		ts.Fatalf("%s has %d attach commands", args[0], n)
	}
}

// attached finds the arguments of lockstep attach in the containers of an object.
func attached(v any) (out [][]string) {
	switch v := v.(type) {
	case map[string]any:
		for _, x := range v {
			out = append(out, attached(x)...)
		}
	case []any:
		var words []string
		for _, x := range v {
			if s, ok := x.(string); ok {
				words = append(words, s)
			}
			out = append(out, attached(x)...)
		}
		if len(words) > 2 && words[0] == "lockstep" && words[1] == "attach" {
			out = append(out, words[2:])
		}
	}
	return out
}
