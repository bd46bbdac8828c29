package preflight

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/lockstep-ccl/lockstep/ccl"
)

// conductor is rank 0's part.
type conductor struct {
	*member
	survey   *survey
	phase    phase
	patience time.Duration // with ranks that report
}

// phase is what rank 0 is at.
type phase struct {
	what        string
	done, total int
}

func (c *conductor) begin(what string, total int) {
	c.phase = phase{what: what, total: total}
	c.tellProgress()
}

func (c *conductor) step() {
	c.phase.done++
	c.tellProgress()
}

func (c *conductor) tellProgress() {
	if p := c.opts.Progress; p != nil {
		p(c.phase.what, c.phase.done, c.phase.total)
	}
}

// conduct measures everything, and the bad more than once. The survey holds what
// was found also when it fails.
func (c *conductor) conduct(ctx context.Context) error {
	n := c.world.Size()
	c.patience = c.opts.PairTimeout + Slack
	c.begin("self check", 1)
	hello, err := c.reports(ctx, c.hello(ctx))
	if err == nil && c.opts.Device != ccl.CPU {
		err = c.joinNodes(ctx, hello)
	}
	if err != nil {
		return err
	}
	rounds := tournament(n)
	c.begin("pairs", n*(n-1)/2)
	for _, round := range rounds {
		if err := c.round(ctx, round, 1); err != nil {
			return err
		}
	}
	if err := c.again(ctx); err != nil {
		return err
	}
	if c.opts.Together {
		c.begin("together", 1)
		_, err = c.do(ctx, func(int) order { return order{Kind: orderTogether, Device: c.opts.Device != ccl.CPU} })
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
			c.step()
		}
	}
	return err
}

// try measures a round, and tells whether there were pairs that failed before they
// sent anything.
func (c *conductor) try(ctx context.Context, round []int32, times int) (unbegun bool, err error) {
	reports, err := c.do(ctx, func(rank int) order {
		p := int(round[rank])
		return order{Kind: orderPair, Arg: p, Times: times, Device: p != idle && c.opts.Device != ccl.CPU && c.survey.sameNode(rank, p)}
	})
	if reports == nil {
		return false, err
	}
	for a, p := range round {
		b := int(p)
		if a >= b || reports[a].Pair == nil || reports[b].Pair == nil {
			continue
		}
		if ctx.Err() != nil && cutShort(reports[a].Pair, reports[b].Pair) {
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

// quietLeast is for how long, in seconds, nothing must have moved between two ranks whose time was
// up before they were through, for the edge to be blocked.
const quietLeast = 5

// cutShort reports whether a pair was ended in the midst of its work, when all time was up: that is
// no fault of its edge.
func cutShort(a, b *measured) bool {
	return a.Err != "" && a.Quiet < quietLeast || b.Err != "" && b.Quiet < quietLeast
}

// Bounds of what is measured again.
const (
	againTimes   = 3
	againSlow    = 64
	againBlocked = 4 // once, since each may take all of Options.PairTimeout
)

// again measures what looks bad some times more, one pair at a time and longer and
// longer: what was slow because of its neighbours, or for a moment, was not bad.
func (c *conductor) again(ctx context.Context) error {
	n := c.survey.size()
	for turn := range againTimes {
		j := judge(c.survey, c.opts.Limits)
		var slow, stuck [][2]int
		for a := range n {
			for b := a + 1; b < n; b++ {
				switch there, back := j.bad[a*n+b], j.bad[b*n+a]; {
				case (there|back)&Blocked != 0:
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
			c.begin("again", len(rounds))
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
	c.patience = c.opts.JoinTimeout + Slack
	defer func() { c.patience = c.opts.PairTimeout + Slack }()
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
	ctx, cancel := context.WithTimeout(ctx, c.opts.PairTimeout+Slack)
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
