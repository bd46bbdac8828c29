package nccl

import (
	"bytes"
	"flag"
	"math"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"pgregory.net/rapid"
)

var update = flag.Bool("update", false, "write the golden file")

func fixtures(t *testing.T) []Sample {
	t.Helper()
	var all []Sample
	for _, name := range []string{"lockstep.jsonl", "nccl.jsonl"} {
		f, err := os.Open(filepath.Join("testdata", name))
		if err != nil {
			t.Fatal(err)
		}
		defer f.Close()
		s, err := Read(f)
		if err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		all = append(all, s...)
	}
	return all
}

func TestTablesOfBothPrograms(t *testing.T) {
	samples := fixtures(t)
	if len(samples) != 13 {
		t.Errorf("%d measurements, want 13: no CPU ranks, no GEMM, no notices", len(samples))
	}
	tables := Tables(samples)
	if len(tables) != 2 || tables[0].Coll != "all_reduce" || tables[1].Coll != "alltoall" {
		t.Fatalf("tables %+v, want all_reduce and alltoall", tables)
	}
	s := tables[0].Score()
	if s.Sizes != 2 || s.Ahead != 1 || s.Worst != 15.0/12 || s.WorstBytes != 1<<20 || math.Abs(s.Mean-math.Sqrt(3.4/4.25*15/12)) > 1e-9 {
		t.Errorf("score of all_reduce %+v", s)
	}
	if s := tables[1].Score(); s.Sizes != 0 || s.Wrong != 1 {
		t.Errorf("score of alltoall %+v: a wrong result is no time", s)
	}

	var out bytes.Buffer
	for i := range tables {
		if err := tables[i].Markdown(&out); err != nil {
			t.Fatal(err)
		}
	}
	if err := Summary(&out, tables); err != nil {
		t.Fatal(err)
	}
	golden := filepath.Join("testdata", "tables.md")
	if *update {
		if err := os.WriteFile(golden, out.Bytes(), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(golden)
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(out.Bytes(), want) {
		t.Errorf("tables differ from %s (-update writes it):\n%s", golden, out.Bytes())
	}
}

func TestReadSpellings(t *testing.T) {
	for _, name := range []string{"allreduce", "all_reduce", "all_reduce_perf", "AllReduce"} {
		in := `{"collective":"` + name + `","size":8,"ranks":2,"device":"cuda","out_of_place":{"us":1}}`
		s, err := Read(strings.NewReader(in))
		if err != nil || len(s) != 1 || s[0].Coll != "all_reduce" || s[0].Launch != "stream" || s[0].Mode != "default" || s[0].Library != Lockstep {
			t.Errorf("%s: %+v, %v", name, s, err)
		}
	}
}

func TestReadRefuses(t *testing.T) {
	for in, says := range map[string]string{
		"\n{\"lib\":":                                                                         "line 2",
		`{"lib":"nccl","coll":"barrier"}`:                                                     `"barrier" is not known`,
		`{"lib":"nccl","coll":"reduce","bytes":8}`:                                            "8 bytes in 0 µs",
		`{"lib":"nccl","coll":"reduce","bytes":-8,"us":1}`:                                    "-8 bytes",
		`{"device":"cuda","collective":"reduce","size":8}`:                                    "neither",
		`{"lib":"other","coll":"reduce","bytes":8,"us":1}`:                                    "neither",
		`{"device":"cuda","collective":"reduce","size":8,"out_of_place":{"us":-1,"wrong":0}}`: "in -1 µs",
	} {
		if s, err := Read(strings.NewReader(in)); err == nil || !strings.Contains(err.Error(), says) {
			t.Errorf("%s: %v, %v; want an error that says %q", in, s, err, says)
		}
	}
}

// Whatever was measured, every sample's size is in the table of its series, and
// the score counts what the rows show.
func TestTablesKeepEverySize(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		samples := rapid.SliceOfN(rapid.Custom(func(t *rapid.T) Sample {
			s := Sample{
				Series: Series{
					Coll:  rapid.SampledFrom([]string{"all_reduce", "gather", "sendrecv"}).Draw(t, "coll"),
					Ranks: rapid.SampledFrom([]int{2, 4}).Draw(t, "ranks"), Launch: rapid.SampledFrom([]string{"stream", "graph"}).Draw(t, "launch"),
				},
				Library: Library(rapid.IntRange(0, 1).Draw(t, "library")), Mode: rapid.SampledFrom([]string{"default", "registered", "ce", "new"}).Draw(t, "mode"),
				Bytes: 1 << rapid.IntRange(0, 4).Draw(t, "size"), Micros: rapid.Float64Range(0.1, 1e6).Draw(t, "us"), Wrong: rapid.IntRange(-1, 1).Draw(t, "wrong"),
			}
			return s
		}), 1, 60).Draw(t, "samples")
		type key struct {
			Series
			bytes int
			col   Column
		}
		want := make(map[key]bool)
		for _, s := range samples {
			want[key{s.Series, s.Bytes, Column{s.Library, s.Mode}}] = true
		}
		for _, table := range Tables(samples) {
			sizes, ahead, last := 0, 0, 0
			for _, r := range table.Rows {
				if r.Bytes <= last {
					t.Fatalf("sizes do not ascend: %d after %d", r.Bytes, last)
				}
				last = r.Bytes
				for i, c := range r.Cells {
					if c == nil {
						continue
					}
					k := key{table.Series, r.Bytes, table.Columns[i]}
					if !want[k] {
						t.Fatalf("%+v is there twice, or was never measured", k)
					}
					delete(want, k)
				}
				if ratio, ok := r.Ratio(); ok {
					sizes++
					if ratio < 1 {
						ahead++
					}
				}
			}
			if s := table.Score(); s.Sizes != sizes || s.Ahead != ahead {
				t.Fatalf("score %+v, want %d sizes, ahead at %d", s, sizes, ahead)
			}
		}
		if len(want) > 0 {
			t.Fatalf("missing: %v", want)
		}
	})
}

func FuzzRead(f *testing.F) {
	for _, name := range []string{"lockstep.jsonl", "nccl.jsonl"} {
		b, err := os.ReadFile(filepath.Join("testdata", name))
		if err != nil {
			f.Fatal(err)
		}
		f.Add(b)
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		samples, err := Read(bytes.NewReader(b))
		if err != nil {
			return
		}
		for _, table := range Tables(samples) {
			if err := table.Markdown(&bytes.Buffer{}); err != nil {
				t.Fatal(err)
			}
		}
	})
}
