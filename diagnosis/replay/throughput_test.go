package replay_test

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"slices"
	"testing"

	"github.com/lockstep-ccl/lockstep/diagnosis"
	"github.com/lockstep-ccl/lockstep/diagnosis/replay"
)

// TestThroughput judges what a job whose rank 1 sends slowly would have shown elsewhere: the
// connection is told where its throughput has fallen, which way it is slow only where clocks
// tell it, and neither where something else explains it.
func TestThroughput(t *testing.T) {
	const there, back = "rank 1 → rank 0", "rank 0 → rank 1"
	for name, test := range map[string]struct {
		change func(*diagnosis.Evidence)
		want   []string
		either bool // which of them cannot be told
	}{
		"as it was": {func(*diagnosis.Evidence) {}, []string{there}, false},
		"the other way": {func(ev *diagnosis.Evidence) {
			for i := range ev.Conns {
				ev.Conns[i].Src, ev.Conns[i].Dst = 1-ev.Conns[i].Src, 1-ev.Conns[i].Dst
			}
		}, []string{back}, false},
		"two nodes": {func(ev *diagnosis.Evidence) { apart(ev, 1e6) }, []string{there}, false},
		"two nodes whose clocks are not known well": {func(ev *diagnosis.Evidence) { apart(ev, 20e6) }, []string{back, there}, true},
		"larger operations": {func(ev *diagnosis.Evidence) {
			for i := range ev.Conns {
				ev.Conns[i].BytesPerSec = 3e9
				ev.Conns[i].RxWaitingSince = ev.Conns[i].LastPost // and no byte is on its way for long
			}
		}, nil, false},
		"short of CPU": {func(ev *diagnosis.Evidence) {
			for i := range ev.Ranks {
				ev.Ranks[i].Starved = 0.5
			}
		}, nil, false},
		"all pairs alike": {twice, nil, false},
	} {
		t.Run(name, func(t *testing.T) {
			var got []string
			either := false
			for _, v := range judged(t, "testdata/nccl_throttle"+replay.Suffix, test.change) {
				if v.Class != diagnosis.CommunicationSlow {
					t.Errorf("told: %v %v", v.Class, v.Culprits)
				}
				for _, k := range v.Culprits {
					got = append(got, replay.CulpritText(k))
				}
				either = v.Undetermined != ""
			}
			slices.Sort(got)
			if got = slices.Compact(got); fmt.Sprint(got) != fmt.Sprint(test.want) || either != test.either {
				t.Errorf("told: %v, undetermined %v, want %v, %v", got, either, test.want, test.either)
			}
		})
	}
}

// judged is what an engine says of a recording's evidence, changed.
func judged(t *testing.T, path string, change func(*diagnosis.Evidence)) (told []diagnosis.Verdict) {
	r, err := replay.NewReader(bytes.NewReader(read(t, path)), replay.Limits{})
	if err != nil {
		t.Fatal(err)
	}
	engine := diagnosis.New(r.Header().Config)
	for {
		p, err := r.Next()
		if errors.Is(err, io.EOF) {
			return told
		}
		if err != nil {
			t.Fatal(err)
		}
		ev := *p.Evidence
		ev.Ranks, ev.Conns, ev.Nodes, ev.Comms = slices.Clone(ev.Ranks), slices.Clone(ev.Conns), slices.Clone(ev.Nodes), slices.Clone(ev.Comms)
		for i := range ev.Comms {
			ev.Comms[i].Members = slices.Clone(ev.Comms[i].Members)
			ev.Comms[i].Rev, ev.Comms[i].ConnRev = 0, 0
		}
		change(&ev)
		told = append(told, engine.Diagnose(&ev)...)
	}
}

// apart puts rank 1 on a node of its own.
func apart(ev *diagnosis.Evidence, wrong int64) {
	if len(ev.Ranks) < 2 || len(ev.Nodes) == 0 {
		return
	}
	ev.Nodes[0].MapError = wrong
	ev.Nodes = append(ev.Nodes, ev.Nodes[0])
	ev.Nodes[1].Name += "-other"
	ev.Ranks[1].Node = 1
}

// twice adds ranks 2 and 3, which do what 0 and 1 do.
func twice(ev *diagnosis.Evidence) {
	ev.Ranks = append(ev.Ranks, ev.Ranks...)
	comms := len(ev.Comms)
	for _, c := range ev.Comms[:comms] {
		c.ID, c.Name, c.Members = c.ID+1, c.Name+"-too", slices.Clone(c.Members)
		for i := range c.Members {
			c.Members[i].World += 2
		}
		ev.Comms = append(ev.Comms, c)
	}
	for _, k := range slices.Clone(ev.Conns) {
		k.Comm += int32(comms)
		ev.Conns = append(ev.Conns, k)
	}
}
