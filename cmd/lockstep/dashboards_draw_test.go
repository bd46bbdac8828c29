package main

import (
	"bytes"
	"encoding/json"
	"flag"
	"fmt"
	"image"
	"image/png"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/lockstep-ccl/lockstep/cmd/lockstep/internal/monitoring"
	"github.com/lockstep-ccl/lockstep/internal/browser"
)

var (
	only      = flag.String("only", "", "the dashboards that TestDashboardsInChromium looks at, by a part of their name (all)")
	siteCount = flag.Int("sites", len(sites), "for how many of the configurations")
	keep      = flag.String("keep", "", "a folder for every screenshot of TestDashboardsInChromium")
)

// drawn is what a panel came to.
type drawn struct {
	Title, Type, State string
	Cut                []string // text for which there is no room
	Red                []string // backgrounds
	Outside            string   // what is drawn beside it
	Wide               string   // how much of a table is to be scrolled to
	Box                [4]float64
}

// onPage is JavaScript for all panels, rows included.
const onPage = `(() => {
	const bad = (s) => { // by its hue; Grafana's orange, with the shade that large numbers have, ends at 20
		const m = (s.match(/[\d.]+/g) || []).map(Number);
		if (!s.startsWith('rgb') || m[3] < 0.1) return false;
		const [r, g, b] = m, most = Math.max(r, g, b), range = most - Math.min(r, g, b);
		return r === most && range > 0.4 * most && most > 80 && Math.abs(g - b) / range < 0.27 && !(g > b && (g - b) / range > 0.2);
	};
	return [...document.querySelectorAll('[data-grid]')].map((g) => {
		const s = g.querySelector('section'), r = g.getBoundingClientRect();
		const out = {Title: g.dataset.grid, Type: s ? s.dataset.type : 'row', State: s ? s.dataset.state : 'data', Cut: [], Red: [], Outside: '', Wide: '', Box: [r.left, r.top, r.right, r.bottom]};
		for (const e of g.querySelectorAll('*')) {
			const c = getComputedStyle(e), q = e.getBoundingClientRect();
			if (c.textOverflow === 'ellipsis' && e.scrollWidth > e.clientWidth + 1 && e.innerText) out.Cut.push(e.innerText);
			if (s && !['timeseries', 'heatmap'].includes(s.dataset.type) && (bad(c.backgroundColor) || c.backgroundImage.split(/(?=rgb)/).some(bad) || e.tagName === 'rect' && bad(c.fill))) out.Red.push(e.textContent.slice(0, 60) || e.dataset.state || e.tagName);
			if (e.getAttribute('role') === 'grid' && e.scrollWidth > e.clientWidth + 1) out.Wide = e.scrollWidth + ' in ' + e.clientWidth;
			if (['CANVAS', 'svg'].includes(e.tagName) && q.width && (q.right > r.right + 1 || q.bottom > r.bottom + 1 || q.left < r.left - 1)) out.Outside = e.tagName + ' ' + [q.left, q.top, q.right, q.bottom].map(Math.round);
		}
		return out;
	});
})()`

// onLinks is JavaScript for the links of all panels: of those with several, the menu is opened.
const onLinks = `(async () => {
	const out = {};
	for (const s of document.querySelectorAll('section[data-panel]')) {
		const add = (a) => (out[s.dataset.panel] ??= {})[a.textContent.trim() || a.title || a.getAttribute('aria-label') || ''] = a.getAttribute('href');
		s.querySelectorAll('a[href]').forEach(add);
		const menu = s.querySelector('[data-links]');
		if (!menu) continue;
		menu.firstElementChild.click();
		for (let i = 0; i < 100 && !document.querySelector('[role=menu] a'); i++) await new Promise((done) => setTimeout(done, 20));
		document.querySelectorAll('[role=menu] a').forEach(add);
		menu.firstElementChild.click();
		for (let i = 0; i < 100 && document.querySelector('[role=menu] a'); i++) await new Promise((done) => setTimeout(done, 20));
	}
	document.activeElement.blur();
	return out;
})()`

// draw looks at one dashboard at one moment, in every look.
func (g *generated) draw(t *testing.T, b *browser.Browser, base string, m moment, s sight, full map[string]bool) {
	p, err := b.Page(looks[0].View)
	if err != nil {
		t.Fatal(err)
	}
	defer p.Close()
	if _, err := p.Open(s.address(base, m)); err != nil {
		t.Fatal(err)
	}
	for i, look := range looks {
		if err := p.Look(look.View); err != nil {
			t.Fatal(err)
		}
		panels := settled(t, p)
		if i == 0 {
			why := g.compare(t, s, panels)
			g.links(t, p, s, m)
			for _, panel := range panels {
				key := strings.TrimPrefix(s.uid, "lockstep-") + "/" + panel.Title
				full[key] = full[key] || panel.State == "data"
				if panel.State != "data" && (panel.State != "empty" || why[panel.Title] == "") {
					t.Errorf("panel %q: %s", panel.Title, panel.State)
				}
				for _, what := range panel.Red {
					if !m.red {
						t.Errorf("panel %q is red where all is well: %q", panel.Title, what)
					}
				}
			}
		}
		laidOut(t, look.name, look.Width, panels)
		var wide float64
		if err := p.Eval("document.documentElement.scrollWidth", &wide); err != nil {
			t.Fatal(err)
		}
		if wide > float64(look.Width) {
			t.Errorf("%s: the page is %v wide in a window of %d", look.name, wide, look.Width)
		}
		g.shoot(t, p, fmt.Sprintf("%s-%s-%s", s.name(), m.name, look.name), look.View)
	}
	for _, problem := range p.Problems() {
		t.Errorf("the browser complains: %s", problem)
	}
}

// settled waits until every panel has drawn itself at the size that it has now.
func settled(t *testing.T, p *browser.Page) (panels []drawn) {
	t.Helper()
	for range 600 {
		var ready bool
		if err := p.Eval("(() => { const s = [...document.querySelectorAll('section[data-state]')]; return s.length > 0 && s.every(e => e.dataset.state !== 'loading'); })()", &ready); err != nil {
			t.Fatal(err)
		}
		if ready {
			// Components measure themselves, and draw in frames that follow.
			if err := p.Eval("new Promise(done => setTimeout(() => requestAnimationFrame(() => requestAnimationFrame(() => done())), 300))", nil); err != nil {
				t.Fatal(err)
			}
			if err := p.Eval(onPage, &panels); err != nil {
				t.Fatal(err)
			}
			return panels
		}
		if problems := p.Problems(); len(problems) > 0 {
			t.Fatalf("the browser complains: %s", strings.Join(problems, "\n"))
		}
		time.Sleep(100 * time.Millisecond)
	}
	t.Fatal("the panels are not drawn within a minute")
	return nil
}

// laidOut: panels lie in the window and not upon each other, and draw nothing beside themselves.
func laidOut(t *testing.T, look string, width int, panels []drawn) {
	t.Helper()
	for i, a := range panels {
		if a.Box[0] < 0 || a.Box[2] > float64(width) {
			t.Errorf("%s: panel %q lies at %v in a window of %d", look, a.Title, a.Box, width)
		}
		if a.Outside != "" {
			t.Errorf("%s: panel %q at %v draws beside itself: %s", look, a.Title, a.Box, a.Outside)
		}
		if len(a.Cut) > 0 && !strings.HasPrefix(look, "narrow") && a.Type != "table" {
			t.Errorf("%s: panel %q has no room for %q", look, a.Title, a.Cut)
		}
		if a.Wide != "" && !strings.HasPrefix(look, "narrow") {
			t.Errorf("%s: the table of %q scrolls sideways: %s", look, a.Title, a.Wide)
		}
		for _, b := range panels[:i] {
			if a.Box[0] < b.Box[2]-0.5 && b.Box[0] < a.Box[2]-0.5 && a.Box[1] < b.Box[3]-0.5 && b.Box[1] < a.Box[3]-0.5 {
				t.Errorf("%s: panels %q and %q overlap: %v %v", look, b.Title, a.Title, b.Box, a.Box)
			}
		}
	}
}

// nobody are panels for which there is nothing here to show: a remediator of a cluster makes their metrics.
var nobody = []string{"pipeline/Nodes out, spares", "pipeline/Fences", "pipeline/API server"}

// A panel as the dashboard's file has it.
type panelFile struct {
	Title, Description, Type string
	Links                    []struct{ URL, Title string }
	Targets                  []struct{ Expr, LegendFormat, RefID string }
	FieldConfig              struct {
		Defaults  struct{ Unit, NoValue string }
		Overrides []struct {
			Matcher    struct{ Options any }
			Properties []struct{ ID string }
		}
	}
}

func (g *generated) panels(t *testing.T, s sight) []panelFile {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(g.dir, "dashboards", s.uid+".json"))
	if err != nil {
		t.Fatal(err)
	}
	var file struct {
		Tags   []string
		Panels []panelFile
	}
	if err := json.Unmarshal(text, &file); err != nil {
		t.Fatal(err)
	}
	for _, want := range append([]string{"lockstep"}, g.config.Dashboards.Tags...) {
		if !strings.Contains(strings.Join(file.Tags, "\n"), want) {
			t.Errorf("no tag %q: %v", want, file.Tags)
		}
	}
	return file.Panels
}

// measure finds what has a unit in an expression.
var measure = regexp.MustCompile(`\w+_(seconds|bytes|ratio|hertz|celsius|watts|joules)\b|rate\(`)

// compare: all that is in the file is on the page, has a title, says what it is for, and a unit where its values have
// one; lines have names. why says why a panel may be empty, as a reader is told who finds it so.
func (g *generated) compare(t *testing.T, s sight, panels []drawn) (why map[string]string) {
	t.Helper()
	why = map[string]string{}
	files := g.panels(t, s)
	if len(files) != len(panels) {
		t.Fatalf("%d panels are drawn of %d", len(panels), len(files))
	}
	for i, f := range files {
		if f.Title != panels[i].Title || f.Title == "" {
			t.Errorf("panel %d is %q, drawn as %q", i, f.Title, panels[i].Title)
		}
		if f.Type == "row" {
			continue
		}
		if f.Description == "" {
			t.Errorf("panel %q has no description", f.Title)
		}
		why[f.Title] = f.FieldConfig.Defaults.NoValue
		units := map[any]bool{}
		for _, o := range f.FieldConfig.Overrides {
			units[o.Matcher.Options] = o.Properties[0].ID == "unit"
		}
		for _, target := range f.Targets {
			if m := measure.FindString(target.Expr); m != "" && f.FieldConfig.Defaults.Unit == "" && f.Type != "table" && !units[target.RefID] && !strings.Contains(target.Expr, "[1d:1m]") {
				t.Errorf("panel %q has no unit, and %s has", f.Title, m)
			}
			if target.LegendFormat == "" && (f.Type == "timeseries" || f.Type == "state-timeline") {
				t.Errorf("panel %q has a line without a name: %s", f.Title, target.Expr)
			}
		}
	}
	return why
}

// links: those of panels lead to runbooks as configured or, of a trace's id, to the trace; those of the dashboard to each other.
func (g *generated) links(t *testing.T, p *browser.Page, s sight, m moment) {
	t.Helper()
	var found map[string]map[string]string
	if err := p.Eval(onLinks, &found); err != nil {
		t.Fatal(err)
	}
	traces := 0
	for _, f := range g.panels(t, s) {
		if f.Type == "row" {
			continue
		}
		for _, l := range f.Links {
			got, ok := found[f.Title][l.Title]
			if !ok || got != l.URL {
				t.Errorf("panel %q: link %q leads to %q, in the file to %q", f.Title, l.Title, got, l.URL)
			}
			g.runbook(t, f.Title+": "+l.Title, got)
			delete(found[f.Title], l.Title)
		}
		for title, to := range found[f.Title] {
			if title == "no trace" {
				continue
			}
			if len(title) != 32 || !strings.HasPrefix(to, "/explore?") || !strings.Contains(to, title) {
				t.Errorf("panel %q: %q leads to %q", f.Title, title, to)
			}
			traces++
		}
	}
	if m.red && (s.uid == "lockstep-fleet" || s.vars["training_job"] == hallJob && s.uid == "lockstep-job") && traces == 0 {
		t.Error("no link leads to the incident's trace")
	}
	var others []string
	if err := p.Eval("[...document.querySelectorAll('nav a')].map(a => a.getAttribute('href'))", &others); err != nil {
		t.Fatal(err)
	}
	for _, uid := range g.uids {
		if has := strings.Contains(strings.Join(others, " ")+" ", "/d/"+uid+" "); has == (uid == s.uid) {
			t.Errorf("links to other dashboards: %v", others)
		}
	}
}

// pictures are the screenshots that the documents show, of the first configuration.
var pictures = map[string]struct {
	file   string
	height int // of what is shown
}{
	"job-demo-fault-light": {"dashboard-job", 1036}, "communicator-demo-fault-dark": {"dashboard-communicator", 1225}, "fabric-fault-light": {"dashboard-fabric", 1525},
}

// shoot takes a screenshot, with -images for the documents.
func (g *generated) shoot(t *testing.T, p *browser.Page, name string, v browser.View) {
	t.Helper()
	picture, shown := pictures[name]
	shown = shown && *writePage && g.config.Dashboards.Folder == monitoring.Default().Dashboards.Folder
	if *keep == "" && !shown {
		return
	}
	var height float64
	if err := p.Eval("document.documentElement.scrollHeight", &height); err != nil {
		t.Fatal(err)
	}
	// Tables draw only what is in the window.
	tall := v
	tall.Height = int(height)
	if err := p.Look(tall); err != nil {
		t.Fatal(err)
	}
	settled(t, p)
	shot, err := p.Screenshot(v.Width, int(height))
	if err != nil {
		t.Fatal(err)
	}
	if *keep != "" {
		if err := os.WriteFile(filepath.Join(*keep, g.config.Dashboards.Folder+"-"+name+".png"), shot, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	if shown {
		if err := os.WriteFile("../../docs/images/"+picture.file+".png", cropped(t, shot, picture.height), 0o644); err != nil {
			t.Fatal(err)
		}
	}
}

// cropped is the upper part of a picture.
func cropped(t *testing.T, shot []byte, height int) []byte {
	t.Helper()
	img, err := png.Decode(bytes.NewReader(shot))
	if err != nil {
		t.Fatal(err)
	}
	part, ok := img.(interface {
		SubImage(image.Rectangle) image.Image
	})
	if !ok {
		t.Fatalf("a %T has no parts", img)
	}
	r := img.Bounds()
	r.Max.Y = min(r.Max.Y, height)
	var out bytes.Buffer
	if err := (&png.Encoder{CompressionLevel: png.BestCompression}).Encode(&out, part.SubImage(r)); err != nil {
		t.Fatal(err)
	}
	return out.Bytes()
}
