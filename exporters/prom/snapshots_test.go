package prom_test

import (
	"math"
	"time"

	"github.com/lockstep-ccl/lockstep/collector"
	"github.com/lockstep-ccl/lockstep/diagnosis"
	"github.com/lockstep-ccl/lockstep/exporters/names"
	"github.com/lockstep-ccl/lockstep/exporters/prom"
	"github.com/lockstep-ccl/lockstep/record"
)

const second = int64(time.Second)

func allReduce(seq uint64, d time.Duration) *collector.Collective {
	return &collector.Collective{
		Job: "llama", Comm: "dp", CommID: 7, Rank: 1, Size: 8, Kind: record.AllReduce, Seq: seq, Bytes: 1 << 20,
		Enqueued: 10 * second, Started: 10 * second, Ended: 10*second + int64(d), Wait: int64(d) / 4, Transfer: int64(d) / 2,
	}
}

func agentSnapshot() *collector.AgentSnapshot {
	return &collector.AgentSnapshot{
		Node: "gpu-01",
		Jobs: []collector.AgentJob{{
			Job:   "llama",
			Ranks: map[diagnosis.ProcState]int{diagnosis.ProcRunning: 7, diagnosis.ProcGone: 1},
			Comms: []collector.AgentComm{
				{Name: "dp", Members: 8, OpenMembers: 7, OldestOpen: 2.5, Finished: 100},
				{Name: "tp", Members: 8},
			},
			Transports: []collector.AgentTransport{
				{Transport: record.TransportSHM, Connections: 14, Outstanding: 4096, ConnTotals: collector.ConnTotals{Windows: [record.NumCauses]uint64{1000, 3, 2, 1, 0}}},
				{Transport: record.TransportTCP, Connections: 2},
				{Transport: record.TransportRDMA, Connections: 4, Broken: 1, ConnTotals: collector.ConnTotals{Windows: [record.NumCauses]uint64{20}, Switches: 3, Resent: 65536}},
			},
			Connections: []collector.ConnDetail{
				{
					ID: "0-3.0", Comm: "dp", Rank: 0, Peer: 2, PeerWorld: -1, BytesPerSec: 4.5e10, LatencyNs: 12500, Cause: record.CauseNetwork, Windows: 20, Slow: 4,
					Conn: collector.Conn{Transport: record.TransportRDMA, QP: 284, PeerQP: 301, Address: "10.0.0.7", NIC: "mlx5_0", Port: 1, Rail: 1, Name: "mlx5_0/1->mlx5_2/1"},
				},
				{ID: "0-4.0", Comm: "dp", Rank: 0, Peer: 1, PeerWorld: -1, Conn: collector.Conn{Transport: record.TransportTCP, Name: "tcp 10.0.0.7:4000->10.0.0.8:5000", Address: "10.0.0.7"}},
			},
			Records: 123456, Lost: 17, TableOverflow: 1, GPUs: 8, GPUClockErrorNs: 2800, Step: 42,
			RanksOnGPU: map[int]int{0: 1}, DroppedArrivals: 5, RefusedConns: [record.NumRefusals]uint64{1, 2, 3, 4, 5},
		}},
		Sources: []collector.SourceStatus{
			{Name: "recorder", Up: true, Duration: 2 * time.Millisecond},
			{Name: "nvml", Err: "the GPU driver does not answer"},
			{Name: "rdma", Up: true, NoData: true},
		},
		RefusedRecorders: []collector.Refused{{Reason: "directory"}, {Reason: "job", Count: 2}},
		GPUs:             nodeGPUs(),
		NICs:             nodeNICs(),
		Fences:           []collector.AgentFences{{Job: "llm", Stopped: 3, Killed: 1, Spared: 2, Failed: 1, Leases: 1}},
		Probes:           &collector.Probes{Libraries: 1, Processes: 8, Watched: 7, Unidentified: 2, Calls: 12345, PointToPoint: 678, SampledOut: 5, RingFull: 4, Unplaced: 3, TableFull: 2, Unread: 1},
		Master:           []collector.StreamStatus{{Job: "llama", Connected: true, Reports: 900, Dropped: 2, Reconnect: 3, JobClock: true, ClockError: 40 * time.Microsecond, Correction: -50 * time.Millisecond}},
	}
}

// nodeGPUs are a GPU that tells everything, and one that has fallen off the bus.
func nodeGPUs() *collector.GPUs {
	v := func(x float64) *float64 { return &x }
	throttle := diagnosis.ThrottlePowerCap | diagnosis.ThrottleHWThermal
	return &collector.GPUs{
		DriverVersion: "580.95.05", ProbedAt: 1, ProbeNs: 42_000_000, XidsDropped: 3,
		GPUs: []collector.GPU{
			{
				Index: 0, UUID: "GPU-00010203-0405-0607-0809-0a0b0c0d0e0f", Model: "NVIDIA H200", BusID: "00000000:18:00.0",
				Temperature: v(61), MemoryTemperature: v(70), Power: v(650.5), PowerLimit: v(700), Energy: v(12345), SMClock: v(1.98e9), MemoryClock: v(3.201e9),
				Utilization: v(0.98), MemoryUsed: v(10 << 30), MemoryTotal: v(150 << 30),
				PCIeReplays: v(2), PCIeGeneration: v(5), PCIeWidth: v(16), PCIeMaxWidth: v(16),
				Corrected: collector.ECC{Volatile: v(1), Aggregate: v(9)}, Uncorrected: collector.ECC{Volatile: v(0)},
				RowsCorrected: v(0), RowsUncorrected: v(1), RemapPending: v(1), RemapFailure: v(0),
				Throttle: &throttle, ThrottledAt: 1,
				Links: []collector.NVLink{{Link: 0, Up: true, CRC: v(4), Replays: v(3), Recoveries: v(0)}, {Link: 1}},
				PIDs:  []int32{4242}, Xids: []collector.Xid{{Code: 63, Count: 1, At: 1}, {Code: 31, Count: 2, At: 1}, {Code: 7777, Count: 1, At: 1}},
			},
			{Index: 2, Failed: []string{"GetHandleByIndex: Insufficient Permissions"}},
			{Index: 1, UUID: "GPU-1", Model: "NVIDIA H200", Lost: true, LostAt: 1, Xids: []collector.Xid{{Code: 79, Count: 1, At: 1}}},
		},
	}
}

// nodeNICs are a port that tells everything, one of a bond that is down, and one whose device is gone.
func nodeNICs() *collector.NICs {
	v := func(x float64) *float64 { return &x }
	return &collector.NICs{ProbedAt: 1, ProbeNs: 42_000_000, EventsLost: 2, Ports: []collector.NICPort{
		{
			Device: "mlx5_0", Port: 1, Layer: "Ethernet", BusID: "0000:18:00.0", Model: "MT4129", Firmware: "28.39.1002",
			State: "ACTIVE", PhysicalState: "LinkUp", Up: true, Flaps: 3, Links: []collector.NICLink{{NetDev: "ens1np0", Up: true, Flaps: 3}},
			Rate: v(50e9), ReceivedBytes: v(4000), TransmittedBytes: v(8000), ReceivedPackets: v(10), TransmittedPackets: v(20), TransmitWaits: v(30),
			Retransmissions: []collector.NICCounter{{Name: "out_of_sequence", Value: 7}, {Name: "packet_seq_err", Value: 3}},
			Congestion:      []collector.NICCounter{{Name: "rp_cnp_handled", Value: 11}},
			Errors:          []collector.NICCounter{{Name: "symbol_error"}}, ReadErrors: 5,
		},
		{Device: "mlx5_bond_0", Port: 1, Layer: "Ethernet", State: "DOWN", PhysicalState: "Disabled", Links: []collector.NICLink{{NetDev: "bond0"}, {NetDev: "ens3f1np1", Flaps: 4}}},
		{Device: "mlx5_9", Port: 1, Layer: "InfiniBand", Gone: true, Flaps: 1},
		{Device: "mlx5_8", Port: 2, ReadErrors: 1}, // its state cannot be read
	}}
}

func masterSnapshot() *collector.MasterSnapshot {
	at := time.Unix(1_700_000_000, 0)
	nan := float32(math.NaN())
	return &collector.MasterSnapshot{
		Job: "llama", At: at, Attempt: 2, WorldSize: 8, Step: 42, Refused: 6,
		Ranks: map[diagnosis.ProcState]int{diagnosis.ProcRunning: 7, diagnosis.ProcStopped: 1},
		Recording: &collector.RecordingStatus{
			Passes: 900, Bytes: 1 << 20, Size: 1 << 19, Oldest: at.Add(-10 * time.Minute), Skipped: map[string]uint64{"paced": 5, "busy": 1, "failed": 0},
		},
		Agents: []collector.AgentStatus{
			{Node: "gpu-01", Connected: true, LastSeen: at, Ranks: 4, MapError: time.Millisecond},
			{Node: "gpu-02", Lost: true, LastSeen: at.Add(-time.Minute), Ranks: 4, MapError: 3 * time.Millisecond},
		},
		Incidents: []collector.Incident{
			{
				ID: "llama-1-1", Attempt: 2, Opened: at.Add(-3 * time.Second), Confirmed: at.Add(-time.Second), TraceID: [16]byte{1, 2, 3},
				Verdict: diagnosis.Verdict{
					Class: diagnosis.NoncommunicationHang, Level: diagnosis.Confirmed, CommName: "dp", Since: at.Add(-4 * time.Second).UnixNano(),
					Culprits: []diagnosis.Culprit{{Kind: diagnosis.CulpritRank, Rank: 5, Peer: -1, Node: "gpu-02", Reason: "process_stopped"}},
				},
			},
			{
				ID: "llama-1-2", Attempt: 2, Opened: at,
				Verdict: diagnosis.Verdict{
					Class: diagnosis.CommunicationSlow, Level: diagnosis.Suspected, CommName: "tp",
					Culprits: []diagnosis.Culprit{{Kind: diagnosis.CulpritConnection, Rank: 2, Peer: 6, Node: "gpu-01", Reason: "network"}},
				},
			},
			{
				ID: "llama-1-3", Attempt: 2, Opened: at, Confirmed: at,
				Verdict: diagnosis.Verdict{
					Class: diagnosis.NoncommunicationHang, Level: diagnosis.Confirmed, CommName: "tp", Undetermined: "which of these ranks",
					Culprits: []diagnosis.Culprit{
						{Kind: diagnosis.CulpritRank, Rank: 3, Peer: -1, Node: "gpu-01", Reason: "deadlock"},
						{Kind: diagnosis.CulpritRank, Rank: 4, Peer: -1, Node: "gpu-02", Reason: "deadlock"},
					},
				},
			},
			{
				ID: "llama-0-1", Opened: at.Add(-time.Hour), Confirmed: at.Add(-time.Hour), Closed: at.Add(-50 * time.Minute),
				Verdict: diagnosis.Verdict{
					Class: diagnosis.CommunicationHang, Level: diagnosis.Confirmed, Since: at.Add(-time.Hour - time.Second).UnixNano(),
					Culprits: []diagnosis.Culprit{{Kind: diagnosis.CulpritNode, Rank: -1, Peer: -1, Node: "gpu-02"}},
				},
			},
		},
		Opened:    [diagnosis.NumClasses]uint64{diagnosis.CommunicationHang: 1, diagnosis.NoncommunicationHang: 1, diagnosis.CommunicationSlow: 1},
		Confirmed: [diagnosis.NumClasses]uint64{diagnosis.CommunicationHang: 1, diagnosis.NoncommunicationHang: 1},
		Diagnoses: 600, DiagnosisNs: 1_200_000,
		Delay: []collector.DelayMatrix{
			{Comm: "tp", Size: 2, Ratio: []float32{nan, 1, 4, nan}},
			{Comm: "tp", Size: 2, Ratio: []float32{nan, 1.5, 1, nan}}, // another communicator of that name
			{Comm: "broken", Size: 3, Ratio: []float32{1}},
		},
		Overflow: 3,
	}
}

func supervision() prom.Supervision {
	return prom.Supervision{
		Job: "llama", Heard: true, Ranks: map[string]int{"running": 7, "exited": 1}, LeasesExpired: 1,
		Coordination: &prom.Coordination{
			Attempt: 2, Attempts: 3, Needed: 4, Hosts: map[string]int{"running": 3, "standby": 1, "silent": 1, "excluded": 0},
			Connections: 4, Joined: 9, Refused: map[string]uint64{"handshake": 5, "certificate": 2, "name": 0},
		},
	}
}

// turnedAway is what a page has turned away.
type turnedAway struct{}

func (turnedAway) HungUp() uint64             { return 1 }
func (turnedAway) Refused() map[string]uint64 { return map[string]uint64{names.WebPassword: 2} }

func fabric() prom.Fabric {
	return prom.Fabric{
		Links: []prom.FabricLink{
			{Leaf: "leaf0", Spine: "spine1", Up: true, Rate: 1e9, Planned: 5e8, Measured: 4e8, Lanes: 3, Sent: 1000, Lost: 10, Loss: 0.01, Segments: 5000, SegmentsLost: 50, Suspected: true},
			{Leaf: "leaf0", Spine: "spine1", Dead: true, Loss: 1, Index: 1, Rate: 1e9},
		},
		Moves: map[string]uint64{"dead": 3, "lossy": 0}, Refused: map[string]uint64{"certificate": 1}, Jobs: 2, Streams: 4, Probers: 8,
	}
}
