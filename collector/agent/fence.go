package agent

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"os"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/lockstep-ccl/lockstep/collector"
	"github.com/lockstep-ccl/lockstep/collector/source"
	"github.com/lockstep-ccl/lockstep/collector/wire"
	"github.com/lockstep-ccl/lockstep/record"
)

// An agent does nothing to processes unless their own environment allows it. Then a master's
// order stops those of an attempt that is over, and the lease does when the master is not
// heard. This file finds which processes are meant; fencer.go stops them.

const (
	fenceEnv      = "LOCKSTEP_FENCE"       // stop: allowed; anything else: not
	fenceTokenEnv = "LOCKSTEP_FENCE_TOKEN" // what the attempt's processes have in common
	fenceLeaseEnv = "LOCKSTEP_FENCE_LEASE" // how long they may run on though the master is not heard
	fenceGraceEnv = "LOCKSTEP_FENCE_GRACE" // between SIGTERM and SIGKILL

	minLease, maxLease = 5 * time.Second, 24 * time.Hour
	defaultGrace       = 3 * time.Second
	maxGrace           = time.Minute
	// settled is for how long the agent must have looked before it says that nothing is left.
	settled = int64(2 * time.Second)
	// maxTokens bounds what is kept of an order's attempts.
	maxTokens = 64
)

// terms is what a process's environment says of it being stopped.
type terms struct {
	known        bool // it could be read
	stop         bool
	token, node  string
	lease, grace time.Duration
	bad          string // a variable that cannot be meant: then nothing is allowed
	user         int64  // whose it is, -1 where that is not one user's
	began        int64  // CLOCK_MONOTONIC ns, 0 where it is not known
}

// termsOf reads a process's environment, as it was when its program began.
func termsOf(pid int32) terms {
	if pid <= 0 {
		return terms{}
	}
	env, err := environ(int(pid))
	if err != nil {
		return terms{}
	}
	defer clear(env)
	t := parseTerms(func(name string) string { return lookup(env, name) })
	t.user = userOf(int(pid))
	t.began = beganAt(int(pid))
	return t
}

func parseTerms(getenv func(string) string) terms {
	t := terms{known: true, grace: defaultGrace, token: getenv(fenceTokenEnv), node: getenv("LOCKSTEP_NODE")}
	duration := func(name string, least, most time.Duration, to *time.Duration) {
		v := getenv(name)
		if v == "" {
			return
		}
		d, err := time.ParseDuration(v)
		if err != nil || d < least || d > most {
			t.bad = fmt.Sprintf("%s is %.32q, want a duration from %v to %v", name, v, least, most)
			return
		}
		*to = d
	}
	duration(fenceLeaseEnv, minLease, maxLease, &t.lease)
	duration(fenceGraceEnv, 0, maxGrace, &t.grace)
	t.stop = getenv(fenceEnv) == "stop" && t.bad == ""
	if !t.stop {
		t.lease = 0
	}
	if len(t.token) < 32 || len(t.token) > 256 {
		t.token = "" // nothing that could be anybody's
	}
	return t
}

func environ(pid int) ([]byte, error) {
	f, err := os.Open(fmt.Sprintf("/proc/%d/environ", pid))
	if err != nil {
		return nil, err
	}
	defer f.Close()
	return io.ReadAll(io.LimitReader(f, maxEnviron))
}

func lookup(env []byte, name string) string {
	for kv := range bytes.SplitSeq(env, []byte{0}) {
		if k, v, ok := bytes.Cut(kv, []byte{'='}); ok && string(k) == name {
			return string(v)
		}
	}
	return ""
}

// fenceOrder is a master's, on its way to the agent's goroutine.
type fenceOrder struct {
	*wire.FenceOrder
	from *stream
}

// standing is an order that has come, on the agent's goroutine.
type standing struct {
	order  *wire.FenceOrder
	came   time.Time // by the wall clock, which recorders are created by
	at     int64     // CLOCK_MONOTONIC ns
	tokens map[string]bool
	ended  uint32 // of its processes, those that had ended
}

// fence takes an order. An order about an attempt before that of the standing order changes
// only who is answered.
func (a *Agent) fence(ctx context.Context, o fenceOrder) {
	j := a.jobs[o.from.job]
	if j == nil || j.stream != o.from {
		return
	}
	if j.standing == nil || j.standing.order.Id != o.Id {
		st := &standing{order: o.FenceOrder, came: a.o.Now(), at: record.Now(), tokens: map[string]bool{}}
		if was := j.standing; was != nil && was.order.Attempt > o.Attempt {
			// The standing order is about a later attempt, so it covers this one's processes
			// too.
			st.order = &wire.FenceOrder{Id: o.Id, Attempt: was.order.Attempt}
			st.tokens = was.tokens
		}
		for _, r := range j.ranks {
			if r.p.Attempt <= st.order.Attempt && r.p.Dead() {
				st.ended++
			}
		}
		j.standing = st
		a.log.Warn("the master orders what is left of an attempt to be stopped", "job", j.name, "attempt", o.Attempt, "order", o.Id)
	}
	a.fencer(ctx, j).answer(o.from, o.Id)
	a.suspects(ctx, j, record.Now())
}

// fencer returns a job's fencer, and makes it when it is first needed.
func (a *Agent) fencer(ctx context.Context, j *job) *fencer {
	if j.fencer == nil {
		j.fencer = newFencer(j.name, a.log)
		j.fencer.start(ctx)
	}
	return j.fencer
}

// suspects tells the job's fencer which processes are to end.
func (a *Agent) suspects(ctx context.Context, j *job, now int64) {
	var list []suspect
	later, leases, wall := 0, 0, time.Now()
	for _, r := range j.ranks {
		p := r.p
		if p.Dead() || p.Path == "" { // without a recorder nobody has said whose word it is
			continue
		}
		ordered, is := a.ordered(j, p, &r.terms)
		if is && !ordered {
			later++
		}
		since, expired := a.expired(j, r, now)
		if expired {
			leases++
		}
		if ordered || expired {
			s := suspect{
				pid: int(p.HostPID), start: p.StartTime, path: p.Path, probe: p.Source.CallsOnly(), terms: r.terms, ordered: ordered,
				name: fmt.Sprintf("rank %d of attempt %d", p.Rank, p.Attempt),
			}
			if expired {
				s.latest = wall.Add(time.Duration(since-now) + r.terms.lease + r.terms.grace + wire.LeaseRestart + wire.LeaseComeback)
			}
			list = append(list, s)
		}
	}
	if leases > 0 && !j.leaseOver {
		a.log.Error("the master is not heard for as long as the job's environment allows: its ranks on this node are stopped", "job", j.name, "ranks", leases)
		a.fencer(ctx, j).expired()
	}
	j.leaseOver = leases > 0
	if j.fencer == nil {
		return
	}
	o := orders{later: later}
	if st := j.standing; st != nil {
		o.id, o.ended = st.order.Id, st.ended
		o.settled = now-st.at > settled && now-a.began > settled
	}
	j.fencer.set(list, o)
}

// ordered reports whether a process belongs to the attempts that an order is about (is), and
// whether it has to be stopped: it began before the order came, or has the token of a process
// that did. Other processes that claim such an attempt may be of a launcher that does not count
// attempts.
func (a *Agent) ordered(j *job, p *source.Process, t *terms) (stop, is bool) {
	st := j.standing
	if st == nil || p.Attempt > st.order.Attempt {
		return false, false
	}
	if p.Created.Before(st.came) {
		if t.token != "" && len(st.tokens) < maxTokens {
			st.tokens[t.token] = true
		}
		return true, true
	}
	return st.tokens[t.token], true
}

// fences are counts for the snapshot.
func (a *Agent) fences() (all []collector.AgentFences) {
	for _, j := range a.jobs {
		if j.fencer != nil {
			all = append(all, j.fencer.counts())
		}
	}
	return all
}

// owner is whose a file is.
func owner(path string) (uid uint32, ok bool) {
	fi, err := os.Lstat(path)
	if err != nil {
		return 0, false
	}
	st, ok := fi.Sys().(*syscall.Stat_t)
	if !ok {
		return 0, false
	}
	return st.Uid, true
}

// beganAt is when a process began, CLOCK_MONOTONIC ns, and 0 where that is not to be seen. The kernel's
// word, in ticks since the boot, goes on while the machine sleeps.
func beganAt(pid int) int64 {
	const tick = int64(10 * time.Millisecond)
	start, _, err := startOf(pid)
	var boot unix.Timespec
	if err != nil || unix.ClockGettime(unix.CLOCK_BOOTTIME, &boot) != nil {
		return 0
	}
	return record.Now() - (boot.Nano() - int64(start)*tick)
}

// startOf is when a process began, in ticks since the boot, and its parent.
func startOf(pid int) (start uint64, parent int, err error) {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return 0, 0, err
	}
	// The name, in brackets, may hold anything.
	fields := strings.Fields(string(text[bytes.LastIndexByte(text, ')')+1:]))
	const ppid, starttime = 4 - 3, 22 - 3
	if len(fields) <= starttime {
		return 0, 0, fmt.Errorf("/proc/%d/stat: %d fields", pid, len(fields))
	}
	if parent, err = strconv.Atoi(fields[ppid]); err == nil {
		start, err = strconv.ParseUint(fields[starttime], 10, 64)
	}
	return start, parent, err
}
