package clidoc

import (
	"reflect"
	"slices"
	"strings"

	"github.com/alecthomas/kong"
)

// Completer is a command that knows the values of an argument or flag which has no enum.
type Completer interface {
	// Complete lists the values of the argument or flag of this name, nil when it knows none.
	Complete(name string) []string
}

// A candidate is one answer to "what can stand here". Its kind says what a shell is
// to do: offer the word, or files, or commands of PATH.
type candidate struct {
	kind kind
	word string
	help string
}

type kind string

const (
	kindWord    kind = "word"
	kindFile    kind = "file"
	kindCommand kind = "command"
)

// complete says what can stand in place of the last of words, which follow the
// program's name.
func complete(root *kong.Node, words []string) []candidate {
	if len(words) == 0 {
		words = []string{""}
	}
	at := cursor{node: root}
	for _, w := range words[:len(words)-1] {
		at.pass(w)
	}
	return at.offer(words[len(words)-1])
}

// cursor is a place in a command line.
type cursor struct {
	node    *kong.Node
	wants   *kong.Flag // whose value comes next
	args    int        // positional arguments so far
	command []string   // of the passthrough argument, once it has begun
	inside  bool       // the rest is somebody else's command line
	plain   bool       // after --: no more flags
}

// pass goes beyond a word.
func (c *cursor) pass(word string) {
	switch {
	case c.inside:
		c.command = append(c.command, word)
	case c.wants != nil:
		c.wants = nil
	case word == "--":
		c.plain, c.inside = true, c.passthrough()
	case strings.HasPrefix(word, "-") && word != "-" && !c.plain:
		if f := c.flag(word); f != nil && !f.IsBool() && !f.IsCounter() && takesNext(word) {
			c.wants = f
		}
	default:
		if child := c.child(word); child != nil {
			c.node, c.args = child, 0
			return
		}
		if c.passthrough() {
			c.inside, c.command = true, append(c.command, word)
		}
		c.args++
	}
}

// takesNext reports whether a flag's value is the next word, not part of this one.
func takesNext(word string) bool {
	if strings.HasPrefix(word, "--") {
		return !strings.Contains(word, "=")
	}
	return len([]rune(word)) == 2
}

// passthrough reports whether the next positional argument is another program's command line.
func (c *cursor) passthrough() bool {
	return c.args < len(c.node.Positional) && c.node.Positional[c.args].Passthrough
}

func (c *cursor) child(word string) *kong.Node {
	for _, n := range c.node.Children {
		if n.Name == word || slices.Contains(n.Aliases, word) {
			return n
		}
	}
	return nil
}

// flags are those that can stand here: the command's own first.
func (c *cursor) flags() (all []*kong.Flag) {
	for n := c.node; n != nil; n = n.Parent {
		for _, f := range n.Flags {
			if !f.Hidden {
				all = append(all, f)
			}
		}
	}
	return all
}

func (c *cursor) flag(word string) *kong.Flag {
	name, _, _ := strings.Cut(word, "=")
	for _, f := range c.flags() {
		if name == "--"+f.Name || f.Short != 0 && !strings.HasPrefix(word, "--") && strings.HasPrefix(word, "-"+string(f.Short)) {
			return f
		}
	}
	return nil
}

// offer lists what begins with word and can stand here.
func (c *cursor) offer(word string) []candidate {
	switch {
	case c.inside && len(c.command) == 0:
		return []candidate{{kind: kindCommand}, {kind: kindFile}}
	case c.inside:
		return []candidate{{kind: kindFile}}
	case c.wants != nil:
		return begins(c.values(c.wants.Value), word)
	case strings.HasPrefix(word, "--") && strings.Contains(word, "=") && !c.plain:
		name, value, _ := strings.Cut(word, "=")
		f := c.flag(name)
		if f == nil || f.IsBool() {
			return nil
		}
		out := begins(c.values(f.Value), value)
		for i := range out {
			if out[i].kind == kindWord {
				out[i].word = name + "=" + out[i].word
			}
		}
		return out
	case strings.HasPrefix(word, "-") && !c.plain:
		return begins(c.flagWords(), word)
	}
	var out []candidate
	out = append(out, commands(c.node)...)
	if n := len(c.node.Positional); n > 0 {
		p := c.node.Positional[min(c.args, n-1)]
		switch {
		case c.args >= n && !p.IsCumulative():
		case p.Passthrough:
			out = append(out, candidate{kind: kindCommand}, candidate{kind: kindFile})
		case c.node.Target.IsValid() && c.node.Target.Type() == reflect.TypeFor[Man]():
			out = append(out, commands(c.root())...)
		default:
			out = append(out, c.values(p)...)
		}
	}
	return begins(out, word)
}

// commands are those directly below a node.
func commands(of *kong.Node) (out []candidate) {
	for _, n := range of.Children {
		if !n.Hidden {
			out = append(out, candidate{kindWord, n.Name, n.Help})
		}
	}
	return out
}

func (c *cursor) root() *kong.Node {
	n := c.node
	for n.Parent != nil {
		n = n.Parent
	}
	return n
}

func (c *cursor) flagWords() (out []candidate) {
	for _, f := range c.flags() {
		if f.Tag.Negatable != "" && f.Default == "true" { // as it is by default already
			out = append(out, candidate{kindWord, "--no-" + f.Name, "Do not: " + f.Help})
			continue
		}
		out = append(out, candidate{kindWord, "--" + f.Name, f.Help})
	}
	return out
}

// values are those of a flag or argument, as far as anybody knows.
func (c *cursor) values(v *kong.Value) (out []candidate) {
	for n := c.node; n != nil; n = n.Parent {
		if !n.Target.IsValid() || !n.Target.CanAddr() {
			continue
		}
		if known, ok := n.Target.Addr().Interface().(Completer); ok {
			for _, w := range known.Complete(v.Name) {
				out = append(out, candidate{kindWord, w, ""})
			}
		}
	}
	switch {
	case len(out) > 0:
	case v.Enum != "":
		for _, w := range v.EnumSlice() {
			if w != "" {
				out = append(out, candidate{kindWord, w, ""})
			}
		}
	case v.Tag.Type == "path" || v.Tag.Type == "existingfile" || v.Tag.Type == "existingdir":
		out = append(out, candidate{kind: kindFile})
	}
	return out
}

// begins keeps the words with this prefix, and whatever is no word.
func begins(all []candidate, prefix string) []candidate {
	return slices.DeleteFunc(all, func(c candidate) bool { return c.kind == kindWord && !strings.HasPrefix(c.word, prefix) })
}

// joinBash undoes what bash does to words: it takes = for a word of its own. The
// prefix is what bash leaves out of the last word, and so must candidates.
func joinBash(words []string) (joined []string, prefix string) {
	for i := 0; i < len(words); i++ {
		last := len(joined) - 1
		if words[i] == "=" && last >= 0 && strings.HasPrefix(joined[last], "--") && !strings.Contains(joined[last], "=") {
			joined[last] += "="
			if i+1 < len(words) {
				i++
				joined[last] += words[i]
			}
			prefix, _, _ = strings.Cut(joined[last], "=")
			prefix += "="
			continue
		}
		joined, prefix = append(joined, words[i]), ""
	}
	return joined, prefix
}
