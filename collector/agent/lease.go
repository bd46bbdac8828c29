package agent

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"time"

	"github.com/lockstep-ccl/lockstep/collector/wire"
	"github.com/lockstep-ccl/lockstep/internal/statedir"
	"github.com/lockstep-ccl/lockstep/record"
)

// A lease counts from an anchor, which outlives the agent: the last moment at which the job's
// master is known to have heard this node. The keeper saves the anchors of jobs with leases in
// a file that only this user can write, and the next agent goes on from there. A master is told
// of a lease only once its job's anchor is in the file. An anchor that is too old ends a lease
// early, never late.

const (
	anchorFile   = "anchors.json"
	anchorFormat = 1
	anchorLimit  = 64 << 10
	// keepEvery is the time between two writes, at least, ns.
	keepEvery = int64(time.Second)
	// maxAnchors bounds the jobs of the file: those of this agent, and as many that only former ones have met.
	maxAnchors = 2 * maxJobs
	// anchorAge is the age from which on nobody's lease counts from an anchor.
	anchorAge = int64(maxLease + maxGrace)
)

// anchors are jobs' anchors, CLOCK_MONOTONIC ns.
type anchors map[string]int64

// leases is the agent's part; its zero value is that of an agent without leases.
type leases struct {
	keeper *keeper // nil: no rank has had a lease
	former anchors // what former agents have left, nil: it is not known yet
	keptAt int64   // when the keeper was last asked
}

func (l *leases) stop() {
	if l.keeper != nil {
		l.keeper.stop()
	}
}

// expired reports whether a rank's lease has run out, and since when the master has not heard
// this agent. A stream that has just begun gets time to be heard: the master may have been
// there all the while.
func (a *Agent) expired(j *job, r *rank, now int64) (since int64, over bool) {
	if r.terms.lease == 0 || j.stream == nil {
		return 0, false
	}
	since = max(j.stream.heard.Load(), a.firstHeard(j, r))
	return since, now-since > int64(r.terms.lease) && now-j.stream.began > int64(wire.LeaseComeback)
}

// firstHeard is what a rank's lease counts from while the master has not heard this agent. A
// former agent may have told it of a rank that is older than this one.
func (a *Agent) firstHeard(j *job, r *rank) int64 {
	at, known := a.leases.former[j.name]
	if known && r.terms.began != 0 && r.terms.began < a.began {
		return max(at, r.terms.began)
	}
	return max(r.metAt, j.stream.began)
}

// promise is the lease that a master is told: by when the rank is killed at the latest. It is 0
// unless an agent that starts again would keep it.
func (r *rank) promise() time.Duration {
	if r.terms.lease == 0 || !r.job.anchored {
		return 0
	}
	return r.terms.lease + r.terms.grace
}

// keepAnchors has the anchors written when they have moved, at most once in keepEvery.
func (a *Agent) keepAnchors(ctx context.Context, now int64) {
	l := &a.leases
	any := false
	for _, j := range a.jobs {
		j.leased = !j.misnamed && j.hasLease()
		any = any || j.leased
	}
	if l.keeper == nil {
		if !any {
			return
		}
		l.keeper = startKeeper(ctx, a.o.Dir, a.o.Node, a.hello.BootId, a.log)
	}
	if l.former == nil {
		if read := l.keeper.read.Load(); read != nil {
			l.former = *read
		}
	}
	if l.former == nil {
		return
	}
	a.noteAnchored()
	if now-l.keptAt < keepEvery {
		return
	}
	l.keptAt = now
	l.keeper.keep(a.anchors(now), now)
}

func (j *job) hasLease() bool {
	for _, r := range j.ranks {
		if r.terms.lease != 0 && !r.p.Dead() {
			return true
		}
	}
	return false
}

// noteAnchored looks which jobs' anchors are in the file.
func (a *Agent) noteAnchored() {
	w := a.leases.keeper.written.Load()
	for _, j := range a.jobs {
		_, former := a.leases.former[j.name]
		if w != nil && w.asked >= j.metAt {
			_, now := w.anchors[j.name]
			former = former || now
		}
		j.anchored = j.leased && (j.anchored || former)
	}
}

// anchors are those of this agent's jobs, and of former ones' whose ranks it has not met.
func (a *Agent) anchors(now int64) anchors {
	former := a.leases.former
	all := make(anchors, len(former)+len(a.jobs))
	for _, j := range a.jobs {
		if !j.leased {
			continue
		}
		all[j.name] = cmp.Or(former[j.name], j.metAt) // its master has heard of it no earlier
		if j.stream != nil {
			all[j.name] = max(all[j.name], j.stream.heard.Load())
		}
	}
	for name, at := range former {
		if _, met := all[name]; !met && now-at < anchorAge && len(all) < maxAnchors {
			all[name] = at
		}
	}
	return all
}

// keeper reads and writes the file, in a goroutine of its own: a disk may wait.
type keeper struct {
	node, boot string
	log        *slog.Logger
	read       atomic.Pointer[anchors] // what former agents have left
	written    atomic.Pointer[written]
	next       chan written
	cancel     context.CancelFunc
	over       sync.WaitGroup
}

// written is what is in the file.
type written struct {
	anchors
	asked int64 // when the agent asked for that
}

func startKeeper(ctx context.Context, dir, node, boot string, log *slog.Logger) *keeper {
	k := &keeper{node: node, boot: boot, log: log, next: make(chan written, 1)}
	if dir == "" {
		dir = record.DefaultDir()
	}
	ctx, k.cancel = context.WithCancel(ctx)
	k.over.Go(func() { k.run(ctx, dir) })
	return k
}

func (k *keeper) stop() {
	k.cancel()
	k.over.Wait()
}

// keep hands over what the file shall hold, unless it holds that already or the last write is
// under way.
func (k *keeper) keep(all anchors, now int64) {
	if w := k.written.Load(); w != nil && maps.Equal(w.anchors, all) {
		return
	}
	select {
	case k.next <- written{all, now}:
	default:
	}
}

func (k *keeper) run(ctx context.Context, dir string) {
	told := false
	trouble := func(err error) {
		if err != nil && !told {
			told = true
			k.log.Error("leases would not outlive this agent, so masters are not told of them: tried again and again", "err", err)
		}
	}
	d := k.open(ctx, dir, trouble)
	if d == nil {
		return
	}
	defer d.Close()
	former := k.load(d)
	k.read.Store(&former)
	for {
		select {
		case <-ctx.Done():
			return
		case w := <-k.next:
			err := k.save(d, w.anchors)
			if trouble(err); err == nil {
				k.written.Store(&w)
			}
		}
	}
}

// open opens the node's directory below this user's runtime directory, nil when ctx ends before.
// Another agent of this node that lives has it for itself.
func (k *keeper) open(ctx context.Context, base string, trouble func(error)) *statedir.Dir {
	for {
		own, _, err := record.DirBelow(base, "")
		if err == nil {
			var d *statedir.Dir
			if d, err = statedir.Open(filepath.Join(own, ".agent-"+fileName(k.node))); err == nil {
				return d
			}
		}
		trouble(err)
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(time.Second):
		}
	}
}

// fileName is a node's name as a part of a file's.
func fileName(node string) string {
	if wire.CheckNode(node) == nil {
		return node
	}
	return fmt.Sprintf("%x", node)
}

// load returns what former agents have left; nothing where the file cannot be used.
func (k *keeper) load(d *statedir.Dir) anchors {
	b, err := d.ReadFile(anchorFile, anchorLimit)
	if errors.Is(err, os.ErrNotExist) {
		return anchors{}
	}
	var all anchors
	if err == nil {
		all, err = parseAnchors(b, k.node, k.boot, record.Now())
	}
	if err != nil {
		k.log.Warn("leases count from now: what the last agent has left of them is not read", "err", err)
		return anchors{}
	}
	return all
}

func (k *keeper) save(d *statedir.Dir, all anchors) error {
	b, err := json.Marshal(savedAnchors{anchorFormat, k.boot, k.node, all})
	if err != nil {
		return err
	}
	return d.ReplaceUntilBoot(anchorFile, b)
}

// savedAnchors is the file. Its clock is that of one boot.
type savedAnchors struct {
	Version int     `json:"version"`
	Boot    string  `json:"boot_id"`
	Node    string  `json:"node"`
	Jobs    anchors `json:"jobs"` // CLOCK_MONOTONIC ns
}

// parseAnchors returns the anchors of a file, none of another boot's.
func parseAnchors(b []byte, node, boot string, now int64) (anchors, error) {
	var s savedAnchors
	if err := json.Unmarshal(b, &s); err != nil {
		return nil, fmt.Errorf("anchors of leases: %w", err)
	}
	switch {
	case s.Version != anchorFormat:
		return nil, fmt.Errorf("anchors of leases: version %d, want %d", s.Version, anchorFormat)
	case s.Boot != boot:
		return anchors{}, nil
	case s.Node != node:
		return nil, fmt.Errorf("anchors of leases: they are node %.64q's", s.Node)
	case len(s.Jobs) > maxAnchors:
		return nil, fmt.Errorf("anchors of leases: %d jobs, at most %d", len(s.Jobs), maxAnchors)
	}
	all := make(anchors, len(s.Jobs))
	for name, at := range s.Jobs {
		if wire.CheckJob(name) != nil || at <= 0 || at > now {
			return nil, fmt.Errorf("anchors of leases: job %.64q at %d, and it is %d now", name, at, now)
		}
		if now-at < anchorAge {
			all[name] = at
		}
	}
	return all, nil
}
