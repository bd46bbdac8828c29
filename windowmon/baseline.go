package windowmon

import (
	"math"
	"math/bits"
)

// How a window is judged.
//
// Its time went to one of four things (Window.Network and the others), and the
// largest is what the window was about. Where that is not the network, the
// window is slow, for that cause, when the network would normally have done
// the same work in less than SlowRatio of the time.
//
// Where it is the network, each work request counts for itself. It has a
// latency, from post to completion, and a service time, since the completion
// before it or since its post. Under a deep queue a good network shows a normal
// service time, and the latency only says how deep the queue was; under a
// shallow one it shows a normal latency, and the service time only says how
// empty the network was. So a request is slow when both exceed the normal by
// 1/SlowRatio, and a window is when slow requests took most of its time. How
// deep the queue is and what sizes are in it is the sender's choice, and can
// make neither slow.
//
// What is normal is learnt from the connection's own requests, for each power
// of two of their size: medians, followed by small steps of fixed relative
// size, so that no request weighs more than another whatever its value; slow ones
// weigh less, so that a fault does not become the normal before it is found.
//
// Nothing is learnt while the state of the connection is a slow network, so a
// fault does not become the normal by lasting. But not for ever: after Adopt
// the network is taken to have changed for good, and learning goes on.
//
// The state follows the windows' causes with hysteresis: a cause is entered
// when its share of the last few windows (exponential mean over about 8) exceeds
// one half, and left when it falls below one quarter. On an oversubscribed host,
// where a peer is often not scheduled, jitter is normal, and many windows spend
// most of their time in one late request. So for the network either of two
// things must be unusual for this connection. How often: the share of slow
// windows is counted from the share that is usual. Or how far: most of the last
// windows are much slower than nine of ten of its windows are. That extent is a
// quantile, learnt like the medians in steps of fixed relative size, so that
// neither the worst windows nor a fault that begins move it far; and when a fault is
// found, what its beginning has taught is forgotten. Windows in which mostly this
// host's progress thread did not run say nothing about the network, for or against.
// What is slow now and then, and never in most of the last windows, is rare's (rare.go).
// Outside of that state a window is told as slow for the network only when it is that
// much slower, too: the others are this connection's usual jitter, and told as normal.
type judge struct {
	slow       float64 // 1/SlowRatio
	warmup     uint32
	resolution int64
	adopt      int64

	classes [numClasses]class
	work    work // of the window that is open

	state    Cause
	since    int64
	learning bool
	share    [numCauses]float64
	usual    usual
	before   usual   // what was usual before the last windows, when these are not
	far      float64 // share of the last windows that exceed usual.extent by much
	seen     uint32  // windows that usual has learnt from
	rare     rare
}

// usual is what is known of a connection's windows.
type usual struct {
	share  float64 // of those with a slow network
	extent float64 // slowness that most do not exceed
}

// class is the normal of one size of work requests, in ns.
type class struct {
	service, latency float64
	seen             uint32
}

// work sums the service times of a window's requests, in ns.
type work struct {
	total  float64
	slow   float64 // of requests that are slow
	excess float64 // of these, each times by how many times it exceeds its normal
	normal float64 // what they normally are
	known  bool    // the normal of some request is known

	unfinished bool // one that is slow has not completed
}

// slowness is how many times slower than normal the network was, at the mean of
// the window's time; 1 where no request was slow.
func (w *work) slowness() float64 { return 1 + w.excess/max(w.total, 1) }

const (
	numClasses = 28       // powers of two, up to 128 MiB and more
	step       = 0.001    // of a median
	doubted    = 1. / 8   // what a slow request counts for it
	memory     = 1. / 8   // of the state
	patience   = 1. / 256 // of the usual share of slow windows
	prior      = 32       // windows that the first guess of it weighs
	enter      = 0.5
	leave      = 0.25
	sigmas     = 5       // of the usual share's fluctuation, by which it must be exceeded
	certain    = 0.95    // a share that always suffices
	most       = 0.9     // of the windows do not exceed the usual extent
	stride     = 1. / 64 // of extent, relative
	much       = 1.5     // times that extent
)

func newJudge(c Config) judge {
	return judge{
		slow: 1 / c.SlowRatio, warmup: uint32(c.Warmup),
		resolution: int64(c.Resolution), adopt: int64(c.Adopt),
		learning: true,
		usual:    usual{0.3, 4}, // cautious until it is learnt
		before:   usual{0.3, 4},
		rare:     rare{on: c.Rare},
	}
}

// request judges completed requests of one size, and learns from them.
func (j *judge) request(size uint64, service, latency float64, count uint32) {
	c, slow := j.weigh(size, service, latency)
	if !j.learning {
		return
	}
	if c.seen == 0 {
		c.service, c.latency = service, latency
	}
	gain := step
	if slow {
		gain *= doubted
	}
	if c.seen < 256 { // large at first, so that a normal is there after the warm-up
		gain = max(gain, 0.5/float64(1+c.seen))
	}
	c.seen += min(count, math.MaxUint32-c.seen)
	c.service = toward(c.service, service, gain)
	c.latency = toward(c.latency, latency, gain)
}

// overdue judges a request that has not completed, by the time that it has
// taken so far.
func (j *judge) overdue(size uint64, service, latency float64) {
	_, j.work.unfinished = j.weigh(size, service, latency)
}

// waited counts a request that spent most of its time waiting for the receiver
// or for this host's CPU, and so says nothing about the network.
func (j *judge) waited(size uint64) {
	if c := j.class(size); c.seen >= j.warmup {
		j.work.known = true
		j.work.normal += c.service
	}
}

func (j *judge) class(size uint64) *class {
	return &j.classes[min(bits.Len64(size>>1), numClasses-1)]
}

func (j *judge) weigh(size uint64, service, latency float64) (c *class, slow bool) {
	c = j.class(size)
	j.work.total += service
	if c.seen < j.warmup {
		j.work.normal += service
		return c, false
	}
	j.work.known = true
	j.work.normal += c.service
	slow = j.exceeds(c, service, latency)
	if slow {
		j.work.slow += service
		j.work.excess += service * (min(service/c.service, latency/c.latency) - 1)
	}
	return c, slow
}

// exceeds reports whether a request's times are both too long for its class.
func (j *judge) exceeds(c *class, service, latency float64) bool {
	return service > j.slow*c.service && latency > j.slow*c.latency
}

// late reports whether a request that has not completed is slow already. It judges and learns nothing.
func (j *judge) late(size uint64, service, latency float64) bool {
	c := j.class(size)
	return c.seen >= j.warmup && j.exceeds(c, service, latency)
}

// toward moves a median by a relative step.
func toward(median, x, gain float64) float64 {
	if x > median {
		return min(median*(1+gain)+1e-3, x)
	}
	return max(median*(1-gain), x)
}

// window sets a closing window's Cause, State and Anomaly.
func (j *judge) window(w *Window) {
	dominant, most := Network, w.Network
	if w.Starved > most {
		dominant, most = SenderStarved, w.Starved
	}
	if w.Blocked > most {
		dominant, most = ReceiverNotReady, w.Blocked
	}
	if w.Stalled > most {
		dominant = CPUStarved
	}
	span := w.Last - w.First
	switch {
	case span < j.resolution:
	case dominant == Network:
		if 2*j.work.slow > j.work.total {
			w.Cause = Network
		}
	case j.work.known || w.WRs == 0:
		if float64(span) > j.slow*j.work.normal {
			w.Cause = dominant
		}
	}
	j.follow(w)
	j.work = work{}
}

// follow moves the state after a window.
func (j *judge) follow(w *Window) {
	told := w.Cause != CPUStarved // of the network
	for c := range j.share {
		if told || Cause(c) != Network {
			j.share[c] -= memory * j.share[c]
		}
	}
	j.share[w.Cause] += memory
	hit, slowness := 0., j.work.slowness()
	if w.Cause == Network {
		hit = 1
	}
	if told {
		j.far -= memory * j.far
		if hit > 0 && slowness > much*j.usual.extent {
			j.far += memory
		}
	}
	// How slow a window was is not known yet when nothing has completed, or what is slow has not.
	if told && j.learning && j.work.known && w.WRs > 0 && !j.work.unfinished {
		j.seen++
		u := &j.usual
		u.share += max(patience, 1/float64(prior+j.seen)) * (hit - u.share)
		gain := max(stride, 4/float64(4+j.seen))
		if slowness > u.extent {
			u.extent *= 1 + gain*most
		} else {
			u.extent = max(1, u.extent*(1-gain*(1-most)))
		}
	}
	if told {
		cost := 0.
		if hit > 0 && slowness > much*j.before.extent {
			cost = float64(w.Network) * (1 - 1/slowness)
		}
		j.rare.window(cost, float64(w.Network))
	}
	if !j.slowNow() && !j.rare.suspected() {
		j.before = j.usual
	}

	next := None
	if j.keeps() {
		next = j.state
	}
	for c := None + 1; c < numCauses; c++ {
		if j.share[c] > enter && (c != Network || unusual(j.share[c], j.usual.share) || unusual(j.far, 1-most)) {
			next = c
		}
	}
	if j.rare.is && next != CPUStarved {
		next = Network
	}
	if next != j.state {
		j.state, j.since = next, w.Last
		if next == Network {
			j.usual = j.before
		}
	}
	j.learning = j.state != Network || w.Last-j.since >= j.adopt
	if j.rare.is && j.learning {
		j.rare.adopt()
	}
	w.State = j.state
	w.Anomaly = w.Cause == Network && j.state == Network
	if hit > 0 && j.state != Network && slowness <= much*j.usual.extent {
		w.Cause = None // as slow as some windows of this connection usually are
	}
}

// keeps reports whether the state's cause is still frequent enough.
func (j *judge) keeps() bool {
	if j.state == Network {
		return j.slowNow()
	}
	return j.share[j.state] >= leave
}

// slowNow reports whether more of the last windows than usual have a slow network, or
// are slower than usual.
func (j *judge) slowNow() bool {
	u := j.usual.share
	return j.share[Network] >= u+leave*(1-u) || j.far >= leave
}

// unusual reports whether a share of the last windows is more than the usual one
// and its fluctuation explain.
func unusual(share, u float64) bool {
	noise := sigmas * math.Sqrt(u*(1-u)*memory/(2-memory))
	return share > min(u+max(enter*(1-u), noise), certain)
}
