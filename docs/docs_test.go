package docs

import (
	"bytes"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/lockstep-ccl/lockstep/exporters/names"
)

// repository is what the tests know of the code.
type repository struct {
	files    []string               // by their path from the root
	packages map[string][]string    // names of non-test Go files, by folder
	names    map[string]bool        // "pkg.Name" of everything declared, fields and methods too
	tests    []string               // functions of tests
	env      map[string]string      // names in the environment, and a file that has each
	uses     map[string][]string    // files that name "pkg.Name", by that; tests not among them
	values   map[string][]string    // the constants of a type "pkg.Type"
	types    map[string][]*declared // by name, of all packages
	strings  map[string]bool        // literals, those of tests not among them
}

// declared is a type.
type declared struct {
	pkg     string
	members map[string]bool // fields and methods
	embeds  []string        // names of the types that it embeds, or is another name of
}

var (
	envName  = regexp.MustCompile(`["` + "`" + `](LOCKSTEP_[A-Z0-9_]*[A-Z0-9])["=]`)
	testFunc = regexp.MustCompile(`^(Test|Fuzz|Benchmark)[A-Z0-9]\w*$`)
)

func load(t *testing.T) *repository {
	t.Helper()
	r := &repository{packages: map[string][]string{}, names: map[string]bool{}, env: map[string]string{}, uses: map[string][]string{}, values: map[string][]string{}, types: map[string][]*declared{}, strings: map[string]bool{}}
	root := os.DirFS("..")
	err := fs.WalkDir(root, ".", func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if d.IsDir() {
			if n := d.Name(); n != "." && strings.HasPrefix(n, ".") || n == "testdata" || n == "node_modules" || n == "dist" {
				return fs.SkipDir
			}
			return nil
		}
		r.files = append(r.files, path)
		if !strings.HasSuffix(path, ".go") {
			return nil
		}
		text, err := fs.ReadFile(root, path)
		if err != nil {
			return err
		}
		return r.read(path, text)
	})
	if err != nil {
		t.Fatal(err)
	}
	return r
}

func (r *repository) read(path string, text []byte) error {
	file, err := parser.ParseFile(token.NewFileSet(), path, text, parser.SkipObjectResolution)
	if err != nil {
		return err
	}
	test := strings.HasSuffix(path, "_test.go")
	if dir := filepath.Dir(path); !test {
		r.packages[dir] = append(r.packages[dir], path)
		if !strings.HasPrefix(dir, "bench") && !strings.Contains(dir, "/gen") && dir != "docs/internal/environment" {
			for _, m := range envName.FindAllSubmatch(text, -1) {
				r.env[string(m[1])] = path
			}
		}
	}
	pkg := strings.TrimSuffix(file.Name.Name, "_test")
	for _, d := range file.Decls {
		if g, ok := d.(*ast.GenDecl); ok && g.Tok == token.CONST && !test {
			r.enumerate(pkg, g)
		}
	}
	ast.Inspect(file, func(n ast.Node) bool {
		switch n := n.(type) {
		case *ast.SelectorExpr:
			if x, ok := n.X.(*ast.Ident); ok && !test {
				if q := x.Name + "." + n.Sel.Name; !slices.Contains(r.uses[q], path) {
					r.uses[q] = append(r.uses[q], path)
				}
			}
		case *ast.BasicLit:
			if s, err := strconv.Unquote(n.Value); err == nil && n.Kind == token.STRING && !test {
				r.strings[s] = true
			}
		case *ast.FuncDecl:
			r.names[pkg+"."+n.Name.Name] = true
			if n.Recv != nil {
				r.declare(pkg, typeName(n.Recv.List[0].Type)).members[n.Name.Name] = true
			}
			if test {
				r.tests = append(r.tests, n.Name.Name)
			}
		case *ast.TypeSpec:
			r.names[pkg+"."+n.Name.Name] = true
			r.describe(r.declare(pkg, n.Name.Name), n.Type)
		case *ast.ValueSpec:
			for _, name := range n.Names {
				r.names[pkg+"."+name.Name] = true
			}
		case *ast.Field:
			for _, name := range n.Names {
				r.names[pkg+"."+name.Name] = true
			}
		}
		return true
	})
	return nil
}

// declare returns the type of a name in a package.
func (r *repository) declare(pkg, name string) *declared {
	for _, d := range r.types[name] {
		if d.pkg == pkg {
			return d
		}
	}
	d := &declared{pkg: pkg, members: map[string]bool{}}
	r.types[name] = append(r.types[name], d)
	return d
}

// describe adds the members of a type's definition.
func (r *repository) describe(d *declared, of ast.Expr) {
	var fields *ast.FieldList
	switch of := of.(type) {
	case *ast.StructType:
		fields = of.Fields
	case *ast.InterfaceType:
		fields = of.Methods
	default:
		d.embeds = append(d.embeds, typeName(of))
		return
	}
	for _, f := range fields.List {
		for _, name := range f.Names {
			d.members[name.Name] = true
		}
		if name := typeName(f.Type); len(f.Names) == 0 {
			d.members[name] = true
			d.embeds = append(d.embeds, name)
		}
	}
}

// typeName returns the name of a type, without its package, pointer and parameters.
func typeName(e ast.Expr) string {
	switch e := e.(type) {
	case *ast.StarExpr:
		return typeName(e.X)
	case *ast.SelectorExpr:
		return e.Sel.Name
	case *ast.IndexExpr:
		return typeName(e.X)
	case *ast.Ident:
		return e.Name
	}
	return ""
}

// has reports whether a type of a package ("" for any) has a member, also through types that it
// embeds, to some depth.
func (r *repository) has(pkg, name, member string, depth int) bool {
	for _, d := range r.types[name] {
		if pkg != "" && d.pkg != pkg {
			continue
		}
		if d.members[member] || depth > 0 && slices.ContainsFunc(d.embeds, func(e string) bool { return r.has("", e, member, depth-1) }) {
			return true
		}
	}
	return false
}

// file reports whether a file of the repository has this name, or path from some folder.
func (r *repository) file(name string) bool {
	return slices.ContainsFunc(r.files, func(f string) bool { return f == name || strings.HasSuffix(f, "/"+name) })
}

// enumerate notes the exported constants that a block counts up by iota.
func (r *repository) enumerate(pkg string, g *ast.GenDecl) {
	of := ""
	for _, s := range g.Specs {
		v := s.(*ast.ValueSpec)
		if id, ok := v.Type.(*ast.Ident); ok {
			of = pkg + "." + id.Name
		} else if len(v.Values) > 0 {
			of = ""
		}
		if of != "" && ast.IsExported(v.Names[0].Name) {
			r.values[of] = append(r.values[of], v.Names[0].Name)
		}
	}
}

// TestMap: the map names every package.
func TestMap(t *testing.T) {
	text, err := os.ReadFile("design/architecture.md")
	if err != nil {
		t.Fatal(err)
	}
	for dir := range load(t).packages {
		if dir == "docs" || strings.HasPrefix(dir, "tools/") {
			continue // this one, and pins of tools
		}
		if !bytes.Contains(text, []byte("`"+dir+"`")) {
			t.Errorf("docs/design/architecture.md does not name `%s`", dir)
		}
	}
}

// TestEnvironment: the page of the environment is what its table says, and the table
// has what the code reads.
func TestEnvironment(t *testing.T) {
	page, err := os.ReadFile("environment.md")
	if err != nil {
		t.Fatal(err)
	}
	fresh := filepath.Join(t.TempDir(), "environment.md")
	if out, err := exec.Command("go", "run", "./internal/environment", "-o", fresh).CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	if want, err := os.ReadFile(fresh); err != nil || !bytes.Equal(page, want) {
		t.Errorf("docs/environment.md is stale: go generate ./docs (%v)", err)
	}
	r := load(t)
	for name, path := range r.env {
		if !bytes.Contains(page, []byte("| `"+name+"` |")) {
			t.Errorf("%s reads or sets %s, which docs/internal/environment/table.go lacks", path, name)
		}
	}
	for _, m := range regexp.MustCompile("(?m)^\\| `(LOCKSTEP_[A-Z0-9_]+)` \\|").FindAllSubmatch(page, -1) {
		if r.env[string(m[1])] == "" {
			t.Errorf("docs/environment.md has %s, which no code reads", m[1])
		}
	}
}

// TestQuotes: tests, files, targets of make, names of packages (`pkg.Name`, `pkg.name`) and members
// of types (`Type.Method`) that documents quote are there.
func TestQuotes(t *testing.T) {
	r := load(t)
	targets, err := os.ReadFile("../Makefile")
	if err != nil {
		t.Fatal(err)
	}
	packages := map[string]bool{}
	for name := range r.names {
		packages[name[:strings.Index(name, ".")]] = true
	}
	exported := regexp.MustCompile(`^([a-z]\w*)\.([A-Z]\w*)(?:\.([A-Z]\w*))?(?:\(.*\))?$`)
	member := regexp.MustCompile(`^([A-Za-z]\w*)\.([A-Za-z]\w*)(?:\.\w+)*(?:\(.*\))?$`)
	file := regexp.MustCompile(`^[\w.-]+(/[\w.-]+)+\.(go|h|c|s|sh|md|yml|json|py)$`)
	make := regexp.MustCompile(`^make ([a-z-]+)$`)
	for _, path := range r.files {
		if !strings.HasSuffix(path, ".md") || !strings.HasPrefix(path, "docs/") && strings.Contains(path, "/") {
			continue
		}
		text, err := os.ReadFile(filepath.Join("..", path))
		if err != nil {
			t.Fatal(err)
		}
		for _, m := range regexp.MustCompile("`([^`\n]+)`").FindAllSubmatch(text, -1) {
			q := string(m[1])
			switch x := exported.FindStringSubmatch(q); {
			case testFunc.MatchString(q):
				if !slices.Contains(r.tests, q) {
					t.Errorf("%s quotes %s, and there is no such test", path, q)
				}
			case x != nil && packages[x[1]]:
				if !r.names[x[1]+"."+x[2]] || x[3] != "" && !r.has(x[1], x[2], x[3], 3) {
					t.Errorf("%s quotes %s, which package %s has not", path, q, x[1])
				}
			case member.MatchString(q):
				if x := member.FindStringSubmatch(q); !r.quotable(packages, q, x[1], x[2]) {
					t.Errorf("%s quotes %s, and there is no %s.%s", path, q, x[1], x[2])
				}
			case file.MatchString(q):
				if !r.file(q) {
					t.Errorf("%s quotes %s, and there is no such file", path, q)
				}
			case make.MatchString(q):
				if target := make.FindStringSubmatch(q)[1]; !bytes.Contains(targets, []byte("\n"+target+":")) {
					t.Errorf("%s quotes %s, and there is no such target", path, q)
				}
			}
		}
	}
	// The test can fail.
	for q, want := range map[string]bool{
		"Executor.drain": true, "Executor.Put(op)": true, "Comm.drain": false, "Commm.Rank": false, "Config.GPU.Peers": true,
		"proxy.keptFrom": true, "proxy.keptTo": false, "ccl.rank": true, "ccl.runk": false, "JOB.RANK.PID": true, "spec.taints": true,
	} {
		if x := member.FindStringSubmatch(q); r.quotable(packages, q, x[1], x[2]) != want {
			t.Errorf("documents may quote %s: %v, want %v", q, !want, want)
		}
	}
}

// quotable reports whether a document may quote `of.name`, or a longer q that begins so: a type's
// member, a name of a package, a file, or a string of the code, as attributes are. What begins with
// neither a package nor a type is another program's, unless it looks like a type.
func (r *repository) quotable(packages map[string]bool, q, of, name string) bool {
	switch {
	case r.has("", of, name, 3), r.names[of+"."+name], r.strings[q], r.file(q):
		return true
	case q == "status.restarts": // a JobSet's
		return true
	case ast.IsExported(of):
		return of == strings.ToUpper(of) // a placeholder
	default:
		return !packages[of] && r.types[of] == nil
	}
}

// TestEveryClassIsExplained: the concepts and the map of diagnosis have a row of each class.
func TestEveryClassIsExplained(t *testing.T) {
	for path, row := range map[string]string{"concepts.md": "| `%s` |", "../diagnosis/doc.go": " %s "} {
		text, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		for _, class := range names.Classes {
			if !strings.Contains(string(text), fmt.Sprintf(row, class)) {
				t.Errorf("%s has no row of %s", path, class)
			}
		}
	}
}

// TestWhereToBegin: who adds a kind of something finds every place that tells kinds apart
// in CONTRIBUTING.md. A switch over collectives in a file that its list lacks fails here.
func TestWhereToBegin(t *testing.T) {
	text, err := os.ReadFile("../CONTRIBUTING.md")
	if err != nil {
		t.Fatal(err)
	}
	r := load(t)
	step := regexp.MustCompile(`(?m)^[1-9]\. `) // of a section's list: a place to edit
	for _, c := range []struct {
		section, of string
		not         []string // values that are no such thing, or stand for all
		others      []string // who names kinds and needs no row for a new one
	}{
		{
			"A collective", "record.CollKind", []string{"CollNone", "Send", "Recv", "Group"},
			[]string{
				"ccl/internal/algo/model.go",         // a cost, with the builder that it is of
				"ccl/internal/proxy/messages.go",     // AlltoAll within the node
				"collector/source/ebpf/functions.go", // what NCCL's functions are
			},
		},
		{
			"A transport", "record.Transport", []string{"TransportNone", "TransportRDMA"}, // queue pairs have much that no other link has
			[]string{
				"ccl/internal/transport/shm.go", "ccl/internal/transport/tcp_send.go",
			},
		},
		{
			"A verdict class", "diagnosis.Class", []string{"Healthy"},
			[]string{
				"diagnosis/incidents.go",  // a hang that a slow link explains
				"exporters/web/status.go", // connections that are red
				"cmd/lockstep/internal/demo/faults.go",
				"dashboards/communicator.go", "dashboards/node.go", // panels that a slow link explains
			},
		},
	} {
		_, section, found := strings.Cut(string(text), "\n### "+c.section+"\n")
		section, _, _ = strings.Cut(section, "\n### ")
		if !found || len(r.values[c.of]) < 4 {
			t.Fatalf("CONTRIBUTING.md has no section %q, or %s has no values: %v", c.section, c.of, r.values[c.of])
		}
		pkg, _, _ := strings.Cut(c.of, ".")
		for _, name := range r.values[c.of] {
			if slices.Contains(c.not, name) {
				continue
			}
			for _, path := range slices.Concat(r.uses[pkg+"."+name], r.uses["names.Class"+name], r.uses["names.Alert"+name]) {
				simulated := strings.HasPrefix(path, "bench/") || strings.HasPrefix(path, "diagnosis/jobsim/") || strings.HasPrefix(path, "diagnosis/diagnosistest/")
				if !simulated && !slices.Contains(c.others, path) && !strings.Contains(section, "`"+path+"`") {
					t.Errorf("%s names %s.%s, and CONTRIBUTING.md does not lead there (### %s)", path, pkg, name, c.section)
				}
			}
		}
		if n := len(step.FindAllString(section, -1)); n == 0 || n > 6 {
			t.Errorf("CONTRIBUTING.md: ### %s has %d places, want 1 to 6", c.section, n)
		}
	}
	// Every actuator is chosen where the section on actuators says.
	_, section, _ := strings.Cut(string(text), "\n### An actuator\n")
	for _, path := range r.uses["remediation.Action"] {
		pkg := filepath.Base(filepath.Dir(path))
		if !strings.HasPrefix(path, "remediation/") || !r.names[pkg+".Actuator"] {
			continue
		}
		chosen := slices.ContainsFunc(slices.Concat(r.uses[pkg+".Actuator"], r.uses[pkg+".New"]), func(p string) bool {
			return strings.Contains(section, "`"+filepath.Dir(p)+"`")
		})
		if !chosen {
			t.Errorf("%s is no actuator that one of the packages of CONTRIBUTING.md (### An actuator) chooses", filepath.Dir(path))
		}
	}
}

// TestRefusals: the table of who hears of a refusal is what names has, and its tests are there.
func TestRefusals(t *testing.T) {
	text, err := os.ReadFile("design/trust.md")
	if err != nil {
		t.Fatal(err)
	}
	if want := names.RefusalTable(); !strings.Contains(string(text), want) {
		t.Errorf("docs/design/trust.md lacks the table of names.Refusals:\n%s", want)
	}
	attacks, err := os.ReadFile("../cmd/lockstep/attack_test.go")
	if err != nil {
		t.Fatal(err)
	}
	r := load(t)
	for _, x := range names.Refusals() {
		name, part, _ := strings.Cut(x.Test, "/")
		if !slices.Contains(r.tests, name) || part != "" && !bytes.Contains(attacks, []byte(`{"`+part+`", `)) {
			t.Errorf("there is no test %s", x.Test)
		}
	}
}
