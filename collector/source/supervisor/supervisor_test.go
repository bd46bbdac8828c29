package supervisor_test

import (
	"os"
	"testing"
	"time"

	"github.com/lockstep-ccl/lockstep/collector/source"
	"github.com/lockstep-ccl/lockstep/collector/source/supervisor"
	"github.com/lockstep-ccl/lockstep/diagnosis"
	"github.com/lockstep-ccl/lockstep/record"
)

func TestSupervisor(t *testing.T) {
	dir := t.TempDir()
	w, err := record.Create(record.Options{Dir: dir, RingSlots: 8, Identity: record.Identity{Job: "j", Rank: 2, WorldSize: 4, Attempt: 1}})
	if err != nil {
		t.Fatal(err)
	}
	r, err := record.Open(w.Path())
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	p := &source.Process{Header: r.Header(), Path: w.Path(), State: diagnosis.ProcRunning}
	p.Exit = diagnosis.Exit{By: diagnosis.ExitKernel, Code: 3, At: 50}
	s, v := supervisor.New(), source.View{Now: 1e9, Processes: []*source.Process{p}}
	pass := func(want diagnosis.Exit, fails bool) {
		t.Helper()
		v.Now += 1e8
		if err := s.Update(&v); (err != nil) != fails || p.Exit != want {
			t.Errorf("exit %+v, %v; want %+v", p.Exit, err, want)
		}
	}
	kernel := p.Exit
	told := record.End{Job: "j", Rank: 2, Attempt: 1, Started: time.Now().Add(-time.Hour), Code: 3, Asked: true, At: 49}
	if err := record.WriteEnd(dir, told); err != nil {
		t.Fatal(err)
	}
	pass(kernel, false) // of one that lives: not looked for
	p.State = diagnosis.ProcGone
	ends, err := record.ListEnds(dir)
	if err != nil || len(ends) != 1 {
		t.Fatal(ends, err)
	}
	if err := os.WriteFile(ends[0], []byte("{}"), 0o600); err != nil {
		t.Fatal(err)
	}
	pass(kernel, true)
	if err := record.WriteEnd(dir, told); err != nil {
		t.Fatal(err)
	}
	want := diagnosis.Exit{By: diagnosis.ExitSupervisor, Code: 3, Asked: true, At: 49}
	pass(want, false)
	if err := os.Remove(ends[0]); err != nil {
		t.Fatal(err)
	}
	pass(want, false) // it stays said

	// Of the process itself, the supervisor's time and the kernel's are of one event: the earlier counts.
	for _, at := range []int64{40, 60} {
		p = &source.Process{Header: r.Header(), Path: w.Path(), State: diagnosis.ProcGone, StateAt: at}
		v.Processes = []*source.Process{p}
		direct := told
		direct.PID = p.PID
		if err := record.WriteEnd(dir, direct); err != nil {
			t.Fatal(err)
		}
		want.At = min(at, 49)
		if pass(want, false); p.StateAt != want.At {
			t.Errorf("gone at %d, want %d", p.StateAt, want.At)
		}
	}
	if err := os.Remove(ends[0]); err != nil {
		t.Fatal(err)
	}

	// What is told much later is of no use to anybody.
	p = &source.Process{Header: r.Header(), Path: w.Path(), State: diagnosis.ProcGone}
	v.Processes = []*source.Process{p}
	pass(diagnosis.Exit{}, false)
	v.Now += int64(time.Minute)
	if err := record.WriteEnd(dir, told); err != nil {
		t.Fatal(err)
	}
	pass(diagnosis.Exit{}, false)
}
