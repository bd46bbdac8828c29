package slurm

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/lockstep-ccl/lockstep/remediation"
)

// fake is a model of Slurm with one job, for what the real one does not do on demand: to
// fail at one command and not at the next, to forget what it has just said yes to. What it
// does when nothing fails is what was seen of a real one (real_test.go).
type fake struct {
	mu       sync.Mutex
	id       int
	restarts int
	state    string
	comment  string
	exc      []string
	want     int // nodes
	nodes    []string
	start    time.Time
	steps    []step
	next     int
	node     map[string]string // state
	reason   map[string]string
	spares   []string
	loop     bool
	denied   bool // the account may not change nodes

	ran   []string // what happened: started, requeued, cancelled
	calls []string
	saved snapshot
	// before is asked before a command does anything, after when it has.
	before, after func(cmd string) error
}

type snapshot struct {
	comment string
	exc     []string
	node    map[string]string
	reason  map[string]string
}

const fakeUnit = 4 * time.Millisecond // a second of Slurm's

func newFake(total, want, alloc int, loop bool) *fake {
	f := &fake{id: 7, state: "RUNNING", want: alloc, loop: loop, node: map[string]string{}, reason: map[string]string{}}
	for i := range total {
		f.node[fmt.Sprint("n", i+1)] = "idle"
	}
	if f.comment = "the user's own"; loop {
		f.comment += fmt.Sprintf(" [lockstep/1 nodes=%d do=none]", want)
	}
	f.launch()
	f.save()
	return f
}

func (f *fake) save() {
	f.saved = snapshot{f.comment, slices.Clone(f.exc), maps.Clone(f.node), maps.Clone(f.reason)}
}

// forget is what a slurmctld does that dies before it has saved.
func (f *fake) forget() {
	f.comment, f.exc, f.node, f.reason = f.saved.comment, slices.Clone(f.saved.exc), maps.Clone(f.saved.node), maps.Clone(f.saved.reason)
}

// launch starts the job on free nodes.
func (f *fake) launch() bool {
	free := []string{}
	for _, n := range slices.Sorted(maps.Keys(f.node)) {
		if f.node[n] == "idle" && !slices.Contains(f.exc, n) && !slices.Contains(f.spares, n) {
			free = append(free, n)
		}
	}
	if len(free) < f.want {
		return false
	}
	f.nodes, f.state, f.start, f.next = free[:f.want], "RUNNING", time.Now(), 0
	f.ran = append(f.ran, fmt.Sprint("started ", f.nodes))
	if f.loop {
		m, _ := parseMarker(f.comment)
		f.startStep(m.nodes)
	} else {
		f.steps = []step{{id: fmt.Sprintf("%d.0", f.id), attempt: -1, started: time.Now(), nodes: f.nodes}}
	}
	return true
}

func (f *fake) startStep(n int) {
	m, _ := parseMarker(f.comment)
	good := minus(f.nodes, m.without)
	if len(good) < n {
		f.state = "FAILED"
		return
	}
	attempt := f.restarts*attemptsPerAllocation + f.next
	f.steps = []step{{id: fmt.Sprintf("%d.%d", f.id, f.next), attempt: attempt, started: time.Now(), nodes: good[:n]}}
	f.next++
	f.ran = append(f.ran, fmt.Sprintf("attempt %d %v", attempt, good[:n]))
}

// pass is what Slurm and the loop do by themselves.
func (f *fake) pass() {
	now := time.Now()
	switch {
	case f.state == "COMPLETING" && now.After(f.start):
		f.state, f.start = "PENDING", now.Add(20*fakeUnit)
	case f.state == "PENDING" && now.After(f.start):
		f.launch()
	case f.state == "RUNNING" && f.loop && len(f.steps) == 0:
		m, ok := parseMarker(f.comment)
		if last := f.restarts*attemptsPerAllocation + f.next - 1; ok && m.attempt == last && m.do == doGo {
			f.startStep(m.nodes)
		}
	}
}

func (f *fake) run(ctx context.Context, name string, args ...string) (string, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if ctx.Err() != nil {
		return "", ctx.Err()
	}
	cmd := name + " " + strings.Join(args, " ")
	f.calls = append(f.calls, cmd)
	f.pass()
	if f.before != nil {
		if err := f.before(cmd); err != nil {
			return "", err
		}
	}
	out, err := f.do(name, args)
	if f.after != nil && err == nil {
		err = f.after(cmd)
	}
	return out, err
}

func pad(columns []column, values ...string) string {
	s := ""
	for i, c := range columns {
		s += fmt.Sprintf("%-*.*s", c.width, c.width, values[i])
	}
	return s + "\n"
}

func (f *fake) do(name string, args []string) (string, error) {
	all := strings.Join(args, " ")
	id := strconv.Itoa(f.id)
	switch {
	case name == "squeue" && strings.Contains(all, format(jobColumns)):
		if !slices.Contains(args, id) {
			return "", remediation.ErrGone
		}
		return pad(jobColumns, id, strconv.Itoa(f.restarts), f.state, "alice", "main", "n1", strconv.FormatInt(f.shown(), 10), strings.Join(f.nodes, ","), f.comment), nil
	case name == "squeue" && strings.Contains(all, format(stepColumns)):
		out := pad(stepColumns, id+".batch", "RUNNING", "1", "n1", "batch")
		for _, s := range f.steps {
			n := "python"
			if s.attempt >= 0 {
				n = StepPrefix + strconv.Itoa(s.attempt)
			}
			out += pad(stepColumns, s.id, "RUNNING", strconv.FormatInt(s.started.Unix(), 10), strings.Join(s.nodes, ","), n)
		}
		return out, nil
	case name == "squeue" && slices.Contains(args, "-s"):
		out := ""
		for _, s := range f.steps {
			out += pad([]column{{"StepID", 48}}, s.id)
		}
		return out, nil
	case name == "squeue" && slices.Contains(args, "%x"):
		return strings.Join(f.exc, ",") + "\n", nil
	case name == "sattach":
		out := ""
		for i, n := range f.steps[0].nodes {
			out += fmt.Sprintf("\tNode %d (%s), 1 task(s): %d\n", i, n, i)
		}
		return out, nil
	case name == "scancel":
		if i := slices.IndexFunc(f.steps, func(s step) bool { return s.id == args[0] }); i >= 0 {
			f.ran = append(f.ran, "cancelled "+args[0])
			f.steps = slices.Delete(f.steps, i, i+1)
		}
		return "", nil
	case name == "scontrol" && args[0] == "requeue":
		if f.state == "PENDING" || f.state == "COMPLETING" {
			return "", errors.New("Job is pending execution")
		}
		f.ran = append(f.ran, "requeued")
		f.restarts++
		f.steps, f.state, f.start = nil, "COMPLETING", time.Now().Add(2*fakeUnit)
		return "", nil
	case name == "scontrol" && args[0] == "show" && args[1] == "hostnames":
		return strings.ReplaceAll(args[2], ",", "\n"), nil
	case name == "scontrol" && strings.Contains(all, "show reservation"):
		if len(f.spares) == 0 {
			return "", errors.New("Reservation spares not found")
		}
		return "ReservationName=spares StartTime=1 Nodes=" + strings.Join(f.spares, ",") + " NodeCnt=1", nil
	case name == "scontrol" && args[0] == "delete":
		f.spares = nil
		return "", nil
	case name == "scontrol" && args[0] == "update":
		return "", f.update(args[1], args[2:])
	case name == "sinfo" && slices.Contains(args, "-p"):
		var idle []string
		for n, s := range f.node {
			if s == "idle" && !slices.Contains(f.nodes, n) && !slices.Contains(f.spares, n) {
				idle = append(idle, n)
			}
		}
		return strings.Join(idle, "\n"), nil
	case name == "sinfo":
		n := args[3]
		return pad(nodeColumns, n, "", "", f.node[n], f.reason[n]), nil
	}
	return "", fmt.Errorf("the fake does not know %s %s", name, all)
}

// shown is the start as Slurm tells it, in whole seconds.
func (f *fake) shown() int64 {
	return time.Now().Add(time.Until(f.start) / fakeUnit * time.Second).Unix()
}

func (f *fake) update(what string, values []string) error {
	kind, name, _ := strings.Cut(what, "=")
	for _, v := range values {
		k, v, _ := strings.Cut(v, "=")
		switch {
		case kind == "jobid" && k == "comment":
			f.comment = v
		case kind == "jobid" && k == "excnodelist":
			if f.state == "RUNNING" {
				return ErrNotPending
			}
			f.exc = strings.Split(v, ",")
		case kind == "jobid" && k == "starttime":
			if f.state == "RUNNING" {
				return ErrNotPending
			}
			f.start = time.Now().Add(2 * fakeUnit)
		case kind == "nodename" && f.denied:
			return fmt.Errorf("%w: Invalid user id", ErrDenied)
		case kind == "nodename" && k == "state":
			f.node[name] = v + "ed"
		case kind == "nodename" && k == "reason":
			f.reason[name] = v
		case kind == "reservationname" && k == "nodes":
			f.spares = strings.Split(v, ",")
		default:
			return fmt.Errorf("the fake does not know update %s %s", what, k)
		}
	}
	return nil
}

// count is how often something happened.
func (f *fake) count(what string) int {
	n := 0
	for _, r := range f.ran {
		if strings.HasPrefix(r, what) {
			n++
		}
	}
	return n
}
