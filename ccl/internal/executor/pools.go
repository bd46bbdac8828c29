package executor

import (
	"sync"

	"github.com/lockstep-ccl/lockstep/ccl/internal/algo"
	"github.com/lockstep-ccl/lockstep/ccl/internal/engine"
)

// Messages are the messages of a group in host memory. The buffer of Msgs[i] is Parts[i].
type Messages struct {
	Msgs  []algo.Message
	Parts []engine.Part
}

func (m *Messages) clear() {
	clear(m.Parts)
	m.Msgs, m.Parts = m.Msgs[:0], m.Parts[:0]
}

// pool recycles the values of ended operations.
type pool[T any] struct {
	mu   sync.Mutex
	free []*T
}

func (p *pool[T]) get() *T {
	p.mu.Lock()
	defer p.mu.Unlock()
	if n := len(p.free); n > 0 {
		v := p.free[n-1]
		p.free = p.free[:n-1]
		return v
	}
	return new(T)
}

func (p *pool[T]) put(v *T) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.free = append(p.free, v)
}
