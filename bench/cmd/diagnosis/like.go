package main

import (
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/lockstep-ccl/lockstep/diagnosis"
	"github.com/lockstep-ccl/lockstep/diagnosis/jobsim"
	"github.com/lockstep-ccl/lockstep/diagnosis/replay"
	"github.com/lockstep-ccl/lockstep/record"
)

// A job is measured in what its evidence looks like while nothing is told: the simulator is to
// look as recordings of real jobs do. Quantities have no unit of the job's own in them: times are
// parts of what an operation or a step of the same job takes, shares are of passes.

// quantity is one property of evidence, by its place in signs.
type quantity int

const (
	reportGap     quantity = iota // between two reports of a node, ms, median
	reportLate                    // the same, 99th percentile over median
	mapError                      // bound on a clock's mapping, µs, median
	opLength                      // an operation's transfer, ms, median: what the rest is measured in
	transferVary                  // 90th percentile over median of a member's transfer of an operation, between passes
	ownVary                       // the same of its own time before one
	waitShare                     // waiting, of a member's time in operations
	endSpread                     // between the first and the last end of a sampled collective, µs, median
	endSpreadMost                 // the same, 99th percentile
	flowing                       // passes at which a connection has bytes that are not taken
	blocked                       // passes at which it has no credit
	waiting                       // passes at which its receiver waits
	waitingAge                    // for how long, in operations, median
	windowsPerOp                  // of a connection's monitor, an operation of its source
	slowWindows                   // share of them that the monitor calls slow
	delayTime                     // a connection's delay, 90th percentile over median, between passes
	delaySpace                    // the same between the connections of a communicator
	delayOp                       // a window's delay as part of an operation
	rttTime                       // a connection's round-trip time, 90th percentile over median, between passes
	rttSpace                      // the same between the connections of a communicator
	rttLong                       // the same, ms, median
	causeNetwork                  // passes with a new window whose cause is so, of all with a new window
	causeSender
	causeReceiver
	causeCPU
	sentAgain // share of passes with a new window in which bytes were sent again
	cpuBusy   // share of a core a rank uses, median
	starved   // share of time a rank is runnable and does not run, median
	starved9  // the same, 99th percentile
	pressure  // CPU pressure of a node, median
	quantities
)

var quantityNames = [quantities]string{
	"report gap ms p50", "report gap p99/p50", "map error us p50", "transfer ms p50", "transfer p90/p50 in time", "own time p90/p50 in time", "wait share of op",
	"end spread us p50", "end spread us p99", "bytes outstanding", "no credit", "receiver waits", "waits for, in transfers p50", "windows an op", "slow windows",
	"delay p90/p50 in time", "delay p90/p50 in space", "delay, in transfers", "RTT p90/p50 in time", "RTT p90/p50 in space", "RTT ms p50", "cause network", "cause sender", "cause receiver", "cause CPU", "sent again", "CPU p50", "starved p50", "starved p99", "CPU pressure p50",
}

// signs collects one job's quantities.
type signs struct {
	of        [quantities][]float64
	transport record.Transport
	last      []diagnosis.Comm // of the pass before, members copied
	windows   map[connKey]window
	seen      []int64
	arrivals  map[arrivalKey]bool
	passes    int
}

type connKey struct {
	comm     uint64
	src, dst int32
	name     string
}

type arrivalKey struct{ comm, seq uint64 }

type window struct {
	n, slow     uint64
	ops, resent uint64
	delays      []float64
	rtts        []float64
}

func newSigns() *signs {
	return &signs{windows: map[connKey]window{}, arrivals: map[arrivalKey]bool{}}
}

func (s *signs) add(q quantity, v float64) {
	if !math.IsNaN(v) && !math.IsInf(v, 0) && len(s.of[q]) < 1<<20 {
		s.of[q] = append(s.of[q], v)
	}
}

func bit(b bool) float64 {
	if b {
		return 1
	}
	return 0
}

// pass takes in one pass.
func (s *signs) pass(ev *diagnosis.Evidence) {
	s.passes++
	s.nodes(ev)
	for i := range ev.Ranks {
		if r := &ev.Ranks[i]; r.Proc == diagnosis.ProcRunning {
			s.add(cpuBusy, float64(r.CPU))
			s.add(starved, float64(r.Starved))
			s.add(starved9, float64(r.Starved))
		}
	}
	length := make([]float64, len(ev.Comms)) // of an operation's transfer, ns
	for i := range ev.Comms {
		length[i] = s.comm(&ev.Comms[i])
	}
	for i := range ev.Conns {
		if c := &ev.Conns[i]; c.Comm >= 0 && int(c.Comm) < len(length) && length[c.Comm] > 0 {
			s.conn(ev, c, length[c.Comm])
		}
	}
	for i := range ev.Arrivals {
		s.arrival(ev, &ev.Arrivals[i])
	}
	s.last = s.last[:0]
	for i := range ev.Comms {
		c := ev.Comms[i]
		c.Members = slices.Clone(c.Members)
		s.last = append(s.last, c)
	}
}

func (s *signs) nodes(ev *diagnosis.Evidence) {
	for i := range ev.Nodes {
		n := &ev.Nodes[i]
		if len(s.seen) <= i {
			s.seen = append(s.seen, n.LastSeen)
		}
		if n.LastSeen > s.seen[i] && s.seen[i] > 0 {
			gap := float64(n.LastSeen-s.seen[i]) / 1e6
			s.add(reportGap, gap)
			s.add(reportLate, gap)
		}
		s.seen[i] = n.LastSeen
		s.add(mapError, float64(n.MapError)/1e3)
		s.add(pressure, float64(n.CPUPressure))
	}
}

// comm takes in what members did since the pass before, and returns how long a transfer takes.
func (s *signs) comm(c *diagnosis.Comm) float64 {
	at := slices.IndexFunc(s.last, func(x diagnosis.Comm) bool { return x.ID == c.ID && len(x.Members) == len(c.Members) })
	var ops, transfer uint64
	for i := range c.Members {
		m := &c.Members[i]
		ops, transfer = ops+m.Ops, transfer+m.TransferNs
		if at < 0 {
			continue
		}
		was := &s.last[at].Members[i]
		if n := m.Ops - was.Ops; m.Ops > was.Ops && was.Ops > 50 {
			t, w := float64(m.TransferNs-was.TransferNs)/float64(n), float64(m.WaitNs-was.WaitNs)/float64(n)
			mean := float64(was.TransferNs) / float64(was.Ops)
			s.add(transferVary, t/mean)
			s.add(ownVary, float64(m.OwnNs-was.OwnNs)/float64(n)/(float64(was.OwnNs)/float64(was.Ops)))
			s.add(opLength, t/1e6)
			s.add(waitShare, w/(w+t))
		}
	}
	if ops < 50*uint64(len(c.Members)) {
		return 0
	}
	return float64(transfer) / float64(ops)
}

func (s *signs) conn(ev *diagnosis.Evidence, c *diagnosis.Conn, op float64) {
	if c.Transport != record.TransportSHM || s.transport == record.TransportNone {
		s.transport = max(s.transport, c.Transport)
	}
	s.add(flowing, bit(c.Outstanding > 0))
	s.add(blocked, bit(c.TxBlockedSince > 0))
	s.add(waiting, bit(c.RxWaitingSince > 0))
	if c.RxWaitingSince > 0 {
		s.add(waitingAge, float64(ev.Now-c.RxWaitingSince)/op)
	}
	k := connKey{ev.Comms[c.Comm].ID, c.Src, c.Dst, c.Name}
	was, known := s.windows[k]
	if members := ev.Comms[c.Comm].Members; known && c.Windows > was.n && int(c.Src) < len(members) {
		if ops := members[c.Src].Ops; ops > was.ops {
			s.add(windowsPerOp, float64(c.Windows-was.n)/float64(ops-was.ops))
		}
		s.add(slowWindows, float64(c.SlowWindows-was.slow)/float64(c.Windows-was.n))
		s.add(delayOp, c.LatencyNs/op)
		s.add(sentAgain, bit(c.Resent > was.resent))
		for q, cause := range map[quantity]record.Cause{causeNetwork: record.CauseNetwork, causeSender: record.CauseSenderStarved, causeReceiver: record.CauseReceiverNotReady, causeCPU: record.CauseCPUStarved} {
			s.add(q, bit(c.Cause == cause))
		}
		if len(was.delays) < 1<<14 {
			was.delays = append(was.delays, c.LatencyNs)
		}
	}
	if known && c.RTTNs > 0 && len(was.rtts) < 1<<14 {
		was.rtts = append(was.rtts, c.RTTNs)
	}
	if members := ev.Comms[c.Comm].Members; int(c.Src) < len(members) {
		s.windows[k] = window{c.Windows, c.SlowWindows, members[c.Src].Ops, c.Resent, was.delays, was.rtts}
	}
}

// arrival takes in a collective that is complete.
func (s *signs) arrival(ev *diagnosis.Evidence, a *diagnosis.Arrival) {
	if int(a.Comm) >= len(ev.Comms) || slices.Contains(a.End, 0) || len(a.End) < 2 {
		return
	}
	k := arrivalKey{ev.Comms[a.Comm].ID, a.Seq}
	if s.arrivals[k] || len(s.arrivals) > 1<<18 {
		return
	}
	s.arrivals[k] = true
	spread := float64(slices.Max(a.End)-slices.Min(a.End)) / 1e3
	s.add(endSpread, spread)
	s.add(endSpreadMost, spread)
}

// sum is the job's quantities; NaN for what it does not have.
func (s *signs) sum() (v [quantities]float64) {
	at := func(of []float64, q float64) float64 {
		if len(of) == 0 {
			return math.NaN()
		}
		slices.Sort(of)
		return of[min(len(of)-1, int(q*float64(len(of))))]
	}
	mean := func(of []float64) float64 {
		if len(of) == 0 {
			return math.NaN()
		}
		sum := 0.0
		for _, x := range of {
			sum += x
		}
		return sum / float64(len(of))
	}
	for q := range quantities {
		of := s.of[q]
		switch q {
		case reportLate, transferVary, ownVary:
			p := 0.9
			if q == reportLate {
				p = 0.99
			}
			v[q] = at(of, p) / at(of, 0.5)
		case endSpreadMost, starved9:
			v[q] = at(of, 0.99)
		case flowing, blocked, waiting, causeNetwork, causeSender, causeReceiver, causeCPU, sentAgain, slowWindows:
			v[q] = mean(of)
		case delayTime, delaySpace, rttTime, rttSpace, rttLong:
		default:
			v[q] = at(of, 0.5)
		}
	}
	apart := func(of func(window) []float64) (time, space, long float64) {
		var within, medians []float64
		for _, w := range s.windows {
			if x := of(w); len(x) >= 20 {
				m := at(x, 0.5)
				within = append(within, at(x, 0.9)/m)
				medians = append(medians, m)
			}
		}
		return at(within, 0.5), at(medians, 0.9) / at(medians, 0.5), at(medians, 0.5) / 1e6
	}
	v[delayTime], v[delaySpace], _ = apart(func(w window) []float64 { return w.delays })
	v[rttTime], v[rttSpace], v[rttLong] = apart(func(w window) []float64 { return w.rtts })
	return v
}

// ofRecording measures a recording up to the first verdict.
func ofRecording(path string) (*signs, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	r, err := replay.NewReader(f, replay.Limits{})
	if err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	s := newSigns()
	for {
		p, err := r.Next()
		switch {
		case errors.Is(err, io.EOF) || err == nil && len(p.Told) > 0:
			return s, nil
		case err != nil:
			return nil, fmt.Errorf("%s: %w", path, err)
		}
		s.pass(p.Evidence)
	}
}

// ofJob measures a healthy simulated job for two minutes.
func ofJob(set jobsim.Set, seed uint64, ranks int) (*signs, *jobsim.Scenario, error) {
	sc, err := jobsim.Make(set, jobsim.Rows()[0], seed, ranks)
	if err != nil {
		return nil, nil, err
	}
	j, err := jobsim.New(sc.Config)
	if err != nil {
		return nil, nil, err
	}
	s := newSigns()
	for range 1200 {
		j.Advance(100 * time.Millisecond)
		s.pass(j.Evidence())
	}
	return s, sc, nil
}

// like prints what recordings look like beside what simulated jobs do, by transport: least, median
// and most of the jobs.
func like(w io.Writer, set jobsim.Set, pattern string, ranks, jobs int) error {
	files, err := filepath.Glob(pattern)
	if err != nil {
		return err
	}
	all := map[string][][quantities]float64{}
	for _, file := range files {
		s, err := ofRecording(file)
		if err != nil {
			return err
		}
		if s.passes < 50 {
			continue // it is told of from the start
		}
		kind := "recorded " + s.transport.String()
		if strings.HasPrefix(filepath.Base(file), "nccl") {
			kind += " nccl"
		}
		all[kind] = append(all[kind], s.sum())
	}
	for i := range jobs {
		s, _, err := ofJob(set, uint64(i), ranks)
		if err != nil {
			return err
		}
		kind := "simulated " + s.transport.String()
		all[kind] = append(all[kind], s.sum())
	}
	t := tabwriter.NewWriter(w, 2, 8, 2, ' ', 0)
	var kinds []string
	for k := range all {
		kinds = append(kinds, k)
	}
	slices.Sort(kinds)
	fmt.Fprint(t, "least, median, most of jobs")
	for _, k := range kinds {
		fmt.Fprintf(t, "\t%s (%d)", k, len(all[k]))
	}
	fmt.Fprintln(t)
	for q := range quantities {
		fmt.Fprint(t, quantityNames[q])
		for _, k := range kinds {
			var of []float64
			for _, v := range all[k] {
				if !math.IsNaN(v[q]) {
					of = append(of, v[q])
				}
			}
			slices.Sort(of)
			if len(of) == 0 {
				fmt.Fprint(t, "\t–")
				continue
			}
			fmt.Fprintf(t, "\t%.3g, %.3g, %.3g", of[0], of[len(of)/2], of[len(of)-1])
		}
		fmt.Fprintln(t)
	}
	return t.Flush()
}
