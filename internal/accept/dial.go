package accept

import (
	"context"
	"net"
	"time"
)

const (
	// The second attempt to connect begins after retryMin. The pause doubles from one attempt to the
	// next, up to retryMax. The kernel itself repeats a dropped SYN only after 1 s, 3 s and 7 s.
	retryMin = 50 * time.Millisecond
	retryMax = 250 * time.Millisecond
	// maxAttempts is how many attempts are in flight at most. A new one then replaces the oldest one.
	maxAttempts = 4
)

// Dial connects like d to a listener that may be flooded. It does not wait for the kernel to repeat a
// SYN that a full backlog has dropped, but makes further attempts in parallel. It returns the result
// of the attempt that ends first. d must let the kernel choose the local port.
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
		if i := len(under) - maxAttempts + 1; i > 0 {
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
	pause := retryMin
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
			pause = min(2*pause, retryMax)
			again.Reset(pause)
		}
	}
}

// DialContext is Dial for gRPC's WithContextDialer.
func DialContext(ctx context.Context, addr string) (net.Conn, error) {
	return Dial(ctx, &net.Dialer{}, addr)
}
