package diagnosis

import (
	"math"
	"math/rand/v2"
	"testing"
)

// TestRounds has collectives that overlap a backward pass: so many a step, after a pause of their own.
func TestRounds(t *testing.T) {
	for _, each := range []uint64{1, 2, 3, 5, 8, 17} {
		r := rand.New(rand.NewPCG(each, 1))
		x, now := arrivalsOf{}, int64(0)
		for seq := uint64(100); seq < 100+24*each; seq++ {
			took := 30e6
			if seq%each == 3%each {
				took = 150e6
			}
			p := arrivalPart{from: now, seq: seq, seqs: 1, n: 1, rank: -1}
			now += int64(took * (0.85 + 0.3*r.Float64()))
			p.until = now
			x.parts = append(x.parts, p)
			x.fresh++
		}
		x.fresh = mostPeriod
		x.round(func() uint64 { return 1 })
		if x.period != each {
			t.Errorf("%d a step: period %d", each, x.period)
		}
		for _, p := range x.rounds.all[1 : len(x.rounds.all)-1] {
			if uint64(p.n) != each || p.seq%each != (2+each)%each && each > 1 {
				t.Fatalf("%d a step: a round of %d that ends with %d", each, p.n, p.seq)
			}
		}
	}
}

// TestRoundsOfUnevenSteps has collectives between which times do not repeat: the job's steps tell how many are a round.
func TestRoundsOfUnevenSteps(t *testing.T) {
	const each = 20
	r := rand.New(rand.NewPCG(7, 1))
	x, now := arrivalsOf{}, int64(0)
	for seq := range uint64(12 * each) {
		p := arrivalPart{from: now, seq: seq, seqs: 1, n: 1, rank: -1}
		now += int64(50e6 * (0.2 + 2*r.Float64()))
		p.until = now
		x.parts = append(x.parts, p)
	}
	x.fresh = mostPeriod
	x.round(func() uint64 { return each })
	if x.period != each || !x.bySteps || len(x.rounds.all) > 13 {
		t.Errorf("period %d, by steps %v, %d rounds", x.period, x.bySteps, len(x.rounds.all))
	}
}

// TestBegan has a rank be late in some of the rounds since it first was, and in none or a few before.
func TestBegan(t *testing.T) {
	for _, tt := range []struct {
		before, own, of, times int
		most, least            float64 // chance
	}{
		{23, 0, 26, 6, 0.02, 0.01},  // 6 of 49, all of them in the last 26
		{8, 0, 6, 6, 1e-3, 1e-4},    // each round since
		{8, 0, 4, 4, 3e-3, 1e-3},    // and fewer
		{300, 2, 30, 10, 1e-6, 0},   // as good as never before
		{300, 30, 30, 3, 1, 0.2},    // as often as before
		{372, 100, 94, 15, 1, 0.99}, // less often
	} {
		s := lateRank{before: tt.before, own: tt.own, of: tt.of, times: tt.times}
		if c := math.Exp(s.logBegan()); c > tt.most || c < tt.least {
			t.Errorf("%+v: chance %.2g", tt, c)
		}
	}
}

// TestTakeDespiteLies has one member tell of collectives that are far ahead, of one in times to come,
// and of each as if it were long ago, before the others tell: all are taken.
func TestTakeDespiteLies(t *testing.T) {
	const second = int64(1e9)
	all := func(at int64) []int64 { return []int64{at, at + 1e6, at + 2e6, at + 3e6} }
	ev := &Evidence{Comms: []Comm{{Members: make([]Member, 4)}}, Ranks: make([]Rank, 4), Arrivals: []Arrival{
		{Seq: 1 << 62, Start: []int64{second, 0, 0, 0}, End: []int64{second, 0, 0, 0}},
		{Seq: 1 << 61, Start: []int64{never - 1, 0, 0, 0}, End: make([]int64, 4)},
	}}
	w := &window{view: &view{ev: ev, comms: make([]commHistory, 1)}}
	d := &arrivals{window: w, of: make([]arrivalsOf, 1)}
	for seq := range uint64(40) {
		w.now = (100 + int64(seq)) * second
		a := Arrival{Seq: seq + 1, Start: all(w.now - second), End: all(w.now - second/2)}
		a.Start[0], a.End[3] = 1, 0
		ev.Arrivals = append(ev.Arrivals, a)
		if d.take(); d.of[0].seq != seq {
			t.Fatalf("collective %d is taken before all have told", seq+1)
		}
		a.End[3] = a.End[2]
		d.take()
		if got := d.of[0].seq; got != seq+1 {
			t.Fatalf("collective %d: %d is the last one taken", seq+1, got)
		}
	}
}

// TestLogTail compares with sums over the Poisson distribution.
func TestLogTail(t *testing.T) {
	for _, mean := range []float64{0.01, 0.1, 0.5, 2} {
		for n := int(math.Ceil(mean)) + 1; n < 12; n++ {
			sum, term := 0.0, math.Exp(-mean)
			for k := range 60 {
				if k > 0 {
					term *= mean / float64(k)
				}
				if k >= n {
					sum += term
				}
			}
			// It is the first term of the sum, and what follows is less when n is far above the mean.
			if got := logTail(float64(n), mean); got > math.Log(sum) || got < math.Log(sum)-1.5 {
				t.Errorf("%d of %v: %v, want %v", n, mean, got, math.Log(sum))
			}
		}
	}
}

// TestManyTimesAsLate has a rank that is late in every third round of twelve: what is ten times as late as anything
// before is no chance, what is hardly later may be.
func TestManyTimesAsLate(t *testing.T) {
	chance := func(usual float32) float64 {
		x := arrivalsOf{period: 1}
		for i := range 36 {
			p := arrivalPart{rank: int32(i % 4), late: usual}
			if i >= 24 && i%3 == 0 {
				p = arrivalPart{rank: 0, late: 100e6}
			}
			x.rounds.all = append(x.rounds.all, p)
		}
		ev := &Evidence{Comms: []Comm{{Members: make([]Member, 4)}}}
		d := &arrivals{window: &window{view: &view{ev: ev}}, of: []arrivalsOf{x}}
		s := lateRank{times: 4, late: 100e6}
		d.count(&s, 24)
		return d.chance(&s)
	}
	if c := chance(10e6); c > math.Log(lateConfirmed) {
		t.Errorf("ten times as late as anything before: a chance of %v", c)
	}
	if c := chance(65e6); c <= math.Log(lateConfirmed) {
		t.Errorf("half as late again as what is usual: a chance of %v", c)
	}
}

// TestTogether has members that are late by chance, and in runs.
func TestTogether(t *testing.T) {
	late := func(run int) *arrivals {
		r := rand.New(rand.NewPCG(7, uint64(run)))
		x, rank := arrivalsOf{}, int32(-1)
		for i := range 480 {
			if i%run == 0 {
				if rank = -1; r.Float64() < 0.1 {
					rank = r.Int32N(8)
				}
			}
			x.rounds.all = append(x.rounds.all, arrivalPart{rank: rank, late: 1})
		}
		ev := &Evidence{Comms: []Comm{{Members: make([]Member, 8)}}}
		return &arrivals{window: &window{view: &view{ev: ev}}, of: []arrivalsOf{x}}
	}
	if got := late(1).together(0, 480, 12, 0.5); got > 1.3 {
		t.Errorf("independent rounds: %v times", got)
	}
	if got := late(6).together(0, 480, 12, 0.5); got < 3 {
		t.Errorf("rounds of which six follow each other: %v times", got)
	}
}
