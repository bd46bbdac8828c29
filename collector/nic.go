package collector

// NICs is what an agent knows of its node's RDMA ports, as of the last probe
// that returned. It is not changed once it is published. Times are CLOCK_MONOTONIC ns.
type NICs struct {
	ProbedAt int64 `json:"-"`
	ProbeNs  int64 `json:"probe_ns"` // duration of the last probe
	// UnresponsiveAt is since when a read has not returned, 0 when all do; Hangs
	// names the file.
	UnresponsiveAt int64     `json:"-"`
	Hangs          string    `json:"hangs,omitempty"`
	EventsLost     uint64    `json:"link_events_lost,omitempty"` // changes of links that came faster than they were read
	Ports          []NICPort `json:"ports"`
}

// NICPort is one port of an RDMA device. What the driver does not tell is nil
// or "", never zero. Counters are the driver's and count from its start, unless they say otherwise.
type NICPort struct {
	Device   string `json:"device"`
	Port     int    `json:"port"`
	Layer    string `json:"link_layer,omitempty"` // InfiniBand, Ethernet
	BusID    string `json:"pci_bus_id,omitempty"`
	Model    string `json:"model,omitempty"` // the chip's, such as MT4129
	Firmware string `json:"firmware,omitempty"`

	State         string `json:"state"`          // the kernel's words: ACTIVE, DOWN, ...; "" when it cannot be read
	PhysicalState string `json:"physical_state"` // LinkUp, Polling, Disabled, ...
	Up            bool   `json:"up"`             // State is ACTIVE
	// Gone says that the device was here and is no more: its driver gave it up, or was unloaded.
	Gone   bool  `json:"gone,omitempty"`
	DownAt int64 `json:"-"` // since when a port that was up is not; 0: it is, or never was
	// Flaps counts how often the port went down while this agent ran, what
	// happened between probes included where the port has an interface; FlapAt is when it was last seen to.
	Flaps  uint64 `json:"flaps"`
	FlapAt int64  `json:"-"`
	// Links are the port's network interface and, when that is a bond, its members.
	Links []NICLink `json:"links,omitempty"`

	Rate               *float64 `json:"rate_bytes_per_second,omitempty"`
	ReceivedBytes      *float64 `json:"received_bytes,omitempty"`
	TransmittedBytes   *float64 `json:"transmitted_bytes,omitempty"`
	ReceivedPackets    *float64 `json:"received_packets,omitempty"`
	TransmittedPackets *float64 `json:"transmitted_packets,omitempty"`
	TransmitWaits      *float64 `json:"transmit_waits,omitempty"` // ticks in which there was data to send and no credit

	Retransmissions []NICCounter `json:"retransmissions,omitempty"`
	Congestion      []NICCounter `json:"congestion,omitempty"`
	Errors          []NICCounter `json:"errors,omitempty"`

	ReadErrors uint64 `json:"read_errors"` // reads that failed while this agent ran
	// Failed are the files that could not be read at the last probe, with what was wrong.
	Failed []string `json:"failed,omitempty"`
}

// NICCounter is one of the driver's counters, by its name in sysfs.
type NICCounter struct {
	Name  string  `json:"name"`
	Value float64 `json:"value"`
}

// NICLink is a network interface of a port.
type NICLink struct {
	NetDev string `json:"netdev"`
	Up     bool   `json:"up"`    // it has a carrier
	Flaps  uint64 `json:"flaps"` // as NICPort.Flaps
}
