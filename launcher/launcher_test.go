package launcher_test

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/lockstep-ccl/lockstep/launcher"
)

// environment is what a launcher sets, as recorded from its documentation, and who a process is by it.
type environment struct {
	Name, Env string
	Want      launcher.Identity
}

// environments are read from a file: the NCCL plugin's tests read it, too.
func environments(t *testing.T) (all []environment) {
	t.Helper()
	b, err := os.ReadFile("testdata/environments.json")
	if err == nil {
		err = json.Unmarshal(b, &all)
	}
	if err != nil || len(all) == 0 {
		t.Fatalf("no environments: %v", err)
	}
	return all
}

func fields(env string) map[string]string {
	m := map[string]string{}
	for _, kv := range strings.Fields(env) {
		k, v, _ := strings.Cut(kv, "=")
		m[k] = v
	}
	return m
}

func TestDetect(t *testing.T) {
	host, _ := os.Hostname()
	for _, e := range environments(t) {
		m := fields(e.Env)
		got, err := launcher.Detect(func(k string) (string, bool) { v, ok := m[k]; return v, ok })
		if e.Want.Node == "" {
			e.Want.Node = host
		}
		if err != nil || got != e.Want {
			t.Errorf("%s: %+v, %v; want %+v", e.Name, got, err, e.Want)
		}
	}
}

func TestDetectErrors(t *testing.T) {
	for _, env := range []string{"RANK=x WORLD_SIZE=2", "RANK=-1 WORLD_SIZE=2", "RANK=2 WORLD_SIZE=2", "RANK=0 WORLD_SIZE=99999999999", "SLURM_STEP_ID=0 SLURM_PROCID=0 SLURM_NTASKS=2(x4)"} {
		m := fields(env)
		got, err := launcher.Detect(func(k string) (string, bool) { v, ok := m[k]; return v, ok })
		if !errors.Is(err, launcher.ErrVariable) {
			t.Errorf("%s: %+v, %v", env, got, err)
		}
	}
}

// C and Python read the same of each environment.
func TestLanguages(t *testing.T) {
	host, _ := os.Hostname()
	var in, want string
	for _, e := range environments(t) {
		w := e.Want
		if w.Rank < 0 {
			w.Rank, w.World = 0, 1
		}
		if w.Job == "" {
			w.Job = "job"
		}
		if w.Node == "" {
			w.Node = host
		}
		in += e.Env + "\n"
		want += fmt.Sprintln(w.Job, w.Node, w.Rank, w.World, w.Local, w.Attempt)
	}
	t.Run("C", func(t *testing.T) {
		cc, err := exec.LookPath("cc")
		if err != nil {
			t.Skip("no C compiler: cc is not in PATH")
		}
		bin := filepath.Join(t.TempDir(), "whoami")
		if out, err := exec.Command(cc, "-std=c11", "-Wall", "-Wextra", "-Werror", "-I../marks/c", "-o", bin, "testdata/whoami.c").CombinedOutput(); err != nil {
			t.Fatalf("cc: %v\n%s", err, out)
		}
		got := ""
		for _, e := range environments(t) {
			cmd := exec.Command(bin)
			cmd.Env = strings.Fields(e.Env)
			out, err := cmd.Output()
			if err != nil {
				t.Fatal(err)
			}
			got += string(out)
		}
		if got != want {
			t.Errorf("C says\n%s, want\n%s", got, want)
		}
	})
	t.Run("Python", func(t *testing.T) {
		py, err := exec.LookPath("python3")
		if err != nil {
			t.Skip("no Python: python3 is not in PATH")
		}
		cmd := exec.Command(py, "testdata/whoami.py")
		cmd.Env = append(os.Environ(), "PYTHONPATH=../marks/python", "PYTHONDONTWRITEBYTECODE=1")
		cmd.Stdin = strings.NewReader(in)
		if out, err := cmd.Output(); err != nil || string(out) != want {
			t.Errorf("Python says\n%s%v, want\n%s", out, err, want)
		}
	})
}

func FuzzLabel(f *testing.F) {
	f.Add("Train_Me")
	f.Fuzz(func(t *testing.T, s string) {
		l := launcher.Label(s)
		if len(l) > 63 || strings.HasPrefix(l, "-") || strings.HasSuffix(l, "-") || launcher.Label(l) != l {
			t.Errorf("%q becomes %q", s, l)
		}
	})
}
