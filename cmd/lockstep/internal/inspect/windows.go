package inspect

import (
	"cmp"
	"fmt"
	"io"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/lockstep-ccl/lockstep/record"
)

// Connection is a connection with its identity and what its monitor recorded of it.
type Connection struct {
	Communicator string  `json:"communicator"`
	Peer         int32   `json:"peer"`
	World        *int32  `json:"peer_world_rank,omitempty"`
	Transport    string  `json:"transport"`
	Channel      uint16  `json:"channel"`
	Name         string  `json:"name"`                 // both ends' ports or addresses
	QueuePair    uint64  `json:"queue_pair,omitempty"` // this end's number
	PeerPair     uint32  `json:"peer_queue_pair,omitempty"`
	NIC          string  `json:"nic,omitempty"`  // device of this end's port
	Port         int     `json:"port,omitempty"` // its number on that
	Rail         int     `json:"rail,omitempty"` // of it among its node's, from 1
	Address      string  `json:"address,omitempty"`
	State        string  `json:"state"`
	Windows      uint64  `json:"windows"` // closed ever
	Slow         uint64  `json:"slow_windows"`
	Bandwidth    uint64  `json:"last_bandwidth_bytes_per_second"`
	Latency      seconds `json:"last_latency_seconds"`  // post to completion, mean of the last window
	RTT          seconds `json:"rtt_seconds,omitempty"` // between the two hosts
	Switches     uint64  `json:"switches"`
	Resent       uint64  `json:"resent_bytes"`
	Events       []Event `json:"events"` // oldest first
}

// Event is a window that was recorded, or a change of the connection's path.
type Event struct {
	At        time.Time `json:"at"` // last completion, or when the path changed
	Link      string    `json:"link,omitempty"`
	Window    seconds   `json:"window_seconds,omitempty"` // first post to last completion
	Bytes     uint64    `json:"bytes,omitempty"`
	Bandwidth float64   `json:"bandwidth_bytes_per_second,omitempty"`
	Requests  uint32    `json:"work_requests,omitempty"`
	Backlog   uint32    `json:"backlog,omitempty"`
	Latency   seconds   `json:"latency_seconds,omitempty"` // post to completion, mean
	Anomaly   bool      `json:"anomaly,omitempty"`
	Cause     string    `json:"cause,omitempty"`
	State     string    `json:"state,omitempty"`    // of the connection after it
	Overlaps  bool      `json:"overlaps,omitempty"` // an estimate over the last requests that turned bad within a window
	Gap       bool      `json:"gap,omitempty"`      // windows between the one before and this one are not kept
}

// connections lists a process's connections with what is in its ring of each.
func (p *process) connections(world func(comm uint64, rank int32) (int32, bool)) (all []Connection) {
	slices.SortStableFunc(p.events, func(a, b record.Record) int { return cmp.Compare(eventAt(&a), eventAt(&b)) })
	for i := range p.conns {
		k := &p.conns[i]
		c := Connection{
			Peer: k.Peer, Transport: k.Transport.String(), Channel: k.Channel, Name: k.Name, State: k.Link.String(),
			Windows: k.Windows, Slow: k.SlowWindows, Bandwidth: k.WindowBps, Latency: seconds(float64(max(k.LatencyNs, 0)) / 1e9),
			Switches: k.Switches, Resent: k.Resent, RTT: seconds(float64(k.RTT) / 1e9), Events: []Event{},
		}
		if k.Transport.QueuePair() {
			c.QueuePair, c.PeerPair = k.ID, k.PeerID
		}
		c.NIC, c.Port = k.NIC()
		c.Rail, c.Address = k.Rail, record.AddressText(k.Address)
		for j := range p.comms {
			if s := &p.comms[j]; s.Index == k.Comm {
				c.Communicator = s.Name
				if w, ok := world(s.ID, k.Peer); ok {
					c.World = &w
				}
			}
		}
		c.Events = p.eventsOf(k, p.history[i], c.Events)
		all = append(all, c)
	}
	return all
}

// eventsOf merges a connection's history with what the ring has of it: changes of its path, and
// windows from before the history.
func (p *process) eventsOf(k *record.ConnStatus, history []record.Window, to []Event) []Event {
	at := make([]int64, 0, len(history))
	inHistory := map[int64]bool{}
	for i := range history {
		w := &history[i]
		inHistory[w.Last] = true
		e := p.windowEvent(w.First, w.Last, w.Bytes, w.WRs, w.Backlog, w.Anomaly, w.Cause)
		e.Latency, e.State, e.Overlaps = seconds(float64(max(w.Latency, 0))/1e9), w.State.String(), w.Overlaps
		e.Gap = i > 0 && w.Number != history[i-1].Number+1
		to, at = append(to, e), append(at, w.Last)
	}
	for j := range p.events {
		r := &p.events[j]
		if r.Conn != k.Index || r.Comm != k.Comm || r.Kind == record.KindWindow && inHistory[r.Last] {
			continue
		}
		to, at = append(to, p.event(r)), append(at, eventAt(r))
	}
	order := make([]int, len(to))
	for i := range order {
		order[i] = i
	}
	slices.SortStableFunc(order, func(a, b int) int { return cmp.Compare(at[a], at[b]) })
	sorted := make([]Event, len(to))
	for i, from := range order {
		sorted[i] = to[from]
	}
	return sorted
}

func eventAt(r *record.Record) int64 {
	if r.Kind == record.KindWindow {
		return r.Last
	}
	return r.Mono
}

func (p *process) event(r *record.Record) Event {
	e := Event{At: sane(p.header.ToReal(eventAt(r)))}
	if r.Kind == record.KindLink {
		e.Link = record.LinkState(r.Code).String()
		return e
	}
	return p.windowEvent(r.First, r.Last, r.Bytes, r.WRs, r.Back, r.Flags&record.FlagAnomaly != 0, record.Cause(r.Code))
}

func (p *process) windowEvent(first, last int64, bytes uint64, requests, backlog uint32, anomaly bool, cause record.Cause) Event {
	e := Event{At: sane(p.header.ToReal(last)), Window: since(first, last), Bytes: bytes, Requests: requests, Backlog: backlog, Anomaly: anomaly, Cause: cause.String()}
	if e.Window > 0 {
		e.Bandwidth = float64(bytes) / float64(e.Window)
	}
	return e
}

// windows prints the connections of processes and their histories.
func (c *Cmd) windows(out io.Writer, ps []*Process) {
	for i, p := range ps {
		if i > 0 {
			fmt.Fprintln(out)
		}
		fmt.Fprintf(out, "rank %d of %d of job %s (node %s): %s\n", p.Rank, p.WorldSize, p.Job, p.Node, count(uint64(len(p.Connections)), "connection"))
		for j := range p.Connections {
			p.Connections[j].text(out, max(c.Last, 0))
		}
	}
}

func (k *Connection) text(out io.Writer, last int) {
	peer := fmt.Sprintf("rank %d of %s", k.Peer, k.Communicator)
	if k.World != nil {
		peer = fmt.Sprintf("rank %d (%s)", *k.World, peer)
	}
	qp := ""
	if k.QueuePair != 0 {
		qp = fmt.Sprintf(", queue pair %d", k.QueuePair)
		if k.PeerPair != 0 {
			qp += fmt.Sprintf(" (peer's %d)", k.PeerPair)
		}
	}
	if k.Rail != 0 {
		qp += fmt.Sprintf(", rail %d", k.Rail)
	}
	if k.Address != "" {
		qp += ", address " + k.Address
	}
	name := strings.TrimPrefix(k.Name, k.Transport+" ")
	fmt.Fprintf(out, "\n%s %s to %s, channel %d%s, path %s\n", k.Transport, dash(name), peer, k.Channel, qp, k.State)
	rtt := ""
	if k.RTT > 0 {
		rtt = ", RTT " + ago(k.RTT)
	}
	fmt.Fprintf(out, "  %s closed, %d slow; the last at %.1f MB/s, %s from post to completion%s; %d switches, %d bytes sent again\n",
		count(k.Windows, "window"), k.Slow, float64(k.Bandwidth)/1e6, ago(k.Latency), rtt, k.Switches, k.Resent)
	if len(k.Events) == 0 || last == 0 {
		return
	}
	w := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	fmt.Fprintln(w, "  AT\tWINDOW\tBYTES\tMB/S\tLATENCY\tREQUESTS\tBACKLOG\t")
	shown := 0
	for _, r := range k.ranges(last) {
		if r[0] > shown {
			fmt.Fprintf(w, "  ... %d more\t\t\t\t\t\t\t\n", r[0]-shown)
		}
		for i := r[0]; i < r[1]; i++ {
			k.Events[i].text(w)
		}
		shown = r[1]
	}
	w.Flush()
}

// ranges are the events that are shown: as many around the last one with which the connection became
// slow, and the last ones.
func (k *Connection) ranges(last int) [][2]int {
	n := len(k.Events)
	tail := [2]int{n - min(n, last), n}
	onset, state := -1, ""
	for i := range k.Events {
		e := &k.Events[i]
		if e.State == "" {
			continue
		}
		if none := record.CauseNone.String(); e.State != none && state == none {
			onset = i
		}
		state = e.State
	}
	if onset < 0 || onset >= tail[0]+last/2 {
		return [][2]int{tail}
	}
	around := [2]int{max(onset-last/2, 0), min(onset+(last+1)/2, n)}
	if around[1] >= tail[0] {
		return [][2]int{{min(around[0], tail[0]), n}}
	}
	return [][2]int{around, tail}
}

func (e *Event) text(w io.Writer) {
	at := e.At.Format("15:04:05.000000")
	if e.Link != "" {
		fmt.Fprintf(w, "  %s\tpath %s\t\t\t\t\t\t\n", at, e.Link)
		return
	}
	var what []string
	none := record.CauseNone.String()
	switch {
	case e.Anomaly:
		what = append(what, "SLOW: "+e.Cause)
	case e.Cause != none:
		what = append(what, e.Cause)
	}
	if e.State != "" && e.State != none && !e.Anomaly {
		what = append(what, "state "+e.State)
	}
	if e.Overlaps {
		what = append(what, "the last requests, turned bad")
	}
	if e.Gap {
		what = append(what, "after a gap")
	}
	latency := ""
	if e.Latency > 0 {
		latency = ago(e.Latency)
	}
	fmt.Fprintf(w, "  %s\t%.1f µs\t%d\t%.1f\t%s\t%d\t%d\t%s\n", at, float64(e.Window)*1e6, e.Bytes, e.Bandwidth/1e6, latency, e.Requests, e.Backlog, strings.Join(what, ", "))
}
