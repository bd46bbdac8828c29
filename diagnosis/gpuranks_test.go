package diagnosis_test

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/lockstep-ccl/lockstep/diagnosis"
	"github.com/lockstep-ccl/lockstep/diagnosis/diagnosistest"
	"github.com/lockstep-ccl/lockstep/record"
	"pgregory.net/rapid"
)

// GPU ranks have no connections to report: NVLink tells nothing. All there is are
// the stamps of their operations, and who is to blame must come out all the same.

func TestAnyHangOfGPURanksIsNamed(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		cfg := diagnosistest.Config{NoConns: true, Groups: rapid.Bool().Draw(t, "groups")}
		world := topology(t, &cfg)
		f := diagnosistest.Fault{
			Kind: rapid.SampledFrom([]diagnosistest.FaultKind{diagnosistest.Kill, diagnosistest.Stop, diagnosistest.Hang}).Draw(t, "kind"),
			At:   time.Duration(rapid.IntRange(4000, 8000).Draw(t, "at")) * time.Millisecond,
			Rank: rapid.IntRange(0, world-1).Draw(t, "rank"),
		}
		want := map[diagnosistest.FaultKind]string{
			diagnosistest.Kill: "process_gone", diagnosistest.Stop: "process_stopped", diagnosistest.Hang: "idle",
		}[f.Kind]
		want = fmt.Sprintf("noncommunication_hang rank %d %s", f.Rank, want)
		cfg.Faults = []diagnosistest.Fault{f}
		j, h := diagnosistest.New(cfg), newHistory()
		watch(j, diagnosis.New(diagnosis.Config{}), h, f.At+12*time.Second)
		at, ok := h.confirmed[want]
		if !ok || len(h.confirmed) != 1 {
			t.Fatalf("want %q alone, got\n%s", want, h)
		}
		if late := at - f.At; late > confirmedWithin(f) {
			t.Fatalf("%q confirmed %s after the fault:\n%s", want, late, h)
		}
	})
}

func TestAnySlowGPURankIsNamed(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		cfg := diagnosistest.Config{NoConns: true}
		world := topology(t, &cfg)
		pace := diagnosistest.New(cfg)
		pace.Advance(10 * time.Second)
		step := pace.Now() / time.Duration(pace.Steps())
		f := diagnosistest.Fault{
			Kind: diagnosistest.SlowRank, Factor: 3, Extra: 10 * time.Millisecond,
			At:   max(6*time.Second, time.Duration(rapid.IntRange(30, 50).Draw(t, "at"))*step),
			Rank: rapid.IntRange(0, world-1).Draw(t, "rank"),
		}
		want := fmt.Sprintf("noncommunication_slow rank %d straggler", f.Rank)
		cfg.Faults = []diagnosistest.Fault{f}
		j, h := diagnosistest.New(cfg), newHistory()
		e := diagnosis.New(diagnosis.Config{})
		watch(j, e, h, f.At)
		for before := j.Steps(); (j.Steps() < before+60 || j.Now() < f.At+20*time.Second) && len(h.confirmed) == 0; {
			watch(j, e, h, passEvery)
		}
		if _, ok := h.confirmed[want]; !ok || len(h.confirmed) != 1 {
			t.Fatalf("want %q alone, got\n%s", want, h)
		}
	})
}

// What the stamps of a stopped rank say: its GPU goes on with what was launched.
func TestStoppedGPURank(t *testing.T) {
	for _, c := range []struct {
		name string
		job  func(j *job)
		want string
		why  string
	}{
		{"stopped before it launched: its kernel never entered", func(j *job) {
			j.allBut(j.comm("dp", 0, 1, 2, 3), 3, 2)
			j.stop(2)
		}, "confirmed noncommunication_hang 2 process_stopped", "rank 2 has not entered AllReduce #101"},
		{"stopped after it launched: its kernel has entered and waits for another that does not come", func(j *job) {
			j.allBut(j.comm("dp", 0, 1, 2, 3), 3, 1)
			j.stop(2)
		}, "confirmed noncommunication_hang 1 idle", "rank 1 has not entered AllReduce #101"},
		{"stopped while a copy of its own was under way: all have entered, and it must go on", func(j *job) {
			j.allBut(j.comm("dp", 0, 1, 2, 3), 3)
			j.stop(2)
		}, "confirmed noncommunication_hang 2 process_stopped", "rank 2 has entered AllReduce #101"},
		{"stopped after it left what the others are still in", func(j *job) {
			c := j.comm("dp", 0, 1, 2, 3)
			j.allBut(c, 3)
			c.Members[2].Finished, c.Members[2].FinishedAt = 101, ago(3)
			j.stop(2)
		}, "confirmed noncommunication_hang 2 process_stopped", "rank 2 has left AllReduce #101"},
		{"stopped, and its kernels are the last that entered: nobody is in anything", func(j *job) {
			j.comm("dp", 0, 1, 2, 3)
			j.stop(2)
		}, "", ""},
		{"stopped in another communicator than the one it is missed in", func(j *job) {
			j.allBut(j.comm("tp", 0, 1), 3, 1)
			pp := j.comm("pp", 1, 3)
			j.enter(pp, 1, record.Recv, 3).Peer = 0
			j.stop(1)
		}, "confirmed noncommunication_hang 1 process_stopped", "rank 1 (pid 101 on node0) is stopped"},
	} {
		t.Run(c.name, func(t *testing.T) {
			j := newJob(4)
			c.job(j)
			var got, why []string
			for _, v := range j.verdicts() {
				got = append(got, fmt.Sprintf("%v %v %d %s", v.Level, v.Class, v.Culprits[0].Rank, v.Culprits[0].Reason))
				why = append(why, v.Why...)
			}
			if strings.Join(got, "; ") != c.want || !strings.Contains(strings.Join(why, "\n"), c.why) {
				t.Errorf("got %q, want %q\n%s", got, c.want, strings.Join(why, "\n"))
			}
		})
	}
}

func (j *job) stop(rank int) {
	r := &j.ev.Ranks[rank]
	r.Proc, r.ProcAt = diagnosis.ProcStopped, ago(3)
}

// GPUs that have all entered an operation which does not end name no link: there
// is nothing to tell it by. It is a hang of communication for all that, of those inside.
func TestAllGPUsInside(t *testing.T) {
	j := newJob(4)
	j.allBut(j.comm("dp", 0, 1, 2, 3), 40)
	vs := j.verdicts()
	if len(vs) != 1 || vs[0].Class != diagnosis.CommunicationHang || len(vs[0].Culprits) != 4 {
		t.Errorf("got %+v", vs)
	}
}
