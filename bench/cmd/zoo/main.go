// Command zoo runs the jobs of package zoo under an agent per node and a master, breaks
// things from outside, and scores what the master says.
//
//	go build -o zoo ./cmd/zoo && ./zoo -lockstep ../bin/lockstep -runs 40 -seed 1 -out DIR
//
// It needs root: each node, or each rank, is a network namespace (wire.go).
package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"

	"github.com/lockstep-ccl/lockstep/bench/zoo"
)

func main() {
	if err := dispatch(); err != nil {
		fmt.Fprintln(os.Stderr, "zoo:", err)
		os.Exit(1)
	}
}

// dispatch is also the program of each process of a run.
func dispatch() error {
	args := os.Args[1:]
	if len(args) > 0 {
		switch args[0] {
		case "enter":
			return enter(args[1], args[2:])
		case "rank":
			return enterRank(args[1], []string{os.Args[0], "job", args[2]})
		case "job":
			job, err := zoo.Named(args[1])
			if err == nil {
				zoo.Main(job)
			}
			return err
		case "burn":
			life, err := time.ParseDuration(args[1])
			if err != nil {
				return err
			}
			time.AfterFunc(life, func() { os.Exit(0) })
			for x := uint64(1); ; x += x >> 3 {
			}
		case "report":
			return reportFiles(args[1:])
		}
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	return conduct(ctx)
}

func reportFiles(files []string) error {
	var results []result
	for _, name := range files {
		f, err := os.Open(name)
		if err != nil {
			return err
		}
		defer f.Close()
		lines := bufio.NewScanner(f)
		lines.Buffer(nil, 1<<20)
		for lines.Scan() {
			var r result
			if err := json.Unmarshal(lines.Bytes(), &r); err != nil {
				return fmt.Errorf("%s: %w", name, err)
			}
			results = append(results, r)
		}
		if err := lines.Err(); err != nil {
			return fmt.Errorf("%s: %w", name, err)
		}
	}
	report(os.Stdout, results)
	return nil
}

func conduct(ctx context.Context) error {
	var (
		lockstep = flag.String("lockstep", "bin/lockstep", "the lockstep binary")
		jobs     = flag.String("jobs", "all", "jobs, comma-separated")
		faults   = flag.String("faults", "all", "faults, comma-separated; a name that ends with * is a prefix")
		runs     = flag.Int("runs", 0, "how many runs (0: each fault once)")
		seed     = flag.Uint64("seed", 1, "seed of the choices")
		from     = flag.Int("from", 0, "begin with this run of the seed's")
		only     = flag.Int("only", -1, "make only this run of the seed's")
		out      = flag.String("out", "", "where results and the logs of misses go (default: a new directory)")
		keep     = flag.Bool("keep", false, "keep the logs of hits, too")
		parallel = flag.Int("parallel", 1, "runs at the same time; they share the machine, and faults of one may be felt by another")
		limit    = flag.Duration("limit", 0, "begin no run after so long (0: no limit)")
		watch    = flag.Duration("watch", 0, "how long a healthy run is watched (0: 14 s)")
		strict   = flag.Float64("least", 0, "fail when less than this share of the runs is right")
		list     = flag.Bool("list", false, "print jobs and faults")
	)
	flag.Parse()
	if *list {
		for _, j := range zoo.Jobs() {
			fmt.Printf("%-8s %d ranks on %d nodes: %s\n", j.Name, j.Ranks, j.Nodes, j.Text)
		}
		for _, f := range table {
			note := ""
			if f.asked {
				note = " (only by name)"
			}
			fmt.Printf("%-20s %s%s\n", f.name, f.class[0], note)
		}
		return nil
	}
	z, err := newZoo(*lockstep, *out)
	if err != nil {
		return err
	}
	z.keep, z.watch = *keep, *watch
	plan, err := z.plan(*jobs, *faults, *runs, *seed)
	if err != nil {
		return err
	}
	began := time.Now()
	first, end := max(*from, 0), len(plan)
	if *only >= 0 {
		first, end = min(*only, end), min(*only+1, end)
	}
	var next atomic.Int64
	next.Store(int64(first))
	var workers errgroup.Group
	for range max(*parallel, 1) {
		workers.Go(func() error {
			for {
				i := int(next.Add(1)) - 1
				if i >= end || *limit > 0 && time.Since(began) > *limit {
					return nil
				}
				res := z.one(ctx, i, *seed, plan[i])
				if err := ctx.Err(); err != nil {
					return err
				}
				if err := z.add(res, end-first, time.Since(began)); err != nil {
					return err
				}
			}
		})
	}
	if err := workers.Wait(); err != nil && ctx.Err() == nil {
		return err
	}
	fmt.Println()
	text := &strings.Builder{}
	report(text, z.results)
	fmt.Fprintf(text, "\ntook %v; results and the logs of misses: %s\n", time.Since(began).Round(time.Second), z.out)
	fmt.Print(text)
	if err := os.WriteFile(filepath.Join(z.out, "report.txt"), []byte(text.String()), 0o600); err != nil {
		return err
	}
	right, all := 0, 0
	for _, r := range z.results {
		if r.Skipped == "" {
			all++
			right += btoi(r.Hit)
		}
	}
	if float64(right) < *strict*float64(all) {
		return fmt.Errorf("%d of %d runs are right, less than %g", right, all, *strict)
	}
	return ctx.Err()
}

func (r *result) word() string {
	switch {
	case r.Skipped != "":
		return "skip"
	case r.Broken != "":
		return "BRKN"
	case r.Hit:
		return "ok"
	}
	return "MISS"
}

func (r *result) brief() string {
	switch {
	case r.Skipped != "":
		return r.Skipped
	case r.Broken != "":
		return r.Broken
	}
	s := r.Truth
	if r.Miss != "" {
		s += ": " + r.Miss
	}
	if r.Said != "" {
		s += fmt.Sprintf("; said %s %s", r.Said, r.SaidTop)
	}
	if r.Confirmed > 0 {
		s += fmt.Sprintf(" after %.1f s", r.Confirmed)
	}
	if r.Cost > 1.05 && r.Cost < stuck {
		s += fmt.Sprintf(", cost %.2f", r.Cost)
	}
	return s
}

// zooRunner makes runs, one after the other.
type zooRunner struct {
	lockstep, self, out, shm string
	noNet, noCgroup          error
	keep                     bool
	watch                    time.Duration
	file                     *os.File

	mu      sync.Mutex
	results []result
}

func newZoo(lockstep, out string) (*zooRunner, error) {
	z := &zooRunner{out: out}
	var err error
	if z.lockstep, err = exec.LookPath(lockstep); err != nil {
		return nil, fmt.Errorf("lockstep binary: %w (make build leaves it in bin/lockstep)", err)
	}
	if z.lockstep, err = filepath.Abs(z.lockstep); err != nil {
		return nil, err
	}
	if z.self, err = os.Executable(); err != nil {
		return nil, err
	}
	// Orphans become this program's children, so that it can end them.
	if err := unix.Prctl(unix.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0); err != nil {
		return nil, err
	}
	// The network is this program: it comes before the ranks.
	tasks, _ := os.ReadDir("/proc/self/task")
	for _, t := range tasks {
		if tid, err := strconv.Atoi(t.Name()); err == nil {
			_ = unix.Setpriority(unix.PRIO_PROCESS, tid, -15) // without the right to, it is as the others
		}
	}
	if z.out == "" {
		if z.out, err = os.MkdirTemp("", "zoo-"); err != nil {
			return nil, err
		}
	}
	if z.out, err = filepath.Abs(z.out); err != nil {
		return nil, err
	}
	if err := os.MkdirAll(z.out, 0o700); err != nil {
		return nil, err
	}
	if z.file, err = os.OpenFile(filepath.Join(z.out, "results.jsonl"), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600); err != nil {
		return nil, err
	}
	z.shm = filepath.Join("/dev/shm", fmt.Sprintf("zoo-%d", os.Getpid()))
	prune()
	z.noCgroup = newCgroups().try()
	w := newWire()
	_, z.noNet = w.add(0)
	w.stop()
	return z, nil
}

// prune removes what a zoo that was killed has left: memory and cgroups, named by its pid.
func prune() {
	for _, pattern := range []string{"/dev/shm/zoo-*", "/sys/fs/cgroup/zoo-*", "/sys/fs/cgroup/unified/zoo-*", "/sys/fs/cgroup/cpu/zoo-*"} {
		dirs, _ := filepath.Glob(pattern)
		for _, dir := range dirs {
			pid, err := strconv.Atoi(strings.SplitN(filepath.Base(dir), "-", 3)[1])
			if err != nil || syscall.Kill(pid, 0) == nil {
				continue
			}
			if strings.HasPrefix(dir, "/dev/shm/") {
				_ = os.RemoveAll(dir)
			} else {
				_ = os.Remove(dir)
			}
		}
	}
}

// planned is a run to make.
type planned struct {
	fault *fault
	job   *zoo.Job
}

// plan spreads the runs over the faults, and each fault's over the jobs that it fits.
func (z *zooRunner) plan(jobs, faults string, runs int, seed uint64) ([]planned, error) {
	list := zoo.Jobs()
	if jobs != "" && jobs != "all" {
		list = nil
		for _, name := range strings.Split(jobs, ",") {
			j, err := zoo.Named(name)
			if err != nil {
				return nil, err
			}
			list = append(list, j)
		}
	}
	rows, err := selected(faults)
	if err != nil {
		return nil, err
	}
	if runs == 0 {
		runs = len(rows)
	}
	r := rand.New(rand.NewPCG(seed, 77))
	decks := make([][]*zoo.Job, len(rows))
	var plan []planned
	for barren := 0; len(plan) < runs && barren < len(rows); {
		order := r.Perm(len(rows))
		barren = 0
		for _, i := range order {
			if len(plan) == runs {
				break
			}
			if len(decks[i]) == 0 {
				for _, k := range r.Perm(len(list)) {
					if rows[i].fits == nil || rows[i].fits(list[k]) {
						decks[i] = append(decks[i], list[k])
					}
				}
			}
			if len(decks[i]) == 0 {
				barren++
				continue
			}
			plan = append(plan, planned{&rows[i], decks[i][0]})
			decks[i] = decks[i][1:]
		}
	}
	if len(plan) == 0 {
		return nil, errors.New("no fault fits any of these jobs")
	}
	return plan, nil
}

// one makes a run and keeps its logs where it is a miss.
func (z *zooRunner) one(ctx context.Context, i int, seed uint64, p planned) (res result) {
	rnd := rand.New(rand.NewPCG(seed, 1000+uint64(i)))
	res = result{Run: i, Seed: seed, Fault: p.fault.name, Job: p.job.Name, Class: p.fault.class[0],
		Habit:    string(zoo.Habits[rnd.IntN(len(zoo.Habits))]),
		Launcher: []string{launchRun, launchHold, launchPlain}[rnd.IntN(3)],
		Pods:     rnd.IntN(2) == 0}
	if p.fault.needs&needPods != 0 {
		res.Pods = true
	}
	switch {
	case z.noNet != nil:
		res.Skipped = z.noNet.Error()
		return res
	case p.fault.needs&needCgroup != 0 && z.noCgroup != nil:
		res.Skipped = z.noCgroup.Error()
		return res
	}
	if p.fault.undisturbed() && z.watch > 0 {
		long := *p.fault
		long.limit, p.fault = z.watch, &long
	}
	began := time.Now()
	dir := filepath.Join(z.out, fmt.Sprintf("seed%d-run%03d-%s-%s", seed, i, p.fault.name, p.job.Name))
	_ = os.RemoveAll(dir)
	c := &cluster{lockstep: z.lockstep, self: z.self, dir: dir, shm: fmt.Sprintf("%s-%d", z.shm, i), job: p.job, habit: zoo.Habit(res.Habit), launcher: res.Launcher, pods: res.Pods, cg: newCgroups(), life: runLife + p.fault.limit}
	if p.fault.needs&needSpin != 0 {
		c.spin = 0.25
	}
	c, err := newCluster(c)
	if err == nil {
		err = func() error {
			defer c.stop()
			return (&run{c: c, f: p.fault, rand: rnd, noise: rand.New(rand.NewPCG(seed, 2))}).do(ctx, &res)
		}()
	}
	if err != nil {
		res.Broken = err.Error()
	}
	res.Took = time.Since(began).Seconds()
	if b, err := json.MarshalIndent(res, "", " "); err == nil {
		_ = os.WriteFile(filepath.Join(dir, "result.json"), b, 0o600)
	}
	if res.Hit && !z.keep && res.HealthySuspected == 0 && (res.Class != healthy || len(res.All) == 0) {
		_ = os.RemoveAll(dir)
	}
	return res
}

// add takes a result, writes it down and tells of it.
func (z *zooRunner) add(res result, of int, spent time.Duration) error {
	z.mu.Lock()
	defer z.mu.Unlock()
	z.results = append(z.results, res)
	n := len(z.results)
	eta := spent / time.Duration(n) * time.Duration(of-n)
	fmt.Printf("%3d/%d %-20s %-7s %-4s %s [run %d, %s, %s to go]\n", n, of, res.Fault, res.Job, res.word(), res.brief(), res.Run, spent.Round(time.Second), eta.Round(time.Second))
	b, err := json.Marshal(res)
	if err != nil {
		return err
	}
	_, err = z.file.Write(append(b, '\n'))
	return err
}
