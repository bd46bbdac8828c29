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
// size, so that no request weighs more than another whatever its value.
//
// Nothing is learnt while the state of the connection is a slow network, so a
// fault does not become the normal by lasting. But not for ever: after Adopt
// the network is taken to have changed for good, and learning goes on.
//
// The state follows the windows' causes with hysteresis: a cause is entered
// when its share of the last few windows (exponential mean over about 8) exceeds
// one half, and left when it falls below one quarter. For the network this is
// counted from the share of slow windows that is usual here: on an
// oversubscribed host, where a peer is often not scheduled, jitter is normal.
type judge struct {
	slow, recover float64 // 1/SlowRatio, 1/RecoverRatio
	warmup        uint32
	resolution    int64
	adopt         int64

	classes [numClasses]class
	work    work // of the window that is open

	state    Cause
	since    int64
	learning bool
	share    [numCauses]float64
	usual    float64 // share of windows with a slow network
	seen     uint32  // windows that usual has learnt from
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
	normal float64 // what they normally are
	known  bool    // the normal of some request is known
}

const (
	numClasses = 28       // powers of two, up to 128 MiB and more
	step       = 0.003    // of a median
	memory     = 1. / 8   // of the state
	patience   = 1. / 256 // of the usual share of slow windows
	enter      = 0.5
	leave      = 0.25
	sigmas     = 5    // of the usual share's fluctuation, by which it must be exceeded
	certain    = 0.95 // a share that always suffices
)

func newJudge(c Config) judge {
	return judge{
		slow: 1 / c.SlowRatio, recover: 1 / c.RecoverRatio, warmup: uint32(c.Warmup),
		resolution: int64(c.Resolution), adopt: int64(c.Adopt),
		learning: true,
		usual:    0.3, // cautious until it is learnt
	}
}

// request judges completed requests of one size, and learns from them.
func (j *judge) request(size uint64, service, latency float64, count uint32) {
	c := j.weigh(size, service, latency)
	if !j.learning {
		return
	}
	if c.seen == 0 {
		c.service, c.latency = service, latency
	}
	gain := step
	if c.seen < 256 { // large at first, so that a normal is there after the warm-up
		gain = max(gain, 0.5/float64(1+c.seen))
	}
	c.seen += min(count, math.MaxUint32-c.seen)
	c.service = toward(c.service, service, gain)
	c.latency = toward(c.latency, latency, gain)
}

// overdue judges a request that has not completed, by the time that it has
// taken so far.
func (j *judge) overdue(size uint64, service, latency float64) { j.weigh(size, service, latency) }

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

func (j *judge) weigh(size uint64, service, latency float64) *class {
	c := j.class(size)
	j.work.total += service
	if c.seen < j.warmup {
		j.work.normal += service
		return c
	}
	j.work.known = true
	j.work.normal += c.service
	limit := j.slow
	if j.state == Network {
		limit = j.recover
	}
	if service > limit*c.service && latency > limit*c.latency {
		j.work.slow += service
	}
	return c
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
	for c := range j.share {
		j.share[c] -= memory * j.share[c]
	}
	j.share[w.Cause] += memory
	if j.learning && j.work.known {
		hit := 0.
		if w.Cause == Network {
			hit = 1
		}
		j.seen++
		j.usual += max(patience, 1/float64(4+j.seen)) * (hit - j.usual)
	}

	next := None
	if j.share[j.state] >= j.leaves(j.state) {
		next = j.state
	}
	for c := None + 1; c < numCauses; c++ {
		if j.share[c] > enter && (c != Network || j.unusual()) {
			next = c
		}
	}
	if next != j.state {
		j.state, j.since = next, w.Last
	}
	j.learning = j.state != Network || w.Last-j.since >= j.adopt
	w.State = j.state
	w.Anomaly = w.Cause == Network && j.state == Network
}

// leaves is the share below which a cause ceases to be the state.
func (j *judge) leaves(c Cause) float64 {
	if c == Network {
		return j.usual + leave*(1-j.usual)
	}
	return leave
}

// unusual reports whether more windows have a slow network than the usual
// share and its fluctuation explain.
func (j *judge) unusual() bool {
	u := j.usual
	noise := sigmas * math.Sqrt(u*(1-u)*memory/(2-memory))
	return j.share[Network] > min(u+max(enter*(1-u), noise), certain)
}
