package demo

import (
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/lockstep-ccl/lockstep/cmd/lockstep/internal/train"
	"github.com/lockstep-ccl/lockstep/exporters/names"
	"github.com/lockstep-ccl/lockstep/exporters/web"
)

func torchOf(t *testing.T, ranks int) *torchSite {
	c := &cluster{dir: t.TempDir(), shape: shape{dp: ranks, tp: 1, pp: 1, nodes: 1, agents: 1}}
	for _, d := range []string{"train", "faults"} {
		if err := os.Mkdir(filepath.Join(c.dir, d), 0o700); err != nil {
			t.Fatal(err)
		}
	}
	s := &torchSite{cluster: c}
	c.site, c.program = s, s
	return s
}

// TestTorchFaults: each fault of PyTorch ranks has a verdict, and culprits that are right: of two ranks that differ
// nobody can tell which is wrong, of more the odd one out.
func TestTorchFaults(t *testing.T) {
	for _, c := range []struct {
		name, class string
		two, four   []string // right when rank 1 has it
	}{
		{faultStopped, names.ClassNoncommunicationHang, []string{"rank 1"}, []string{"rank 1"}},
		{faultKilled, names.ClassNoncommunicationHang, []string{"rank 1"}, []string{"rank 1"}},
		{names.ClassNoncommunicationHang, names.ClassNoncommunicationHang, []string{"rank 1"}, []string{"rank 1"}},
		{faultSkipped, names.ClassNoncommunicationHang, []string{"rank 0", "rank 1", "rank 0, rank 1", "rank 1, rank 0"}, []string{"rank 1"}},
		{faultSwapped, names.ClassNoncommunicationHang, []string{"rank 0", "rank 1", "rank 0, rank 1", "rank 1, rank 0"}, []string{"rank 1"}},
		{names.ClassNoncommunicationSlow, names.ClassNoncommunicationSlow, []string{"rank 1"}, []string{"rank 1"}},
		{faultSlowGPU, names.ClassNoncommunicationSlow, []string{"rank 1"}, []string{"rank 1"}},
		{names.ClassCommunicationSlow, names.ClassCommunicationSlow, []string{"rank 1 → rank 0"}, []string{"rank 1 → rank 0", "rank 1 → rank 2", "rank 1 → rank 3"}},
	} {
		for ranks, want := range map[int][]string{2: c.two, 4: c.four} {
			f, err := torchOf(t, ranks).choose(c.name, 1, rand.New(rand.NewPCG(1, 1)))
			if err != nil {
				t.Fatal(err)
			}
			for _, got := range []string{"rank 0", "rank 1", "rank 2", "rank 0, rank 1", "rank 1, rank 0", "rank 1 → rank 0", "rank 1 → rank 2", "rank 1 → rank 3", "rank 0 → rank 1"} {
				w := &watcher{f: f, o: outcome{Class: f.Class, GotClass: f.Class, Culprit: f.culprit(), GotCulprit: got, Confirmed: 1, Running: 2}}
				if w.judge(); w.o.right() != slices.Contains(want, got) {
					t.Errorf("%s of %d ranks: culprit %s is judged %q", c.name, ranks, got, w.o.Wrong)
				}
			}
			if f.Class != c.class || !strings.Contains(f.Text, "rank 1") {
				t.Errorf("%s: %s, %q", c.name, f.Class, f.Text)
			}
		}
	}
	if _, err := torchOf(t, 2).choose(names.ClassCommunicationHang, 1, nil); err == nil {
		t.Error("a hang of NVLink is not among them")
	}
	for _, name := range torchFaults() {
		f, err := torchOf(t, 4).choose(name, -1, rand.New(rand.NewPCG(2, 2)))
		if err != nil || f.Rank < 0 || f.Rank > 3 {
			t.Errorf("%s: rank %d, %v", name, f.Rank, err)
		}
	}
}

// TestTorchSteps: a job is as far as it has written losses; an attempt of which no collective has ended is nowhere.
func TestTorchSteps(t *testing.T) {
	s := torchOf(t, 2)
	begun := &web.Status{Communicators: []web.Communicator{{Name: "a"}, {Name: "b", Least: 1}}}
	if n := s.step(begun); n != 0 {
		t.Errorf("%d steps without a file", n)
	}
	if err := os.WriteFile(filepath.Join(s.dir, "train", train.LossLog), []byte("1 0x1.8p+1\n2 0x1.8p+0\n3 0x1"), 0o600); err != nil {
		t.Fatal(err)
	}
	if n := s.step(begun); n != 2 {
		t.Errorf("%d steps, want 2", n)
	}
	if n := s.step(&web.Status{Communicators: []web.Communicator{{Name: "a"}}}); n != 0 {
		t.Errorf("%d steps before any collective", n)
	}
}

// TestTorchOrders: what the program is to break by itself is told by a file for that attempt.
func TestTorchOrders(t *testing.T) {
	s := torchOf(t, 2)
	for name, file := range map[string]string{faultSkipped: "skip", faultSwapped: "swap", faultSlowGPU: "gpu", names.ClassNoncommunicationHang: "loader"} {
		f, err := s.choose(name, 1, nil)
		if err != nil {
			t.Fatal(err)
		}
		if err := s.inject(&f, 3, 0); err != nil {
			t.Fatal(err)
		}
		if _, err := os.Stat(filepath.Join(s.dir, "faults", fmt.Sprintf("rank1.attempt3.%s", file))); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
}
