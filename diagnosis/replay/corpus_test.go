package replay_test

import (
	"bytes"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/lockstep-ccl/lockstep/diagnosis"
	"github.com/lockstep-ccl/lockstep/diagnosis/replay"
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
				if err := os.WriteFile(path, toldAnew(t, read(t, path)), 0o644); err != nil {
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

// toldAnew is a recording of the same evidence by this engine.
func toldAnew(t *testing.T, file []byte) []byte {
	r, err := replay.NewReader(bytes.NewReader(file), replay.Limits{})
	if err != nil {
		t.Fatal(err)
	}
	var out bytes.Buffer
	var w *replay.Writer
	var engine *diagnosis.Engine
	var run, segment uint64
	for {
		p, err := r.Next()
		if errors.Is(err, io.EOF) {
			return out.Bytes()
		}
		if err != nil {
			t.Fatal(err)
		}
		if engine == nil || p.Header.Run != run {
			engine = diagnosis.New(p.Header.Config)
		}
		switch {
		case w == nil:
			w, err = replay.NewWriter(&out, *p.Header)
		case p.Header.Run != run || p.Header.Segment != segment:
			err = w.Segment(&out, *p.Header)
		}
		run, segment = p.Header.Run, p.Header.Segment
		for _, m := range p.Marks {
			err = errors.Join(err, w.Mark(m))
		}
		if err = errors.Join(err, w.Write(p.Number, p.Evidence, engine.Diagnose(p.Evidence))); err != nil {
			t.Fatal(err)
		}
	}
}
