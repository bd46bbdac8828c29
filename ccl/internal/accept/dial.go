package accept

import (
	"context"
	"net"
	"time"
)

const (
	// A further attempt to connect begins after firstAgain, and then after twice the time, up to
	// lastAgain. The kernel sends a SYN that a full queue has dropped again after 1 s, 3 s and 7 s.
	firstAgain = 50 * time.Millisecond
	lastAgain  = 250 * time.Millisecond
	// abreast is how many attempts are under way at most. The first one stays: on a slow path it is
	// what arrives.
	abreast = 4
)

// Dial connects like d, which must leave the local port to the kernel, to who may be flooded. It does
// not wait for the kernel to repeat a SYN that a full queue has dropped, but makes further
// attempts beside it. The first that ends is the result.
func Dial(ctx context.Context, d *net.Dialer, addr string) (net.Conn, error) {
	type result struct {
		conn net.Conn
		err  error
		of   int
	}
	var under []context.CancelFunc // nil: given up
	ended := 0
	results := make(chan result)
	begin := func() {
		if i := len(under) - abreast + 1; i > 0 {
			under[i]()
			under[i] = nil
		}
		one, cancel := context.WithCancel(ctx)
		of := len(under)
		under = append(under, cancel)
		go func() {
			conn, err := d.DialContext(one, "tcp", addr)
			results <- result{conn, err, of}
		}()
	}
	defer func() {
		for _, cancel := range under {
			if cancel != nil {
				cancel()
			}
		}
		for ; ended < len(under); ended++ {
			if r := <-results; r.conn != nil {
				r.conn.Close()
			}
		}
	}()
	begin()
	pause := firstAgain
	again := time.NewTimer(pause)
	defer again.Stop()
	for {
		select {
		case r := <-results:
			if ended++; r.err == nil || under[r.of] != nil {
				return r.conn, r.err
			}
		case <-again.C:
			begin()
			pause = min(2*pause, lastAgain)
			again.Reset(pause)
		}
	}
}
