package windowmon_test

import (
	"testing"

	"github.com/lockstep-ccl/lockstep/windowmon"
	"pgregory.net/rapid"
)

// oracle is the definition of a window, computed the slow way: every
// nanosecond has a label, every request and completion is kept, and a window's
// numbers are counted afresh when it closes.
type oracle struct {
	cfg     windowmon.Config
	labels  []byte // by time: Network, Starved, Blocked, sTalled
	call    int64  // time of the last call
	blocked bool
	wrs     []request
	done    []completion // of bytes
	total   int          // bytes completed
	busy    int64        // last time at which anything was outstanding or blocked
	open    bool
	first   int64
	backlog []sample
	windows []windowmon.Window
}

type request struct {
	bytes, count   int // of it and those that joined it
	posted, ended  int64
	complete       bool
	endsInWindowNo int
}

type completion struct {
	bytes, window int
}

type sample struct {
	out, window int
}

func (o *oracle) out() (n int) {
	for _, r := range o.wrs {
		if !r.complete {
			n += r.count
		}
	}
	return n
}

func (o *oracle) pass(now int64) {
	for t := o.call; t < now; t++ {
		switch {
		case o.blocked:
			o.labels[t] = 'B'
		case o.out() == 0:
			o.labels[t] = 'S'
		case now-o.call > int64(o.cfg.Gap):
			o.labels[t] = 'T'
		default:
			o.labels[t] = 'N'
		}
	}
	if o.out() > 0 || o.blocked {
		o.busy = now
	}
	o.call = now
	if !o.open {
		o.open, o.first = true, now
		o.sample()
	}
}

func (o *oracle) sample() {
	o.backlog = append(o.backlog, sample{o.out(), len(o.windows)})
}

func (o *oracle) close(at int64) {
	w := windowmon.Window{First: o.first, Last: at}
	no := len(o.windows)
	for _, c := range o.done {
		if c.window == no {
			w.Bytes += uint64(c.bytes)
		}
	}
	for _, r := range o.wrs {
		if r.complete && r.endsInWindowNo == no {
			w.WRs += uint32(r.count)
			w.Latency += (r.ended - r.posted) * int64(r.count)
		}
	}
	if w.WRs > 0 {
		w.Latency /= int64(w.WRs)
	}
	for _, s := range o.backlog {
		if s.window == no {
			w.Backlog = max(w.Backlog, uint32(s.out))
		}
	}
	for _, l := range o.labels[o.first:at] {
		switch l {
		case 'N':
			w.Network++
		case 'S':
			w.Starved++
		case 'B':
			w.Blocked++
		case 'T':
			w.Stalled++
		}
	}
	o.windows = append(o.windows, w)
	o.open = false
	if o.out() > 0 || o.blocked {
		o.open, o.first = true, at
		o.sample()
	}
}

func (o *oracle) due(now int64) {
	if !o.open {
		return
	}
	if o.out() == 0 && !o.blocked {
		if now-o.busy >= int64(o.cfg.Idle) {
			o.close(o.busy)
		}
	} else if now-o.first >= int64(o.cfg.MaxAge) && now-o.call <= int64(o.cfg.Gap) {
		o.pass(now)
		o.close(now)
	}
}

func (o *oracle) post(now int64, bytes int) {
	o.due(now)
	o.pass(now)
	o.wrs = append(o.wrs, request{bytes: bytes, count: 1, posted: now})
	o.busy = now
	o.sample()
}

func (o *oracle) join(bytes int) bool {
	if o.out() == 0 {
		return false
	}
	last := &o.wrs[len(o.wrs)-1]
	last.bytes += bytes
	last.count++
	o.sample()
	return true
}

func (o *oracle) complete(now int64, bytes int) {
	if o.out() == 0 {
		return
	}
	o.pass(now)
	posted := 0
	for _, r := range o.wrs {
		posted += r.bytes
	}
	bytes = min(bytes, posted-o.total)
	o.total += bytes
	o.done = append(o.done, completion{bytes, len(o.windows)})
	inWindow, end := 0, 0
	for i := range o.wrs {
		r := &o.wrs[i]
		end += r.bytes
		if !r.complete && end <= o.total {
			r.complete, r.ended, r.endsInWindowNo = true, now, len(o.windows)
		}
		if r.complete && r.endsInWindowNo == len(o.windows) {
			inWindow += r.count
		}
	}
	age := now - o.first
	if inWindow >= o.cfg.WRs && age >= int64(o.cfg.Resolution) || age >= int64(o.cfg.MaxAge) {
		o.close(now)
	}
}

func (o *oracle) setBlocked(now int64, blocked bool) {
	if o.blocked != blocked {
		o.pass(now)
		o.blocked = blocked
	}
}

func (o *oracle) progress(now int64) {
	o.due(now)
	if o.open && (o.out() > 0 || o.blocked) {
		o.pass(now)
	}
}

func TestAgainstOracle(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		cfg := windowmon.Config{WRs: rapid.IntRange(1, 5).Draw(t, "WRs"), Resolution: 10, MaxAge: 200, Idle: 30, Gap: 50}
		var m windowmon.Monitor
		m.Init(cfg)
		o := &oracle{cfg: cfg, labels: make([]byte, 1<<14)}
		now := int64(0)
		for range rapid.IntRange(1, 150).Draw(t, "events") {
			now += rapid.OneOf(rapid.Int64Range(0, 20), rapid.Int64Range(0, 100)).Draw(t, "wait")
			switch rapid.SampledFrom([]string{"post", "post", "join", "complete", "complete", "progress", "block", "unblock"}).Draw(t, "event") {
			case "post":
				n := rapid.IntRange(0, 10).Draw(t, "bytes")
				m.Post(now, n)
				o.post(now, n)
			case "join":
				n := rapid.IntRange(0, 10).Draw(t, "bytes")
				if m.Join(n) != o.join(n) {
					t.Fatalf("at %d: something to join or not", now)
				}
			case "complete":
				n := rapid.IntRange(0, 30).Draw(t, "bytes")
				ripe, before := m.Ripe(uint64(n)), o.out()
				m.Complete(now, n)
				o.complete(now, n)
				if n > 0 && ripe != (o.out() < before) {
					t.Fatalf("at %d: %d bytes complete something or not, %d outstanding of %d", now, n, o.out(), before)
				}
			case "progress":
				m.Progress(now)
				m.Overdue(now) // no window's business
				o.progress(now)
			case "block":
				m.Blocked(now)
				o.setBlocked(now, true)
			case "unblock":
				m.Unblocked(now)
				o.setBlocked(now, false)
			}
			if got, want := m.Stats().Windows, uint64(len(o.windows)); got != want {
				t.Fatalf("at %d: %d windows closed, want %d", now, got, want)
			}
			if len(o.windows) == 0 {
				continue
			}
			got := m.Last()
			got.Cause, got.State, got.Anomaly = 0, 0, false
			if want := o.windows[len(o.windows)-1]; got != want {
				t.Fatalf("at %d:\ngot  %+v\nwant %+v", now, got, want)
			}
		}
	})
}

// FuzzOrder calls in any order with any numbers, time running backwards too:
// sums stay consistent, and causes and states stay in range.
func FuzzOrder(f *testing.F) {
	f.Add([]byte("\x00\x10\x10\x01\x20\x10"))
	f.Add([]byte("\x03\x01\x00\x00\xff\xff\x02\xff\x00\x04\x01\x00"))
	f.Fuzz(func(t *testing.T, b []byte) {
		var m windowmon.Monitor
		m.Init(windowmon.Config{WRs: 2, Resolution: 1, MaxAge: 1000, Idle: 100, Gap: 300, Warmup: 1, Quiet: 1})
		now := int64(0)
		var last windowmon.Window
		var windows uint64
		for ; len(b) >= 3; b = b[3:] {
			now += int64(int8(b[1])) * 8
			n := int(int8(b[2]))
			told := false
			switch b[0] % 7 {
			case 0:
				told = m.Post(now, n)
			case 1:
				told = m.Complete(now, n)
			case 2:
				told = m.Progress(now)
			case 3:
				m.Blocked(now)
			case 4:
				m.Unblocked(now)
			case 5:
				m.Join(n)
			case 6:
				m.Overdue(now)
			}
			if e := m.Event(); m.Events() > 0 && (e.First > e.Last || e.WRs < 2 || e.Latency < 0 || e.Cause != windowmon.Network || e.State > windowmon.CPUStarved) {
				t.Fatalf("event %+v", e)
			}
			w := m.Last()
			if n := m.Stats().Windows; told && n == windows {
				t.Fatal("told of no new window")
			} else {
				windows = n
			}
			if w.First > w.Last || w.First < last.Last && w != last {
				t.Fatalf("windows overlap: %+v after %+v", w, last)
			}
			if w.Network+w.Starved+w.Blocked+w.Stalled != w.Last-w.First || w.Network < 0 || w.Starved < 0 || w.Blocked < 0 || w.Stalled < 0 {
				t.Fatalf("times do not add up: %+v", w)
			}
			if w.Cause > windowmon.CPUStarved || w.State > windowmon.CPUStarved || w.Latency < 0 {
				t.Fatalf("out of range: %+v", w)
			}
			last = w
		}
	})
}
