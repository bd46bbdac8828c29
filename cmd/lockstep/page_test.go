package main

import (
	"bufio"
	"context"
	"flag"
	"fmt"
	"image/png"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/lockstep-ccl/lockstep/internal/browser"
)

var (
	writePage = flag.Bool("images", false, "write docs/demo.md and its screenshots")
	faults    = flag.Int("faults", 6, "how many of the demo's faults TestPageBesideTheDemo has")
)

// TestPageBesideTheDemo is what a person sees who runs the demo with the status page open in a browser (default
// flags, so behind TLS and a password): for each fault it says what the terminal says, names the same culprit, is
// without red before and after, and every link on it, and each that the terminal prints, opens. With -images what
// both say, and when, becomes docs/demo.md. It asserts no times.
func TestPageBesideTheDemo(t *testing.T) {
	if os.Getenv("LOCKSTEP_TEST_PAGE") == "" {
		t.Skip("LOCKSTEP_TEST_PAGE is not set: make test-page sets it")
	}
	b, err := browser.Start()
	if err != nil {
		t.Fatal(err)
	}
	defer b.Close()
	term := startDemo(t, "--tracing", "--every", "20s", "--seed", "7")
	password, err := os.ReadFile(term.find(t, `password in (\S+);`)[1])
	if err != nil {
		t.Fatal(err)
	}
	v := &visitor{t: t, b: b, password: strings.TrimSpace(string(password)), opened: map[string]string{}}
	status := term.find(t, `status page +(\S+)`)[1]
	page := v.page()
	defer page.Close()
	v.open(page, status)
	seen := &journal{}
	for n := 1; n <= *faults; n++ {
		v.healthy(page)
		v.shoot(page, n, "demo-healthy")
		closed := v.text(page, "document.querySelectorAll('details.closed').length + ''")
		term.await(t, fmt.Sprintf(`^fault %d: `, n))
		for shot := false; !term.has(fmt.Sprintf(`(?ms)^fault %d: .*^  [✓✗] `, n)); time.Sleep(100 * time.Millisecond) {
			if v.sample(page, seen, term, n) && !shot {
				shot = true
				v.shoot(page, n, "demo-incident")
			}
		}
		// The page comes up to date every 2 s: what the terminal has said last is on it after that.
		for range 600 {
			v.sample(page, seen, term, n)
			if v.text(page, "document.querySelectorAll('section.card').length + ' open, ' + (document.querySelectorAll('details.closed').length > "+closed+")") == "0 open, true" {
				break
			}
			time.Sleep(100 * time.Millisecond)
		}
		for _, want := range term.confirmed(n) {
			if !strings.Contains(seen.all(n), want) {
				t.Errorf("fault %d: the terminal says %q, the page only:\n%s", n, want, seen.all(n))
			}
		}
		v.healthy(page)
		v.links(page)
	}
	for _, problem := range page.Problems() {
		t.Errorf("the browser complains: %s", problem)
	}
	term.links(t, v)
	t.Logf("%d links opened", len(v.opened))
	term.end(t)
	text := document(term, seen, v, *faults)
	t.Log(text)
	if *writePage {
		if err := os.WriteFile("../../docs/demo.md", []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
}

// A terminal is the demo's output, line by line with when it came.
type terminal struct {
	cmd   *exec.Cmd
	ended chan error
	mu    sync.Mutex
	lines []said
}

type said struct {
	at   time.Time
	text string
}

func startDemo(t *testing.T, args ...string) *terminal {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 15*time.Minute)
	t.Cleanup(cancel)
	term := &terminal{cmd: exec.CommandContext(ctx, "lockstep", append([]string{"demo"}, args...)...), ended: make(chan error, 1)}
	term.cmd.Cancel = func() error { return term.cmd.Process.Signal(syscall.SIGTERM) }
	term.cmd.WaitDelay = time.Minute
	term.cmd.Stderr = t.Output()
	out, err := term.cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := term.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	go func() {
		for s := bufio.NewScanner(out); s.Scan(); {
			term.mu.Lock()
			term.lines = append(term.lines, said{time.Now(), s.Text()})
			term.mu.Unlock()
		}
		term.ended <- term.cmd.Wait()
	}()
	return term
}

func (d *terminal) all() string {
	d.mu.Lock()
	defer d.mu.Unlock()
	var b strings.Builder
	for _, l := range d.lines {
		b.WriteString(l.text + "\n")
	}
	return b.String()
}

func (d *terminal) has(pattern string) bool { return regexp.MustCompile(pattern).MatchString(d.all()) }

// await waits until a line says it.
func (d *terminal) await(t *testing.T, pattern string) {
	t.Helper()
	for range 6000 {
		if d.has("(?m)" + pattern) {
			return
		}
		select {
		case err := <-d.ended:
			d.ended <- err
			t.Fatalf("the demo ended (%v) without %q:\n%s", err, pattern, d.all())
		case <-time.After(100 * time.Millisecond):
		}
	}
	t.Fatalf("the demo never says %q:\n%s", pattern, d.all())
}

func (d *terminal) find(t *testing.T, pattern string) []string {
	t.Helper()
	d.await(t, pattern)
	return regexp.MustCompile("(?m)" + pattern).FindStringSubmatch(d.all())
}

// end ends the demo as ^C does.
func (d *terminal) end(t *testing.T) {
	if err := d.cmd.Process.Signal(os.Interrupt); err != nil {
		t.Error(err)
	}
	if <-d.ended; d.cmd.ProcessState.ExitCode() != 0 {
		t.Errorf("the demo ends with %v\n%s", d.cmd.ProcessState, d.all())
	}
}

var happened = regexp.MustCompile(`^ +([\d.]+) s  (\w+) +(.*)$`)

// story is what it said of a fault: kind and text of each event, by when the fault was injected.
func (d *terminal) story(n int) (events []said, injected time.Time) {
	d.mu.Lock()
	defer d.mu.Unlock()
	inside := false
	for _, l := range d.lines {
		if strings.HasPrefix(l.text, "fault ") {
			inside = strings.HasPrefix(l.text, fmt.Sprintf("fault %d:", n))
		}
		m := happened.FindStringSubmatch(l.text)
		if !inside || m == nil {
			continue
		}
		s, err := strconv.ParseFloat(m[1], 64)
		if err != nil {
			continue
		}
		if m[2] == "fault" {
			injected = l.at
		}
		events = append(events, said{injected.Add(time.Duration(s * 1e9)), m[2] + ": " + m[3]})
	}
	return events, injected
}

// confirmed are the class and culprits of the confirmed verdict.
func (d *terminal) confirmed(n int) []string {
	events, _ := d.story(n)
	for _, e := range events {
		if m := regexp.MustCompile(`^verdict: confirmed +(\w+): (.*) \(\w+\)$`).FindStringSubmatch(e.text); m != nil {
			return []string{m[1], m[2]}
		}
	}
	return []string{"a confirmed verdict"}
}

// links opens what the terminal has printed, as it says that one gets there.
func (d *terminal) links(t *testing.T, v *visitor) {
	curl := regexp.MustCompile(`curl -K (\S+)`).FindStringSubmatch(d.all())
	for _, m := range regexp.MustCompile(`(?m)^  ([\w ]+?) +(https?://\S+) *(.*)$`).FindAllStringSubmatch(d.all(), -1) {
		if strings.Contains(m[3], "curl -K") {
			out, err := exec.CommandContext(t.Context(), "curl", "-sSfK", curl[1], m[2]).CombinedOutput()
			if err != nil || len(out) < 100 {
				t.Errorf("%s: %s with curl -K: %v\n%.500s", m[1], m[2], err, out)
			}
			v.opened[m[2]] = fmt.Sprintf("%s (with `curl -K`)", m[1])
			continue
		}
		v.visit(m[2], m[1])
	}
	for _, m := range regexp.MustCompile(`(?:trace +|own: )(https?://\S+)`).FindAllStringSubmatch(d.all(), -1) {
		v.visit(m[1], "trace")
	}
}

// A visitor is who sits at the browser.
type visitor struct {
	t        *testing.T
	b        *browser.Browser
	password string
	opened   map[string]string // what each link was called
}

func (v *visitor) page() *browser.Page {
	v.t.Helper()
	p, err := v.b.Page(browser.View{Width: 1180, Height: 900})
	if err == nil {
		err = p.SignIn("demo", v.password)
	}
	if err != nil {
		v.t.Fatal(err)
	}
	return p
}

func (v *visitor) open(p *browser.Page, url string) {
	v.t.Helper()
	if _, err := p.Open(url); err != nil {
		v.t.Fatal(err)
	}
}

func (v *visitor) text(p *browser.Page, expression string) (s string) {
	v.t.Helper()
	if err := p.Eval(expression, &s); err != nil {
		v.t.Fatal(err)
	}
	return s
}

// red is JavaScript that names visible elements in which a colour is red; amber is not.
const red = `(() => {
	const bad = (s) => { const m = (s.match(/[\d.]+/g) || []).map(Number); return s.startsWith('rgb') && (m.length < 4 || m[3] > 0) && m[0] > 120 && m[0] > 2 * m[1] && m[0] > 2 * m[2]; };
	return [...document.body.querySelectorAll('*')].filter(e => { const c = getComputedStyle(e); return e.checkVisibility() &&
		(bad(c.color) || bad(c.backgroundColor) || c.borderLeftStyle !== 'none' && bad(c.borderLeftColor) || c.outlineStyle !== 'none' && bad(c.outlineColor)); })
		.map(e => e.nodeName + '.' + e.className + ': ' + e.textContent.trim().slice(0, 60)).join('\n');
})()`

// healthy waits until the page says so, and wants nothing red then.
func (v *visitor) healthy(p *browser.Page) {
	v.t.Helper()
	for range 1200 {
		if strings.Contains(v.text(p, "document.body.innerText"), "Healthy: no open incident.") {
			if r := v.text(p, red); r != "" {
				v.t.Errorf("a healthy job's page has red on it:\n%s", r)
			}
			return
		}
		time.Sleep(100 * time.Millisecond)
	}
	v.t.Fatalf("the page is never healthy:\n%s", v.text(p, "document.body.innerText"))
}

// told is JavaScript for what the page says, a line for each statement, without the words that change with the clock.
const told = `(() => {
	const words = (e) => e.innerText.replace(/\s+/g, ' ').trim();
	const out = [];
	for (const c of document.querySelectorAll('section.card')) {
		out.push('incident: ' + words(c.querySelector('.tag')).toLowerCase() + ' ' + words(c.querySelector('div')).replace(/^\S+ /, '').replace(/, since.*/, '') + ', ' + words(c.querySelector('.who')));
		for (const l of c.querySelectorAll('.timeline li')) out.push('timeline: ' + words(l.querySelector('.at')) + ' ' + words(l.querySelector('b')) + ': ' + words(l.querySelector('b + span')));
	}
	for (const l of document.querySelectorAll('.situations li:not(.moving)')) out.push('ranks: ' + words(l).replace(/ · for [^·]*/, ''));
	const closed = document.querySelectorAll('details.closed');
	if (closed.length) out.push('closed incidents: ' + closed.length + ', the last: ' + words(closed[0].querySelector('summary')).replace(/^.*?ago, /, ''));
	return out.join('\n');
})()`

// A journal is what the page has said, and when it said it first.
type journal struct {
	said  []said
	fault []int
}

func (j *journal) all(n int) string {
	var b strings.Builder
	for i, s := range j.said {
		if j.fault[i] == n {
			b.WriteString(s.text + "\n")
		}
	}
	return b.String()
}

// sample notes what is new on the page, and reports whether it blames somebody for sure.
func (v *visitor) sample(p *browser.Page, j *journal, term *terminal, n int) (sure bool) {
	for line := range strings.Lines(v.text(p, told)) {
		line = strings.TrimSpace(line)
		sure = sure || strings.HasPrefix(line, "incident: confirmed")
		if line != "" && !slices.ContainsFunc(j.said, func(s said) bool { return s.text == line }) {
			j.said, j.fault = append(j.said, said{time.Now(), line}), append(j.fault, n)
		}
	}
	return sure
}

// links opens every link of the page that was not opened yet.
func (v *visitor) links(p *browser.Page) {
	v.t.Helper()
	all := v.text(p, "[...document.links].filter(a => !a.getAttribute('href').startsWith('#')).map(a => a.href + ' ' + a.textContent.trim()).join('\\n')")
	for line := range strings.Lines(all) {
		url, name, _ := strings.Cut(strings.TrimSpace(line), " ")
		v.visit(url, name)
	}
}

// visit opens an address in a tab of its own: it must answer 200 and say something.
func (v *visitor) visit(url, name string) {
	v.t.Helper()
	if _, ok := v.opened[url]; ok {
		return
	}
	p := v.page()
	defer p.Close()
	v.open(p, url)
	status, err := p.Status()
	if err != nil {
		v.t.Fatal(err)
	}
	var text string
	for range 300 { // some draw themselves
		if text = v.text(p, "document.body.innerText"); len(strings.TrimSpace(text)) > 10 {
			break
		}
		time.Sleep(100 * time.Millisecond)
	}
	if status != 200 || len(strings.TrimSpace(text)) <= 10 || strings.Contains(text, "placeholder") {
		v.t.Errorf("%s: %s answers %d and says %q", name, url, status, text)
	}
	v.t.Logf("%s: %s answers %d: %.80q", name, url, status, text)
	v.opened[url] = name
}

// shoot keeps a screenshot of the first fault's scenes, with -images.
func (v *visitor) shoot(p *browser.Page, n int, name string) {
	v.t.Helper()
	shot, err := p.Screenshot(1180, 900)
	if err != nil {
		v.t.Fatal(err)
	}
	path := filepath.Join(os.TempDir(), fmt.Sprintf("%s-%d.png", name, n))
	if !*writePage {
		path = filepath.Join(v.t.TempDir(), name+".png")
	}
	if err := os.WriteFile(path, shot, 0o644); err != nil {
		v.t.Fatal(err)
	}
	f, err := os.Open(path)
	if err != nil {
		v.t.Fatal(err)
	}
	defer f.Close()
	if _, err := png.DecodeConfig(f); err != nil {
		v.t.Errorf("%s: %v", name, err)
	}
}

// document is docs/demo.md: terminal and page side by side.
func document(term *terminal, seen *journal, v *visitor, faults int) string {
	var b strings.Builder
	b.WriteString(`# The demo, with the status page open

Written by ` + "`make test-page ARGS=-images`" + `: ` + "`lockstep demo --tracing`" + ` with each of its faults, and a real
Chromium in which the status page stays open (default flags: TLS, password, the page comes up to date every
2 s). Left is what the terminal says, right what is new on the page; seconds are since the fault. The test
wants class and culprit of both to agree, the page without red before and after, and every link to answer 200
with something to read.
`)
	if load, err := os.ReadFile("/proc/loadavg"); err == nil {
		fmt.Fprintf(&b, "Machine: %d cores, load %s when it was over.\n", runtime.NumCPU(), strings.Fields(string(load))[0])
	}
	b.WriteString("\n")
	for n := range faults + 1 {
		events, injected := term.story(n)
		if len(events) == 0 {
			continue
		}
		name := regexp.MustCompile(fmt.Sprintf(`(?m)^fault %d: (\w+)`, n)).FindStringSubmatch(term.all())[1]
		fmt.Fprintf(&b, "## %s\n\n| s | the terminal | the page |\n| ---: | --- | --- |\n", name)
		type row struct {
			at             time.Time
			terminal, page []string
		}
		var rows []row
		for _, e := range events {
			rows = append(rows, row{at: e.at, terminal: []string{e.text}})
		}
		for i, s := range seen.said {
			if seen.fault[i] != n {
				continue
			}
			if last := len(rows) - 1; last >= 0 && len(rows[last].page) > 0 && s.at.Sub(rows[last].at) < 300*time.Millisecond {
				rows[last].page = append(rows[last].page, s.text)
				continue
			}
			rows = append(rows, row{at: s.at, page: []string{s.text}})
		}
		slices.SortStableFunc(rows, func(a, b row) int { return a.at.Compare(b.at) })
		for _, r := range rows {
			if more := len(r.page) - 7; more > 0 {
				r.page = append(r.page[:7], fmt.Sprintf("and %d more", more))
			}
			fmt.Fprintf(&b, "| %.1f | %s | %s |\n", max(0, r.at.Sub(injected).Seconds()), cell(r.terminal), cell(r.page))
		}
		b.WriteString("\n")
	}
	b.WriteString("## Links\n\nEach opened in the browser, on the page and in the terminal:\n\n")
	var names []string
	for url, name := range v.opened {
		name = strings.TrimSpace(name)
		if m := regexp.MustCompile(`/runbooks/(\w+)`).FindStringSubmatch(url); m != nil {
			name += " " + m[1]
		}
		if !slices.Contains(names, name) {
			names = append(names, name)
		}
	}
	slices.Sort(names)
	for _, n := range names {
		fmt.Fprintf(&b, "- %s\n", n)
	}
	return b.String()
}

var places = regexp.MustCompile(`https?://\S+`)

func cell(lines []string) string {
	for i, l := range lines {
		lines[i] = strings.ReplaceAll(places.ReplaceAllString(l, "(link)"), "|", `\|`)
	}
	return strings.Join(lines, "<br>")
}
