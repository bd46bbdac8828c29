package fabric_test

import (
	"fmt"
	"os/exec"
	"strings"
	"testing"
	"time"
)

// event is what happens to a fabric while a job runs.
type event struct {
	at float64 // seconds after the job was started
	do func() error
}

// during runs a ring over all hosts for some seconds while events happen. It returns when turns
// ended, in seconds after the job was started.
func (b *bed) during(planner string, seconds float64, events ...event) (j *job, ends []float64) {
	b.t.Helper()
	j = b.start("ring", planner, b.ring(), number("BYTES", 4<<20), seconds)
	j.began = time.Now()
	b.happen(j.began, events...)
	return j, j.waitSince(j.began)
}

// happen has events happen, after a job was started.
func (b *bed) happen(began time.Time, events ...event) {
	b.t.Helper()
	for _, e := range events {
		time.Sleep(time.Until(began.Add(time.Duration(e.at * float64(time.Second)))))
		must(b.t, e.do())
	}
}

// waitSince returns when each AllReduce ended, in seconds since a time.
func (j *job) waitSince(began time.Time) (ends []float64) {
	j.b.t.Helper()
	zero := float64(began.UnixNano()) / 1e9
	for _, e := range j.wait() {
		ends = append(ends, e-zero)
	}
	return ends
}

// management sets the network by which hosts reach the planner up or down.
func (b *bed) management(state string) func() error {
	return exec.Command("ip", "-n", b.up.Management(), "link", "set", "br0", state).Run
}

// eachSecond is the bandwidth of each second from the second on, in a line.
func (j *job) eachSecond(ends []float64, seconds float64) string {
	var line strings.Builder
	for s := 2.0; s < seconds; s++ {
		fmt.Fprintf(&line, " %.0f", j.bus(ends, s-0.7, s+1.3))
	}
	return line.String()
}

// longest is the longest time between the ends of two turns of which one is between two times.
func longest(ends []float64, from, to float64) (most float64) {
	for i := 1; i < len(ends); i++ {
		if ends[i] >= from && ends[i-1] <= to {
			most = max(most, ends[i]-ends[i-1])
		}
	}
	return most
}

// report tells what a job got before an event, while its fault lasted, from three seconds on, and
// after it was over.
func (j *job) report(planner string, ends []float64, fault, over, settled, seconds, ideal float64) {
	t := j.b.t
	t.Helper()
	t.Logf("planner %q, each second from 2 on:%s", planner, j.eachSecond(ends, seconds))
	t.Logf("before %.1f of %.1f; with the fault %.1f of %.1f, its first three seconds %.1f; after it %.1f; longest turn %.2f s before, %.2f s with it",
		j.bus(ends, 3, fault), j.b.ideal(), j.bus(ends, fault+3, over), ideal, j.bus(ends, fault-0.5, fault+3), j.bus(ends, over+settled, seconds),
		longest(ends, 3, fault), longest(ends, fault, over))
	t.Logf("longest stall of a flow: before %s; with the fault %s; after it %s", j.longestStall(3, fault), j.longestStall(fault, over), j.longestStall(over, seconds))
}

// TestLinkDies: one of a leaf's uplinks dies under load, routing follows half a second later, and the
// link comes back.
func TestLinkDies(t *testing.T) {
	long(t)
	b := setUp(t, shape(16, 40))
	left := 1 - 1/float64(2*b.up.Spines) // of two leaves' uplinks that a pod has
	b.withoutAndWith(func(planner string) {
		const cut, back, seconds = 8, 23, 43
		j, ends := b.during(planner, seconds, b.asks(cut-1),
			event{cut, func() error { return b.up.Cut(0, 1) }}, event{cut + 0.5, func() error { return b.up.Withdraw(0, 1) }},
			event{back, func() error { return b.up.Heal(0, 1) }})
		j.report(planner, ends, cut, back, 10, seconds, b.ideal()*left)
	})
}

// TestLinkLoses: one of a leaf's uplinks loses one packet in a hundred for a while, and nobody is told.
func TestLinkLoses(t *testing.T) {
	long(t)
	b := setUp(t, shape(16, 40))
	left := 1 - 1/float64(2*b.up.Spines)
	b.withoutAndWith(func(planner string) {
		const loses, over, seconds = 8, 28, 48
		var well func() error
		j, ends := b.during(planner, seconds, b.asks(loses-1),
			event{loses, func() (err error) { well, err = b.up.Lose(0, 1, true, 0.01); return err }}, event{over, func() error { return well() }})
		j.report(planner, ends, loses, over, 10, seconds, b.ideal()*left)
		t.Logf("from its tenth second on %.1f", j.bus(ends, loses+10, over))
	})
}

// TestSlowLink: one of a leaf's uplinks has 60 % of its rate for a while, and nobody is told.
func TestSlowLink(t *testing.T) {
	long(t)
	const share = 0.6
	b := setUp(t, shape(16, 40))
	b.withoutAndWith(func(planner string) {
		const slow, well, seconds = 8, 38, 78
		j, ends := b.during(planner, seconds, event{slow, func() error { return b.up.Slow(0, 1, share) }}, event{well, func() error { return b.up.Slow(0, 1, 1) }})
		j.report(planner, ends, slow, well, 20, seconds, b.ideal())
		t.Logf("from its 15th second on %.1f", j.bus(ends, slow+15, well))
	})
}

// TestPlannerDies: the planner is killed under load, comes back, and is cut off, on a fabric that is well and
// while a link dies that only it would have lanes leave: no connection breaks, and no sum is wrong.
func TestPlannerDies(t *testing.T) {
	long(t)
	b := setUp(t, shape(16, 40))
	addr, kill := b.probed()
	dies, back := func() error { kill(); return nil }, func() error { _, kill = b.planner(); return nil }
	defer func() { kill() }()
	j, ends := b.during(addr, 20, event{5, dies}, event{9, back}, event{13, b.management("down")}, event{16, b.management("up")})
	t.Logf("before %.1f, killed %.1f, back %.1f, cut off and three seconds more %.1f (ideal %.1f)", j.bus(ends, 2, 5), j.bus(ends, 5, 9), j.bus(ends, 9, 13), j.bus(ends, 13, 19), b.ideal())

	j, ends = b.during(addr, 44,
		event{8, dies}, event{10, func() error { return b.up.Cut(0, 1) }}, event{10.5, func() error { return b.up.Withdraw(0, 1) }},
		event{16, back}, event{26, b.management("down")}, event{28, func() error { return b.up.Heal(0, 1) }}, event{32, b.management("up")})
	t.Logf("before %.1f, killed %.1f, a link dead as well %.1f, planner back %.1f, cut off while the link comes back %.1f, all well %.1f; longest turn %.2f s before, %.2f s since",
		j.bus(ends, 3, 8), j.bus(ends, 8, 10), j.bus(ends, 10, 16), j.bus(ends, 18, 26), j.bus(ends, 28, 32), j.bus(ends, 34, 44), longest(ends, 3, 8), longest(ends, 8, 44))
	t.Logf("longest stall of a flow: before %s; since %s", j.longestStall(3, 8), j.longestStall(8, 44))
}

// TestPlannerDiesAtBadLinks: the planner is killed, comes back and is cut off while a link loses one packet in a
// hundred that only it would have lanes leave, and on a fabric on which one link is dead and another loses from the
// start, which nobody but its probers has found: no connection breaks, and no sum is wrong.
func TestPlannerDiesAtBadLinks(t *testing.T) {
	long(t)
	b := setUp(t, shape(16, 40))
	addr, kill := b.probed()
	defer func() { kill() }()
	dies, back := func() error { kill(); return nil }, func() error { _, kill = b.planner(); return nil }
	lose := func(leaf, spine int, share float64) func() error {
		well, err := b.up.Lose(leaf, spine, true, share)
		must(t, err)
		return well
	}
	var well func() error
	j, ends := b.during(addr, 50,
		event{8, dies}, event{10, func() error { well = lose(0, 1, 0.01); return nil }}, event{18, back},
		event{30, b.management("down")}, event{34, func() error { return well() }}, event{38, b.management("up")})
	t.Logf("before %.1f, killed %.1f, a link that loses as well %.1f, planner back %.1f, cut off %.1f, while the link is well again %.1f, all well %.1f (ideal %.1f); longest turn %.2f s before, %.2f s since",
		j.bus(ends, 3, 8), j.bus(ends, 8, 10), j.bus(ends, 10, 18), j.bus(ends, 20, 30), j.bus(ends, 30, 34), j.bus(ends, 34, 38), j.bus(ends, 40, 50), b.ideal(), longest(ends, 3, 8), longest(ends, 8, 50))
	t.Logf("longest stall of a flow: before %s; since %s", j.longestStall(3, 8), j.longestStall(8, 50))

	dead, lossy := lose(0, 1, 1), lose(1, 2, 0.01)
	time.Sleep(20 * time.Second) // probers find them
	left := 1 - 1/float64(2*b.up.Spines)
	j, ends = b.during(addr, 36, event{8, dies}, event{14, back}, event{22, b.management("down")}, event{28, b.management("up")})
	t.Logf("one dead, one lossy from the start: before %.1f, killed %.1f, back %.1f, cut off %.1f, and then %.1f (ideal %.1f); longest turn %.2f s before, %.2f s since",
		j.bus(ends, 3, 8), j.bus(ends, 8, 14), j.bus(ends, 14, 22), j.bus(ends, 22, 28), j.bus(ends, 29, 36), b.ideal()*left, longest(ends, 3, 8), longest(ends, 8, 36))
	t.Logf("longest stall of a flow: before %s; since %s", j.longestStall(3, 8), j.longestStall(8, 36))
	must(t, dead())
	must(t, lossy())
}

// TestPlannerDiesOfMany: the same of eight jobs' planner.
func TestPlannerDiesOfMany(t *testing.T) {
	long(t)
	b := setUp(t, shape(16, 20))
	addr, kill := b.probed()
	defer func() { kill() }()
	const seconds = 32
	began := time.Now()
	var jobs []*job
	for k := range b.up.Hosts / 2 {
		jobs = append(jobs, b.start(fmt.Sprintf("job%d", k), addr, []int{k, b.up.Hosts/2 + k}, number("BYTES", 2<<20), seconds))
	}
	b.happen(began, event{8, func() error { kill(); return nil }}, event{14, func() error { _, kill = b.planner(); return nil }},
		event{20, b.management("down")}, event{26, b.management("up")})
	phases := []float64{4, 8, 14, 20, 26, 31}
	sum := make([]float64, len(phases)-1)
	for _, j := range jobs {
		ends := j.waitSince(began)
		for i := range sum {
			sum[i] += j.bus(ends, phases[i], phases[i+1]) / float64(len(jobs))
		}
	}
	t.Logf("a job has %.1f before, killed %.1f, back %.1f, cut off %.1f, and then %.1f (ideal %.1f)", sum[0], sum[1], sum[2], sum[3], sum[4], b.ideal())
}
