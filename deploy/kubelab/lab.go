package kubelab

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"time"
)

// Lab is a cluster that runs. Its methods end the test when a command fails.
type Lab struct {
	Kubeconfig string
	Shared     string // a folder that all nodes see by this name
	Net, Pods  string // what the addresses of nodes and of pods begin with: 10.88.0, 10.89

	t         testing.TB
	dir, name string // of the scripts, and what its network namespaces and cgroups begin with
}

// Up starts the cluster, with settings of the script up (NODES=6); it is ended with the test.
func Up(t testing.TB, settings ...string) *Lab {
	t.Helper()
	_, file, _, _ := runtime.Caller(0)
	l := &Lab{t: t, dir: filepath.Dir(file)}
	for _, s := range settings {
		k, v, _ := strings.Cut(s, "=")
		t.Setenv(k, v)
	}
	l.Sh(filepath.Join(l.dir, "up"))
	t.Cleanup(func() {
		if out, err := Try(filepath.Join(l.dir, "down")); err != nil {
			t.Logf("down: %v: %s", err, out)
		}
	})
	run := ""
	for line := range strings.FieldsSeq(l.Sh(filepath.Join(l.dir, "env"))) {
		switch k, v, _ := strings.Cut(line, "="); k {
		case "KUBECONFIG":
			l.Kubeconfig = v
		case "KLAB_RUN":
			run, l.Shared = v, filepath.Join(v, "shared")
		case "KLAB":
			l.name = v
		case "KLAB_NET":
			l.Net = v
		case "KLAB_P2":
			l.Pods = v
		}
	}
	t.Setenv("PATH", filepath.Dir(l.Sh("readlink", "-f", filepath.Join(run, "lab/bin/kubectl")))+":"+os.Getenv("PATH"))
	return l
}

// Try runs a command for three minutes at most, and returns what it printed.
func Try(name string, args ...string) (string, error) {
	ctx, cancel := context.WithTimeout(context.Background(), 3*time.Minute)
	defer cancel()
	c := exec.CommandContext(ctx, name, args...)
	c.WaitDelay = 5 * time.Second // a node's processes may keep the pipe
	out, err := c.CombinedOutput()
	if errors.Is(err, exec.ErrWaitDelay) {
		err = nil
	}
	return strings.TrimSpace(string(out)), err
}

// Sh runs a command.
func (l *Lab) Sh(name string, args ...string) string {
	l.t.Helper()
	out, err := Try(name, args...)
	if err != nil {
		l.t.Fatalf("%s %s: %v: %s", name, strings.Join(args, " "), err, out)
	}
	return out
}

// Kubectl runs it as administrator.
func (l *Lab) Kubectl(args ...string) string {
	l.t.Helper()
	return l.Sh("kubectl", append([]string{"--kubeconfig", l.Kubeconfig}, args...)...)
}

// Apply gives kubectl a manifest.
func (l *Lab) Apply(manifest string) {
	l.t.Helper()
	file := filepath.Join(l.t.TempDir(), "manifest.yaml")
	if err := os.WriteFile(file, []byte(manifest), 0o600); err != nil {
		l.t.Fatal(err)
	}
	l.Kubectl("apply", "-f", file)
}

// Node does something to a node: an operation of the script node.
func (l *Lab) Node(op, node string, args ...string) string {
	l.t.Helper()
	return l.Sh(filepath.Join(l.dir, "node"), append([]string{op, node}, args...)...)
}

// TryNode is Node that may fail.
func (l *Lab) TryNode(op, node string) (string, error) {
	return Try(filepath.Join(l.dir, "node"), op, node)
}

// Address is a node's.
func (l *Lab) Address(node string) string {
	var n int
	if _, err := fmt.Sscanf(node, "n%d", &n); err != nil {
		l.t.Fatalf("node %q: %v", node, err)
	}
	return fmt.Sprintf("%s.%d", l.Net, 10+n)
}
