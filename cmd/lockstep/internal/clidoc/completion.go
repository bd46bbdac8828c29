package clidoc

import (
	"embed"
	"fmt"
	"io"
	"strings"

	"github.com/alecthomas/kong"
)

//go:embed shells
var shells embed.FS

// Completion is `lockstep completion`.
type Completion struct {
	Shell string `arg:"" enum:"bash,zsh,fish" help:"The shell: ${enum}."`
}

// Help implements kong's help provider.
func (*Completion) Help() string {
	return `Writes a script with which the shell completes commands, flags and their values. The script asks this
program what it knows, so that it stays right when the program is replaced.

Examples:
  source <(lockstep completion bash)                     in this shell
  lockstep completion bash >lockstep.bash                for /usr/share/bash-completion/completions/lockstep
  lockstep completion zsh >_lockstep                     for a directory of $fpath
  lockstep completion fish >lockstep.fish                for ~/.config/fish/completions`
}

// Run writes the script.
func (c *Completion) Run(out io.Writer) error {
	script, err := shells.ReadFile("shells/completion." + c.Shell)
	if err != nil {
		return err
	}
	_, err = out.Write(script)
	return err
}

// Complete is what the scripts run: `lockstep complete SHELL -- WORD...`.
type Complete struct {
	Shell string   `arg:"" enum:"bash,zsh,fish" help:"The shell that asks."`
	Words []string `arg:"" optional:"" passthrough:"" help:"What follows the program's name, up to the cursor."`
}

// Run writes a line for each candidate: kind, word and help, tabs between them.
func (c *Complete) Run(k *kong.Context, out io.Writer) error {
	words, prefix := c.Words, ""
	if len(words) > 0 && words[0] == "--" {
		words = words[1:]
	}
	if c.Shell == "bash" {
		words, prefix = joinBash(words)
	}
	for _, a := range complete(k.Model.Node, words) {
		help, _, _ := strings.Cut(a.help, ". ")
		if _, err := fmt.Fprintf(out, "%s\t%s\t%s\n", a.kind, strings.TrimPrefix(a.word, prefix), strings.ReplaceAll(help, "\n", " ")); err != nil {
			return err
		}
	}
	return nil
}
