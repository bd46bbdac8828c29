package jobsim

import (
	"time"

	"github.com/lockstep-ccl/lockstep/record"
)

// slot is which of its communicators a rank uses.
type slot uint8

const (
	slotTensor slot = iota
	slotContext
	slotExpert
	slotData
	slotPipe
	slotWorld
	slotExtra // and those after it
	numExtra  = 8
	numSlots  = slotExtra + numExtra
)

type opcode uint8

const (
	opCompute opcode = iota
	opExpert         // compute whose length follows the experts' load
	opColl           // a collective; the rank waits for its end
	opAsync          // a collective; the rank goes on
	opWait           // for all asynchronous ones of a slot
	opPipe           // sends and receives with pipeline neighbours, fused when several
	opStep
	opPause // pauses that are due after this step
	opSkip  // a collective that the program forgets
)

// Directions of opPipe: to and from the next and the previous stage.
const (
	sendNext uint8 = 1 << iota // an activation
	recvPrev
	sendPrev // a gradient
	recvNext
)

// instr is one instruction of a step's program.
type instr struct {
	op    opcode
	slot  slot
	coll  record.CollKind
	dirs  uint8
	micro uint16 // whose length scales a computation
	fault int8   // 1 + the fault that changed it
	dur   int64  // ns
	bytes uint64
	// In programs of tests: a computation waits for I/O, sleeps, has a mark, or is held back by a quota; a
	// collective's transfer takes scale times as long.
	io, sleep bool
	scale     float64
	mark      record.MarkCode
	throttled float32
}

// programs makes the program of one step for each pipeline stage: ranks of a
// stage run the same.
func programs(c *Config) [][]instr {
	all := make([][]instr, c.Pipeline)
	for s := range all {
		b := builder{c: c, stage: s}
		b.step()
		all[s] = b.out
	}
	return all
}

type builder struct {
	c     *Config
	stage int
	out   []instr
}

func (b *builder) emit(i instr) { b.out = append(b.out, i) }

func (b *builder) compute(d float64, micro int) {
	if d > 0 {
		b.emit(instr{op: opCompute, dur: int64(d), micro: uint16(micro)})
	}
}

func (b *builder) coll(s slot, k record.CollKind, bytes uint64) {
	b.emit(instr{op: opColl, slot: s, coll: k, bytes: bytes})
}

// scale is this stage's compute in parts of the first one's.
func (b *builder) scale() float64 {
	if b.c.Pipeline == 1 {
		return 1
	}
	return 1 + b.c.Uneven*float64(b.stage)/float64(b.c.Pipeline-1)
}

// pass is the compute of one microbatch and what it exchanges inside a stage.
func (b *builder) pass(micro int, backward, last bool) {
	c := b.c
	d := float64(c.Compute) * b.scale() / float64(c.Chunks)
	if backward {
		d *= 2
	}
	layers := c.Layers
	piece := d / float64(layers)
	buckets := 0
	for l := range layers {
		experts := c.Expert > 1
		part := piece
		if experts {
			part /= 2
		}
		b.compute(part, micro)
		if c.Context > 1 {
			k := record.AllGather
			if backward {
				k = record.ReduceScatter
			}
			b.coll(slotContext, k, 4<<20)
		}
		if c.Tensor > 1 {
			k := record.AllReduce
			if backward && l%2 == 1 {
				k = record.ReduceScatter
			}
			b.coll(slotTensor, k, 16<<20)
		}
		if experts {
			b.coll(slotExpert, record.AlltoAllv, 8<<20)
			b.emit(instr{op: opExpert, dur: int64(part), micro: uint16(micro)})
			b.coll(slotExpert, record.AlltoAllv, 8<<20)
		}
		if backward && last && c.Buckets > 0 && c.Data > 1 {
			for ; buckets < c.Buckets*(l+1)/layers; buckets++ {
				k := record.AllReduce
				if c.Sharded {
					k = record.ReduceScatter
				}
				b.emit(instr{op: opAsync, slot: slotData, coll: k, bytes: 64 << 20})
			}
		}
	}
}

func (b *builder) pipe(dirs uint8) {
	if b.c.Chunks == 1 {
		if b.stage == 0 {
			dirs &^= recvPrev | sendPrev
		}
		if b.stage == b.c.Pipeline-1 {
			dirs &^= sendNext | recvNext
		}
	}
	if dirs != 0 {
		b.emit(instr{op: opPipe, slot: slotPipe, dirs: dirs, bytes: 8 << 20})
	}
}

func (b *builder) step() {
	c := b.c
	b.compute(float64(c.Load), 0)
	switch {
	case c.Pipeline == 1:
		for m := range c.Micro {
			b.pass(m, false, false)
			b.pass(m, true, m == c.Micro-1)
		}
	case c.Chunks > 1:
		b.interleaved()
	default:
		b.oneForwardOneBackward()
	}
	if c.Data > 1 {
		switch {
		case c.Buckets > 0:
			b.emit(instr{op: opWait, slot: slotData})
		case c.Sharded:
			b.coll(slotData, record.ReduceScatter, 512<<20)
		default:
			b.coll(slotData, record.AllReduce, 512<<20)
		}
	}
	if c.World {
		b.coll(slotWorld, record.AllReduce, 8)
	}
	b.compute(float64(c.Compute)/4, 0)
	if c.Data > 1 && c.Sharded {
		b.coll(slotData, record.AllGather, 512<<20)
	}
	b.emit(instr{op: opStep})
	b.emit(instr{op: opPause})
}

// oneForwardOneBackward is the 1F1B schedule (PipeDream-Flush), sends and
// receives fused as Megatron does it.
func (b *builder) oneForwardOneBackward() {
	c := b.c
	warm := min(c.Pipeline-b.stage-1, c.Micro)
	rest := c.Micro - warm
	for i := range warm {
		b.pipe(recvPrev)
		b.pass(i, false, false)
		b.pipe(sendNext)
	}
	if rest > 0 {
		b.pipe(recvPrev)
	}
	for i := range rest {
		b.pass(warm+i, false, false)
		b.pipe(sendNext | recvNext)
		b.pass(i, true, i == c.Micro-1)
		if i == rest-1 {
			b.pipe(sendPrev)
		} else {
			b.pipe(sendPrev | recvPrev)
		}
	}
	for i := range warm {
		b.pipe(recvNext)
		b.pass(rest+i, true, rest+i == c.Micro-1)
		b.pipe(sendPrev)
	}
}

// interleaved is the schedule with several model chunks a stage: every pass is
// followed by one fused exchange with both neighbours, the first and the last
// stage being neighbours, too.
func (b *builder) interleaved() {
	c := b.c
	total := c.Micro * c.Chunks
	first, last := b.stage == 0, b.stage == c.Pipeline-1
	chunk := func(k int, backward bool) int {
		n := k % (c.Pipeline * c.Chunks) / c.Pipeline
		if backward {
			n = c.Chunks - 1 - n
		}
		return n
	}
	micro := func(k int) int { return k/(c.Pipeline*c.Chunks)*c.Pipeline + k%c.Pipeline }
	// What comes in before, and goes out after, the k-th pass of a direction.
	needs := func(k int, backward bool) bool {
		switch {
		case k >= total:
			return false
		case backward:
			return !last || chunk(k, true) != c.Chunks-1
		}
		return !first || chunk(k, false) != 0
	}
	gives := func(k int, backward bool) bool {
		switch {
		case k < 0:
			return false
		case backward:
			return !first || chunk(k, true) != 0
		}
		return !last || chunk(k, false) != c.Chunks-1
	}
	warm := min(2*(c.Pipeline-b.stage-1)+(c.Chunks-1)*c.Pipeline, total)
	if needs(0, false) {
		b.pipe(recvPrev)
	}
	f, g := 0, 0
	exchange := func(sentF, sentB int, wantF, wantB bool) {
		var dirs uint8
		if gives(sentF, false) {
			dirs |= sendNext
		}
		if gives(sentB, true) {
			dirs |= sendPrev
		}
		if wantF {
			dirs |= recvPrev
		}
		if wantB {
			dirs |= recvNext
		}
		b.pipe(dirs)
	}
	for ; f < warm; f++ {
		b.pass(micro(f), false, false)
		exchange(f, -1, needs(f+1, false), f == warm-1 && needs(0, true))
	}
	for ; f < total; f++ {
		b.pass(micro(f), false, false)
		b.pass(micro(g), true, g == total-1)
		exchange(f, g, needs(f+1, false), needs(g+1, true))
		g++
	}
	for ; g < total; g++ {
		b.pass(micro(g), true, g == total-1)
		exchange(-1, g, false, needs(g+1, true))
	}
}

// stepTime estimates how long one step takes, for scenarios to choose moments by.
func (c *Config) stepTime() time.Duration {
	full, err := c.withDefaults()
	if err != nil {
		return 0
	}
	c = &full
	layer := time.Duration(0)
	if c.Tensor > 1 {
		layer += c.TensorTime
	}
	if c.Context > 1 {
		layer += c.ContextTime
	}
	if c.Expert > 1 {
		layer += 2 * c.ExpertTime
	}
	pass := 3*time.Duration(float64(c.Compute)*(1+c.Uneven)) + time.Duration(2*c.Layers*c.Chunks)*layer
	d := c.Load + time.Duration(c.Micro)*pass + c.Compute/4
	if c.Pipeline > 1 {
		d += time.Duration(c.Pipeline-1)*pass/time.Duration(c.Chunks) + time.Duration(4*c.Micro*c.Chunks)*c.PipeTime
	}
	if c.Data > 1 {
		d += c.DataTime
		if c.Sharded {
			d += c.DataTime
		}
	}
	return d
}
