// Command c4month replays the month of C4's table 3 (a 175B model on 2,400 GPUs, June
// 2023): faults come as they did there, each is played in a simulated job of
// that size through the diagnosis engine, its node is swapped for a spare, and the job
// restarts from its last checkpoint. It prints the downtime beside the paper's,
// and every assumption that the figures rest on.
package main

import (
	"flag"
	"fmt"
	"math/rand/v2"
	"os"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/lockstep-ccl/lockstep/diagnosis"
	"github.com/lockstep-ccl/lockstep/diagnosis/jobsim"
)

func main() {
	faults := flag.Int("faults", 40, "faults in the month")
	seed := flag.Uint64("seed", 1, "of the month")
	interval := flag.Duration("checkpoint", 10*time.Minute, "between two checkpoints")
	verbose := flag.Bool("v", false, "print every fault")
	flag.Parse()
	if err := run(*faults, *seed, *interval, *verbose); err != nil {
		fmt.Fprintln(os.Stderr, "c4month:", err)
		os.Exit(1)
	}
}

const (
	month        = 30 * 24 * time.Hour
	nodes        = 300
	ranksPerNode = 8
	spareNodes   = 8 * nodes / 128 // 64 spare GPUs on 8 hosts for each 1,024 on 128
	repair       = 24 * time.Hour
	decide       = 5 * time.Second // from the confirmed verdict to the fenced restart: alert, policy, journal
)

// cost is one column of the paper's table: shares of the month.
type cost struct{ postCheckpoint, detection, isolation, restart float64 }

func (c cost) sum() float64 { return c.postCheckpoint + c.detection + c.isolation + c.restart }

// June and December of the paper's table 3: 31.19 % and 1.16 % in all. The split into
// four is reconstructed from these sums and the ratios in its text (checkpoints ÷ 33,
// isolation ÷ 27), not copied: compare sums.
var (
	june     = cost{0.0753, 0.0341, 0.1965, 0.0060}
	december = cost{0.0023, 0.0005, 0.0073, 0.0015}
)

// kinds are what breaks, with shares: two of three are the GPU's (ECC, NVLink, CUDA).
var kinds = []struct {
	name  string
	share float64
	fault func(f *jobsim.Fault)
}{
	{"ECC error", 0.25, func(f *jobsim.Fault) { f.Kind, f.Code = jobsim.GPUFatal, 48 }},
	{"NVLink error", 0.20, func(f *jobsim.Fault) { f.Kind, f.Code = jobsim.GPUFatal, 74 }},
	{"CUDA error, the process ends", 0.22, func(f *jobsim.Fault) { f.Kind, f.Code = jobsim.Die, 1 }},
	{"rank hangs (timeout of a collective)", 0.13, func(f *jobsim.Fault) { f.Kind = jobsim.HangIdle }},
	{"no acknowledgements between two NICs", 0.12, func(f *jobsim.Fault) { f.Kind = jobsim.PairCut }},
	{"node down", 0.08, func(f *jobsim.Fault) { f.Kind = jobsim.NodeDown }},
}

// event is one fault of the month and what it cost.
type event struct {
	at                      time.Duration
	kind                    int
	detection, isolation    time.Duration
	postCheckpoint, restart time.Duration
	swapped                 int
	outcome                 string
}

func run(faults int, seed uint64, interval time.Duration, verbose bool) error {
	rng := rand.New(rand.NewPCG(seed, 0xc4))
	perFault := func(share float64) time.Duration { return time.Duration(share * float64(month) / float64(faults)) }
	events := make([]event, faults)
	for i := range events {
		events[i] = event{at: time.Duration(rng.Int64N(int64(month))), kind: draw(rng)}
	}
	slices.SortFunc(events, func(a, b event) int { return int(a.at - b.at) })
	spares := make([]time.Duration, spareNodes) // when each is free
	for i := range events {
		e := &events[i]
		if err := play(e, rng, perFault(june.isolation)); err != nil {
			return err
		}
		e.postCheckpoint = time.Duration(rng.Int64N(int64(interval)))
		e.restart = perFault(june.restart)
		slices.Sort(spares)
		for k := range min(e.swapped, len(spares)) {
			e.isolation += max(0, spares[k]-e.at) // none is left: the job waits for a repair
			spares[k] = max(spares[k], e.at) + repair
		}
		if verbose {
			fmt.Printf("day %4.1f  %-38s detected in %7.1fs  isolated in %8.1fs  %s\n", e.at.Hours()/24, kinds[e.kind].name, e.detection.Seconds(), e.isolation.Seconds(), e.outcome)
		}
	}
	var with cost
	right := 0
	for i := range events {
		e := &events[i]
		with.detection += float64(e.detection) / float64(month)
		with.isolation += float64(e.isolation) / float64(month)
		with.postCheckpoint += float64(e.postCheckpoint) / float64(month)
		with.restart += float64(e.restart) / float64(month)
		if e.outcome == "right" {
			right++
		}
	}
	rare := with // at December's rate of faults
	scale := december.restart / june.restart
	rare = cost{rare.postCheckpoint * scale, rare.detection * scale, rare.isolation * scale, rare.restart * scale}
	checkpoints := june
	checkpoints.postCheckpoint = float64(faults) * float64(interval) / 2 / float64(month)

	t := tabwriter.NewWriter(os.Stdout, 2, 8, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintf(t, "downtime, %% of the month\tafter the last checkpoint\tdetection\tdiagnosis and isolation\trestart\tsum\t\n")
	for _, r := range []struct {
		name string
		cost
	}{
		{"C4, June 2023 (before)", june},
		{"the same with checkpoints as given", checkpoints},
		{"Lockstep, June's faults", with},
		{"Lockstep, December's fault rate", rare},
		{"C4, December 2023 (after)", december},
	} {
		c := r.cost
		fmt.Fprintf(t, "%s\t%.2f\t%.3f\t%.3f\t%.2f\t%.2f\t\n", r.name, 100*c.postCheckpoint, 100*c.detection, 100*c.isolation, 100*c.restart, 100*c.sum())
	}
	if err := t.Flush(); err != nil {
		return err
	}
	fmt.Printf("\n%d faults, %d isolated by the first confirmed verdict\n\n", faults, right)
	assumptions(faults, interval)
	return nil
}

func draw(rng *rand.Rand) int {
	x := rng.Float64()
	for i := range kinds {
		if x -= kinds[i].share; x < 0 {
			return i
		}
	}
	return len(kinds) - 1
}

// play finds out in a simulated job how long a fault takes to be told, and whom the
// first confirmed verdict would have swapped.
func play(e *event, rng *rand.Rand, manual time.Duration) error {
	const step = 1500 * time.Millisecond
	c := jobsim.Config{
		Name: "c4month", Seed: rng.Uint64(), Tensor: 8, Pipeline: 10, Data: 30, Micro: 10, Steps: rng.IntN(2) == 0,
		Compute: step / (3 * 19), DataTime: 60 * time.Millisecond, Sharded: true, World: true, Uneven: 0.1,
		Cluster: jobsim.Cluster{GPU: true, RDMA: true, Ports: 2, RanksPerNode: ranksPerNode},
		Agents:  jobsim.Agents{Exits: jobsim.ExitWords(rng.IntN(3))},
		Dying:   jobsim.Dying{Reaction: jobsim.Reaction(rng.IntN(int(jobsim.Linger) + 1)), Launcher: time.Duration(rng.IntN(3)) * time.Second},
	}
	rank := rng.IntN(nodes * ranksPerNode)
	f := jobsim.Fault{Rank: rank, Peer: (rank + ranksPerNode) % (nodes * ranksPerNode), At: 15*time.Second + time.Duration(rng.Int64N(int64(3*step)))}
	kinds[e.kind].fault(&f)
	if f.Kind == jobsim.PairCut {
		f.Nodes = true
	}
	c.Faults = []jobsim.Fault{f}
	at := func(r int) int32 { return int32(r / ranksPerNode) }
	guilty := []int32{at(rank)}
	if f.Kind == jobsim.PairCut {
		guilty = append(guilty, at(f.Peer))
	}
	var there []int32 // ranks on guilty nodes: a verdict on any of them swaps the right node
	for r := range nodes * ranksPerNode {
		if slices.Contains(guilty, at(r)) {
			there = append(there, int32(r))
		}
	}
	s := &jobsim.Scenario{Name: "c4month", Config: c, Length: 3 * time.Minute, Truths: []jobsim.Truth{{
		Classes: []diagnosis.Class{diagnosis.CommunicationHang, diagnosis.NoncommunicationHang},
		Nodes:   guilty, Ranks: there, Touches: there, Want: diagnosis.Confirmed, Within: 2 * time.Minute,
	}}}
	var first *diagnosis.Verdict
	var when time.Duration
	watch := func(j *jobsim.Job, verdicts []diagnosis.Verdict) {
		for i := range verdicts {
			if v := &verdicts[i]; first == nil && v.Level == diagnosis.Confirmed && j.Onset(0) > 0 {
				first, when = v, j.Now()-time.Duration(j.Onset(0)-jobsim.Start)
			}
		}
	}
	if _, err := jobsim.Play(s, diagnosis.New(diagnosis.Config{}).Diagnose, nil, watch); err != nil {
		return err
	}
	if first == nil {
		// Nobody says anything: the program's own timeout, and people.
		e.detection, e.isolation, e.outcome = 30*time.Minute, manual, "not told"
		return nil
	}
	e.detection, e.isolation = when, decide
	named := map[string]bool{}
	k := &first.Culprits[0]
	switch k.Kind {
	case diagnosis.CulpritNode:
		named[k.Node] = true
	case diagnosis.CulpritConnection: // which end is at fault is not known: both go
		named[jobsim.NodeName(int(at(int(k.Rank))))], named[jobsim.NodeName(int(at(int(k.Peer))))] = true, true
	default:
		named[jobsim.NodeName(int(at(int(k.Rank))))] = true
	}
	e.swapped = len(named)
	for _, n := range guilty {
		if named[jobsim.NodeName(int(n))] {
			e.outcome = "right"
			return nil
		}
	}
	// The wrong node was taken out: the job fails again at once, and people look.
	e.isolation += manual
	e.outcome = fmt.Sprintf("wrong: %v %v rank %d %s", first.Class, k.Kind, k.Rank, k.Node)
	return nil
}

func assumptions(faults int, interval time.Duration) {
	lines := []string{
		fmt.Sprintf("%d GPUs on %d hosts, tensor 8 × pipeline 10 × data 30, steps of about 1.5 s; month of 30 days", nodes*ranksPerNode, nodes),
		fmt.Sprintf("%d faults in June (the summary at hand gives shares of time, not a count): a restart then takes %.1f min, June's and December's alike; December's rate is June's by the ratio of their restart shares", faults, june.restart*month.Minutes()/float64(faults)),
		"what breaks: two of three faults are the GPU's, as their share of isolation time says; the finer split is ours",
		"faults come evenly over the month, one at a time, on any rank; none breaks several nodes",
		"June's line is the paper's, not simulated; what people need for a fault is June's isolation time by the number of faults",
		fmt.Sprintf("checkpoints every %v, asynchronous, free of charge; a fault costs what was done since, drawn evenly", interval),
		"detection is the engine's first confirmed verdict in a simulated job of this size, with this repository's defaults",
		fmt.Sprintf("isolation: %v from the verdict to the fenced restart; the node of the first culprit is swapped, both ends' for a connection", decide),
		"a wrong verdict costs what people need, and its nodes; a fault that is not told costs 30 minutes (the program's timeout), and people",
		fmt.Sprintf("%d spare hosts (8 for 128), any as good as another; a host that was swapped is back after %v", spareNodes, repair),
		"the restart's own length is the paper's: loading and compiling are the job's",
	}
	fmt.Println("assumptions\n  - " + strings.Join(lines, "\n  - "))
}
