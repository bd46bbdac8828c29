package web_test

import (
	"fmt"
	"testing"
	"time"

	"github.com/lockstep-ccl/lockstep/collector"
	"github.com/lockstep-ccl/lockstep/diagnosis"
	"github.com/lockstep-ccl/lockstep/exporters/web"
	"github.com/lockstep-ccl/lockstep/record"
)

// scene is a moment of a job of 16 ranks on two nodes: two replicas of pipelines of four, of pairs.
type scene struct {
	name   string
	status func() *collector.MasterSnapshot
	job    func() *collector.JobView
	says   []string
}

func scenes() []scene {
	at := time.Date(2026, 3, 4, 3, 12, 40, 0, time.UTC)
	base := func() *collector.MasterSnapshot {
		return &collector.MasterSnapshot{
			Job: "llama-70b", At: time.Now(), Attempt: 1, WorldSize: 16, Step: 48211, DiagnosisLast: 180 * time.Microsecond,
			Ranks: map[diagnosis.ProcState]int{diagnosis.ProcRunning: 16},
			Agents: []collector.AgentStatus{
				{Node: "gpu-01", Connected: true, LastSeen: time.Now(), Ranks: 8, MapError: 12 * time.Microsecond},
				{Node: "gpu-02", Connected: true, LastSeen: time.Now(), Ranks: 8, MapError: 14 * time.Microsecond},
			},
			Delay: []collector.DelayMatrix{ring("dp0", []int32{0, 4, 8, 12}, -1), ring("dp1", []int32{1, 5, 9, 13}, -1), ring("tp0", []int32{0, 1, 2, 3}, -1)},
		}
	}
	job := func(change func(*collector.JobView)) func() *collector.JobView {
		return func() *collector.JobView {
			v := &collector.JobView{At: time.Now(), Ranks: make([]collector.RankView, 16)}
			for i := range v.Ranks {
				v.Ranks[i] = collector.RankView{Node: fmt.Sprintf("gpu-%02d", i/8+1), PID: int32(4000 + i), Proc: diagnosis.ProcRunning, Seen: true, Step: 48211, Last: v.At.Add(-time.Millisecond)}
			}
			for _, c := range []struct {
				name  string
				world []int32
			}{{"world", []int32{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}}, {"dp0", []int32{0, 4, 8, 12}}, {"dp1", []int32{1, 5, 9, 13}}, {"tp0", []int32{0, 1, 2, 3}}} {
				v.Comms = append(v.Comms, collector.CommView{ID: uint64(len(v.Comms) + 1), Name: c.name, World: c.world, Least: 977, Most: 977})
			}
			if change != nil {
				change(v)
			}
			return v
		}
	}
	hang := func(closed bool) func() *collector.MasterSnapshot {
		return func() *collector.MasterSnapshot {
			s := base()
			onset := s.At.Add(-8 * time.Second)
			if closed {
				s.Attempt, onset = 2, s.At.Add(-4*time.Minute)
			}
			in := collector.Incident{
				ID: fmt.Sprintf("llama-70b-%d-1", at.UnixMilli()), Attempt: 1, Opened: onset.Add(900 * time.Millisecond), Confirmed: onset.Add(2300 * time.Millisecond), TraceID: [16]byte{0x5a, 0x17},
				Verdict: diagnosis.Verdict{
					Class: diagnosis.NoncommunicationHang, Level: diagnosis.Confirmed, CommName: "dp0", Coll: record.AllReduce, Seq: 978, Victims: 15, Since: onset.UnixNano(),
					Culprits: []diagnosis.Culprit{{Kind: diagnosis.CulpritRank, Rank: 8, Peer: -1, Node: "gpu-02", Reason: "process_stopped"}},
					Why:      []string{"3 of 4 members entered AllReduce #978 on dp0; rank 8 did not.", "rank 8 (pid 4008 on gpu-02) has been stopped for 8.0 s."},
					Chain:    []string{"rank 1 waits in AllReduce #978 on tp0 for rank 0", "rank 0 waits in AllReduce #978 on dp0 for rank 8"},
					Counter:  "rank 8 being continued and entering AllReduce #978 on dp0",
				},
				Notes: []collector.Note{
					{At: onset.Add(2900 * time.Millisecond), Kind: collector.NoteAlert, Text: "LockstepNoncommunicationHang began to fire"},
					{At: onset.Add(3100 * time.Millisecond), Kind: collector.NoteWebhook, Text: "the remediator has it as entry 7"},
					{At: onset.Add(3200 * time.Millisecond), Kind: collector.NoteDecision, Text: "restart, by policy hangs"},
				},
			}
			if closed {
				in.Closed = onset.Add(9 * time.Second)
				in.Notes = append(in.Notes,
					collector.Note{At: onset.Add(6100 * time.Millisecond), Kind: collector.NoteAction, Text: "restart done"},
					collector.Note{At: onset.Add(6 * time.Second), Kind: collector.NoteRunning, Text: "the job runs again"})
			} else {
				s.Ranks = map[diagnosis.ProcState]int{diagnosis.ProcRunning: 15, diagnosis.ProcStopped: 1}
			}
			s.Incidents, s.Recording = []collector.Incident{in}, &collector.RecordingStatus{}
			return s
		}
	}
	slow := func() *collector.MasterSnapshot {
		s := base()
		s.Delay[0] = ring("dp0", []int32{0, 4, 8, 12}, 1)
		s.Incidents = []collector.Incident{{
			ID: fmt.Sprintf("llama-70b-%d-2", at.UnixMilli()), Attempt: 1, Opened: s.At.Add(-3 * time.Second), Confirmed: s.At.Add(-2 * time.Second),
			Verdict: diagnosis.Verdict{
				Class: diagnosis.CommunicationSlow, Level: diagnosis.Confirmed, CommName: "dp0", Coll: record.AllReduce, Seq: 978, Victims: 4, Since: s.At.Add(-5 * time.Second).UnixNano(),
				Culprits: []diagnosis.Culprit{{Kind: diagnosis.CulpritConnection, Rank: 4, Peer: 8, Node: "gpu-01", Reason: "network"}},
				Why:      []string{"rank 4 → rank 8 on dp0 takes 7.4 times as long as it usually does; the other connections take what they do.", "Its sender has data and credit: it is the network between gpu-01 and gpu-02."},
			},
		}}
		return s
	}
	return []scene{
		{"healthy", base, job(nil), []string{"Healthy: no open incident.", "16 ranks"}},
		{"hang", hang(false), job(func(v *collector.JobView) {
			for i := range v.Ranks {
				r := &v.Ranks[i]
				r.In = &collector.Stay{Comm: "world", CommRank: i, Coll: record.AllReduce, Seq: 978, Since: v.At.Add(-7500 * time.Millisecond), WaitsFor: []int32{0, 4, 12, 8}, Waited: 4}
				if i%4 == 0 && i != 8 {
					r.In.Comm, r.In.CommRank, r.In.WaitsFor, r.In.Waited, r.In.Since = "dp0", i/4, []int32{8}, 1, v.At.Add(-8*time.Second)
				}
			}
			v.Ranks[8].In, v.Ranks[8].Proc, v.Ranks[8].ProcAt = nil, diagnosis.ProcStopped, v.At.Add(-8*time.Second)
			v.Comms[1].Open, v.Comms[1].Oldest = 3, v.At.Add(-8*time.Second)
			v.Comms[0].Open, v.Comms[0].Oldest = 12, v.At.Add(-7500*time.Millisecond)
		}), []string{"noncommunication_hang", "waits for rank 8", "decision"}},
		{"slow", slow, job(nil), []string{"rank 4 → rank 8", "7.4"}},
		{"recovered", hang(true), job(nil), []string{"Healthy", "Closed incidents", "lasted 9.0 s"}},
	}
}

// ring is the delay matrix of a ring; its connection number slow is.
func ring(comm string, world []int32, slow int) collector.DelayMatrix {
	n := len(world)
	m := collector.DelayMatrix{Comm: comm, Size: n, World: world, Ratio: make([]float32, n*n)}
	nan := float32(0)
	nan /= nan
	for i := range m.Ratio {
		m.Ratio[i] = nan
	}
	for i := range n {
		m.Ratio[i*n+(i+1)%n] = 1 + 0.05*float32(i)
		if i == slow {
			m.Ratio[i*n+(i+1)%n] = 7.4
		}
	}
	return m
}

// server serves a scene.
func (s *scene) server(t *testing.T) string {
	srv := run(t, web.Options{Status: s.status, Job: s.job, Links: web.Links{Trace: "http://localhost:16686/trace/{trace}", Grafana: "http://localhost:3000"}})
	return "http://" + srv.Addr().String()
}
