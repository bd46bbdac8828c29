package perf

import (
	"context"
	"errors"
	"fmt"
	"os"
	"time"

	"github.com/prometheus/procfs"

	"github.com/lockstep-ccl/lockstep/ccl"
)

// gpuArea is device memory of a rank, registered unless --staged.
type gpuArea struct {
	mem    *ccl.Memory
	window *ccl.Window
}

func (b *bench) free(ctx context.Context) error {
	var errs []error
	for i := range b.areas {
		errs = append(errs, b.areas[i].free(ctx))
	}
	return errors.Join(errs...)
}

func (a *gpuArea) free(ctx context.Context) error {
	var errs []error
	if a.window != nil {
		errs = append(errs, a.window.Deregister(ctx))
	}
	if a.mem != nil {
		errs = append(errs, a.mem.Free())
	}
	*a = gpuArea{}
	return errors.Join(errs...)
}

// buffer is n elements of one of the two buffers.
func (b *bench) buffer(ctx context.Context, i int, dt ccl.DType, n int) (ccl.Buffer, error) {
	if b.device == ccl.CPU {
		return ccl.Bytes(dt, b.mem(i, n*dt.Size())), nil
	}
	a := &b.areas[i]
	first := b.cmd.Offset
	if need := max((first+n)*dt.Size(), 1); a.mem == nil || a.mem.Size() < need {
		// All ranks come here at the same sizes. The largest is asked for at once:
		// memory that grows would be registered again for every size.
		need = max(need, int(b.cmd.End)+first*dt.Size())
		if err := a.free(ctx); err != nil {
			return ccl.Buffer{}, err
		}
		var err error
		if a.mem, err = b.comm.MemAlloc(need); err != nil {
			return ccl.Buffer{}, err
		}
		if !b.cmd.Staged {
			if a.window, err = b.comm.WindowRegister(ctx, a.mem); err != nil {
				return ccl.Buffer{}, err
			}
		}
	}
	return a.mem.Buffer(dt, first+n).Slice(first, first+n), nil
}

// checkMost bounds what of device memory is checked: a larger size says N/A.
const checkMost = 256 << 20

// checks is how often a size is checked.
func (b *bench) checks(size int) int {
	if b.device != ccl.CPU && size > checkMost {
		return 0
	}
	return b.cmd.Check
}

// checkGPU is check of device memory.
func (b *bench) checkGPU(ctx context.Context, x expect, coll collective, dt ccl.DType, send, recv ccl.Buffer, call func() error) (int, error) {
	in, out := b.mem(0, send.Count()*dt.Size()), b.mem(1, recv.Count()*dt.Size())
	for i := range out {
		out[i] = 0xa5
	}
	x.fill(dt, in)
	if err := errors.Join(b.comm.CopyIn(recv, out), b.comm.CopyIn(send, in)); err != nil {
		return 0, err
	}
	// Nobody begins before all have their data.
	if err := b.do(ctx, b.comm.Barrier(ccl.NewStream())); err != nil {
		return 0, err
	}
	if err := call(); err != nil {
		return 0, err
	}
	if err := b.comm.CopyOut(out, recv); err != nil {
		return 0, err
	}
	return b.total(ctx, x.wrong(dt, out, coll.want))
}

const (
	// A GPU measurement takes about so long, after which the host's part of it
	// (the first launch and the last look) weighs nothing.
	gpuTime    = 30 * time.Millisecond
	gpuItersTo = 20_000
)

// timeGPU is the time of one of many operations launched back to back, in µs: the
// slowest rank's (nccl-tests averages over the ranks, unless told -a 3).
func (b *bench) timeGPU(ctx context.Context, enqueue func() error) (float64, error) {
	launch, per := enqueue, 1
	if k := b.cmd.Graph; k > 0 {
		g, err := b.stream.Capture(b.device, func() error {
			for range k {
				if err := enqueue(); err != nil {
					return err
				}
			}
			return nil
		})
		if err != nil {
			return 0, err
		}
		defer g.Close()
		launch, per = func() error { return g.Launch(b.stream) }, k
		if err := b.do(ctx, launch()); err != nil {
			return 0, err
		}
	}
	host := ccl.NewStream()
	run := func(n int) (float64, error) {
		// A barrier on the GPUs, so that all begin together.
		if err := b.comm.Barrier(b.stream); err != nil {
			return 0, err
		}
		if err := b.stream.Wait(ctx); err != nil {
			return 0, err
		}
		begun := time.Now()
		for range n {
			if err := launch(); err != nil {
				return 0, err
			}
		}
		if err := b.stream.Wait(ctx); err != nil {
			return 0, err
		}
		t := []float64{float64(time.Since(begun).Nanoseconds()) / 1e3 / float64(n*per)}
		if err := b.comm.AllReduce(host, ccl.Of(t), ccl.Of(t), ccl.Max); err != nil {
			return 0, err
		}
		return t[0], host.Wait(ctx)
	}
	n := b.cmd.Iters / per
	if b.cmd.Iters == 0 {
		t, err := run(max(20/per, 2))
		if err != nil {
			return 0, err
		}
		n = int(float64(gpuTime.Microseconds()) / (t * float64(per)))
	}
	n = min(max(n, 3), max(gpuItersTo/per, 1))
	times := make([]float64, 0, 3)
	for range cap(times) {
		t, err := run(n)
		if err != nil {
			return 0, fmt.Errorf("%d launches: %w", n, err)
		}
		times = append(times, t)
	}
	return median(times), nil
}

// age is how many seconds ago the process began, to 10 ms; 0 where /proc does not tell.
func age() float64 {
	up, err := os.ReadFile("/proc/uptime")
	if err != nil {
		return 0
	}
	self, err := procfs.Self()
	if err != nil {
		return 0
	}
	stat, err := self.Stat()
	if err != nil {
		return 0
	}
	const ticks = 100 // USER_HZ, on every platform
	var now float64
	if _, err := fmt.Sscan(string(up), &now); err != nil {
		return 0
	}
	return now - float64(stat.Starttime)/ticks
}
