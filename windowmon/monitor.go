package windowmon

// Monitor is the monitor of one direction of one connection. Init it before
// use. Methods take the current time in CLOCK_MONOTONIC ns; a time before the
// last one counts as the last one. Those that return a bool report whether
// Last is now a window worth telling.
type Monitor struct {
	cfg  limits
	open bool  // a window is
	at   int64 // up to when its time is accounted for

	blocked   bool
	posted    uint64 // bytes, ever
	completed uint64 // bytes, ever
	out       uint32 // work requests outstanding
	queue     fifo

	// Time on the network, ever: a clock that stands still while the
	// connection waits for others. doneAt is its time at the last completion.
	network, doneAt int64

	win     Window
	latency int64 // summed over win.WRs

	last    Window
	toldAt  int64
	told    Cause // state last told
	stats   Stats
	verdict judge
	slide   slide
}

// limits are the parts of Config that each call needs, in ns.
type limits struct {
	wrs                           uint32
	resolution, maxAge, idle, gap int64
	period, quiet                 int64
}

// Stats are totals since Init.
type Stats struct {
	Windows   uint64
	Anomalies uint64
	ByCause   [numCauses]uint64 // windows by Cause
}

// Init makes m ready. A Monitor can be initialised anew; it then forgets everything.
func (m *Monitor) Init(cfg Config) {
	c := cfg.withDefaults()
	*m = Monitor{
		cfg: limits{
			wrs: uint32(c.WRs), resolution: int64(c.Resolution), maxAge: int64(c.MaxAge), idle: int64(c.Idle), gap: int64(c.Gap),
			period: int64(c.Period), quiet: int64(c.Quiet),
		},
		verdict: newJudge(c),
		slide:   newSlide(c),
	}
	m.toldAt = -m.cfg.period // the first window is told
}

// Drop tells that what is outstanding never completes: the queue pair is replaced
// by another over the same path. What is normal there stays known.
func (m *Monitor) Drop() {
	m.completed, m.out, m.queue = m.posted, 0, fifo{done: m.posted}
	m.open, m.blocked, m.doneAt = false, false, m.network
	m.folded()
	m.restart(m.at)
	m.verdict.work, m.win, m.latency = work{}, Window{}, 0
}

// Last returns the window that closed last; its Last is 0 when none has.
func (m *Monitor) Last() Window { return m.last }

// Windows is how many windows have closed: Stats().Windows.
func (m *Monitor) Windows() uint64 { return m.stats.Windows }

// Stats returns the totals.
func (m *Monitor) Stats() Stats { return m.stats }

// Outstanding is how many bytes are posted and not completed.
func (m *Monitor) Outstanding() uint64 { return m.posted - m.completed }

// State is why the connection is slow, past hysteresis; None when it is not.
func (m *Monitor) State() Cause { return m.verdict.state }

// Post tells that one work request of so many bytes was handed to the transport.
func (m *Monitor) Post(now int64, bytes int) bool {
	now = max(now, m.at)
	tell := m.expire(now)
	m.account(now)
	m.posted += uint64(max(bytes, 0))
	m.queue.push(m.posted, now, m.network)
	m.out++
	m.win.Backlog = max(m.win.Backlog, m.out)
	return tell
}

// Join tells of one more work request, posted so soon after the last one that
// its time is not worth a look at the clock: it counts as posted then, and the two
// complete together. Without work outstanding there is none to join: it then
// does nothing and reports false.
func (m *Monitor) Join(bytes int) bool {
	if m.out == 0 {
		return false
	}
	m.posted += uint64(max(bytes, 0))
	m.queue.join(m.posted)
	m.out++
	m.win.Backlog = max(m.win.Backlog, m.out)
	return true
}

// Ripe reports whether so many bytes more would complete a work request: until
// then a completion need not be told.
func (m *Monitor) Ripe(bytes uint64) bool {
	return m.out > 0 && m.completed+bytes >= m.queue.oldest().end
}

// Complete tells that so many more bytes have completed. Completions are in
// order; one may cover part of a work request or several of them.
func (m *Monitor) Complete(now int64, bytes int) bool {
	if m.out == 0 {
		return false
	}
	now = max(now, m.at)
	m.account(now)
	n := min(uint64(max(bytes, 0)), m.posted-m.completed)
	m.completed += n
	m.win.Bytes += n
	m.finish(now)
	age := now - m.win.First
	if m.win.WRs >= m.cfg.wrs && age >= m.cfg.resolution || age >= m.cfg.maxAge {
		return m.close(now)
	}
	return false
}

// finish takes the work requests that have completed off the queue.
func (m *Monitor) finish(now int64) {
	ripe, bytes := m.queue.ripe(m.completed)
	if ripe == 0 {
		return
	}
	// Those that complete together share the time since the completion before.
	perByte := float64(m.network-max(m.doneAt, m.queue.oldest().network)) / bytes
	for range ripe {
		e, size := m.queue.pop()
		m.out -= e.count
		m.win.WRs += e.count
		m.latency += (now - e.at) * int64(e.count)
		onNetwork := m.network - e.network
		if 2*onNetwork < now-e.at {
			m.verdict.waited(size)
			continue
		}
		m.verdict.request(size, perByte*float64(size), float64(onNetwork), e.count)
	}
	m.doneAt = m.network
	m.slid(now)
}

// Blocked tells that the sender has data to post, and that the receiver holds
// all that was sent and gives no credit for more.
func (m *Monitor) Blocked(now int64) {
	if !m.blocked {
		now = max(now, m.at)
		m.account(now)
		m.blocked = true
	}
}

// Unblocked ends what Blocked began.
func (m *Monitor) Unblocked(now int64) {
	if m.blocked {
		m.account(max(now, m.at))
		m.blocked = false
	}
}

// Progress tells that the progress thread ran, and found nothing or is about
// to tell what. It closes windows that are due, so it is also the way to hear
// of a connection on which nothing moves.
func (m *Monitor) Progress(now int64) bool {
	now = max(now, m.at)
	tell := m.expire(now)
	if m.open && (m.out > 0 || m.blocked) {
		m.account(now)
	}
	return tell
}

// expire closes a window that is too old or has been idle for too long.
func (m *Monitor) expire(now int64) bool {
	switch {
	case !m.open:
		return false
	case m.out == 0 && !m.blocked:
		// Idle time is accounted for by the post that ends it, so m.at is where it began.
		return now-m.at >= m.cfg.idle && m.close(m.at)
	case now-m.win.First < m.cfg.maxAge, now-m.at > m.cfg.gap:
		// A thread that was away finds completions next: they are this window's.
		return false
	}
	m.account(now)
	return m.close(now)
}

// account books the time since the last call, and opens a window when there is none.
func (m *Monitor) account(now int64) {
	d := now - m.at
	m.at = now
	switch {
	case !m.open:
		m.begin(now)
		if now-m.slide.marks[m.slide.at%ring].at > m.cfg.maxAge {
			m.restart(now)
		}
	case m.blocked:
		m.win.Blocked += d
	case m.out == 0:
		m.win.Starved += d
	case d > m.cfg.gap:
		m.win.Stalled += d
	default:
		m.win.Network += d
		m.network += d
	}
}

func (m *Monitor) begin(now int64) {
	m.open, m.at = true, now
	m.win = Window{First: now, Backlog: m.out}
	m.latency = 0
}

// close ends the window at a time up to which it is accounted for, and
// reports whether it is worth telling.
func (m *Monitor) close(at int64) bool {
	w := &m.win
	w.Last = at
	if w.WRs > 0 {
		w.Latency = m.latency / int64(w.WRs)
	}
	if m.out > 0 && (w.WRs == 0 || m.verdict.rare.on) {
		if e := m.queue.oldest(); 2*(m.network-e.network) >= at-e.at {
			m.verdict.overdue(m.queue.oldestSize(), float64(m.network-max(m.doneAt, e.network)), float64(m.network-e.network))
		}
	}
	m.folded()
	m.verdict.window(w)
	m.stats.Windows++
	m.stats.ByCause[w.Cause]++
	if w.Anomaly {
		m.stats.Anomalies++
	}
	m.last = *w

	m.open = false
	if m.out > 0 || m.blocked {
		m.begin(at)
	}
	since, news := at-m.toldAt, m.last.State != m.told || m.last.Cause == Network
	if since < m.cfg.quiet || !news && since < m.cfg.period {
		return false
	}
	m.toldAt, m.told = at, m.last.State
	return true
}

// fifo is the work requests outstanding, oldest first. When it is full, posts
// are merged into the youngest entry: counts stay exact, the latency of merged
// ones is taken from the first of them.
type fifo struct {
	entries    [queueSize]wr
	head, size uint32
	done       uint64 // end of the last completed entry
}

// wr is one or more work requests that end at the same cumulative byte.
type wr struct {
	end     uint64 // bytes posted ever, this one included
	at      int64
	network int64 // Monitor.network when it was posted
	count   uint32
}

const queueSize = 64

func (q *fifo) push(end uint64, now, network int64) {
	if q.size == queueSize {
		q.join(end)
		return
	}
	q.entries[(q.head+q.size)%queueSize] = wr{end: end, at: now, network: network, count: 1}
	q.size++
}

// join is for a queue that is not empty.
func (q *fifo) join(end uint64) {
	e := &q.entries[(q.head+q.size-1)%queueSize]
	e.end = end
	e.count++
}

// ripe returns how many entries have completed, and their bytes, at least 1.
func (q *fifo) ripe(completed uint64) (n uint32, bytes float64) {
	end := q.done
	for n < q.size {
		e := &q.entries[(q.head+n)%queueSize]
		if e.end > completed {
			break
		}
		end = e.end
		n++
	}
	return n, float64(max(end-q.done, 1))
}

// oldest, oldestSize and pop are for a queue that is not empty. A size is the
// mean bytes of an entry's work requests.
func (q *fifo) oldest() *wr { return &q.entries[q.head%queueSize] }

func (q *fifo) oldestSize() uint64 {
	e := q.oldest()
	if e.count == 1 {
		return e.end - q.done
	}
	return (e.end - q.done) / uint64(e.count)
}

func (q *fifo) pop() (e *wr, size uint64) {
	e, size = q.oldest(), q.oldestSize()
	q.done = e.end
	q.head++
	q.size--
	return e, size
}
