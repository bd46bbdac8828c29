package gpu

import (
	"strings"
	"testing"

	"github.com/lockstep-ccl/lockstep/record"
)

// TestTable: a table's rows come before those built in, which serve what it lacks.
func TestTable(t *testing.T) {
	own, err := ParseTable([]byte(`{"version": 1, "rows": [
		{"collective": "AllReduce", "ranks": [4, 4], "steps": [{"up_to": 100, "algo": "sym", "sms": 3}, {"algo": "ll", "sms": 7}]}]}`))
	if err != nil {
		t.Fatal(err)
	}
	built, err := ParseTable(nil)
	if err != nil {
		t.Fatal(err)
	}
	if own.id == built.id {
		t.Error("two tables with one id")
	}
	c := chooser(4, 9)
	c.table = own
	for _, w := range []struct {
		coll  record.CollKind
		size  int
		bytes uint64
		want  plan
	}{
		{record.AllReduce, 4, 100, plan{record.AlgoSym, 1}},
		{record.AllReduce, 4, 50_000, plan{record.AlgoLL, 7}},
		{record.AllReduce, 3, 100, plan{record.AlgoLL, 1}},
		{record.Broadcast, 4, 100, plan{record.AlgoLL12, 1}},
	} {
		c.size = w.size
		if got := c.choose(call{coll: w.coll, bytes: w.bytes, direct: true, fixed: true}); got != w.want {
			t.Errorf("%v of %d bytes, %d ranks: %v, want %v", w.coll, w.bytes, w.size, got, w.want)
		}
	}
}

func TestTableRefused(t *testing.T) {
	for text, want := range map[string]string{
		`{`:              "unexpected EOF",
		`{"version": 2}`: "version 2, want 1",
		`{"version": 1, "rows": [{"collective": "Barrier", "ranks": [1, 2]}]}`:                                                                                        "no collective that has a choice",
		`{"version": 1, "rows": [{"collective": "Reduce", "ranks": [3, 2]}]}`:                                                                                         "ranks 3 to 2",
		`{"version": 1, "rows": [{"collective": "Reduce", "ranks": [1, 2]}]}`:                                                                                         "its last step ends",
		`{"version": 1, "rows": [{"collective": "Reduce", "ranks": [1, 2], "steps": [{"algo": "tree", "sms": 1}]}]}`:                                                  `"tree" is no algorithm`,
		`{"version": 1, "rows": [{"collective": "Reduce", "ranks": [1, 2], "steps": [{"algo": "ll", "sms": 33}]}]}`:                                                   "33 multiprocessors",
		`{"version": 1, "rows": [{"collective": "Reduce", "ranks": [1, 2], "steps": [{"up_to": 9, "algo": "ll", "sms": 1}, {"up_to": 9, "algo": "sym", "sms": 1}]}]}`: "up to 9 bytes, after 9",
		`{"version": 1, "colour": 3}`: "unknown field",
	} {
		if _, err := ParseTable([]byte(text)); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %q", text, err, want)
		}
	}
}

func FuzzTable(f *testing.F) {
	f.Add(tunedJSON)
	f.Fuzz(func(_ *testing.T, text []byte) {
		t, err := ParseTable(text)
		if err != nil {
			return
		}
		for ranks := 1; ranks <= MaxRanks; ranks++ {
			c := chooser(ranks, 9)
			c.table = t
			for bytes := uint64(1); bytes < 4<<30; bytes *= 7 {
				if p := c.choose(call{coll: record.AllReduce, bytes: bytes, direct: true, fixed: true}); p.blocks < 1 {
					panic("no blocks")
				}
			}
		}
	})
}
