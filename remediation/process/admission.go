package process

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/time/rate"

	"github.com/lockstep-ccl/lockstep/internal/crowd"
)

// RefusalReason is why a coordinator turned somebody away.
type RefusalReason string

const (
	RefusedHandshake   RefusalReason = "handshake"   // no certificate, or one of another authority or trust domain; without certificates: a process of another user
	RefusedCertificate RefusalReason = "certificate" // it does not allow to speak for the node, or for this job
	RefusedName        RefusalReason = "name"        // another supervisor of that node is heard
	RefusedMessage     RefusalReason = "message"     // no supervisor of this version says that
	RefusedJob         RefusalReason = "another_job" // it is of another job, or was told of other ranks
	RefusedFull        RefusalReason = "full"        // there are as many hosts as there may be
	RefusedSilent      RefusalReason = "silent"      // nothing was said in time
)

// RefusalReasons are all of them.
func RefusalReasons() []RefusalReason {
	return []RefusalReason{RefusedHandshake, RefusedCertificate, RefusedName, RefusedMessage, RefusedJob, RefusedFull, RefusedSilent}
}

// admission is the listener for other hosts' supervisors. It bounds their connections, and counts
// those that it refuses. What it logs is bounded, too: a flood fills no disk.
type admission struct {
	*crowd.Listener
	most    int
	refused map[RefusalReason]*atomic.Uint64

	logHungUp, logRefused rate.Sometimes
}

// connections is how many a coordinator holds: a host has one, two while it comes anew, and as many
// hosts again may stand by; the others are for who has not said yet who it is.
func connections(hosts int) int { return min(4*hosts+spareConnections, 2*maxHosts) }

const spareConnections = 256

func newAdmission(h *HostOptions) (a *admission, err error) {
	a = &admission{most: connections(h.Hosts), refused: map[RefusalReason]*atomic.Uint64{}}
	a.logHungUp.Interval, a.logRefused.Interval = 10*time.Second, 10*time.Second
	for _, why := range RefusalReasons() {
		a.refused[why] = &atomic.Uint64{}
	}
	if a.Listener, err = crowd.Limit(h.Listener, a.most, false); err != nil {
		return nil, fmt.Errorf("run: coordinate: %w", err)
	}
	return a, nil
}

// refuse counts one who was turned away, and says so now and then.
func (c *coordinator) refuse(why RefusalReason, from net.Addr, err error) {
	n := c.admission.refused[why]
	if n == nil {
		return
	}
	sum := n.Add(1)
	c.admission.logRefused.Do(func() {
		c.h.Logger.Warn("refused a host, or somebody who is none", "job", c.h.Job, "from", from, "reason", string(why), "so_far", sum, "err", err)
	})
}

// accept takes connections of other hosts' supervisors.
func (c *coordinator) accept(ctx context.Context, all *sync.WaitGroup) {
	told := uint64(0)
	for {
		raw, err := c.admission.Accept()
		if n := c.admission.HungUp(); n > told {
			c.admission.logHungUp.Do(func() {
				c.h.Logger.Warn("hung up on connections: there were too many", "job", c.h.Job, "most", c.admission.most, "hung_up", n)
				told = n
			})
		}
		if err != nil {
			if ctx.Err() != nil || errors.Is(err, net.ErrClosed) {
				return
			}
			select { // out of descriptors, say
			case <-time.After(50 * time.Millisecond):
			case <-ctx.Done():
				return
			}
			continue
		}
		all.Go(func() {
			defer closeWhen(ctx, raw)()
			defer raw.Close()
			_ = raw.SetDeadline(time.Now().Add(firstReport))
			conn, check, err := c.h.Accept(raw)
			switch {
			case err == nil:
				c.attend(ctx, conn, check)
			case hungUp(err): // as probes of a port do
			default:
				c.refuse(RefusedHandshake, raw.RemoteAddr(), err)
			}
		})
	}
}

// hungUp reports whether the other end, or this one by its bound on connections, just ended a connection.
func hungUp(err error) bool {
	return errors.Is(err, io.EOF) || errors.Is(err, net.ErrClosed)
}

// pipe is this process's own host's connection.
func (c *coordinator) pipe(ctx context.Context) (net.Conn, error) {
	here, there := net.Pipe()
	own := c.h.Name
	go c.attend(ctx, there, func(node string) error {
		if node != own {
			return fmt.Errorf("this process is node %s", own)
		}
		return nil
	})
	return here, nil
}

// attend hears one host's supervisor until its connection ends.
func (c *coordinator) attend(ctx context.Context, conn net.Conn, check func(node string) error) {
	defer closeWhen(ctx, conn)()
	defer conn.Close()
	p := &peer{Conn: conn, say: make(chan struct{}, 1)}
	c.mu.Lock()
	c.conns++
	id := c.conns
	c.mu.Unlock()
	ended := make(chan struct{})
	wrote := make(chan struct{})
	go func() {
		defer close(wrote)
		c.orders(id, p, ended)
	}()
	if refused := (*refusal)(nil); errors.As(c.hear(id, p, check), &refused) {
		c.refuse(refused.why, conn.RemoteAddr(), refused.err)
		if !errors.Is(refused, errLater) {
			_ = conn.SetWriteDeadline(time.Now().Add(time.Second))
			_ = writeMessage(conn, Order{Protocol: protocol, Kind: orderRefuse, Why: refused.Error()})
		}
	}
	close(ended)
	conn.Close()
	<-wrote
	c.mu.Lock()
	delete(c.peers, id)
	c.g.gone(id)
	c.mu.Unlock()
}

// hear takes a host's reports.
func (c *coordinator) hear(id int, p *peer, check func(node string) error) error {
	for {
		patience := max(c.h.Lease, firstReport)
		if p.node == "" {
			patience = firstReport
		}
		_ = p.SetReadDeadline(time.Now().Add(patience))
		var r Report
		if err := readMessage(p, &r); err != nil {
			switch {
			case errors.Is(err, errMessage):
				c.refuse(RefusedMessage, p.RemoteAddr(), err) // and nobody is answered who speaks something else
			case p.node == "" && errors.Is(err, os.ErrDeadlineExceeded):
				c.refuse(RefusedSilent, p.RemoteAddr(), err)
			}
			return err
		}
		if err := c.take(id, p, check, r); err != nil {
			return err
		}
		nudge(p.say)
	}
}

// take takes one report.
func (c *coordinator) take(id int, p *peer, check func(node string) error, r Report) error {
	if err := r.check(); err != nil {
		return &refusal{err, RefusedMessage}
	}
	if r.Job != c.h.Job {
		return &refusal{fmt.Errorf("it is of job %.80q, this coordinator of %s", r.Job, c.h.Job), RefusedJob}
	}
	if p.node == "" {
		if err := check(r.Node); err != nil {
			return &refusal{err, RefusedCertificate}
		}
	} else if p.node != r.Node {
		return &refusal{fmt.Errorf("it was node %s, and calls itself %s now", p.node, r.Node), RefusedMessage}
	}
	var err error
	c.change(func(g *group, now time.Time) {
		if err = g.report(now, id, r); err != nil {
			return
		}
		if p.node == "" {
			c.joined++
		}
		p.node = r.Node
		c.peers[id] = p
		g.tick(now)
	})
	return err
}
