package main

import (
	"fmt"
	"log/slog"
	"math"
	"net/http/httptest"
	"sync/atomic"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/lockstep-ccl/lockstep/collector"
	"github.com/lockstep-ccl/lockstep/diagnosis"
	"github.com/lockstep-ccl/lockstep/exporters/names"
	"github.com/lockstep-ccl/lockstep/exporters/prom"
	"github.com/lockstep-ccl/lockstep/record"
)

// A hall is the hardware that the demo's machine lacks: two nodes with eight GPUs and four NICs each, a fabric, and a
// job of 16 ranks on them. The exporters are Lockstep's own; what they are told is made up here, and moves with time.
type hall struct {
	began  time.Time
	broken atomic.Int64 // since when (Unix ns) a GPU is lost, a port is down and links are bad; 0: nothing is

	targets map[string]string // instance → address
}

const hallJob = "llama-70b"

func startHall(t *testing.T) *hall {
	h := &hall{began: time.Now(), targets: map[string]string{}}
	serve := func(instance string, component names.Component, c prometheus.Collector, more ...prometheus.Collector) {
		reg := prom.NewRegistry(component, prom.Build{Version: "0.3.0", Revision: "9be1c52"}, append(more, c)...)
		srv := httptest.NewServer(prom.Handler(reg, slog.New(slog.DiscardHandler)))
		t.Cleanup(srv.Close)
		h.targets[instance] = srv.Listener.Addr().String()
	}
	var agents []*prom.Agent
	for n := range 2 {
		a := prom.NewAgent(func() *collector.AgentSnapshot { return h.agent(n) }, prom.Options{})
		agents = append(agents, a)
		serve(fmt.Sprintf("gpu-%02d:9400", n+1), names.Agent, a, prom.Node(fmt.Sprintf("gpu-%02d", n+1)))
	}
	serve(hallJob+":9402", names.Master, prom.NewMaster(h.master, prom.Options{}))
	serve("planner:9412", names.Planner, prom.NewPlanner(h.fabric, prom.Options{}))
	for n := range 2 {
		serve(fmt.Sprintf("gpu-%02d:9413", n+1), names.Supervisor, prom.NewSupervisor(func() prom.Supervision { return supervisionOf(n) }, prom.Options{}))
	}
	go func() {
		for tick := time.NewTicker(100 * time.Millisecond); ; {
			select {
			case <-t.Context().Done():
				tick.Stop()
				return
			case <-tick.C:
				h.collectives(agents)
			}
		}
	}()
	return h
}

// supervisionOf is what the supervisor of a host of a job on two machines knows; the first one's coordinates.
func supervisionOf(host int) prom.Supervision {
	s := prom.Supervision{Job: hallJob, Heard: true, Ranks: map[string]int{"running": 8, "exited": 0}}
	if host == 0 {
		s.Coordination = &prom.Coordination{
			Attempts: 1, Needed: 2, Hosts: map[string]int{"running": 2, "standby": 1, "silent": 0, "excluded": 0}, Connections: 3, Joined: 3,
			Refused: map[string]uint64{"handshake": 0, "certificate": 0},
		}
	}
	return s
}

// collectives are those of a tenth of a second.
func (h *hall) collectives(agents []*prom.Agent) {
	step := uint64(h.seconds() * 10)
	for n, a := range agents {
		for rank := range int32(8) {
			ms := time.Duration(2000+100*((step+uint64(rank))%7)) * time.Microsecond
			now := time.Since(h.began).Nanoseconds()
			a.Collective(&collector.Collective{
				Job: hallJob, Comm: "dp0", CommID: 7, Rank: int32(n)*8 + rank, Size: 16, Kind: record.AllReduce, Seq: step, Bytes: 64 << 20,
				Enqueued: now, Started: now, Ended: now + int64(ms), Wait: int64(ms) / 5, Transfer: int64(ms) * 4 / 5,
			})
		}
	}
}

func (h *hall) seconds() float64 { return time.Since(h.began).Seconds() }

// since is for how long it has been broken, in seconds.
func (h *hall) since() float64 {
	at := h.broken.Load()
	if at == 0 {
		return 0
	}
	return time.Since(time.Unix(0, at)).Seconds()
}

// wave moves a little around a value.
func (h *hall) wave(around, by float64, phase int) *float64 {
	v := around + by*float64((int(h.seconds()*2)+phase*3)%7-3)/3
	return &v
}

func (h *hall) count(aSecond float64) *float64 { v := aSecond * h.seconds(); return &v }

func (h *hall) agent(n int) *collector.AgentSnapshot {
	s, now := h.seconds(), time.Now()
	tcp, rdma := h.transports(n)
	return &collector.AgentSnapshot{
		Node: fmt.Sprintf("gpu-%02d", n+1), At: now,
		Jobs: []collector.AgentJob{{
			Job: hallJob, Ranks: map[diagnosis.ProcState]int{diagnosis.ProcRunning: 8}, GPUs: 8, Step: uint64(10 * s), Records: uint64(2000 * s), GPUClockErrorNs: 2800,
			Comms:       []collector.AgentComm{{Name: "dp0", Members: 8, OpenMembers: int(s) % 3, OldestOpen: 0.002, Finished: uint64(80 * s)}},
			Transports:  []collector.AgentTransport{tcp, rdma},
			Connections: h.connections(n), RanksOnGPU: map[int]int{0: 1, 1: 1, 2: 1, 3: 1, 4: 1, 5: 1, 6: 1, 7: 1},
		}},
		Sources: []collector.SourceStatus{
			{Name: "recorder", Up: true, Duration: 2 * time.Millisecond}, {Name: "nvml", Up: true, Duration: 40 * time.Millisecond},
			{Name: "rdma", Up: true, Duration: 12 * time.Millisecond}, {Name: "ebpf", Up: true, Duration: 3 * time.Millisecond},
		},
		GPUs: h.gpus(n), NICs: h.nics(n),
		Probes: &collector.Probes{Libraries: 1, Processes: 8, Watched: 8, Calls: uint64(160 * s), PointToPoint: uint64(40 * s)},
		Master: []collector.StreamStatus{{Job: hallJob, Connected: true, Reports: uint64(10 * s), JobClock: true, ClockError: 40 * time.Microsecond}},
	}
}

func (h *hall) transports(n int) (shm, rdma collector.AgentTransport) {
	s := uint64(h.seconds())
	shm = collector.AgentTransport{Transport: record.TransportSHM, Connections: 14, Outstanding: 4096, ConnTotals: collector.ConnTotals{Windows: [record.NumCauses]uint64{900 * s}}}
	rdma = collector.AgentTransport{Transport: record.TransportRDMA, Connections: 16, Outstanding: 1 << 20, ConnTotals: collector.ConnTotals{Windows: [record.NumCauses]uint64{400 * s, s}}}
	if since := h.since(); since > 0 && n == 1 {
		rdma.Broken, rdma.Switches, rdma.Resent = 2, 2, 3<<20
	}
	return shm, rdma
}

func (h *hall) connections(n int) []collector.ConnDetail {
	var all []collector.ConnDetail
	for i := range 4 {
		c := collector.ConnDetail{
			ID: fmt.Sprintf("%d-%d.0", n*8+i, 3+i), Comm: "dp0", Rank: int32(n*8 + i), Peer: int32((n*8 + i + 8) % 16), PeerWorld: -1,
			BytesPerSec: *h.wave(4.1e10, 2e9, i), LatencyNs: int64(*h.wave(12500, 900, i)), Windows: uint64(100 * h.seconds()),
			Conn: collector.Conn{Transport: record.TransportRDMA, QP: uint64(284 + i), PeerQP: uint32(301 + i), Address: fmt.Sprintf("10.0.%d.7", i), NIC: fmt.Sprintf("mlx5_%d", i), Port: 1, Rail: i + 1, Name: fmt.Sprintf("mlx5_%d/1->mlx5_%d/1", i, i)},
		}
		all = append(all, c)
	}
	return all
}

func (h *hall) gpus(n int) *collector.GPUs {
	v := func(x float64) *float64 { return &x }
	g := &collector.GPUs{DriverVersion: "580.95.05", ProbedAt: 1, ProbeNs: 42_000_000}
	for i := range 8 {
		power := diagnosis.ThrottlePowerCap
		gpu := collector.GPU{
			Index: i, UUID: fmt.Sprintf("GPU-%08x-%04x", 0x51a7c0de+i*7919, n), Model: "NVIDIA H200", BusID: fmt.Sprintf("00000000:%02X:00.0", 0x18+i*0x10),
			Temperature: h.wave(58+float64(i), 1, i), MemoryTemperature: h.wave(66+float64(i), 1, i), Power: h.wave(640, 20, i), PowerLimit: v(700), Energy: h.count(640),
			SMClock: h.wave(1.95e9, 1e7, i), MemoryClock: v(3.201e9), Utilization: h.wave(0.96, 0.03, i), MemoryUsed: v(float64(118+i) * (1 << 30)), MemoryTotal: v(141 << 30),
			PCIeReplays: v(0), PCIeGeneration: v(5), PCIeWidth: v(16), PCIeMaxWidth: v(16),
			Corrected: collector.ECC{Volatile: v(0), Aggregate: v(2)}, Uncorrected: collector.ECC{Volatile: v(0), Aggregate: v(0)},
			RowsCorrected: v(0), RowsUncorrected: v(0), RemapPending: v(0), RemapFailure: v(0), Throttle: &power, PIDs: []int32{int32(4000 + i)},
		}
		for l := range 18 {
			gpu.Links = append(gpu.Links, collector.NVLink{Link: l, Up: true, CRC: v(0), Replays: v(0), Recoveries: v(0)})
		}
		if since := h.since(); since > 0 && n == 1 && i == 3 {
			gpu = collector.GPU{Index: i, UUID: gpu.UUID, Model: gpu.Model, Lost: true, LostAt: 1, Xids: []collector.Xid{{Code: 79, Count: 1, At: 1}}}
		} else if n == 1 && i == 6 { // one that counts an application's mistake from the start: it ends nobody else
			gpu.Xids = []collector.Xid{{Code: 31, Count: uint64(h.seconds()/20) + 1, At: 1}}
		}
		g.GPUs = append(g.GPUs, gpu)
	}
	return g
}

func (h *hall) nics(n int) *collector.NICs {
	v := func(x float64) *float64 { return &x }
	nics := &collector.NICs{ProbedAt: 1, ProbeNs: 12_000_000}
	for i := range 4 {
		lost, marks := 0.0, 2*h.seconds()
		p := collector.NICPort{
			Device: fmt.Sprintf("mlx5_%d", i), Port: 1, Layer: "Ethernet", BusID: fmt.Sprintf("0000:%02x:00.0", 0x1a+i*0x10), Model: "MT4129", Firmware: "28.39.1002",
			State: "ACTIVE", PhysicalState: "LinkUp", Up: true, Rate: v(50e9), Links: []collector.NICLink{{NetDev: fmt.Sprintf("ens%dnp0", i+1), Up: true}},
			ReceivedBytes: h.count(3.8e10 + 1e9*float64(i)), TransmittedBytes: h.count(3.9e10 + 1e9*float64(i)), ReceivedPackets: h.count(9.4e6), TransmittedPackets: h.count(9.5e6), TransmitWaits: h.count(40),
		}
		if since := h.since(); since > 0 && n == 0 && i == 2 {
			p.State, p.PhysicalState, p.Up, p.Flaps = "DOWN", "Polling", false, 1
			p.Links[0].Up, p.Links[0].Flaps = false, 1
		} else if since > 0 && n == 0 && i == 1 {
			lost, marks = 120*since, marks+900*since
			p.ReadErrors = uint64(since)
		}
		p.Retransmissions = []collector.NICCounter{{Name: "out_of_sequence", Value: math.Floor(lost)}, {Name: "packet_seq_err", Value: math.Floor(lost / 2)}}
		p.Congestion = []collector.NICCounter{{Name: "np_cnp_sent", Value: math.Floor(marks)}, {Name: "rp_cnp_handled", Value: math.Floor(marks / 2)}}
		p.Errors = []collector.NICCounter{{Name: "symbol_error", Value: math.Floor(lost / 10)}}
		nics.Ports = append(nics.Ports, p)
	}
	return nics
}

func (h *hall) master() *collector.MasterSnapshot {
	now := time.Now()
	s := &collector.MasterSnapshot{
		Job: hallJob, At: now, WorldSize: 16, Step: uint64(10 * h.seconds()), Ranks: map[diagnosis.ProcState]int{diagnosis.ProcRunning: 16},
		Agents: []collector.AgentStatus{
			{Node: "gpu-01", Connected: true, LastSeen: now, Ranks: 8, MapError: 40 * time.Microsecond}, {Node: "gpu-02", Connected: true, LastSeen: now, Ranks: 8, MapError: 55 * time.Microsecond},
		},
		Diagnoses: uint64(4 * h.seconds()), DiagnosisNs: 180_000,
	}
	if since := time.Duration(h.since() * 1e9); since > 2*time.Second {
		s.Opened[diagnosis.NoncommunicationHang], s.Confirmed[diagnosis.NoncommunicationHang] = 1, 1
		s.Incidents = []collector.Incident{{
			ID: hallJob + "-1-1", Opened: now.Add(1500*time.Millisecond - since), Confirmed: now.Add(2*time.Second - since), TraceID: [16]byte{0x4b, 0xf9, 0x2f},
			Verdict: diagnosis.Verdict{
				Class: diagnosis.NoncommunicationHang, Level: diagnosis.Confirmed, CommName: "dp0", Since: now.Add(-since).UnixNano(),
				Culprits: []diagnosis.Culprit{{Kind: diagnosis.CulpritRank, Rank: 11, Peer: -1, Node: "gpu-02", Reason: "gpu_lost"}},
			},
		}}
	}
	return s
}

// fabric is of eight leaves and four spines, its plan even; when broken, one link is dead and one loses.
func (h *hall) fabric() prom.Fabric {
	f := prom.Fabric{Moves: map[string]uint64{"dead": 0, "lossy": 0, "even": uint64(h.seconds() / 10)}, Refused: map[string]uint64{"certificate": 0, "malformed": 0}, Jobs: 1, Streams: 16, Probers: 8}
	for leaf := range 8 {
		for spine := range 4 {
			for _, up := range []bool{true, false} {
				l := prom.FabricLink{
					Leaf: fmt.Sprintf("leaf%d", leaf), Spine: fmt.Sprintf("spine%d", spine), Up: up, Rate: 50e9, Planned: 48e9, Measured: *h.wave(46e9, 1e9, leaf+spine), Lanes: 4, Sent: uint64(20 * h.seconds()),
				}
				if since := h.since(); since > 0 && leaf == 2 && spine == 1 && up {
					l.Dead, l.Loss, l.Planned, l.Measured, l.Lanes, l.Lost = true, 1, 0, 0, 0, uint64(20*since)
				} else if since > 0 && leaf == 5 && spine == 3 && !up {
					l.Loss, l.Lost = 0.02, uint64(since)
					l.Segments, l.SegmentsLost, l.Suspected = uint64(4e6*h.seconds()), uint64(8e4*since), true
				} else if since > 0 && leaf == 2 && up {
					l.Planned, l.Lanes = 64e9, 5
				}
				f.Links = append(f.Links, l)
			}
		}
	}
	if h.since() > 0 {
		f.Moves["dead"] = 4
	}
	return f
}
