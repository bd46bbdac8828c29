package diagnosis_test

import (
	"fmt"
	"math"
	"slices"
	"testing"

	"github.com/lockstep-ccl/lockstep/diagnosis"
	"github.com/lockstep-ccl/lockstep/record"
	"pgregory.net/rapid"
)

// TestHangAgainstOracle puts idle ranks into random operations of random
// communicators and compares who is blamed with a closure over the definition:
// a rank in an operation waits for every member that has not entered it.
func TestHangAgainstOracle(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		n := rapid.IntRange(2, 8).Draw(t, "ranks")
		j := newJob(n)
		in := make([]int, n) // communicator that a rank is in, -1 for none
		for r := range in {
			in[r] = -1
		}
		var waits [8][8]bool
		for ci := range rapid.IntRange(1, 6).Draw(t, "comms") {
			members := rapid.SliceOfNDistinct(rapid.IntRange(0, n-1), 2, n, rapid.ID[int]).Draw(t, "members")
			c := j.comm(fmt.Sprintf("c%d", ci), members...)
			for i, r := range members {
				if in[r] < 0 && rapid.Bool().Draw(t, "enters") {
					in[r] = ci
					j.enter(c, i, record.AllReduce, 10)
				}
			}
			for i, r := range members {
				for k, q := range members {
					if in[r] == ci && c.Members[i].Open() && !c.Members[k].Open() {
						waits[r][q] = true
					}
				}
			}
		}
		if len(j.ev.Comms) == 0 {
			return
		}
		joined, outside := 0, 0
		for r := range n {
			member := slices.ContainsFunc(j.ev.Comms, func(c diagnosis.Comm) bool {
				return slices.ContainsFunc(c.Members, func(m diagnosis.Member) bool { return m.World == int32(r) })
			})
			if member {
				joined++
				if in[r] < 0 {
					outside++
				}
			}
		}
		for k := range n {
			for a := range n {
				for b := range n {
					waits[a][b] = waits[a][b] || waits[a][k] && waits[k][b]
				}
			}
		}
		idle, circles := map[int32]bool{}, map[int32]bool{}
		for r := range n {
			for q := range n {
				if !waits[r][q] {
					continue
				}
				if in[q] < 0 && 2*outside <= joined {
					idle[int32(q)] = true
				}
				innermost := waits[q][q]
				for x := range n {
					innermost = innermost && (!waits[q][x] || waits[x][q])
				}
				if innermost {
					circles[int32(q)] = true
				}
			}
		}
		got := map[string]map[int32]bool{"idle": {}, "deadlock": {}}
		for _, v := range j.verdicts() {
			if v.Class != diagnosis.NoncommunicationHang {
				continue
			}
			for _, k := range v.Culprits {
				if k.Kind == diagnosis.CulpritNode {
					continue // all of its ranks, which follow
				}
				got[k.Reason][k.Rank] = true
			}
		}
		if fmt.Sprint(got["idle"]) != fmt.Sprint(idle) {
			t.Fatalf("blamed %v, want idle %v", got, idle)
		}
		// Of a circle the odd ones out may be told: some of its ranks at least, and nobody else.
		for q := range got["deadlock"] {
			if !circles[q] {
				t.Fatalf("blamed %v, want deadlock among %v", got, circles)
			}
		}
		for q := range circles {
			told := false
			for r := range got["deadlock"] {
				told = told || r == q || waits[r][q] && waits[q][r]
			}
			if !told {
				t.Fatalf("blamed %v, want one of the circle of %d", got, q)
			}
		}
	})
}

// TestForeignEvidence feeds the engine what no sane master would: it must not panic.
func TestForeignEvidence(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		index := rapid.Int32Range(-2, 5)
		when := rapid.OneOf(rapid.Int64Range(-5, 5), rapid.Int64Range(1e18, 1e18+20e9), rapid.Just(int64(math.MaxInt64)), rapid.Just(int64(math.MinInt64)))
		count := rapid.OneOf(rapid.Uint64Range(0, 8), rapid.Uint64())
		e := diagnosis.New(diagnosis.Config{})
		for range 4 {
			ev := &diagnosis.Evidence{Job: "x", Now: when.Draw(t, "now"), Paused: rapid.IntRange(0, 9).Draw(t, "paused") == 0}
			for range rapid.IntRange(0, 3).Draw(t, "nodes") {
				ev.Nodes = append(ev.Nodes, diagnosis.Node{Name: "n", LastSeen: when.Draw(t, "seen"), Lost: rapid.Bool().Draw(t, "lost"), MapError: when.Draw(t, "error")})
			}
			for range rapid.IntRange(0, 4).Draw(t, "ranks") {
				ev.Ranks = append(ev.Ranks, diagnosis.Rank{
					Node: index.Draw(t, "node"), Attempt: uint32(rapid.IntRange(0, 1).Draw(t, "attempt")), Proc: diagnosis.ProcState(rapid.IntRange(0, 8).Draw(t, "proc")),
					ProcAt: when.Draw(t, "procAt"), CPU: rapid.Float32().Draw(t, "cpu"), Mark: record.MarkCode(rapid.Byte().Draw(t, "mark")),
					MarkAt: when.Draw(t, "markAt"), Step: count.Draw(t, "step"), Xid: uint32(rapid.IntRange(0, 1).Draw(t, "xid")),
				})
			}
			for ci := range rapid.IntRange(0, 3).Draw(t, "comms") {
				c := diagnosis.Comm{ID: uint64(rapid.IntRange(ci, ci+1).Draw(t, "id"))}
				for range rapid.IntRange(0, 4).Draw(t, "members") {
					c.Members = append(c.Members, diagnosis.Member{
						World: index.Draw(t, "world"), State: record.CommState(rapid.IntRange(0, 6).Draw(t, "state")), Coll: record.CollKind(rapid.IntRange(0, 20).Draw(t, "coll")),
						Peer: index.Draw(t, "peer"), Enqueued: count.Draw(t, "enqueued"), Started: count.Draw(t, "started"), Finished: count.Draw(t, "finished"),
						StartedAt: when.Draw(t, "startedAt"), FinishedAt: when.Draw(t, "finishedAt"),
						Ops: count.Draw(t, "ops"), OwnNs: count.Draw(t, "own"), WaitNs: count.Draw(t, "wait"), TransferNs: count.Draw(t, "transfer"), MaxOwnNs: count.Draw(t, "max"),
					})
				}
				ev.Comms = append(ev.Comms, c)
			}
			for range rapid.IntRange(0, 4).Draw(t, "conns") {
				ev.Conns = append(ev.Conns, diagnosis.Conn{
					Comm: index.Draw(t, "comm"), Src: index.Draw(t, "src"), Dst: index.Draw(t, "dst"), Transport: record.Transport(rapid.Byte().Draw(t, "transport")),
					Outstanding: count.Draw(t, "outstanding"), LastPost: when.Draw(t, "post"), LastCompletion: when.Draw(t, "completion"),
					TxBlockedSince: when.Draw(t, "blocked"), RxWaitingSince: when.Draw(t, "waiting"), Windows: count.Draw(t, "windows"), SlowWindows: count.Draw(t, "slow"),
					BytesPerSec: rapid.Float64().Draw(t, "bps"), LatencyNs: rapid.Float64().Draw(t, "latency"), Cause: record.Cause(rapid.Byte().Draw(t, "cause")),
				})
			}
			for range rapid.IntRange(0, 3).Draw(t, "arrivals") {
				ev.Arrivals = append(ev.Arrivals, diagnosis.Arrival{
					Comm: index.Draw(t, "comm"), Coll: record.AllReduce,
					Start: rapid.SliceOfN(when, 0, 5).Draw(t, "start"), End: rapid.SliceOfN(when, 0, 5).Draw(t, "end"),
				})
			}
			for _, v := range e.Diagnose(ev) {
				if v.Key == "" || len(v.Culprits) == 0 || len(v.Culprits) > 8 || len(v.Why) == 0 || len(v.Why) > 8 {
					t.Fatalf("malformed verdict %+v", v)
				}
			}
			for ci := range ev.Comms {
				diagnosis.DelayRatios(ev, ci, nil)
			}
		}
	})
}
