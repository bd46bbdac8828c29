package zoo_test

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/lockstep-ccl/lockstep/bench/zoo"
)

func TestReadLosses(t *testing.T) {
	path := zoo.LossLog(t.TempDir(), 3)
	if l, next, err := zoo.ReadLosses(path, 0); l != nil || next != 0 || err != nil {
		t.Fatalf("no log yet: %v, %d, %v", l, next, err)
	}
	write := func(s string) {
		t.Helper()
		f, err := os.OpenFile(path, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := f.WriteString(s); err != nil {
			t.Fatal(err)
		}
		f.Close()
	}
	write("1 3f800000 100\n2 40")
	l, next, err := zoo.ReadLosses(path, 0)
	if err != nil || len(l) != 1 || l[0] != (zoo.Loss{Step: 1, Bits: 0x3f800000, At: 100}) {
		t.Fatalf("%v, %v", l, err)
	}
	write("000000 200\n")
	l, next, err = zoo.ReadLosses(path, next)
	if err != nil || len(l) != 1 || l[0] != (zoo.Loss{Step: 2, Bits: 0x40000000, At: 200}) {
		t.Fatalf("the rest of a line: %v, %v", l, err)
	}
	write("three 0 300\n")
	if _, _, err := zoo.ReadLosses(path, next); err == nil {
		t.Fatal("a line that is no loss was read")
	}
}

func FuzzReadLosses(f *testing.F) {
	f.Add([]byte("1 3f800000 100\n2 40000000 200\n"))
	f.Add([]byte("x\n"))
	f.Fuzz(func(t *testing.T, b []byte) {
		path := filepath.Join(t.TempDir(), "loss")
		if err := os.WriteFile(path, b, 0o600); err != nil {
			t.Fatal(err)
		}
		if _, next, _ := zoo.ReadLosses(path, 0); next > int64(len(b)) {
			t.Fatalf("the next read begins at %d of %d", next, len(b))
		}
	})
}

func TestJobs(t *testing.T) {
	seen := map[string]bool{}
	for _, j := range zoo.Jobs() {
		if seen[j.Name] {
			t.Errorf("two jobs are called %s", j.Name)
		}
		seen[j.Name] = true
		if j.Nodes < 2 || j.Ranks%j.Nodes != 0 {
			t.Errorf("%s: %d ranks on %d nodes: want equal blocks on at least two", j.Name, j.Ranks, j.Nodes)
		}
		if j.Node(j.Ranks-1) != j.Nodes-1 {
			t.Errorf("%s: its last rank is on node %d", j.Name, j.Node(j.Ranks-1))
		}
		if got, err := zoo.Named(j.Name); got != j || err != nil {
			t.Errorf("Named(%s) = %v, %v", j.Name, got, err)
		}
	}
	if _, err := zoo.Named("none such"); err == nil {
		t.Error("a job that is none was found")
	}
}
