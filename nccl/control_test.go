package nccl_test

import (
	"fmt"
	"io"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/lockstep-ccl/lockstep/record"
)

// large is a program whose thread-local variables are larger than the stack of the plugin's thread.
var large = flavour{name: "large", flags: []string{"-DTHREAD_LOCAL=300000"}}

// The agent switches the events while the process runs.
func TestControl(t *testing.T) {
	for _, f := range []flavour{plain, large} {
		t.Run(f.name, func(t *testing.T) { testControl(t, f) })
	}
}

func testControl(t *testing.T, f flavour) {
	t.Helper()
	dir := t.TempDir()
	cmd := command(t, f, dir, nil, "5", "control")
	var out strings.Builder
	cmd.Stdout = &out
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	done := make(chan error, 1)
	go func() { done <- cmd.Wait() }()
	var paths []string
	for deadline := time.Now().Add(time.Minute); len(paths) == 0 && time.Now().Before(deadline); time.Sleep(5 * time.Millisecond) {
		paths, _ = record.List(dir)
	}
	if len(paths) != 1 {
		t.Fatal("no recorder")
	}
	var err error
	for deadline := time.Now().Add(time.Minute); time.Now().Before(deadline); time.Sleep(5 * time.Millisecond) {
		if err = record.SetEvents(paths[0], record.EventsAll); err == nil {
			break
		}
	}
	if err != nil {
		t.Fatal(err)
	}
	if err := <-done; err != nil {
		t.Fatal(err)
	}
	const net = 1<<1 | 1<<2 | 1<<3 | 1<<4 | 1<<6 | 1<<8 | 1<<9 | 1<<10
	const all = net | 1<<7 | 1<<11
	if want := fmt.Sprintf("mask %d\nmask %d\n", net, all); !strings.HasPrefix(out.String(), want) {
		t.Errorf("got %q, want %q", out.String(), want)
	}
	c := recorders(t, dir)[0]
	check(t, c, told{0x10e, "control", 2, "exact"})
	if c.header.EventMask != all {
		t.Errorf("the recorder says mask %x", c.header.EventMask)
	}
}

// Whatever lies in the control file, the plugin takes only what it knows.
func TestHostileControl(t *testing.T) {
	dir := t.TempDir()
	cmd := command(t, plain, dir, nil, "5", "control")
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	first := make([]byte, 64)
	n, err := stdout.Read(first) // it plays: the recorder is there
	if err != nil {
		t.Fatal(err)
	}
	paths, err := record.List(dir)
	if err != nil || len(paths) != 1 {
		t.Fatal(paths, err)
	}
	ctl := record.ControlPath(paths[0])
	good, err := os.ReadFile(ctl)
	if err != nil {
		t.Fatal(err)
	}
	wrong := func(at int, b byte) []byte {
		bad := append([]byte(nil), good...)
		bad[at] = b
		return bad
	}
	all := wrong(16, byte(record.EventsAll))
	for _, bad := range [][]byte{nil, good[:20], wrong(0, 'X'), wrong(8, 9), wrong(16, 200), wrong(23, 0x80)} {
		if err := os.WriteFile(ctl, bad, 0o600); err != nil {
			t.Fatal(err)
		}
		time.Sleep(300 * time.Millisecond) // it looks every 250 ms; one that is missed is no failure
	}
	if err := os.WriteFile(ctl, all, 0o600); err != nil {
		t.Fatal(err)
	}
	rest, err := io.ReadAll(stdout)
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Wait(); err != nil {
		t.Fatal(err)
	}
	if got := string(first[:n]) + string(rest); strings.Count(got, "mask ") != 2 || !strings.Contains(got, "mask 4062\n") {
		t.Errorf("want all events in the end: %q", got)
	}
}
