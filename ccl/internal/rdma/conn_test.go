package rdma

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/lockstep-ccl/lockstep/ccl/internal/nic"
	"github.com/lockstep-ccl/lockstep/ccl/internal/verbs"
	"github.com/lockstep-ccl/lockstep/ccl/internal/verbs/verbstest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// patience bounds what must end; it is no measurement.
const patience = 2 * time.Minute

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

// quick waits for longer than a busy machine keeps this process from running, fabric and all; hasty,
// which is for connections that are to end, does not.
var (
	quick = Options{Lanes: 2, Window: 64 << 10, FailbackAfter: 50 * time.Millisecond, GiveUpAfter: 3 * time.Second, Stuck: 5 * time.Second}
	hasty = Options{Lanes: 2, Window: 64 << 10, FailbackAfter: 50 * time.Millisecond, GiveUpAfter: 300 * time.Millisecond}
)

// connect makes a connection between mlx5_0, mlx5_1 and mlx5_2, mlx5_3: a
// primary path on rail 0, a backup on rail 1.
func connect(t testing.TB, f *verbstest.Fabric, opt Options) (a, b *end) {
	t.Helper()
	return connectOver(t, []Path{{portOf(t, f, "mlx5_0", 1), portOf(t, f, "mlx5_2", 1)}, {portOf(t, f, "mlx5_1", 1), portOf(t, f, "mlx5_3", 1)}}, opt)
}

// connectOver makes a connection over two paths, as the first end has them.
func connectOver(t testing.TB, paths []Path, opt Options) (a, b *end) {
	t.Helper()
	return connectWith(t, opt, Config{Paths: paths}, Config{})
}

// connectWith makes a connection whose ends have what the configurations say besides.
func connectWith(t testing.TB, opt Options, one, other Config) (a, b *end) {
	t.Helper()
	if err := opt.SetDefaults(); err != nil {
		t.Fatal(err)
	}
	for _, p := range one.Paths {
		other.Paths = append(other.Paths, Path{p.Peer, p.Own})
	}
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
	open := func(c net.Conn, cfg Config) *end {
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
		cfg.Control, cfg.Lanes, cfg.Window, cfg.Watch = c, opt.Lanes, opt.Window, e
		if e.Conn, err = e.w.Connect(cfg); err != nil {
			t.Fatal(err)
		}
		return e
	}
	one.Lower = true
	return open(dialed, one), open(accepted, other)
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
