package perf

import (
	"context"
	"fmt"
	"hash/fnv"
	"slices"
	"time"

	"github.com/lockstep-ccl/lockstep/ccl"
	"github.com/lockstep-ccl/lockstep/cmd/lockstep/internal/progress"
)

// bench is one rank that measures.
type bench struct {
	cmd    *Cmd
	at     *progress.Line // what is measured now
	comm   *ccl.Comm      // with the recorder, unless it is off
	plain  *ccl.Comm      // without, when both are measured
	stream *ccl.Stream
	device ccl.Device
	memory [2][]byte  // host memory: the buffers, or what is checked of them
	areas  [2]gpuArea // device memory
	// started is when the first operation had ended, in seconds after the process began,
	// which began says has been told.
	started float64
	began   bool
}

// Timing is one measurement: the time of an operation, what that means, and how
// many elements came out wrong (-1: not checked).
type Timing struct {
	Micros float64 `json:"us"`
	Alg    float64 `json:"algbw"`
	Bus    float64 `json:"busbw"`
	Wrong  int     `json:"wrong"`
	// First is the time of the first operation of a buffer on a GPU, which may load kernels.
	First float64 `json:"first_us,omitempty"`
	// Plain is Micros without the recorder, 0 when that was not measured.
	Plain float64 `json:"recorder_off_us,omitempty"`
}

// Result is one line.
type Result struct {
	Coll     string `json:"collective"`
	Size     int    `json:"size"`
	Count    int    `json:"count"`
	Type     string `json:"type"`
	Op       string `json:"redop"`
	Root     int    `json:"root"`
	Ranks    int    `json:"ranks"`
	Nodes    int    `json:"nodes"`
	Recorder string `json:"recorder"`
	// Of buffers on GPUs.
	Device     string `json:"device,omitempty"`
	Launch     string `json:"launch,omitempty"` // stream, or graph
	Registered bool   `json:"registered,omitempty"`
	Algo       string `json:"algo,omitempty"`
	SMs        int    `json:"sms,omitempty"`
	Offset     int    `json:"offset,omitempty"` // elements that buffers begin after their memory

	// Started is when the process's first operation ended, in seconds since the process
	// began: of the first line alone.
	Started float64 `json:"started_s,omitempty"`

	OutOfPlace *Timing `json:"out_of_place,omitempty"`
	InPlace    *Timing `json:"in_place,omitempty"`
}

// mem is size bytes of one of the two buffers, which are as large as was ever asked.
func (b *bench) mem(i, size int) []byte {
	if len(b.memory[i]) < size {
		b.memory[i] = make([]byte, size)
	}
	return b.memory[i][:size:size]
}

func (b *bench) run(ctx context.Context, p plan, out *printer) error {
	for _, coll := range p.colls {
		out.header(coll)
		for _, dt := range p.types {
			for _, op := range p.ops {
				if err := b.sizes(ctx, coll, dt, op, out); err != nil {
					return err
				}
				if !coll.kind.Reduces() {
					break
				}
			}
			if !coll.kind.HasData() {
				break
			}
		}
		out.footer()
	}
	return nil
}

// sizes measures all sizes of one collective, type and operator.
func (b *bench) sizes(ctx context.Context, coll collective, dt ccl.DType, op ccl.Op, out *printer) error {
	n := b.comm.Size()
	if coll.rooted() && (b.cmd.Root < 0 || b.cmd.Root >= n) {
		return fmt.Errorf("-r %d: ranks are 0 to %d", b.cmd.Root, n-1)
	}
	last := -1
	for bytes := int(b.cmd.Begin); bytes <= int(b.cmd.End); {
		count := bytes / dt.Size() / coll.shares(n)
		if count != last {
			last = count
			b.at.Set("measuring %s of %d bytes, %s", coll.name, bytes, dt)
			r, err := b.measure(ctx, coll, dt, op, count)
			if err != nil {
				return fmt.Errorf("%s of %d bytes: %w", coll.name, bytes, err)
			}
			out.line(coll, r)
		}
		if !coll.kind.HasData() {
			return nil
		}
		if b.cmd.Step > 0 {
			bytes += int(b.cmd.Step)
		} else {
			bytes = max(bytes*b.cmd.Factor, bytes+1)
		}
	}
	return nil
}

func (b *bench) measure(ctx context.Context, coll collective, dt ccl.DType, op ccl.Op, count int) (*Result, error) {
	n := b.comm.Size()
	size := count * dt.Size() * coll.shares(n)
	r := &Result{
		Coll: coll.name, Size: size, Count: count, Type: dt.String(), Op: "none", Root: -1,
		Ranks: n, Nodes: b.cmd.Nodes, Recorder: b.cmd.Recorder,
	}
	if coll.kind.Reduces() {
		r.Op = op.String()
	}
	if coll.rooted() {
		r.Root = b.cmd.Root
	}
	var err error
	if b.device != ccl.CPU {
		r.Device, r.Launch, r.Registered, r.Offset = "cuda", "stream", !b.cmd.Staged, b.cmd.Offset
		if b.cmd.Graph > 0 {
			r.Launch = "graph"
		}
	}
	if b.cmd.Place != "in" || !coll.inPlace {
		r.OutOfPlace, err = b.time(ctx, coll, dt, op, count, size, false)
	}
	if err == nil && !b.began {
		b.began, r.Started = true, b.started
	}
	ways := func() {
		if b.device != ccl.CPU {
			algo, sms := b.comm.GPUAlgo()
			r.Algo, r.SMs = algo.String(), sms
		}
	}
	ways()
	if err == nil && coll.inPlace && b.cmd.Place != "out" {
		r.InPlace, err = b.time(ctx, coll, dt, op, count, size, true)
		if r.OutOfPlace == nil {
			ways()
		}
	}
	return r, err
}

const (
	// Without -n, a time is the median of blocks that take about so long each.
	blocks    = 7
	blockTime = 20 * time.Millisecond
)

func (b *bench) time(ctx context.Context, coll collective, dt ccl.DType, op ccl.Op, count, size int, inPlace bool) (*Timing, error) {
	send, recv, err := coll.buffers(ctx, b, dt, count, inPlace)
	if err != nil {
		return nil, err
	}
	enqueue := func(c *ccl.Comm) error { return coll.call(c, b.stream, send, recv, op, b.cmd.Root) }
	call := func(c *ccl.Comm) error {
		if err := enqueue(c); err != nil {
			return err
		}
		return b.stream.Wait(ctx)
	}
	first := 0.0
	if b.device != ccl.CPU {
		from := time.Now()
		if err := call(b.comm); err != nil {
			return nil, err
		}
		first = float64(time.Since(from)) / float64(time.Microsecond)
		if b.started == 0 {
			b.started = age()
		}
	}
	comms := []*ccl.Comm{b.comm}
	if b.plain != nil {
		comms = append(comms, b.plain)
	}
	wrong := -1
	for range b.checks(size) {
		w, err := b.check(ctx, coll, dt, op, count, inPlace, send, recv, func() error { return call(b.comm) })
		if err != nil {
			return nil, err
		}
		wrong = max(wrong, 0) + w
	}
	for range b.cmd.Warmup {
		for _, c := range comms {
			if err := call(c); err != nil {
				return nil, err
			}
		}
	}
	if b.device != ccl.CPU {
		t, err := b.timeGPU(ctx, func() error { return enqueue(b.comm) })
		if err != nil {
			return nil, err
		}
		timing := b.timing(coll, t, wrong, size)
		timing.First = first
		return timing, nil
	}
	iters, rounds := b.cmd.Iters, 1
	if iters == 0 {
		if iters, err = b.calibrate(ctx, func() error { return call(b.comm) }); err != nil {
			return nil, err
		}
		rounds = blocks
	}
	times := make([][]float64, len(comms))
	for range rounds {
		for i, c := range comms {
			t, err := b.block(ctx, iters, func() error { return call(c) })
			if err != nil {
				return nil, err
			}
			times[i] = append(times[i], t)
		}
	}
	t := b.timing(coll, median(times[0]), wrong, size)
	if len(times) > 1 {
		t.Plain = median(times[1])
	}
	return t, nil
}

func (b *bench) timing(coll collective, micros float64, wrong, size int) *Timing {
	t := &Timing{Micros: micros, Wrong: wrong}
	if t.Micros > 0 {
		t.Alg = float64(size) / t.Micros / 1e3
		t.Bus = t.Alg * coll.bus(float64(b.comm.Size()))
	}
	return t
}

func median(t []float64) float64 {
	slices.Sort(t)
	return t[len(t)/2]
}

// block times iters operations back to back: µs each, averaged over the ranks.
func (b *bench) block(ctx context.Context, iters int, call func() error) (float64, error) {
	if err := b.do(ctx, b.comm.Barrier(b.stream)); err != nil {
		return 0, err
	}
	begun := time.Now()
	for range iters {
		if err := call(); err != nil {
			return 0, err
		}
	}
	mine := []float64{float64(time.Since(begun).Nanoseconds()) / 1e3 / float64(iters)}
	err := b.do(ctx, b.comm.AllReduce(b.stream, ccl.Of(mine), ccl.Of(mine), ccl.Avg))
	return mine[0], err
}

// calibrate agrees on how many operations take about blockTime.
func (b *bench) calibrate(ctx context.Context, call func() error) (int, error) {
	for iters := 1; ; iters *= 4 {
		t, err := b.block(ctx, iters, call) // the same on all ranks
		if err != nil {
			return 0, err
		}
		if total := t * float64(iters); total > float64(blockTime.Microseconds())/8 {
			return max(1, int(float64(blockTime.Microseconds())/t)), nil
		}
	}
}

func (b *bench) do(ctx context.Context, err error) error {
	if err != nil {
		return err
	}
	return b.stream.Wait(ctx)
}

// check runs one operation on known data and counts what is wrong on any rank.
func (b *bench) check(ctx context.Context, coll collective, dt ccl.DType, op ccl.Op, count int, inPlace bool, send, recv ccl.Buffer, call func() error) (int, error) {
	x := expect{op: ccl.Sum, rank: b.comm.Rank(), n: b.comm.Size(), root: b.cmd.Root, count: count}
	if coll.kind.Reduces() {
		x.op = op
	}
	if b.device != ccl.CPU {
		return b.checkGPU(ctx, x, coll, dt, send, recv, call)
	}
	if !inPlace {
		clear(b.mem(1, recv.Count()*dt.Size()))
	} else {
		clear(b.mem(0, max(send.Count(), recv.Count())*dt.Size()))
	}
	x.fill(dt, send.Raw())
	if err := call(); err != nil {
		return 0, err
	}
	return b.total(ctx, x.wrong(dt, recv.Raw(), coll.want))
}

// nodes is how many nodes the ranks are on; node is this rank's.
func (b *bench) nodes(ctx context.Context, node string) (int, error) {
	name := fnv.New64a()
	name.Write([]byte(node))
	mine, all := []uint64{name.Sum64()}, make([]uint64, b.comm.Size())
	err := b.do(ctx, b.comm.AllGather(b.stream, ccl.Of(mine), ccl.Of(all)))
	slices.Sort(all)
	return len(slices.Compact(all)), err
}

// total adds up a number of every rank's.
func (b *bench) total(ctx context.Context, n int) (int, error) {
	sum := []int64{int64(n)}
	err := b.do(ctx, b.comm.AllReduce(b.stream, ccl.Of(sum), ccl.Of(sum), ccl.Sum))
	return int(sum[0]), err
}
