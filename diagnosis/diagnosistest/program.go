package diagnosistest

import (
	"math"
	"time"

	"github.com/lockstep-ccl/lockstep/record"
)

type instrKind uint8

const (
	doCompute instrKind = iota
	doColl
	doSend
	doRecv
	doMark
	doUnmark
	doStep
	doLeave
	doJoin
)

type instr struct {
	kind instrKind
	d    time.Duration
	comm func(*rank) *comm
	coll record.CollKind
	peer int
	mark record.MarkCode
	io   bool
	idle bool
}

func tpOf(r *rank) *comm { return r.tpComm }

func dpOf(r *rank) *comm { return r.dpComm }

func ppOf(r *rank) *comm { return r.ppComm }

func worldOf(r *rank) *comm { return r.worldComm }

// opening is what a rank does before its first step.
func (j *Job) opening(r *rank) []instr {
	todo := []instr{{kind: doJoin}}
	for i := range j.cfg.Pauses {
		if p := &j.cfg.Pauses[i]; p.Every == 0 {
			todo = append(todo, j.pause(r, p)...)
		}
	}
	return todo
}

func (j *Job) pause(r *rank, p *Pause) []instr {
	if p.Rank != AllRanks && p.Rank != r.id {
		return nil
	}
	d := time.Duration(float64(p.Length) * (0.95 + 0.1*j.rng.Float64()))
	if p.Spread > 0 {
		d += time.Duration(j.rng.Int64N(int64(p.Spread)))
	}
	work := instr{kind: doCompute, d: d, io: p.IO, idle: p.Sleep || p.IO}
	if p.Mark == record.MarkNone {
		return []instr{work}
	}
	return []instr{{kind: doMark, mark: p.Mark}, work, {kind: doUnmark}}
}

// program is one step of a rank: all microbatches forward, all backward, the
// gradients, the optimizer.
func (j *Job) program(r *rank) []instr {
	cfg := &j.cfg
	var todo []instr
	if cfg.ResizeAt > 0 && r.step == cfg.ResizeAt && cfg.DP > 1 {
		todo = append(todo, instr{kind: doLeave})
		if r.dp == cfg.DP-1 {
			return todo
		}
		todo = append(todo, instr{kind: doJoin})
	}
	stage := 1.0
	if cfg.PP > 1 {
		stage += cfg.Uneven * float64(r.stage) / float64(cfg.PP-1)
	}
	forward := time.Duration(float64(cfg.Compute) * stage)
	compute := func(d time.Duration) { todo = append(todo, instr{kind: doCompute, d: d}) }
	tp := func(k record.CollKind) {
		if cfg.TP > 1 {
			todo = append(todo, instr{kind: doColl, comm: tpOf, coll: k})
		}
	}
	for range cfg.Micro {
		if r.stage > 0 {
			todo = append(todo, instr{kind: doRecv, comm: ppOf, peer: r.stage - 1})
		}
		compute(forward)
		tp(record.AllReduce)
		if r.stage < cfg.PP-1 {
			todo = append(todo, instr{kind: doSend, comm: ppOf, peer: r.stage + 1})
		}
	}
	for range cfg.Micro {
		if r.stage < cfg.PP-1 {
			todo = append(todo, instr{kind: doRecv, comm: ppOf, peer: r.stage + 1})
		}
		compute(forward)
		tp(record.ReduceScatter)
		compute(forward)
		tp(record.AllGather)
		if r.stage > 0 {
			todo = append(todo, instr{kind: doSend, comm: ppOf, peer: r.stage - 1})
		}
	}
	todo = append(todo, instr{kind: doColl, comm: dpOf, coll: record.AllReduce})
	compute(cfg.Compute / 4)
	todo = append(todo, instr{kind: doColl, comm: worldOf, coll: record.AllReduce}, instr{kind: doStep})
	for i := range cfg.Pauses {
		if p := &cfg.Pauses[i]; p.Every > 0 && (r.step+1)%p.Every == 0 {
			todo = append(todo, j.pause(r, p)...)
		}
	}
	return todo
}

func (j *Job) compute(r *rank, in instr) {
	d := float64(in.d)
	if j.cfg.Noise > 0 {
		d *= math.Exp(j.rng.NormFloat64() * j.cfg.Noise)
	}
	if j.cfg.Hiccup > 0 && j.rng.IntN(50) == 0 {
		d += float64(j.rng.Int64N(int64(j.cfg.Hiccup)))
	}
	for i := range j.cfg.Faults {
		f := &j.cfg.Faults[i]
		if !f.during(j.now) {
			continue
		}
		switch {
		case f.Kind == SlowRank && f.Rank == r.id:
			d = d*max(f.Factor, 1) + float64(f.Extra)
		case f.Kind == SlowAll:
			d *= f.Factor
		case (f.Kind == Hang || f.Kind == Spin) && f.Rank == r.id:
			r.stuck, r.stuckAt = f.Kind, j.now
			if f.Until == 0 {
				r.computing = true
				return
			}
			d += float64(int64(f.Until) - j.now)
		}
	}
	r.computing, r.io, r.sleeping = true, in.io, in.idle
	r.until = j.now + int64(d)
	j.at(r.until, r, func() { j.computed(r) })
}

func (j *Job) computed(r *rank) {
	r.computing, r.io, r.sleeping = false, false, false
	r.stuck = 0
	j.run(r)
}
