package clidoc

import (
	"slices"
	"strings"
	"testing"

	"github.com/alecthomas/kong"
)

type grammar struct {
	Serve struct {
		Listen string `short:"l" help:"Where. And more."`
		Mode   string `enum:"fast,slow" default:"fast" short:"m" help:"How."`
		Watch  bool   `negatable:"" default:"true" help:"Look."`
		Config string `type:"existingfile" help:"File."`
		Secret string `hidden:""`
	} `cmd:"" help:"Serve."`
	Exec struct {
		N       int      `short:"n" help:"How many."`
		Command []string `arg:"" passthrough:"partial" help:"What."`
	} `cmd:"" help:"Execute."`
	Deep struct {
		One struct{ Name string } `cmd:"" help:"One."`
	} `cmd:"" help:"Deeper."`
	Hidden struct{} `cmd:"" hidden:""`
	Level  string   `enum:"low,high" default:"low" help:"How loud."`
}

func model(t testing.TB) *kong.Node {
	t.Helper()
	k, err := kong.New(&grammar{}, kong.Name("prog"))
	if err != nil {
		t.Fatal(err)
	}
	return k.Model.Node
}

func TestComplete(t *testing.T) {
	for line, want := range map[string]string{
		"":                         "word:serve word:exec word:deep",
		"s":                        "word:serve",
		"hid":                      "",
		"serve --m":                "word:--mode",
		"serve --no":               "word:--no-watch",
		"serve --le":               "word:--level",
		"serve --sec":              "",
		"serve --mode ":            "word:fast word:slow",
		"serve -m s":               "word:slow",
		"serve --mode=f":           "word:--mode=fast",
		"serve --mode=slow --leve": "word:--level",
		"serve --config ":          "file:",
		"serve --config=x":         "file:",
		"serve --listen ":          "",
		"serve --level ":           "word:low word:high",
		"--level high ser":         "word:serve",
		"deep o":                   "word:one",
		"exec ":                    "command: file:",
		"exec -n 3 l":              "command: file:",
		"exec -n 3 -- l":           "command: file:",
		"exec -n 3 -- ls -":        "file:",
		"exec ls serve --m":        "file:",
		"bogus more ":              "word:serve word:exec word:deep",
	} {
		var got []string
		for _, c := range complete(model(t), strings.Split(line, " ")) {
			got = append(got, string(c.kind)+":"+c.word)
		}
		if s := strings.Join(got, " "); s != want {
			t.Errorf("%q: %q, want %q", line, s, want)
		}
	}
}

func TestJoinBash(t *testing.T) {
	for in, want := range map[string]string{
		"a b":              "a|b ",
		"a --x = b":        "a|--x=b --x=",
		"a --x =":          "a|--x= --x=",
		"a --x = b c":      "a|--x=b|c ",
		"a = b":            "a|=|b ",
		"a --x = b --y = ": "a|--x=b|--y= --y=",
	} {
		words, prefix := joinBash(strings.Split(in, " "))
		if got := strings.Join(words, "|") + " " + prefix; got != want {
			t.Errorf("%q: %q, want %q", in, got, want)
		}
	}
}

// FuzzComplete: whatever stands in a command line, completing it ends, with words that
// begin as the last one does.
func FuzzComplete(f *testing.F) {
	f.Add("serve\x00--mode\x00")
	f.Add("exec\x00--\x00-\x00--=")
	root := model(f)
	f.Fuzz(func(t *testing.T, line string) {
		words := strings.Split(line, "\x00")
		last := words[len(words)-1]
		for _, c := range complete(root, words) {
			if c.kind == kindWord && !strings.HasPrefix(c.word, last) {
				t.Errorf("%q is no completion of %q", c.word, last)
			}
		}
		joined, _ := joinBash(words)
		complete(root, joined)
	})
}

func TestSections(t *testing.T) {
	text, examples, status := sections("What it does.\n\nExamples:\n  a b   c\n\n  d\n\nAnd a word more.\n\nExit status: 0 good, 1 bad.")
	if text != "What it does.\n\nAnd a word more." || examples != "  a b   c\n\n  d" || status != "0 good, 1 bad." {
		t.Errorf("%q, %q, %q", text, examples, status)
	}
	if text, examples, _ := sections("Only text."); text != "Only text." || examples != "" {
		t.Errorf("%q, %q", text, examples)
	}
}

func TestPageNamesEveryFlag(t *testing.T) {
	for _, n := range nodes(model(t)) {
		p := string(page(n))
		for _, f := range (&cursor{node: n}).flags() {
			if !strings.Contains(p, roff(f.Name)) {
				t.Errorf("%s: no --%s in\n%s", n.FullPath(), f.Name, p)
			}
		}
		if slices.Contains(strings.Fields(p), "secret") {
			t.Errorf("%s tells a secret", n.FullPath())
		}
	}
}
