package docs

import (
	"os"
	"path"
	"regexp"
	"slices"
	"strings"
	"testing"
	"unicode/utf8"
)

var (
	fence   = regexp.MustCompile("(?ms)^```.*?^```$")
	quoted  = regexp.MustCompile("`[^`\n]*`")
	linked  = regexp.MustCompile(`\]\(([^()\s]+)\)`)
	heading = regexp.MustCompile(`(?m)^#{1,6} +(.*?) *#*$`)
	dropped = regexp.MustCompile(`[^\p{L}\p{N} _-]`)
)

// anchors are what links may name in a page: its headings as GitHub writes them.
func anchors(text string) map[string]bool {
	found := map[string]bool{}
	for _, m := range heading.FindAllStringSubmatch(fence.ReplaceAllString(text, ""), -1) {
		h := regexp.MustCompile(`\[([^\]]*)\]\([^)]*\)`).ReplaceAllString(m[1], "$1")
		a := strings.ReplaceAll(dropped.ReplaceAllString(strings.ToLower(h), ""), " ", "-")
		for n, base := 1, a; found[a]; n++ {
			a = base + "-" + string(rune('0'+n))
		}
		found[a] = true
	}
	return found
}

// broken are the links of a page that lead nowhere in the repository.
func broken(page, text string, read func(string) (string, error)) (all []string) {
	text = quoted.ReplaceAllString(fence.ReplaceAllString(text, ""), "")
	for _, m := range linked.FindAllStringSubmatch(text, -1) {
		to, anchor, _ := strings.Cut(m[1], "#")
		if strings.Contains(to, "://") || strings.HasPrefix(to, "mailto:") {
			continue // elsewhere
		}
		at := page
		if to != "" {
			at = path.Join(path.Dir(page), to)
		}
		there, err := read(at)
		if err != nil || anchor != "" && !anchors(there)[anchor] {
			all = append(all, m[1])
		}
	}
	return all
}

// longest is how many characters a line of prose may have. Documents are wrapped at about 110.
const longest = 200

// long are the lines of prose of a page, by number, that are longer. Tables and code are no prose.
func long(text string) (all []int) {
	text = fence.ReplaceAllStringFunc(text, func(s string) string { return strings.Repeat("\n", strings.Count(s, "\n")) })
	for i, line := range strings.Split(text, "\n") {
		if utf8.RuneCountInString(line) > longest && !strings.HasPrefix(line, "|") && !strings.HasPrefix(line, "    ") {
			all = append(all, i+1)
		}
	}
	return all
}

// TestProseIsWrapped: no line of prose is longer than a window is wide.
func TestProseIsWrapped(t *testing.T) {
	for _, page := range load(t).files {
		if !strings.HasSuffix(page, ".md") {
			continue
		}
		text, err := os.ReadFile(path.Join("..", page))
		if err != nil {
			t.Fatal(err)
		}
		for _, n := range long(string(text)) {
			t.Errorf("%s:%d has more than %d characters", page, n, longest)
		}
	}
	// The test can fail.
	wide := strings.Repeat("word ", longest/5+1)
	page := "a\n```\n" + wide + "\n```\n| " + wide + " |\n\n    " + wide + "\n\n" + wide + "\n- " + wide + "\n" + strings.Repeat("é", longest) + "\n"
	if got := long(page); !slices.Equal(got, []int{9, 10}) {
		t.Errorf("long lines are %v, want 9 and 10", got)
	}
}

// TestLinks: every link from a page of the repository to a file, a folder or a heading of it leads there.
func TestLinks(t *testing.T) {
	read := func(name string) (string, error) {
		if st, err := os.Stat(path.Join("..", name)); err != nil || st.IsDir() {
			return "", err
		}
		b, err := os.ReadFile(path.Join("..", name))
		return string(b), err
	}
	pages := 0
	for _, page := range load(t).files {
		if !strings.HasSuffix(page, ".md") {
			continue
		}
		text, err := read(page)
		if err != nil {
			t.Fatal(err)
		}
		pages++
		for _, to := range broken(page, text, read) {
			t.Errorf("%s links to %s, which is not there", page, to)
		}
	}
	if pages < 70 {
		t.Errorf("%d pages, there are more", pages)
	}
	// The test can fail.
	page := "# A *b* `c`: d\n[1](#a-b-c-d) [2](#a) [3](there.md#x) [4](nowhere.md) [5](https://nowhere.example/) `[6](quoted.md)`\n"
	got := broken("docs/page.md", page, func(name string) (string, error) {
		switch name {
		case "docs/page.md":
			return page, nil
		case "docs/there.md":
			return "# y\n", nil
		}
		return "", os.ErrNotExist
	})
	if want := "#a there.md#x nowhere.md"; strings.Join(got, " ") != want {
		t.Errorf("broken links are %q, want %q", got, want)
	}
}
