package docs

import (
	"errors"
	"go/ast"
	"go/parser"
	"go/token"
	"go/types"
	"maps"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// TestNoCircles: the files of the data path's upper packages have an order in which each names
// only what later ones declare. A method called across a circle of files is how a package
// becomes one that has to be read whole. With -v it counts all packages.
func TestNoCircles(t *testing.T) {
	r := load(t)
	held := []string{"ccl", "ccl/internal/executor", "ccl/internal/failure"}
	dirs := held
	if testing.Verbose() {
		dirs = slices.Sorted(maps.Keys(r.packages))
	}
	total := [4]int{}
	for _, dir := range dirs {
		arrows := fileArrows(t, r.packages[dir])
		count, up, largest := tally(arrows)
		total[0], total[1], total[2], total[3] = total[0]+1, total[1]+count, total[2]+up, max(total[3], largest)
		t.Logf("%s: %d files, %d arrows, %d upward, %d files in the largest circle", dir, len(r.packages[dir]), count, up, largest)
		if slices.Contains(held, dir) && up > 0 {
			t.Errorf("%s: %s", dir, strings.Join(circle(arrows), " → "))
		}
	}
	t.Logf("%d packages: %d arrows, %d upward, %d files in the largest circle", total[0], total[1], total[2], total[3])
}

// tally counts arrows, those that no order of the files is without, found greedily, and the
// files of the largest circle.
func tally(arrows map[string][]string) (count, up, largest int) {
	reach := map[string]map[string]bool{}
	for f, to := range arrows {
		count += len(to)
		seen, todo := map[string]bool{}, slices.Clone(to)
		for len(todo) > 0 {
			f := todo[0]
			if todo = todo[1:]; !seen[f] {
				seen[f] = true
				todo = append(todo, arrows[f]...)
			}
		}
		reach[f] = seen
	}
	left := map[string]bool{}
	for f := range arrows {
		n := 0
		for g := range reach[f] {
			if reach[g][f] {
				n++
			}
		}
		if n > 1 {
			left[f] = true
		}
		largest = max(largest, n)
	}
	for len(left) > 0 { // next comes the file that the fewest of the others point at
		best, least := "", -1
		for _, f := range slices.Sorted(maps.Keys(left)) {
			in := 0
			for g := range left {
				if g != f && slices.Contains(arrows[g], f) {
					in++
				}
			}
			if least < 0 || in < least {
				best, least = f, in
			}
		}
		up += least
		delete(left, best)
	}
	return count, up, largest
}

// fileArrows are, by file, the files that declare what it names. Imports are not read: what
// comes from them has no file here.
func fileArrows(t *testing.T, paths []string) map[string][]string {
	t.Helper()
	fset := token.NewFileSet()
	var files []*ast.File
	for _, path := range paths {
		f, err := parser.ParseFile(fset, filepath.Join("..", path), nil, parser.SkipObjectResolution)
		if err != nil {
			t.Fatal(err)
		}
		files = append(files, f)
	}
	info := &types.Info{Uses: map[*ast.Ident]types.Object{}}
	conf := types.Config{Importer: none{}, Error: func(error) {}} // its errors are what comes from imports
	pkg, _ := conf.Check("p", fset, files, info)
	arrows := map[string][]string{}
	for id, o := range info.Uses {
		if o.Pkg() != pkg || !o.Pos().IsValid() {
			continue
		}
		from, to := filepath.Base(fset.Position(id.Pos()).Filename), filepath.Base(fset.Position(o.Pos()).Filename)
		if from != to && !slices.Contains(arrows[from], to) {
			arrows[from] = append(arrows[from], to)
		}
	}
	for _, to := range arrows {
		slices.Sort(to)
	}
	return arrows
}

// none is an importer that finds nothing.
type none struct{}

func (none) Import(string) (*types.Package, error) { return nil, errors.New("not read") }

// circle is a way along arrows back to where it began, nil when there is none.
func circle(arrows map[string][]string) []string {
	done := map[string]bool{}
	var path []string
	var visit func(f string) []string
	visit = func(f string) []string {
		if i := slices.Index(path, f); i >= 0 {
			return append(slices.Clone(path[i:]), f)
		}
		if done[f] {
			return nil
		}
		path = append(path, f)
		for _, to := range arrows[f] {
			if c := visit(to); c != nil {
				return c
			}
		}
		path, done[f] = path[:len(path)-1], true
		return nil
	}
	for f := range arrows {
		if c := visit(f); c != nil {
			return c
		}
	}
	return nil
}
