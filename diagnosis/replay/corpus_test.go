package replay_test

import (
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/lockstep-ccl/lockstep/diagnosis"
	"github.com/lockstep-ccl/lockstep/diagnosis/replay"
	"github.com/lockstep-ccl/lockstep/diagnosis/replay/replaytest"
)

var update = flag.Bool("update", false, "rewrite what is expected of recordings")

// TestCorpus judges recordings of real jobs: each testdata/NAME.evidence has the verdicts
// that are right beside it, in NAME.verdicts, a line each: class and first culprit of what
// was confirmed. A recording is an incident's file, as a master has written it; -update
// rewrites what was told in it by what this engine tells, and the verdicts: look at them. What
// is not told and should be has a name that ends in _missed.
func TestCorpus(t *testing.T) {
	paths, err := filepath.Glob("testdata/*" + replay.Suffix)
	if err != nil || len(paths) == 0 {
		t.Fatal("no recordings", err)
	}
	for _, path := range paths {
		name := strings.TrimSuffix(path, replay.Suffix)
		t.Run(filepath.Base(name), func(t *testing.T) {
			if *update {
				anew, err := replaytest.Retell(read(t, path))
				if err != nil {
					t.Fatal(err)
				}
				if err := os.WriteFile(path, anew, 0o644); err != nil {
					t.Fatal(err)
				}
			}
			res := play(t, read(t, path), replay.PlayOptions{})
			if res.Damage.Places > 0 || res.Passes == 0 {
				t.Errorf("%d passes, damage %+v", res.Passes, res.Damage)
			}
			var lines []string
			for _, e := range res.Replayed {
				if e.Level == diagnosis.Confirmed {
					lines = append(lines, fmt.Sprintf("%s: %s\n", e.Verdict.Class, replay.CulpritText(e.Verdict.Culprits[0])))
				}
			}
			slices.Sort(lines)
			got := strings.Join(slices.Compact(lines), "")
			if *update {
				if err := os.WriteFile(name+".verdicts", []byte(got), 0o644); err != nil {
					t.Fatal(err)
				}
			}
			if want := string(read(t, name+".verdicts")); got != want {
				t.Errorf("confirmed:\n%swant:\n%s", got, want)
			}
		})
	}
}
