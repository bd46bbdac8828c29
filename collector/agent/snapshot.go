package agent

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/lockstep-ccl/lockstep/collector"
	"github.com/lockstep-ccl/lockstep/collector/source/recorder"
	"github.com/lockstep-ccl/lockstep/diagnosis"
	"github.com/lockstep-ccl/lockstep/record"
)

// publish makes the next snapshot.
func (a *Agent) publish() {
	s := &collector.AgentSnapshot{Node: a.o.Node, At: time.Now(), Sources: slices.Clone(a.status), GPUs: a.view.GPUs, NICs: a.view.NICs, Probes: a.view.Probes, Fences: a.fences()}
	refused := a.recorders.Refused()
	for _, why := range recorder.Refusals() {
		s.RefusedRecorders = append(s.RefusedRecorders, collector.Refused{Reason: why.String(), Count: refused[why]})
	}
	now := record.Now()
	for _, j := range a.jobs {
		s.Jobs = append(s.Jobs, j.snapshot(now))
		if j.stream != nil {
			st := j.stream.status()
			a.out = collector.Collective{}
			a.jobTime(j, &a.out)
			st.JobClock, st.ClockError, st.Correction = a.out.JobClock, time.Duration(a.out.MapErr), time.Duration(a.out.Correction)
			s.Master = append(s.Master, st)
		}
	}
	slices.SortFunc(s.Jobs, func(x, y collector.AgentJob) int { return strings.Compare(x.Job, y.Job) })
	slices.SortFunc(s.Master, func(x, y collector.StreamStatus) int { return strings.Compare(x.Job, y.Job) })
	a.snapshot.Store(s)
}

func (j *job) snapshot(now int64) collector.AgentJob {
	out := collector.AgentJob{
		Job: j.name, Ranks: map[diagnosis.ProcState]int{},
		Records: j.records, Lost: j.lost, Step: j.step, UnknownResults: j.unknown, DroppedArrivals: j.arrivalsDropped, RefusedConns: j.refused,
	}
	comms := map[string]*collector.AgentComm{}
	comm := func(name string) *collector.AgentComm {
		c := comms[name]
		if c == nil {
			c = &collector.AgentComm{Name: name}
			comms[name] = c
		}
		return c
	}
	for name, n := range j.finished {
		comm(name).Finished = n
	}
	transports := map[record.Transport]*collector.AgentTransport{}
	transport := func(t record.Transport) *collector.AgentTransport {
		c := transports[t]
		if c == nil {
			c = &collector.AgentTransport{Transport: t}
			transports[t] = c
		}
		return c
	}
	for t, n := range j.gone {
		transport(t).ConnTotals = *n
	}
	for _, r := range j.ranks {
		out.Lost += r.p.Lost
		addRefused(&out.RefusedConns, &r.p.Refused)
		out.TableOverflow += r.p.CommOverflow + r.p.ConnOverflow + r.p.DescOverflow + r.p.StampOverflow
		out.WithoutHistory += r.p.HistoryOverflow
		here := !r.p.Dead() && !r.p.Superseded
		if here && r.p.GPU.Seen {
			if out.RanksOnGPU == nil {
				out.RanksOnGPU = map[int]int{}
			}
			out.RanksOnGPU[int(r.p.GPU.Index)]++
		}
		for i := range r.p.Devices {
			if here {
				out.GPUs++
				out.GPUClockErrorNs = max(out.GPUClockErrorNs, r.p.Devices[i].Err)
			}
		}
		if !r.p.Superseded {
			out.Ranks[r.p.State]++
		}
		for _, c := range r.comms {
			if c != nil {
				out.UnknownResults += c.evicted
			}
		}
		r.sumComms(now, here, comm)
		r.sumConns(&out, here, transport)
	}
	out.Connections = collector.FirstConnDetails(out.Connections)
	for _, c := range comms {
		out.Comms = append(out.Comms, *c)
	}
	for _, t := range transports {
		out.Transports = append(out.Transports, *t)
	}
	slices.SortFunc(out.Comms, func(x, y collector.AgentComm) int { return strings.Compare(x.Name, y.Name) })
	slices.SortFunc(out.Transports, func(x, y collector.AgentTransport) int { return cmp.Compare(x.Transport, y.Transport) })
	return out
}

// sumComms adds a rank's communicators to those of its job, by name.
func (r *rank) sumComms(now int64, here bool, comm func(name string) *collector.AgentComm) {
	for i := range r.p.Comms {
		m := &r.p.Comms[i]
		c := comm(m.Name)
		c.Finished += m.Finished
		if !here || m.State == record.CommLeft || m.State == record.CommAborted {
			continue
		}
		c.Members++
		if m.Open() {
			c.OpenMembers++
			c.OldestOpen = max(c.OldestOpen, float64(now-m.StartedAt)/1e9)
		}
	}
}

// sumConns likewise its connections, by transport.
func (r *rank) sumConns(out *collector.AgentJob, here bool, transport func(record.Transport) *collector.AgentTransport) {
	for i := range r.p.Conns {
		s := &r.p.Conns[i]
		t := transport(s.Transport)
		if here {
			t.Connections++
			t.Outstanding += s.Outstanding()
			if s.Link == record.LinkDown {
				t.Broken++
			}
			out.Connections = r.detail(out.Connections, s)
		}
	}
	for i := range r.conns {
		if k := &r.conns[i]; k.transport != record.TransportNone {
			k.addTo(&transport(k.transport).ConnTotals)
		}
	}
}

// addRefused adds counts from another process's memory. They may hold anything, so each is
// capped and the sum cannot wrap.
func addRefused(to, n *[record.NumRefusals]uint64) {
	for i := range n {
		to[i] += min(n[i], 1<<40)
	}
}

// addGone adds what a connection that is gone did to the job's totals.
func (j *job) addGone(k *conn) {
	if k.transport == record.TransportNone { // not learnt
		return
	}
	if j.gone[k.transport] == nil {
		j.gone[k.transport] = new(collector.ConnTotals)
	}
	k.addTo(j.gone[k.transport])
}

// addTo adds what a connection did. The live word has all its windows, those with
// a cause were recorded, and the rest were normal.
func (k *conn) addTo(to *collector.ConnTotals) {
	normal := k.total
	for cause := record.CauseNone + 1; int(cause) < len(k.counts); cause++ {
		to.Windows[cause] += k.counts[cause]
		normal -= min(k.counts[cause], normal)
	}
	// A record may be read before its live word, and a counter must not step back.
	k.counts[record.CauseNone] = max(k.counts[record.CauseNone], normal)
	to.Windows[record.CauseNone] += k.counts[record.CauseNone]
	to.Switches += k.switches
	to.Resent += k.resent
}

// maxNames bounds the communicator names whose totals outlive their processes.
const maxNames = 1024

func (j *job) addFinished(name string, n uint64) {
	if _, ok := j.finished[name]; ok || len(j.finished) < maxNames {
		j.finished[name] += n
	}
}

// maxDetails bounds the connections among which the job's first are chosen.
const maxDetails = 4096

// detail appends a connection that was used.
func (r *rank) detail(to []collector.ConnDetail, s *record.ConnStatus) []collector.ConnDetail {
	k, c := r.conn(s.Index), r.comm(s.Comm)
	if k.who == nil || c == nil || len(to) >= maxDetails || idle(s) && s.Received == 0 {
		return to
	}
	return append(to, collector.ConnDetail{
		ID: fmt.Sprintf("%d-%d.%d", r.p.Rank, s.Index, s.Gen), Comm: c.name, Rank: r.p.Rank, Peer: s.Peer, PeerWorld: -1, Conn: *k.who,
		State: s.Link, BytesPerSec: float64(s.WindowBps), LatencyNs: s.LatencyNs, Cause: s.WindowCause,
		Windows: s.Windows, Slow: s.SlowWindows, Switches: s.Switches, Outages: k.outages, Resent: s.Resent,
		RTTNs: s.RTT,
	})
}
