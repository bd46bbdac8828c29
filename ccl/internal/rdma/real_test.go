package rdma

import (
	"errors"
	"os"
	"os/exec"
	"sync"
	"testing"
	"time"

	"github.com/lockstep-ccl/lockstep/ccl/internal/nic"
)

// connectRails makes a connection between the two hosts of deploy/rdmavm. The
// tests of this file break links, so they run there alone.
func connectRails(t *testing.T, opt Options) (a, b *end) {
	t.Helper()
	inVM(t)
	tree, err := nic.Host()
	if err != nil {
		t.Fatal(err)
	}
	ports := func(names string) []nic.Port {
		o, err := nic.ParseOverride(names, "")
		if err != nil {
			t.Fatal(err)
		}
		p, err := tree.Select(nic.Near{NUMA: -1}, o)
		if err != nil {
			t.Fatal(err)
		}
		return p
	}
	own, peer := ports("rxa"), ports("rxb")
	var paths []Path
	for _, r := range nic.Rails(own, peer)[:MaxPaths] {
		paths = append(paths, Path{own[r.A], peer[r.B]})
	}
	return connectOver(t, paths, opt)
}

func inVM(t *testing.T) {
	t.Helper()
	if os.Getenv("LOCKSTEP_RDMAVM") == "" {
		t.Skip("not in the virtual machine with RDMA devices: make test-rdma")
	}
}

func sh(t *testing.T, command string) {
	t.Helper()
	if out, err := exec.Command("sh", "-c", command).CombinedOutput(); err != nil {
		t.Errorf("%s: %v: %s", command, err, out)
	}
}

// TestRealStream: bytes and lines, both ways, over real queue pairs.
func TestRealStream(t *testing.T) {
	a, b := connectRails(t, quick)
	began := time.Now()
	if err := both(t, a, b, 4<<20, 1000, nil); err != nil {
		t.Fatal(err)
	}
	t.Logf("4 MiB and 1000 lines each way in %v", time.Since(began))
	if a.switches.Load()+b.switches.Load()+a.downs.Load() != 0 {
		t.Error("a switch with nothing broken")
	}
}

// TestRealFaults breaks the first path in the middle of a transfer, and repairs it.
func TestRealFaults(t *testing.T) {
	inVM(t)
	for _, f := range []struct{ name, do, undo string }{
		{"port of the lower rank", "ip link set a0 down", "rails up 0"},
		{"port of the higher rank", "ip link set b0 down", "rails up 0"},
		{"one direction", "tc qdisc add dev a0 root netem loss 100%", "rails up 0"},
		{"the other direction", "tc qdisc add dev b0 root netem loss 100%", "rails up 0"},
		{"flaps", "ip link set b0 down; rails up 0; ip link set b0 down", "rails up 0"},
		{"device removed, then its link", "rdma link delete rxa0 >/dev/null 2>&1 & ip link set a0 down", ""},
		// Down first: rdma_rxe of Linux 6.1 may post for ever to an interface that is removed.
		{"interface removed", "ip link set a0 down; ip link delete a0 >/dev/null 2>&1 &", ""},
	} {
		t.Run(f.name, func(t *testing.T) {
			if f.undo == "" {
				t.Cleanup(func() { sh(t, "rails new 0") }) // when the devices are closed
			}
			opt := hasty
			opt.FailbackAfter, opt.GiveUpAfter = time.Second, 5*time.Second
			a, b := connectRails(t, opt)
			until(t, "a primary and a backup", a, b, func() bool { return on(0, a, b) })
			var broken sync.WaitGroup
			once := false
			if err := both(t, a, b, 4<<20, 500, func(got int) {
				if got > 1<<20 && !once {
					once = true
					broken.Go(func() { sh(t, f.do) })
				}
			}); err != nil {
				t.Fatal(err)
			}
			broken.Wait()
			for deadline := time.Now().Add(patience); a.switches.Load() == 0; { // some faults take their time
				if err := both(t, a, b, 1<<20, 500, nil); err != nil {
					t.Fatal(err)
				}
				if time.Now().After(deadline) {
					t.Fatal("no switch")
				}
			}
			if err := both(t, a, b, 1<<20, 500, nil); err != nil {
				t.Fatal(err)
			}
			t.Logf("%d switches, %d messages sent again", a.switches.Load(), a.resent.Load()+b.resent.Load())
			if f.undo == "" {
				return
			}
			sh(t, f.undo)
			began := time.Now()
			until(t, "failback", a, b, func() bool { return on(0, a, b) })
			t.Logf("back on the first path %v after its repair", time.Since(began))
			if err := both(t, a, b, 1<<20, 500, nil); err != nil {
				t.Fatal(err)
			}
		})
	}
}

// TestRealNoPathLeft: both ends fail with the ports in the error.
func TestRealNoPathLeft(t *testing.T) {
	opt := hasty
	opt.GiveUpAfter = time.Second
	a, b := connectRails(t, opt)
	var errs [2]error
	var wg sync.WaitGroup
	once := false
	wg.Go(func() {
		errs[0] = a.stream(1, 64<<20, 0, func(got int) {
			if got > 1<<20 && !once {
				once = true
				wg.Go(func() { sh(t, "ip link set a0 down; ip link set b1 down") })
			}
		})
	})
	wg.Go(func() { errs[1] = b.stream(1, 64<<20, 0, nil) })
	wg.Wait()
	for i, err := range errs {
		var paths *PathError
		if !errors.Is(err, ErrNoPath) || !errors.As(err, &paths) || len(paths.Paths) != MaxPaths {
			t.Errorf("end %d: %v", i, err)
		}
		t.Log(err)
	}
	sh(t, "rails up 0; rails up 1")
}
