package diagnosis_test

import (
	"strings"
	"testing"
	"time"

	"github.com/lockstep-ccl/lockstep/diagnosis"
	"github.com/lockstep-ccl/lockstep/diagnosis/diagnosistest"
)

// NCCL's RAS is heard beside a verdict, and changes none.
func TestSecondOpinion(t *testing.T) {
	const culprit = 5
	rank := func(c *diagnosis.Comm, world int32) int32 {
		for i := range c.Members {
			if c.Members[i].World == world {
				return int32(i)
			}
		}
		return -1
	}
	for _, c := range []struct {
		name string
		ras  func(c *diagnosis.Comm, now int64) diagnosis.RAS
		want string
	}{
		{"agrees", func(c *diagnosis.Comm, now int64) diagnosis.RAS {
			return diagnosis.RAS{At: now, Missing: []diagnosis.RASRank{{Rank: rank(c, culprit), Dead: true}}}
		}, "NCCL's RAS agrees: missing: rank 5 (given up)"},
		{"counts agree", func(c *diagnosis.Comm, now int64) diagnosis.RAS {
			return diagnosis.RAS{At: now, Behind: []diagnosis.RASBehind{{Rank: rank(c, culprit), Coll: "AllReduce", Launched: 7, Most: 8}}, More: true}
		}, "NCCL's RAS agrees: behind: rank 5 has launched 7 AllReduce of 8, and more"},
		{"another", func(c *diagnosis.Comm, now int64) diagnosis.RAS {
			return diagnosis.RAS{At: now, Missing: []diagnosis.RASRank{{Rank: (rank(c, culprit) + 1) % int32(len(c.Members))}}}
		}, "NCCL's RAS says otherwise: missing: rank "},
		{"nothing", func(c *diagnosis.Comm, now int64) diagnosis.RAS { return diagnosis.RAS{At: now} }, "NCCL's RAS misses no rank of "},
		{"of before", func(c *diagnosis.Comm, now int64) diagnosis.RAS {
			return diagnosis.RAS{At: now - int64(30*time.Second), Missing: []diagnosis.RASRank{{Rank: 0}}}
		}, ""},
		{"nonsense", func(c *diagnosis.Comm, now int64) diagnosis.RAS {
			return diagnosis.RAS{At: now, Missing: []diagnosis.RASRank{{Rank: 1 << 20}}}
		}, "the communicator's rank 1048576"},
	} {
		cfg := diagnosistest.Config{Seed: 3, Faults: []diagnosistest.Fault{{Kind: diagnosistest.Hang, At: 20 * time.Second, Rank: culprit}}}
		with, without := diagnosistest.New(cfg), diagnosistest.New(cfg)
		e, plain := diagnosis.New(diagnosis.Config{}), diagnosis.New(diagnosis.Config{})
		confirmed := false
		for with.Now() < 40*time.Second {
			with.Advance(passEvery)
			without.Advance(passEvery)
			ev := with.Evidence()
			ev.RAS = nil
			for i := range ev.Comms {
				r := c.ras(&ev.Comms[i], ev.Now)
				r.Comm = ev.Comms[i].ID
				ev.RAS = append(ev.RAS, r)
			}
			got, want := e.Diagnose(ev), plain.Diagnose(without.Evidence())
			if len(got) != len(want) {
				t.Fatalf("%s: %+v, without RAS %+v", c.name, got, want)
			}
			for i, v := range got {
				if v.Key != want[i].Key || v.Level != want[i].Level {
					t.Errorf("%s: %+v, without RAS %+v", c.name, v, want[i])
				}
				if v.Level != diagnosis.Confirmed {
					continue
				}
				confirmed = true
				why := strings.Join(v.Why, "\n")
				if c.want == "" && strings.Contains(why, "RAS") || !strings.Contains(why, c.want) {
					t.Fatalf("%s: %s\nwant %q", c.name, why, c.want)
				}
			}
		}
		if !confirmed {
			t.Errorf("%s: no verdict", c.name)
		}
	}
}
