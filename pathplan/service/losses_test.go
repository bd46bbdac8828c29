package service

import (
	"bytes"
	"fmt"
	"log/slog"
	"math"
	"strings"
	"testing"
	"time"

	"github.com/lockstep-ccl/lockstep/ccl"
	"github.com/lockstep-ccl/lockstep/pathplan"
	"github.com/lockstep-ccl/lockstep/pathplan/service/planpb"
)

// TestSendersLose: a job whose senders lose on a link leaves it, and another job that loses nothing
// stays; the link is shown, and told of once.
func TestSendersLose(t *testing.T) {
	var log bytes.Buffer
	s, err := New(Options{Fabric: newFabric(4, 4, 4), Listen: "127.0.0.1:0", Log: slog.New(slog.NewTextHandler(&log, nil))})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	jobs := map[string]*stream{}
	for _, job := range []string{"a", "b"} {
		st := &stream{tenant: job, job: job, out: make(chan *planpb.Paths, 10000), conns: map[string]bool{}, loads: map[string][]carried{}}
		need := &planpb.Need{}
		for h := range 16 {
			for far := 4; far < 16; far += 4 { // to each other leaf, so that one of a path's links can be told from the other
				r := request(fmt.Sprintf("%d-%d", h, far), fmt.Sprintf("10.3.%d.1", h), fmt.Sprintf("10.3.%d.1", (h+far)%16))
				r.Lanes = 4
				need.Requests = append(need.Requests, r)
			}
		}
		if err := s.take(st, need); err != nil {
			t.Fatal(err)
		}
		jobs[job] = st
	}
	bad := s.Assignments("a")[0].Path.Up
	on := func(job string) (n int) {
		for _, a := range s.Assignments(job) {
			if a.Path.Up == bad {
				n++
			}
		}
		return n
	}
	was := on("b")
	if on("a") == 0 || was == 0 {
		t.Fatal("nobody takes the link")
	}
	now := time.Now()
	second := func(lost uint32) {
		now = now.Add(time.Second)
		s.mu.Lock()
		for job, st := range jobs {
			var loads []*planpb.Load
			for _, a := range s.planner.Assignments(pathplan.ConnID{Tenant: job, Job: job}) {
				l := &planpb.Load{Conn: a.Conn.Conn, Lane: uint32(a.Lane), Segments: 500}
				if job == "a" && a.Path.Up == bad {
					l.Lost = lost
				}
				loads = append(loads, l)
			}
			s.lose(now, st, loads)
			if err := s.planner.Renew(now, job, job); err != nil {
				t.Fatal(err)
			}
		}
		s.mu.Unlock()
		s.tick(now)
	}
	seconds := 0
	for ; on("a") > 0 && seconds < 10; seconds++ {
		second(5)
	}
	if on("a") > 0 || on("b") < was {
		t.Errorf("after %d s %d of a's lanes take the link, and %d of b's %d", seconds, on("a"), on("b"), was)
	}
	for _, l := range s.Snapshot(now).Links {
		if l.Suspected != (l.Link == bad) {
			t.Errorf("%s suspected: %v", l.Link, l.Suspected)
		}
		if l.Segments == 0 || (l.Link == bad) != (l.SegmentsLost > l.Segments/300) {
			t.Errorf("%s lost %d of %d", l.Link, l.SegmentsLost, l.Segments)
		}
	}
	for range 15 {
		second(0)
	}
	for _, l := range s.Snapshot(now).Links {
		if l.Suspected {
			t.Errorf("%s is still suspected", l.Link)
		}
	}
	if n := strings.Count(log.String(), "senders lose segments"); n != 1 || !strings.Contains(log.String(), bad.String()) {
		t.Errorf("told of %d times:\n%s", n, log.String())
	}
}

// TestLossesWrap: what lanes have sent and lost is told as the difference of counters that wrap; segments
// that were sent again and turn out to have come are not below nothing.
func TestLossesWrap(t *testing.T) {
	now := time.Now()
	before := []ccl.LaneState{{Port: 1, Segments: math.MaxUint32 - 9, Lost: 7}, {Port: 2, Segments: 5, Lost: 3}}
	p := &path{id: "c", on: make([]hops, 2), given: []uint16{1, 2}, carried: before, told: now.Add(-loadEvery)}
	got := p.loads(now, []ccl.LaneState{{Port: 1, Segments: 90, Lost: 9}, {Port: 2, Segments: 25, Lost: 2}})
	if len(got) != 2 || got[0].GetSegments() != 100 || got[0].GetLost() != 2 || got[1].GetSegments() != 20 || got[1].GetLost() != 0 {
		t.Errorf("told %v", got)
	}
}
