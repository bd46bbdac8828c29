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

// share is a run of communicators, from lo to below hi.
type share struct{ lo, hi int }

const mostShares = 4

// shares cuts communicators into as many runs of about as many members, whatever the machine has: where floats are
// summed up in each, their sums are the same everywhere. Of few members there is one share. of is scratch.
func shares(of []share, ev *Evidence) []share {
	all := 0
	for ci := range ev.Comms {
		all += len(ev.Comms[ci].Members)
	}
	of = of[:0]
	lo, n := 0, 0
	for ci := range ev.Comms {
		n += len(ev.Comms[ci].Members)
		if all >= manyItems && n*mostShares >= all*(len(of)+1) && len(of) < mostShares-1 {
			of, lo = append(of, share{lo, ci + 1}), ci+1
		}
	}
	return append(of, share{lo, len(ev.Comms)})
}

// inShares calls f for each share, several at once where there are several.
func inShares(of []share, f func(k, lo, hi int)) {
	items := 0
	if len(of) > 1 {
		items = manyItems
	}
	inParts(len(of), items, func(from, to int) {
		for k := from; k < to; k++ {
			f(k, of[k].lo, of[k].hi)
		}
	})
}
