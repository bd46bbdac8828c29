package diagnosis

import (
	"runtime"
	"sync"
	"sync/atomic"
)

const (
	// manyItems is from how much work on a pass is divided among the machine's cores: below that, starting
	// goroutines costs more than they save.
	manyItems = 1 << 16
	// mostWorkers leave the master's other work some cores.
	mostWorkers = 4
)

// inParts calls f for parts of 0 to n-1, several at once where the items behind them are many. f may change what
// belongs to its part only. The last come first: the largest communicators are told after the small ones.
func inParts(n, items int, f func(lo, hi int)) {
	workers := min(runtime.GOMAXPROCS(0), mostWorkers)
	if items < manyItems || workers < 2 {
		f(0, n)
		return
	}
	size := max(1, min(n/(16*workers), 1<<12))
	var left atomic.Int64
	left.Store(int64(n))
	work := func() {
		for {
			hi := int(left.Add(int64(-size))) + size
			if hi <= 0 {
				return
			}
			f(max(0, hi-size), hi)
		}
	}
	var wg sync.WaitGroup
	for range workers - 1 {
		wg.Go(work)
	}
	work()
	wg.Wait()
}
