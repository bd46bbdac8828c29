package perf

import (
	"context"
	"fmt"
	"strings"

	"github.com/lockstep-ccl/lockstep/ccl"
	"github.com/lockstep-ccl/lockstep/record"
)

// collective is how one collective is called and what its numbers mean. What is true of its kind
// whoever calls it is in the kind's traits.
type collective struct {
	name string
	kind record.CollKind
	// inPlace says that the call exists in place.
	inPlace bool
	// bus is bus bandwidth over algorithm bandwidth for n ranks.
	bus  func(n float64) float64
	call func(c *ccl.Comm, s *ccl.Stream, send, recv ccl.Buffer, op ccl.Op, root int) error
	// want is element i of rank's result, from what contribution(rank, i) each
	// rank had in its send buffer; ok is false where nothing is defined.
	want func(x expect, i int) (v float64, ok bool)
}

// shares is how many counts a size is of: counts are of one rank's share, sizes of all.
func (coll *collective) shares(ranks int) int { return coll.kind.Traits().Shares(ranks) }

// rooted reports whether the call has a root.
func (coll *collective) rooted() bool { return coll.kind.Traits().Root != record.RootNone }

func once(float64) float64     { return 1 }
func others(n float64) float64 { return (n - 1) / n }
func both(n float64) float64   { return 2 * (n - 1) / n }
func whole(x expect, i int) (float64, bool) {
	return x.reduced(i), true
}

var collectives = []collective{
	{
		name: "allreduce", kind: record.AllReduce, inPlace: true, bus: both,
		call: func(c *ccl.Comm, s *ccl.Stream, send, recv ccl.Buffer, op ccl.Op, _ int) error {
			return c.AllReduce(s, send, recv, op)
		},
		want: whole,
	},
	{
		name: "reduce", kind: record.Reduce, inPlace: true, bus: once,
		call: func(c *ccl.Comm, s *ccl.Stream, send, recv ccl.Buffer, op ccl.Op, root int) error {
			return c.Reduce(s, send, recv, op, root)
		},
		want: func(x expect, i int) (float64, bool) { return x.reduced(i), x.rank == x.root },
	},
	{
		name: "broadcast", kind: record.Broadcast, inPlace: true, bus: once,
		call: func(c *ccl.Comm, s *ccl.Stream, send, recv ccl.Buffer, _ ccl.Op, root int) error {
			return c.Broadcast(s, send, recv, root)
		},
		want: func(x expect, i int) (float64, bool) { return x.contribution(x.root, i), true },
	},
	{
		name: "allgather", kind: record.AllGather, inPlace: true, bus: others,
		call: func(c *ccl.Comm, s *ccl.Stream, send, recv ccl.Buffer, _ ccl.Op, _ int) error {
			return c.AllGather(s, send, recv)
		},
		want: func(x expect, i int) (float64, bool) { return x.contribution(i/x.count, i%x.count), true },
	},
	{
		name: "reduce_scatter", kind: record.ReduceScatter, inPlace: true, bus: others,
		call: func(c *ccl.Comm, s *ccl.Stream, send, recv ccl.Buffer, op ccl.Op, _ int) error {
			return c.ReduceScatter(s, send, recv, op)
		},
		want: func(x expect, i int) (float64, bool) { return x.reduced(x.rank*x.count + i), true },
	},
	{
		name: "alltoall", kind: record.AlltoAll, inPlace: true, bus: others,
		call: func(c *ccl.Comm, s *ccl.Stream, send, recv ccl.Buffer, _ ccl.Op, _ int) error {
			return c.AlltoAll(s, send, recv)
		},
		want: func(x expect, i int) (float64, bool) {
			return x.contribution(i/x.count, x.rank*x.count+i%x.count), true
		},
	},
	{
		name: "gather", kind: record.Gather, inPlace: true, bus: others,
		call: func(c *ccl.Comm, s *ccl.Stream, send, recv ccl.Buffer, _ ccl.Op, root int) error {
			return c.Gather(s, send, recv, root)
		},
		want: func(x expect, i int) (float64, bool) {
			return x.contribution(i/x.count, i%x.count), x.rank == x.root
		},
	},
	{
		name: "scatter", kind: record.Scatter, inPlace: true, bus: others,
		call: func(c *ccl.Comm, s *ccl.Stream, send, recv ccl.Buffer, _ ccl.Op, root int) error {
			return c.Scatter(s, send, recv, root)
		},
		want: func(x expect, i int) (float64, bool) { return x.contribution(x.root, x.rank*x.count+i), true },
	},
	{
		name: "sendrecv", kind: record.Group, bus: once,
		call: func(c *ccl.Comm, s *ccl.Stream, send, recv ccl.Buffer, _ ccl.Op, _ int) error {
			next, prev := (c.Rank()+1)%c.Size(), (c.Rank()+c.Size()-1)%c.Size()
			return c.Group(s, func(g *ccl.Group) error {
				if err := g.Send(send, next); err != nil {
					return err
				}
				return g.Recv(recv, prev)
			})
		},
		want: func(x expect, i int) (float64, bool) { return x.contribution((x.rank+x.n-1)%x.n, i), true },
	},
	{
		name: "barrier", kind: record.Barrier, bus: once,
		call: func(c *ccl.Comm, s *ccl.Stream, _, _ ccl.Buffer, _ ccl.Op, _ int) error { return c.Barrier(s) },
		want: func(expect, int) (float64, bool) { return 0, false },
	},
}

// find returns the collective of a name, spelt as here or as nccl-tests does.
func find(name string) (collective, error) {
	clean := strings.ReplaceAll(strings.TrimSuffix(strings.ToLower(name), "_perf"), "_", "")
	var names []string
	for _, c := range collectives {
		if strings.ReplaceAll(c.name, "_", "") == clean {
			return c, nil
		}
		names = append(names, c.name)
	}
	return collective{}, fmt.Errorf("collective %q: want one of %s", name, strings.Join(names, ", "))
}

// buffers lays out one rank's memory for a call of count elements, in place or not.
func (coll *collective) buffers(ctx context.Context, b *bench, dt ccl.DType, count int, inPlace bool) (send, recv ccl.Buffer, err error) {
	n := b.comm.Size()
	t := coll.kind.Traits()
	sends, recvs := count*max(t.Send.Of(n), 1), count*max(t.Recv.Of(n), 1) // a group is one message each way; nobody touches a barrier's
	if !inPlace {
		if send, err = b.buffer(ctx, 0, dt, sends); err == nil {
			recv, err = b.buffer(ctx, 1, dt, recvs)
		}
		return send, recv, err
	}
	whole, err := b.buffer(ctx, 0, dt, max(sends, recvs))
	if err != nil {
		return send, recv, err
	}
	own := b.comm.Rank() * count
	send, recv = whole, whole
	if sends < recvs {
		send = whole.Slice(own, own+sends)
	} else if recvs < sends {
		recv = whole.Slice(own, own+recvs)
	}
	return send, recv, nil
}
