package nccl_test

import (
	"testing"

	"github.com/lockstep-ccl/lockstep/record"
)

// gpuOffset is GPU_OFFSET of the driver.
const gpuOffset = 1700000000123456789

// After sends to oneself NCCL's host and kernel count the work of a channel apart. Everything ends all the same, once nothing
// is called any more; what has times has its own; and what runs is not told to be over.
func TestSelfSends(t *testing.T) {
	const took = 2000 // ns, of each kernel
	for _, v := range versions {
		for _, c := range []struct {
			scene, env string
			timed      uint64 // at least; where several channels are out, nothing is
		}{{"selves", "", 50}, {"selves", "WIDE=1", 0}, {"selfish", "", 20}} {
			if v == "4" {
				c.timed = 0 // it does not say how many channels are out
				if c.scene == "selfish" {
					continue // so that the last one is taken for over
				}
			}
			dir := t.TempDir()
			var env []string
			if c.env != "" {
				env = append(env, c.env)
			}
			lines := play(t, plain, dir, env, v, c.scene)
			r := recorders(t, dir)[0]
			for _, want := range parse(t, lines) {
				check(t, r, want)
				s := r.comm(t, want.id)
				if c.scene == "selfish" && s.Finished != want.numbered-1 {
					t.Errorf("v%s %s: finished %d of %d, of which the last one hangs", v, c.scene, s.Finished, want.numbered)
				}
				timed := uint64(0)
				for seq, o := range r.ops[s.Index] {
					if len(o.end) == 0 || o.end[0].Flags&record.FlagUnseen != 0 || o.end[0].Coll != record.AllReduce {
						continue
					}
					timed++
					if d := o.end[0].Stamp - o.start[0].Stamp; d < took-10 || d > took+10 {
						t.Errorf("v%s %s %s: operation %d took %d ns, not %d", v, c.scene, c.env, seq, d, took)
					}
					if o.start[0].Stamp-gpuOffset < o.enqueue[0].Mono {
						t.Errorf("v%s %s %s: operation %d began %d ns before it was called", v, c.scene, c.env, seq, o.enqueue[0].Mono-o.start[0].Stamp+gpuOffset)
					}
				}
				if timed < c.timed || c.env != "" && timed > 0 {
					t.Errorf("v%s %s %s: %d collectives have times", v, c.scene, c.env, timed)
				}
			}
		}
	}
}
