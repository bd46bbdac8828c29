package rdma

import (
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"go.uber.org/goleak"
	"golang.org/x/sys/unix"

	"github.com/lockstep-ccl/lockstep/ccl/internal/nic"
	"github.com/lockstep-ccl/lockstep/ccl/internal/verbs"
	"github.com/lockstep-ccl/lockstep/ccl/internal/verbs/verbstest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// patience bounds what must end; it is no measurement.
const patience = 30 * time.Second

// end is one rank of a test: a worker with one connection.
type end struct {
	*Conn
	w     *Worker
	woken chan struct{}

	switches, resent, downs atomic.Int64
	told                    [MaxPaths][PathLeft + 1]atomic.Int64 // how often which state of a path, of all lanes
}

func (e *end) Posted(_, _, _ int, _ uint64) {}
func (e *end) Completed(_, _ int, _ uint64) {}
func (e *end) Received(_, _, _ int)         {}
func (e *end) Switched(_, _ int, n, _ uint64) {
	e.switches.Add(1)
	e.resent.Add(int64(n))
}
func (e *end) Path(_, path int, s State, _, _ uint32) {
	e.told[path][s].Add(1)
	if s == PathDown {
		e.downs.Add(1)
	}
}

// portOf makes what package nic would say of a fabric's port.
func portOf(t testing.TB, f *verbstest.Fabric, device string, num int) nic.Port {
	t.Helper()
	ctx, err := f.Library().Open(device)
	if err != nil {
		t.Fatal(err)
	}
	defer ctx.Close()
	gids, err := ctx.GIDs(num)
	if err != nil {
		t.Fatal(err)
	}
	g := gids[len(gids)-1]
	return nic.Port{Device: device, Num: num, GID: g.GID, Addr: g.GID.Addr()}
}

var quick = Options{Lanes: 2, Window: 64 << 10, FailbackAfter: 50 * time.Millisecond, GiveUpAfter: 300 * time.Millisecond}

// connect makes a connection between mlx5_0, mlx5_1 and mlx5_2, mlx5_3: a
// primary path on rail 0, a backup on rail 1.
func connect(t testing.TB, f *verbstest.Fabric, opt Options) (a, b *end) {
	t.Helper()
	return connectOver(t, []Path{{portOf(t, f, "mlx5_0", 1), portOf(t, f, "mlx5_2", 1)}, {portOf(t, f, "mlx5_1", 1), portOf(t, f, "mlx5_3", 1)}}, opt)
}

// connectOver makes a connection over two paths, as the first end has them.
func connectOver(t testing.TB, paths []Path, opt Options) (a, b *end) {
	t.Helper()
	if err := opt.SetDefaults(); err != nil {
		t.Fatal(err)
	}
	back := []Path{{paths[0].Peer, paths[0].Own}, {paths[1].Peer, paths[1].Own}}
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	dialed, err := net.Dial("tcp", ln.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	accepted, err := ln.Accept()
	if err != nil {
		t.Fatal(err)
	}
	open := func(c net.Conn, p []Path, lower bool) *end {
		e := &end{woken: make(chan struct{}, 1)}
		if e.w, err = NewWorker(opt, func() {
			select {
			case e.woken <- struct{}{}:
			default:
			}
		}); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(e.w.Close)
		if e.Conn, err = e.w.Connect(Config{Control: c, Paths: p, Lower: lower, Lanes: opt.Lanes, Window: opt.Window, Watch: e}); err != nil {
			t.Fatal(err)
		}
		return e
	}
	return open(dialed, paths, true), open(accepted, back, false)
}

// wait sleeps a little until something may have happened.
func (e *end) wait() {
	e.Refresh()
	select {
	case <-e.woken:
	case <-time.After(time.Millisecond):
	}
}

// stream sends n bytes and as many lines as pieces, and receives the same from
// the peer, with an error when anything differs.
func (e *end) stream(seed uint64, n, lines int, progress func(got int)) error {
	deadline := time.Now().Add(patience)
	out := make([]byte, n)
	for i := range out {
		out[i] = byte(uint64(i)*2654435761>>13 + seed)
	}
	in := make([]byte, 0, n)
	buf := make([]byte, 40<<10)
	r := rand.New(rand.NewPCG(seed, 7))
	sent, linesOut, linesIn := 0, 0, 0
	for sent < n || len(in) < n || linesOut < lines || linesIn < lines {
		moved := false
		if sent < n {
			k, _, err := e.Send(out[sent:min(n, sent+1+r.IntN(100<<10))])
			if err != nil {
				return fmt.Errorf("send at %d: %w", sent, err)
			}
			sent += k
			moved = moved || k > 0
		}
		if len(in) < n {
			k, err := e.Recv(buf[:min(len(buf), n-len(in))])
			if err != nil {
				return fmt.Errorf("receive at %d: %w", len(in), err)
			}
			in = append(in, buf[:k]...)
			moved = moved || k > 0
		}
		var line [LineSize]byte
		if linesOut < lines {
			line[0], line[LineSize-1] = byte(linesOut), byte(linesOut>>8)
			ok, _, err := e.WriteLine(&line)
			if err != nil {
				return err
			}
			if ok {
				linesOut++
				moved = true
			}
		}
		if linesIn < lines {
			ok, err := e.ReadLine(&line)
			if err != nil {
				return err
			}
			if ok {
				if line[0] != byte(linesIn) || line[LineSize-1] != byte(linesIn>>8) {
					return fmt.Errorf("line %d is wrong", linesIn)
				}
				linesIn++
				moved = true
			}
		}
		if progress != nil {
			progress(len(in))
		}
		if !moved {
			if time.Now().After(deadline) {
				return fmt.Errorf("no progress: sent %d, received %d of %d, lines %d and %d\n%s", sent, len(in), n, linesOut, linesIn, e.dump())
			}
			e.wait()
		}
	}
	if !slices.Equal(in, out) {
		return errors.New("bytes differ")
	}
	for !e.Finish() {
		if time.Now().After(deadline) {
			return errors.New("never finished\n" + e.dump())
		}
		e.wait()
	}
	return nil
}

func (e *end) dump() string {
	e.w.mu.Lock()
	defer e.w.mu.Unlock()
	s := fmt.Sprintf("err %v gone %v why %v tx %+v rx %d %d\n", e.err, e.gone, e.why, e.m.tx, e.m.rx.got, e.m.rx.front)
	for i := range e.m.lanes {
		l := &e.m.lanes[i]
		s += fmt.Sprintf("lane %d phase %d epoch %d active %d posted %d transmitted %d acked %d received %d told %d\n", i, l.phase, l.epoch, l.active, l.posted, l.transmitted, l.acked, l.received, l.told)
		for p := range l.paths {
			s += fmt.Sprintf("  path %d state %d gen %d", p, l.paths[p].state, l.paths[p].gen)
			if q := e.qps[i][p]; q != nil {
				s += fmt.Sprintf(" qp %d why %v halted %v receives %d signalled %d completed %d", q.qp.Num(), q.why, q.halted, q.receives, q.signalled, q.completed)
			}
			s += "\n"
		}
	}
	return s
}

// both streams both ways at once; progress is a's.
func both(t testing.TB, a, b *end, n, lines int, progress func(got int)) error {
	t.Helper()
	var errs [2]error
	var wg sync.WaitGroup
	wg.Go(func() { errs[0] = a.stream(1, n, lines, progress) })
	wg.Go(func() { errs[1] = b.stream(1, n, lines, nil) })
	wg.Wait()
	return errors.Join(errs[:]...)
}

func TestStream(t *testing.T) {
	for _, inline := range []int{0, 64, -1} {
		t.Run(fmt.Sprint("inline", inline), func(t *testing.T) {
			var devices []verbstest.Device
			for i := range 4 {
				devices = append(devices, verbstest.Device{Name: fmt.Sprint("mlx5_", i), Ports: []verbstest.Port{{Rail: i % 2}}, MaxInline: inline})
			}
			f := verbstest.New(t, verbstest.Options{Devices: devices})
			a, b := connect(t, f, quick)
			if err := both(t, a, b, 4<<20, 2000, nil); err != nil {
				t.Fatal(err)
			}
			if a.switches.Load()+b.switches.Load()+a.downs.Load() != 0 {
				t.Error("a switch with nothing broken")
			}
		})
	}
}

// TestFaults breaks one thing in the middle of a transfer, at either end.
func TestFaults(t *testing.T) {
	type fault struct {
		name     string
		do       func(f *verbstest.Fabric)
		undo     func(f *verbstest.Fabric)
		noSwitch bool
	}
	link := func(f *verbstest.Fabric, from, to string) verbstest.Link { return f.Link(from, 1, to, 1) }
	faults := []fault{
		{name: "port of the lower rank", do: func(f *verbstest.Fabric) { f.SetPort("mlx5_0", 1, false, true) }},
		{name: "port of the higher rank", do: func(f *verbstest.Fabric) { f.SetPort("mlx5_2", 1, false, true) }},
		{name: "port without an event", do: func(f *verbstest.Fabric) { f.SetPort("mlx5_2", 1, false, false) }},
		{name: "one direction", do: func(f *verbstest.Fabric) { link(f, "mlx5_0", "mlx5_2").Drop(true) }},
		{name: "acknowledgements lost", do: func(f *verbstest.Fabric) { link(f, "mlx5_2", "mlx5_0").LoseAcks(true) }},
		{name: "torn writes", do: func(f *verbstest.Fabric) {
			link(f, "mlx5_0", "mlx5_2").TearNext(3)
			f.SetPort("mlx5_0", 1, false, true)
		}},
		{name: "late writes", do: func(f *verbstest.Fabric) { link(f, "mlx5_0", "mlx5_2").Freeze() },
			undo: func(f *verbstest.Fabric) { link(f, "mlx5_0", "mlx5_2").Release() }},
		{name: "sends fail", do: func(f *verbstest.Fabric) { f.FailSends("mlx5_0", 1, verbs.LocalQPError) }},
		{name: "device removed", do: func(f *verbstest.Fabric) { f.Remove("mlx5_0") }},
		{name: "the peer's device removed", do: func(f *verbstest.Fabric) { f.Remove("mlx5_2") }},
		{name: "backup", do: func(f *verbstest.Fabric) { f.SetPort("mlx5_1", 1, false, true) }, noSwitch: true},
		{name: "posting fails", do: func(f *verbstest.Fabric) { f.Fail("ibv_post_send", 12, 1) }},
		{name: "posting receives fails", do: func(f *verbstest.Fabric) { f.Fail("ibv_post_recv", 12, 1) }},
	}
	for _, ft := range faults {
		t.Run(ft.name, func(t *testing.T) {
			f := verbstest.New(t, verbstest.Options{})
			a, b := connect(t, f, quick)
			once, again := false, false
			err := both(t, a, b, 3<<20, 1000, func(got int) {
				if got > 1<<20 && !once {
					once = true
					ft.do(f)
				}
				if got > 2<<20 && !again && ft.undo != nil {
					again = true
					ft.undo(f)
				}
			})
			if err != nil {
				t.Fatal(err)
			}
			if n := a.switches.Load(); (n == 0) != ft.noSwitch {
				t.Errorf("%d switches, %d messages sent again", n, a.resent.Load()+b.resent.Load())
			}
			if f.Heal(); ft.undo != nil {
				ft.undo(f)
			}
		})
	}
}

// until waits for something that happens on its own.
func until(t testing.TB, what string, a, b *end, ok func() bool) {
	t.Helper()
	for deadline := time.Now().Add(patience); !ok(); {
		if time.Now().After(deadline) {
			t.Fatalf("%s never happens\n%s%s", what, a.dump(), b.dump())
		}
		time.Sleep(time.Millisecond)
	}
}

// on reports whether all lanes of both ends run over a path, with the other ready.
func on(path int, ends ...*end) bool {
	for _, e := range ends {
		e.w.mu.Lock()
		for i := range e.m.lanes {
			l := &e.m.lanes[i]
			if l.phase != running || l.active != path || l.paths[0].state != pathLive || l.paths[1].state != pathLive {
				e.w.mu.Unlock()
				return false
			}
		}
		e.w.mu.Unlock()
	}
	return true
}

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
	a, b := connect(t, f, quick)
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

// TestLastWords: an end that has something to tell when the peer has failed hears why, and
// not that its own message could not be sent.
func TestLastWords(t *testing.T) {
	f := verbstest.New(t, verbstest.Options{})
	a, b := connect(t, f, quick)
	if err := both(t, a, b, 1<<20, 0, nil); err != nil {
		t.Fatal(err)
	}
	b.Conn.w.mu.Lock() // its reader waits
	a.Conn.w.mu.Lock()
	a.fail(a.lostPaths())
	a.Conn.w.mu.Unlock()
	for range 50 { // the first is answered by a reset
		b.tell(&message{kind: msgDown, lane: 0, path: 0})
		time.Sleep(time.Millisecond)
	}
	b.Conn.w.mu.Unlock()
	var err error
	for err == nil {
		if _, err = b.Recv(make([]byte, 1)); err == nil {
			b.wait()
		}
	}
	if !errors.Is(err, ErrNoPath) {
		t.Errorf("the error is %v", err)
	}
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
	a, b := connect(t, f, quick)
	err := both(t, a, b, 1<<20, 0, nil)
	if !errors.Is(err, ErrNoPath) || !strings.Contains(err.Error(), "LOCKSTEP_NET=tcp") {
		t.Errorf("the error is %v", err)
	}
	f.Heal()
}

// TestPeerCloses: what was sent before the end is received, then the end is
// told; and breakage after it is no fault of the path.
func TestPeerCloses(t *testing.T) {
	f := verbstest.New(t, verbstest.Options{})
	a, b := connect(t, f, quick)
	if err := both(t, a, b, 1<<20, 10, nil); err != nil {
		t.Fatal(err)
	}
	msg := make([]byte, 1000)
	for sent := 0; sent < len(msg); {
		n, _, err := a.Send(msg[sent:])
		if err != nil {
			t.Fatal(err)
		}
		sent += n
	}
	for !a.Finish() {
		a.wait()
	}
	a.w.Close()
	var err error
	got := 0
	for deadline := time.Now().Add(patience); err == nil && time.Now().Before(deadline); b.wait() {
		var n int
		n, err = b.Recv(msg)
		got += n
	}
	if got != len(msg) || err == nil {
		t.Errorf("received %d bytes, then %v", got, err)
	}
	if b.downs.Load() != 0 {
		t.Error("the end of a connection was told as a path's fault")
	}
}

// TestBadPeer: what no correct peer sends ends the connection with ErrCorrupt.
func TestBadPeer(t *testing.T) {
	offer := message{kind: msgOffer, gen: 1, at: endpoint{qp: 1, mtu: 5, gid: [16]byte{10: 255, 11: 255, 12: 10, 15: 9}}}
	for name, b := range map[string][]byte{
		"version":    {0, 0, 9, 1},
		"kind":       {0, 0, messageVersion, 77},
		"length":     {255, 255, messageVersion, byte(msgFail)},
		"lane":       (&message{kind: msgSwitch, lane: 9, epoch: 1}).append(nil),
		"epoch":      (&message{kind: msgSwitch, epoch: 9}).append(nil),
		"received":   (&message{kind: msgSwitch, epoch: 1, received: 77}).append(nil),
		"generation": (&message{kind: msgOffer, gen: 0}).append(nil),
		"offer":      (&message{kind: msgOffer, gen: 1, at: endpoint{qp: 1 << 30, mtu: 99}}).append(nil),
		"twice":      append(offer.append(nil), offer.append(nil)...),
	} {
		t.Run(name, func(t *testing.T) {
			f := verbstest.New(t, verbstest.Options{})
			ln, err := net.Listen("tcp", "127.0.0.1:0")
			if err != nil {
				t.Fatal(err)
			}
			defer ln.Close()
			peer, err := net.Dial("tcp", ln.Addr().String())
			if err != nil {
				t.Fatal(err)
			}
			defer peer.Close()
			conn, err := ln.Accept()
			if err != nil {
				t.Fatal(err)
			}
			e := &end{woken: make(chan struct{}, 1)}
			if e.w, err = NewWorker(quick, func() {}); err != nil {
				t.Fatal(err)
			}
			defer e.w.Close()
			paths := []Path{{portOf(t, f, "mlx5_0", 1), portOf(t, f, "mlx5_2", 1)}}
			if e.Conn, err = e.w.Connect(Config{Control: conn, Paths: paths, Lanes: 1, Window: 64 << 10, Watch: e}); err != nil {
				t.Fatal(err)
			}
			if _, err := peer.Write(b); err != nil {
				t.Fatal(err)
			}
			for deadline := time.Now().Add(patience); err == nil && time.Now().Before(deadline); e.wait() {
				_, err = e.Recv(make([]byte, 1))
			}
			if !errors.Is(err, ErrCorrupt) {
				t.Errorf("the error is %v", err)
			}
		})
	}
}

// BenchmarkConnect is what a peer costs at both ends: a control socket, memory,
// and the queue pairs of two lanes on two paths.
func BenchmarkConnect(b *testing.B) {
	f := verbstest.New(b, verbstest.Options{})
	for b.Loop() {
		x, y := connect(b, f, quick)
		until(b, "a connection", x, y, func() bool { return on(0, x, y) })
		x.w.Close()
		y.w.Close()
	}
}

// TestKept: bytes in registered memory are sent from where they lie, survive a
// switch, and may be changed as soon as they are settled; freed memory is not
// reached any more.
func TestKept(t *testing.T) {
	f := verbstest.New(t, verbstest.Options{})
	a, b := connect(t, f, quick)
	mem, region := registered(t, 1<<20)
	if _, err := Register(mem[100:200]); err == nil {
		t.Error("a part was registered twice")
	}
	if regionOf(mem[5:]) != region || regionOf(make([]byte, 10)) != nil || regionOf(mem[len(mem)-1:]) != region {
		t.Error("memory is not found, or too much of it is")
	}
	in := make([]byte, len(mem))
	for round := range byte(12) {
		for i := range mem {
			mem[i] = byte(i>>8) + round
		}
		if round == 5 {
			f.Link("mlx5_0", 1, "mlx5_2", 1).TearNext(1)
			f.Link("mlx5_0", 1, "mlx5_2", 1).Freeze()
		}
		sent, got := 0, 0
		for deadline := time.Now().Add(patience); got < len(in) || !a.Settled(); {
			n, _, err := a.SendKept(mem[sent:])
			if err != nil {
				t.Fatal(err)
			}
			sent += n
			k, err := b.Recv(in[got:])
			if err != nil {
				t.Fatal(err)
			}
			if got += k; got == len(in) {
				b.Settled()
			}
			if n+k == 0 {
				a.wait()
				b.Refresh()
			}
			if time.Now().After(deadline) {
				t.Fatalf("sent %d, received %d, settled %v\n%s%s", sent, got, a.Settled(), a.dump(), b.dump())
			}
		}
		a.w.mu.Lock()
		kept := a.m.tx.kept
		a.w.mu.Unlock()
		if kept == 0 {
			t.Fatal("all was copied")
		}
		for i := range in {
			if in[i] != byte(i>>8)+round {
				t.Fatalf("round %d: byte %d is wrong", round, i)
			}
		}
	}
	if a.switches.Load() == 0 || a.resent.Load() == 0 {
		t.Error("nothing was sent again")
	}
	if err := region.Close(); err != nil {
		t.Error(err)
	}
	if n, _, err := a.SendKept(mem[:1<<10]); n == 0 || err != nil {
		t.Errorf("memory that is not registered: %d, %v", n, err)
	}
}

// registered is registered memory of n bytes, until the test ends.
func registered(t *testing.T, n int) ([]byte, *Region) {
	mem, err := unix.Mmap(-1, 0, n, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANON)
	if err != nil {
		t.Fatal(err)
	}
	region, err := Register(mem)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := errors.Join(region.Close(), unix.Munmap(mem)); err != nil {
			t.Error(err)
		}
	})
	return mem, region
}

// TestKeptSettlesAfterSwitch: a rank that ends its operation while no lane can tell
// what it consumed, and does not look again, still tells it.
func TestKeptSettlesAfterSwitch(t *testing.T) {
	f := verbstest.New(t, verbstest.Options{})
	a, b := connect(t, f, quick)
	until(t, "a connection", a, b, func() bool { return on(0, a, b) })
	mem, _ := registered(t, 64<<10)
	if n, _, err := a.SendKept(mem); n != len(mem) || err != nil {
		t.Fatalf("sent %d bytes, %v", n, err)
	}
	until(t, "the bytes", a, b, func() bool { p, _ := b.Peek(len(mem)); return len(p) == len(mem) })
	if a.Settled() {
		t.Fatal("settled before it was consumed")
	}
	b.w.mu.Lock()
	for i := range b.m.lanes {
		b.m.fault(i, b.m.lanes[i].active)
	}
	b.consume(len(mem))
	b.m.release()
	b.w.work()
	b.w.mu.Unlock()
	for deadline := time.Now().Add(patience); !a.Settled(); a.wait() {
		if time.Now().After(deadline) {
			t.Fatalf("never settled\n%s%s", a.dump(), b.dump())
		}
	}
}

// TestEventBeforeConnection: an event of a device that a rank has opened wakes
// nobody before there is a connection, nor after the last.
func TestEventBeforeConnection(t *testing.T) {
	f := verbstest.New(t, verbstest.Options{})
	port := portOf(t, f, "mlx5_0", 1)
	w, err := NewWorker(quick, func() { t.Error("woken") })
	if err != nil {
		t.Fatal(err)
	}
	defer w.Close()
	if err := w.Open(&port); err != nil {
		t.Fatal(err)
	}
	d := w.nics[0].dev
	events := []verbs.Event{{Type: verbs.EventPortError, Port: 1}, {Type: verbs.EventQPFatal}, {Type: verbs.EventCQError}, {Type: verbs.EventDeviceFatal}}
	for _, e := range events {
		d.event(e)
	}
	w.Close()
	w.tell(notice{dev: d, what: verbs.EventDeviceFatal})
}

// TestAbandon: what was lent to a connection that is abandoned may be changed at
// once, though it is on its way; the peer gets none of the change.
func TestAbandon(t *testing.T) {
	f := verbstest.New(t, verbstest.Options{})
	a, b := connect(t, f, quick)
	until(t, "a connection", a, b, func() bool { return on(0, a, b) })
	mem, _ := registered(t, 64<<10)
	if a.Abandon(); a.Settled() != true || a.err != nil {
		t.Fatalf("a connection that lent nothing: %v", a.err)
	}
	f.Link("mlx5_0", 1, "mlx5_2", 1).Freeze()
	if n, _, err := a.SendKept(mem); n != len(mem) || err != nil {
		t.Fatalf("sent %d bytes, %v", n, err)
	}
	downs := a.downs.Load()
	a.Abandon()
	for i := range mem {
		mem[i] = 1
	}
	f.Heal()
	for deadline := time.Now().Add(patience); ; b.wait() {
		p, err := b.Peek(len(mem))
		if slices.Contains(p, 1) {
			t.Fatal("the change has arrived")
		}
		if err != nil {
			if !errors.Is(err, io.EOF) {
				t.Errorf("the peer hears %v, want that this end has closed", err)
			}
			break
		}
		if time.Now().After(deadline) {
			t.Fatal("the peer does not hear of it")
		}
	}
	if _, _, err := a.Send(mem); err == nil || a.downs.Load() != downs {
		t.Errorf("the abandoned end: %v, %d paths called broken", err, a.downs.Load()-downs)
	}
}

// TestKeptWithoutBackup: a send does not look for a device that was removed; it
// copies.
func TestKeptWithoutBackup(t *testing.T) {
	f := verbstest.New(t, verbstest.Options{})
	a, b := connect(t, f, quick)
	until(t, "a connection", a, b, func() bool { return on(0, a, b) })
	_, region := registered(t, 64<<10)
	a.w.mu.Lock()
	defer a.w.mu.Unlock()
	if !a.reaches(region) {
		t.Fatal("not registered with both devices")
	}
	d := a.w.opened("mlx5_1").dev
	d.mu.Lock()
	d.lost = verbs.ErrDeviceLost
	d.mu.Unlock()
	if nics := len(a.w.nics); a.reaches(region) || len(a.w.nics) != nics {
		t.Error("the lost device was looked for")
	}
}
