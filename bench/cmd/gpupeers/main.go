// Command gpupeers reads what `lockstep perf --json` measured on GPU ranks and what
// peers/nccl's program measured of NCCL on the same machine, and prints Markdown
// tables of both, side by side, then a summary. A ratio is our time over NCCL's
// better mode: below 1 we are ahead. It fails if any result was wrong.
//
//	go run ./cmd/gpupeers lockstep.jsonl nccl.jsonl
package main

import (
	"bufio"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"

	"github.com/lockstep-ccl/lockstep/bench/peers/nccl"
)

func main() {
	summary := flag.Bool("summary", false, "the summary only")
	flag.Usage = func() {
		fmt.Fprintln(flag.CommandLine.Output(), "usage: gpupeers [-summary] FILE...   (- is standard input)")
		flag.PrintDefaults()
	}
	flag.Parse()
	if err := run(os.Stdout, flag.Args(), *summary); err != nil {
		fmt.Fprintln(os.Stderr, "gpupeers:", err)
		os.Exit(1)
	}
}

func run(w io.Writer, files []string, summary bool) error {
	if len(files) == 0 {
		return errors.New("no files: want those that lockstep perf --json and nccl wrote")
	}
	var samples []nccl.Sample
	for _, f := range files {
		s, err := read(f)
		if err != nil {
			return fmt.Errorf("%s: %w", f, err)
		}
		samples = append(samples, s...)
	}
	if len(samples) == 0 {
		return errors.New("no measurements on GPUs in these files")
	}
	tables := nccl.Tables(samples)
	out := bufio.NewWriter(w)
	wrong := 0
	for i := range tables {
		wrong += tables[i].Score().Wrong
		if !summary {
			if err := tables[i].Markdown(out); err != nil {
				return err
			}
		}
	}
	if err := errors.Join(nccl.Summary(out, tables), out.Flush()); err != nil {
		return err
	}
	if wrong > 0 {
		return fmt.Errorf("%d measurements had wrong results", wrong)
	}
	return nil
}

func read(name string) ([]nccl.Sample, error) {
	if name == "-" {
		return nccl.Read(os.Stdin)
	}
	f, err := os.Open(name)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	return nccl.Read(f)
}
