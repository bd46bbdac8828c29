package ccl

import (
	"fmt"

	"github.com/lockstep-ccl/lockstep/ccl/internal/cuda"
)

// Device is where a rank's buffers may lie besides host memory.
type Device int

// CPU is no device: host memory only.
const CPU Device = 0

// GPU is the CUDA device of an ordinal, as CUDA_VISIBLE_DEVICES numbers them.
func GPU(ordinal int) Device { return Device(ordinal + 1) }

// Ordinal is the CUDA ordinal of a GPU, -1 for CPU.
func (d Device) Ordinal() int { return int(d) - 1 }

func (d Device) String() string {
	if d == CPU {
		return "cpu"
	}
	return fmt.Sprintf("cuda:%d", d.Ordinal())
}

// Devices is how many GPUs this process sees. The error says why there are none.
func Devices() (int, error) {
	drv, err := cuda.Open()
	if err != nil {
		return 0, err
	}
	return drv.Count(), nil
}
