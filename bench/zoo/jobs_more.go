package zoo

import (
	"context"
	"fmt"
	"os"
	"time"

	"github.com/lockstep-ccl/lockstep/ccl"
)

var bg = context.Background()

// pipeline runs micro-batches through stages by 1F1B. Stages are neighbours when replicas
// are blocks; with striped placement a stage is a block, and so a node.
func pipeline(r *Rank, stages int, striped bool) error {
	replicas := r.size() / stages
	replica, stage := r.rank()/stages, r.rank()%stages
	if striped {
		replica, stage = r.rank()%replicas, r.rank()/replicas
	}
	pp, err := r.split(fmt.Sprintf("pp%d", replica), replica, stage)
	if err != nil {
		return err
	}
	dp, err := r.split(fmt.Sprintf("dp%d", stage), stage, replica)
	if err != nil {
		return err
	}
	const micro, n = 4, 2048
	m := r.newModel(n, stage)
	act, grad := make([]float32, n), make([]float32, n)
	forward := func(b int) error {
		if stage > 0 {
			if err := r.do(func(s *ccl.Stream) error { return pp.Recv(s, ccl.Of(act), stage-1) }); err != nil {
				return err
			}
		} else {
			for i := range act {
				act[i] = m.params[i] + float32(b)
			}
		}
		r.compute(5 * ms)
		for i := range act {
			act[i] = act[i]*0.5 + m.params[i]
		}
		if stage == stages-1 {
			return nil
		}
		return r.do(func(s *ccl.Stream) error { return pp.Send(s, ccl.Of(act), stage+1) })
	}
	backward := func() error {
		if stage < stages-1 {
			if err := r.do(func(s *ccl.Stream) error { return pp.Recv(s, ccl.Of(grad), stage+1) }); err != nil {
				return err
			}
		} else {
			copy(grad, act)
		}
		r.compute(9 * ms)
		for i := range grad {
			grad[i] = grad[i]*0.5 + m.params[i]*0.1
			m.grads[i] += grad[i]
		}
		if stage == 0 {
			return nil
		}
		return r.do(func(s *ccl.Stream) error { return pp.Send(s, ccl.Of(grad), stage-1) })
	}
	for {
		r.next()
		m.gradients(r.step, replica)
		warm := min(stages-1-stage, micro)
		for b := range warm {
			if err := forward(b); err != nil {
				return err
			}
		}
		for b := warm; b < micro; b++ {
			if err := forward(b); err != nil {
				return err
			}
			if err := backward(); err != nil {
				return err
			}
		}
		for range warm {
			if err := backward(); err != nil {
				return err
			}
		}
		if err := r.allReduce(dp, m.grads); err != nil {
			return err
		}
		m.update(m.grads, 0, replicas*micro)
		if err := r.loss(value(m.params)); err != nil {
			return err
		}
	}
}

// server sends parameters to workers and takes their gradients; it computes little itself.
func server(r *Rank) error {
	n := r.size()
	m := r.newModel(8192, 0)
	sum, times := make([]float32, len(m.grads)), make([]float32, n)
	for {
		r.next()
		if err := r.do(func(s *ccl.Stream) error { return r.world.Broadcast(s, ccl.Of(m.params), ccl.Of(m.params), 0) }); err != nil {
			return err
		}
		clear(m.grads)
		if r.rank() > 0 {
			m.gradients(r.step, r.rank())
			r.compute(65 * ms)
		}
		if err := r.do(func(s *ccl.Stream) error { return r.world.Reduce(s, ccl.Of(m.grads), ccl.Of(sum), ccl.Sum, 0) }); err != nil {
			return err
		}
		loss := []float32{value(m.params)}
		if err := r.do(func(s *ccl.Stream) error { return r.world.Gather(s, ccl.Of(loss), ccl.Of(times), 0) }); err != nil {
			return err
		}
		if r.rank() == 0 {
			r.compute(15 * ms)
			m.update(sum, 0, n-1)
			loss[0] = value(times)
		}
		if err := r.do(func(s *ccl.Stream) error { return r.world.Broadcast(s, ccl.Of(loss), ccl.Of(loss), 0) }); err != nil {
			return err
		}
		if err := r.write(loss[0]); err != nil {
			return err
		}
	}
}

// manySmall has each rank in eight communicators, and uses all of them.
func manySmall(r *Rank) error {
	me, n := r.rank(), r.size()
	var comms []*ccl.Comm
	for _, d := range []struct {
		name  string
		color int
	}{
		{"row", me / 3}, {"col", me % 3}, {"even", me % 2}, {"half", me / 3}, {"pairs", me / 2}, {"shifted", (me + 1) % n / 2}, {"all1", 0}, {"all2", 0},
	} {
		c, err := r.split(fmt.Sprintf("%s%d", d.name, d.color), d.color, me)
		if err != nil {
			return err
		}
		comms = append(comms, c)
	}
	m := r.newModel(1024, 0)
	for {
		r.next()
		m.gradients(r.step, me)
		sum := float32(0)
		for round := range 3 {
			for i, c := range comms[:6] {
				r.compute(4 * ms)
				v := append([]float32(nil), m.grads[i*64+round*8:][:64]...)
				if err := r.allReduce(c, v); err != nil {
					return err
				}
				sum += value(v)
			}
		}
		a, b := append([]float32(nil), m.grads...), []float32{sum}
		err := r.both(
			func(s *ccl.Stream) error { return comms[6].AllReduce(s, ccl.Of(a), ccl.Of(a), ccl.Sum) },
			func(s *ccl.Stream) error { return comms[7].AllReduce(s, ccl.Of(b), ccl.Of(b), ccl.Sum) })
		if err != nil {
			return err
		}
		r.compute(15 * ms)
		m.update(a, 0, n)
		if err := r.loss(value(m.params) + b[0]); err != nil {
			return err
		}
	}
}

// accumulate talks rarely, and then much.
func accumulate(r *Rank) error {
	m := r.newModel(256<<10, 0)
	total := make([]float32, len(m.grads))
	for {
		r.next()
		clear(total)
		for micro := range 8 {
			r.compute(r.jitter(52*ms, 0.03))
			if micro%4 == 0 {
				m.gradients(r.step*8+micro, r.rank())
				for i, g := range m.grads {
					total[i] += g
				}
			}
		}
		if err := r.allReduce(r.world, total); err != nil {
			return err
		}
		m.update(total, 0, 2*r.size())
		r.compute(15 * ms)
		if err := r.loss(value(m.params)); err != nil {
			return err
		}
	}
}

// rank0Checkpoints has pauses of rank 0 alone: a checkpoint of 600 ms every 25 steps, an
// evaluation of 900 ms every 60.
func rank0Checkpoints(r *Rank) error {
	m := r.newModel(16<<10, 0)
	for {
		r.next()
		m.gradients(r.step, r.rank())
		r.compute(65 * ms)
		if err := r.allReduce(r.world, m.grads); err != nil {
			return err
		}
		m.update(m.grads, 0, r.size())
		if r.rank() == 0 && r.step%25 == 0 {
			if err := r.save(m.params, 600*ms); err != nil {
				return err
			}
		}
		if r.rank() == 0 && r.step%60 == 0 {
			r.compute(900 * ms)
		}
		if err := r.loss(value(m.params)); err != nil {
			return err
		}
	}
}

// save writes a checkpoint slowly, and makes sure that it is on the disk.
func (r *Rank) save(v []float32, d time.Duration) error {
	f, err := os.CreateTemp(os.Getenv(EnvDir), "checkpoint")
	if err != nil {
		return err
	}
	defer os.Remove(f.Name())
	defer f.Close()
	for range 10 {
		if _, err := f.Write(ccl.Of(v).Raw()); err != nil {
			return err
		}
		time.Sleep(d / 10)
	}
	return f.Sync()
}

// variableLength has steps of 0.6 to 1.4 times the usual length, the same on all ranks but
// for a tenth, and writes checkpoints from a goroutine.
func variableLength(r *Rank) error {
	m := r.newModel(16<<10, 0)
	done := make(chan error, 1)
	done <- nil
	for {
		r.next()
		m.gradients(r.step, r.rank())
		length := 0.6 + 0.8*r.random.Float64()
		r.compute(r.jitter(time.Duration(length*float64(90*ms)), 0.1))
		if err := r.allReduce(r.world, m.grads); err != nil {
			return err
		}
		m.update(m.grads, 0, r.size())
		if r.step%20 == 0 {
			if err := <-done; err != nil {
				return err
			}
			snapshot := append([]float32(nil), m.params...)
			go func() { done <- r.save(snapshot, 500*ms) }()
		}
		r.compute(10 * ms)
		if err := r.loss(value(m.params)); err != nil {
			return err
		}
	}
}

// serving answers requests that come in bursts: rank 0 waits for one and tells the others
// how many tokens there are to make.
func serving(r *Rank) error {
	m := r.newModel(2048, 0)
	for {
		r.next()
		tokens := []float32{0}
		if r.rank() == 0 {
			pause := 10 + r.random.IntN(40)
			if r.random.IntN(12) == 0 {
				pause += 200 + r.random.IntN(400)
			}
			time.Sleep(time.Duration(pause) * ms)
			tokens[0] = float32(3 + r.random.IntN(5))
		}
		if err := r.do(func(s *ccl.Stream) error { return r.world.Broadcast(s, ccl.Of(tokens), ccl.Of(tokens), 0) }); err != nil {
			return err
		}
		for t := range int(tokens[0]) {
			m.gradients(r.step*16+t, r.rank())
			for layer := range 2 {
				r.compute(9 * ms)
				if err := r.allReduce(r.world, m.grads[layer*1024:][:1024]); err != nil {
					return err
				}
			}
			m.update(m.grads, 0, r.size())
		}
		if err := r.write(value(m.params)); err != nil {
			return err
		}
	}
}
