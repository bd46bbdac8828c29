package verbs_test

import (
	"bytes"
	"errors"
	"os"
	"os/exec"
	"slices"
	"testing"
	"time"

	"github.com/lockstep-ccl/lockstep/ccl/internal/verbs"
)

// The tests of this file break links and remove devices, so they run in the
// virtual machine of deploy/rdmavm alone. They check on Soft-RoCE what the
// transport takes for granted of any device, and log what it does besides.

func rails(t *testing.T) {
	t.Helper()
	if os.Getenv("LOCKSTEP_RDMAVM") == "" {
		t.Skip("not in the virtual machine: make test-rdma")
	}
}

func sh(t testing.TB, command string) {
	t.Helper()
	if out, err := exec.Command("sh", "-c", command).CombinedOutput(); err != nil {
		t.Fatalf("%s: %v: %s", command, err, out)
	}
}

// TestRealRXEWrite: lengths, immediates, order and bytes, of every size that a
// chunk may have.
func TestRealRXEWrite(t *testing.T) {
	rails(t)
	a, b := pair(t, 0, 14, 6)
	if got := a.qp.Config(); got.MaxInline < 220 {
		t.Errorf("%d bytes inline, asked for 220", got.MaxInline)
	}
	for i := range a.mem {
		a.mem[i] = byte(i*7 + i>>8)
	}
	sizes := []int{0, 1, 3, 64, 220, 4095, 4096, 4097, 65_537, 256 << 10}
	if _, err := b.qp.PostReceives(9, len(sizes)); err != nil {
		t.Fatal(err)
	}
	at := 0
	for i, n := range sizes {
		w := a.write(b, uint64(i), at, n)
		w.Inline = n <= 220
		w.Signalled = i == len(sizes)-1
		a.post(t, w)
		at += n
	}
	for i, c := range b.completions(t, len(sizes)) {
		if c.Status != verbs.Success || c.Opcode != verbs.OpReceiveWrite || !c.HasImm || c.Imm != uint32(i) || c.Bytes != uint32(sizes[i]) || c.ID != 9 || c.QP != b.qp.Num() {
			t.Errorf("write %d of %d bytes arrived as %+v", i, sizes[i], c)
		}
	}
	if c := a.completions(t, 1)[0]; c.Status != verbs.Success || c.ID != uint64(len(sizes)-1) || c.Opcode != verbs.OpWrite {
		t.Errorf("the signalled write completed as %+v", c)
	}
	if !bytes.Equal(a.mem[:at], b.mem[:at]) || slices.Max(b.mem[at:]) != 0 {
		t.Error("the bytes differ")
	}
}

// TestRealRXERetreat: a queue pair in ERR completes every receive as flushed, and
// lets nothing that arrives later through.
func TestRealRXERetreat(t *testing.T) {
	rails(t)
	a, b := pair(t, 0, 14, 6)
	const receives, chunk = 64, 16 << 10
	for i := range a.mem {
		a.mem[i] = 1
	}
	if _, err := b.qp.PostReceives(0, receives); err != nil {
		t.Fatal(err)
	}
	var w []verbs.Write
	for i := range receives {
		w = append(w, a.write(b, uint64(i), i*chunk, chunk))
		w[i].Signalled = i%8 == 7
	}
	posted := make(chan error, 1)
	go func() {
		_, err := a.qp.PostWrites(w)
		posted <- err
	}()
	first := b.completions(t, 3) // the rest is on its way
	began := time.Now()
	if err := b.qp.SetError(); err != nil {
		t.Fatal(err)
	}
	rest := b.completions(t, receives-len(first))
	drained := time.Since(began)
	if err := <-posted; err != nil {
		t.Fatal(err)
	}
	received := 0
	for i, c := range append(first, rest...) {
		switch {
		case c.Status == verbs.Success && received == i:
			if c.Imm != uint32(i) || c.Bytes != chunk {
				t.Errorf("completion %d is %+v", i, c)
			}
			received++
		case c.Status != verbs.Flushed:
			t.Errorf("completion %d is %+v", i, c)
		}
	}
	// Nothing late: what b has now it has for good. Writes that were not counted
	// may have arrived in part.
	snapshot := slices.Clone(b.mem)
	sent := a.completions(t, 1)
	failed := time.Since(began)
	for i := range a.mem {
		a.mem[i] = 2
	}
	time.Sleep(500 * time.Millisecond)
	if !bytes.Equal(snapshot, b.mem) {
		t.Error("memory changed after the last receive was flushed")
	}
	if n := must(b.cq.Poll(make([]verbs.Completion, 8)))(t); n != 0 {
		t.Errorf("%d completions after the last flushed receive", n)
	}
	transmitted := 0
	last := sent[0]
	for all := sent; ; {
		for _, c := range all {
			if c.Status == verbs.Success {
				transmitted = int(c.ID) + 1
			}
			last = c
		}
		if last.ID == receives-1 {
			break
		}
		all = a.completions(t, 1)
	}
	if transmitted > received {
		t.Errorf("the sender's device acknowledged %d writes, the receiver counted %d", transmitted, received)
	}
	touched := 0
	for touched < receives && b.mem[touched*chunk] != 0 {
		touched++
	}
	t.Logf("drained in %v: %d received, %d written, %d acknowledged; the sender's first completion after %v, last %v", drained, received, touched, transmitted, failed, last.Status)

	// The sender's side of a retreat: unsignalled writes complete too, as flushed.
	a2, b2 := pair(t, 1, 14, 6)
	sh(t, "tc qdisc add dev a1 root netem loss 100%")
	if _, err := b2.qp.PostReceives(0, 8); err != nil {
		t.Fatal(err)
	}
	w = w[:0]
	for i := range 8 {
		w = append(w, a2.write(b2, uint64(i), i*chunk, chunk))
		w[i].Signalled = i == 7
	}
	a2.post(t, w...)
	if err := a2.qp.SetError(); err != nil {
		t.Fatal(err)
	}
	var flushed []verbs.Completion
	for len(flushed) == 0 || flushed[len(flushed)-1].ID != 7 {
		flushed = append(flushed, a2.completions(t, 1)...)
	}
	t.Logf("of 8 writes, 7 of them unsignalled, %d completed when the sender's queue pair moved to ERR: %s", len(flushed), statuses(flushed))
	if n, err := a2.qp.PostWrites([]verbs.Write{a2.write(b2, 99, 0, 8)}); err == nil {
		if c := a2.completions(t, 1)[0]; c.Status != verbs.Flushed || c.ID != 99 {
			t.Errorf("a write posted in ERR completed as %+v", c)
		}
	} else {
		t.Logf("a write posted in ERR: %d posted, %v", n, err)
	}
	sh(t, "rails up 1")
}

// TestRealRXEFaults: how a device tells of a path that is gone.
func TestRealRXEFaults(t *testing.T) {
	rails(t)
	for _, f := range []struct {
		name, fault string
		port        bool // the ports notice
	}{
		{"all that A sends is lost", "tc qdisc add dev a0 root netem loss 100%", false},
		{"all acknowledgements are lost", "tc qdisc add dev b0 root netem loss 100%", false},
		{"the peer's link is down", "ip link set b0 down", true},
		{"the own link is down", "ip link set a0 down", true},
	} {
		t.Run(f.name, func(t *testing.T) {
			a, b := pair(t, 0, 14, 6)
			before := a.gid(t)
			if _, err := b.qp.PostReceives(0, 8); err != nil {
				t.Fatal(err)
			}
			a.post(t, a.write(b, 1, 0, 64))
			a.completions(t, 1)
			b.completions(t, 1)

			began := time.Now()
			sh(t, f.fault)
			posted := time.Now()
			a.post(t, a.write(b, 2, 64, 64), a.write(b, 3, 128, 64))
			c := a.completions(t, 2)
			if c[0].Status == verbs.Success || c[0].ID != 2 || c[1].Status != verbs.Flushed {
				t.Errorf("the writes completed as %+v", c)
			}
			t.Logf("the fault took %v; the first write failed %v after its post with %v (vendor %#x)", posted.Sub(began), time.Since(posted), c[0].Status, c[0].VendorErr)
			if s := must(a.qp.State())(t); s != verbs.StateError {
				t.Errorf("the sender's queue pair is in %v", s)
			}
			t.Logf("the receiver's queue pair is in %v", must(b.qp.State())(t))
			// Losses alone are nobody's event; a port's goes to both ends.
			for _, s := range []*side{a, b} {
				var want []verbs.EventType
				if f.port {
					want = []verbs.EventType{verbs.EventPortError}
				}
				t.Logf("%s: events %v", s.name, s.events(t, want...))
				state := must(s.ctx.Port(1))(t).State
				if (state == verbs.PortActive) == f.port {
					t.Errorf("%s: port is %v", s.name, state)
				}
				t.Logf("%s: port %v, GIDs %v", s.name, state, must(s.ctx.GIDs(1))(t))
			}
			sh(t, "rails up 0")
			if f.port {
				for _, s := range []*side{a, b} {
					t.Logf("%s: events %v", s.name, s.events(t, verbs.EventPortActive))
				}
			}
			if after := a.gid(t); after.GID != before.GID {
				t.Errorf("the GID was %v and is %v", before, after)
			} else {
				t.Logf("the GID's index was %d and is %d", before.Index, after.Index)
			}

			// A new pair of queue pairs on the same objects works at once.
			for _, s := range []*side{a, b} {
				old := s.qp
				s.newQP(t)
				if err := old.Close(); err != nil {
					t.Fatal(err)
				}
				drain(t, s)
			}
			connect(t, a, b, 14, 6)
			if _, err := b.qp.PostReceives(0, 1); err != nil {
				t.Fatal(err)
			}
			a.post(t, a.write(b, 4, 0, 64))
			if c := a.completions(t, 1)[0]; c.Status != verbs.Success {
				t.Errorf("after the fault: %+v", c)
			}
			b.completions(t, 1)
		})
	}
}

// drain throws completions of a closed queue pair away.
func drain(t *testing.T, s *side) {
	t.Helper()
	out := make([]verbs.Completion, depth)
	for must(s.cq.Poll(out))(t) > 0 {
	}
}

// TestRealRXEFlap: a queue pair outlives a fault that is shorter than its retries.
func TestRealRXEFlap(t *testing.T) {
	rails(t)
	for _, f := range []struct{ name, fault string }{
		{"lossy", "tc qdisc add dev a0 root netem loss 100%; sleep 0.1"},
		{"carrier", "ip link set b0 down"},
	} {
		t.Run(f.name, func(t *testing.T) {
			a, b := pair(t, 0, 14, 6)
			if _, err := b.qp.PostReceives(0, 8); err != nil {
				t.Fatal(err)
			}
			sh(t, f.fault)
			began := time.Now()
			a.post(t, a.write(b, 1, 0, 64))
			sh(t, "rails up 0")
			c := a.completions(t, 1)[0]
			t.Logf("after a flap of about %v the write completed as %v", time.Since(began), c.Status)
		})
	}
}

// TestRealRXELossy: the device makes good for what a link loses, in order.
func TestRealRXELossy(t *testing.T) {
	rails(t)
	a, b := pair(t, 0, 14, 6)
	for i := range a.mem {
		a.mem[i] = byte(i*3 + i>>9)
	}
	sh(t, "tc qdisc add dev a0 root netem loss 3%; tc qdisc add dev b0 root netem loss 3%")
	const n, chunk = 64, memory / 64
	if _, err := b.qp.PostReceives(0, n); err != nil {
		t.Fatal(err)
	}
	var w []verbs.Write
	for i := range n {
		w = append(w, a.write(b, uint64(i), i*chunk, chunk))
	}
	began := time.Now()
	a.post(t, w...)
	for i, c := range b.completions(t, n) {
		if c.Status != verbs.Success || c.Imm != uint32(i) || c.Bytes != chunk {
			t.Errorf("write %d arrived as %+v", i, c)
		}
	}
	for i, c := range a.completions(t, n) {
		if c.Status != verbs.Success || c.ID != uint64(i) {
			t.Errorf("write %d completed as %+v", i, c)
		}
	}
	if !bytes.Equal(a.mem, b.mem) {
		t.Error("the bytes differ")
	}
	t.Logf("%d bytes in %v", memory, time.Since(began))
	sh(t, "rails up 0")
}

// TestRealRXERemoved: what is left of a device that is removed while it is used.
// Its driver's removal waits until all is closed, and existing queue pairs go on;
// the removal of the interface that it is on ends them.
func TestRealRXERemoved(t *testing.T) {
	rails(t)
	for _, removal := range []struct {
		command string
		works   bool
	}{{"rdma link delete rxa0", true}, {"ip link delete a0", false}} {
		t.Run(removal.command, func(t *testing.T) {
			removed := make(chan error, 1)
			t.Cleanup(func() { // after the device was closed
				select {
				case err := <-removed:
					if err != nil {
						t.Errorf("%s: %v", removal.command, err)
					}
				case <-time.After(soon):
					t.Errorf("%s has not ended", removal.command)
				}
				sh(t, "rails new 0")
			})
			a, b := pair(t, 0, 14, 6)
			lib := must(verbs.Load())(t)
			for _, s := range []*side{a, b} {
				if _, err := s.qp.PostReceives(0, 4); err != nil {
					t.Fatal(err)
				}
			}
			began := time.Now()
			go func() { removed <- exec.Command("sh", "-c", removal.command).Run() }()
			// The name goes first; the rest may wait until all is closed.
			for slices.ContainsFunc(must(lib.Devices())(t), func(d verbs.Device) bool { return d.Name == a.name }) {
				if time.Since(began) > soon {
					t.Fatalf("the device is listed %v after its removal", soon)
				}
				time.Sleep(10 * time.Millisecond)
			}
			t.Logf("the device is gone from the list after %v", time.Since(began))
			if _, err := lib.Open(a.name); !errors.Is(err, verbs.ErrNoDevice) {
				t.Errorf("to open it again answers %v", err)
			}
			n := must(a.cq.Poll(make([]verbs.Completion, 8)))(t)
			port, portErr := a.ctx.Port(1)
			t.Logf("of 4 receives %d were flushed; the port is %v (%v); events %v, the peer's %v", n, port.State, portErr, a.events(t), b.events(t))
			for _, e := range [][2]*side{{a, b}, {b, a}} {
				posted := time.Now()
				e[0].post(t, e[0].write(e[1], 5, 0, 64))
				w := e[0].completions(t, 1)[0]
				for removal.works && w.Opcode != verbs.OpWrite { // the other's write
					w = e[0].completions(t, 1)[0]
				}
				if works := w.Status == verbs.Success; works != removal.works {
					t.Errorf("%s: a write completed as %v", e[0].name, w.Status)
				}
				t.Logf("%s: a write completed after %v with %v", e[0].name, time.Since(posted), w.Status)
			}
			if err := a.qp.SetError(); err != nil && !errors.Is(err, verbs.ErrDeviceLost) {
				t.Errorf("a move to ERR answers %v", err)
			}
			// A retreat counts what was received: that needs the flushed receives.
			for i, c := range a.completions(t, 4) {
				if received := removal.works && i == 0; !received && c.Status != verbs.Flushed {
					t.Errorf("receive %d completed as %+v", i, c)
				}
			}
		})
	}
}
