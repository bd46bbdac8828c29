package prom

import (
	"strconv"

	"github.com/lockstep-ccl/lockstep/collector"
	"github.com/lockstep-ccl/lockstep/exporters/names"
)

// sendNICs sends a node's RDMA ports. While a driver hangs, what was read last is
// not sent, as with GPUs; links go on, since the kernel announces their changes.
func sendNICs(p *pass, n *collector.NICs) {
	p.send(names.NICDriverUnresponsive, boolean(n.UnresponsiveAt != 0))
	p.send(names.NICLinkEventsLost, float64(n.EventsLost))
	if n.ProbeNs > 0 {
		p.send(names.NICProbeDuration, seconds(n.ProbeNs))
	}
	for i := range n.Ports {
		s := &n.Ports[i]
		port := strconv.Itoa(s.Port)
		p.send(names.NICInfo, 1, s.Device, port, s.Layer, s.Model, s.BusID, s.Firmware)
		p.send(names.NICPortFlaps, float64(s.Flaps), s.Device, port)
		p.send(names.NICReadErrors, float64(s.ReadErrors), s.Device, port)
		for _, l := range s.Links {
			p.send(names.NICLinkUp, boolean(l.Up), s.Device, port, l.NetDev)
			p.send(names.NICLinkFlaps, float64(l.Flaps), s.Device, port, l.NetDev)
		}
		if n.UnresponsiveAt == 0 {
			sendPort(p, s, port)
		}
	}
}

func sendPort(p *pass, s *collector.NICPort, port string) {
	if s.State != "" || s.Gone {
		p.send(names.NICPortUp, boolean(s.Up), s.Device, port)
	}
	if s.State != "" {
		p.send(names.NICPortState, 1, s.Device, port, s.State, s.PhysicalState)
	}
	p.sendKnown(names.NICPortRate, s.Rate, s.Device, port)
	p.sendKnown(names.NICReceived, s.ReceivedBytes, s.Device, port)
	p.sendKnown(names.NICTransmitted, s.TransmittedBytes, s.Device, port)
	p.sendKnown(names.NICReceivedPackets, s.ReceivedPackets, s.Device, port)
	p.sendKnown(names.NICTransmittedPackets, s.TransmittedPackets, s.Device, port)
	p.sendKnown(names.NICTransmitWaits, s.TransmitWaits, s.Device, port)
	for _, list := range []struct {
		metric   *names.Metric
		counters []collector.NICCounter
	}{{names.NICRetransmissions, s.Retransmissions}, {names.NICCongestion, s.Congestion}, {names.NICErrors, s.Errors}} {
		for _, c := range list.counters {
			p.send(list.metric, c.Value, s.Device, port, c.Name)
		}
	}
}
