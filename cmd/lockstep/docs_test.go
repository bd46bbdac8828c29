package main

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/alecthomas/kong"
	"github.com/rogpeppe/go-internal/testscript"
)

// documents are those whose commands users copy, beside each command's help.
var documents = []string{"../../README.md", "../../docs/operations.md"}

// placeholders are words in documents that stand for a file that is there.
var placeholders = regexp.MustCompile(`^(FILE|OPERATOR_FILE|token|operator-token|[\w/.-]+\.(crt|key|yaml|json|password))$`)

// TestExamplesAreCommandLines reads every `lockstep …` of the documents, and of the examples in each
// command's help, as the program would: flags that are gone, misspelt or have other values fail here.
func TestExamplesAreCommandLines(t *testing.T) {
	t.Chdir(t.TempDir()) // for files that examples name
	if err := os.WriteFile("there", []byte("x"), 0o600); err != nil {
		t.Fatal(err)
	}
	there, err := filepath.Abs("there")
	if err != nil {
		t.Fatal(err)
	}
	lines := map[string][]string{}
	for _, d := range documents {
		text, err := os.ReadFile(filepath.Join(home, d))
		if err != nil {
			t.Fatal(err)
		}
		lines[d] = blocks(string(text))
	}
	k, err := kong.New(&cli{}, options()...)
	if err != nil {
		t.Fatal(err)
	}
	for _, n := range k.Model.Leaves(true) {
		if _, examples, ok := strings.Cut(n.Detail, "Examples:\n"); ok {
			lines[n.FullPath()+" --help"] = strings.Split(continued.ReplaceAllString(examples, " "), "\n")
		}
	}
	commands := 0
	for where, text := range lines {
		for _, line := range text {
			for _, words := range commandsOf(line) {
				for i, w := range words {
					if name, value, ok := strings.Cut(w, "="); ok && strings.HasPrefix(name, "-") && placeholders.MatchString(value) {
						words[i] = name + "=" + there
					} else if i > 0 && strings.HasPrefix(words[i-1], "-") && placeholders.MatchString(w) {
						words[i] = there
					}
				}
				commands++
				if err := parses(words); err != nil {
					t.Errorf("%s: %s: %v", where, line, err)
				}
			}
		}
	}
	if commands < 60 {
		t.Errorf("%d commands, there are more", commands)
	}
	// The test can fail.
	for _, wrong := range []string{"lockstep agent --mastr x:1", "lockstep run --ranks 3 --nodes 2 -- x", "lockstep nobody"} {
		if parses(strings.Fields(wrong)[1:]) == nil {
			t.Errorf("%s is a good command line", wrong)
		}
	}
}

var home, _ = os.Getwd()

func parses(words []string) error {
	if slices.ContainsFunc(words, func(w string) bool { return w == "--help" || w == "--version" }) {
		words = slices.DeleteFunc(slices.Clone(words), func(w string) bool { return w == "--help" || w == "--version" })
		if len(words) <= 1 {
			return nil
		}
	}
	k, err := kong.New(&cli{}, options(kong.Writers(&bytes.Buffer{}, &bytes.Buffer{}), kong.Exit(func(int) {}))...)
	if err != nil {
		return err
	}
	_, err = k.Parse(words)
	return err
}

// blocks are the lines of code of a Markdown text, fenced or indented, but not those of Go and YAML.
func blocks(text string) (lines []string) {
	fenced, shell := false, false
	text = continued.ReplaceAllString(text, " ")
	for line := range strings.Lines(text) {
		line = strings.TrimRight(line, "\n")
		if lang, ok := strings.CutPrefix(strings.TrimSpace(line), "```"); ok {
			fenced, shell = !fenced, lang == "" || lang == "sh"
			continue
		}
		if fenced && shell || !fenced && strings.HasPrefix(line, "    ") {
			lines = append(lines, line)
		}
	}
	return lines
}

// commandsOf are the words after each `lockstep` that a line of shell runs.
func commandsOf(line string) (all [][]string) {
	line = substituted.ReplaceAllStringFunc(line, func(s string) string {
		if strings.Contains(s, "lockstep") {
			return s
		}
		return "8"
	})
	line, _, _ = strings.Cut(strings.TrimPrefix(strings.TrimSpace(line), "$ "), " # ")
	if code, _, ok := strings.Cut(line, "   "); ok && strings.Contains(code, "lockstep ") {
		line = code // what follows is a word about it
	}
	for _, part := range regexp.MustCompile(`\|\||&&|[|;()]|\$\(|(^|\s)&($|\s)`).Split(line, -1) {
		words := strings.Fields(strings.NewReplacer(`"`, "", `'`, "").Replace(part))
		i := slices.Index(words, "lockstep")
		if i < 0 || i+1 == len(words) {
			continue
		}
		if before := words[:i]; slices.ContainsFunc(before, func(w string) bool { return !wrapper.MatchString(w) }) {
			continue // a sentence, or the name of something
		}
		words = words[i+1:]
		for j, w := range words {
			if strings.HasPrefix(w, ">") || strings.HasPrefix(w, "2>") || strings.HasPrefix(w, "<") {
				words = words[:j]
				break
			}
		}
		if strings.HasSuffix(words[0], ":") {
			continue // output
		}
		all = append(all, words)
	}
	return all
}

// continued is where a line of shell goes on in the next one.
var continued = regexp.MustCompile(`\s*\\\n\s*`)

// substituted is the output of a command, in a line.
var substituted = regexp.MustCompile(`"?\$\([^()]*\)"?`)

// wrapper is what may stand before the program: assignments, launchers and their options.
var wrapper = regexp.MustCompile(`^(eval|exec|source|<|srun|mpirun|test|\w+=.*|--[\w-]+=\S+|\./rank\.sh)$`)

// played says of each block of commands in the documents, by words that only it has, whether TestDocuments
// plays it as it stands ("") or why it cannot be played here.
var played = map[string]string{
	"lockstep demo --once --fault communication_slow": "takes a minute; CI plays the demo with every fault",
	"test $? -ne 3":                              "a prolog of Slurm's on a node with GPUs; preflight.txtar plays the exit statuses",
	"scontrol show hostnames":                    "a batch script of Slurm's",
	"rank.sh: Slurm's names":                     "the part of a batch script that each rank runs",
	"lockstep diagnose --replay":                 "takes a recording from a master; diagnose.txtar plays one",
	"lockstep rules --defaults >monitoring.yaml": "",
	"lockstep doctor --require shm":              "",
	"source <(lockstep completion bash)":         "",
}

// TestDocuments plays the documents' fenced blocks of commands, as they stand, for a user with an empty home.
func TestDocuments(t *testing.T) {
	dir, found := t.TempDir(), map[string]bool{}
	for _, d := range documents {
		text, err := os.ReadFile(filepath.Join(home, d))
		if err != nil {
			t.Fatal(err)
		}
		for _, m := range regexp.MustCompile("(?ms)^```(\\w*)\n(.*?)^```$").FindAllStringSubmatch(string(text), -1) {
			if m[1] != "" && m[1] != "sh" {
				continue // attach_test.go has the README's Go program; YAML is no command
			}
			var known string
			for words := range played {
				if strings.Contains(m[2], words) {
					known = words
				}
			}
			switch why, ok := played[known]; {
			case !ok:
				t.Errorf("%s: this block is neither played nor is it said why not:\n%s", d, m[2])
			case why == "":
				script := "env HOME=$WORK/home\nmkdir $HOME\nenv LOCKSTEP_RUNTIME_DIR=$WORK/rt\ncd $HOME\nexec bash -e $WORK/block.sh\n-- block.sh --\n" + m[2]
				if err := os.WriteFile(filepath.Join(dir, fmt.Sprintf("block%d.txtar", len(found))), []byte(script), 0o600); err != nil {
					t.Fatal(err)
				}
			}
			found[known] = true
		}
	}
	for words := range played {
		if !found[words] {
			t.Errorf("no block has %q any more", words)
		}
	}
	testscript.Run(t, scripts(dir))
}
