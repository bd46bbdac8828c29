package clidoc

import (
	"bytes"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/alecthomas/kong"
)

// Man is `lockstep man`.
type Man struct {
	Dir     string   `type:"path" placeholder:"DIR" help:"Write the pages of all commands to this directory, as lockstep.1, lockstep-agent.1 and so on."`
	Command []string `arg:"" optional:"" help:"Command whose page to print (default: the program's own)."`
}

// Help implements kong's help provider.
func (*Man) Help() string {
	return `Writes manual pages, made of the same text as --help.

Examples:
  lockstep man agent >lockstep-agent.1                   one page; man ./lockstep-agent.1 shows it
  lockstep man --dir man1                                all of them, for /usr/share/man/man1`
}

// Validate implements kong's check of a command line.
func (c *Man) Validate(k *kong.Context) error {
	_, err := c.find(k.Model.Node)
	return err
}

func (c *Man) find(node *kong.Node) (*kong.Node, error) {
	for _, name := range c.Command {
		at := cursor{node: node}
		if node = at.child(name); node == nil {
			return nil, fmt.Errorf("there is no command %q", strings.Join(c.Command, " "))
		}
	}
	return node, nil
}

// Run writes pages.
func (c *Man) Run(k *kong.Context, out io.Writer) error {
	if c.Dir == "" {
		node, err := c.find(k.Model.Node)
		if err != nil {
			return err
		}
		_, err = out.Write(page(node))
		return err
	}
	if err := os.MkdirAll(c.Dir, 0o755); err != nil {
		return fmt.Errorf("man: %w", err)
	}
	for _, n := range nodes(k.Model.Node) {
		if err := os.WriteFile(filepath.Join(c.Dir, pageName(n)+".1"), page(n), 0o644); err != nil {
			return fmt.Errorf("man: %w", err)
		}
	}
	return nil
}

// nodes are a node and all commands below it that are no secret.
func nodes(n *kong.Node) []*kong.Node {
	all := []*kong.Node{n}
	for _, c := range n.Children {
		if !c.Hidden {
			all = append(all, nodes(c)...)
		}
	}
	return all
}

func pageName(n *kong.Node) string { return strings.ReplaceAll(n.FullPath(), " ", "-") }

// page is the manual page of a command, in man(7).
func page(n *kong.Node) []byte {
	var b bytes.Buffer
	fmt.Fprintf(&b, ".TH %s 1 \"\" Lockstep \"Lockstep manual\"\n.ad l\n", strings.ToUpper(pageName(n)))
	about := n.Help
	if n.Type == kong.ApplicationNode {
		about, _, _ = strings.Cut(n.Help, "\n")
	}
	fmt.Fprintf(&b, ".SH NAME\n%s \\- %s\n", roff(pageName(n)), roff(strings.TrimSuffix(about, ".")))
	fmt.Fprintf(&b, ".SH SYNOPSIS\n.B %s\n", roff(n.FullPath()))
	fmt.Fprintln(&b, roff(synopsis(n)))
	text, examples, status := sections(n.Detail)
	if text != "" {
		b.WriteString(".SH DESCRIPTION\n")
		prose(&b, text)
	}
	if len(n.Children) > 0 {
		b.WriteString(".SH COMMANDS\n")
		for _, c := range nodes(n)[1:] {
			if c.Parent == n {
				fmt.Fprintf(&b, ".TP\n.BR %s (1)\n%s\n", roff(pageName(c)), roff(c.Help))
			}
		}
	}
	if len(n.Positional) > 0 {
		b.WriteString(".SH ARGUMENTS\n")
		for _, p := range n.Positional {
			fmt.Fprintf(&b, ".TP\n.I %s\n%s\n", roff(p.Summary()), roff(p.Help))
		}
	}
	b.WriteString(".SH OPTIONS\n")
	at := cursor{node: n}
	for _, f := range at.flags() {
		option(&b, f)
	}
	if examples != "" {
		b.WriteString(".SH EXAMPLES\n.nf\n")
		for line := range strings.Lines(examples) {
			fmt.Fprintln(&b, roff(strings.TrimPrefix(strings.TrimRight(line, "\n"), "  ")))
		}
		b.WriteString(".fi\n")
	}
	b.WriteString(".SH EXIT STATUS\n")
	if status == "" {
		status = "0 when all went well, 1 when something failed, 2 when the command line is wrong, 130 when it was interrupted."
	}
	prose(&b, status)
	environment(&b, at.flags())
	b.WriteString(".SH SEE ALSO\n")
	switch {
	case n.Parent != nil:
		fmt.Fprintf(&b, ".BR %s (1)\n", roff(pageName(n.Parent)))
	default:
		b.WriteString("Each command's page, and docs/operations.md of the sources.\n")
	}
	return b.Bytes()
}

func synopsis(n *kong.Node) string {
	var parts []string
	for _, p := range n.Positional {
		parts = append(parts, p.Summary())
	}
	if len(n.Children) > 0 {
		parts = append(parts, "COMMAND")
	}
	var required []string
	at := cursor{node: n}
	for _, f := range at.flags() {
		if f.Required {
			required = append(required, f.Summary())
		}
	}
	return strings.Join(slices.Concat(required, []string{"[OPTIONS]"}, parts), " ")
}

// option is one flag's paragraph.
func option(b *bytes.Buffer, f *kong.Flag) {
	name := "--" + f.Name
	if f.Tag.Negatable != "" {
		name = "--[no-]" + f.Name
	}
	if f.Short != 0 {
		name = "-" + string(f.Short) + ", " + name
	}
	fmt.Fprintf(b, ".TP\n.B %s", roff(name))
	if !f.IsBool() && !f.IsCounter() {
		place := f.PlaceHolder
		if place == "" {
			place = strings.ToUpper(f.Name[strings.LastIndexAny(f.Name, ".-")+1:])
		}
		fmt.Fprintf(b, "=\\fI%s\\fR", roff(place))
	}
	fmt.Fprintf(b, "\n%s\n", roff(f.Help))
	if f.HasDefault && f.Default != "" && !f.IsBool() && !strings.Contains(f.Help, "default:") {
		fmt.Fprintf(b, "Default: %s.\n", roff(f.Default))
	}
	if f.Required {
		b.WriteString("Required.\n")
	}
}

func environment(b *bytes.Buffer, flags []*kong.Flag) {
	head := ".SH ENVIRONMENT\n"
	for _, f := range flags {
		for _, env := range f.Envs {
			fmt.Fprintf(b, "%s.TP\n.B %s\nThe default of %s.\n", head, roff(env), roff("--"+f.Name))
			head = ""
		}
	}
}

// sections cuts a command's help into its text, its examples and what it says of the exit status.
func sections(detail string) (text, examples, status string) {
	text, rest, ok := strings.Cut("\n"+detail, "\nExamples:\n")
	if !ok {
		return strings.TrimSpace(detail), "", ""
	}
	// Examples are indented; what follows them is text again.
	var after []string
	lines := strings.Split(rest, "\n")
	for i, line := range lines {
		if line != "" && !strings.HasPrefix(line, " ") {
			after = lines[i:]
			lines = lines[:i]
			break
		}
	}
	examples = strings.TrimRight(strings.Join(lines, "\n"), "\n ")
	tail := strings.Join(after, "\n")
	if before, s, ok := strings.Cut("\n"+tail, "\nExit status"); ok {
		tail = before
		_, status, _ = strings.Cut(s, ":")
	}
	return strings.TrimSpace(strings.TrimSpace(text) + "\n\n" + strings.TrimSpace(tail)), examples, strings.TrimSpace(status)
}

// prose writes paragraphs; indented lines stay as they are.
func prose(b *bytes.Buffer, text string) {
	literal, paragraph := false, false
	for line := range strings.Lines(text) {
		line = strings.TrimRight(line, "\n")
		if indented := strings.HasPrefix(line, "  "); indented != literal && line != "" {
			b.WriteString(map[bool]string{true: ".PP\n.nf\n", false: ".fi\n.PP\n"}[indented])
			literal, paragraph = indented, false
		}
		if line == "" {
			paragraph = true
			continue
		}
		if paragraph {
			b.WriteString(map[bool]string{true: "\n", false: ".PP\n"}[literal])
			paragraph = false
		}
		fmt.Fprintln(b, roff(line))
	}
	if literal {
		b.WriteString(".fi\n")
	}
}

var escapes = strings.NewReplacer(`\`, `\e`, `-`, `\-`, `'`, `\(aq`, "`", `\(ga`, `^`, `\(ha`, `~`, `\(ti`, `"`, `\(dq`)

// roff escapes a line of text.
func roff(s string) string {
	s = escapes.Replace(strings.TrimRight(s, " "))
	if strings.HasPrefix(s, ".") {
		s = `\&` + s
	}
	return s
}
