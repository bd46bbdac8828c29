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
	Latency      seconds `json:"last_latency_seconds"` // post to completion, mean of the last window
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
	Anomaly   bool      `json:"anomaly,omitempty"`
	Cause     string    `json:"cause,omitempty"`
}

// connections lists a process's connections with what is in its ring of each.
func (p *process) connections(world func(comm uint64, rank int32) (int32, bool)) (all []Connection) {
	slices.SortStableFunc(p.events, func(a, b record.Record) int { return cmp.Compare(eventAt(&a), eventAt(&b)) })
	for i := range p.conns {
		k := &p.conns[i]
		c := Connection{
			Peer: k.Peer, Transport: k.Transport.String(), Channel: k.Channel, Name: k.Name, State: k.Link.String(),
			Windows: k.Windows, Slow: k.SlowWindows, Bandwidth: k.WindowBps, Latency: seconds(float64(max(k.LatencyNs, 0)) / 1e9),
			Switches: k.Switches, Resent: k.Resent, Events: []Event{},
		}
		if k.Transport == record.TransportRDMA {
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
		for j := range p.events {
			if r := &p.events[j]; r.Conn == k.Index && r.Comm == k.Comm {
				c.Events = append(c.Events, p.event(r))
			}
		}
		all = append(all, c)
	}
	return all
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
	e.Window, e.Bytes, e.Requests, e.Backlog = since(r.First, r.Last), r.Bytes, r.WRs, r.Back
	if e.Window > 0 {
		e.Bandwidth = float64(r.Bytes) / float64(e.Window)
	}
	e.Anomaly, e.Cause = r.Flags&record.FlagAnomaly != 0, record.Cause(r.Code).String()
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
	fmt.Fprintf(out, "  %s closed, %d slow; the last at %.1f MB/s, %s from post to completion; %d switches, %d bytes sent again\n",
		count(k.Windows, "window"), k.Slow, float64(k.Bandwidth)/1e6, ago(k.Latency), k.Switches, k.Resent)
	events := k.Events[len(k.Events)-min(len(k.Events), last):]
	if len(events) == 0 {
		return
	}
	w := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	fmt.Fprintln(w, "  AT\tWINDOW\tBYTES\tMB/S\tREQUESTS\tBACKLOG\t")
	for i := range events {
		e := &events[i]
		at := e.At.Format("15:04:05.000000")
		if e.Link != "" {
			fmt.Fprintf(w, "  %s\tpath %s\t\t\t\t\t\n", at, e.Link)
			continue
		}
		what := ""
		if e.Anomaly {
			what = "SLOW: " + e.Cause
		} else if e.Cause != record.CauseNone.String() {
			what = e.Cause
		}
		fmt.Fprintf(w, "  %s\t%.1f µs\t%d\t%.1f\t%d\t%d\t%s\n", at, float64(e.Window)*1e6, e.Bytes, e.Bandwidth/1e6, e.Requests, e.Backlog, what)
	}
	w.Flush()
}
