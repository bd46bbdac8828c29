package demo

import (
	"context"
	"fmt"
	"math/rand/v2"
	"path/filepath"

	"github.com/lockstep-ccl/lockstep/exporters/web"
)

// program is what the ranks run: what can break in it, how far it is, and how it trains undisturbed. It keeps
// checkpoints and losses in files as train has them.
type program interface {
	// ranks says in words what runs.
	ranks() string
	// choose makes the fault of that name. rank is -1 to pick any.
	choose(name string, rank int, r *rand.Rand) (fault, error)
	// inject breaks it, in a rank of this machine.
	inject(f *fault, attempt, pid int) error
	// step is how far the job of this status is.
	step(st *web.Status) uint64
	// undisturbed trains from the last checkpoint in dir, unobserved.
	undisturbed(ctx context.Context, s shape, dir string, steps int) error
}

// ownProgram is lockstep train.
type ownProgram struct{ *cluster }

func (c ownProgram) ranks() string {
	return fmt.Sprintf("%d ranks (dp %d × tp %d × pp %d) over %s", c.shape.world(), c.shape.dp, c.shape.tp, c.shape.pp, c.device)
}

func (c ownProgram) choose(name string, rank int, r *rand.Rand) (fault, error) {
	return choose(name, rank, c.shape, r)
}

func (c ownProgram) inject(f *fault, attempt, pid int) error {
	return f.inject(filepath.Join(c.dir, "faults"), attempt, pid)
}

func (c ownProgram) step(st *web.Status) uint64 { return st.Step }
