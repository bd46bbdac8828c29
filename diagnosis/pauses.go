package diagnosis

import (
	"fmt"
	"slices"

	"github.com/lockstep-ccl/lockstep/record"
)

// pauses is the job's own history of pauses: the longest that has ended by
// itself, ns, by kind. A rank is given a multiple of it before it is blamed.
type pauses struct {
	marks    [record.NumMarks]int64 // under an open mark, by record.MarkCode
	busy, io int64                  // outside any: seen while others waited for it

	log pauseLog // of ranks that others waited for

	own   int64 // longest own time of any rank, as the ranks themselves have counted
	ownAt int64 // when it grew last
}

// ofNextAttempt is what is known of pauses when the job begins anew: the same program, on as many ranks, pauses as
// it did before. Else its first pause would be a hang again, whenever that has the job restarted.
func (p *pauses) ofNextAttempt(same bool) pauses {
	if !same {
		return pauses{log: pauseLog{}}
	}
	return pauses{marks: p.marks, busy: p.busy, io: p.io, log: p.log}
}

// recentPause is for how long the longest pause so far is taken for one that
// all ranks may share: the last of them come back a little later than the first.
const recentPause = 60e9

func (p *pauses) longestOwn(own, now int64) {
	if own <= p.own {
		return
	}
	if p.own > 0 { // else it is from before this engine, nobody knows when
		p.ownAt = now
	}
	p.own = own
}

// markHistory is the last mark seen open at a rank.
type markHistory struct {
	code record.MarkCode
	open bool
	at   int64 // when it opened
	seen int64 // last pass that saw it open
}

// follow notices marks that open and close.
func (p *pauses) follow(h *markHistory, r *Rank, now int64) {
	if h.open && (r.Mark != h.code || (r.MarkAt != 0 && r.MarkAt != h.at)) {
		h.open = false
		p.learnMark(h.code, now-h.at)
	}
	if !paused(r.Mark) {
		return
	}
	if !h.open {
		*h = markHistory{code: r.Mark, open: true, at: r.MarkAt}
		if h.at == 0 {
			h.at = now
		}
	}
	h.seen = now
}

func (p *pauses) learnMark(code record.MarkCode, length int64) {
	if int(code) < len(p.marks) {
		p.marks[code] = max(p.marks[code], length)
	}
}

// learn remembers that a rank which was suspected for a soft reason came back
// by itself after that long.
func (p *pauses) learn(reason string, length int64) {
	switch reason {
	case reasonComputing, reasonCPU:
		p.busy = max(p.busy, length)
	case reasonIO:
		p.io = max(p.io, length)
	}
}

// Reasons of a hang that ranks are blamed for.
const (
	reasonGone      = "process_gone"
	reasonExited    = "process_exited"
	reasonStopped   = "process_stopped"
	reasonDisk      = "disk_sleep"
	reasonIdle      = "idle"
	reasonComputing = "computing"
	reasonIO        = "io"
	reasonUnknown   = "unknown"
	reasonDeadlock  = "deadlock"
	reasonNodeLost  = "node_lost"
	reasonNotJoined = "not_joined"
	reasonStalled   = "stalled"
	reasonNetwork   = "network"
	reasonStraggler = "straggler"
)

// excuse is why a rank that others wait for does not come, and how long one
// waits for that reason.
type excuse struct {
	reason           string
	firm             int   // 2: process or GPU evidence, 1: idle, 0: busy with something
	since            int64 // when it was last active
	fell             int64 // when its process fell out, 0 when it did not
	suspect, confirm int64 // ns held up
}

// excuseOf judges a rank that others wait for and that waits for nobody. ci is
// the communicator where they wait.
//
// The rule for soft reasons: none is suspected before three times what the rank
// takes between two operations on average (MaxSuspectAfter at most), nor before half as
// long again as a pause that is usual for it; three times as long confirms at the
// earliest. Idle (no I/O, and less CPU than it uses as a rule) has ConfirmAfter, IdleAfter
// when it mayPause, or as long as it is away for less than twice what those who wait were
// away for. Uninterruptible sleep has IdleAfter: a slow disk and a dead one look alike.
// Computing has Grace, or three times the longest own time of any rank so far. A mark or
// I/O has the same once such a pause has completed in this job, and MaxPatience before.
// An idle rank has MaxPatience while another is under a mark.
func (d *hangs) excuseOf(rank, ci int32) excuse {
	cfg := &d.cfg
	r := &d.ev.Ranks[rank]
	x := excuse{since: d.hang.active[rank], suspect: int64(cfg.SuspectAfter), confirm: int64(cfg.ConfirmAfter)}
	if fatal := d.endedByXid(rank); d.state[rank].sick() || fatal {
		x.firm, x.fell = 2, r.ProcAt
		switch {
		case fatal:
			x.reason, x.fell = fmt.Sprintf("xid_%d", r.Xid), 0
		case r.Proc == ProcStopped:
			x.reason = reasonStopped
		case r.Proc == ProcDisk:
			x.reason = reasonDisk
			if !brokenDriver(r) {
				x.firm, x.confirm = 1, max(int64(cfg.IdleAfter), 3*d.pauses.log.usual(rank, d.now))
			}
		case r.Proc == ProcGone:
			x.reason, x.suspect, x.confirm = reasonGone, int64(cfg.GoneAfter)/2, int64(cfg.GoneAfter)
		default:
			x.reason = reasonExited
		}
		return x
	}
	usual := d.suspectAfter(&d.comms[ci])
	away := d.hang.away
	// Computing between two operations is what it does, on its GPU perhaps, which takes no CPU.
	d.sumRanks()
	own := 3 * float64(d.sums[rank].own) / float64(max(d.sums[rank].ops, 1))
	x.suspect = max(usual, int64(min(own, float64(cfg.MaxSuspectAfter))))
	switch {
	case paused(r.Mark):
		x.reason, x.confirm = r.Mark.String(), d.patienceFor(d.markLength(r.Mark))
	case r.Proc == ProcUnknown:
		x.reason, x.confirm = reasonUnknown, max(int64(cfg.Grace)/3, usual)
	case r.IO, r.Proc == ProcDisk: // else it were sick
		x.reason, x.confirm = reasonIO, d.patienceFor(d.pauses.io)
	case r.hunger() >= starvedShare:
		x.reason, x.confirm = reasonCPU, max(int64(cfg.Grace), 3*max(d.maxOwn, away), 3*d.pauses.busy)
	case r.CPU >= idleCPU, d.ranks[rank].worksAsUsual(r.CPU):
		x.reason, x.confirm = reasonComputing, max(int64(cfg.Grace), 3*max(d.maxOwn, away), 3*d.pauses.busy)
	case d.marked:
		// It may wait, outside of our sight, for a rank under its mark.
		x.reason, x.confirm = reasonIdle, int64(cfg.MaxPatience)
	default:
		x.reason, x.firm = reasonIdle, 1
		recovered := int64(0)
		if d.now-d.pauses.ownAt < recentPause && d.pauses.ownAt > x.since && d.now-x.since < 2*d.pauses.own {
			recovered = max(recovered, 2*d.pauses.own) // others have come back from such a pause since it left
		}
		x.confirm = max(int64(cfg.ConfirmAfter), usual*3/2, min(recovered, int64(cfg.Grace)))
		if d.mayPause(rank) {
			x.confirm = max(x.confirm, int64(cfg.IdleAfter))
		}
		if d.now-x.since < 2*away {
			x.confirm = max(x.confirm, 2*away)
		}
	}
	// What has been a pause before is one again, unless it lasts far longer.
	pause := d.pauses.log.usual(rank, d.now)
	if paused(r.Mark) {
		pause = max(pause, d.markLength(r.Mark))
	}
	x.suspect, x.confirm = max(x.suspect, pause*3/2), max(x.confirm, pause*3)
	if d.young(ci) {
		x.suspect = max(x.suspect, int64(cfg.StartupPatience))
		x.confirm = max(x.confirm, 2*int64(cfg.StartupPatience))
	}
	return x
}

// mayPause reports whether an idle rank may be in a pause of its own, that it comes back
// from. All ranks run the same program, so a part of it that only some of them are in was
// written for some: as a rule for the first, which saves, evaluates and logs for the
// others. And a rank that has paused before may do so for longer than ever.
func (d *hangs) mayPause(rank int32) bool {
	return rank == 0 || d.pauses.log.usual(rank, d.now) > 0
}

// sentAway gives idle ranks of several nodes IdleAfter: it is the program that sent them
// where they are, or what they all wait for.
func (d *hangs) sentAway(c *cause) {
	if c.kind != causeRank || c.reason != reasonIdle {
		return
	}
	node := d.ev.Ranks[c.nodes[0].node].Node
	if !slices.ContainsFunc(c.nodes, func(b blamed) bool { return d.ev.Ranks[b.node].Node != node }) {
		return
	}
	c.confirm = max(c.confirm, int64(d.cfg.IdleAfter))
	for i := range c.nodes {
		c.nodes[i].confirm = max(c.nodes[i].confirm, c.confirm)
	}
}

// patienceFor is how long a pause may last, given the longest of its kind that has
// ended, 0 when none has.
func (d *hangs) patienceFor(seen int64) int64 {
	if seen == 0 {
		return int64(d.cfg.MaxPatience)
	}
	return max(int64(d.cfg.Grace), 3*max(d.maxOwn, d.hang.away), 3*seen)
}

// paused reports whether an open mark excuses that a rank does not come. One who loads
// data says where it is, and may hang there.
func paused(m record.MarkCode) bool {
	return m != record.MarkNone && m != record.MarkStep && m != record.MarkDataLoading
}

// awaitsStorage reports whether a rank in uninterruptible sleep waits for storage
// that it reads or writes: what it wrote is on its way to a disk, for instance, and
// that ends by itself. Without I/O before it, and with a GPU that does not answer,
// such a sleep is a fault.
func (v *view) awaitsStorage(r *Rank, h *rankHistory) bool {
	if brokenDriver(r) {
		return false
	}
	return paused(r.Mark) || (h.io > 0 && h.io >= r.ProcAt-ioBefore)
}

// brokenDriver reports whether a rank in uninterruptible sleep waits for a GPU that does not
// answer: no pause of a program's own looks so.
func brokenDriver(r *Rank) bool {
	return r.GPU.LostAt > 0 || r.GPU.UnresponsiveAt > 0 || r.OffCPU.For.Known() == WaitForGPUDriver && r.OffCPU.Disk >= worthTelling
}

// ioBefore is how long before a sleep I/O is seen that leads to it: it is told of
// once a second or so, a sleep when two looks in a row saw it.
const ioBefore = 2e9

// starvedShare is the share of the time in which a process that wants to run does not,
// from which on that is why it does not come.
const starvedShare = 0.3

// idleCPU is the share of a core below which a process does nothing but wait.
const idleCPU = 0.1

func (v *view) markLength(code record.MarkCode) int64 {
	if int(code) < len(v.pauses.marks) {
		return v.pauses.marks[code]
	}
	return 0
}

// shared reports whether a pause is everyone's: more than half of the ranks are
// outside of all collectives, or are or just were under the same mark.
func (d *hangs) shared(rank int32) bool {
	s := &d.hang
	if 2*s.outside > s.joined {
		return true
	}
	r := &d.ev.Ranks[rank]
	if !paused(r.Mark) {
		return false
	}
	from := d.ranks[rank].mark.at - int64(d.cfg.SuspectAfter)
	same := 0
	for i := range d.ranks {
		if h := &d.ranks[i].mark; h.code == r.Mark && h.seen >= from {
			same++
		}
	}
	return 2*same > s.joined
}
