package preflight

import (
	"context"
	"fmt"
	"math"
	"slices"
	"time"

	"github.com/lockstep-ccl/lockstep/ccl"
)

// measured is what one rank of a pair found out.
type measured struct {
	Latency    float64 `json:"lat,omitempty"` // seconds, half of the median round trip
	LatencyP99 float64 `json:"p99,omitempty"`
	Bandwidth  float64 `json:"bw,omitempty"` // bytes per second, from this rank to its partner
	// Sent counts the messages that this rank has begun to send, Got those that it
	// has received: what one has sent and the other not got says which way is blocked.
	Sent int `json:"sent"`
	Got  int `json:"got"`
	// Err is why the measurement ended early, "" when it did not; Quiet for how long, in seconds,
	// nothing had come or gone by then.
	Err   string  `json:"err,omitempty"`
	Quiet float64 `json:"quiet,omitempty"`
}

const (
	firstBurst = 64 << 10 // small enough to be measured on an edge that hardly moves
	bursts     = 3        // of which the median counts
	maxBurst   = 512      // messages; GPUs take 1024 receives ahead of their sends
	warmups    = 10
)

// pair is one rank's side of a measurement.
type pair struct {
	comm *ccl.Comm
	bufs *buffers
	host *ccl.Stream // headers and acknowledgements
	data *ccl.Stream // what is measured
	peer int
	trip int           // round trips
	time time.Duration // of each direction's bandwidth
	m    *measured
	last time.Time // something came, or was sent
}

// measure fills p.m, and leaves in it how far it got when ctx ends first.
func (p *pair) measure(ctx context.Context) error {
	p.last = time.Now()
	err := p.both(ctx)
	if err != nil {
		p.m.Quiet = time.Since(p.last).Seconds()
	}
	return err
}

func (p *pair) both(ctx context.Context) error {
	p.peer = 1 - p.comm.Rank()
	if err := p.latency(ctx); err != nil {
		return fmt.Errorf("small messages: %w", err)
	}
	// Each direction by itself.
	for sender := range 2 {
		if sender == p.comm.Rank() {
			bandwidth, err := p.send(ctx)
			if err != nil {
				return fmt.Errorf("sending: %w", err)
			}
			p.m.Bandwidth = bandwidth
		} else if err := p.receive(ctx); err != nil {
			return fmt.Errorf("receiving: %w", err)
		}
	}
	return nil
}

func (p *pair) latency(ctx context.Context) error {
	word := p.bufs.word
	send := func() error { return p.push(p.data, word) }
	recv := func() error { return p.comm.Recv(p.data, word, p.peer) }
	first, second := send, recv
	if p.comm.Rank() == 1 {
		first, second = recv, send
	}
	trip := func(n int, between bool) error {
		for range n {
			if err := first(); err != nil {
				return err
			}
			if between {
				if err := p.data.Wait(ctx); err != nil {
					return err
				}
				p.got(p.comm.Rank())
			}
			if err := second(); err != nil {
				return err
			}
		}
		if err := p.data.Wait(ctx); err != nil {
			return err
		}
		if between {
			p.got(n * (1 - p.comm.Rank()))
		} else {
			p.got(n)
		}
		return nil
	}
	for range warmups {
		if err := trip(1, true); err != nil {
			return err
		}
	}
	// On a GPU several round trips are launched as one sample: one alone would
	// measure launches.
	times := make([]float64, 0, p.trip)
	for range p.trip {
		begun := time.Now()
		if err := trip(p.bufs.batch, p.bufs.batch == 1); err != nil {
			return err
		}
		times = append(times, time.Since(begun).Seconds()/float64(2*p.bufs.batch))
	}
	slices.Sort(times)
	p.m.Latency = times[(len(times)-1)/2]
	p.m.LatencyP99 = times[min(int(math.Ceil(0.99*float64(len(times)))), len(times))-1]
	return nil
}

// push counts a message before it is sent: one that never arrives was sent, too.
func (p *pair) push(s *ccl.Stream, b ccl.Buffer) error {
	p.m.Sent++
	p.last = time.Now()
	return p.comm.Send(s, b, p.peer)
}

// pull receives and counts.
func (p *pair) pull(ctx context.Context, b ccl.Buffer) error {
	if err := p.comm.Recv(p.host, b, p.peer); err != nil {
		return err
	}
	if err := p.host.Wait(ctx); err != nil {
		return err
	}
	p.got(1)
	return nil
}

// got counts messages that have come.
func (p *pair) got(n int) {
	p.m.Got += n
	p.last = time.Now()
}

// send drives the bursts of its direction: larger and larger messages until one
// takes its time, so that a slow edge is measured as well as a fast one.
func (p *pair) send(ctx context.Context) (float64, error) {
	whole := p.bufs.bulk.Count()
	size := min(firstBurst, whole)
	// Where small messages take long, as on a busy machine, one that takes little longer says nothing of bandwidth.
	enough := min(max(p.time/8, time.Duration(8*p.m.Latency*float64(time.Second))), p.time)
	var took time.Duration
	for {
		var err error
		if took, err = p.burst(ctx, size, 1); err != nil {
			return 0, err
		}
		if took > enough && took < 10*p.time { // the first of a size may have had to set up its way
			again, err := p.burst(ctx, size, 1)
			if err != nil {
				return 0, err
			}
			took = min(took, again)
		}
		if size == whole || took > enough {
			break
		}
		size = min(4*size, whole)
	}
	rates := []float64{float64(size) / took.Seconds()}
	if took < p.time {
		n := min(max(int(p.time/(bursts*max(took, 1))), 1), maxBurst)
		rates = rates[:0]
		for range bursts {
			took, err := p.burst(ctx, size, n)
			if err != nil {
				return 0, err
			}
			rates = append(rates, float64(size)*float64(n)/took.Seconds())
		}
		slices.Sort(rates)
	}
	_, err := p.burst(ctx, 0, 0)
	return rates[len(rates)/2], err
}

// burst sends n messages of size bytes and waits until the receiver has them; 0
// tells it that there are no more.
func (p *pair) burst(ctx context.Context, size, n int) (time.Duration, error) {
	header := []int64{int64(size), int64(n)}
	if err := p.push(p.host, ccl.Of(header)); err != nil {
		return 0, err
	}
	if err := p.host.Wait(ctx); err != nil {
		return 0, err
	}
	if n == 0 {
		return 0, nil
	}
	begun := time.Now()
	for range n {
		if err := p.push(p.data, p.bufs.bulk.Slice(0, size)); err != nil {
			return 0, err
		}
	}
	if err := p.data.Wait(ctx); err != nil {
		return 0, err
	}
	if err := p.pull(ctx, ccl.Of(header[:1])); err != nil {
		return 0, err
	}
	return max(time.Since(begun), time.Nanosecond), nil
}

func (p *pair) receive(ctx context.Context) error {
	for {
		header := make([]int64, 2)
		if err := p.pull(ctx, ccl.Of(header)); err != nil {
			return err
		}
		size, n := int(header[0]), int(header[1])
		if n == 0 {
			return nil
		}
		if size < 1 || size > p.bufs.bulk.Count() || n < 0 || n > maxBurst {
			return fmt.Errorf("partner announces %d messages of %d bytes", n, size)
		}
		for range n {
			if err := p.comm.Recv(p.data, p.bufs.bulk.Slice(0, size), p.peer); err != nil {
				return err
			}
		}
		if err := p.data.Wait(ctx); err != nil {
			return err
		}
		p.got(n)
		if err := p.push(p.host, ccl.Of(header[:1])); err != nil {
			return err
		}
		if err := p.host.Wait(ctx); err != nil {
			return err
		}
	}
}
