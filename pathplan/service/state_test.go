package service

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/lockstep-ccl/lockstep/pathplan"
	"github.com/lockstep-ccl/lockstep/pathplan/service/planpb"
)

// begin makes a server that does not run, and has a job's connections planned.
func begin(t *testing.T, dir string) *Server {
	t.Helper()
	s, err := New(Options{Fabric: testFabric(), Listen: "127.0.0.1:0", StateDir: dir, Log: quiet})
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func (s *Server) mustPlan(t *testing.T, conn, src, dst string) string {
	t.Helper()
	st := &stream{tenant: "a", job: "a", out: make(chan *planpb.Paths, outgoing), conns: map[string]bool{}, loads: map[string][]carried{}}
	if err := s.take(st, &planpb.Need{Requests: []*planpb.Request{request(conn, src, dst)}}); err != nil {
		t.Fatal(err)
	}
	got := <-st.out
	if len(got.GetAssigned()) != 1 || got.GetAssigned()[0].GetError() != "" {
		t.Fatalf("%v", got)
	}
	return fmt.Sprint(got.GetAssigned()[0].GetLanes())
}

// TestState: a planner that is started again has the leases, paths and bad links that it
// had; with a damaged file, or one of another version, it begins anew.
func TestState(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "state")
	s := begin(t, dir)
	now := time.Now()
	s.mustPlan(t, "x", "10.3.0.1", "10.3.2.1")
	had := s.mustPlan(t, "y", "10.3.1.1", "10.3.3.1")
	if err := s.planner.Release(pathplan.ConnID{Tenant: "a", Job: "a", Conn: "x"}); err != nil {
		t.Fatal(err)
	}
	bad := s.o.Fabric.Topology.Links[len(s.o.Fabric.Topology.Links)-1].Link
	if err := s.planner.SetLink(now, bad, pathplan.LinkState{Loss: 0.01}); err != nil {
		t.Fatal(err)
	}
	s.save()
	if e := s.StateError(); e != "" {
		t.Fatal(e)
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(dir, stateFile)
	if fi, err := os.Stat(file); err != nil || fi.Mode() != 0o600 {
		t.Errorf("%v, %v", fi, err)
	}

	s = begin(t, dir)
	if n := s.Snapshot(now).Jobs; n != 1 {
		t.Errorf("%d jobs have a lease, want 1", n)
	}
	if got := s.mustPlan(t, "y", "10.3.1.1", "10.3.3.1"); got != had {
		t.Errorf("the connection has %s, and had %s", got, had)
	}
	if _, known := s.probing.bad[bad]; !known {
		t.Error("a bad link is not looked at any more")
	}
	if _, err := New(Options{Fabric: testFabric(), Listen: "127.0.0.1:0", StateDir: dir, Log: quiet}); err == nil {
		t.Error("two planners use one state")
	}
	s.Close()

	sound, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	for what, damaged := range map[string][]byte{
		"cut": sound[:len(sound)-1], "another version": append([]byte("LKSPLAN2"), sound[8:]...),
		"a bit": append(bytes.Clone(sound[:len(sound)-1]), sound[len(sound)-1]^1), "empty": nil,
	} {
		if err := os.WriteFile(file, damaged, 0o600); err != nil {
			t.Fatal(err)
		}
		s := begin(t, dir)
		if n := s.Snapshot(now).Jobs; n != 0 {
			t.Errorf("%s: %d jobs have a lease", what, n)
		}
		if s.mustPlan(t, "y", "10.3.1.1", "10.3.3.1") == had {
			t.Error("a planner without state gives the same path: this test shows nothing")
		}
		s.Close()
	}
	if err := os.Chmod(file, 0o666); err != nil {
		t.Fatal(err)
	}
	if _, err := New(Options{Fabric: testFabric(), Listen: "127.0.0.1:0", StateDir: dir, Log: quiet}); err == nil {
		t.Error("a file that others could have written is believed")
	}
}

// TestStateIsSaved: a planner that ends leaves its state.
func TestStateIsSaved(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "state")
	s := begin(t, dir)
	s.mustPlan(t, "x", "10.3.0.1", "10.3.2.1")
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	if err := s.Run(ctx); err != nil {
		t.Fatal(err)
	}
	s = begin(t, dir)
	defer s.Close()
	if n := s.Snapshot(time.Now()).Jobs; n != 1 {
		t.Errorf("%d jobs have a lease, want 1", n)
	}
}

func FuzzState(f *testing.F) {
	f.Add(encodeState([]byte(`{"version":1}`)))
	f.Add([]byte(stateMagic))
	f.Fuzz(func(t *testing.T, b []byte) {
		plan, err := decodeState(b)
		if err == nil && !bytes.Equal(encodeState(plan), b) {
			t.Errorf("%q is read as %q, which is written otherwise", b, plan)
		}
	})
}

// TestSeen: what senders say that lanes carry is summed by link, as long as they say it, and
// decisions are told.
func TestSeen(t *testing.T) {
	var told []Decision
	s, err := New(Options{Fabric: testFabric(), Listen: "127.0.0.1:0", Log: quiet, Decided: func(d Decision) { told = append(told, d) }})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	st := &stream{tenant: "a", job: "a", out: make(chan *planpb.Paths, outgoing), conns: map[string]bool{}, loads: map[string][]carried{}}
	if err := s.take(st, &planpb.Need{Requests: []*planpb.Request{request("x", "10.3.0.1", "10.3.2.1")}, Loads: []*planpb.Load{
		{Conn: "x", Lane: 0, Rate: 1000}, {Conn: "x", Lane: 1, Rate: 500}, {Conn: "x", Lane: 1 << 30, Rate: 1}, {Conn: "y", Rate: 7},
	}}); err != nil {
		t.Fatal(err)
	}
	sum := func(now time.Time) (up, down int64) {
		for _, l := range s.Snapshot(now).Links {
			if l.Up {
				up += l.Measured
			} else {
				down += l.Measured
			}
		}
		return up, down
	}
	now := time.Now()
	if up, down := sum(now); up != 12000 || down != 12000 {
		t.Errorf("%d and %d bit/s up and down, want 12000", up, down)
	}
	if up, down := sum(now.Add(2 * loadFor)); up != 0 || down != 0 {
		t.Errorf("%d and %d bit/s up and down of who says nothing", up, down)
	}
	on := s.Assignments("a")[0].Path.Up
	s.probing.apply(now, map[pathplan.Link]finding{on: {state: pathplan.LinkState{Down: true, Loss: 1}}})
	s.tick(now.Add(time.Second))
	s.probing.tell(now.Add(time.Minute), pathplan.Probe{Over: []pathplan.Link{{From: "host0", To: on.From}, on}, Sent: 100})
	s.probing.apply(now.Add(time.Minute), nil)
	if len(told) != 3 || told[0].Link != on || !told[0].State.Down || len(told[1].Moves) == 0 || told[1].Moves[0].Reason != pathplan.Dead || !told[2].Since.Equal(now) {
		t.Errorf("%+v", told)
	}
	if n := s.Snapshot(now).Moves[pathplan.Dead]; n == 0 {
		t.Error("no move is counted")
	}
}
