package preflight

import (
	"context"
	"errors"
	"fmt"
	"math"
	"time"

	"github.com/lockstep-ccl/lockstep/ccl"
)

// survey is what rank 0 has gathered so far.
type survey struct {
	ranks []rankState
	edges []edge // row-major by source
}

// rankState is what is known of a rank.
type rankState struct {
	node, device string
	self         self
	together     float64
	err          string
	gone         string // why it takes part no more, "" while it does
}

// edge is an ordered pair of ranks.
type edge struct {
	done       bool    // it was tried, whatever came of it
	bandwidth  float64 // bytes per second; 0: nothing
	latency    float64 // seconds; 0: nothing
	latencyP99 float64
	blocked    bool // what was sent did not arrive
	err        string
}

func newSurvey(n int) *survey {
	return &survey{ranks: make([]rankState, n), edges: make([]edge, n*n)}
}

func (s *survey) size() int                 { return len(s.ranks) }
func (s *survey) edge(src, dst int) *edge   { return &s.edges[src*len(s.ranks)+dst] }
func (s *survey) sameNode(a, b int) bool    { return s.ranks[a].node == s.ranks[b].node }
func (s *survey) lose(rank int, why string) { s.ranks[rank].gone = why }

// pair takes over what two ranks found of each other. Of an edge that was measured
// before the better values count: a transient is no fault.
func (s *survey) pair(a, b int, ma, mb *measured) {
	failed := ma.Err != "" || mb.Err != ""
	// A message that has been sent and not got is on a blocked edge. When all have
	// arrived, or none were sent, nobody can tell which way it failed.
	ab, ba := failed && ma.Sent > mb.Got, failed && mb.Sent > ma.Got
	if failed && !ab && !ba {
		ab, ba = true, true
	}
	why := ma.Err
	if why == "" || ba && mb.Err != "" {
		why = mb.Err
	}
	latency, p99 := ma.Latency, ma.LatencyP99
	if latency == 0 {
		latency, p99 = mb.Latency, mb.LatencyP99
	}
	s.edge(a, b).merge(edge{bandwidth: ma.Bandwidth, latency: latency, latencyP99: p99, blocked: ab}, why)
	s.edge(b, a).merge(edge{bandwidth: mb.Bandwidth, latency: latency, latencyP99: p99, blocked: ba}, why)
}

func (e *edge) merge(now edge, why string) {
	if now.blocked {
		now.err = why
	}
	if e.done {
		now.bandwidth = max(now.bandwidth, e.bandwidth)
		if e.latency > 0 && (now.latency == 0 || e.latency < now.latency) {
			now.latency, now.latencyP99 = e.latency, e.latencyP99
		}
		if !e.blocked {
			now.blocked, now.err = false, ""
		}
	}
	now.done = true
	*e = now
}

// take takes over a rank's word of itself.
func (s *survey) take(rank int, r *report) {
	st := &s.ranks[rank]
	if r.Node != "" {
		st.node, st.device = r.Node, r.Device
	}
	if r.Self != nil {
		st.self.Memory = max(st.self.Memory, r.Self.Memory)
		st.self.Compute = max(st.self.Compute, r.Self.Compute)
	}
	st.together = max(st.together, r.Together)
	if r.Err != "" || r.Self != nil {
		st.err = r.Err
	}
}

// conductor is rank 0's part.
type conductor struct {
	*member
	survey   *survey
	progress *progress
	patience time.Duration // with ranks that report
}

// errSilent says that ranks did not answer, so that no round can go on.
var errSilent = errors.New("ranks do not answer")

// conduct measures everything, and the bad more than once. The survey holds what
// was found also when it fails.
func (c *conductor) conduct(ctx context.Context) error {
	n := c.world.Size()
	c.patience = c.cmd.PairTimeout + slack
	c.progress.begin("self check", 1)
	hello, err := c.reports(ctx, c.hello(ctx))
	if err == nil && c.device != ccl.CPU {
		err = c.joinNodes(ctx, hello)
	}
	if err != nil {
		return err
	}
	rounds := tournament(n)
	c.progress.begin("pairs", n*(n-1)/2)
	for _, round := range rounds {
		if err := c.round(ctx, round, 1); err != nil {
			return err
		}
	}
	if err := c.again(ctx); err != nil {
		return err
	}
	if c.cmd.Together {
		c.progress.begin("together", 1)
		_, err = c.do(ctx, func(int) order { return order{Kind: orderTogether, Device: c.device != ccl.CPU} })
	}
	return err
}

// round measures disjoint pairs. Setting up takes all ranks, so one that is late
// spoils it for all: pairs that have not begun get a second chance.
func (c *conductor) round(ctx context.Context, round []int32, times int) error {
	unbegun, err := c.try(ctx, round, times)
	if err == nil && unbegun {
		_, err = c.try(ctx, round, times)
	}
	for a, b := range round {
		if a < int(b) {
			c.progress.add(1)
		}
	}
	return err
}

// try measures a round, and tells whether there were pairs that failed before they
// sent anything.
func (c *conductor) try(ctx context.Context, round []int32, times int) (unbegun bool, err error) {
	reports, err := c.do(ctx, func(rank int) order {
		p := int(round[rank])
		return order{Kind: orderPair, Arg: p, Times: times, Device: p != idle && c.device != ccl.CPU && c.survey.sameNode(rank, p)}
	})
	if reports == nil {
		return false, err
	}
	for a, p := range round {
		b := int(p)
		if a >= b || reports[a].Pair == nil || reports[b].Pair == nil {
			continue
		}
		began := reports[a].Pair.Sent+reports[b].Pair.Sent > 0
		unbegun = unbegun || !began
		if began || err == nil { // else they waited for a rank that is gone
			c.survey.pair(a, b, reports[a].Pair, reports[b].Pair)
		}
	}
	return unbegun, err
}

// Bounds of what is measured again.
const (
	againTimes   = 3
	againSlow    = 64
	againBlocked = 4 // once, since each may take all of --pair-timeout
)

// again measures what looks bad some times more, one pair at a time and longer and
// longer: what was slow because of its neighbours, or for a moment, was not bad.
func (c *conductor) again(ctx context.Context) error {
	n := c.survey.size()
	for turn := range againTimes {
		j := judge(c.survey, c.cmd.limits())
		var slow, stuck [][2]int
		for a := range n {
			for b := a + 1; b < n; b++ {
				switch there, back := j.bad[a*n+b], j.bad[b*n+a]; {
				case (there|back)&blocked != 0:
					stuck = append(stuck, [2]int{a, b})
				case there|back != 0:
					slow = append(slow, [2]int{a, b})
				}
			}
		}
		rounds := alone(n, slow, againSlow)
		if turn == 0 {
			rounds = append(rounds, alone(n, stuck, againBlocked)...)
		}
		if len(rounds) > 0 {
			c.progress.begin("again", len(rounds))
		}
		for _, round := range rounds {
			if err := c.round(ctx, round, turn+2); err != nil {
				return err
			}
		}
		if len(j.slowRanks) > 0 {
			_, err := c.do(ctx, func(rank int) order {
				o := order{Kind: orderSelf}
				if j.slowRanks[rank] != 0 {
					o.Arg = 1
				}
				return o
			})
			if err != nil {
				return err
			}
		}
	}
	return nil
}

// joinNodes has the GPUs of each node make a communicator, at the first's address.
func (c *conductor) joinNodes(ctx context.Context, hello []report) error {
	node := c.survey.nodes().of
	// GPUs that nobody uses may take long to wake up.
	c.patience = c.cmd.JoinTimeout + slack
	defer func() { c.patience = c.cmd.PairTimeout + slack }()
	_, err := c.do(ctx, func(rank int) order {
		o := order{Kind: orderNode}
		for r, n := range node {
			if n != node[rank] {
				continue
			}
			if o.Size == 0 {
				o.ID = hello[r].ID
			}
			if r == rank {
				o.Rank = o.Size
			}
			o.Size++
		}
		return o
	})
	if err == nil {
		_, err = c.do(ctx, func(int) order { return order{Kind: orderSelf, Arg: 1} })
	}
	return err
}

// do gives every rank its order, carries out its own, and takes the reports.
// They are nil when ranks were silent.
func (c *conductor) do(ctx context.Context, orderOf func(rank int) order) ([]report, error) {
	if err := c.tell(ctx, orderOf); err != nil {
		return nil, err
	}
	mine := c.obey(ctx, orderOf(0))
	return c.reports(ctx, mine)
}

// tell sends every other rank its order, from rank 0 straight: what is to be
// found may be any connection between others.
func (c *conductor) tell(ctx context.Context, orderOf func(rank int) order) error {
	ctx, cancel := context.WithTimeout(ctx, c.cmd.PairTimeout+slack)
	defer cancel()
	if c.world.Size() == 1 {
		return nil
	}
	err := c.world.Group(c.ctl, func(g *ccl.Group) error {
		for r := 1; r < c.world.Size(); r++ {
			b, err := encode(orderOf(r), orderSize)
			if err != nil {
				return err
			}
			if err := g.Send(ccl.Bytes(ccl.Uint8, b), r); err != nil {
				return err
			}
		}
		return nil
	})
	if err == nil {
		err = c.ctl.Wait(ctx)
	}
	return c.lost(err)
}

// reports takes one report of every rank. Ranks whose report does not come in
// time are lost, and with them the communicator of all.
func (c *conductor) reports(ctx context.Context, mine *report) ([]report, error) {
	n := c.world.Size()
	reports := make([]report, n)
	reports[0] = *mine
	c.survey.take(0, mine)
	if n == 1 {
		return reports, nil
	}
	raw := make([]byte, n*reportSize)
	wait, cancel := context.WithTimeout(ctx, c.patience)
	defer cancel()
	err := c.world.Group(c.ctl, func(g *ccl.Group) error {
		for r := 1; r < n; r++ {
			if err := g.Recv(ccl.Bytes(ccl.Uint8, raw[r*reportSize:(r+1)*reportSize]), r); err != nil {
				return err
			}
		}
		return nil
	})
	if err == nil {
		err = c.ctl.Wait(wait)
	}
	late := err != nil && wait.Err() != nil && ctx.Err() == nil
	if late {
		// After this nobody writes to raw any more, and what is in it is what came.
		c.world.Abort(errSilent)
		_ = c.world.Close() // says the same
		err = errSilent
	} else if err = c.lost(err); err != nil {
		return nil, err
	}
	for r := 1; r < n; r++ {
		got, ok := decodeReport(raw[r*reportSize : (r+1)*reportSize])
		if !ok {
			c.survey.lose(r, "does not answer")
			continue
		}
		reports[r] = got
		c.survey.take(r, &got)
	}
	return reports, err
}

// lost notes whom an error of the world's communicator blames.
func (c *conductor) lost(err error) error {
	var e *ccl.Error
	if errors.As(err, &e) && errors.Is(err, ccl.ErrPeerLost) && e.Peer > 0 && e.Peer < c.survey.size() {
		c.survey.lose(e.Peer, "its process is gone")
		return fmt.Errorf("%w: %w", errSilent, err)
	}
	return err
}

// finish tells all ranks how it ended, also when it did because time was up.
func (c *conductor) finish(ctx context.Context, status int) error {
	return c.tell(context.WithoutCancel(ctx), func(int) order { return order{Kind: orderEnd, Arg: status} })
}

// progress tells on a terminal how far rank 0 is; nil tells nobody.
type progress struct {
	write       func(string)
	what        string
	done, total int
	begun       time.Time
}

func (p *progress) begin(what string, total int) {
	if p != nil {
		p.what, p.done, p.total, p.begun = what, 0, total, time.Now()
		p.add(0)
	}
}

func (p *progress) add(n int) {
	if p == nil {
		return
	}
	p.done += n
	left := ""
	if p.done > 0 && p.done < p.total {
		eta := time.Since(p.begun).Seconds() / float64(p.done) * float64(p.total-p.done)
		left = fmt.Sprintf(", %.0f s left", math.Ceil(eta))
	}
	p.write(fmt.Sprintf("\r\x1b[Kpreflight: %s %d/%d%s", p.what, p.done, p.total, left))
}

// end clears the line.
func (p *progress) end() {
	if p != nil {
		p.write("\r\x1b[K")
	}
}
