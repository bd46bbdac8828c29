package master

import (
	"fmt"
	"math"
	"slices"
	"strings"

	"github.com/lockstep-ccl/lockstep/collector"
	"github.com/lockstep-ccl/lockstep/collector/wire"
	"github.com/lockstep-ccl/lockstep/diagnosis"
	"github.com/lockstep-ccl/lockstep/record"
)

// This file merges what is told of connections, and of when sampled collectives began and ended.

func (s *state) mergeConn(n int32, w *wire.Connection, now int64) {
	if w == nil {
		return
	}
	c, ok := s.member(n, w.CommId, w.Rank)
	if !ok || w.Peer < 0 || int(w.Peer) >= len(s.ev.Comms[c].Members) {
		s.refused++
		return
	}
	s.ev.Comms[c].ConnRev = s.revision()
	clock := &s.nodes[n].clock
	t := record.Transport(w.Transport)
	link := record.LinkState(w.Link)
	// A path that is up and idle counts too: without it a connection whose other path is down
	// looks dead.
	told := w.Posted|w.Windows|uint64(w.MonoTxBlockedNs) != 0 || link != record.LinkNone
	if tx := s.conn(n, connKey{c, w.Rank, w.Peer, w.Channel, t}, told); tx != nil {
		if w.Name != "" {
			tx.Name = bounded(w.Name)
			if w.QueuePair != 0 {
				tx.Name = strings.TrimSuffix(tx.Name, fmt.Sprintf(" qp %d", w.QueuePair))
			}
			tx.QueuePair, tx.PeerQueuePair, tx.Rail = w.QueuePair, w.PeerQueuePair, uint16(min(w.Rail, math.MaxUint16))
			tx.Address = diagnosis.ParseAddress(w.Address)
		}
		tx.Outstanding = 0
		if w.Posted > w.Completed {
			tx.Outstanding = w.Posted - w.Completed
		}
		tx.LastPost, tx.LastCompletion = clock.real(w.MonoPostedNs, now), clock.real(w.MonoCompletedNs, now)
		tx.TxBlockedSince = clock.real(w.MonoTxBlockedNs, now)
		tx.Windows, tx.SlowWindows = w.Windows, w.SlowWindows
		tx.BytesPerSec, tx.LatencyNs = finite(w.BytesPerSecond), float64(max(w.LatencyNs, 0))
		tx.Cause, tx.LastWindowAt = record.Cause(w.Cause), clock.real(w.MonoWindowNs, now)
		tx.Link, tx.LinkAt, tx.Switches = link, clock.real(w.MonoLinkNs, now), w.Switches
		tx.Outages, tx.Resent = w.Outages, w.Resent
		tx.RTTNs = float64(max(w.RttNs, 0))
	}
	if rx := s.conn(n, connKey{c, w.Peer, w.Rank, w.Channel, t}, w.Received|uint64(w.MonoRxWaitingNs) != 0); rx != nil {
		rx.RxWaitingSince = clock.real(w.MonoRxWaitingNs, now)
	}
}

// conn returns a connection, a new one when create says so and there is room.
func (s *state) conn(n int32, k connKey, create bool) *diagnosis.Conn {
	i, ok := s.connOf[k]
	if !ok {
		if !create {
			return nil
		}
		if len(s.ev.Conns) >= s.limits.Conns || s.nodes[n].apart.conns >= (s.limits.Conns+1)/2 {
			s.overflow++
			return nil
		}
		s.nodes[n].apart.conns++
		s.connBy = append(s.connBy, n)
		i = int32(len(s.ev.Conns))
		s.ev.Conns = append(s.ev.Conns, diagnosis.Conn{Comm: k.comm, Src: k.src, Dst: k.dst, Transport: k.transport})
		s.conns = append(s.conns, k)
		s.connOf[k] = i
	}
	return &s.ev.Conns[i]
}

func (s *state) mergeArrival(n int32, w *wire.Arrival, now int64) {
	if w == nil {
		return
	}
	c, ok := s.member(n, w.CommId, w.Rank)
	if !ok {
		s.refused++
		return
	}
	k := arrivalKey{c, w.Seq}
	if _, mixed := s.mixed[k]; mixed {
		s.refused++
		return
	}
	i, ok := s.arrived[k]
	if ok {
		// NCCL's ranks number a replay when it runs and other calls when they are made, so two may have one number.
		x := &s.samples[i]
		if s.ev.Arrivals[i].Coll != record.CollKind(w.Coll) || x.bytes != 0 && w.Bytes != 0 && x.bytes != w.Bytes {
			s.mix(k, i)
			return
		}
	}
	s.clock.meet(n, c, w, now)
	if !ok {
		size := len(s.ev.Comms[c].Members)
		if size > s.limits.Arrivals {
			s.overflow++
			return
		}
		if len(s.ev.Arrivals) >= maxArrivals || s.cells+size > s.limits.Arrivals {
			s.dropArrivals(size)
		}
		i = int32(len(s.ev.Arrivals))
		times := make([]int64, 2*size)
		s.ev.Arrivals = append(s.ev.Arrivals, diagnosis.Arrival{Comm: c, Seq: w.Seq, Coll: record.CollKind(w.Coll), Start: times[:size:size], End: times[size:]})
		s.samples = append(s.samples, sample{by: n})
		s.arrived[k] = i
		s.cells += size
	}
	x := &s.samples[i]
	if x.by != n {
		x.by = several
	}
	x.bytes = max(x.bytes, w.Bytes)
	a, clock := &s.ev.Arrivals[i], &s.nodes[n].clock
	a.Start[w.Rank], a.End[w.Rank] = clock.real(w.MonoStartedNs, now), clock.real(w.MonoEndedNs, now)
}

// dropArrivals drops half of the samples, or more when size cells do not fit then. The nodes
// that told most lose most (shares).
func (s *state) dropArrivals(size int) {
	// A sample's weight is its part of both bounds, of the table's number and of its cells.
	weight := func(i int) (int32, int64) {
		return s.samples[i].by, int64(s.limits.Arrivals) + maxArrivals*int64(len(s.ev.Arrivals[i].Start))
	}
	for halvings := 1; ; halvings++ {
		kept := thin(len(s.ev.Arrivals), halvings, weight)
		s.keepArrivals(kept)
		if len(s.ev.Arrivals) < maxArrivals && s.cells+size <= s.limits.Arrivals {
			break
		}
	}
}

// keepArrivals removes the samples that are not kept.
func (s *state) keepArrivals(kept []bool) {
	s.ev.Arrivals, s.samples = keep(s.ev.Arrivals, kept), keep(s.samples, kept)
	s.cells = 0
	clear(s.arrived)
	for i := range s.ev.Arrivals {
		s.cells += len(s.ev.Arrivals[i].Start)
		s.arrived[arrivalKey{s.ev.Arrivals[i].Comm, s.ev.Arrivals[i].Seq}] = int32(i)
	}
}

// mix notes that members mean different operations by a number: their times are no sample of either.
func (s *state) mix(k arrivalKey, i int32) {
	if len(s.mixed) >= maxArrivals {
		clear(s.mixed)
	}
	s.refused++
	s.mixed[k] = struct{}{}
	s.samples[i].mixed = true
	s.clock.unmeet(k)
}

// dropMixed removes what mix has noted, all in one go.
func (s *state) dropMixed() {
	mixed := func(x sample) bool { return x.mixed }
	if !slices.ContainsFunc(s.samples, mixed) {
		return
	}
	kept := make([]bool, len(s.samples))
	for i := range kept {
		kept[i] = !mixed(s.samples[i])
	}
	s.keepArrivals(kept)
}

// connDetails lists the connections that deserve attention most.
func connDetails(ev *diagnosis.Evidence) (out []collector.ConnDetail) {
	least := -1 // attention that one needs to find room
	for i := range ev.Conns {
		c := &ev.Conns[i]
		members := ev.Comms[c.Comm].Members
		if c.Name == "" || uint32(c.Src) >= uint32(len(members)) || uint32(c.Dst) >= uint32(len(members)) {
			continue
		}
		d := collector.ConnDetail{
			Comm: ev.Comms[c.Comm].Name, Rank: members[c.Src].World, Peer: c.Dst, PeerWorld: members[c.Dst].World,
			State: c.Link, BytesPerSec: c.BytesPerSec, LatencyNs: int64(c.LatencyNs), Cause: c.Cause,
			Windows: c.Windows, Slow: c.SlowWindows, Switches: c.Switches, Outages: c.Outages, Resent: c.Resent,
			RTTNs: int64(c.RTTNs),
		}
		if d.Anomaly() <= least {
			continue
		}
		d.Conn = collector.Conn{
			Transport: c.Transport, QP: uint64(c.QueuePair), PeerQP: c.PeerQueuePair, Address: c.Address.String(), Rail: int(c.Rail), Name: c.Name,
		}
		d.NIC, d.Port = c.NIC()
		if out = append(out, d); len(out) >= 2*collector.MaxConnDetails {
			out = collector.FirstConnDetails(out)
			least = out[len(out)-1].Anomaly()
		}
	}
	return collector.FirstConnDetails(out)
}
