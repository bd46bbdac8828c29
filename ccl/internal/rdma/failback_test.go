package rdma

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/lockstep-ccl/lockstep/ccl/internal/verbs/verbstest"
)

// TestFailback: the backup takes over, the primary comes back and carries the
// lanes again, with its backup ready again, as often as it happens, while bytes flow.
func TestFailback(t *testing.T) {
	f := verbstest.New(t, verbstest.Options{})
	a, b := connect(t, f, quick)
	for range 3 {
		until(t, "a primary and a backup", a, b, func() bool { return on(0, a, b) })
		once := false
		if err := both(t, a, b, 2<<20, 500, func(got int) {
			if !once && got > 1<<20 {
				once = true
				f.SetPort("mlx5_2", 1, false, true)
			}
		}); err != nil {
			t.Fatal(err)
		}
		f.SetPort("mlx5_2", 1, true, true)
		if err := both(t, a, b, 2<<20, 500, nil); err != nil {
			t.Fatal(err)
		}
	}
	until(t, "failback", a, b, func() bool { return on(0, a, b) })
	// A device that was taken out and put back.
	f.Remove("mlx5_0")
	if err := both(t, a, b, 2<<20, 500, nil); err != nil {
		t.Fatal(err)
	}
	f.Restore("mlx5_0")
	until(t, "failback to another context", a, b, func() bool { return on(0, a, b) })
	if err := both(t, a, b, 2<<20, 500, nil); err != nil {
		t.Fatal(err)
	}
}

// TestFailbackIsNoFault: a sound backup that is left for the primary is not called
// broken, nor counted as one that has broken again, at either end.
func TestFailbackIsNoFault(t *testing.T) {
	f := verbstest.New(t, verbstest.Options{})
	a, b := connect(t, f, quick)
	for round := range int64(3) {
		until(t, "a primary and a backup", a, b, func() bool { return on(0, a, b) })
		f.SetPort("mlx5_2", 1, false, true)
		if err := both(t, a, b, 1<<20, 100, nil); err != nil {
			t.Fatal(err)
		}
		f.SetPort("mlx5_2", 1, true, true)
		until(t, "failback", a, b, func() bool { return on(0, a, b) })
		for i, e := range []*end{a, b} {
			told := &e.told[1]
			if want := int64(quick.Lanes) * (round + 1); told[PathDown].Load() != 0 || told[PathLeft].Load() != want || told[PathNew].Load() < want {
				t.Errorf("round %d: end %d told of the backup %d times that it is broken, %d that it is left, %d that it is new", round, i, told[PathDown].Load(), told[PathLeft].Load(), told[PathNew].Load())
			}
			e.w.mu.Lock()
			for lane := range e.tries {
				if x := e.tries[lane][1]; x.relapses != 0 || !x.lost.IsZero() || !x.left.IsZero() {
					t.Errorf("round %d: end %d has the backup as %+v", round, i, x)
				}
			}
			e.w.mu.Unlock()
		}
	}
	// One that does not come back is broken after all.
	f.SetPort("mlx5_0", 1, false, true)
	if err := both(t, a, b, 1<<20, 100, nil); err != nil {
		t.Fatal(err)
	}
	a.w.mu.Lock()
	f.SetPort("mlx5_3", 1, false, false) // of which nobody hears, until a new queue pair is wanted
	a.w.mu.Unlock()
	f.SetPort("mlx5_0", 1, true, true)
	until(t, "word of the backup", a, b, func() bool { return a.told[1][PathDown].Load() > 0 && b.told[1][PathDown].Load() > 0 })
	f.SetPort("mlx5_3", 1, true, true)
	until(t, "failback", a, b, func() bool { return on(0, a, b) })
}

// TestHalfDeadPathIsGivenUp: of the last path one direction passes. The end that
// hears the other and is not heard gives up in its time, however much arrives.
func TestHalfDeadPathIsGivenUp(t *testing.T) {
	for _, from := range []int{1, 3} {
		t.Run(fmt.Sprintf("nothing from mlx5_%d", from), func(t *testing.T) {
			// An attempt lasts for longer than it takes until somebody looks.
			f := verbstest.New(t, verbstest.Options{Retry: 3 * tickLate / 2})
			opt := quick
			opt.Lanes, opt.GiveUpAfter = 1, 6*tickLate
			a, b := connect(t, f, opt)
			until(t, "a primary and a backup", a, b, func() bool { return on(0, a, b) })
			f.Link(fmt.Sprint("mlx5_", from), 1, fmt.Sprint("mlx5_", from^2), 1).Drop(true)
			f.SetPort("mlx5_0", 1, false, true)
			heard, deaf := a, b // of the backup
			if from == 1 {
				heard, deaf = b, a
			}
			// A byte every second attempt: between them the end that is heard owes nothing.
			const most = 20
			last, attempts := int64(0), int64(0)
			var err error
			for deadline := time.Now().Add(patience); err == nil && attempts < most && time.Now().Before(deadline); heard.wait() {
				if attempts = heard.told[1][PathNew].Load(); attempts >= last+2 {
					n := 0
					if n, _, err = heard.Send([]byte{1}); n > 0 {
						last = attempts
					}
				}
				if err == nil {
					_, _, err = deaf.Send([]byte{2})
				}
				if err == nil {
					_, err = deaf.Recv(make([]byte, 10))
				}
				deaf.Refresh()
			}
			if !errors.Is(err, ErrNoPath) {
				t.Errorf("after %d attempts the error is %v", attempts, err)
			}
			t.Logf("%d attempts", attempts)
		})
	}
}

// TestStartsOnBackup: a port that is down from the start is taken into use when it
// comes up.
func TestStartsOnBackup(t *testing.T) {
	f := verbstest.New(t, verbstest.Options{})
	f.SetPort("mlx5_2", 1, false, false)
	a, b := connect(t, f, quick)
	if err := both(t, a, b, 2<<20, 500, nil); err != nil {
		t.Fatal(err)
	}
	if a.switches.Load() != 0 {
		t.Error("the first path was told as a switch")
	}
	f.SetPort("mlx5_2", 1, true, true)
	until(t, "the primary", a, b, func() bool { return on(0, a, b) })
	if err := both(t, a, b, 2<<20, 500, nil); err != nil {
		t.Fatal(err)
	}
}

// TestBrokenPathIsNotPreferred: a path whose ports are up but which carries nothing
// is tried, and not gone back to before it works.
func TestBrokenPathIsNotPreferred(t *testing.T) {
	f := verbstest.New(t, verbstest.Options{Retry: 5 * time.Millisecond})
	a, b := connect(t, f, quick)
	until(t, "a primary and a backup", a, b, func() bool { return on(0, a, b) })
	there, back := f.Link("mlx5_0", 1, "mlx5_2", 1), f.Link("mlx5_2", 1, "mlx5_0", 1)
	there.Drop(true)
	back.Drop(true)
	if err := both(t, a, b, 2<<20, 500, nil); err != nil {
		t.Fatal(err)
	}
	for began := time.Now(); time.Since(began) < 20*quick.FailbackAfter; {
		if err := both(t, a, b, 64<<10, 10, nil); err != nil {
			t.Fatal(err)
		}
	}
	if n := a.switches.Load(); n != int64(quick.Lanes) {
		t.Errorf("%d switches of %d lanes", n, quick.Lanes)
	}
	if a.downs.Load()+b.downs.Load() <= int64(quick.Lanes)*2 {
		t.Error("the path was never tried")
	}
	there.Drop(false)
	back.Drop(false)
	until(t, "failback", a, b, func() bool { return on(0, a, b) })
	if err := both(t, a, b, 2<<20, 500, nil); err != nil {
		t.Fatal(err)
	}
}

// TestFlapping: ports go down and up at random moments, often both at once, for
// shorter than the connection's patience.
func TestFlapping(t *testing.T) {
	f := verbstest.New(t, verbstest.Options{Retry: 10 * time.Millisecond})
	opt := quick
	opt.FailbackAfter, opt.GiveUpAfter = time.Millisecond, patience
	a, b := connect(t, f, opt)
	stop := make(chan struct{})
	var wg sync.WaitGroup
	wg.Go(func() {
		r := rand.New(rand.NewPCG(5, 5))
		for {
			select {
			case <-stop:
				return
			case <-time.After(time.Duration(1+r.IntN(20)) * time.Millisecond):
			}
			i := r.IntN(4)
			name := fmt.Sprint("mlx5_", i)
			switch r.IntN(4) {
			case 0:
				f.Link(name, 1, fmt.Sprint("mlx5_", i^2), 1).TearNext(1 + r.IntN(3))
			case 1:
				f.Link(name, 1, fmt.Sprint("mlx5_", i^2), 1).LoseAcks(true)
				time.Sleep(time.Duration(r.IntN(20)) * time.Millisecond)
				f.Link(name, 1, fmt.Sprint("mlx5_", i^2), 1).LoseAcks(false)
			default:
				f.SetPort(name, 1, false, r.IntN(2) == 0)
				time.Sleep(time.Duration(r.IntN(20)) * time.Millisecond)
				f.SetPort(name, 1, true, r.IntN(2) == 0)
			}
		}
	})
	rounds := 6
	if testing.Short() {
		rounds = 2
	}
	for range rounds {
		if err := both(t, a, b, 16<<20, 4000, nil); err != nil {
			t.Error(err)
			break
		}
	}
	close(stop)
	wg.Wait()
	t.Logf("%d switches, %d messages sent again", a.switches.Load(), a.resent.Load()+b.resent.Load())
	if a.switches.Load() == 0 {
		t.Error("nothing flapped")
	}
}

// TestNoPathLeft: both ends fail, with the ports of both ranks in the error, and
// in bounded time.
func TestNoPathLeft(t *testing.T) {
	for _, ports := range [][2]string{{"mlx5_0", "mlx5_1"}, {"mlx5_0", "mlx5_3"}, {"mlx5_2", "mlx5_3"}} {
		t.Run(ports[0]+" "+ports[1], func(t *testing.T) { testNoPathLeft(t, ports) })
	}
}

func testNoPathLeft(t *testing.T, ports [2]string) {
	f := verbstest.New(t, verbstest.Options{})
	a, b := connect(t, f, hasty)
	once := false
	var errs [2]error
	var wg sync.WaitGroup
	wg.Go(func() {
		errs[0] = a.stream(1, 64<<20, 0, func(got int) {
			if got > 1<<20 && !once {
				once = true
				for _, p := range ports {
					f.SetPort(p, 1, false, true)
				}
			}
		})
	})
	wg.Go(func() { errs[1] = b.stream(1, 64<<20, 0, nil) })
	wg.Wait()
	for i, err := range errs {
		var paths *PathError
		if !errors.Is(err, ErrNoPath) || !errors.As(err, &paths) || len(paths.Paths) != 2 {
			t.Errorf("ports %v, end %d: %v", ports, i, err)
		}
	}
	t.Log(errs[0])
}

// TestNeverConnected: ports that do not reach each other are an error that says so,
// in bounded time.
func TestNeverConnected(t *testing.T) {
	f := verbstest.New(t, verbstest.Options{Retry: 5 * time.Millisecond})
	for i := range 4 {
		for j := range 4 {
			f.Link(fmt.Sprint("mlx5_", i), 1, fmt.Sprint("mlx5_", j), 1).Drop(true)
		}
	}
	a, b := connect(t, f, hasty)
	err := both(t, a, b, 1<<20, 0, nil)
	if !errors.Is(err, ErrNoPath) || !strings.Contains(err.Error(), "LOCKSTEP_NET=tcp") {
		t.Errorf("the error is %v", err)
	}
	f.Heal()
}
