package roots

import (
	"testing"

	"github.com/lockstep-ccl/lockstep/record"
)

var key = Key{Comm: 7, Coll: record.AllReduce, Seq: 3}

func TestCoversAllParts(t *testing.T) {
	var g Gather
	g.Add(key, Part{Rank: 2, Size: 4, First: 100, Last: 900, Err: 5, From: 1}, 0)
	g.Add(key, Part{Rank: 3, Size: 4, First: 150, Last: 800, Err: 5, From: 1}, 0)
	if due := g.Due(1); due != nil {
		t.Fatalf("%v is due while two ranks are missing", due)
	}
	g.Add(key, Part{Rank: 1, Size: 4, First: 200, Last: 500, Err: 3, From: 8}, 1)
	g.Add(key, Part{Rank: 0, Size: 4, First: 200, Last: 1000, Err: 3, From: 9}, 1)
	due := g.Due(1)
	if want := (Root{key, 100, 1000, 5, 4, false, 9}); len(due) != 1 || due[0] != want {
		t.Fatalf("due %+v, want %+v", due, want)
	}
	if due = g.Due(1 << 50); due != nil {
		t.Fatalf("%v came twice", due)
	}
}

// A node that has not been told of the job's clock may be off by anything, so the whole is no
// time of the job's clock.
func TestOnePartByItsNodesClock(t *testing.T) {
	var g Gather
	g.Add(key, Part{Rank: 0, Size: 2, First: 100, Last: 900, Err: 5}, 0)
	g.Add(key, Part{Rank: 1, Size: 2, First: 50_000_100, Last: 50_000_900, NodeClock: true}, 0)
	due := g.Due(1)
	if len(due) != 1 || !due[0].NodeClock || due[0].First != 100 || due[0].Last != 50_000_900 {
		t.Fatalf("due %+v", due)
	}
}

// What never becomes complete is sent after a while without news, and at the latest after Most.
func TestWaitsForNobodyForLong(t *testing.T) {
	var g Gather
	g.Add(key, Part{Size: 80, First: 1, Last: 2}, 0)
	if due := g.Due(Quiet.Nanoseconds() - 1); due != nil {
		t.Fatal("too early")
	}
	now := int64(0)
	for ; now < Most.Nanoseconds(); now += Quiet.Nanoseconds() / 2 {
		g.Add(key, Part{First: 1, Last: now}, now)
		if due := g.Due(now); due != nil {
			t.Fatalf("due at %d", now)
		}
	}
	if due := g.Due(now); len(due) != 1 {
		t.Fatalf("%v after %d ns", due, now)
	}
}

// Of a collective that stands out on one rank the others are asked, once.
func TestAsksOnce(t *testing.T) {
	var g Gather
	if g.Add(key, Part{Size: 4}, 0) {
		t.Error("asks for a healthy collective")
	}
	if !g.Add(key, Part{Size: 4, Anomalous: true}, 0) || g.Add(key, Part{Size: 4, Anomalous: true}, 0) {
		t.Error("want one question")
	}
	alone := key
	alone.Seq++
	g.Add(alone, Part{Size: 2}, 0)
	if g.Add(alone, Part{Size: 2, Anomalous: true}, 0) {
		t.Error("asks though all have told")
	}
}

func TestBounded(t *testing.T) {
	var g Gather
	for i := range uint64(Limit + 10) {
		g.Add(Key{Seq: i}, Part{}, 0)
	}
	if len(g.pending) != Limit || g.Dropped() != 10 {
		t.Errorf("%d kept, %d dropped", len(g.pending), g.Dropped())
	}
}
