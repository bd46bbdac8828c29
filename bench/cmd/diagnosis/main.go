// Command diagnosis measures verdicts: it plays seeded scenarios through the
// engine, at several sizes of the world, and prints what was right, how soon, and
// every miss with what it takes to see it again.
//
//	diagnosis [-set tuning|report] [-n scenarios] [-sizes 8,64,...] [-short]
//	diagnosis -row NAME -seed S -ranks N -v    one scenario, with its timeline
//	diagnosis -cost                            what slow faults cost, and which of them are missed
//	diagnosis -results FILE                    go on with what FILE has, and keep the rest there
//	diagnosis -scale                           time and memory of a pass by size
package main

import (
	"cmp"
	"flag"
	"fmt"
	"os"
	"runtime"
	"strconv"
	"strings"

	"github.com/lockstep-ccl/lockstep/diagnosis/jobsim"
)

func main() {
	var o options
	flag.StringVar(&o.set, "set", "tuning", "tuning or report: which family of scenarios")
	flag.StringVar(&o.sizes, "sizes", "8,64,512,4096,32768", "sizes of the world")
	flag.StringVar(&o.counts, "n", "", "scenarios a size: one number, or one for each size (default: by what a size costs)")
	flag.StringVar(&o.row, "row", "", "only scenarios whose kind begins with this")
	flag.Uint64Var(&o.seed, "seed", 0, "first seed; with -ranks: the only one")
	flag.IntVar(&o.ranks, "ranks", 0, "play one scenario of this size")
	flag.BoolVar(&o.verbose, "v", false, "with -ranks: print the timeline")
	flag.BoolVar(&o.short, "short", false, "small sizes only, a minute of one core")
	flag.BoolVar(&o.cost, "cost", false, "measure what each slow fault costs its job, and group the misses by it")
	flag.BoolVar(&o.scale, "scale", false, "only the time and memory of a pass, by size")
	flag.IntVar(&o.parallel, "p", runtime.GOMAXPROCS(0), "scenarios at a time")
	flag.StringVar(&o.results, "results", "", "file that keeps results as they come: started again, the program goes on where it was")
	flag.StringVar(&o.like, "like", "", "pattern of recordings (*.evidence): what they look like beside simulated jobs of -ranks (8)")
	flag.Parse()
	if err := o.run(); err != nil {
		fmt.Fprintln(os.Stderr, "diagnosis:", err)
		os.Exit(1)
	}
}

type options struct {
	set, sizes, counts, row string
	results, like           string
	seed                    uint64
	ranks, parallel         int
	verbose, short, scale   bool
	cost                    bool
}

func (o *options) run() error {
	if o.scale {
		return scale(os.Stdout)
	}
	set := jobsim.Tuning
	switch o.set {
	case "tuning":
	case "report":
		set = jobsim.Reporting
	default:
		return fmt.Errorf("-set %s: want tuning or report", o.set)
	}
	var names []string
	for _, name := range jobsim.Rows() {
		if strings.HasPrefix(name, o.row) {
			names = append(names, name)
		}
	}
	if len(names) == 0 {
		return fmt.Errorf("-row %s: no kind of scenario begins so; there are: %s", o.row, strings.Join(jobsim.Rows(), ", "))
	}
	if o.like != "" {
		return like(os.Stdout, set, o.like, cmp.Or(o.ranks, 8), 40)
	}
	if o.ranks > 0 {
		return one(set, names[0], o.seed, o.ranks, o.verbose)
	}
	if o.short {
		o.sizes, o.counts = "8,64", "236,177"
	}
	var plans []plan
	counts := strings.Split(o.counts, ",")
	for i, s := range strings.Split(o.sizes, ",") {
		n, err := strconv.Atoi(s)
		if err != nil || n < 2 {
			return fmt.Errorf("-sizes %s: want numbers of ranks", o.sizes)
		}
		count := map[int]int{8: 2000, 64: 1000, 512: 300, 4096: 60, 32768: 12}[n]
		if o.counts != "" {
			if count, err = strconv.Atoi(counts[min(i, len(counts)-1)]); err != nil {
				return fmt.Errorf("-n %s: want numbers", o.counts)
			}
		}
		for k := range count {
			plans = append(plans, plan{set, names[k%len(names)], o.seed + uint64(k), n, o.cost})
		}
	}
	var kept *store
	if o.results != "" {
		var err error
		if kept, err = openStore(o.results); err != nil {
			return err
		}
	}
	results := play(plans, o.parallel, kept)
	if kept != nil {
		if err := kept.close(); err != nil {
			return fmt.Errorf("results in %s: %w", o.results, err)
		}
	}
	return table(os.Stdout, set, results)
}
