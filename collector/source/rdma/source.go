package rdma

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/lockstep-ccl/lockstep/collector"
	"github.com/lockstep-ccl/lockstep/collector/source"
	"github.com/lockstep-ccl/lockstep/collector/source/bounded"
)

// Options of a Source. Zero fields take the defaults.
type Options struct {
	Sys    fs.FS         // what is mounted at /sys
	Period time.Duration // between two probes; 5 s
	// Bound is how long a probe may take before sysfs is called unresponsive;
	// 10 s. A probe of ten ports takes some 50 ms.
	Bound time.Duration
	Log   *slog.Logger // nil: slog.Default()
}

const (
	// lookAgain is the time between two attempts to find a device.
	lookAgain = int64(time.Minute)
	// minGap is the least time between two probes, when announcements ask for one.
	minGap = int64(time.Second)
	// maxQueued bounds the announcements that wait for the agent's next pass.
	maxQueued = 256
	// calmDown is the wait after listening failed.
	calmDown = 2 * time.Second
)

// Source watches the ports. Update is for one goroutine; Close ends it.
type Source struct {
	o      Options
	events announcements
	probes *bounded.Prober[outcome]
	links  chan seenLink
	lost   atomic.Uint64
	names  atomic.Pointer[map[string]bool] // of the interfaces of ports

	listening bool
	lostSeen  uint64
	err       error // of the last probe
	node      collector.NICs
	known     map[portID]*history
}

// outcome is what a probe came back with.
type outcome struct {
	ports []seenPort
	ns    int64
	err   error
}

type portID struct {
	device string
	port   int
}

// history is what is kept of a port from probe to probe.
type history struct {
	last       collector.NICPort // as of the last probe that had it
	wasUp      bool
	downs      uint64 // probes that found it down after one that found it up
	downAt     int64
	flapAt     int64
	readErrors uint64
	links      []*linkHistory // as seenPort.links: the port's own interface first
	former     int64          // flaps of the port less those of the first of links, which has not always been it
}

type linkHistory struct {
	seenLink
	flaps uint64
}

// New returns a source that reads nothing before its first Update. Close it.
func New(o Options) *Source { return newSource(o, &rtnetlink{}) }

func newSource(o Options, events announcements) *Source {
	if o.Sys == nil {
		o.Sys = os.DirFS("/sys")
	}
	o.Period = cmp.Or(o.Period, 5*time.Second)
	o.Bound = cmp.Or(o.Bound, 10*time.Second)
	o.Log = cmp.Or(o.Log, slog.Default())
	s := &Source{o: o, events: events, links: make(chan seenLink, maxQueued), known: map[portID]*history{}}
	s.probes = bounded.New(bounded.Options{Period: o.Period, Bound: o.Bound, What: "a NIC's driver", Log: o.Log}, s.probe)
	s.at(classRDMA)
	s.names.Store(&map[string]bool{})
	return s
}

// Update implements source.Source: it takes in what has come, starts the next
// probe when it is due, and never waits. The error is source.ErrNoData on a node without RDMA devices.
func (s *Source) Update(v *source.View) error {
	s.takeLinks(v.Now)
	if o, began, ok := s.probes.Take(); ok {
		s.take(o, began, v.Now)
	}
	s.probes.Ask(v.Now)
	err := s.err
	if s.node.UnresponsiveAt, s.node.Hangs = s.probes.Hangs(v.Now); s.node.UnresponsiveAt != 0 {
		err = fmt.Errorf("a NIC's driver does not answer: reading %s has not returned", s.node.Hangs)
	}
	s.publish(v)
	return err
}

// Close ends the source's goroutines; a read that does not return is left
// behind. Update is not to be called after it.
func (s *Source) Close() error {
	s.probes.Stop()
	if s.listening {
		s.events.close()
	}
	return s.probes.Close(func() {})
}

// probe runs in a goroutine of its own, one at a time.
func (s *Source) probe() outcome {
	began := time.Now()
	p := probe{sys: s.o.Sys, at: s.at}
	err := p.run()
	return outcome{p.ports, max(time.Since(began).Nanoseconds(), 1), err}
}

// at notes the file that comes next: it may be the one that hangs.
func (s *Source) at(file string) {
	s.probes.At("/sys/" + file)
}

// take takes in a probe's outcome.
func (s *Source) take(o outcome, began, now int64) {
	if o.err != nil && (len(s.known) == 0 || !errors.Is(o.err, source.ErrNoData)) {
		if s.err == nil || s.err.Error() != o.err.Error() {
			if errors.Is(o.err, source.ErrNoData) {
				s.o.Log.Info("no NICs are watched", "why", o.err)
			} // others are the agent's to tell of
		}
		s.err = o.err
		if len(s.known) == 0 {
			s.probes.Next(now + lookAgain)
		}
		return
	}
	s.err = nil // ports that were there and are no more are gone, which is news and no lack of it
	if !s.listening {
		s.o.Log.Info("NICs are watched", "ports", len(o.ports))
		s.listen()
	}
	s.node.ProbedAt, s.node.ProbeNs = began, o.ns
	for _, h := range s.known {
		h.last.Gone = true
	}
	for i := range o.ports {
		s.takePort(&o.ports[i], began)
	}
	watched := map[string]bool{}
	for _, h := range s.known {
		if h.last.Gone {
			if h.wasUp {
				s.o.Log.Error("a NIC is gone", "device", h.last.Device, "port", h.last.Port)
			}
			h.observe(false, began)
		}
		for _, l := range h.links {
			watched[l.name] = true
		}
	}
	s.names.Store(&watched)
}

func (s *Source) takePort(p *seenPort, began int64) {
	id := portID{p.Device, p.Port}
	h := s.known[id]
	if h == nil {
		if len(s.known) >= maxPorts {
			return
		}
		h = &history{wasUp: p.Up}
		s.known[id] = h
	}
	if p.Up != h.wasUp && p.State != "" {
		s.o.Log.Warn("a NIC's port has changed", "device", p.Device, "port", p.Port, "state", p.State, "physical_state", p.PhysicalState)
	}
	h.last = p.NICPort
	h.readErrors += uint64(p.failed)
	if p.State != "" { // unknown is not down
		h.observe(p.Up, began)
	}
	if len(p.links) == 0 {
		return // an interface that is gone, or in trouble, is told of as it was
	}
	flaps, links := h.flaps(), make([]*linkHistory, len(p.links))
	for i, l := range p.links {
		at := slices.IndexFunc(h.links, func(o *linkHistory) bool { return o.name == l.name })
		if at < 0 {
			links[i] = &linkHistory{seenLink: l}
		} else {
			links[i] = h.links[at]
		}
		if i == 0 && at != 0 { // another one: the port's count goes on
			h.former = int64(flaps) - int64(links[0].flaps)
		}
		if links[i].observe(l) {
			h.flapAt = began
		}
	}
	h.links = links
}

// flaps is how often the port went down: by its own interface, not a bond's
// members, or by what probes saw.
func (h *history) flaps() uint64 {
	if len(h.links) == 0 {
		return h.downs
	}
	return max(h.downs, uint64(max(h.former+int64(h.links[0].flaps), 0)))
}

// observe notes a port's state.
func (h *history) observe(up bool, at int64) {
	switch {
	case up:
		h.downAt = 0
	case h.wasUp:
		h.downs++
		h.downAt, h.flapAt = at, at
	}
	h.wasUp = up
}

// observe notes an interface's state, and reports whether it has lost its
// carrier since. The kernel's count tells, where there is one: it knows of what no probe and
// no announcement has seen, and of what both have.
func (l *linkHistory) observe(n seenLink) (flapped bool) {
	before := l.flaps
	switch {
	case n.index != l.index: // made anew: its count begins again
	case n.downs == nil || l.downs == nil:
		if l.up && !n.up {
			l.flaps++
		}
	case *n.downs < *l.downs:
		return false // older than what is known: probes and announcements overtake each other
	default:
		l.flaps += *n.downs - *l.downs
	}
	l.seenLink = n
	return l.flaps > before
}

// listen begins to hear of changes of links. Without it what the kernel counts is seen at the next probe.
func (s *Source) listen() {
	s.listening = true
	if err := s.events.open(); err != nil {
		s.o.Log.Warn("changes of links are seen by probes only", "err", err)
		return
	}
	s.probes.Go(s.watch)
}

// watch hears of changes of links.
func (s *Source) watch() {
	for s.probes.Context().Err() == nil {
		links, err := s.events.receive()
		switch {
		case s.probes.Context().Err() != nil:
			return
		case errors.Is(err, unix.ENOBUFS):
			s.lost.Add(1)
			continue
		case err != nil:
			s.lost.Add(1)
			s.o.Log.Warn("listening for changes of links fails", "err", err)
			select {
			case <-s.probes.Context().Done():
			case <-time.After(calmDown):
			}
			continue
		}
		names := *s.names.Load()
		for _, l := range links {
			if !names[l.name] {
				continue
			}
			select {
			case s.links <- l:
			default:
				s.lost.Add(1)
			}
		}
	}
}

// takeLinks takes in what has been announced since the last pass, and asks for a probe after it.
func (s *Source) takeLinks(now int64) {
	hurry := s.lost.Load() != s.lostSeen
	s.lostSeen = s.lost.Load()
	for range maxQueued {
		select {
		case l := <-s.links:
			hurry = s.announced(l, now) || hurry
			continue
		default:
		}
		break
	}
	if hurry && s.listening && s.err == nil {
		s.probes.Soon(s.node.ProbedAt + minGap)
	}
}

// announced notes a change of a link, and reports whether it is one.
func (s *Source) announced(l seenLink, now int64) bool {
	changed := false
	for _, h := range s.known {
		for _, o := range h.links {
			if o.name != l.name {
				continue
			}
			wasUp := o.up
			flapped := o.observe(l)
			if flapped {
				h.flapAt = now
				s.o.Log.Warn("a NIC's link has lost its carrier", "device", h.last.Device, "port", h.last.Port, "netdev", l.name, "up", l.up)
			}
			changed = changed || flapped || wasUp != o.up
		}
	}
	return changed
}

// publish hands a copy to the view: what was published before stays as it is.
func (s *Source) publish(v *source.View) {
	v.NICs = nil
	if len(s.known) == 0 && s.node.UnresponsiveAt == 0 {
		return
	}
	out := s.node
	out.EventsLost = s.lost.Load()
	out.Ports = make([]collector.NICPort, 0, len(s.known))
	for _, h := range s.known {
		out.Ports = append(out.Ports, h.port())
	}
	slices.SortFunc(out.Ports, func(a, b collector.NICPort) int {
		return cmp.Or(compareNames(a.Device, b.Device), cmp.Compare(a.Port, b.Port))
	})
	v.NICs = &out
}

// port is what is known of a port.
func (h *history) port() collector.NICPort {
	p := h.last
	p.DownAt, p.FlapAt, p.ReadErrors = h.downAt, h.flapAt, h.readErrors
	p.Flaps = h.flaps()
	for _, l := range h.links {
		p.Links = append(p.Links, collector.NICLink{NetDev: l.name, Up: l.up && !p.Gone, Flaps: l.flaps})
	}
	if p.Gone {
		p = collector.NICPort{
			Device: p.Device, Port: p.Port, Layer: p.Layer, BusID: p.BusID, Model: p.Model, Firmware: p.Firmware, Gone: true,
			DownAt: p.DownAt, Flaps: p.Flaps, FlapAt: p.FlapAt, Links: p.Links, ReadErrors: p.ReadErrors,
		}
	}
	return p
}

// compareNames puts mlx5_2 before mlx5_10.
func compareNames(a, b string) int {
	x, y := strings.TrimRight(a, "0123456789"), strings.TrimRight(b, "0123456789")
	if x == y {
		return cmp.Or(cmp.Compare(len(a), len(b)), strings.Compare(a, b))
	}
	return strings.Compare(a, b)
}
