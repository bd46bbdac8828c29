// Command gputune makes the table by which GPU collectives choose their algorithm, of
// what `lockstep perf --json` measured with each of them forced:
//
//	for a in ll ll2 ll12 sym bulk ce ring pushbulk chain; do
//	  lockstep perf allreduce … --device cuda --ranks 4 --json -c 0 --gpu-algo $a --graph 16
//	done > forced.jsonl
//	cd bench && go run ./cmd/gputune -base ../ccl/internal/gpu/tuned.json -ranks 3-4 forced.jsonl > table.json
//
// Rows of the collectives that were measured replace those of the base for the same
// ranks. The result is either what LOCKSTEP_GPU_TABLE may name, or the table that is
// built in.
package main

import (
	"bufio"
	"cmp"
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"maps"
	"os"
	"slices"

	"github.com/lockstep-ccl/lockstep/bench/peers/nccl"
)

type step struct {
	UpTo uint64 `json:"up_to,omitempty"`
	Algo string `json:"algo"`
	SMs  int    `json:"sms"`
}

type row struct {
	Collective string `json:"collective"`
	Ranks      [2]int `json:"ranks"`
	Buffers    string `json:"buffers,omitempty"`
	Steps      []step `json:"steps"`
}

type table struct {
	Version int   `json:"version"`
	Rows    []row `json:"rows"`
}

// collectives that have a choice, by nccl-tests' names.
var collectives = map[string]struct {
	name   string
	shares bool // steps count the bytes of one rank's share
}{
	"all_reduce": {"AllReduce", false}, "reduce": {"Reduce", false}, "broadcast": {"Broadcast", false},
	"all_gather": {"AllGather", true}, "reduce_scatter": {"ReduceScatter", true}, "alltoall": {"AlltoAll", true},
}

// sms is how many multiprocessors an algorithm is given at most, unless it was measured with
// more (lockstep perf --blocks 32): as many as it takes when it is forced.
var sms = map[string]int{"ll": 32, "ll2": 32, "ll12": 32, "chain": 32, "sym": 16, "bulk": 16, "pushbulk": 16, "ring": 16, "ce": 0}

// margin is by how much another algorithm has to be quicker to be taken for a size, so
// that noise makes no steps.
const margin = 0.98

// free is how much longer copy engines may take, which leave all multiprocessors to the
// program.
const free = 1.06

func main() {
	base := flag.String("base", "", "the table to start from")
	ranks := flag.String("ranks", "", "for which numbers of ranks, as 3-4 (default: those measured)")
	flag.Usage = func() {
		fmt.Fprintln(flag.CommandLine.Output(), "usage: gputune [-base TABLE] [-ranks FROM-TO] FILE...")
		flag.PrintDefaults()
	}
	flag.Parse()
	if err := run(os.Stdout, *base, *ranks, flag.Args()); err != nil {
		fmt.Fprintln(os.Stderr, "gputune:", err)
		os.Exit(1)
	}
}

func run(w io.Writer, base, ranks string, files []string) error {
	t := table{Version: 1}
	if base != "" {
		text, err := os.ReadFile(base)
		if err != nil {
			return err
		}
		if err := json.Unmarshal(text, &t); err != nil {
			return fmt.Errorf("%s: %w", base, err)
		}
	}
	var samples []nccl.Sample
	for _, name := range files {
		f, err := os.Open(name)
		if err != nil {
			return err
		}
		s, err := nccl.Read(f)
		f.Close()
		if err != nil {
			return fmt.Errorf("%s: %w", name, err)
		}
		samples = append(samples, s...)
	}
	rows, err := tune(samples, ranks)
	if err != nil {
		return err
	}
	for _, r := range rows {
		same := func(o row) bool { return o.Collective == r.Collective && o.Ranks == r.Ranks && o.Buffers == r.Buffers }
		if i := slices.IndexFunc(t.Rows, same); i >= 0 {
			t.Rows[i] = r
		} else {
			t.Rows = append(t.Rows, r)
		}
	}
	return write(w, t)
}

// choice is an algorithm on so many multiprocessors at most.
type choice struct {
	algo string
	sms  int
}

func (c choice) compare(o choice) int { return cmp.Or(cmp.Compare(c.algo, o.algo), c.sms-o.sms) }

// key is a collective among so many ranks, of registered or of plain buffers.
type key struct {
	coll    string
	ranks   int
	buffers string // as tables call them
}

// tune makes the rows of what was measured.
func tune(samples []nccl.Sample, ranks string) ([]row, error) {
	measured := map[key]map[uint64]map[choice]float64{} // µs by size, as steps count it
	for _, s := range samples {
		c, ok := collectives[s.Coll]
		if !ok || s.Library != nccl.Lockstep || s.Algo == "" {
			continue
		}
		most, ok := sms[s.Algo]
		if !ok {
			continue
		}
		algo := choice{s.Algo, max(most, s.SMs)}
		k, bytes := key{c.name, s.Ranks, ""}, uint64(s.Bytes)
		if s.Mode != "registered" {
			k.buffers = "plain"
		}
		if c.shares {
			bytes /= uint64(s.Ranks)
		}
		if measured[k] == nil {
			measured[k] = map[uint64]map[choice]float64{}
		}
		at := measured[k][bytes]
		if at == nil {
			at = map[choice]float64{}
			measured[k][bytes] = at
		}
		if was, ok := at[algo]; !ok || s.Micros < was {
			at[algo] = s.Micros
		}
	}
	var rows []row
	for _, k := range slices.SortedFunc(maps.Keys(measured), func(a, b key) int {
		return cmp.Or(cmp.Compare(a.coll, b.coll), a.ranks-b.ranks, cmp.Compare(a.buffers, b.buffers))
	}) {
		r := row{Collective: k.coll, Ranks: [2]int{k.ranks, k.ranks}, Buffers: k.buffers}
		if ranks != "" {
			if _, err := fmt.Sscanf(ranks, "%d-%d", &r.Ranks[0], &r.Ranks[1]); err != nil {
				return nil, fmt.Errorf("-ranks %q: want FROM-TO", ranks)
			}
		}
		r.Steps = steps(measured[k])
		rows = append(rows, r)
	}
	return rows, nil
}

// steps takes the quickest algorithm of each size. A step ends at the last size for which
// its algorithm was best.
func steps(sizes map[uint64]map[choice]float64) []step {
	var list []step
	for _, bytes := range slices.Sorted(maps.Keys(sizes)) {
		at := sizes[bytes]
		best := slices.MinFunc(slices.SortedFunc(maps.Keys(at), choice.compare), func(a, b choice) int { return cmp.Compare(at[a], at[b]) })
		if ce := (choice{"ce", 0}); at[ce] > 0 && at[ce] <= free*at[best] {
			best = ce
		} else if n := len(list); n > 0 {
			last := choice{list[n-1].Algo, list[n-1].SMs}
			if was, ok := at[last]; ok && at[best] > margin*was {
				best = last
			}
		}
		if n := len(list); n > 0 && best == (choice{list[n-1].Algo, list[n-1].SMs}) {
			list[n-1].UpTo = bytes
			continue
		}
		list = append(list, step{bytes, best.algo, best.sms})
	}
	if n := len(list); n > 0 {
		list[n-1].UpTo = 0
	}
	return list
}

// write prints a step a line.
func write(w io.Writer, t table) error {
	out := bufio.NewWriter(w)
	fmt.Fprintf(out, "{\"version\": %d, \"rows\": [", t.Version)
	for i, r := range t.Rows {
		if i > 0 {
			fmt.Fprint(out, ",")
		}
		fmt.Fprintf(out, "\n  {\"collective\": %q, \"ranks\": [%d, %d], ", r.Collective, r.Ranks[0], r.Ranks[1])
		if r.Buffers != "" {
			fmt.Fprintf(out, "\"buffers\": %q, ", r.Buffers)
		}
		fmt.Fprint(out, "\"steps\": [")
		for k, s := range r.Steps {
			if k > 0 {
				fmt.Fprint(out, ",")
			}
			fmt.Fprint(out, "\n    {")
			if s.UpTo > 0 {
				fmt.Fprintf(out, "\"up_to\": %d, ", s.UpTo)
			}
			fmt.Fprintf(out, "\"algo\": %q, \"sms\": %d}", s.Algo, s.SMs)
		}
		fmt.Fprint(out, "]}")
	}
	fmt.Fprintln(out, "\n]}")
	return out.Flush()
}
