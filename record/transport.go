package record

import "time"

// transports is what is true of a transport, whoever looks at it: code that tells
// transports apart asks the methods below and names none.
var transports = [numTransports]struct {
	name      string // in records, metrics and messages
	inMemory  bool
	queuePair bool
	stamped   bool
	seeks     time.Duration // as package transport, whose test holds it against this
}{
	TransportNone:   {name: "none"},
	TransportSHM:    {name: "shm", inMemory: true},
	TransportTCP:    {name: "tcp", seeks: 30 * time.Second},
	TransportRDMA:   {name: "rdma", queuePair: true, seeks: 10 * time.Second},
	TransportNVLink: {name: "nvlink", stamped: true},
}

func (t Transport) String() string {
	if !t.Known() {
		return name(nil, int(t), "transport")
	}
	return transports[t].name
}

// Known reports whether t is a transport of this version, or TransportNone.
func (t Transport) Known() bool { return t < numTransports }

// InMemory reports whether bytes stay in a host's memory: no network is in between, and
// what takes long waits for a CPU.
func (t Transport) InMemory() bool { return t.Known() && transports[t].inMemory }

// QueuePair reports whether a connection is a pair of queue pairs: ConnEntry.ID and PeerID are their
// numbers, and Name begins with the NIC's. The ID of another connection is a socket's inode, or 0.
func (t Transport) QueuePair() bool { return t.Known() && transports[t].queuePair }

// Stamped reports whether no CPU sees the bytes: kernels of the receiver stamp what has come
// (StampPeer), so the receiver enters the connection, and the Peer of its ConnEntry sends.
func (t Transport) Stamped() bool { return t.Known() && transports[t].stamped }

// Seeks returns for how long a connection looks for a path when it has none, unless its job says
// otherwise: an outage that is shorter costs time, not the job. Without it a connection ends with its one path.
func (t Transport) Seeks() time.Duration {
	if !t.Known() {
		return 0
	}
	return transports[t].seeks
}
