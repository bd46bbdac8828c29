package rdma

import (
	"errors"
	"fmt"
	"net"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/lockstep-ccl/lockstep/ccl/internal/verbs/verbstest"
)

// The management network is away: the kernel throws away what arrives for the control
// sockets of these ends, and their connections do not know why nothing comes.

// cut begins that, until mend.
func cut(t *testing.T, ends ...*end) (mend func()) {
	t.Helper()
	nothing := unix.SockFilter{Code: unix.BPF_RET | unix.BPF_K} // 0 bytes of a segment
	each := func(f func(fd int) error) {
		for _, e := range ends {
			var err error
			if ctlErr := e.raw.Control(func(fd uintptr) { err = f(int(fd)) }); errors.Join(ctlErr, err) != nil {
				t.Error(ctlErr, err)
			}
		}
	}
	each(func(fd int) error {
		return unix.SetsockoptSockFprog(fd, unix.SOL_SOCKET, unix.SO_ATTACH_FILTER, &unix.SockFprog{Len: 1, Filter: &nothing})
	})
	return func() {
		each(func(fd int) error { return unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_DETACH_FILTER, 0) })
	}
}

// quiet waits, as ranks do that wait for each other, until the ends' sockets have been
// silent for longer than anybody's patience with silence.
func quiet(t *testing.T, a, b *end, opt Options) {
	t.Helper()
	until(t, "silence", a, b, func() bool {
		a.Refresh()
		b.Refresh()
		return min(a.silence(), b.silence()) > silentAfter+3*lookEvery+opt.GiveUpAfter
	})
}

// TestOutage: without the management network bytes go on, and ranks that wait for each
// other are told by the rails that they are there. Afterwards a path that breaks is switched.
func TestOutage(t *testing.T) {
	f, a, b := connected(t, quick)
	mend := cut(t, a, b)
	if err := both(t, a, b, 2<<20, 500, nil); err != nil {
		t.Fatal(err)
	}
	until(t, "a sign of life", a, b, func() bool {
		told := true
		for _, e := range []*end{a, b} {
			e.Refresh()
			e.w.mu.Lock()
			told = told && e.silence()-time.Since(e.life.sign) > silentAfter // so much later than the socket's
			e.w.mu.Unlock()
		}
		return told
	})
	if err := both(t, a, b, 2<<20, 500, nil); err != nil {
		t.Fatal(err)
	}
	mend()
	f.SetPort("mlx5_0", 1, false, true)
	if err := both(t, a, b, 2<<20, 500, nil); err != nil {
		t.Fatal(err)
	}
	if a.switches.Load() == 0 || b.switches.Load() == 0 {
		t.Error("no switch")
	}
}

// TestOutageAndFault: a path that breaks while the management network is away is
// switched when that is back, for which the ends wait as long as the other path works.
func TestOutageAndFault(t *testing.T) {
	for _, c := range []struct {
		name string
		do   func(f *verbstest.Fabric)
	}{
		{"port", func(f *verbstest.Fabric) { f.SetPort("mlx5_0", 1, false, true) }},
		{"one direction", func(f *verbstest.Fabric) { f.Link("mlx5_0", 1, "mlx5_2", 1).Drop(true) }},
	} {
		t.Run(c.name, func(t *testing.T) {
			f, a, b := connected(t, quick)
			isCut, done := make(chan func(), 1), make(chan error, 1)
			go func() {
				once := false
				done <- both(t, a, b, 3<<20, 1000, func(got int) {
					if got > 1<<20 && !once {
						once = true
						mend := cut(t, a, b)
						c.do(f)
						isCut <- mend
					}
				})
			}()
			mend := <-isCut
			until(t, "a fault", a, b, func() bool { return a.downs.Load()+b.downs.Load() > 0 })
			quiet(t, a, b, quick)
			if n := a.switches.Load() + b.switches.Load(); n != 0 {
				t.Errorf("%d switches that could not be agreed on", n)
			}
			mend()
			if err := <-done; err != nil {
				t.Fatal(err)
			}
			if a.switches.Load() == 0 {
				t.Error("no switch")
			}
		})
	}
}

// TestDeadHost: when neither the management network nor a path answers, both ends give
// up and say so, whether bytes were on their way or ranks only waited.
func TestDeadHost(t *testing.T) {
	for _, busy := range []bool{true, false} {
		t.Run(fmt.Sprint("busy ", busy), func(t *testing.T) {
			f := verbstest.New(t, verbstest.Options{Retry: 5 * time.Millisecond})
			a, b := connect(t, f, hasty)
			until(t, "a connection", a, b, func() bool { return on(0, a, b) })
			once := false
			die := func(int) {
				if once {
					return
				}
				once = true
				cut(t, a, b)
				for i := range 4 {
					f.Link(fmt.Sprint("mlx5_", i), 1, fmt.Sprint("mlx5_", i^2), 1).Drop(true)
				}
			}
			var errs [2]error
			if busy {
				var wg sync.WaitGroup
				wg.Go(func() { errs[0] = a.stream(1, 64<<20, 0, die) })
				wg.Go(func() { errs[1] = b.stream(1, 64<<20, 0, nil) })
				wg.Wait()
			} else {
				die(0)
				for deadline := time.Now().Add(patience); (errs[0] == nil || errs[1] == nil) && time.Now().Before(deadline); a.wait() {
					b.Refresh()
					_, errs[0] = a.Recv(make([]byte, 1))
					_, errs[1] = b.Recv(make([]byte, 1))
				}
			}
			for i, err := range errs {
				var paths *PathError
				if !errors.As(err, &paths) || len(paths.Paths) != 2 || !strings.Contains(err.Error(), "management network") {
					t.Errorf("end %d: %v", i, err)
				}
			}
			t.Log(errs[0])
			f.Heal()
		})
	}
}

// TestDeadPeer: the socket of a process that has died ends the connection at once, or
// as soon as the management network is back.
func TestDeadPeer(t *testing.T) {
	for _, outage := range []bool{false, true} {
		t.Run(fmt.Sprint("outage ", outage), func(t *testing.T) {
			opt := quick
			opt.GiveUpAfter = patience
			_, a, b := connected(t, opt)
			mend := func() {}
			if outage {
				mend = cut(t, a)
			}
			_ = b.ctl.(*net.TCPConn).SetLinger(0)
			b.w.Close()
			if outage {
				until(t, "silence", a, b, func() bool { a.Refresh(); return a.silence() > silentAfter+lookEvery })
				if _, err := a.Recv(make([]byte, 1)); err != nil {
					t.Errorf("before the end: %v", err)
				}
			}
			mend()
			var err error
			for deadline := time.Now().Add(patience / 2); err == nil && time.Now().Before(deadline); a.wait() {
				_, err = a.Recv(make([]byte, 1))
			}
			if err == nil || !strings.Contains(err.Error(), "closed by the peer") {
				t.Errorf("the error is %v", err)
			}
		})
	}
}

// TestControlTimeout: the connection's patience with the management network ends, too.
func TestControlTimeout(t *testing.T) {
	opt := quick
	opt.ControlTimeout = 2 * keepEvery
	_, a, b := connected(t, opt)
	cut(t, a, b)
	ms, err := 0, error(nil)
	if ctlErr := a.raw.Control(func(fd uintptr) { ms, err = unix.GetsockoptInt(int(fd), unix.IPPROTO_TCP, unix.TCP_USER_TIMEOUT) }); ctlErr != nil || err != nil || int64(ms) != opt.ControlTimeout.Milliseconds() {
		t.Errorf("the socket lasts for %d ms, %v, %v", ms, ctlErr, err)
	}
	for deadline := time.Now().Add(patience); err == nil && time.Now().Before(deadline); a.wait() {
		b.Refresh()
		_, err = a.Recv(make([]byte, 1))
	}
	if err == nil || errors.Is(err, ErrNoPath) || !strings.Contains(err.Error(), "management network") {
		t.Errorf("the error is %v", err)
	}
}
