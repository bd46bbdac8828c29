package prom

import (
	"strconv"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/lockstep-ccl/lockstep/collector"
	"github.com/lockstep-ccl/lockstep/exporters/internal/label"
	"github.com/lockstep-ccl/lockstep/exporters/names"
	"github.com/lockstep-ccl/lockstep/record"
)

// Agent exports one agent. As a collector.Sink it observes every collective
// that the agent folds; as a prometheus.Collector it publishes these and the
// agent's latest snapshot. It is safe for one folding goroutine and any number
// of scrapes.
type Agent struct {
	snapshot    func() *collector.AgentSnapshot
	families    *families
	collectives *collectives
}

var (
	_ prometheus.Collector = (*Agent)(nil)
	_ collector.Sink       = (*Agent)(nil)
)

// NewAgent returns an exporter of the snapshots that snapshot returns. It must
// return at once; nil means that there is none yet.
func NewAgent(snapshot func() *collector.AgentSnapshot, opts Options) *Agent {
	opts = opts.withDefaults(500)
	f := newFamilies(names.Agent, opts.SeriesPerFamily,
		names.CollectiveDuration, names.CollectiveWait, names.Collectives, names.CollectiveBytes,
		names.SpansDropped, names.SpansExported, names.TraceEventsDropped, names.NodeInfo)
	return &Agent{snapshot: snapshot, families: f, collectives: newCollectives(f, opts)}
}

// Collective counts c once it has ended. It keeps nothing of c.
func (a *Agent) Collective(c *collector.Collective) { a.collectives.observe(c) }

// Describe implements prometheus.Collector.
func (a *Agent) Describe(ch chan<- *prometheus.Desc) {
	a.families.Describe(ch)
	a.collectives.Describe(ch)
}

// Collect implements prometheus.Collector.
func (a *Agent) Collect(ch chan<- prometheus.Metric) {
	p := a.families.begin(ch)
	present := map[commName]bool{}
	if s := a.snapshot(); s != nil {
		for i := range s.Jobs {
			j := &s.Jobs[i]
			for _, c := range j.Comms {
				if c.Members > 0 {
					present[commName{valid(j.Job), valid(c.Name)}] = true
				}
			}
			sendJob(p, j)
		}
		for _, src := range s.Sources {
			if src.NoData {
				continue
			}
			p.send(names.SourceUp, boolean(src.Up), src.Name)
			p.send(names.SourceDuration, src.Duration.Seconds(), src.Name)
		}
		for _, f := range s.Fences {
			p.send(names.FenceProcesses, float64(f.Stopped), f.Job, "stopped")
			p.send(names.FenceProcesses, float64(f.Killed), f.Job, "killed")
			p.send(names.FenceProcesses, float64(f.Spared), f.Job, "spared")
			p.send(names.FenceProcesses, float64(f.Failed), f.Job, "failed")
			p.send(names.FenceLeases, float64(f.Leases), f.Job)
		}
		for _, r := range s.RefusedRecorders {
			p.send(names.RecordersRefused, float64(r.Count), r.Reason)
		}
		for _, m := range s.Master {
			p.send(names.StreamConnected, boolean(m.Connected), m.Job)
			p.send(names.StreamReports, float64(m.Reports), m.Job)
			p.send(names.StreamDropped, float64(m.Dropped), m.Job)
			p.send(names.StreamRetries, float64(m.Reconnect), m.Job)
			if m.JobClock {
				p.send(names.JobClockError, m.ClockError.Seconds(), m.Job)
				p.send(names.JobClockOffset, m.Correction.Seconds(), m.Job)
			}
		}
		if s.GPUs != nil {
			sendGPUs(p, s.GPUs)
		}
		if s.NICs != nil {
			sendNICs(p, s.NICs)
		}
		if s.Probes != nil {
			sendProbes(p, s.Probes)
		}
	}
	a.collectives.expire(present)
	a.collectives.Collect(ch)
	p.end()
}

func sendProbes(p *pass, s *collector.Probes) {
	p.send(names.ProbesActive, boolean(s.Missing == ""), s.Missing)
	if s.Missing != "" {
		return
	}
	p.send(names.ProbesLibraries, float64(s.Libraries))
	p.send(names.ProbesProcesses, float64(s.Processes))
	p.send(names.ProbesRanks, float64(s.Watched))
	p.send(names.ProbesUnidentified, float64(s.Unidentified))
	p.send(names.ProbesCalls, float64(s.Calls), "collective")
	p.send(names.ProbesCalls, float64(s.PointToPoint), "point_to_point")
	p.send(names.ProbesUnrecorded, float64(s.SampledOut), "sampled")
	p.send(names.ProbesUnrecorded, float64(s.RingFull), "ring_full")
	p.send(names.ProbesUnrecorded, float64(s.Unplaced), "unplaced")
	p.send(names.ProbesLost, float64(s.TableFull), "table_full")
	p.send(names.ProbesLost, float64(s.Unread), "unread")
}

func sendJob(p *pass, j *collector.AgentJob) {
	for _, state := range label.ProcStates {
		p.send(names.Ranks, float64(j.Ranks[state]), j.Job, label.ProcState(state))
	}
	for _, c := range j.Comms {
		if c.Members == 0 {
			continue // it was left, and takes no series from others
		}
		p.send(names.CommMembers, float64(c.Members), j.Job, c.Name)
		p.send(names.CommOpenMembers, float64(c.OpenMembers), j.Job, c.Name)
		p.send(names.CommOldestOpen, c.OldestOpen, j.Job, c.Name)
	}
	sendConnections(p, j)
	for _, t := range j.Transports {
		transport := t.Transport.String()
		p.send(names.Connections, float64(t.Connections), j.Job, transport)
		p.send(names.ConnOutstanding, float64(t.Outstanding), j.Job, transport)
		p.send(names.ConnBroken, float64(t.Broken), j.Job, transport)
		p.send(names.ConnSwitches, float64(t.Switches), j.Job, transport)
		p.send(names.ConnResent, float64(t.Resent), j.Job, transport)
		for cause := range record.Cause(record.NumCauses) {
			p.send(names.Windows, float64(t.Windows[cause]), j.Job, transport, cause.String())
		}
	}
	p.send(names.AgentStep, float64(j.Step), j.Job)
	p.send(names.RecorderRecords, float64(j.Records), j.Job)
	p.send(names.RecorderLost, float64(j.Lost), j.Job)
	p.send(names.RecorderOverflow, float64(j.TableOverflow), j.Job)
	p.send(names.ConnsWithoutHistory, float64(j.WithoutHistory), j.Job)
	for why, n := range j.RefusedConns {
		p.send(names.RankRefused, float64(n), j.Job, record.Refusal(why).String())
	}
	p.send(names.ArrivalsDropped, float64(j.DroppedArrivals), j.Job)
	for gpu, n := range j.RanksOnGPU {
		p.send(names.GPURanks, float64(n), j.Job, strconv.Itoa(gpu))
	}
	if j.GPUs > 0 {
		p.send(names.ClockError, seconds(j.GPUClockErrorNs), j.Job, names.ClockGPU)
	}
}

// sendConnections sends the connections that are published one by one.
func sendConnections(p *pass, j *collector.AgentJob) {
	for i := range j.Connections {
		c := &j.Connections[i]
		port, rail, qp, peer := "", "", "", ""
		if c.NIC != "" {
			port = strconv.Itoa(c.Port)
		}
		if c.Rail > 0 {
			rail = strconv.Itoa(c.Rail)
		}
		if c.QP != 0 {
			qp, peer = strconv.FormatUint(c.QP, 10), strconv.FormatUint(uint64(c.PeerQP), 10)
		}
		p.send(names.ConnInfo, 1, j.Job, c.ID, c.Comm, label.Rank(c.Rank), label.Rank(c.Peer), c.Transport.String(), c.NIC, port, rail, qp, peer, c.Address)
		p.send(names.ConnBandwidth, c.BytesPerSec, j.Job, c.ID)
		p.send(names.ConnLatency, float64(c.LatencyNs)/1e9, j.Job, c.ID)
		p.send(names.ConnSlow, float64(c.Slow), j.Job, c.ID)
	}
}
