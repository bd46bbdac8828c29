package rdma

import (
	"errors"
	"log/slog"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/lockstep-ccl/lockstep/ccl/internal/verbs"
	"github.com/lockstep-ccl/lockstep/ccl/internal/verbs/verbstest"
)

// What the kernel, or a device, does to calls: it fails them, or does not return.

// locked calls f while nothing else happens to both ends.
func locked(a, b *end, f func()) {
	a.w.mu.Lock()
	defer a.w.mu.Unlock()
	b.w.mu.Lock()
	defer b.w.mu.Unlock()
	f()
}

func connected(t *testing.T, opt Options) (f *verbstest.Fabric, a, b *end) {
	t.Helper()
	f = verbstest.New(t, verbstest.Options{})
	a, b = connect(t, f, opt)
	until(t, "a connection", a, b, func() bool { return on(0, a, b) })
	return f, a, b
}

// TestPollError: a queue that cannot be polled, or armed, breaks its queue pairs at
// once: nothing else may ever happen to the rank that was about to sleep.
func TestPollError(t *testing.T) {
	for _, call := range []string{"ibv_poll_cq", "ibv_req_notify_cq"} {
		t.Run(call, func(t *testing.T) {
			f, a, b := connected(t, quick)
			locked(a, b, func() { f.Fail(call, syscall.EIO, 1) })
			a.w.mu.Lock()
			news := false
			if call == "ibv_poll_cq" {
				news = a.w.poll(true)
			} else {
				a.w.mu.Unlock()
				news = a.w.Arm()
				a.w.mu.Lock()
			}
			switching := 0
			for i := range a.m.lanes {
				if a.m.lanes[i].epoch > 1 {
					switching++
				}
			}
			a.w.mu.Unlock()
			if !news || switching == 0 {
				t.Errorf("news %v, %d lanes leave their path", news, switching)
			}
			if err := both(t, a, b, 1<<20, 100, nil); err != nil {
				t.Fatal(err)
			}
		})
	}
}

// TestDestroyFails: a queue pair that was flushed and cannot be destroyed stands in
// nobody's way, and is destroyed in the end.
func TestDestroyFails(t *testing.T) {
	f, a, b := connected(t, quick)
	locked(a, b, func() {
		f.Fail("ibv_destroy_qp", syscall.EBUSY, 1)
		a.m.fault(0, a.m.lanes[0].active)
		a.w.work()
	})
	if err := both(t, a, b, 2<<20, 100, nil); err != nil {
		t.Fatal(err)
	}
	retired := 0
	locked(a, b, func() { retired = len(a.w.retired) + len(b.w.retired) })
	if retired != 1 {
		t.Errorf("%d queue pairs wait to be destroyed", retired)
	}
	// The fabric tells at the end when one is left.
}

// TestUndead: what a queue pair that can be neither flushed nor destroyed has received
// is not final, so its lane waits for that; in the end it gives up, and names it.
func TestUndead(t *testing.T) {
	for _, heal := range []bool{true, false} {
		t.Run("", func(t *testing.T) { testUndead(t, heal) })
	}
}

func testUndead(t *testing.T, heal bool) {
	opt := hasty
	if opt.Lanes = 1; heal {
		opt.GiveUpAfter = patience
	}
	f, a, b := connected(t, opt)
	locked(a, b, func() {
		f.Fail("ibv_modify_qp", syscall.EINVAL, 1)
		f.Fail("ibv_destroy_qp", syscall.EBUSY, 0)
		a.m.fault(0, 0)
		a.w.work()
	})
	began := time.Now()
	until(t, "the end of patience", a, b, func() bool { return time.Since(began) > drainFor+10*tickSoon })
	var err error
	var phase phase
	locked(a, b, func() { phase, err = a.m.lanes[0].phase, a.err })
	if heal && (phase != draining || err != nil) {
		t.Errorf("the lane is in phase %d, %v", phase, err)
	}
	f.Heal()
	if heal {
		err = both(t, a, b, 2<<20, 100, nil)
	}
	if heal != (err == nil) || !heal && !strings.Contains(err.Error(), "cannot be stopped") {
		t.Errorf("healed %v: %v", heal, err)
	}
}

// TestStalled: a call that does not return holds the connections of its rank up for a
// bounded time, and those of other ranks not at all.
func TestStalled(t *testing.T) {
	for _, name := range []string{"ibv_modify_qp", "ibv_destroy_qp", "ibv_create_qp", "ibv_query_port"} {
		t.Run(name, func(t *testing.T) {
			opt := quick
			opt.GiveUpAfter = patience
			f := verbstest.New(t, verbstest.Options{})
			a, b := connect(t, f, opt)
			x, y := connect(t, f, opt)
			until(t, "a connection", a, b, func() bool { return on(0, a, b) })
			until(t, "a connection", x, y, func() bool { return on(0, x, y) })
			release := f.Stall(name)
			defer release()
			var wg sync.WaitGroup
			wg.Go(func() { // fails a path, whose queue pair is then stopped, ended and replaced
				a.w.mu.Lock()
				a.m.fault(0, 0)
				a.w.work()
				a.w.mu.Unlock()
			})
			until(t, "a stalled call", a, b, func() bool { return f.Stalled() > 0 })
			if err := both(t, x, y, 2<<20, 100, nil); err != nil {
				t.Errorf("other ranks: %v", err)
			}
			// The rank's other connections, and whoever asks of this one, have the lock again.
			wg.Wait()
			began := time.Now()
			a.Refresh()
			if took := time.Since(began); took > 5*callFor {
				t.Errorf("the lock was held for %v", took)
			}
			if f.Stalled() == 0 {
				t.Error("the call has returned")
			}
			release()
			if err := both(t, a, b, 2<<20, 100, nil); err != nil {
				t.Error(err)
			}
		})
	}
}

// TestStalledClose: a device that does not return from being closed keeps nobody from
// using others, nor from opening it anew.
func TestStalledClose(t *testing.T) {
	f := verbstest.New(t, verbstest.Options{})
	d, err := openDevice("mlx5_0", slog.Default())
	if err != nil {
		t.Fatal(err)
	}
	release := f.Stall("ibv_dealloc_pd")
	closed := make(chan struct{})
	go func() {
		d.release()
		close(closed)
	}()
	for _, name := range []string{"mlx5_1", "mlx5_0"} {
		o, err := openDevice(name, slog.Default())
		if err != nil {
			t.Fatal(err)
		}
		defer o.release()
	}
	<-closed
	release()
	for f.Stalled() > 0 {
		time.Sleep(time.Millisecond)
	}
}

// TestStalledOpen: a device that is being opened for too long is an error, at once
// for all but the first who tries; in the end it can be used.
func TestStalledOpen(t *testing.T) {
	f := verbstest.New(t, verbstest.Options{})
	release := f.Stall("ibv_open_device")
	for range 20 {
		if _, err := openDevice("mlx5_0", slog.Default()); !errors.Is(err, errStalled) {
			t.Fatal(err)
		}
	}
	if n := f.Stalled(); n != 1 {
		t.Errorf("%d attempts to open it", n)
	}
	release()
	var d *device
	var err error
	for deadline := time.Now().Add(patience); d == nil && time.Now().Before(deadline); time.Sleep(time.Millisecond) {
		d, err = openDevice("mlx5_0", slog.Default())
	}
	if err != nil {
		t.Fatal(err)
	}
	d.release()
}

// TestMuteDevice: one failure to answer does not make a device lost; a second of them does.
func TestMuteDevice(t *testing.T) {
	f := verbstest.New(t, verbstest.Options{})
	d, err := openDevice("mlx5_0", slog.Default())
	if err != nil {
		t.Fatal(err)
	}
	defer d.release()
	f.Fail("ibv_query_port", syscall.EIO, 1)
	if _, up := d.healthy(1); up || d.usable() != nil {
		t.Errorf("after one failure up %v, %v", up, d.usable())
	}
	if _, up := d.healthy(1); !up {
		t.Error("it does not answer again")
	}
	f.Fail("ibv_query_port", syscall.EIO, 0)
	began := time.Now()
	for d.usable() == nil && time.Since(began) < patience {
		d.healthy(1)
		time.Sleep(time.Millisecond)
	}
	if took := time.Since(began); !errors.Is(d.usable(), verbs.ErrDeviceLost) || took < lostFor {
		t.Errorf("after %v: %v", took, d.usable())
	}
	f.Heal()
}

// TestRegistrationFails: memory that could not be registered is copied, and not tried
// again with each send.
func TestRegistrationFails(t *testing.T) {
	f, a, b := connected(t, quick)
	mem, region := registered(t, 256<<10)
	f.Fail("ibv_reg_mr", syscall.ENOMEM, 1)
	in := make([]byte, len(mem))
	for range 3 {
		sent, got := 0, 0
		for deadline := time.Now().Add(patience); got < len(in) || !a.Settled(); {
			n, _, err := a.SendKept(mem[sent:])
			if err != nil {
				t.Fatal(err)
			}
			k, err := b.Recv(in[got:])
			if err != nil || time.Now().After(deadline) {
				t.Fatal(got, err)
			}
			if sent, got = sent+n, got+k; n+k == 0 {
				a.wait()
				b.Refresh()
			}
		}
	}
	locked(a, b, func() {
		if a.m.tx.kept != 0 {
			t.Error("it was registered again")
		}
	})
	if n := len(region.mrs); n != 1 {
		t.Errorf("%d registrations are remembered", n)
	}
}

// TestSlowRegistration: sends are copied while the kernel registers memory, which
// keeps nobody else waiting.
func TestSlowRegistration(t *testing.T) {
	f, a, b := connected(t, quick)
	mem, region := registered(t, 64<<10)
	release := f.Stall("ibv_reg_mr")
	defer release()
	var n int
	var err error
	var wg sync.WaitGroup
	wg.Go(func() { n, _, err = a.SendKept(mem) })
	until(t, "a registration", a, b, func() bool { return f.Stalled() > 0 })
	a.Refresh() // has the lock
	wg.Wait()
	if n != len(mem) || err != nil || a.m.tx.kept != 0 {
		t.Fatalf("sent %d bytes, %d kept, %v", n, a.m.tx.kept, err)
	}
	if err := region.Close(); !errors.Is(err, errStalled) {
		t.Errorf("closed meanwhile: %v", err)
	}
	release()
	until(t, "its end", a, b, func() bool { return region.Close() == nil })
}

// TestDeregistrationFails: a region that cannot be closed says so, is known still, and
// can be closed again.
func TestDeregistrationFails(t *testing.T) {
	f, a, b := connected(t, quick)
	mem, region := registered(t, 64<<10)
	if n, _, err := a.SendKept(mem); n != len(mem) || err != nil || a.m.tx.kept == 0 {
		t.Fatal(n, err)
	}
	until(t, "the bytes", a, b, func() bool { p, _ := b.Peek(len(mem)); return len(p) == len(mem) })
	b.Advance(len(mem))
	until(t, "the end", a, b, func() bool { b.Settled(); return a.Settled() })
	f.Fail("ibv_dereg_mr", syscall.EBUSY, 1)
	if err := region.Close(); !errors.Is(err, verbs.ErrBusy) {
		t.Errorf("the error is %v", err)
	}
	if regionOf(mem) != region || len(region.mrs) == 0 {
		t.Error("it is forgotten")
	}
	if err := region.Close(); err != nil || regionOf(mem) != nil {
		t.Error("it cannot be closed again", err)
	}
}
