package diagnosis

import (
	"fmt"
	"slices"
	"strings"
)

// GPU is the health of a rank's GPU as its node's agent sees it; the zero value
// when it sees none. It never makes a verdict, save for Rank.Xid: it says
// why a rank or connection that is blamed anyway is late. 0 is "not" for
// each of the times, which are of the clock of the Rank that it is in.
type GPU struct {
	Seen           bool
	Index          uint16   // on its node
	XidAt          int64    // when Rank.Xid was reported
	LostAt         int64    // since when the GPU has not answered: it has fallen off the bus, or its driver gave it up
	ThrottledAt    int64    // since when Throttle has held a reason of SlowedDown without a break
	Throttle       Throttle // as of the last probe
	UnresponsiveAt int64    // since when a call into the node's GPU driver has not returned
}

// Throttle is why a GPU's clocks are lower than they could be. The bits are
// those of NVML's clocks event reasons.
type Throttle uint32

const (
	ThrottleIdle              Throttle = 1 << iota // nothing to do
	ThrottleApplicationClocks                      // set by an administrator
	ThrottlePowerCap                               // at the power limit: normal under full load
	ThrottleHWSlowdown                             // heat, power brake or a short change of clocks
	ThrottleSyncBoost
	ThrottleSWThermal  // above its normal temperature
	ThrottleHWThermal  // far above: clocks are halved at least
	ThrottlePowerBrake // the power supply asks for it: clocks are halved at least
	ThrottleDisplay
	ThrottleBoardLimit
	ThrottleReliability

	// SlowedDown are the reasons that a healthy GPU in a healthy rack never has.
	SlowedDown = ThrottleSWThermal | ThrottleHWThermal | ThrottlePowerBrake
)

var throttleNames = [...]string{"idle", "application_clocks", "power_cap", "hw_slowdown", "sync_boost",
	"sw_thermal", "hw_thermal", "power_brake", "display", "board_limit", "reliability"}

// Throttles lists the reasons one by one, ThrottleIdle left out.
func Throttles() []Throttle {
	all := make([]Throttle, 0, len(throttleNames)-1)
	for i := 1; i < len(throttleNames); i++ {
		all = append(all, 1<<i)
	}
	return all
}

// String lists the reasons, "" for none.
func (t Throttle) String() string {
	var names []string
	for i, name := range throttleNames {
		if t>>i&1 != 0 {
			names = append(names, name)
		}
	}
	return strings.Join(names, ", ")
}

// MarshalText implements encoding.TextMarshaler, as String.
func (t Throttle) MarshalText() ([]byte, error) { return []byte(t.String()), nil }

// UnmarshalText implements encoding.TextUnmarshaler.
func (t *Throttle) UnmarshalText(text []byte) error {
	*t = 0
	for name := range strings.SplitSeq(string(text), ", ") {
		i := slices.Index(throttleNames[:], name)
		if i < 0 && len(text) > 0 {
			return fmt.Errorf("no reason of a throttle: %q", name)
		}
		if i >= 0 {
			*t |= 1 << i
		}
	}
	return nil
}

// outlived is how long after an Xid a rank may still be seen active, with what
// it had begun before; one that goes on for longer was not ended by it.
const outlived = 5e9

// endedByXid reports whether an Xid is why a rank does not go on.
func (d *hangs) endedByXid(rank int32) bool {
	r := &d.ev.Ranks[rank]
	return r.Xid != 0 && (r.GPU.XidAt == 0 || d.hang.active[rank] < r.GPU.XidAt+outlived)
}

// failedInside returns which member of an operation that all have entered cannot come out
// because its GPU has reported a fatal Xid, -1 for none: of several one whose GPU is
// lost, and of these the first, for when one fails its neighbours report errors, too.
func (d *hangs) failedInside(ci int32, seq uint64) int32 {
	if !d.fatalXid {
		return -1
	}
	members := d.ev.Comms[ci].Members
	first := int32(-1)
	before := func(a, b *GPU) bool {
		if (a.LostAt > 0) != (b.LostAt > 0) {
			return a.LostAt > 0
		}
		return a.XidAt < b.XidAt
	}
	for i := range members {
		m := &members[i]
		w := d.world(m.World)
		if w < 0 || d.state[w] != rankAlive || !m.Open() || m.Finished >= seq {
			continue
		}
		r := &d.ev.Ranks[w]
		if r.Xid == 0 || r.GPU.XidAt > 0 && m.StartedAt >= r.GPU.XidAt+outlived {
			continue
		}
		if first < 0 || before(&r.GPU, &d.ev.Ranks[members[first].World].GPU) {
			first = int32(i)
		}
	}
	return first
}

// explain adds to a finding what is wrong with the GPUs of whom it blames,
// right behind its first sentence: it is the most telling there is.
func (v *view) explain(f *finding) {
	told := map[int32]bool{}
	var said []string
	for _, k := range f.Culprits {
		for _, rank := range [...]int32{k.Rank, k.Peer} {
			if rank < 0 || int(rank) >= len(v.ev.Ranks) || told[rank] {
				continue
			}
			told[rank] = true
			if s := gpuSentence(rank, &v.ev.Ranks[rank], f); s != "" {
				said = append(said, s)
			}
		}
	}
	if len(said) == 0 {
		return
	}
	f.Why = slices.Insert(f.Why, min(1, len(f.Why)), said...)
	f.Why = f.Why[:min(len(f.Why), maxWhy)]
}

// gpuSentence is what is wrong with a rank's GPU, "" when nothing is known to be.
func gpuSentence(rank int32, r *Rank, f *finding) string {
	g := &r.GPU
	var parts []string
	if r.Xid != 0 {
		parts = append(parts, "reported "+xidPhrase(r.Xid)+relative(g.XidAt, f.Since))
	}
	if !g.Seen {
		// Which GPU it was is not known.
		if len(parts) == 0 {
			return ""
		}
		return fmt.Sprintf("rank %d: its GPU %s", rank, parts[0])
	}
	if g.LostAt > 0 {
		parts = append(parts, "has not answered its driver since "+clock(g.LostAt))
	}
	// A late reply of the driver explains nothing but missing news, and a GPU that is lost has no clocks.
	if g.ThrottledAt > 0 && g.LostAt == 0 {
		parts = append(parts, fmt.Sprintf("has been slowed down (%s) since %s", g.Throttle&SlowedDown, clock(g.ThrottledAt)))
	}
	if g.UnresponsiveAt > 0 {
		parts = append(parts, "cannot be asked: a call into its driver has not returned since "+clock(g.UnresponsiveAt))
	}
	if len(parts) == 0 {
		return ""
	}
	return fmt.Sprintf("rank %d: GPU %d of its node %s", rank, g.Index, strings.Join(parts, ", and "))
}

// farOff is how far from a fault's onset the clock says more than the distance, ns.
const farOff = 60e9

// relative puts a time beside a fault's onset.
func relative(at, onset int64) string {
	switch d := at - onset; {
	case at == 0:
		return ""
	case onset == 0 || d > farOff || d < -farOff:
		return " at " + clock(at)
	case d < 0:
		return " " + seconds(-d) + " before the fault"
	default:
		return " " + seconds(d) + " after it"
	}
}
