package main

import (
	"bytes"
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/alecthomas/kong"
)

// TestWrongUsage misspells each command and each flag of each command, leaves out what is required, and gives
// each flag a value that it cannot have: all of it is a wrong command line, which ends with status 2 (usage.txtar
// has the status of real processes), and what is misspelt is named with the nearest name.
func TestWrongUsage(t *testing.T) {
	var out bytes.Buffer
	k, err := kong.New(&cli{}, options(kong.Writers(&out, &out), kong.Exit(func(int) {}))...)
	if err != nil {
		t.Fatal(err)
	}
	wrong := func(want string, words ...string) {
		t.Helper()
		_, err := k.Parse(words)
		var p *kong.ParseError
		if !errors.As(err, &p) || p.ExitCode() != 80 { // exit makes it 2
			t.Errorf("lockstep %s: %v, want a wrong command line", strings.Join(words, " "), err)
			return
		}
		if !strings.Contains(err.Error(), want) {
			t.Errorf("lockstep %s: %q says no %q", strings.Join(words, " "), err, want)
		}
	}
	commands, flags, values := 0, 0, 0
	for _, n := range commandNodes(k.Model.Node) {
		path := strings.Fields(n.FullPath())[1:]
		commands++
		misspelt := append(append([]string{}, path...), "")[:len(path)]
		misspelt[len(path)-1] = n.Name[:len(n.Name)-2] + n.Name[len(n.Name)-1:] + n.Name[len(n.Name)-2:len(n.Name)-1] // agnet for agent
		wrong(fmt.Sprintf("did you mean %q", n.Name), misspelt...)
		if !n.Leaf() {
			wrong("expected ", path...)
			continue
		}
		wrong("unknown flag --bogus", append(path, "--bogus")...)
		for _, group := range n.AllFlags(true) {
			for _, f := range group {
				flags++
				wrong("unknown flag", append(path, "--"+f.Name[:len(f.Name)-1]+"qz")...)
				if f.IsBool() || f.Name == "help" {
					continue
				}
				wrong("", append(path, "--"+f.Name)...) // without its value
				if bad := impossible(f); bad != "" {
					values++
					wrong("--"+f.Name, append(path, "--"+f.Name+"="+bad)...)
				}
			}
		}
	}
	t.Logf("%d commands, %d flags, %d values", commands, flags, values)
	if commands < 30 || flags < 300 || values < 100 {
		t.Errorf("%d commands, %d flags, %d values: there are more", commands, flags, values)
	}
}

// impossible is a value that a flag cannot have, "" where any will do.
func impossible(f *kong.Flag) string {
	switch kind := f.Target.Type().String(); {
	case f.Enum != "", strings.Contains(kind, "int"), kind == "float64", kind == "time.Duration", strings.HasSuffix(kind, "flags.Size"):
		return "nonsense"
	}
	return ""
}
