//go:build lockstep_tune

package gpu

import (
	"fmt"
	"os"
	"strconv"
	"strings"
)

// For measurements only: LOCKSTEP_GPU_TUNE="slots=8,turn=32768" changes how the
// kernels that have such parameters cut their work. It must be the same on all ranks.
func init() {
	for _, f := range strings.FieldsFunc(os.Getenv("LOCKSTEP_GPU_TUNE"), func(r rune) bool { return r == ',' || r == ' ' }) {
		name, value, _ := strings.Cut(f, "=")
		v, err := strconv.ParseUint(value, 0, 32)
		if err != nil {
			panic(fmt.Sprintf("LOCKSTEP_GPU_TUNE: %q: %v", f, err))
		}
		for _, t := range []*pushing{&pushes, &bulkPushes} {
			switch name {
			case "turn":
				t.turn = v
			case "least":
				t.least = v
			case "turns":
				t.turns = v
			case "slots":
				t.slots = v
			case "stages":
				t.stages = uint32(v)
			case "chunk":
				alltoallChunk = uint32(v)
			default:
				panic(fmt.Sprintf("LOCKSTEP_GPU_TUNE: no parameter %q", name))
			}
		}
	}
}
