package prom_test

import (
	"bytes"
	"compress/gzip"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"math"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	dto "github.com/prometheus/client_model/go"
	"github.com/prometheus/common/expfmt"

	"github.com/lockstep-ccl/lockstep/collector"
	"github.com/lockstep-ccl/lockstep/diagnosis"
	"github.com/lockstep-ccl/lockstep/exporters/names"
	"github.com/lockstep-ccl/lockstep/exporters/prom"
	"github.com/lockstep-ccl/lockstep/record"
)

var update = flag.Bool("update", false, "rewrite golden files")

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

// While a NIC's driver hangs, states and counters are not told; links are.
func TestUnresponsiveNICDriver(t *testing.T) {
	s := agentSnapshot()
	s.NICs.UnresponsiveAt = 1
	_, reg := newAgent(t, s, prom.Options{})
	families, err := reg.Gather()
	if err != nil {
		t.Fatal(err)
	}
	seen := map[string]float64{}
	for _, f := range families {
		seen[f.GetName()] = f.Metric[0].GetGauge().GetValue()
	}
	if seen[names.NICDriverUnresponsive.Name] != 1 {
		t.Error("the driver is not unresponsive")
	}
	for _, m := range []*names.Metric{names.NICInfo, names.NICPortFlaps, names.NICLinkUp, names.NICLinkFlaps, names.NICReadErrors} {
		if _, ok := seen[m.Name]; !ok {
			t.Errorf("%s is missing", m)
		}
	}
	for _, m := range []*names.Metric{names.NICPortUp, names.NICPortState, names.NICPortRate, names.NICErrors, names.NICRetransmissions, names.NICReceived} {
		if _, ok := seen[m.Name]; ok {
			t.Errorf("%s is told", m)
		}
	}
}

// While the driver hangs, what it said before is not told as if it were true;
// what is counted here is.
func TestUnresponsiveGPUDriver(t *testing.T) {
	s := agentSnapshot()
	s.GPUs.UnresponsiveAt = 1
	_, reg := newAgent(t, s, prom.Options{})
	families, err := reg.Gather()
	if err != nil {
		t.Fatal(err)
	}
	seen := map[string]bool{}
	for _, f := range families {
		seen[f.GetName()] = true
		if f.GetName() == names.GPUDriverUnresponsive.Name && f.Metric[0].GetGauge().GetValue() != 1 {
			t.Error("the driver is not unresponsive")
		}
	}
	for _, m := range []*names.Metric{names.GPUDriverUnresponsive, names.GPUInfo, names.GPUXids, names.GPUXidsDropped} {
		if !seen[m.Name] {
			t.Errorf("%s is missing", m)
		}
	}
	for _, m := range []*names.Metric{names.GPUUp, names.GPUTemperature, names.GPUThrottled, names.GPUNVLinkUp, names.GPUProcesses} {
		if seen[m.Name] {
			t.Errorf("%s is told", m)
		}
	}
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

func newAgent(t testing.TB, s *collector.AgentSnapshot, o prom.Options) (*prom.Agent, *prometheus.Registry) {
	t.Helper()
	a := prom.NewAgent(func() *collector.AgentSnapshot { return s }, o)
	reg := prometheus.NewPedanticRegistry()
	reg.MustRegister(a)
	return a, reg
}

func TestAgentGolden(t *testing.T) {
	a, reg := newAgent(t, agentSnapshot(), prom.Options{})
	for i := range uint64(100) {
		a.Collective(allReduce(i, time.Duration(i+1)*50*time.Microsecond))
	}
	failed := allReduce(101, time.Second)
	failed.Result, failed.Kind = record.ResultPeerLost, record.AllGather
	a.Collective(failed)
	open := allReduce(102, 0)
	open.Ended = 0
	a.Collective(open)
	golden(t, reg, "agent.prom")
}

func TestMasterGolden(t *testing.T) {
	reg := prometheus.NewPedanticRegistry()
	reg.MustRegister(prom.NewMaster(masterSnapshot, prom.Options{}))
	golden(t, reg, "master.prom")
}

func TestPlannerGolden(t *testing.T) {
	reg := prometheus.NewPedanticRegistry()
	reg.MustRegister(prom.NewPlanner(fabric, prom.Options{}))
	golden(t, reg, "planner.prom")
	capped := prometheus.NewPedanticRegistry()
	capped.MustRegister(prom.NewPlanner(fabric, prom.Options{SeriesPerFamily: 1}))
	if n, err := testutil.GatherAndCount(capped, names.FabricLinkUp.Name); n != 1 || err != nil {
		t.Errorf("%d links are exported where one is allowed, %v", n, err)
	}
}

func TestSupervisorGolden(t *testing.T) {
	reg := prometheus.NewPedanticRegistry()
	reg.MustRegister(prom.NewSupervisor(supervision, prom.Options{}))
	golden(t, reg, "supervisor.prom")
	other := prometheus.NewPedanticRegistry()
	other.MustRegister(prom.NewSupervisor(func() prom.Supervision { return prom.Supervision{Job: "llama"} }, prom.Options{}))
	if n, err := testutil.GatherAndCount(other, names.CoordinatorRefused.Name, names.CoordinatorHosts.Name); n != 0 || err != nil {
		t.Errorf("a supervisor that does not coordinate tells of %d refusals and hosts, %v", n, err)
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
			{Leaf: "leaf0", Spine: "spine1", Up: true, Rate: 1e9, Planned: 5e8, Measured: 4e8, Lanes: 3, Sent: 1000, Lost: 10, Loss: 0.01},
			{Leaf: "leaf0", Spine: "spine1", Dead: true, Loss: 1, Index: 1, Rate: 1e9},
		},
		Moves: map[string]uint64{"dead": 3, "lossy": 0}, Refused: map[string]uint64{"certificate": 1}, Jobs: 2, Streams: 4, Probers: 8,
	}
}

// golden compares what reg exposes with testdata/name, and lints it as
// promtool does (and with promtool itself when it is installed).
func golden(t *testing.T, reg *prometheus.Registry, name string) {
	t.Helper()
	text := []byte(scrape(t, prom.Handler(reg, slog.New(slog.DiscardHandler)), nil))
	path := filepath.Join("testdata", name)
	if *update {
		if err := os.WriteFile(path, text, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(string(want), string(text)); diff != "" {
		t.Errorf("-%s +exposed (accept with -update):\n%s", path, diff)
	}
	problems, err := testutil.GatherAndLint(reg)
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range problems {
		t.Errorf("lint: %s: %s", p.Metric, p.Text)
	}
	if promtool, err := exec.LookPath("promtool"); err == nil {
		cmd := exec.Command(promtool, "check", "metrics")
		cmd.Stdin = bytes.NewReader(text)
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Errorf("promtool check metrics: %v\n%s", err, out)
		}
	}
}

func TestEveryAgentAndMasterMetricIsExposed(t *testing.T) {
	a, agents := newAgent(t, agentSnapshot(), prom.Options{})
	a.Collective(allReduce(1, time.Millisecond))
	masters := prometheus.NewPedanticRegistry()
	masters.MustRegister(prom.NewMaster(masterSnapshot, prom.Options{}), prom.State(func() string { return "" }),
		prom.Certificates(func() []prom.Certificate { return []prom.Certificate{{Expires: time.Unix(1, 0)}} }),
		prom.Crowded(names.ListenerAgents, func() uint64 { return 0 }), prom.Web(turnedAway{}))
	agents.MustRegister(prom.Node("node0")) // beside it, as an agent has it
	planners := prometheus.NewPedanticRegistry()
	planners.MustRegister(prom.NewPlanner(fabric, prom.Options{}))
	supervisors := prometheus.NewPedanticRegistry()
	supervisors.MustRegister(prom.NewSupervisor(supervision, prom.Options{}))
	_, capped := newAgent(t, agentSnapshot(), prom.Options{SeriesPerFamily: 1}) // for what is counted then only
	exposed := map[string]bool{}
	for _, reg := range []*prometheus.Registry{agents, masters, planners, supervisors, capped, prom.NewRegistry(names.Agent, prom.Build{})} {
		families, err := reg.Gather()
		if err != nil {
			t.Fatal(err)
		}
		for _, f := range families {
			exposed[f.GetName()] = true
		}
	}
	for _, m := range names.Metrics() {
		if m == names.SpansDropped || m == names.SpansExported || m == names.TraceEventsDropped { // the tracer's
			continue
		}
		if m.From != names.Remediator && m.From != names.Preflight && !exposed[m.Name] {
			t.Errorf("%s is defined and never exposed", m)
		}
	}
}

func TestNoSnapshotYet(t *testing.T) {
	_, reg := newAgent(t, nil, prom.Options{})
	reg.MustRegister(noOverflow{prom.NewMaster(func() *collector.MasterSnapshot { return nil }, prom.Options{})})
	if _, err := reg.Gather(); err != nil {
		t.Error(err)
	}
}

// noOverflow hides lockstep_series_overflow_total, which every component has
// once, so that two components fit in one registry.
type noOverflow struct{ c prometheus.Collector }

func (n noOverflow) Describe(ch chan<- *prometheus.Desc) {
	n.filter(func(all chan *prometheus.Desc) { n.c.Describe(all) }, func(d *prometheus.Desc) { ch <- d })
}

func (n noOverflow) filter(produce func(chan *prometheus.Desc), use func(*prometheus.Desc)) {
	all := make(chan *prometheus.Desc)
	go func() { produce(all); close(all) }()
	for d := range all {
		if !strings.Contains(d.String(), names.SeriesOverflow.Name) {
			use(d)
		}
	}
}

func (n noOverflow) Collect(ch chan<- prometheus.Metric) {
	all := make(chan prometheus.Metric)
	go func() { n.c.Collect(all); close(all) }()
	for m := range all {
		if !strings.Contains(m.Desc().String(), names.SeriesOverflow.Name) {
			ch <- m
		}
	}
}

func TestExemplarsOnlyOnAnomaliesAndRateBounded(t *testing.T) {
	a, reg := newAgent(t, agentSnapshot(), prom.Options{ExemplarEvery: time.Second})
	a.Collective(allReduce(1, time.Millisecond))
	if got := exemplars(t, reg); len(got) != 0 {
		t.Errorf("healthy collective has exemplars %v", got)
	}
	for seq := uint64(2); seq < 10; seq++ { // within one millisecond of each other
		c := allReduce(seq, 50*time.Millisecond+time.Duration(seq))
		c.Anomalous, c.Traced = true, true
		a.Collective(c)
	}
	trace := collector.TraceID("llama", 7, record.AllReduce, 2)
	want := []string{fmt.Sprintf("%x", trace[:])}
	if diff := cmp.Diff(want, exemplars(t, reg)); diff != "" {
		t.Errorf("-want +got:\n%s", diff)
	}
	text := scrape(t, prom.Handler(reg, slog.New(slog.DiscardHandler)), http.Header{"Accept": {"application/openmetrics-text;version=1.0.0"}})
	if !strings.Contains(text, `# {trace_id="`+want[0]+`"} 0.05`) {
		t.Errorf("OpenMetrics carries no exemplar:\n%s", text)
	}
}

func exemplars(t *testing.T, g prometheus.Gatherer) []string {
	t.Helper()
	families, err := g.Gather()
	if err != nil {
		t.Fatal(err)
	}
	var ids []string
	for _, f := range families {
		for _, m := range f.Metric {
			for _, e := range m.GetHistogram().GetExemplars() {
				ids = append(ids, e.Label[0].GetValue())
			}
		}
	}
	return ids
}

// An agent that is started again finds in the recorders what its predecessor has counted.
func TestFormerCollectivesAreNotCountedAgain(t *testing.T) {
	a, reg := newAgent(t, agentSnapshot(), prom.Options{})
	c := allReduce(1, time.Millisecond)
	c.Former = true
	a.Collective(c)
	if n, err := testutil.GatherAndCount(reg, names.Collectives.Name); err != nil || n != 0 {
		t.Errorf("%d series, %v", n, err)
	}
}

func TestSeriesCapCountsWhatItRefuses(t *testing.T) {
	s := agentSnapshot()
	s.Jobs[0].Comms = nil
	for i := range 10 {
		s.Jobs[0].Comms = append(s.Jobs[0].Comms, collector.AgentComm{Name: fmt.Sprint("left", i)}, collector.AgentComm{Name: fmt.Sprint("comm", i), Members: 1})
	}
	a, reg := newAgent(t, s, prom.Options{SeriesPerFamily: 6})
	for i := range uint64(10) {
		for range 3 {
			c := allReduce(1, time.Millisecond)
			c.CommID, c.Comm = i, fmt.Sprint("comm", i)
			a.Collective(c)
		}
	}
	for range 2 { // scraping again counts nothing again
		count := map[string]int{}
		overflow := map[string]float64{}
		families, err := reg.Gather()
		if err != nil {
			t.Fatal(err)
		}
		for _, f := range families {
			count[f.GetName()] = len(f.Metric)
			if f.GetName() == names.SeriesOverflow.Name {
				for _, m := range f.Metric {
					overflow[m.Label[0].GetValue()] = m.Counter.GetValue()
				}
			}
		}
		for _, m := range []*names.Metric{names.CommMembers, names.CollectiveDuration, names.Collectives, names.CollectiveBytes} {
			if count[m.Name] != 6 || overflow[m.Name] != 4 {
				t.Errorf("%s: %d series and %v refused, want 6 and 4", m, count[m.Name], overflow[m.Name])
			}
		}
	}
}

func TestSeriesOfAGoneJobExpireAndMakeRoom(t *testing.T) {
	now := time.Unix(1_700_000_000, 0)
	s := agentSnapshot()
	a, reg := newAgent(t, s, prom.Options{SeriesPerFamily: 6, IdleExpiry: time.Minute, Now: func() time.Time { return now }})
	s.Jobs[0].Comms = nil
	for i := range uint64(6) {
		c := allReduce(1, time.Millisecond)
		c.CommID, c.Comm = i, fmt.Sprint("comm", i)
		a.Collective(c)
		s.Jobs[0].Comms = append(s.Jobs[0].Comms, collector.AgentComm{Name: c.Comm, Members: 1})
	}
	next := allReduce(1, time.Millisecond)
	next.Job, next.Comm = "gpt", "dp"
	a.Collective(next)
	series := func() int {
		n, err := testutil.GatherAndCount(reg, names.CollectiveDuration.Name, names.Collectives.Name)
		if err != nil {
			t.Fatal(err)
		}
		return n
	}
	if n := series(); n != 12 {
		t.Fatalf("%d series, want 12", n)
	}
	now = now.Add(time.Hour)
	if n := series(); n != 12 {
		t.Errorf("%d series while the job hangs, want all 12", n)
	}
	s.Jobs[0].Comms[0].Members = 0
	now = now.Add(time.Hour)
	if n := series(); n != 10 {
		t.Errorf("%d series after a communicator was left, want 10", n)
	}
	c := allReduce(1, time.Millisecond)
	c.CommID, c.Comm = 6, "comm6"
	a.Collective(c)
	if n := series(); n != 12 {
		t.Errorf("%d series with a communicator in its place, want 12", n)
	}
	s.Jobs = nil
	now = now.Add(30 * time.Second)
	if n := series(); n != 12 {
		t.Errorf("%d series before the expiry, want 12", n)
	}
	now = now.Add(time.Minute)
	if n := series(); n != 0 {
		t.Errorf("%d series after the expiry, want 0", n)
	}
	a.Collective(next)
	if n := series(); n != 2 {
		t.Errorf("%d series of the next job, want 2", n)
	}
}

func TestHostileNamesDoNotBreakAScrape(t *testing.T) {
	s := agentSnapshot()
	s.Jobs = append(s.Jobs, collector.AgentJob{Job: "a\xffb", Comms: []collector.AgentComm{{Name: "\x00\n\"\\", Members: 1}}},
		collector.AgentJob{Job: "a\xfeb", Comms: []collector.AgentComm{{Name: "\x00\n\"\\", Members: 1}}}, collector.AgentJob{})
	a, reg := newAgent(t, s, prom.Options{})
	for _, name := range []string{"a\xffb", "a\xfeb", ""} {
		c := allReduce(1, time.Millisecond)
		c.Job, c.Comm, c.Kind, c.Result = name, name, 200, 200
		c.Ended = c.Started - 5
		a.Collective(c)
	}
	if _, err := reg.Gather(); err != nil {
		t.Error(err)
	}
}

func TestDetectionLatencyIsCountedOnceAnIncident(t *testing.T) {
	s := masterSnapshot()
	m := prom.NewMaster(func() *collector.MasterSnapshot { return s }, prom.Options{})
	count := func() (n uint64) {
		reg := prometheus.NewRegistry()
		reg.MustRegister(m)
		families, err := reg.Gather()
		if err != nil {
			t.Fatal(err)
		}
		for _, f := range families {
			if f.GetName() == names.IncidentLatency.Name {
				for _, m := range f.Metric {
					n += m.Histogram.GetSampleCount()
				}
			}
		}
		return n
	}
	if a, b := count(), count(); a != 2 || b != 2 {
		t.Errorf("counted %d then %d incidents, want 2 and 2", a, b)
	}
	s = masterSnapshot()
	s.At = s.At.Add(time.Second)
	s.Incidents[1].Confirmed, s.Incidents[1].Verdict.Since = s.At, s.At.Add(-time.Second).UnixNano()
	if n := count(); n != 3 {
		t.Errorf("counted %d incidents after another was confirmed, want 3", n)
	}
}

func TestHandlerNegotiates(t *testing.T) {
	a, agents := newAgent(t, agentSnapshot(), prom.Options{})
	a.Collective(allReduce(1, time.Millisecond))
	h := prom.Handler(agents, slog.New(slog.DiscardHandler))

	om := scrape(t, h, http.Header{"Accept": {"application/openmetrics-text;version=1.0.0"}})
	for _, want := range []string{"# EOF", "# UNIT lockstep_collective_duration_seconds seconds"} {
		if !strings.Contains(om, want) {
			t.Errorf("OpenMetrics lacks %q", want)
		}
	}
	if strings.Contains(om, "_created") {
		t.Error("OpenMetrics has created samples")
	}

	proto := httptest.NewRequest(http.MethodGet, "/metrics", nil)
	proto.Header.Set("Accept", `application/vnd.google.protobuf;proto=io.prometheus.client.MetricFamily;encoding=delimited`)
	rec := httptest.NewRecorder()
	h.ServeHTTP(rec, proto)
	dec := expfmt.NewDecoder(rec.Body, expfmt.ResponseFormat(rec.Header()))
	native := false
	for {
		var f dto.MetricFamily
		if err := dec.Decode(&f); err == io.EOF {
			break
		} else if err != nil {
			t.Fatal(err)
		}
		if f.GetName() == names.CollectiveDuration.Name {
			native = f.Metric[0].Histogram.Schema != nil && f.Metric[0].Histogram.GetSchema() == 3 && len(f.Metric[0].Histogram.PositiveSpan) > 0
		}
	}
	if !native {
		t.Error("protobuf carries no native histogram of factor 1.1")
	}

	zipped := httptest.NewRequest(http.MethodGet, "/metrics", nil)
	zipped.Header.Set("Accept-Encoding", "gzip")
	rec = httptest.NewRecorder()
	h.ServeHTTP(rec, zipped)
	if z, err := gzip.NewReader(rec.Body); err != nil {
		t.Errorf("not gzip: %v", err)
	} else if text, err := io.ReadAll(z); err != nil || !bytes.Contains(text, []byte(names.Collectives.Name)) {
		t.Errorf("gzip body: %v", err)
	}
}

func scrape(t *testing.T, h http.Handler, header http.Header) string {
	t.Helper()
	req := httptest.NewRequest(http.MethodGet, "/metrics", nil)
	req.Header = header
	rec := httptest.NewRecorder()
	h.ServeHTTP(rec, req)
	if rec.Code != http.StatusOK {
		t.Fatalf("status %d: %s", rec.Code, rec.Body)
	}
	return rec.Body.String()
}

func TestRegistryHasBuildInfoAndRuntime(t *testing.T) {
	reg := prom.NewRegistry(names.Master, prom.Build{Version: "1.2.3", Revision: "abc"})
	for _, name := range []string{names.BuildInfo.Name, "go_goroutines", "process_resident_memory_bytes"} {
		if n, err := testutil.GatherAndCount(reg, name); err != nil || n != 1 {
			t.Errorf("%s: %d series, %v", name, n, err)
		}
	}
}

func TestBuildersRefuseAnotherType(t *testing.T) {
	defer func() {
		if recover() == nil {
			t.Error("a counter was built from a gauge")
		}
	}()
	prom.CounterVec(names.DryRun)
}

func TestScrapesWhileFolding(t *testing.T) {
	now := time.Now()
	s := agentSnapshot()
	a, reg := newAgent(t, s, prom.Options{IdleExpiry: time.Nanosecond, Now: func() time.Time { return now }})
	var wg sync.WaitGroup
	stop := make(chan struct{})
	wg.Go(func() {
		for i := uint64(0); ; i++ {
			select {
			case <-stop:
				return
			default:
			}
			c := allReduce(i, time.Millisecond)
			c.Job, c.CommID, c.Anomalous = fmt.Sprint(i%3), i%7, i%5 == 0
			a.Collective(c)
		}
	})
	for range 50 {
		if _, err := reg.Gather(); err != nil {
			t.Fatal(err)
		}
	}
	close(stop)
	wg.Wait()
}

// BenchmarkCollective is one Observe set: two native histograms, two counters.
// The budget is 300 ns, and no allocation.
func BenchmarkCollective(b *testing.B) {
	for _, bench := range []struct {
		name      string
		comms     uint64
		anomalous bool
	}{{"healthy", 1, false}, {"healthy_48_communicators", 48, false}, {"anomalous", 1, true}} {
		b.Run(bench.name, func(b *testing.B) {
			a, _ := newAgent(b, agentSnapshot(), prom.Options{})
			var cs [1024]collector.Collective
			for i := range cs {
				cs[i] = *allReduce(uint64(i), time.Duration(20+i*7)*time.Microsecond)
				cs[i].CommID = uint64(i) % bench.comms * 0x1234567
				cs[i].Comm = fmt.Sprint("dp", uint64(i)%bench.comms/8)
				cs[i].Kind = record.AllReduce + record.CollKind(i%4)
				cs[i].Anomalous = bench.anomalous
				a.Collective(&cs[i])
			}
			b.ReportAllocs()
			for i := 0; b.Loop(); i++ {
				a.Collective(&cs[i&1023])
			}
		})
	}
}
