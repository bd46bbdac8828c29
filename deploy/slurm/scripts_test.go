// Package slurm_test runs Slurm's scripts as slurmd would, and looks at the systemd units.
package slurm_test

import (
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// settings writes a settings file, and commands that stand in for real ones and note their calls.
func settings(t *testing.T, lines string, commands map[string]string) (env []string, calls func() string) {
	t.Helper()
	dir := t.TempDir()
	log := filepath.Join(dir, "calls")
	for name, body := range commands {
		script := fmt.Sprintf("#!/bin/sh\necho \"%s $*\" >>%s\n%s\n", name, log, body)
		if err := os.WriteFile(filepath.Join(dir, name), []byte(script), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	file := filepath.Join(dir, "slurm.env")
	if err := os.WriteFile(file, []byte("PATH="+dir+":$PATH LOG="+dir+"\n"+lines), 0o644); err != nil {
		t.Fatal(err)
	}
	return append(os.Environ(), "LOCKSTEP_SLURM_ENV="+file, "SLURM_JOB_ID=77", "SLURMD_NODENAME=n3"), func() string {
		b, _ := os.ReadFile(log)
		return string(b)
	}
}

func TestProlog(t *testing.T) {
	for _, c := range []struct {
		name, set, lockstep string
		fails               bool
		calls               string
	}{
		{"off", "", "exit 3", false, ""},
		{"good", "PREFLIGHT='--ranks 8'", "exit 0", false, "lockstep preflight --ranks 8\n"},
		{"bad", "PREFLIGHT='--ranks 8'", "echo 'bad: GPU 3'; exit 3", true, "lockstep preflight --ranks 8\n"},
		{"could not measure", "PREFLIGHT='--ranks 8'", "exit 1", false, "lockstep preflight --ranks 8\n"},
		{"wrong command line", "PREFLIGHT='--rank'", "exit 2", false, "lockstep preflight --rank\n"},
		// The limit leaves a busy machine the time to note the call.
		{"hangs", "PREFLIGHT=-n2 PREFLIGHT_LIMIT=5", "exec sleep 60", false, "lockstep preflight -n2\n"},
	} {
		t.Run(c.name, func(t *testing.T) {
			cmd := exec.Command("./prolog")
			var calls func() string
			cmd.Env, calls = settings(t, c.set, map[string]string{"lockstep": c.lockstep})
			out, err := cmd.CombinedOutput()
			if (err != nil) != c.fails || calls() != c.calls {
				t.Errorf("%v: %s; calls %q", err, out, calls())
			}
			if c.fails && !strings.Contains(string(out), "bad: GPU 3") {
				t.Errorf("does not say why: %s", out)
			}
		})
	}
}

func TestHealth(t *testing.T) {
	for _, c := range []struct {
		name, metrics, state, calls string
	}{
		{"healthy", "lockstep_gpu_up{gpu=\"0\"} 1\n", "idle", ""},
		{"no agent", "", "idle", ""},
		{"off the bus", "# HELP lockstep_gpu_up 0\nlockstep_gpu_up{gpu=\"0\"} 1\nlockstep_gpu_up{gpu=\"3\"} 0\n", "allocated", "state=drain reason=lockstep agent: GPU has fallen off the bus of GPU 3"},
		{"driver", "lockstep_gpu_driver_unresponsive 1\n", "mixed", "the GPU driver does not answer"},
		{"drained by a person", "lockstep_gpu_driver_unresponsive 1\n", "drained", ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
				if c.metrics == "" {
					w.WriteHeader(http.StatusServiceUnavailable)
				}
				fmt.Fprint(w, c.metrics)
			}))
			defer srv.Close()
			if _, err := exec.LookPath("curl"); err != nil {
				t.Skip("no curl")
			}
			cmd := exec.Command("./health")
			var calls func() string
			cmd.Env, calls = settings(t, "AGENT="+srv.URL, map[string]string{"scontrol": "", "sinfo": "echo " + c.state})
			if out, err := cmd.CombinedOutput(); err != nil {
				t.Fatalf("%v: %s", err, out)
			}
			drained := ""
			for line := range strings.Lines(calls()) {
				if strings.HasPrefix(line, "scontrol") {
					drained = line
				}
			}
			if c.calls == "" && drained != "" || !strings.Contains(drained, c.calls) || c.calls != "" && !strings.Contains(drained, "nodename=n3") {
				t.Errorf("calls %q", calls())
			}
		})
	}
}

// The epilog keeps this job's recorders, as their user, and follows nobody's links.
func TestEpilog(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("the epilog runs as root")
	}
	const uid = 65534
	// Below nobody's own directory, as in /dev/shm.
	shm, err := os.MkdirTemp("", "shm")
	if err != nil {
		t.Fatal(err)
	}
	defer os.RemoveAll(shm)
	os.Chmod(shm, 0o1777)
	kept := filepath.Join(shm, "kept")
	from := filepath.Join(shm, fmt.Sprint("lockstep-", uid))
	secret := filepath.Join(shm, "secret")
	if err := os.WriteFile(secret, []byte("root's"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Mkdir(from, 0o700); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"slurm-77.0.4194000.rec", "slurm-77.0.4194000.ctl", "slurm-78.0.4194001.rec", fmt.Sprintf("slurm-77.1.%d.rec", os.Getpid())} {
		if err := os.WriteFile(filepath.Join(from, name), []byte("record"), 0o600); err != nil {
			t.Fatal(err)
		}
		os.Chown(filepath.Join(from, name), uid, uid)
	}
	if err := os.Symlink(secret, filepath.Join(from, "slurm-77.2.4194002.rec")); err != nil {
		t.Fatal(err)
	}
	os.Chown(from, uid, uid)
	run := func() {
		t.Helper()
		cmd := exec.Command("./epilog")
		cmd.Env, _ = settings(t, "RECORDERS="+kept, nil)
		cmd.Env = append(cmd.Env, fmt.Sprint("SLURM_JOB_UID=", uid), "LOCKSTEP_SHM="+shm)
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Fatalf("%v: %s", err, out)
		}
	}
	run()
	list := func(dir string) (names []string) {
		entries, _ := os.ReadDir(dir)
		for _, e := range entries {
			names = append(names, e.Name())
		}
		return names
	}
	if got, want := fmt.Sprint(list(filepath.Join(kept, "77.n3"))), "[slurm-77.0.4194000.ctl slurm-77.0.4194000.rec]"; got != want {
		t.Errorf("kept %s, want %s", got, want)
	}
	if left := list(from); len(left) != 3 {
		t.Errorf("left %v: the other job's, the living process's and the link", left)
	}
	run() // again: nothing more, no failure
	if st, err := os.Stat(filepath.Join(kept, "77.n3")); err != nil || st.Mode().Perm() != 0o700 {
		t.Errorf("%v, %v", st, err)
	}
}

// The units are understood by systemd, and are as closed as they say.
func TestUnits(t *testing.T) {
	analyze, err := exec.LookPath("systemd-analyze")
	if err != nil {
		t.Skip("no systemd-analyze")
	}
	units, err := filepath.Glob("../systemd/*.service")
	if err != nil || len(units) != 3 {
		t.Fatalf("%v, %v", units, err)
	}
	dir := t.TempDir()
	for _, u := range units {
		b, err := os.ReadFile(u)
		if err != nil {
			t.Fatal(err)
		}
		name := strings.Replace(filepath.Base(u), "@.", "@llm.", 1)
		file := filepath.Join(dir, name)
		if err := os.WriteFile(file, []byte(strings.ReplaceAll(string(b), "/usr/bin/lockstep", "/bin/true")), 0o644); err != nil {
			t.Fatal(err)
		}
		if out, err := exec.Command(analyze, "verify", "--man=no", "--recursive-errors=no", file).CombinedOutput(); err != nil || strings.Contains(string(out), name+":") {
			t.Errorf("%s: %v\n%s", u, err, out)
		}
		// Tenths of points of exposure; a unit that says nothing has 96.
		if out, err := exec.Command(analyze, "security", "--offline=true", "--no-pager", "--threshold=45", file).CombinedOutput(); err != nil {
			t.Errorf("%s is more open than 4.5: %v\n%s", u, err, out)
		}
	}
}
