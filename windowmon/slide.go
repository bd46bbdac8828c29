package windowmon

// slide is an estimate over the last requests, renewed at each completion: over at least
// Config.WRs of them and Config.Resolution, and a quarter more at most, of those that completed
// one after the other. So a slow network is seen wherever it begins, not only where a window does.
//
// Sums only grow, so the estimate is what they have grown by since a mark; there are a few,
// and a completion costs the same however many requests there are.
type slide struct {
	closed  mark // sums of all windows that have closed
	marks   [ring]mark
	at      uint32 // the youngest mark
	bad     bool
	paneWRs uint64 // from one mark to the next
	paneNs  int64  // likewise
	minWRs  uint64 // of an estimate

	event  Window
	events uint64
	told   int64   // when the request was posted that the last event is of, where that had not completed
	lost   float64 // service time of slow requests in it
}

const (
	worse = 2 // times what was lost by when the estimate turned bad
	panes = 4 // between the youngest mark and the oldest in use
	ring  = 8 // marks: more than panes, a power of two
)

// mark is the monitor's sums at a completion.
type mark struct {
	at          int64
	wrs, bytes  uint64
	latency     int64
	slow, total float64 // service times
}

func newSlide(c Config) slide {
	return slide{paneWRs: uint64((c.WRs + panes - 1) / panes), paneNs: int64(c.Resolution) / panes, minWRs: uint64(c.WRs)}
}

// slid renews the estimate after a completion.
func (m *Monitor) slid(now int64) {
	s := &m.slide
	oldest, youngest := &s.marks[(s.at-panes)%ring], &s.marks[s.at%ring]
	if s.bad || s.closed.slow+m.verdict.work.slow > oldest.slow {
		x := m.sums(now)
		m.estimate(&x, oldest, false)
	}
	if s.closed.wrs+uint64(m.win.WRs)-youngest.wrs >= s.paneWRs && now-youngest.at >= s.paneNs {
		s.at++
		s.marks[s.at%ring] = m.sums(now)
	}
}

// Overdue tells that somebody has looked just now, and that what is outstanding has not
// completed. When the request that is next has taken so long that the last ones, it among them,
// have lost most of their time, the estimate turns bad before it completes: so a network is seen
// to be slow after some of its normal times, however slow it has become. An estimate that is bad already, as
// where requests are late now and then, is an event again when this one alone has lost a multiple of what made it so.
// Progress must be called as well.
func (m *Monitor) Overdue(now int64) {
	s := &m.slide
	if m.out == 0 || m.blocked || now-m.at > m.cfg.gap {
		return
	}
	now = max(now, m.at)
	e, network := m.queue.oldest(), m.network+now-m.at
	service, latency := network-max(m.doneAt, e.network), network-e.network
	if 2*latency < now-e.at || !m.verdict.late(m.queue.oldestSize(), float64(service), float64(latency)) {
		return
	}
	if s.bad && (e.at == s.told || float64(service) < worse*s.lost) {
		return
	}
	from, x := &s.marks[(s.at-panes)%ring], m.sums(now)
	x.wrs += uint64(e.count) // as if it completed now, but for its bytes
	x.latency += (now - e.at) * int64(e.count)
	x.slow += float64(service)
	x.total += float64(service)
	events := s.events
	if m.estimate(&x, from, true); s.events != events {
		s.told = e.at
	}
}

// sums are the monitor's now.
func (m *Monitor) sums(now int64) mark {
	c, w := &m.slide.closed, &m.verdict.work
	return mark{now, c.wrs + uint64(m.win.WRs), m.completed, c.latency + m.latency, c.slow + w.slow, c.total + w.total}
}

// estimate finds out whether the last requests spent most of their time in slow ones, and
// keeps the window in which that turned true, or, where again is set, is still true.
func (m *Monitor) estimate(x, from *mark, again bool) {
	s, slow, wrs := &m.slide, x.slow-from.slow, x.wrs-from.wrs
	bad := 2*slow > x.total-from.total && wrs >= s.minWRs
	if bad && (!s.bad || again) {
		s.event = Window{
			First: from.at, Last: x.at, Bytes: x.bytes - from.bytes, WRs: uint32(wrs), Backlog: m.win.Backlog,
			Latency: (x.latency - from.latency) / int64(wrs), Network: x.at - from.at, Cause: Network,
		}
		s.events++
		s.told, s.lost = 0, slow
	}
	s.bad = bad
}

// restart has the estimate begin anew: nothing is outstanding.
func (m *Monitor) restart(at int64) {
	s := &m.slide
	x := s.closed
	x.at, x.bytes = at, m.completed
	s.bad = false
	for i := range s.marks {
		s.marks[i] = x
	}
}

// folded takes over the sums of a window that has ended.
func (m *Monitor) folded() {
	c, w := &m.slide.closed, &m.verdict.work
	c.wrs += uint64(m.win.WRs)
	c.latency += m.latency
	c.slow += w.slow
	c.total += w.total
}

// Events is how often the estimate over the last requests has turned bad: to more time lost
// to slow requests than to others. It does so within a window, too, or across two.
func (m *Monitor) Events() uint64 { return m.slide.events }

// Event is the estimate that turned bad last, as a window that overlaps others. Its State is the
// connection's by now, which changes when most windows are bad, not with one event.
func (m *Monitor) Event() Window {
	w := m.slide.event
	w.State = m.verdict.state
	return w
}
