package starting_test

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/lockstep-ccl/lockstep/collector/source"
	"github.com/lockstep-ccl/lockstep/collector/source/starting"
	"github.com/lockstep-ccl/lockstep/diagnosis"
)

// TestPolls plays processes that use CPU: in the kernel above all, as one that waits in
// NCCL's bootstrap, and one that imports. Then the first sleeps for moments, as torch's rank 0 does until
// all have come to its store, and the other for a second each time.
func TestPolls(t *testing.T) {
	root := t.TempDir()
	write := func(name, text string) {
		t.Helper()
		path := filepath.Join(root, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
			t.Fatal(err)
		}
		if err := errors.Join(os.WriteFile(path+".new", []byte(text), 0o600), os.Rename(path+".new", path)); err != nil {
			t.Fatal(err)
		}
	}
	plays := func(pid, user, sys, sleeps int, wchan string) {
		write(fmt.Sprintf("%d/status", pid), fmt.Sprintf("Name:\tpython3\nvoluntary_ctxt_switches:\t%d\nnonvoluntary_ctxt_switches:\t9\n", sleeps))
		fields := strings.Fields(strings.Repeat("0 ", 50))
		fields[0], fields[1], fields[11], fields[12], fields[19], fields[20], fields[47] = "S", "1", fmt.Sprint(user), fmt.Sprint(sys), "100", "4096", fmt.Sprint(pid)
		write(fmt.Sprintf("%d/stat", pid), fmt.Sprintf("%d (python3 (x) )) %s\n", pid, strings.Join(fields, " ")))
		write(fmt.Sprintf("%d/wchan", pid), wchan)
	}
	write("sys/kernel/random/boot_id", "00000000-0000-0000-0000-000000000001\n")
	for rank, pid := range []int{201, 202} {
		write(fmt.Sprintf("%d/environ", pid), strings.Join([]string{
			"LOCKSTEP_JOB=llm", "LOCKSTEP_RUNTIME_DIR=/run/lockstep", "NCCL_PROFILER_PLUGIN=lockstep", fmt.Sprint("RANK=", rank), "WORLD_SIZE=2",
		}, "\x00"))
	}
	s := starting.New(starting.Options{Dir: "/run/lockstep", Proc: root, Settle: time.Nanosecond, Period: time.Nanosecond})
	defer func() {
		for s.Close() != nil { // on a crowded machine a look takes long
		}
	}()
	v := source.View{}
	rank := func(r int32) *source.Process {
		for _, p := range v.Processes {
			if p.Rank == r {
				return p
			}
		}
		return &source.Process{}
	}
	// seen waits until a scan that began after the one that saw what was written before is done.
	seen := func() {
		t.Helper()
		for _, w := range []diagnosis.WaitIn{diagnosis.WaitInPipe, diagnosis.WaitInSleep} {
			write("202/wchan", map[diagnosis.WaitIn]string{diagnosis.WaitInPipe: "pipe_read", diagnosis.WaitInSleep: "hrtimer_nanosleep"}[w])
			for deadline := time.Now().Add(30 * time.Second); rank(0).PID == 0 || rank(1).WaitsIn != w; time.Sleep(time.Millisecond) {
				v.Processes = v.Processes[:0]
				v.Now++
				if err := s.Update(&v); err != nil {
					t.Fatal(err)
				}
				if time.Now().After(deadline) {
					t.Fatalf("%d ranks, rank 1 in %q", len(v.Processes), rank(1).WaitsIn)
				}
			}
		}
	}
	v.Now = 1e9
	for n := range 3 { // 6 s, in which each uses 5.4 s of CPU
		plays(201, 60*n, 480*n, n, "0")
		plays(202, 480*n, 60*n, 300*n, "hrtimer_nanosleep")
		seen()
		v.Now += 6e9
		seen()
	}
	if rank(0).WaitsIn != diagnosis.WaitInPolling || rank(1).WaitsIn != diagnosis.WaitInSleep {
		t.Errorf("they wait in %q and in %q", rank(0).WaitsIn, rank(1).WaitsIn)
	}
	for n := range 3 { // each sleeps, for 10 ms and for a second
		plays(201, 120+n, 960+n, 600*n, "hrtimer_nanosleep")
		plays(202, 960, 120, 600+6*n, "hrtimer_nanosleep")
		seen()
		v.Now += 6e9
		seen()
	}
	if rank(0).WaitsIn != diagnosis.WaitInPolling || rank(1).WaitsIn != diagnosis.WaitInSleep {
		t.Errorf("asleep they wait in %q and in %q", rank(0).WaitsIn, rank(1).WaitsIn)
	}
}
