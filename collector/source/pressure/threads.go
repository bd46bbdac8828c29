package pressure

import (
	"bytes"
	"cmp"
	"os"
	"path/filepath"
	"slices"
	"strconv"
)

const (
	// maxThreads bounds the threads that a survey counts, busiest those looked at between surveys.
	maxThreads = 512
	busiest    = 4
)

// threads is what is known of a process's threads.
type threads struct {
	used map[int]uint64 // run time and run delay of each, as of the last survey
	busy []thread
}

// thread is one that is looked at.
type thread struct {
	tid     int
	samples [window + 1]sample // ring
	n       int
	queued  bool   // at the last look it was runnable, and had not run since the look before
	delayed uint64 // run delay that the kernel has not added up yet: it does so when the thread runs
}

// sample is a thread's times in ns: run, and waited for a CPU.
type sample struct {
	at         int64
	run, delay uint64
	slices     uint64
}

// survey finds the threads that have used, or wanted, most CPU since the last survey.
func (t *threads) survey(dir string) {
	d, err := os.Open(filepath.Join(dir, "task"))
	if err != nil {
		return // it has just ended
	}
	names, _ := d.Readdirnames(maxThreads)
	d.Close()
	type one struct {
		tid   int
		spent uint64
	}
	all := make([]one, 0, len(names))
	used := make(map[int]uint64, len(names))
	for _, name := range names {
		tid, err := strconv.Atoi(name)
		if err != nil {
			continue
		}
		s, err := schedstat(dir, tid)
		if err != nil {
			continue
		}
		total := s.run + s.delay
		used[tid] = total
		all = append(all, one{tid, total - min(t.used[tid], total)})
	}
	t.used = used
	slices.SortFunc(all, func(a, b one) int { return cmp.Or(cmp.Compare(b.spent, a.spent), cmp.Compare(a.tid, b.tid)) })
	busy := make([]thread, 0, busiest)
	for _, o := range all[:min(len(all), busiest)] {
		if i := slices.IndexFunc(t.busy, func(b thread) bool { return b.tid == o.tid }); i >= 0 {
			busy = append(busy, t.busy[i])
		} else {
			busy = append(busy, thread{tid: o.tid})
		}
	}
	t.busy = busy
}

// starved looks at the busy threads, and returns the share of the window in which the busiest
// of them waited for a CPU.
func (t *threads) starved(dir string, now int64) (share float32) {
	most := uint64(0)
	for i := range t.busy {
		b := &t.busy[i]
		s, err := schedstat(dir, b.tid)
		if err != nil {
			b.n = 0 // it has ended
			continue
		}
		if s.at = now; !b.add(s, func() bool { return runnable(dir, b.tid) }) {
			continue
		}
		oldest, newest := b.samples[max(0, b.n-1-window)%(window+1)], b.samples[(b.n-1)%(window+1)]
		run, delay := newest.run-oldest.run, newest.delay-oldest.delay
		elapsed := uint64(newest.at - oldest.at)
		if run+delay > most {
			most = run + delay
			share = float32(float64(min(delay, elapsed)) / float64(elapsed))
		}
	}
	return share
}

// add takes in a sample, and reports whether there are two to compare. Of a thread that has been
// queued ever since the last look the kernel adds up nothing: that time counts all the same.
func (b *thread) add(s sample, runnable func() bool) bool {
	last := sample{}
	if b.n > 0 {
		last = b.samples[(b.n-1)%(window+1)]
		last.delay -= b.delayed
		if s.at <= last.at || s.run < last.run || s.delay < last.delay {
			*b = thread{tid: b.tid} // another thread's, or the clock's, or the kernel's mistake
		}
	}
	if b.n == 0 || s.run != last.run || s.delay != last.delay || s.slices != last.slices {
		b.queued, b.delayed = false, 0
	} else {
		queued := runnable()
		if queued && b.queued {
			b.delayed += uint64(s.at - last.at)
		}
		b.queued = queued
	}
	s.delay += b.delayed
	if b.n > 0 {
		s.delay = max(s.delay, b.samples[(b.n-1)%(window+1)].delay)
	}
	b.samples[b.n%(window+1)] = s
	b.n++
	return b.n > 1
}

// schedstat reads a thread's three numbers.
func schedstat(dir string, tid int) (s sample, err error) {
	text, err := read(filepath.Join(dir, "task", strconv.Itoa(tid), "schedstat"))
	if err != nil {
		return s, err
	}
	f := bytes.Fields(text)
	if len(f) < 3 {
		return s, errNone
	}
	for i, dst := range []*uint64{&s.run, &s.delay, &s.slices} {
		if *dst, err = strconv.ParseUint(string(f[i]), 10, 63); err != nil {
			return s, err
		}
	}
	return s, nil
}

// runnable reports whether a thread runs or waits for a CPU.
func runnable(dir string, tid int) bool {
	text, err := read(filepath.Join(dir, "task", strconv.Itoa(tid), "stat"))
	if err != nil {
		return false
	}
	_, rest, ok := bytes.Cut(text[max(0, bytes.LastIndexByte(text, ')')):], []byte(") "))
	return ok && len(rest) > 0 && rest[0] == 'R'
}
