package rdma

import (
	"errors"
	"io"
	"slices"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/lockstep-ccl/lockstep/ccl/internal/verbs"
	"github.com/lockstep-ccl/lockstep/ccl/internal/verbs/verbstest"
)

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

// TestAbandon: what was sent without a copy on a connection that is abandoned may be changed at
// once, though it is on its way; the peer gets none of the change.
func TestAbandon(t *testing.T) {
	f := verbstest.New(t, verbstest.Options{})
	a, b := connect(t, f, quick)
	until(t, "a connection", a, b, func() bool { return on(0, a, b) })
	mem, _ := registered(t, 64<<10)
	if a.Abandon(); a.Settled() != true || a.err != nil {
		t.Fatalf("a connection that has sent nothing: %v", a.err)
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
