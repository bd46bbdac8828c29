package train

import (
	"math"
	"math/rand/v2"
)

// The network: two blocks, one a pipeline stage, x → x + tanh(x·W1 + b1)·W2 + b2,
// then a linear head. W1 is split by columns and W2 by rows over the tensor-parallel
// ranks (Megatron's scheme), so that one AllReduce a block and direction is enough.
const (
	features = 32
	hidden   = 128
	batch    = 8 // samples of a micro-batch
	micro    = 4 // micro-batches of a step and replica
)

// stage is one rank's share of the model: slices of one flat parameter vector,
// and the same of its gradient.
type stage struct {
	h          int // hidden units of this tensor-parallel rank
	params     []float32
	grads      []float32
	w1, b1     []float32 // [features][h], [h]
	w2, b2     []float32 // [h][features], [features]
	head       []float32 // [features], last stage only
	gw1, gb1   []float32
	gw2, gb2   []float32
	ghead      []float32
	activation [micro]activation
}

// activation is what the backward pass needs of a forward pass.
type activation struct {
	x, h, out []float32 // [batch][features], [batch][h], [batch][features]
	dout      []float32
}

// size is how many parameters a stage has, and how many with padding, so that
// pad divides their number.
func size(tp int, last bool, pad int) (n, padded int) {
	h := hidden / tp
	n = features*h + h + h*features + features
	if last {
		n += features
	}
	return n, (n + pad - 1) / pad * pad
}

// newStage lays out the model in vectors that take hands out: what stages of a
// pipeline exchange first, since other stages have it at the same place.
func newStage(tp int, last bool, pad int, take func(int) []float32) *stage {
	s := &stage{h: hidden / tp}
	for m := range s.activation {
		a := &s.activation[m]
		a.x, a.out, a.dout = take(batch*features), take(batch*features), take(batch*features)
		a.h = make([]float32, batch*s.h)
	}
	_, padded := size(tp, last, pad)
	s.params, s.grads = take(padded), take(padded)
	cut := func(flat []float32) (w1, b1, w2, b2, head []float32) {
		take := func(n int) (p []float32) { p, flat = flat[:n:n], flat[n:]; return p }
		w1, b1, w2, b2 = take(features*s.h), take(s.h), take(s.h*features), take(features)
		if last {
			head = take(features)
		}
		return
	}
	s.w1, s.b1, s.w2, s.b2, s.head = cut(s.params)
	s.gw1, s.gb1, s.gw2, s.gb2, s.ghead = cut(s.grads)
	return s
}

// init draws the parameters of this rank's place in the model.
func (s *stage) init(seed uint64, pp, tp int) {
	r := rand.New(rand.NewPCG(seed, uint64(pp)<<32|uint64(tp)+1))
	for i := range s.w1 {
		s.w1[i] = float32(r.NormFloat64() / math.Sqrt(features))
	}
	for i := range s.w2 {
		s.w2[i] = float32(r.NormFloat64() / math.Sqrt(hidden) / 2)
	}
	// The head is not split: every tensor-parallel rank holds the same one.
	r = rand.New(rand.NewPCG(seed, 1<<63))
	for i := range s.head {
		s.head[i] = float32(r.NormFloat64() / math.Sqrt(features))
	}
}

// forward computes this rank's partial output of micro-batch m into a.out;
// the caller sums it over the tensor-parallel ranks and calls finish.
func (s *stage) forward(m int) {
	a := &s.activation[m]
	for b := range batch {
		x, h := a.x[b*features:][:features], a.h[b*s.h:][:s.h]
		copy(h, s.b1)
		for i, xi := range x {
			axpy(h, xi, s.w1[i*s.h:][:s.h])
		}
		for j, v := range h {
			h[j] = float32(math.Tanh(float64(v)))
		}
		o := a.out[b*features:][:features]
		clear(o)
		for j, hj := range h {
			axpy(o, hj, s.w2[j*features:][:features])
		}
	}
}

// finish adds bias and residual to the summed output.
func (s *stage) finish(m int) {
	a := &s.activation[m]
	for b := range batch {
		o, x := a.out[b*features:][:features], a.x[b*features:][:features]
		for i := range o {
			o[i] += s.b2[i] + x[i]
		}
	}
}

// backward takes the gradient of the output in a.dout, adds to the parameters'
// gradients, and writes this rank's partial gradient of the input to dx, to be
// summed over the tensor-parallel ranks before finishBackward.
func (s *stage) backward(m int, dx []float32) {
	a := &s.activation[m]
	dh := make([]float32, s.h)
	for b := range batch {
		x, h, do := a.x[b*features:][:features], a.h[b*s.h:][:s.h], a.dout[b*features:][:features]
		for i, d := range do {
			s.gb2[i] += d
		}
		for j, hj := range h {
			w := s.w2[j*features:][:features]
			axpy(s.gw2[j*features:][:features], hj, do)
			dh[j] = dot(do, w) * (1 - hj*hj)
			s.gb1[j] += dh[j]
		}
		d := dx[b*features:][:features]
		for i, xi := range x {
			axpy(s.gw1[i*s.h:][:s.h], xi, dh)
			d[i] = dot(dh, s.w1[i*s.h:][:s.h])
		}
	}
}

// finishBackward adds the residual's share to the summed gradient of the input.
func (s *stage) finishBackward(m int, dx []float32) {
	for i, d := range s.activation[m].dout {
		dx[i] += d
	}
}

// loss of the last stage: mean squared error of the head's output; it fills a.dout.
func (s *stage) loss(m int, y []float32) (sum float64) {
	a := &s.activation[m]
	for b := range batch {
		o := a.out[b*features:][:features]
		diff := dot(o, s.head) - y[b]
		sum += float64(diff) * float64(diff)
		g := 2 * diff / batch
		d := a.dout[b*features:][:features]
		for i := range d {
			d[i] = g * s.head[i]
		}
		axpy(s.ghead, g, o)
	}
	return sum
}

func axpy(y []float32, a float32, x []float32) {
	for i, v := range x[:len(y)] {
		y[i] += a * v
	}
}

func dot(x, y []float32) (s float32) {
	for i, v := range y[:len(x)] {
		s += x[i] * v
	}
	return s
}

// adam is the optimizer over one shard of the parameters.
type adam struct {
	m, v []float32
	lr   float64
}

func (o *adam) step(t int, p, g []float32, scale float32) {
	const b1, b2, eps = 0.9, 0.999, 1e-8
	c1, c2 := 1-math.Pow(b1, float64(t)), 1-math.Pow(b2, float64(t))
	for i, gi := range g {
		gi *= scale
		o.m[i] = b1*o.m[i] + (1-b1)*gi
		o.v[i] = b2*o.v[i] + (1-b2)*gi*gi
		p[i] -= float32(o.lr * (float64(o.m[i]) / c1) / (math.Sqrt(float64(o.v[i])/c2) + eps))
	}
}

// sample fills one micro-batch of the data set: a fixed random teacher's answers
// to random inputs. Sample i of the data set is the same whoever asks.
func sample(seed uint64, step, replica, m int, x, y []float32) {
	r := rand.New(rand.NewPCG(seed^0x5eed, uint64(step)<<20|uint64(replica)<<10|uint64(m)))
	for b := range batch {
		row := x[b*features:][:features]
		for i := range row {
			row[i] = float32(r.NormFloat64())
		}
		y[b] = float32(math.Sin(float64(row[0]+row[1]))) + row[2]*row[3] - float32(math.Abs(float64(row[4])))
	}
}
