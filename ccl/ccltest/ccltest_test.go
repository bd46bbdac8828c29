package ccltest

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/lockstep-ccl/lockstep/ccl/internal/transport"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func TestRemote(t *testing.T) {
	path := filepath.Join(t.TempDir(), "s")
	inj := New()
	stop, err := Serve(path, inj)
	if err != nil {
		t.Fatal(err)
	}
	defer stop()
	if fi, err := os.Stat(path); err != nil || fi.Mode().Perm() != 0o600 {
		t.Fatalf("socket %v, %v", fi, err)
	}
	r, err := Dial(path)
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	for _, step := range []struct {
		what string
		do   func() error
		want transport.Fault
	}{
		{"stall", func() error { return r.Stall("dp", 0, 1) }, transport.Fault{Stall: true}},
		{"throttle", func() error { return r.Throttle("dp", 0, 1, 100) }, transport.Fault{BytesPerSecond: 100}},
		{"delay", func() error { return r.Delay("dp", 0, 1, time.Second) }, transport.Fault{Delay: time.Second}},
		{"drop", func() error { return r.Drop("dp", 0, 1) }, transport.Fault{Drop: true}},
		{"clear", r.Clear, transport.Fault{}},
	} {
		if err := step.do(); err != nil || inj.Conn("dp", 0, 1) != step.want {
			t.Errorf("%s: %v; fault is %+v, want %+v", step.what, err, inj.Conn("dp", 0, 1), step.want)
		}
	}
	before := inj.Version()
	if err := r.Stall("", 0, 1); err != nil {
		t.Fatal(err)
	}
	if err := r.Throttle("tp", 0, 1, 5); err != nil {
		t.Fatal(err)
	}
	if err := r.DelayRank(time.Minute); err != nil {
		t.Fatal(err)
	}
	if inj.Version() == before || !inj.Conn("dp", 0, 1).Stall || inj.Conn("tp", 0, 1).BytesPerSecond != 5 || inj.Conn("dp", 1, 0) != (transport.Fault{}) || inj.Entry("dp") != time.Minute {
		t.Errorf("faults are not those that were set: %+v, delay %v", inj.conns, inj.delay)
	}
	if err := r.Throttle("dp", 0, 1, -5); err == nil || !strings.Contains(err.Error(), "must be above 0") {
		t.Errorf("a negative rate: %v", err)
	}
}
