package diagnosis_test

import (
	"strings"
	"testing"

	"github.com/lockstep-ccl/lockstep/diagnosis"
)

// What GPUs report says why a rank is late or gone; the verdict stays as it would be.
func TestGPUsExplain(t *testing.T) {
	late := func(j *job) *diagnosis.Rank {
		j.allBut(j.comm("dp", 0, 1, 2, 3), 3, 2)
		return &j.ev.Ranks[2]
	}
	gone := func(j *job) *diagnosis.Rank {
		r := late(j)
		r.Proc, r.ProcAt = diagnosis.ProcGone, ago(2)
		return r
	}
	for _, c := range []struct {
		name string
		job  func(j *job)
		want string
		why  string
		not  string
	}{
		{"fell off the bus, then died", func(j *job) {
			r := gone(j)
			r.Xid, r.GPU = 79, diagnosis.GPU{Seen: true, Index: 3, XidAt: ago(4), LostAt: ago(3.5)}
		}, "confirmed noncommunication_hang 2 process_gone",
			"rank 2: GPU 3 of its node reported Xid 79 (the GPU has fallen off the bus) 2.0 s before the fault, and has not answered its driver since 01:46:36.500", ""},
		{"an Xid of a GPU that is not known", func(j *job) { gone(j).Xid = 31 },
			"confirmed noncommunication_hang 2 process_gone", "rank 2: its GPU reported Xid 31 (page fault", ""},
		{"an Xid of long ago", func(j *job) {
			r := gone(j)
			r.Xid, r.GPU = 94, diagnosis.GPU{Seen: true, XidAt: ago(3600)}
		}, "confirmed noncommunication_hang 2 process_gone", "Xid 94 (uncorrectable memory error, contained to one application) at 00:46:40.000", ""},
		{"lost, without a word", func(j *job) { late(j).GPU = diagnosis.GPU{Seen: true, Index: 5, LostAt: ago(3)} },
			"confirmed noncommunication_hang 2 idle", "GPU 5 of its node has not answered its driver", ""},
		{"throttled", func(j *job) {
			late(j).GPU = diagnosis.GPU{Seen: true, Index: 1, ThrottledAt: ago(100), Throttle: diagnosis.ThrottleHWThermal | diagnosis.ThrottlePowerCap}
		}, "confirmed noncommunication_hang 2 idle", "GPU 1 of its node has been slowed down (hw_thermal) since 01:45:", "power_cap"},
		{"driver hangs", func(j *job) { late(j).GPU = diagnosis.GPU{Seen: true, UnresponsiveAt: ago(30)} },
			"confirmed noncommunication_hang 2 idle", "GPU 0 of its node cannot be asked: a call into its driver has not returned since", ""},
		{"an Xid that the rank has outlived: it computes, and has the time for it", func(j *job) {
			r := late(j) // active until 10 s ago
			r.Xid, r.GPU, r.CPU = 74, diagnosis.GPU{Seen: true, Index: 2, XidAt: ago(300)}, 0.9
		}, "suspected noncommunication_hang 2 computing", "GPU 2 of its node reported Xid 74 (NVLink error) at 01:41:", ""},
		{"an Xid that ended it: no reason to wait for long", func(j *job) {
			r := late(j)
			r.Xid, r.GPU, r.CPU = 74, diagnosis.GPU{Seen: true, Index: 2, XidAt: ago(11)}, 0.9
		}, "confirmed noncommunication_hang 2 xid_74", "its GPU reported Xid 74", ""},
		{"healthy", func(j *job) { late(j).GPU = diagnosis.GPU{Seen: true, Throttle: diagnosis.ThrottlePowerCap} },
			"confirmed noncommunication_hang 2 idle", "uses 0.00 cores", "GPU"},
		{"of somebody who is not to blame", func(j *job) {
			late(j)
			j.ev.Ranks[1].GPU = diagnosis.GPU{Seen: true, Index: 7, LostAt: ago(3)}
		}, "confirmed noncommunication_hang 2 idle", "", "GPU 7"},
		{"at the end of a stalled connection", func(j *job) {
			comm := j.comm("dp", 0, 1, 2, 3)
			j.allBut(comm, 3)
			k := j.ring(comm, 3)[1]
			k.Outstanding, k.LastPost, k.LastCompletion = 4096, ago(3), ago(3.1)
			j.ev.Ranks[2].GPU = diagnosis.GPU{Seen: true, Index: 6, LostAt: ago(3)}
		}, "confirmed communication_hang 1>2 stalled", "rank 2: GPU 6 of its node has not answered", ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			j := newJob(8)
			c.job(j)
			vs := j.verdicts()
			if len(vs) != 1 || describe(&vs[0]) != c.want {
				t.Fatalf("got %v, want %q", vs, c.want)
			}
			why := strings.Join(vs[0].Why, "\n")
			if !strings.Contains(why, c.why) || (c.not != "" && strings.Contains(why, c.not)) {
				t.Fatalf("want %q and no %q in\n%s", c.why, c.not, why)
			}
			if len(vs[0].Why) > 8 {
				t.Fatalf("%d sentences", len(vs[0].Why))
			}
		})
	}
}

func TestXids(t *testing.T) {
	for code, want := range map[uint32]diagnosis.XidEffect{
		13: diagnosis.XidApplication, 31: diagnosis.XidApplication, 43: diagnosis.XidApplication, 94: diagnosis.XidApplication,
		48: diagnosis.XidGPU, 62: diagnosis.XidGPU, 64: diagnosis.XidGPU, 74: diagnosis.XidGPU, 79: diagnosis.XidGPU, 95: diagnosis.XidGPU,
		119: diagnosis.XidGPU, 120: diagnosis.XidGPU, 140: diagnosis.XidGPU, 143: diagnosis.XidGPU,
		45: diagnosis.XidInfo, 63: diagnosis.XidInfo, 92: diagnosis.XidInfo, 121: diagnosis.XidInfo, 9999: diagnosis.XidUnknown,
	} {
		text, effect := diagnosis.DescribeXid(code)
		if effect != want || text == "" {
			t.Errorf("Xid %d is %v (%s), want %v", code, effect, text, want)
		}
		if effect.Fatal() != (want == diagnosis.XidApplication || want == diagnosis.XidGPU) {
			t.Errorf("Xid %d: fatal %v", code, effect.Fatal())
		}
	}
}

func TestThrottles(t *testing.T) {
	if got := (diagnosis.ThrottlePowerCap | diagnosis.ThrottlePowerBrake).String(); got != "power_cap, power_brake" {
		t.Errorf("got %q", got)
	}
	for _, want := range append(diagnosis.Throttles(), 0, diagnosis.SlowedDown, diagnosis.ThrottleIdle|diagnosis.ThrottleReliability) {
		text, _ := want.MarshalText()
		var got diagnosis.Throttle
		if err := got.UnmarshalText(text); err != nil || got != want {
			t.Errorf("%q is read as %q: %v", text, got, err)
		}
	}
	var bad diagnosis.Throttle
	if err := bad.UnmarshalText([]byte("power_cap, haste")); err == nil {
		t.Errorf("read as %q", bad)
	}
	// NVML's bits.
	if diagnosis.ThrottleSWThermal != 0x20 || diagnosis.ThrottleHWThermal != 0x40 || diagnosis.ThrottlePowerBrake != 0x80 || diagnosis.ThrottleReliability != 0x400 {
		t.Error("the bits are not NVML's")
	}
	seen := diagnosis.Throttle(0)
	for _, r := range diagnosis.Throttles() {
		if r.String() == "" || strings.Contains(r.String(), ",") {
			t.Errorf("%x is %q", uint32(r), r.String())
		}
		seen |= r
	}
	if seen != diagnosis.ThrottleReliability<<1-1-diagnosis.ThrottleIdle {
		t.Errorf("reasons left out: %x", uint32(seen))
	}
}
